"""What a call costs whose length is new: a decoding loop, prompts of any length, masks written inline; beside torch.

`python -m benchmarks.lengths` prints the table; `--threads 1` computes on one thread, `--cpu` counts the CPU time of
the calling thread, which a busy machine disturbs less than the time of the clock.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from benchmarks.report import machine, table
from regard import Causal, KeyLengths, Mask, Prefix, Window, attend
from regard.bench.rounds import on_threads
from regard.dispatch.plan_cache import forget

SHAPES = (32, 8, 128), (8, 8, 64)
"""Query heads, key heads, dimensions of a head."""

LENGTHS = 64
"""New lengths in a round, one after the other."""

ROUNDS = 9
GOAL = 1.5
"""Of torch's time, for one query against 512 keys."""


@dataclass(frozen=True)
class Row:
    """A loop of calls: `first` keys, then one more at each call.

    Attributes:
        queries: 0 for as many as keys.
        mask: called for each call; what it returns is the mask.
        goal: whether the goal is for this row.
        same: whether every call has the sizes of the first, for comparison.
    """

    name: str
    first: int
    mask: Callable[[], Mask | None]
    queries: int = 1
    goal: bool = True
    same: bool = False


_CAUSAL, _WINDOW = Causal(), Causal() & Window(512)
_LENGTHS = KeyLengths(torch.tensor([480]))

ROWS = (
    Row("decode, the same length", 512, lambda: None, same=True, goal=False),
    Row("decode, no mask", 512, lambda: None),
    Row("decode, causal", 512, lambda: _CAUSAL),
    Row("decode, causal, inline", 512, Causal),
    Row("decode, window 512, nothing hidden, inline", 440, lambda: Causal() & Window(512)),
    Row("decode, window 512", 513, lambda: _WINDOW),
    Row("decode, window 512, inline", 513, lambda: Causal() & Window(512)),
    Row("decode, window 512 + 4 sinks, inline", 517, lambda: Causal() & (Window(512) | Prefix(4))),
    Row("decode, key lengths", 512, lambda: _LENGTHS),
    Row("prompts, no mask", 64, lambda: None, queries=0, goal=False),
    Row("prompts, causal, inline", 64, Causal, queries=0, goal=False),
    Row("prompts, window 32, inline", 64, lambda: Causal() & Window(32), queries=0, goal=False),
)


def run(shape: tuple[int, int, int], clock: Callable[[], float], rounds: int = ROUNDS) -> str:
    """The table of a shape, in Markdown."""
    rows: list[tuple[str, ...]] = []
    for row in ROWS:
        ours, theirs = measure(row, shape, clock, rounds)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        reached = ("yes" if ratio <= GOAL else "no") if row.goal else ""
        cells = (f"{1e6 * statistics.median(times):.0f}" for times in (ours, theirs))
        rows.append((row.name, *cells, f"{ratio:.2f}", reached))
    return table(("one call", "regard, us", "torch, us", "regard / torch", f"at most {GOAL}"), rows)


def measure(
    row: Row, shape: tuple[int, int, int], clock: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of one call by regard and by torch, in each round; every length is new to regard."""
    keys = [row.first + (0 if row.same else i) for i in range(LENGTHS)]
    heads, kv_heads, dim = shape
    calls = [(torch.randn(1, heads, row.queries or n, dim), torch.randn(1, kv_heads, n, dim)) for n in keys]

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, mask=row.mask())

    def theirs(q: Tensor, k: Tensor) -> Tensor:
        is_causal = not row.queries and row.mask() is not None
        return F.scaled_dot_product_attention(q, k, k, is_causal=is_causal, enable_gqa=True)

    found: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for way, times in zip((ours, theirs), found, strict=True):
            forget()
            way(*(t[:, :, :1] for t in calls[0]))  # the libraries are awake
            way(*calls[0])
            start = clock()
            for q, k in calls:
                way(q, k)
            times.append((clock() - start) / len(calls))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, show, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("lengths", "What a call of a new length costs.")
    parser.add_argument("--cpu", action="store_true", help="count the CPU time of the calling thread")
    return parser


@torch.no_grad()
def show(args: argparse.Namespace) -> int:
    """Measure, and print the table."""
    threads = args.threads or torch.get_num_threads()
    with on_threads(threads):
        print(f"on {machine()}, {threads} threads, float32")
        for heads, kv_heads, dim in SHAPES:
            print(f"\n{heads}/{kv_heads} heads, d {dim}\n")
            print(run((heads, kv_heads, dim), time.thread_time if args.cpu else time.perf_counter))
    return 0


if __name__ == "__main__":
    sys.exit(main())
