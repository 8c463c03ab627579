"""The ring of attention over a sharded sequence: simulated on up to 1,024 ranks, and measured on two processes.

`./bench ring` prints the tables; `--write` puts them into docs/parallel.md. The simulator plays the schedule of a ring
from exact pair counts: no pairs are listed, whatever the length. A step lasts as long as its slowest rank, since ranks
wait for the keys of their neighbours.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks import command
from benchmarks.report import machine, table
from regard import Causal, Documents, Mask, Window, attend
from regard.cli.argument_types import count, number
from regard.cost import find_machine
from regard.parallel import Layout, ring_attend
from regard.parallel.balance import balanced_by, steps_of
from regard.parallel.pair_counts import PairCounts, pair_counts, rank_pairs
from regard.parallel.predict import STRIPE

PAGE, SIMULATED, MEASURED = "parallel.md", "simulated", "measured"

TOKENS = 10_000_000
RANKS = (64, 1024)
MACHINE, LINK = "h100", 50e9
HEADS, KV_HEADS, DIM, ITEM = 32, 8, 128, 2
"""A layer of Llama 3.1 8B, in bfloat16."""

WINDOW = 4096
MEAN, SPREAD = 20_000, 1.2
"""Of the lengths of documents, log-normal: their median in tokens, and the standard deviation of the logarithm."""


def documents(tokens: int) -> Documents:
    """Packed documents of random lengths, the same in every run."""
    draw = np.random.default_rng(0)
    lengths = np.maximum(1, draw.lognormal(np.log(MEAN), SPREAD, max(64, tokens // MEAN * 2))).astype(np.int64)
    ids = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
    return Documents(torch.from_numpy(np.pad(ids, (0, tokens - len(ids)), constant_values=len(lengths))))


MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: Causal(),
    f"causal, window {WINDOW:,}": lambda n: Causal() & Window(WINDOW),
    "causal, documents": lambda n: Causal() & documents(n),
}

LAYOUTS: dict[str, Callable[[PairCounts, int, float], Layout]] = {
    "contiguous": lambda counts, ranks, sending: Layout.contiguous(counts.tokens, ranks),
    "zigzag": lambda counts, ranks, sending: Layout.zigzag(counts.tokens, ranks),
    "striped": lambda counts, ranks, sending: Layout.striped(counts.tokens, ranks, block=STRIPE),
    "balanced": lambda counts, ranks, sending: balanced_by(counts, ranks),
    "balanced for the link": balanced_by,
}


@dataclass(frozen=True)
class Played:
    """One ring, of one layer.

    Attributes:
        balance: pairs of the rank with most of them, as a multiple of the mean.
        step_balance: the sum over steps of the most pairs of a rank, as a multiple of the mean: what waiting costs.
        steps: how many there are.
        sent_bytes: of the rank that sends most.
        seconds: the sum of the steps, each the longest computation or transfer of a rank.
        ideal_seconds: of the same work, shared perfectly, without transfers.
    """

    balance: float
    step_balance: float
    steps: int
    sent_bytes: int
    seconds: float
    ideal_seconds: float


def play(pairs: NDArray[np.int64], counts: Sequence[int], *, flops: float, link: float) -> Played:
    """A ring.

    Args:
        pairs: [ranks, ranks] of `rank_pairs`.
        counts: tokens of each rank.
        flops: a rank's operations per second.
        link: bytes/s of a rank's connection, in each direction.

    >>> from regard.cost import Pattern
    >>> pairs = rank_pairs(pair_counts(Pattern(), 4096), Layout.zigzag(4096, 4))
    >>> play(pairs, (1024,) * 4, flops=1e12, link=1e9).step_balance
    1.0
    """
    steps, block = steps_of(pairs, counts), KV_HEADS * 2 * DIM * ITEM
    seconds = np.maximum(steps.pairs * 4 * DIM * HEADS / flops, steps.tokens * block / link).sum()
    total = int(pairs.sum())
    mean = total / len(counts)
    return Played(
        balance=float(pairs.sum(axis=1).max() / mean),
        step_balance=int(steps.pairs.sum()) / mean,
        steps=len(steps.pairs),
        sent_bytes=int(steps.sent.max()) * block,
        seconds=float(seconds),
        ideal_seconds=mean * 4 * DIM * HEADS / flops,
    )


def simulate(tokens: int, ranks: Sequence[int], link: float) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    flops = find_machine(MACHINE).peak("bfloat16")
    sending = (KV_HEADS * 2 * DIM * ITEM / link) * flops / (4 * DIM * HEADS)  # pairs in the time of a token's keys
    for name, make in MASKS.items():
        counts = pair_counts(make(tokens), tokens)
        for n in ranks:
            for layout_name, layout_of in LAYOUTS.items():
                layout = layout_of(counts, n, sending)
                found = play(rank_pairs(counts, layout), layout.counts, flops=flops, link=link)
                yield (
                    f"{name}, {n:,} ranks, {layout_name}",
                    f"{found.balance:.3f}",
                    f"{found.step_balance:.3f}",
                    f"{found.steps:,}",
                    f"{found.sent_bytes / 2**20:,.0f}",
                    f"{1e3 * found.seconds:,.2f}",
                    f"{1e3 * found.ideal_seconds:,.2f}",
                )


def simulated(tokens: int, ranks: Sequence[int], link: float) -> str:
    """The table of the simulator."""
    head = ("mask, ranks, layout", "work", "work in step", "steps", "MiB sent", "ms", "ideal ms")
    return (
        f"{tokens:,} tokens, a layer of {HEADS} query heads and {KV_HEADS} key heads of {DIM} in bfloat16, ranks of "
        f"one {MACHINE.upper()} at its peak, links of {link / 1e9:g} GB/s:\n\n"
        + table(head, [*simulate(tokens, ranks, link)])
    )


# ---- measured -------------------------------------------------------------------------------------------------------

LENGTH, Q_HEADS, ROUNDS = 16_384, 2, 5


def measured(length: int, rounds: int) -> str:
    """Two processes of one thread beside one of one thread, in turn."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, args=(folder, length, rounds), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
        for kind in ("forward", "forward and backward"):
            one, two = torch.load(Path(folder) / kind.replace(" ", "-"))
            alone, together = statistics.median(one), statistics.median(two)
            rows.append((kind, f"{alone:.2f}", f"{together:.2f}", f"{alone / together:.2f}x"))
    return (
        f"{length:,} tokens, causal, {Q_HEADS} heads of {DIM} in float32, one thread in each process, on {machine()} "
        f"(medians of {rounds} rounds, in turn):\n\n" + table(("", "1 process, s", "2 processes, s", "ratio"), rows)
    )


