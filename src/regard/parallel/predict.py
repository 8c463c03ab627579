"""Time and traffic of a model's attention over sequences that are sharded over ranks, before anything runs.

Ring: at each step a rank computes with the keys and values that it has while it sends them on, and ranks wait for one
another, so a step takes the longest of all computations and all sends, and the ring the sum of its steps. What a step
computes are the exact pairs of `rank_pairs`; blocks travel as `Route` says, which `ring_attend` follows, so empty
rectangles cost nothing.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): two all-to-all exchanges, of queries, keys and values before the
attention and of its states after it. Neither overlaps with computation.

Computations take the roofline of one rank's machine, sends their bytes at the bandwidth of a link in one direction.
The start of a message is not counted. Nothing of torch is imported.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, cast

import numpy as np

from regard.cost.machine import Machine
from regard.cost.model import Attention
from regard.cost.model_cost import ModelCost
from regard.cost.products import attention_flops
from regard.cost.storage import item_bytes
from regard.cost.work import forward, prompt_call
from regard.errors import ProblemError
from regard.integers import is_integer
from regard.parallel.layout import Layout, even_parts
from regard.parallel.pair_counts import pair_counts, rank_pairs
from regard.parallel.route import ring_steps

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
STRIPE = 64
"""Tokens of a stripe: kernels compute tiles of 64."""


@dataclass(frozen=True)
class Link:
    """The connection of a rank to the others: bytes/s in each direction."""

    bandwidth: float

    def __post_init__(self) -> None:
        rate = self.bandwidth
        if not isinstance(cast(object, rate), Real) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise ProblemError(f"link of {rate!r} bytes/s: expected a finite number above 0, such as 100e9.")


class Sharded(NamedTuple):
    """The attention of all layers on sharded sequences, for one prompt.

    Attributes:
        name: "ring" with its layout, or "Ulysses".
        seconds: of the attention, with its communication.
        compute_seconds: the part of `seconds` that a rank without a link to wait for would need.
        sent_bytes: bytes that the rank sends that sends most.
        balance: work of the rank with most of it, as a multiple of the mean.
        buffer_bytes: bytes of messages that a rank holds at once.
        prompt_seconds: of the whole prompt: the other parts have an even share of the tokens.
        memory_bytes: bytes of a rank: all weights, its share of the cache, and the buffers.
    """

    name: str
    seconds: float
    compute_seconds: float
    sent_bytes: int
    balance: float
    buffer_bytes: int
    prompt_seconds: float
    memory_bytes: int


def shardings(c: ModelCost, ranks: int, link: Link) -> Iterator[Sharded]:
    """The ring in each layout, and Ulysses.

    Args:
        c: of one rank's machine.

    Raises:
        ProblemError: there is no machine, the model has no causal attention, or an argument is of another type.

    >>> from regard.cost import cost
    >>> c = cost("llama-3-1-8b", context=1 << 17, machine="h100")
    >>> [(s.name, round(s.balance, 2)) for s in shardings(c, 4, Link(100e9))][:2]
    [('ring, contiguous', 1.75), ('ring, zigzag', 1.0)]
    """
    return _shardings(c, _checked_machine(c, ranks, link), ranks, link)


def _shardings(c: ModelCost, machine: Machine, ranks: int, link: Link) -> Iterator[Sharded]:
    kinds = Counter(layer.attention for layer in c.model.layers if layer.attention)
    for name in LAYOUTS:
        yield _ring(c, machine, kinds, layout_of(name, c, ranks), name, link)
    yield _ulysses(c, machine, kinds, ranks, link)


def _checked_machine(c: ModelCost, ranks: int, link: Link) -> Machine:
    """The machine of a rank.

    Raises:
        ProblemError: the model cannot be sharded over these ranks, or an argument is of another type.
    """
    for name, value, kind in (("c", c, ModelCost), ("link", link, Link)):
        if not isinstance(cast(object, value), kind):
            made = 'cost("llama-3-1-8b", machine="h100")' if kind is ModelCost else "Link(100e9)"
            raise ProblemError(f"{name} is {value!r}: expected a {kind.__name__}, such as {made}.")
    if c.machine is None:
        raise ProblemError(f"{c.model.name} on several ranks: give the machine of a rank.")
    if c.model.encoder or any(layer.recurrent for layer in c.model.layers):
        raise ProblemError(
            f"{c.model.name} on several ranks: expected layers of attention alone; cross-attention and states, which "
            "pass from rank to rank, are not counted."
        )
    if not is_integer(ranks, least=2) or ranks > c.context:
        raise ProblemError(f"{ranks!r} ranks for {c.context:,} tokens: expected 2 ranks or more, and a token for each.")
    return c.machine


def layout_of(name: str, c: ModelCost, ranks: int) -> Layout:
    """The layout of a name; the balanced one is for the attention with most pairs."""
    if name == "balanced":
        patterns = [layer.attention.pattern for layer in c.model.layers if layer.attention]
        return Layout.balanced(
            c.context, ranks, max(patterns, key=lambda p: p.pairs(queries=c.context, keys=c.context))
        )
    if name == "striped":
        return Layout.striped(c.context, ranks, block=STRIPE if c.context >= STRIPE * ranks else 1)
    return {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}[name](c.context, ranks)


def block_bytes(a: Attention, tokens: int, c: ModelCost) -> int:
    """Bytes of the keys and values of some tokens, of all rows; latents travel expanded."""
    return c.batch * tokens * a.kv_heads * (a.qk_dim + a.v_dim) * item_bytes(c.dtype)


# ---- ring -----------------------------------------------------------------------------------------------------------


def _ring(c: ModelCost, machine: Machine, kinds: Counter[Attention], layout: Layout, name: str, link: Link) -> Sharded:
    seconds, computing, sent, buffers = 0.0, 0.0, np.zeros(layout.ranks), 0
    work = np.zeros(layout.ranks)
    counts = np.array(layout.counts)
    tables = {p: rank_pairs(pair_counts(p, c.context), layout) for p in {a.pattern for a in kinds}}
    for a, layers in kinds.items():
        steps = ring_steps(tables[a.pattern], layout.counts)
        flops = a.calls * attention_flops(1, a.qk_dim, a.v_dim) * c.batch * a.heads * steps.pairs
        rows = c.batch * a.heads * counts * (a.qk_dim + a.calls * a.v_dim) * item_bytes(c.dtype)
        moved = rows * (steps.read > 0) + steps.read * a.calls * block_bytes(a, 1, c)
        compute = np.maximum(flops / machine.peak(c.dtype), moved / machine.bandwidth)
        sending = steps.sent * a.calls * block_bytes(a, 1, c)
        seconds += layers * float(np.maximum(compute, sending / link.bandwidth).max(axis=1).sum())
        computing += layers * float(compute.max(axis=1).sum())
        sent += layers * sending.sum(axis=0)
        work += layers * flops.sum(axis=0)
        buffers = max(buffers, 2 * int(sending.max()) // a.calls)  # what goes, and what arrives meanwhile
    balance = float(work.max() / work.mean()) if work.any() else 1.0
    return _whole(c, layout.ranks, f"ring, {name}", (seconds, computing), int(sent.max()), balance, buffers)


# ---- Ulysses --------------------------------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """Bytes that each rank sends: queries, keys and values to the ranks of their heads, and outputs back to tokens."""

    to_heads: list[int]
    to_tokens: list[int]


def exchanged(a: Attention, counts: Sequence[int], c: ModelCost) -> Exchange:
    """What `ulysses_attend` sends, for one layer.

    Heads are shared as evenly as they can; a key head goes to each rank that has a query head of it. Outputs travel as
    states: in float32 or wider, with a log-sum-exp for each row.

    Args:
        counts: tokens of each rank.
    """
    ranks, item = len(counts), item_bytes(c.dtype)
    heads = even_parts(a.heads, ranks)
    kv = [kv_heads_of(each, a) for each in heads]
    sizes = [len(h) * a.qk_dim + len(k) * (a.qk_dim + a.v_dim) for h, k in zip(heads, kv, strict=True)]
    row = (a.v_dim + 1) * max(item, STATE_ITEM)
    return Exchange(
        [a.calls * c.batch * n * (sum(sizes) - own) * item for n, own in zip(counts, sizes, strict=True)],
        [a.calls * c.batch * (sum(counts) - n) * len(h) * row for n, h in zip(counts, heads, strict=True)],
    )


STATE_ITEM = 4
"""Bytes of an element of a state of types of 4 bytes or fewer."""


def kv_heads_of(heads: range, a: Attention) -> range:
    """The key heads of query heads."""
    group = a.heads // a.kv_heads
    return range(heads.start // group, (heads.stop - 1) // group + 1) if heads else range(0)


def _ulysses(c: ModelCost, machine: Machine, kinds: Counter[Attention], ranks: int, link: Link) -> Sharded:
    counts = Layout.contiguous(c.context, ranks).counts
    seconds, computing, sent, buffers = 0.0, 0.0, np.zeros(ranks), 0
    most, mean = 0.0, 0.0
    for a, layers in kinds.items():
        heads = even_parts(a.heads, ranks)[0]  # the first rank has as many as any
        pairs = a.pattern.pairs(queries=c.context, keys=c.context)
        flops = a.calls * attention_flops(c.batch * len(heads) * pairs, a.qk_dim, a.v_dim)
        rows = len(heads) * (a.qk_dim + a.calls * a.v_dim) + len(kv_heads_of(heads, a)) * (a.qk_dim + a.v_dim)
        moved = c.batch * c.context * rows * item_bytes(c.dtype)
        sending = exchanged(a, counts, c)
        computing += layers * machine.seconds(flops, moved, c.dtype)
        seconds += layers * sum(max(each) for each in sending) / link.bandwidth
        sent += layers * np.array(sending).sum(axis=0)
        buffers = max(buffers, moved)
        most, mean = most + layers * flops, mean + layers * flops / len(heads) * a.heads / ranks
    times = (seconds + computing, computing)
    return _whole(c, ranks, "Ulysses", times, int(sent.max()), most / mean if mean else 1.0, buffers)


# ---- the model ------------------------------------------------------------------------------------------------------


def _whole(
    c: ModelCost, ranks: int, name: str, times: tuple[float, float], sent: int, balance: float, buffers: int
) -> Sharded:
    parts = forward(c.model, prompt_call(-(-c.context // ranks), batch=c.batch, dtype=c.dtype, storage=c.storage))
    assert c.machine is not None
    others = sum(c.machine.seconds(w.flops, w.moved, c.dtype) for part, w in parts.each.items() if part != "attention")
    cache = -(-(c.cache_bytes - c.state_bytes) // ranks) + c.state_bytes
    return Sharded(name, *times, sent, balance, buffers, times[0] + others, c.weight_bytes + cache + buffers)
