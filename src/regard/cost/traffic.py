"""Bytes that one attention moves between slow and fast memory, by two algorithms of Dao et al. 2022, arXiv:2205.14135.

Theorem 2: standard attention makes Θ(n d + n²) accesses of slow memory, tiled attention Θ(n² d² / M), with M elements
of fast memory. The functions count the loads and stores of the two algorithms exactly, not up to a constant.
"""

from typing import NamedTuple

from regard.cost.model import Attention


class Traffic(NamedTuple):
    """Bytes moved.

    Attributes:
        least: q, out, and the keys and values that are seen, each once.
        tiled: algorithm 1 of the paper, tiles without kept pairs skipped.
        naive: algorithm 0: scores and weights are written and read, whatever is masked.
    """

    least: int
    tiled: int
    naive: int


def naive_elements(queries: int, keys: int, qk_dim: int, v_dim: int) -> int:
    """Algorithm 0, of one head: read q and k, write S; read S, write P; read P and v, write the output.

    >>> naive_elements(1024, 1024, 64, 64)
    4456448
    """
    return (queries + keys) * (qk_dim + v_dim) + 4 * queries * keys


def tiled_elements(queries: int, keys: int, qk_dim: int, v_dim: int, fast: int, pairs: int | None = None) -> int:
    """Algorithm 1, of one head: keys and values once; for each tile of keys all queries, outputs and their statistics.

    Args:
        fast: M, elements of fast memory; a tile has M / 4 d keys.
        pairs: kept pairs, where a query skips tiles in which it sees nothing (proposition 4): at most one tile for each
            query more than its keys fill. None: every pair is kept.

    >>> tiled_elements(1024, 1024, 64, 64, fast=2**16)
    933888
    """
    tile = max(1, fast // (4 * max(qk_dim, v_dim)))
    visits = queries * -(-keys // tile)  # of a query to a tile of keys
    if pairs is not None:
        visits = min(visits, -(-pairs // tile) + queries)
    statistics = 4  # the maximum and the sum of each row, read and written
    return keys * (qk_dim + v_dim) + visits * (qk_dim + 2 * v_dim + statistics)


def attention_traffic(a: Attention, *, queries: int, keys: int, batch: int, item: int, fast_memory: int) -> Traffic:
    """Bytes of all heads of one layer. Both algorithms read keys and values once for each query head and call.

    Args:
        fast_memory: M in bytes.
    """
    heads = batch * a.heads * a.calls
    seen = a.pattern.keys_seen(queries=queries, keys=keys)
    pairs = a.pattern.pairs(queries=queries, keys=keys)
    least = batch * (queries * a.heads * (a.qk_dim + a.calls * a.v_dim) + seen * a.kv_heads * (a.qk_dim + a.v_dim))
    tiled = heads * tiled_elements(queries, keys, a.qk_dim, a.v_dim, fast_memory // item, pairs)
    naive = heads * naive_elements(queries, keys, a.qk_dim, a.v_dim)
    return Traffic(least * item, tiled * item, naive * item)
