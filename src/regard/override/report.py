"""What was caught: calls by form and by reason, and how much faster regard was.

A report counts while somebody has it. One that prints also measures: a few of the calls of each form that regard runs
are run by torch as well, forward only, and the faster run of each counts.
"""

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from regard.torch_internals import dispatch_modes, is_compiling

TIMED = range(2, 5)
"""The calls of a form that are measured; the first makes a plan. None are under a mode that sees all operators."""


@dataclass(frozen=True)
class Form:
    """What calls have in common that are counted together.

    Attributes:
        query: the shape of the query.
        keys: the number of keys.
        text: dtype, mask, whether gradients flow, whether torch.compile traced it (then a call is a trace).
        why: the reason for which torch runs it; None for those of regard.
    """

    query: tuple[int, ...]
    keys: int
    text: str
    why: str | None


@dataclass
class Row:
    """The calls of a form.

    Attributes:
        calls: their number.
        seconds, torch_seconds: the fastest forward pass of regard and of torch; None where they were not measured.
    """

    form: Form
    calls: int = 0
    seconds: float | None = None
    torch_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """torch's time / regard's; None where they were not measured."""
        return self.torch_seconds / self.seconds if self.seconds and self.torch_seconds else None

    def time(self, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
        """Run both once."""
        with torch.no_grad():
            self.seconds = min(self.seconds or 1e9, _seconds(ours))
            self.torch_seconds = min(self.torch_seconds or 1e9, _seconds(theirs))


@dataclass(eq=False)
class Tally:
    """The counts of one `regard.everywhere`.

    Attributes:
        measures: whether calls are timed.
    """

    measures: bool = False
    by_form: dict[Form, Row] = field(default_factory=dict[Form, Row])

    def rows(self) -> tuple[Row, ...]:
        """Most frequent forms first."""
        return tuple(sorted(self.by_form.values(), key=lambda row: -row.calls))


FORMS = 1024
"""The most forms whose text is kept."""

_forms: dict[object, Form] = {}

Tallies = tuple[weakref.ref[Tally], ...]

tallies: Tallies = ()
"""Who counts; another object whenever this changes."""

_rows: dict[object, list[Row]] = {}
"""Where calls that are alike are counted, if no tally measures: of the tallies that there are now."""

_lock = Lock()


def listen(tally: Tally) -> None:
    """Count calls in it from now on, as long as it lives."""
    global tallies  # noqa: PLW0603
    with _lock:
        tallies = (*tallies, weakref.ref(tally, _forget))
        _rows.clear()


def ignore(tally: Tally) -> None:
    """Count no more calls in it."""
    global tallies  # noqa: PLW0603
    with _lock:
        tallies = tuple(each for each in tallies if each() not in (tally, None))
        _rows.clear()


def _forget(gone: weakref.ref[Tally]) -> None:
    global tallies  # noqa: PLW0603
    tallies = tuple(each for each in tallies if each is not gone)
    _rows.clear()


def is_on() -> bool:
    """Whether anybody counts."""
    return bool(tallies)


def count(query: Sequence[int], keys: int, like: Tensor, why: str | None, kind: str = "") -> list[Row]:
    """Count a call, and return the rows in which it is to be timed.

    Args:
        like: has the dtype of the call.
        kind: its mask, and whether gradients flow.
    """
    traced = is_compiling()
    known = (query, keys, like.dtype, kind, traced, why) if not traced else None
    rows = _rows.get(known)
    if rows is not None:
        for row in rows:
            row.calls += 1
        return []
    form = _forms.get(known)
    if form is None:
        text = f"{str(like.dtype).removeprefix('torch.')}{kind}{', traced' if traced else ''}"
        form = Form(tuple(map(_example, query)), _example(keys), text, why)
        if known is not None and len(_forms) < FORMS:
            _forms[known] = form
    timed: list[Row] = []
    counting, rows = tallies, []
    for each in counting:
        tally = each()
        if tally is not None:
            row = tally.by_form.get(form) or tally.by_form.setdefault(form, Row(form))
            row.calls += 1
            rows.append(row)
            if tally.measures and why is None and not traced and row.calls in TIMED and not dispatch_modes():
                timed.append(row)
    _remember(known, counting, rows)
    return timed


def _example(size: int | torch.SymInt) -> int:
    """A size; of one that torch.compile traces, that of the example, or 0.

    `int` would make a constant of it, and a graph for each size.
    """
    return size.node.hint or 0 if isinstance(size, torch.SymInt) else int(size)


def rows_of(query: Sequence[int], keys: int, like: Tensor, why: str | None, kind: str) -> list[Row] | None:
    """Where such calls are counted as long as `tallies` is the same; None where `count` must count each."""
    return _rows.get((query, keys, like.dtype, kind, False, why)) if tallies else []


def _remember(known: object, counting: Tallies, rows: list[Row]) -> None:
    """Count the next such call at once: a tiny one takes 15 us, and finding the rows by their forms 0.6."""
    measured = any(tally is not None and tally.measures for tally in (each() for each in counting))
    with _lock:
        if known is not None and not measured and counting is tallies and len(_rows) < FORMS:
            _rows[known] = rows


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def text(rows: Sequence[Row], most: int = 20) -> str:
    """The table that is printed.

    Args:
        most: the most forms that are listed.
    """
    ours = [row for row in rows if row.form.why is None]
    theirs: dict[str, int] = {}
    for row in rows:
        if row.form.why is not None:
            theirs[row.form.why] = theirs.get(row.form.why, 0) + row.calls
    run, passed = sum(row.calls for row in ours), sum(theirs.values())
    both = f"{run + passed:,} call{'s' * (run + passed != 1)} of attention"
    lines = [f"regard.everywhere: {both}, {run:,} run by regard, {passed:,} by torch"]
    if ours:
        lines.append(f"  {'run by regard':60} {'calls':>8} {'regard ms':>10} {'torch ms':>10}")
        lines += [_line(row) for row in ours[:most]]
        if len(ours) > most:
            lines.append(f"  and {len(ours) - most} other form{'s' * (len(ours) - most != 1)}")
    if theirs:
        lines.append(f"  {'passed on to torch':60} {'calls':>8}")
        lines += [f"  {why:60} {calls:8,}" for why, calls in theirs.items()]
    return "\n".join(lines)


def _line(row: Row) -> str:
    form = f"{list(row.form.query)}, {row.form.keys:,} keys, {row.form.text}"
    times = [row.seconds, row.torch_seconds]
    shown = " ".join(f"{'-' if t is None else f'{1e3 * t:.2f}':>10}" for t in times)
    return f"  {form:60} {row.calls:8,} {shown}{'' if row.ratio is None else f'   {row.ratio:.2f}x'}"


def show(rows: Sequence[Row]) -> None:
    """Print the table to stderr."""
    sys.stderr.write(f"{text(rows)}\n")
