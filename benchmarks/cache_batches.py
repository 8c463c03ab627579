"""Batches of a server: rows of different lengths in one call, and sequences that share a prefix."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import table
from regard import Causal, KeyLengths, attend
from regard.bench.rounds import Effort, Measure, Rounds, interleaved, timed
from regard.cache.pool import PagePool
from regard.cli.durations import call_duration
from regard.shared_prefix import attend_shared
from regard.storage.codec import Codec, Int8
from regard.storage.stored import StoredTensor

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
LENGTHS = tuple(range(1024, 8193, 1024))
PREFIX, OWN, SHARERS = 4096, 64, 16
TYPE = torch.bfloat16


def _new(rows: int, heads: int, tokens: int) -> Tensor:
    return torch.randn(rows, heads, tokens, DIM).to(TYPE)


def _pool(codec: Codec | None) -> PagePool:
    return PagePool(page=PAGE if codec is None else 2 * PAGE, codec=codec)


def _read(pool: PagePool, sequences: Sequence[Any]) -> tuple[StoredTensor, StoredTensor]:
    """The stored keys and values of these sequences."""
    rows = len(sequences)
    return pool.append(list(sequences), _new(rows, KV_HEADS, 0), _new(rows, KV_HEADS, 0))


# ---- rows of different lengths --------------------------------------------------------------------------------------


def ragged(lengths: Sequence[int], effort: Effort) -> str:
    """The table of one query a row, where the rows have different numbers of keys."""
    rows, longest = len(lengths), max(lengths)
    q = _new(rows, HEADS, 1)
    measures: dict[str, Measure] = {}
    for name, codec in (("Paged, bf16", None), ("Paged, Int8()", Int8())):
        pool = _pool(codec)
        sequences = [pool.sequence() for _ in lengths]
        for sequence, tokens in zip(sequences, lengths, strict=True):
            pool.append([sequence], _new(1, KV_HEADS, tokens), _new(1, KV_HEADS, tokens))
        measures[f"{name}, one call"] = timed(_call(q, _read(pool, sequences)))
        measures[f"{name}, row by row"] = timed(_calls(q, [_read(pool, [one]) for one in sequences]))
    k, v = _new(rows, KV_HEADS, longest), _new(rows, KV_HEADS, longest)
    kept = torch.tensor(lengths)
    keep = (torch.arange(longest) < kept[:, None])[:, None, None]
    padding = KeyLengths(kept)
    measures["padded tensors, bf16, KeyLengths"] = timed(lambda: attend(q, k, v, mask=padding))
    measures["torch sdpa, padded, bool mask"] = timed(
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
    )
    return _results_table(measures, effort, "Paged, bf16, one call")


def _call(q: Tensor, found: tuple[Any, Any]) -> Callable[[], Tensor]:
    return lambda: attend(q, *found, mask=Causal())


def _calls(q: Tensor, found: Sequence[tuple[Any, Any]]) -> Callable[[], list[Tensor]]:
    return lambda: [attend(q[row : row + 1], *one, mask=Causal()) for row, one in enumerate(found)]


def _results_table(measures: dict[str, Measure], effort: Effort, first: str) -> str:
    rounds: Rounds = interleaved(measures, effort)
    rows: list[tuple[str, ...]] = []
    for name in measures:
        seconds = rounds.median(lambda t: t, name)
        ratio = rounds.median(lambda t, ours: t / ours, name, first)
        rows.append((name, call_duration(math.nan if seconds is None else seconds), f"{ratio or math.nan:.2f}x"))
    return table(("", "time", "of the first"), rows)


# ---- a shared prefix ------------------------------------------------------------------------------------------------


def shared(sharers: int, prefix: int, own: int, effort: Effort) -> str:
    """The table of one query a row, where all rows begin with the same tokens."""
    pool, q = _pool(None), _new(sharers, HEADS, 1)
    first = pool.sequence()
    pool.append([first], _new(1, KV_HEADS, prefix), _new(1, KV_HEADS, prefix))
    sequences = [first, *(first.fork() for _ in range(sharers - 1))]
    pool.append(sequences, _new(sharers, KV_HEADS, own), _new(sharers, KV_HEADS, own))
    found = _read(pool, sequences)
    copies = _new(sharers, KV_HEADS, prefix + own), _new(sharers, KV_HEADS, prefix + own)
    measures = {
        "attend_shared, Paged(16)": timed(lambda: attend_shared(q, *found, mask=Causal())),
        "attend, Paged(16), shared pages": timed(_call(q, found)),
        "attend, a copy of the prefix a row": timed(_call(q, copies)),
    }
    return _results_table(measures, effort, "attend_shared, Paged(16)")
