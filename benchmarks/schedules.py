"""What making a schedule costs, beside FlexAttention's `create_block_mask`, which looks at every pair.

`./bench schedules` prints the tables; `--write` puts them into docs/schedules.md.
"""

import argparse
import math
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import cycle
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import command
from benchmarks.report import machine, table
from regard import (
    Blocks,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    TensorMask,
    Window,
    attend,
)
from regard.bench.rounds import Effort, interleaved, on_threads, timed
from regard.describe.mask import CallSizes
from regard.plan.closed_form import Grid
from regard.plan.tiling import schedule, split_recursively

PAGE = "schedules.md"

CASES: dict[str, tuple[int, Callable[[int], Mask]]] = {
    "causal, 131,072": (131_072, lambda n: Causal()),
    "causal window 4,096 + 4 sinks, 1,048,576": (1 << 20, lambda n: Causal() & (Window(4096) | Prefix(4))),
    "causal, 1,000 documents, 1,048,576": (1 << 20, lambda n: Causal() & Documents(torch.arange(n) * 1000 // n)),
    "block-sparse, 10 % of 512 x 512 blocks, 32,768": (
        32_768,
        lambda n: Blocks(torch.rand(n // 64, n // 64, generator=torch.Generator().manual_seed(0)) < 0.1, 64),
    ),
}


REPEATS = 200

NEW: dict[str, tuple[int, int, Callable[[int], Mask]]] = {
    "causal, one query": (1, 513, lambda n: Causal()),
    "causal": (0, 512, lambda n: Causal()),
    "causal window 256, one query": (1, 2048, lambda n: Causal() & Window(256)),
    "causal window 256": (0, 1024, lambda n: Causal() & Window(256)),
    "causal window 256 + 4 sinks": (0, 2048, lambda n: Causal() & (Window(256) | Prefix(4))),
    "key lengths of 4 rows, one query": (1, 512, lambda n: KeyLengths(torch.tensor([n, n - 100, n - 200, n - 300]))),
    "causal, documents of 100 tokens": (0, 1024, lambda n: Causal() & Documents(torch.arange(n) // 100)),
    "causal, long": (0, 8192, lambda n: Causal()),
}
"""Queries (0: as many as keys), keys, and the mask."""

FEW: dict[str, tuple[int, int, Callable[[int], Mask]]] = {
    "a random tensor of bools, one query": (1, 100, lambda n: TensorMask(torch.rand(2, 1, 1, n) > 0.3)),
    "a random tensor of bools, one query, long": (1, 4000, lambda n: TensorMask(torch.rand(2, 1, 1, n) > 0.3)),
    "a random tensor of bools": (0, 128, lambda n: TensorMask(torch.rand(n, n) > 0.3)),
    "causal window 64 + 2 global tokens": (0, 128, lambda n: Causal() & (Window(64) | Global([0, 5]))),
    "causal, every second key, one query": (1, 512, lambda n: Causal() & Dilated(2)),
    "a function, one query": (1, 512, lambda n: MaskFunction(lambda b, h, q, k: (q - k < 50) & (q >= k))),
}
"""The same, of masks without a closed form."""

TABLES = ((2, 1, 1, 100), (2, 1, 1, 1000), (2, 1, 64, 64), (1, 1, 128, 128), (1, 1, 16, 512), (1, 1, 512, 512))
"""[batch, heads, queries, keys] of tensors of bools."""


def made(mask: Mask, tokens: int) -> Any:
    """The schedule of a square call, tiles of 128."""
    placed = mask.bind(CallSizes(1, 1, tokens, tokens, 0))
    return schedule(placed, batch=1, heads=1, queries=tokens, keys=tokens, offset=0, tile=128)


def run() -> str:
    """The tables, in Markdown."""
    rows: list[tuple[str, ...]] = []
    for name, (tokens, word) in CASES.items():
        mask = word(tokens)
        seconds, mib = _cost(lambda mask=mask, tokens=tokens: made(mask, tokens))
        found = made(mask, tokens)
        rows.append((name, f"{1e3 * seconds:.1f}", f"{mib:.1f}", f"{found.pairs:,}", f"{len(found.patterns):,}"))
    ours = table(("mask, tokens", "ms", "MiB", "kept pairs", "patterns"), rows)
    return (
        f"{ours}\n\nThe same mask, causal window 4,096 + 4 sinks:\n\n{_beside_flex()}\n\n"
        "## New lengths\n\nMicroseconds of CPU for the schedule of a length that was not seen before, tiles of 64 "
        f"(median of {REPEATS} lengths):\n\n{_beside_splitting('closed form', NEW)}\n\n"
        "Masks without a closed form, of calls of few pairs:\n\n"
        f"{_beside_splitting('all pairs at once', FEW)}\n\n"
        "## Masks that are known again\n\nA plan is kept by the content of its mask, so each call reads the mask's "
        f"tensors, or what its function reads:\n\n{_known_again()}\n\n## Tensors of bools that are new at each call\n\n"
        "The library reads a tensor of up to 2^20 pairs itself, and no plan is made. 8 heads of 64 dimensions, "
        f"float32, one thread, beside torch's `scaled_dot_product_attention`:\n\n{_new_tables()}"
    )


def _beside_splitting(way: str, cases: dict[str, tuple[int, int, Callable[[int], Mask]]]) -> str:
    """What new lengths cost, in the way that regard takes and by recursive splitting."""
    rows: list[tuple[str, ...]] = []
    for name, (queries, first, word) in cases.items():
        new: list[float] = []
        old: list[float] = []
        for keys in range(first, first + REPEATS):
            batch = word(keys).broadcast_shape()[0]
            sizes = CallSizes(batch, 8, queries or keys, keys, keys - (queries or keys))
            grid = Grid(*sizes, 64, (batch, 1))
            new.append(_microseconds(word, sizes, lambda mask, sizes=sizes: schedule(mask, tile=64, **sizes._asdict())))
            old.append(_microseconds(word, sizes, lambda mask, grid=grid: split_recursively(mask, grid)))
        cells = (f"{statistics.median(times):.0f}" for times in (new, old))
        rows.append((name, f"{queries or first:,} x {first:,}", *cells))
    return table(("mask", "first size", way, "splitting"), rows)


def _microseconds(word: Callable[[int], Mask], sizes: CallSizes, make: Callable[[Mask], object]) -> float:
    """The time of the processor for a schedule of a new mask: nothing is known of its tensors."""
    mask = word(sizes.keys).bind(sizes)
    start = time.thread_time_ns()
    make(mask)
    return (time.thread_time_ns() - start) / 1e3


def _known_again() -> str:
    """What a call costs whose mask has a plan already, and how much of that is reading the mask."""
    decode = [torch.randn(4, 8, tokens, 64) for tokens in (1, 512, 512)]
    prompt = [torch.randn(1, 1, 4096, 128) for _ in range(3)]
    sizes, dense, near = torch.tensor([512, 400, 300, 200]), torch.ones(4096, 4096, dtype=torch.bool).tril(), 64
    cases: dict[str, tuple[list[Tensor], Callable[[], Mask]]] = {
        "`KeyLengths`, the same tensor": (decode, lambda: KeyLengths(sizes)),
        "`KeyLengths`, a new tensor with the same content": (decode, lambda: KeyLengths(sizes.clone())),
        "`KeyLengths`, other content at each call": (decode, lambda: KeyLengths(sizes.random_(1, 513))),
        "`MaskFunction(lambda b, h, q, k: q - k < near)`": (
            decode,
            lambda: MaskFunction(lambda b, h, q, k: q - k < near),
        ),
        "`TensorMask`, 4,096 x 4,096, one head": (prompt, lambda: TensorMask(dense)),
    }
    rows: list[tuple[str, ...]] = []
    for name, (tensors, make) in cases.items():
        ways = {
            "call": timed(lambda tensors=tensors, make=make: attend(*tensors, mask=make())),
            "read": timed(lambda make=make: make().fingerprint()),
        }
        seconds = interleaved(ways, Effort(seconds=2))
        call, read = (seconds.median(lambda x: x, way) or math.nan for way in ways)
        rows.append((name, f"{1e6 * call:,.0f}", f"{1e6 * read:,.0f}", f"{100 * read / call:.2g} %"))
    return table(("mask", "the call, us", "reading the mask, us", "share"), rows)


def _new_tables() -> str:
    """What a call costs whose mask is another tensor of bools at each call, beside torch."""
    rows: list[tuple[str, ...]] = []
    for shape in TABLES:
        batch, _, queries, keys = shape
        q, k, v = (torch.randn(batch, 8, tokens, 64) for tokens in (queries, keys, keys))
        masks = cycle([torch.rand(shape) > 0.3 for _ in range(8)])
        ways = {
            "regard": timed(lambda q=q, k=k, v=v, masks=masks: attend(q, k, v, mask=TensorMask(next(masks)))),
            "torch": timed(lambda q=q, k=k, v=v, masks=masks: F.scaled_dot_product_attention(q, k, v, next(masks))),
        }
        with on_threads(1):
            seconds = interleaved(ways, Effort(seconds=2))
        ours, theirs = (seconds.median(lambda x: x, way) or math.nan for way in ways)
        rows.append((str(list(shape)), f"{1e6 * ours:,.0f}", f"{1e6 * theirs:,.0f}", f"{theirs / ours:.2f}x"))
    return table(("mask", "regard, us", "torch, us", "ratio"), rows)


def _beside_flex() -> str:
    rows: list[tuple[str, ...]] = []
    for tokens in (4096, 16_384, 32_768):
        mask = Causal() & (Window(4096) | Prefix(4))
        ours, mib = _cost(lambda mask=mask, tokens=tokens: made(mask, tokens))
        with get_context("spawn").Pool(1) as pool:  # a process of its own: its peak is then its own as well
            theirs, grown = pool.apply(_block_mask, (tokens,))
        cells = (f"{1e3 * ours:.1f} ms, {mib:.1f} MiB", f"{1e3 * theirs:,.0f} ms, {grown / 2**20:,.0f} MiB")
        rows.append((f"{tokens:,} tokens", *cells, f"{theirs / ours:,.0f}x"))
    return table(("", "regard", "torch create_block_mask", "ratio"), rows)


def _cost(run: Callable[[], object]) -> tuple[float, float]:
    """The median time in seconds, and the most MiB that Python and numpy held at once."""
    seconds = interleaved({"ours": timed(run)}, Effort(seconds=0.5)).median(lambda ours: ours, "ours")
    tracemalloc.start()
    try:
        run()
        return seconds or math.nan, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def _block_mask(tokens: int) -> tuple[float, int]:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k < 4096) | (k < 4))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    create_block_mask(keep, None, None, tokens, tokens, device="cpu")
    return time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, publish, arguments)


def _parser() -> argparse.ArgumentParser:
    return command.parser("schedules", (__doc__ or "").split("\n", maxsplit=1)[0], page=PAGE)


def publish(args: argparse.Namespace) -> int:
    """Measure, and print or write the page."""
    about = (__doc__ or "").split("\n", maxsplit=1)[0]
    with on_threads(args.threads or torch.get_num_threads()):
        text = f"# Schedules\n\n{about}\n\n`./bench schedules` on {machine()}:\n\n{run()}\n"
    command.publish_page(args.write, PAGE, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
