"""The results: a line for each case and type, with its goal; as tables for terminals and as a page."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks import peers
from benchmarks.cases import MEMORY, SECTIONS, Goal, Section
from benchmarks.machine_kind import AS, title
from regard import native
from regard.bench.measure import Result
from regard.cli.durations import call_duration
from regard.inspect.surveying.run import machine as device

TYPES = {"float32": "fp32", "bfloat16": "bf16"}

METHOD = """\
Every time is a median over rounds. A round measures regard, torch's `scaled_dot_product_attention` and the machine's
limit once each (short calls as often as fill 5 ms), and ratios are taken within a round, so that a busy machine slows
all alike. torch gets the call in every equivalent form (`is_causal`, a bool mask, an additive mask), and
the one that is fastest in a first measurement counts. Plans are known: a first call has made them. Speeds count kept
pairs only. The limit is what registers can multiply and add, or what memory can be read, whichever takes longer for
what the case needs at least. Exponentials are not counted; with AMX, in bfloat16, they take longer than these products.
"torch (limit: 1.5x)" in the last column: at the limit, a case would be 1.5 times as fast as torch, so that its goal,
which is of another machine, cannot be reached here."""

OWN = "`regard bench` does the same for shapes of one's own."

BESIDE = f"""\
The fastest of vLLM's CPU kernel, OpenVINO, zentorch, ONNX Runtime, FlexAttention (compiled), llama.cpp and plain torch
matmuls in each case, as measured on {peers.WHERE}; not in the same rounds as ours. What converts keys and values to
fewer bits is left out."""


@dataclass(frozen=True)
class Line:
    """One case in one type, measured: `result`, or for the section on memory `mebibytes`; or why it `failed`."""

    section: str
    name: str
    dtype: str
    goal: Goal
    result: Result | None = None
    mebibytes: float | None = None
    failed: str | None = None

    def missed(self) -> list[str]:
        """Which of its goals were not reached."""
        r, g = self.result, self.goal
        least = {"limit": (r and r.share, g.share), "torch": (r and r.ratio, g.ratio)}
        most = {
            "cost": (r and r.cost, g.cost),
            "time": (r and 1e6 * r.seconds, g.microseconds),
            "memory": (self.mebibytes, g.mebibytes),
        }
        short = [name for name, (found, goal) in least.items() if goal is not None and (found is None or found < goal)]
        return short + [
            name for name, (found, goal) in most.items() if goal is not None and (found is None or found > goal)
        ]

    def reached(self) -> str:
        """`yes`, `no: limit, torch`, or nothing where there is no goal; why it failed, if it did."""
        if self.failed is not None:
            return f"no: {self.failed}"
        if self.goal == Goal():
            return ""
        return f"no: {', '.join(map(self._how_far, missed))}" if (missed := self.missed()) else "yes"

    def _how_far(self, missed: str) -> str:
        """A goal that was missed; with the greatest ratio to torch's time that the machine allows, if that is less."""
        r, goal = self.result, self.goal.ratio
        if missed != "torch" or goal is None or r is None or r.ratio is None or not r.share:
            return missed
        greatest = r.ratio / r.share
        return missed if greatest >= goal else f"torch (limit: {_times(greatest)})"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "missed": self.missed()}


def machine() -> str:
    """The machine and the versions of the measurement."""
    library = native.isa() if native.available() else "without the compiled library"
    limited = os.environ.get("ATEN_CPU_CAPABILITY")
    torch_name = f"torch {torch.__version__}" + (f" limited to {limited}" if limited else "")
    day = datetime.now(UTC).date()
    python = platform.python_version()
    return f"{device(torch.device('cpu'))}, {library}, {torch_name}, Python {python}, {day}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# ---- cells ----------------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _limit(r: Result) -> str:
    if r.limit is None:
        return ""
    return f"{r.limit / 1e9:,.0f} {'GFLOP/s' if r.bound == 'products' else 'GB/s'}"


def _rate(r: Result) -> str:
    if r.bound == "stream" and r.share is not None and r.limit is not None:
        return f"{r.share * r.limit / 1e9:,.0f} GB/s"
    return f"{r.rate / 1e9:,.0f} GFLOP/s"


def _goal(line: Line) -> str:
    g = line.goal
    said = {
        f"≥ {_percent(g.share)}": g.share,
        f"≥ {g.ratio:g}x" if g.ratio is not None else "": g.ratio,
        f"≤ {g.cost:.2f}" if g.cost is not None else "": g.cost,
        f"≤ {g.microseconds} us": g.microseconds,
        f"< {g.mebibytes} MiB": g.mebibytes,
    }
    return ", ".join(text for text, goal in said.items() if goal is not None)


