"""The cost of linear attention by length, beside exact attention and the usual implementation in PyTorch.

`./bench linear --write` writes docs/linear.md and its picture; `--quick` measures shorter sequences.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import command
from benchmarks.linear_picture import picture
from benchmarks.memory import peak, peak_from_here
from benchmarks.report import machine, table
from regard import Causal, attend
from regard.bench import limits
from regard.bench.rounds import Effort, Rounds, interleaved, on_threads, timed
from regard.cli.durations import call_duration
from regard.linear import Decay, Delta, Favor, Feature, FeatureError, Gated, Rule, Taylor, linear_attend
from regard.linear.attend import CHUNK

ROOT = Path(__file__).parents[1]
DIM = 64
LENGTHS = [2**n for n in (9, 10, 11, 12, 13, 14, 15, 16, 18, 20)]
EXACT_UP_TO = 1 << 16
"""The longest sequence of exact attention; the next length would take most of a minute."""

PLAIN = 1 << 14
"""Tokens of the usual implementation, whose running sums alone take 256 MiB at this length."""

EXACT = "exact, causal"

Inputs = tuple[Tensor, Tensor, Tensor]
Made = Callable[[], object]


def _linear(
    inputs: Inputs, features: Feature | None = None, rule: Callable[[int], Rule | None] = lambda tokens: None
) -> Made:
    q, k, v = inputs
    its_rule = rule(q.shape[2])
    if isinstance(its_rule, Delta):
        k = torch.nn.functional.normalize(k, dim=-1)
    if features is None:
        return lambda: linear_attend(q, k, v, features=None, rule=its_rule)
    return lambda: linear_attend(q, k, v, features=features, rule=its_rule)


def _elu(inputs: Inputs) -> Made:
    return lambda: linear_attend(*inputs)


def _exact(inputs: Inputs) -> Made:
    return lambda: attend(*inputs, mask=Causal())


KINDS: dict[str, Callable[[Inputs], Made]] = {
    "Elu1": _elu,
    "Favor, 256 features": partial(_linear, features=Favor(DIM, features=256)),
    "Decay": partial(_linear, rule=lambda tokens: Decay(0.97)),
    "Gated": partial(_linear, rule=lambda tokens: Gated(-0.1 * torch.rand(1, 1, tokens, DIM))),
    "Delta": partial(_linear, rule=lambda tokens: Delta(torch.rand(1, 1, tokens))),
    EXACT: _exact,
}
"""What is measured, on tensors of one head."""


def drawn_inputs(tokens: int) -> Inputs:
    """q, k and v of one head, float32 [1, 1, tokens, 64]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, DIM) for _ in range(3))
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention by running sums of all outer products, the usual implementation."""
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    sums = torch.cumsum(k[..., :, None] * v[..., None, :], dim=2)  # [batch, heads, tokens, dim, dim]
    return torch.einsum("bhnd,bhnde->bhne", q, sums) / (q * torch.cumsum(k, dim=2)).sum(-1, keepdim=True)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """All that was measured.

    Attributes:
        seconds: of one call, by kind and tokens.
        mebibytes: allocated beyond q, k, v and the output, by kind and tokens.
        rates: FLOP/s of the matrix products at `PLAIN` tokens, by kind, and `limit`, the machine's.
        plain: seconds of the usual implementation at `PLAIN` tokens, and the ratio to ours.
    """

    seconds: dict[str, dict[int, float]]
    mebibytes: dict[str, dict[int, float]]
    rates: dict[str, float]
    limit: float | None
    plain: tuple[float, float]


def measured(lengths: Sequence[int], effort: Effort, tell: Callable[[str], None] = lambda text: None) -> Found:
    """Measure all kinds at these lengths, in rounds."""
    seconds: dict[str, dict[int, float]] = {name: {} for name in KINDS}
    for tokens in lengths:
        tell(f"{tokens:,} tokens")
        rounds = _rounds(tokens, effort)
        for name in KINDS:
            found = rounds.median(lambda time: time, name)
            if found is not None:
                seconds[name][tokens] = found
    tell("memory")
    mebibytes = {name: _in_a_process(name, _within(name, lengths)) for name in KINDS}
    tell("the usual implementation")
    ours, inputs = _elu(drawn_inputs(PLAIN)), drawn_inputs(PLAIN)
    beside = interleaved({"ours": timed(ours), "plain": timed(lambda: plain(*inputs))}, effort)
    slow = beside.median(lambda plain: plain, "plain") or math.nan
    ratio = beside.median(lambda plain, ours: plain / ours, "plain", "ours") or math.nan
    rates = {name: _flops(make(inputs)) / seconds[name][PLAIN] for name, make in KINDS.items() if name != EXACT}
    limit = limits.products(torch.float32, torch.get_num_threads())
    return Found(seconds, mebibytes, rates, limit, (slow, ratio))


def _rounds(tokens: int, effort: Effort) -> Rounds:
    inputs = drawn_inputs(tokens)
    return interleaved({name: timed(make(inputs)) for name, make in KINDS.items() if _within(name, [tokens])}, effort)


def _within(name: str, lengths: Sequence[int]) -> list[int]:
    """The lengths at which this kind is measured."""
    return [tokens for tokens in lengths if name != EXACT or tokens <= EXACT_UP_TO]


def _flops(run: Made) -> int:
    """FLOPs of its matrix products, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _in_a_process(name: str, lengths: Sequence[int]) -> dict[int, float]:
    """Peak MiB of calls of these lengths beyond their tensors and output, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.linear", "--memory", name, *map(str, lengths)]
    # return large blocks to the system at once, so that one length does not reuse the memory of another
    known = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=True)  # noqa: S603
    return {int(tokens): mebibytes for tokens, mebibytes in json.loads(done.stdout).items()}


def _memory(name: str, lengths: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    KINDS[name](drawn_inputs(2 * CHUNK))()  # the allocations of a first call do not count
    for tokens in lengths:
        run = KINDS[name](drawn_inputs(tokens))
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        before = peak_from_here()
        out = run()
        first = out if isinstance(out, Tensor) else out[0]  # pyright: ignore[reportIndexIssue,reportUnknownVariableType]
        found[tokens] = max(0, peak() - before - first.nbytes) / 2**20
        del out, first
    return found


# ---- the page -------------------------------------------------------------------------------------------------------


def crossing(ours: dict[int, float], exact: dict[int, float]) -> str:
    """The length from which ours is faster; between measured lengths by linear interpolation of the logarithms."""
    both = [(tokens, math.log(exact[tokens] / ours[tokens])) for tokens in sorted(ours) if tokens in exact]
    if both[0][1] > 0:
        return f"below {both[0][0]:,}"
    for (left, under), (right, over) in pairwise(both):
        if over > 0:
            at = math.exp(math.log(left) + (math.log(right) - math.log(left)) * -under / (over - under))
            return f"{round(at, -2):,.0f}"
    return f"above {both[-1][0]:,}"


METHOD = """\
Measured by `{how}` on {machine}; one head, {dim} dimensions, float32, chunks of {chunk} tokens. Times are medians over
rounds that measure everything once."""

USUAL = """\
The usual implementation in PyTorch, `torch.cumsum` over the outer products of all tokens, takes {time} at this length,
**{times:,.0f} times** as long as `linear_attend` with `Elu1`."""

FUNCTION = """\
Linear attention is not softmax attention. So this page compares costs, not quality: see
[its README](../src/regard/linear/README.md)."""

PEAK = "Peak MiB of a call, beyond q, k, v, the rule's tensors, and the output."

NEAR = """\
For {tokens} queries and keys of {dim} dimensions, all of one norm, without a mask. "Length" is the norm of
`q * dim ** -0.25`, so scores are between minus its square and its square. "Kernel's error" is the relative root mean
square error; "by Lemma 2" is its expected value for independent random vectors (Choromanski et al. 2021,
arXiv:2009.14794), where `Favor` uses orthogonal ones. "Misplaced" is the share of attention on the wrong keys."""


def page(found: Found, quick: bool) -> str:
    """docs/linear.md."""
    how = "./bench linear" + (" --quick" if quick else "")
    exact = max(found.seconds[EXACT])
    rates = [(name, f"{rate / 1e9:,.0f}", _share(rate, found.limit)) for name, rate in found.rates.items()]
    limit = "not known" if found.limit is None else f"{found.limit / 1e9:,.0f} GFLOP/s"
    parts = [
        "# Linear attention",
        METHOD.format(how=how, machine=machine(), dim=DIM, chunk=CHUNK),
        FUNCTION,
        "![Time by number of tokens](linear.svg)",
        "## Time by length",
        table(("tokens", *found.seconds), _by_length(found.seconds, call_duration)),
        f"Exact attention is measured up to {exact:,} tokens. It is slower than linear attention from this length on:",
        table(("", *(name for name in KINDS if name != EXACT)), [("tokens", *_crossings(found))]),
        "## Memory by length",
        PEAK,
        table(("tokens", *found.mebibytes), _by_length(found.mebibytes, _mebibytes)),
        "## Beside the machine's limit and beside running sums",
        f"At {PLAIN:,} tokens: FLOPs of the matrix products per second of the call. The machine's limit is {limit}.",
        table(("", "GFLOP/s", "of limit"), rates),
        USUAL.format(time=call_duration(found.plain[0]), times=found.plain[1]),
        "## The error of Favor and Taylor against softmax",
        NEAR.format(tokens=ERRED, dim=DIM),
        table(("length", "features", "kernel's error", "by Lemma 2", "misplaced"), list(_errors())),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _mebibytes(mebibytes: float | None) -> str:
    return "-" if mebibytes is None else f"{mebibytes:,.1f}"


def _share(rate: float, limit: float | None) -> str:
    return "" if limit is None else f"{100 * rate / limit:.0f} %"


def _by_length(columns: dict[str, dict[int, float]], text: Callable[[float | None], str]) -> list[tuple[str, ...]]:
    lengths = sorted({tokens for column in columns.values() for tokens in column})
    return [(f"{tokens:,}", *(text(column.get(tokens)) for column in columns.values())) for tokens in lengths]


def _crossings(found: Found) -> list[str]:
    return [crossing(found.seconds[name], found.seconds[EXACT]) for name in KINDS if name != EXACT]


ERRED = 512


def _errors() -> Iterator[tuple[str, ...]]:
    draw = torch.Generator().manual_seed(0)
    for length in (0.5, 1.0, 1.5, 2.0):
        q, k = torch.randn(2, ERRED, DIM, generator=draw, dtype=torch.float64)
        q, k = (length * DIM**0.25 * t / t.norm(dim=1, keepdim=True) for t in (q, k))
        for features in (64, 256, 1024):
            favor = Favor(DIM, features=features)
            error = favor.error(q, k)
            expected = favor.variance(q, k).mean().sqrt().item()
            yield _error_row(length, f"Favor, {features:,}", error, f"{expected:.3f}")
        error = Taylor().error(q, k)
        yield _error_row(length, f"Taylor, {Taylor().size(DIM):,}", error, "")


def _error_row(length: float, features: str, error: FeatureError, expected: str) -> tuple[str, ...]:
    return f"{length:g}", features, f"{error.kernel:.3f}", expected, f"{error.weights:.3f}"


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "linear", "The cost of linear attention by length, beside exact attention.", page="linear.md"
    )
    parser.add_argument("--quick", action="store_true", help="shorter sequences and fewer rounds")
    parser.add_argument("--memory", nargs="+", metavar=("KIND", "TOKENS"), help=argparse.SUPPRESS)
    return parser


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """Measure, and print or write the page and its picture."""
    if args.memory:
        print(json.dumps(_memory(args.memory[0], [int(tokens) for tokens in args.memory[1:]])))
        return 0
    lengths = [tokens for tokens in LENGTHS if tokens <= PLAIN] if args.quick else LENGTHS
    effort = Effort(seconds=0.3, least=2) if args.quick else Effort(seconds=2.0, least=2)
    with on_threads(args.threads or torch.get_num_threads()):
        found = measured(lengths, effort, lambda text: print(text, file=sys.stderr))
    pictures = {"linear.svg": picture(found.seconds)}
    command.publish_page(args.write, "linear.md", page(found, args.quick), pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
