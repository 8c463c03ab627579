"""What the experiments share: a claim, the checks that decide its verdict, the command line, and the record.

A script of this folder makes one `Experiment` and calls its `main`. Its function `measure` returns a `Result`: the
checks, a sentence for the table of docs/experiments.md, and the numbers that `draw` draws. The verdict is counted
from the checks, never written by hand:

    all checks hold: "holds"    some: "holds in part"    none: "does not hold here"
"""

import json
import math
import platform
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

import regard
from regard.atomic_write import write_whole
from regard.machine import processor

DOCS = Path(__file__).parents[1] / "docs"

IDS = re.compile(rb"\b[mp][0-9a-f]{10}\b")
"""Of clip paths and markers in an SVG by matplotlib."""

HOLDS, IN_PART, NOT_HERE = "holds", "holds in part", "does not hold here"


@dataclass(frozen=True)
class Check:
    """A number that was measured, and the range in which the claim holds; a bound that is None is not there.

    >>> Check("variance / d_k", 1.01, 0.95, 1.05).line()
    'yes  variance / d_k: 1.01 (expected 0.95 to 1.05)'
    """

    what: str
    measured: float
    low: float | None = None
    high: float | None = None

    def holds(self) -> bool:
        """Whether the number is in the range; NaN is in none."""
        above = self.low is None or self.measured >= self.low
        below = self.high is None or self.measured <= self.high
        return above and below and not math.isnan(self.measured)

    def expected(self) -> str:
        """The range as text."""
        if self.low is not None and self.high is not None:
            return short(self.low) if self.low == self.high else f"{short(self.low)} to {short(self.high)}"
        return f"at least {short(self.low)}" if self.low is not None else f"at most {short(self.high)}"

    def line(self) -> str:
        """The check as a line of text."""
        return f"{'yes' if self.holds() else 'no '}  {self.what}: {short(self.measured)} (expected {self.expected()})"


@dataclass(frozen=True)
class Result:
    """What an experiment found.

    Attributes:
        measured: the outcome in a sentence or two, for the table.
        checks: they decide the verdict.
        data: numbers and lists for the figure; JSON.
        note: what a reader must know to judge the outcome.
    """

    measured: str
    checks: Sequence[Check]
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    note: str = ""

    def verdict(self) -> str:
        """One of the three verdicts."""
        found = [check.holds() for check in self.checks]
        return HOLDS if all(found) else IN_PART if any(found) else NOT_HERE


@dataclass(frozen=True)
class Experiment:
    """A claim and how it is tested.

    Attributes:
        name: of the script, without `.py`.
        claim: the statement under test, in one sentence.
        source: where it is made.
        expected: what should be seen if it holds.
        measure: (seed, quick) to the result; quick is a version of seconds.
        draw: (figure of matplotlib, data of the result) draws.
        size: of the figure, inches.
        quick_decides: whether the quick version has the verdict of the whole.
    """

    name: str
    title: str
    claim: str
    source: str
    expected: str
    measure: Callable[[int, bool], Result]
    draw: Callable[[Any, dict[str, Any]], None]
    size: tuple[float, float] = (9.0, 3.2)
    quick_decides: bool = True

    def run(self, seed: int = 0, *, quick: bool = False) -> dict[str, Any]:
        """Measure, and return the record."""
        torch.manual_seed(seed)
        started, cpu = time.perf_counter(), time.process_time()
        result = self.measure(seed, quick)
        return {
            "name": self.name, "title": self.title, "claim": self.claim, "source": self.source,
            "expected": self.expected, "measured": result.measured, "verdict": result.verdict(),
            "checks": [
                {"what": c.what, "measured": c.measured, "expected": c.expected(), "holds": c.holds()}
                for c in result.checks
            ],
            "note": result.note, "data": result.data, "seed": seed, "quick": quick,
            "seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
            "machine": f"{processor()}, {(n := torch.get_num_threads())} thread{'s' * (n > 1)}",
            "versions": f"regard {regard.__version__}, torch {torch.__version__.partition('+')[0]}, "
            f"python {platform.python_version()}",
            "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the command line of the script."""
        parser = ArgumentParser(description=f"{self.title}: {self.claim}")
        parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
        parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
        parser.add_argument(
            "--write", nargs="?", type=Path, const=DOCS, metavar="FOLDER",
            help="write the record and the figure into docs/experiments, or FOLDER/experiments",
        )  # fmt: skip
        options: Namespace = parser.parse_args(arguments)
        print(f"{self.title}\n\nclaim     {self.claim}\nsource    {self.source}\nexpected  {self.expected}\n")
        record = self.run(options.seed, quick=options.quick)
        for c in record["checks"]:
            mark = "yes" if c["holds"] else "no "
            print(f"{mark}  {c['what']}: {short(c['measured'])} (expected {c['expected']})")
        print(f"\nmeasured  {record['measured']}\nnote      {record['note']}\nverdict   {record['verdict']}")
        print(f"seed {record['seed']}, {record['seconds']} s ({record['cpu_seconds']} s of CPU)")
        if options.write is not None:
            self.write(record, options.write / "experiments")

    def write(self, record: dict[str, Any], folder: Path) -> None:
        """Write the record and the figure into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{self.name}.svg", self.figure(record))
        text = json.dumps(record, indent=1, ensure_ascii=False)
        write_whole(folder / f"{self.name}.json", (text + "\n").encode())
        print(f"written: {folder / self.name}.json, .svg")

    def figure(self, record: dict[str, Any]) -> bytes:
        """The figure as SVG: the same bytes for the same record."""
        matplotlib: Any = import_module("matplotlib")
        Figure: Any = import_module("matplotlib.figure").Figure  # noqa: N806
        settings = {"svg.hashsalt": "regard", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}
        out = BytesIO()
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure, record["data"])
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "regard"})
        return numbered(out.getvalue())


def numbered(svg: bytes) -> bytes:
    """The same picture with its ids numbered in their order.

    matplotlib makes ids of coordinates, whose last digits are not the same each time.

    >>> numbered(b'<g id="p0123456789"/><use href="#m00000000ff"/><g clip-path="url(#p0123456789)"/>')
    b'<g id="p0"/><use href="#m1"/><g clip-path="url(#p0)"/>'
    """
    found = {name: number for number, name in enumerate(dict.fromkeys(IDS.findall(svg)))}
    return IDS.sub(lambda one: one[0][:1] + str(found[one[0]]).encode(), svg)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the greatest of some numbers.

    >>> span([0.5, 0.25, 1])
    '0.25 to 1.00'
    """
    found = list(values)
    return f"{min(found):{form}} to {max(found):{form}}"


def listed(values: Mapping[str, float], form: str = ".2f") -> str:
    """Numbers with their names.

    >>> listed({"none": 0.031, "T5": 0.056})
    '0.03 (none), 0.06 (T5)'
    """
    return ", ".join(f"{value:{form}} ({name})" for name, value in values.items())


def legends(*plots: Any) -> None:
    """A small legend in each of these axes of matplotlib."""
    for axes in plots:
        axes.legend(fontsize=7)


def short(number: float | None) -> str:
    """Three digits, as a person would write them.

    >>> short(0.123456), short(2.0), short(120000), short(4.2e-9)
    ('0.123', '2', '120,000', '4.2e-09')
    """
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 and abs(number) < 1e7 else f"{number:.3g}"