def _measure(rank: int, folder: str, length: int, rounds: int) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    layout = Layout.balanced(length, 2, Causal())
    torch.manual_seed(0)
    whole = [torch.randn(1, Q_HEADS, length, DIM) for _ in range(3)]
    mine = [layout.shard(t, rank).contiguous() for t in whole]
    for kind in ("forward", "forward and backward"):
        backward = kind != "forward"
        times: tuple[list[float], list[float]] = [], []
        for i in range(rounds + 1):  # the first one warms up
            for way, tensors in enumerate((whole, mine)):
                seconds = _timed(way, tensors, layout, backward)
                times[way].extend([seconds] * (i > 0))
        if rank == 0:
            torch.save(times, Path(folder) / kind.replace(" ", "-"))
    dist.destroy_process_group()


def _timed(way: int, tensors: list[torch.Tensor], layout: Layout, backward: bool) -> float:
    """Seconds until all ranks are done; alone, rank 1 waits."""
    leaves = [t.detach().requires_grad_(backward) for t in tensors]
    dist.barrier()
    start = time.perf_counter()
    if way or dist.get_rank() == 0:
        call: Any = attend if not way else ring_attend
        out = call(*leaves, mask=Causal(), **({"layout": layout} if way else {}))
        if backward:
            out.backward(torch.ones_like(out))
    dist.barrier()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, publish, arguments)


def _parser() -> argparse.ArgumentParser:
    made = command.parser("ring", (__doc__ or "").split("\n", maxsplit=1)[0], page=PAGE, threads=False)
    made.add_argument("--tokens", type=count(1), default=TOKENS, metavar="N", help=f"simulated (default: {TOKENS:,})")
    made.add_argument(
        "--ranks", type=count(1), nargs="+", default=RANKS, metavar="N", help="simulated (default: 64 1024)"
    )
    made.add_argument(
        "--link", type=number("above 0", 1e-9, 1e9), default=LINK / 1e9, metavar="G",
        help=f"GB/s of a rank's connection (default: {LINK / 1e9:g})",
    )  # fmt: skip
    made.add_argument(
        "--length", type=count(1), default=LENGTH, metavar="N", help=f"tokens, measured (default: {LENGTH:,})"
    )
    made.add_argument("--rounds", type=count(1), default=ROUNDS, metavar="N", help=f"measured (default: {ROUNDS})")
    made.add_argument("--only", choices=(SIMULATED, MEASURED), help="one of the two parts")
    return made


def publish(args: argparse.Namespace) -> int:
    """Simulate and measure, and print or write both parts."""
    parts: dict[str, Callable[[], str]] = {
        SIMULATED: lambda: simulated(args.tokens, args.ranks, args.link * 1e9),
        MEASURED: lambda: measured(args.length, args.rounds),
    }
    chosen = [args.only] if args.only else [*parts]
    for part in chosen:
        command.check_part(args.write, PAGE, part)
    for part in chosen:
        command.publish_part(args.write, PAGE, part, parts[part]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
