"""What making a schedule costs, beside FlexAttention's `create_block_mask`, which looks at every pair."""

import resource
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

from bench.measure import interleaved, peak_bytes, table
from regard import Blocks, Causal, Documents, Mask, Prefix, Window
from regard.describe.mask import Frame
from regard.plan.tiling import schedule

CASES: dict[str, tuple[int, Callable[[int], Mask]]] = {
    "causal, 131,072": (131_072, lambda n: Causal()),
    "causal window 4,096 + 4 sinks, 1,048,576": (1 << 20, lambda n: Causal() & (Window(4096) | Prefix(4))),
    "causal, 1,000 documents, 1,048,576": (1 << 20, lambda n: Causal() & Documents(torch.arange(n) * 1000 // n)),
    "block-sparse, 10 % of 512 x 512 blocks, 32,768": (
        32_768,
        lambda n: Blocks(torch.rand(n // 64, n // 64) < 0.1, 64),
    ),
}


def made(mask: Mask, tokens: int) -> Any:
    """The schedule of a square call, tiles of 128."""
    placed = mask.at(Frame(1, 1, tokens, tokens, 0))
    return schedule(placed, batch=1, heads=1, queries=tokens, keys=tokens, offset=0, tile=128)


def run() -> str:
    """The tables, in Markdown."""
    rows: list[tuple[str, ...]] = []
    for name, (tokens, word) in CASES.items():
        mask = word(tokens)
        seconds = interleaved({name: lambda mask=mask, tokens=tokens: made(mask, tokens)})[name]
        found = made(mask, tokens)
        mib = peak_bytes(lambda mask=mask, tokens=tokens: made(mask, tokens)) / 2**20
        rows.append((name, f"{1e3 * seconds:.1f}", f"{mib:.1f}", f"{found.pairs:,}", f"{len(found.patterns):,}"))
    ours = table(("mask, tokens", "ms", "MiB", "kept pairs", "patterns"), rows)
    return f"{ours}\n\nThe same mask, causal window 4,096 + 4 sinks:\n\n{_beside_flex()}"


def _beside_flex() -> str:
    rows: list[tuple[str, ...]] = []
    for tokens in (4096, 16_384, 32_768):
        mask = Causal() & (Window(4096) | Prefix(4))
        ours = interleaved({"": lambda mask=mask, tokens=tokens: made(mask, tokens)}, seconds=0.5)[""]
        mib = peak_bytes(lambda mask=mask, tokens=tokens: made(mask, tokens)) / 2**20
        with get_context("spawn").Pool(1) as pool:  # a process of its own: its peak is then its own as well
            theirs, grown = pool.apply(_block_mask, (tokens,))
        cells = (f"{1e3 * ours:.1f} ms, {mib:.1f} MiB", f"{1e3 * theirs:,.0f} ms, {grown / 2**20:,.0f} MiB")
        rows.append((f"{tokens:,} tokens", *cells, f"{theirs / ours:,.0f}x"))
    return table(("", "regard", "torch create_block_mask", "ratio"), rows)


def _block_mask(tokens: int) -> tuple[float, int]:
    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k < 4096) | (k < 4))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    create_block_mask(keep, None, None, tokens, tokens, device="cpu")
    return time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
