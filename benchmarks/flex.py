"""`regard.flex` beside torch's compiled FlexAttention on a CPU, and what `create_block_mask` costs.

`./bench flex` prints the tables: forward, a training step (torch has none on a CPU; beside it, torch's
`scaled_dot_product_attention` with the mask and the bias as one tensor), and block masks of 32,768 tokens.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from benchmarks import command
from benchmarks.report import machine, table
from regard.bench.rounds import Effort, interleaved, on_threads, timed
from regard.flex import create_block_mask, flex_attention
from regard.flex.trace import Mod, element_by_element

HEADS, DIM = 8, 64
TOKENS, STEP_TOKENS, MASK_TOKENS = 4096, 1024, 32_768
DOCUMENTS = 16
BUILD_TOKENS = 8192
"""Tokens at which torch's `create_block_mask` is measured; its cost grows with the square."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The causal mask."""
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The last 512 tokens."""
    return (q >= k) & (q - k < 512)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A slope for each head."""
    return score + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """At most 20."""
    return 20 * torch.tanh(score / 20)


def documents(tokens: int) -> Mod:
    """Packed documents, causal."""
    ids = torch.arange(tokens) * DOCUMENTS // tokens
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Causal, with a prefix of 1,000 keys that every query sees."""
    return (q >= k) | (k < 1000)


@dataclass(frozen=True)
class Case:
    """A mask by count of tokens, and a score function."""

    mask: Callable[[int], Mod]
    score: Mod | None = None


CASES = {
    "causal": Case(lambda n: causal),
    "window 512": Case(lambda n: window),
    "causal, ALiBi": Case(lambda n: causal, alibi),
    "causal, softcap 20": Case(lambda n: causal, softcap),
    f"{DOCUMENTS} documents, causal": Case(documents),
}

MASKS: dict[str, Callable[[int], Mod]] = {
    "causal": lambda n: causal,
    "window 512": lambda n: window,
    "prefix": lambda n: prefix,
    f"{DOCUMENTS} documents, causal": documents,
}


def forward(seconds: float) -> str:
    """Forward, beside torch's compiled function, as a table in Markdown."""
    rows: list[tuple[str, ...]] = []
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM) for _ in range(3))
    for name, case in CASES.items():
        mask = create_block_mask(case.mask(TOKENS), None, None, TOKENS, TOKENS, device="cpu")
        torch.compiler.reset()
        theirs = torch.compile(of_torch.flex_attention, dynamic=False)
        ways: dict[str, Callable[[], Tensor]] = {
            "regard": partial(flex_attention, q, k, v, case.score, mask),
            "torch": partial(theirs, q, k, v, case.score, mask),
        }
        torch.testing.assert_close(ways["regard"](), ways["torch"](), atol=1e-4, rtol=1e-4)
        rows.append(_row(name, ways, seconds))
    return table(("forward", "regard, ms", "torch flex, compiled, ms", "torch / regard"), rows)


def training(seconds: float) -> str:
    """Forward and backward, beside attention with one tensor for mask and bias, as a table in Markdown."""
    rows: list[tuple[str, ...]] = []
    q, k, v = (torch.randn(1, HEADS, STEP_TOKENS, DIM, requires_grad=True) for _ in range(3))
    for name, case in CASES.items():
        mask_mod = case.mask(STEP_TOKENS)
        mask = create_block_mask(mask_mod, None, None, STEP_TOKENS, STEP_TOKENS, device="cpu")
        added = _tensor(mask_mod, case.score)
        ways: dict[str, Callable[[], Tensor]] = {
            "regard": lambda case=case, mask=mask: flex_attention(q, k, v, case.score, mask),
            "torch": lambda added=added: F.scaled_dot_product_attention(q, k, v, attn_mask=added),
        }
        if case.score is softcap:  # which no tensor can say
            ways["torch"] = lambda added=added: _softcapped(q, k, v, added)
        torch.testing.assert_close(ways["regard"](), ways["torch"](), atol=1e-4, rtol=1e-4)
        steps = {way: (lambda run=run: run().sum().backward()) for way, run in ways.items()}
        rows.append(_row(name, steps, seconds))
    return table(("forward and backward", "regard, ms", "torch, one tensor, ms", "torch / regard"), rows)


def block_masks() -> str:
    """What a `BlockMask` costs, as a table in Markdown."""
    rows: list[tuple[str, ...]] = []
    for name, make in MASKS.items():
        mod, small = make(MASK_TOKENS), make(BUILD_TOKENS)
        seconds = [_once(lambda mod=mod: create_block_mask(mod, None, None, MASK_TOKENS, MASK_TOKENS, device="cpu"))
                   for _ in range(9)]  # fmt: skip
        theirs = _once(
            lambda small=small: of_torch.create_block_mask(small, None, None, BUILD_TOKENS, BUILD_TOKENS, device="cpu")
        )
        rows.append((name, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * theirs:,.0f}"))
    return table(
        ("create_block_mask", f"regard, {MASK_TOKENS:,} tokens, ms", f"torch, {BUILD_TOKENS:,} tokens, ms"), rows
    )


def _row(name: str, ways: Mapping[str, Callable[[], object]], seconds: float) -> tuple[str, ...]:
    rounds = interleaved({way: timed(run) for way, run in ways.items()}, Effort(seconds=seconds, least=3))
    ours, theirs = (rounds.median(lambda x: x, way) or math.nan for way in ways)
    ratio = rounds.median(lambda a, b: b / a, *ways) or math.nan
    return name, f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ratio:.2f}"


def _tensor(mask_mod: Mod, score_mod: Mod | None) -> Tensor:
    """Mask and bias as one tensor."""
    at = torch.meshgrid(*map(torch.arange, (1, HEADS, STEP_TOKENS, STEP_TOKENS)), indexing="ij")
    bias = torch.zeros(1, HEADS, STEP_TOKENS, STEP_TOKENS)
    if score_mod not in (None, softcap):
        bias = element_by_element(score_mod, bias, *at)
    return torch.where(element_by_element(mask_mod, *at), bias, -torch.inf)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    scores = 20 * torch.tanh(q @ k.mT * DIM**-0.5 / 20)
    return torch.softmax(scores + added, dim=3) @ v


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, show, arguments)


def _parser() -> argparse.ArgumentParser:
    return command.parser("flex", "regard.flex beside torch's FlexAttention on a CPU.", seconds=2.0)


def show(args: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    threads = args.threads or torch.get_num_threads()
    with on_threads(threads):
        print(f"on {machine()}, {threads} threads, {HEADS} heads, d {DIM}, float32")
        with torch.no_grad():
            print(f"\n{TOKENS:,} tokens\n\n{forward(args.seconds)}")
        print(f"\n{STEP_TOKENS:,} tokens\n\n{training(args.seconds)}")
        print(f"\n{block_masks()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
