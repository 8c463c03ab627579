"""A stream of a million tokens through one rolling cache: the time of a step must not grow with the tokens before it.

One layer of SmolLM2-135M's sizes with a window and sinks; RoPE rotates random keys to their true positions. Every step
is run. At some marks the output is compared with the definition: the same tokens rotated to their positions inside the
cache, in float64.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.report import table
from regard import Causal, Rope, attend
from regard.cache.kv_cache import KVCache
from regard.cli.durations import call_duration
from regard.storage.stored import Rolling

HEADS, KV_HEADS, DIM = 9, 3, 64
WINDOW, SINKS = 1024, 4
ROPE = Rope(DIM, base=100_000.0)
MARKS = (2_000, 10_000, 100_000, 1_000_000)
BLOCK = 1_000
"""Tokens that are generated and timed together."""

LAST = 5
"""Blocks before a mark whose median is its time."""


class Mark(NamedTuple):
    """After `tokens` tokens: seconds of a step, allocated bytes, and the relative error of the last output."""

    tokens: int
    seconds: float
    allocated: int
    error: float


class _Block(NamedTuple):
    """q, k and v of some tokens before RoPE: [1, heads, tokens, dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def new() -> "_Block":
        return _Block(*(torch.randn(1, heads, BLOCK, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))


def stream(
    marks: Sequence[int] = MARKS, window: int = WINDOW, tell: Callable[[int], None] = lambda tokens: None
) -> list[Mark]:
    """Run all steps up to the last mark; each mark a multiple of 1,000 and more than the window."""
    cache = KVCache(Rolling(window, SINKS, ROPE))
    found: list[Mark] = []
    times: list[float] = []
    first, before, block = _Block.new(), _Block.new(), _Block.new()
    for start in range(0, max(marks), BLOCK):
        before, block = block, first if start == 0 else _Block.new()
        seconds, out = _steps(cache, block, start)
        times.append(seconds)
        tell(start + BLOCK)
        if start + BLOCK in marks:
            error = _error(out, first, before, block, window)
            found.append(Mark(start + BLOCK, statistics.median(times[-LAST:]), cache.allocated_bytes, error))
    return found


def _steps(cache: KVCache, block: _Block, start: int) -> tuple[float, Tensor]:
    """(seconds of a step, the output of the last)."""
    q, k, v = ROPE.rotate(block.q, start), ROPE.rotate(block.k, start), block.v
    tokens = [tuple(t[:, :, i : i + 1] for t in (q, k, v)) for i in range(BLOCK)]
    mask, out = Causal(), q
    begin = time.perf_counter()
    for one_q, one_k, one_v in tokens:
        out = attend(one_q, *cache.append(one_k, one_v), mask=mask)
    return (time.perf_counter() - begin) / BLOCK, out


def _error(out: Tensor, first: _Block, before: _Block, block: _Block, window: int) -> float:
    """|out - exact| / |exact|, where exact follows Xiao et al. 2023, arXiv:2309.17453, §3.2."""
    kept = window - SINKS
    k, v = (
        torch.cat([a[:, :, :SINKS], torch.cat([b, c], dim=2)[:, :, -kept:]], dim=2).double()
        for a, b, c in zip(first[1:], before[1:], block[1:], strict=True)
    )
    q = ROPE.rotate(block.q[:, :, -1:].double(), window - 1)
    exact = attend(q, ROPE.rotate(k), v, backend="reference")
    return float((out - exact).norm() / exact.norm())


def results_table(marks: Sequence[Mark]) -> str:
    """The table of these."""
    rows = [
        (
            f"{mark.tokens:,}", call_duration(mark.seconds), f"{mark.seconds / marks[0].seconds:.2f}x",
            f"{mark.allocated / 2**10:,.0f} KiB", f"{mark.error:.1e}",
        )
        for mark in marks
    ]  # fmt: skip
    return table(("tokens so far", "a step", "of the first", "allocated", "error"), rows)
