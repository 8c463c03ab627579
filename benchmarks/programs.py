"""Programs that do not know regard: a whole forward pass and a training step, with and without `regard.everywhere()`.

`./bench programs` prints the table. Models of packages have random weights, so nothing is downloaded; a package that is
not installed is a line that says so (`pip install -e .[programs]`). Outputs are compared with those of torch's kernels
before anything is measured. The column "at most" is the speed-up that attention in no time would give: the program is
also measured with a sum of the arguments in place of each call of attention.
"""

import argparse
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

import regard
from benchmarks import command
from benchmarks.programs_cases import CASES, Case, define_nms
from benchmarks.report import machine, table
from regard.bench.rounds import Effort, Rounds, interleaved, on_threads
from regard.errors import ProblemError
from regard.override import attention, small_calls
from regard.override import encoder as encoder_layers

LONG = 0.1
"""The seconds that a measurement lasts at least."""


@dataclass(frozen=True)
class Line:
    """A program measured in one dtype: seconds without regard, and how much faster it is with it.

    Attributes:
        limit: how much faster it would be if attention took no time.
    """

    case: Case
    dtype: str
    step: str
    seconds: float
    ratio: float
    limit: float
    error: float
    rounds: int


# ---- measuring ------------------------------------------------------------------------------------------------------


def lines(case: Case, dtypes: Sequence[torch.dtype], effort: Effort) -> Iterator[Line]:
    """Measure a program: each dtype, forward in inference and a step of training (forward, backward)."""
    for dtype in dtypes:
        if dtype != torch.float32 and not case.half:
            continue
        torch.manual_seed(0)
        model, run = case.make()
        model.to(dtype)
        for step in ("forward", "training step"):
            model.train(step != "forward")
            yield _line(case, model, run, dtype, step, effort)


def _line(
    case: Case, model: nn.Module, run: Callable[[], Tensor], dtype: torch.dtype, step: str, effort: Effort
) -> Line:
    def once() -> Tensor:
        if step == "forward":
            with torch.no_grad():
                return run()
        model.zero_grad()
        out = run()
        out.float().square().mean().backward()
        return out

    torch.manual_seed(1)
    before = once().detach().double()
    with regard.everywhere():
        torch.manual_seed(1)
        after = once().detach().double()
    error = float((after - before).norm() / before.norm())
    if not error < (1e-4 if dtype == torch.float32 else 0.05):
        raise AssertionError(f"{case.name}, {dtype}, {step}: outputs differ by {error:.1e} of their size")

    calls = max(1, math.ceil(LONG / _seconds(once, 1)))

    def ours() -> float:
        with regard.everywhere():
            return _seconds(once, calls)

    def rest() -> float:
        with without_attention():
            return _seconds(once, calls)

    rounds = interleaved({"torch": lambda: _seconds(once, calls), "regard": ours, "rest": rest}, effort)
    return _median(case, dtype, step, error, rounds)


def _seconds(run: Callable[[], object], calls: int) -> float:
    """The processor time of a call: what other programs take of the machine does not count."""
    start = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls


def _median(case: Case, dtype: torch.dtype, step: str, error: float, rounds: Rounds) -> Line:
    seconds = rounds.median(lambda one: one, "torch")
    ratio = rounds.median(lambda theirs, ours: theirs / ours, "torch", "regard")
    limit = rounds.median(lambda theirs, rest: theirs / rest, "torch", "rest")
    assert seconds is not None
    assert ratio is not None
    assert limit is not None
    return Line(case, str(dtype).removeprefix("torch."), step, seconds, ratio, limit, error, len(rounds.rounds))


@contextmanager
def without_attention() -> Generator[None]:
    """Inside, a call of torch's attention gives a sum of its arguments, which costs next to nothing."""
    with ExitStack() as stack:
        for name, nothing in (("why_torch", None), ("readable", (None, None))):
            stack.enter_context(patch.object(attention, name, return_value=nothing))
        for module, name in ((small_calls, "is_small"), (small_calls, "is_few"), (encoder_layers, "is_small")):
            stack.enter_context(patch.object(module, name, return_value=False))
        small_calls.forget()
        stack.callback(small_calls.forget)
        stack.enter_context(patch.object(attention, "attend_as_torch", _sum))
        stack.enter_context(regard.everywhere())
        yield


def _sum(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """A tensor like the output of attention, to which q, k and v all contribute, so that all get gradients."""
    means = (t.mean(-2, keepdim=True).repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return query + next(means) + next(means)


# ---- out ------------------------------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD = ("program", "dtype", "pass", "torch, ms", "speed-up", "at most", "outputs differ by")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, show, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("programs", "Measure whole programs with and without regard.everywhere().", seconds=4.0)
    parser.add_argument("--cases", metavar="TEXT", default="", help="the programs with this in their name alone")
    parser.add_argument("--dtype", choices=[*DTYPES], help="this type alone (default: both)")
    return parser


def show(args: argparse.Namespace) -> int:
    """Measure, and print the table; programs of packages that are not installed are named on stderr."""
    chosen = [case for case in CASES if args.cases.lower() in case.name.lower()]
    if not chosen:
        raise ProblemError(f"no program has {args.cases!r} in its name: {', '.join(case.name for case in CASES)}.")
    dtypes = [DTYPES[args.dtype]] if args.dtype else list(DTYPES.values())
    rows: list[tuple[str, ...]] = []
    _library = define_nms()
    with on_threads(args.threads or torch.get_num_threads()):
        for case in chosen:
            if case.package is not None and importlib.util.find_spec(case.package) is None:
                print(f"{case.name}: {case.package} is not installed", file=sys.stderr)
                continue
            for line in lines(case, dtypes, Effort(seconds=args.seconds, least=3)):
                rows.append(_row(line))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"on {machine()}\n")
    print(table(HEAD, rows))
    return 0


def _row(line: Line) -> tuple[str, ...]:
    return (
        line.case.name, line.dtype, line.step, f"{1e3 * line.seconds:.1f}", f"{line.ratio:.2f}", f"{line.limit:.2f}",
        f"{line.error:.0e}",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
