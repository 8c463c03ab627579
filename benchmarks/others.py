"""regard beside vLLM's CPU kernel and OpenVINO, in the same rounds on the machine at hand; outputs are compared first.

`./bench others` installs both packages into a folder of their own (`.others`): only their kernels are called. Each gets
its own layout of keys and values before the time is taken. regard gets tensors and a mask, also where the others get
sequences of their own lengths (packed documents, padded rows).
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import cases, command, openvino_calls, vllm_calls
from benchmarks.machine_kind import machine_kind, title
from benchmarks.performance_pages import publish_overview
from benchmarks.report import TYPES, machine, table
from benchmarks.vllm_calls import Rows
from regard import attend
from regard.atomic_write import write_whole
from regard.bench.case import Case
from regard.bench.rounds import Effort, Measure, interleaved, on_threads, timed
from regard.cli.durations import call_duration
from regard.errors import ProblemError

PAGE = "performance/others"

ABOUT = """\
Milliseconds of one call. Every round measures each library once, and ratios are medians over rounds of the ratio
within a round, so that a busy machine slows all alike. Keys and values are in pages for vLLM (128 tokens a page) and
OpenVINO (32), in tensors for regard, and in the type of the call; decoding reads them from memory. vLLM and OpenVINO
get packed documents and padded rows as sequences of their own lengths. OpenVINO's operator is always causal and has no
softcap. regard and vLLM write to new memory in each call, as their layers do; OpenVINO keeps its own. A measured call
follows another one by the same library, as layers follow each other. With AMX, vLLM does not split the keys of more
than 16 query heads a key head among threads."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest difference between two libraries' outputs for one call of random normal tensors."""

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Arguments:
    """What the other libraries get beside the tensors.

    Attributes:
        lengths: tokens of each sequence where one row holds several, or each row is shorter than the tensor.
        packed: whether those sequences are in one row, one after the other.
    """

    causal: bool = True
    window: int | None = None
    alibi: bool = False
    softcap: float = 0.0
    lengths: tuple[int, ...] | None = None
    packed: bool = False


def _case(name: str) -> Case:
    return next(row.case for section in cases.SECTIONS for row in section.rows if row.name == name)


CASES: tuple[tuple[Case, Arguments], ...] = tuple(
    (_case(name), more)
    for name, more in (
        ("dense, 2,048, d 64", Arguments(causal=False)),
        ("dense, 4,096, d 128", Arguments(causal=False)),
        ("causal, 2,048, d 64", Arguments()),
        ("causal, 4,096, d 128", Arguments()),
        ("causal, 32/8 heads, 2,048, d 128", Arguments()),
        ("causal, window 512, 4,096, d 64", Arguments(window=512)),
        ("causal, window 512, 16,384, d 64", Arguments(window=512)),
        ("ALiBi, causal, 2,048, d 64", Arguments(alibi=True)),
        ("8 packed documents of 512, causal, 4,096, d 64", Arguments(lengths=(512,) * 8, packed=True)),
        (
            "8 rows padded to 2,048, no padded query, d 64",
            Arguments(causal=False, lengths=tuple(range(256, 2049, 256))),
        ),
        ("softcap, causal, 16/8 heads, 2,048, d 128", Arguments(softcap=50.0)),
        ("decode, 32/8 heads, 8,192 keys, d 128", Arguments()),
        ("decode, 32/32 heads, 8,192 keys, d 128", Arguments()),
        ("decode, 32/1 heads, 8,192 keys, d 128", Arguments()),
        ("decode, 32/8 heads, 8,192 keys, d 128, 8 rows", Arguments()),
        ("8 queries, 32/8 heads, 8,192 keys, d 128", Arguments()),
    )
)


@dataclass(frozen=True)
class Line:
    """Seconds of each library in one case, and of each other library by regard's."""

    case: str
    dtype: torch.dtype
    seconds: dict[str, float]
    ratios: dict[str, float]