Cell = Callable[[Result], str]

COLUMNS: dict[str, Cell] = {
    "time": lambda r: call_duration(r.seconds),
    "speed": _rate,
    "limit": _limit,
    "of limit": lambda r: "" if r.share is None else f"{100 * r.share:.1f} %",  # a goal may be missed by less than 1 %
    "cost": lambda r: "" if r.cost is None else f"{r.cost:.2f}",
    "torch": lambda r: "" if r.torch_seconds is None else call_duration(r.torch_seconds),
    "torch / regard": lambda r: _times(r.ratio),
}


def cells(section: Section, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a section's table; columns that say nothing, or nothing new, are left out."""
    columns: dict[str, Callable[[Line], str]] = {
        "case": lambda line: line.name,
        "type": lambda line: TYPES.get(line.dtype, line.dtype),
        "backend": lambda line: "" if line.result is None else line.result.backend,
    }
    for name in section.columns:
        columns[name] = lambda line, cell=COLUMNS[name]: "" if line.result is None else cell(line.result)
    columns["MiB"] = lambda line: "" if line.mebibytes is None else f"{line.mebibytes:,.0f}"
    columns |= {"goal": _goal, "reached": Line.reached}
    kept = {name: [cell(line) for line in lines] for name, cell in columns.items()}
    kept = {
        name: column for name, column in kept.items() if any(column) and (name != "backend" or len(set(column)) > 1)
    }
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def by_section(lines: Sequence[Line]) -> list[tuple[Section, list[Line]]]:
    """The sections that have lines, each with its own."""
    found = [(section, [line for line in lines if line.section == section.title]) for section in (*SECTIONS, MEMORY)]
    return [(section, own) for section, own in found if own]


def unrest(lines: Sequence[Line]) -> list[str]:
    """How far the machine's own limit moved while all this was measured, where that is by more than a quarter."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for r in (line.result for line in lines):
        if r is not None and r.limit is not None and r.bound is not None:
            what = (r.bound, TYPES.get(r.dtype, r.dtype) if r.bound == "products" else "memory", r.threads)
            found.setdefault(what, []).append(r.limit / 1e9)
    return [
        f"The machine was not quiet: its own limit moved between {min(limits):,.0f} and {max(limits):,.0f} "
        f"{'GFLOP/s' if bound == 'products' else 'GB/s'} ({what}, {threads} thread{'s' * (threads > 1)})."
        for (bound, what, threads), limits in found.items()
        if max(limits) > 1.25 * min(limits)
    ]


# ---- the page -------------------------------------------------------------------------------------------------------


def page(lines: Sequence[Line], where: str, kind: str, picture: str) -> str:
    """The page of one kind of machine, docs/performance/KIND.md."""
    limited = f" --isa {kind.partition(AS)[2]}" if AS in kind else ""
    backends = ", ".join(sorted({line.result.backend for line in lines if line.result is not None}))
    parts = [
        f"# Performance on {title(kind)}",
        f"Measured by `./bench{limited}` on {where}; backend: {backends}. {OWN}",
        METHOD,
        *unrest(lines),
        f"![Share of the machine's limit that regard and torch reach]({picture})",
    ]
    for section, own in by_section(lines):
        head, rows = cells(section, own)
        bold = [[f"**{cell}**" if cell.startswith("no: ") else cell for cell in row] for row in rows]
        parts += [f"## {section.title}", section.about, table(head, bold)]
    return "\n\n".join([*parts, *_beside_peers(lines, kind)]) + "\n"


def _beside_peers(lines: Sequence[Line], kind: str) -> list[str]:
    """Beside what others took, where this is the machine on which they were measured."""
    if kind != peers.KIND or torch.get_num_threads() != peers.THREADS:
        return []
    rows = [
        (line.name, TYPES[line.dtype], call_duration(line.result.seconds), f"{best:g} ms", whose,
         _times(best / 1e3 / line.result.seconds))
        for line in lines
        if line.result is not None and (line.name, line.dtype) in peers.BEST
        for best, whose in [peers.BEST[line.name, line.dtype]]
    ]  # fmt: skip
    return [
        "## Beside others",
        BESIDE,
        table(("case", "type", "regard", "best other", "whose", "other / regard"), rows),
    ]