def measure(case: Case, more: Arguments, dtype: torch.dtype, effort: Effort) -> Line:
    """Compare the outputs, then time all libraries that have the case; raises ProblemError where outputs differ."""
    copies = case.copies(dtype)
    options = case.options(dtype)
    calls: dict[str, list[Call]] = {
        "regard": [lambda q=q, k=k, v=v: attend(q, k, v, **options) for q, k, v in copies],
        "vLLM": [_vllm(more, *copy) for copy in copies],
    }
    if more.causal and not more.softcap:
        calls["OpenVINO"] = [_openvino(more, *copy) for copy in copies]
    ours = _tokens(calls["regard"][0](), more)
    for name, others in calls.items():
        theirs = others[0]().float()
        theirs = _tokens(theirs, more) if name == "regard" else theirs
        if (off := (theirs - ours.float()).abs().max().item()) > TOLERANCE[dtype]:
            raise ProblemError(
                f"{case.name}, {TYPES[str(dtype)[6:]]}: {name} differs by {off:.2g}; nothing was measured"
            )
    for own in calls.values():
        for call in own:  # OpenVINO allocates memory in the first call of each copy
            call()
    rounds = interleaved({name: _in_turn(own) for name, own in calls.items()}, effort).rounds
    return Line(
        case.name,
        dtype,
        {name: statistics.median(one[name] for one in rounds) for name in calls},
        {n: statistics.median(one[n] / one["regard"] for one in rounds) for n in calls if n != "regard"},
    )


def _in_turn(calls: list[Call]) -> Measure:
    """A measurement of one call behind another by the same library, as layers follow each other.

    Memory that a library takes from the system in each call may have gone back to the machine's host while others ran:
    an output of 32 MiB then took 50 to 140 ms instead of 4 to get its pages again.
    """
    turns = cycle(calls)

    def call() -> Tensor:
        return next(turns)()

    once = timed(call)

    def measure() -> float:
        call()
        return once()

    return measure


def _vllm(more: Arguments, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return vllm_calls.prepare(
        _tokens(q, more), _tokens(k, more), _tokens(v, more), _rows(q, k, more), causal=more.causal, window=more.window,
        slopes=_slopes(more, q), softcap=more.softcap,
    )  # fmt: skip


def _openvino(more: Arguments, q: Tensor, k: Tensor, v: Tensor) -> Call:
    return openvino_calls.prepare(
        _tokens(q, more), _tokens(k, more), _tokens(v, more), _rows(q, k, more), window=more.window,
        slopes=_slopes(more, q),
    )  # fmt: skip


def _slopes(more: Arguments, q: Tensor) -> Tensor | None:
    heads = q.shape[1]
    return torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]) if more.alibi else None


def _rows(q: Tensor, k: Tensor, more: Arguments) -> Rows:
    if more.lengths is not None:
        return Rows(more.lengths, more.lengths)
    return Rows((q.shape[2],) * len(q), (k.shape[2],) * len(k))


def _tokens(t: Tensor, more: Arguments) -> Tensor:
    """[batch, heads, tokens, dim] as [tokens, heads, dim] of all sequences, without padding."""
    rows = t.transpose(1, 2)
    if more.lengths is None or more.packed:
        return rows.flatten(0, 1).contiguous()
    return torch.cat([row[:length] for row, length in zip(rows, more.lengths, strict=True)])


# ---- the command ----------------------------------------------------------------------------------------------------


def rendered(lines: Sequence[Line]) -> str:
    """The table, in Markdown."""
    rows = [
        (
            line.case, TYPES[str(line.dtype)[6:]], call_duration(line.seconds["regard"]),
            *(call_duration(line.seconds[name]) if name in line.seconds else "" for name in ("vLLM", "OpenVINO")),
            *(f"{line.ratios[name]:.2f}x" if name in line.ratios else "" for name in ("vLLM", "OpenVINO")),
        )
        for line in lines
    ]  # fmt: skip
    head = ("case", "type", "regard", "vLLM", "OpenVINO", "vLLM / regard", "OpenVINO / regard")
    return table(head, rows)


@torch.no_grad()
def show(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it if that was asked for."""
    folder = Path(os.environ.get("REGARD_OTHERS", ".others"))
    for library in (vllm_calls, openvino_calls):
        try:
            library.load(folder)
        except (ImportError, OSError) as error:
            raise ProblemError(f"{folder}: {error}; `./bench others` installs both libraries there") from error
    lines, kind = list[Line](), machine_kind()
    threads = args.threads or torch.get_num_threads()
    with on_threads(threads):
        for case, more in CASES:
            for dtype in TOLERANCE:
                if args.cases in case.name:
                    lines.append(measure(case, more, dtype, Effort(args.seconds)))
                    print(rendered(lines).splitlines()[-1], file=sys.stderr)
    text = f"# Beside other libraries on {title(kind)}\n\nMeasured by `./bench others` on {machine()}. {ABOUT}\n\n"
    print(text + rendered(lines))
    if args.write is not None:
        write_whole(args.write / PAGE / f"{kind}.md", (text + rendered(lines) + "\n").encode())
        publish_overview(args.write)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("others", "regard beside vLLM and OpenVINO.", page=f"{PAGE}/KIND.md", seconds=2.0)
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains this")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
