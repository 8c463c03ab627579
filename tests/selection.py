"""Which tests the default run leaves to `./test --all`: those marked `exhaustive`, whole or in part.

A test that is marked without arguments runs with `--all` only. Where it has several parameters, the default run may
keep a part that covers them instead of their whole product, say of 4 x 5 x 38 cases:

    @pytest.mark.exhaustive(per="test")       every value of every parameter at least once: 38 cases
    @pytest.mark.exhaustive(per="engine")     the same for each value of `engine`, in other combinations: 5 x 38 cases

`per="engine dtype"` does so for each pair of values of the two. A fixture with parameters is a parameter as well. A
value that is itself marked runs with `--all` only; the part covers the other values.

A law of hypothesis whose examples take long says how many the default run tries, and how many `--all` does:

    @given(case=cases())
    @examples(12, everything=50)

`./test --share 2/5` is the default run and the second of five shares of the rest: of the tests that `--all` runs
besides, long ones too (tests/long_tests.py), those whose names fall into it. Together the shares have every test once.
The laws of a file fall into it together, by the name of the file, and then try as many examples as with `--all`.
"""

import re
import zlib
from collections import defaultdict
from typing import Any, NamedTuple

import hypothesis
import pytest

ParameterSet = type(pytest.param())


files = defaultdict[str, bool](bool)
"""Of each file that was collected: whether the default run has a test of it."""

values = defaultdict[str, dict[Any, bool]](dict)
"""Of each test of which the default run keeps a part, and each value of its parameters: whether it is in the part."""


class Share(NamedTuple):
    """One of several shares of the tests that the default run leaves out."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> "Share":
        """A share as it is written on the command line: 2/5 is the second of five."""
        number, of = map(int, text.split("/"))
        if not 1 <= number <= of:
            raise ValueError(text)
        return cls(number, of)

    def has(self, nodeid: str) -> bool:
        """Whether a test, or the laws of a file, are in it, by the name. Cases of one test are in different shares.

        The group of tests that pytest-xdist appends to the name of one, `a.py::test_one[2]@a.py`, does not count.
        """
        name = re.sub(r"@[^@\]]*$", "", nodeid)
        return zlib.crc32(name.encode()) % self.of == self.number - 1


of_share = pytest.StashKey[bool]()
"""Whether a test that is marked `exhaustive` runs as it is in the share that was asked for."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test, those marked `exhaustive` as well")
    parser.addoption("--share", type=Share.read, metavar="K/N", help="run the K-th of N shares of the rest as well")
    parser.addoption("--no-skips", action="store_true", help="fail where a test is skipped, and say why it is")


def in_share(item: pytest.Item) -> bool:
    """Whether a test is in the share that was asked for."""
    share: Share | None = item.config.getoption("--share")
    is_law = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return share is not None and share.has(item.nodeid.split("::")[0] if is_law else item.nodeid)


_all = False  # whether laws try all examples; known before a file of tests is imported


def tries_all(collector: pytest.Collector) -> bool:
    """Whether the laws of a file try all examples."""
    share: Share | None = collector.config.getoption("--share")
    return bool(collector.config.getoption("--all") or (share and share.has(collector.nodeid)))


def pytest_collectstart(collector: pytest.Collector) -> None:
    global _all  # noqa: PLW0603
    if isinstance(collector, pytest.Module):
        _all = tries_all(collector)


def examples(default: int, *, everything: int, **more: Any) -> hypothesis.settings:
    """Settings of a law: how many random examples the default run tries, and how many `--all` and the file's share."""
    return hypothesis.settings(max_examples=everything if _all else default, **more)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-skips"):
        config.option.reportchars += "s"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and exitstatus == 0 and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        out = left_out(item)
        item.stash[of_share] = out and in_share(item)
        (left if out and not item.stash[of_share] else kept).append(item)
        files[item.nodeid.split("::")[0]] |= not out
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


class Axis(NamedTuple):
    """One `parametrize` of a test: how many values it has, and which of them a case takes."""

    size: int
    at: int


def covers(axes: list[Axis], turn: int = 0) -> bool:
    """Whether a case belongs to the part that has every value of every axis at least once.

    The i-th value of the longest axis goes with the values i + turn of the others, counted round and round; two others
    that are equally long move against each other after each round, so that they meet in all combinations.
    """
    longest, *others = sorted(axes, key=lambda axis: -axis.size)
    round_ = longest.size  # after how many values of the longest axis the others have met in all combinations so far
    for axis in others:
        if axis.at != (longest.at + longest.at // round_ + turn) % axis.size:
            return False
        round_ = axis.size if axis is others[0] else round_ * axis.size
    return True


def left_out(item: pytest.Item) -> bool:
    """Whether only `--all` runs this test."""
    pers = [mark.kwargs.get("per") for mark in item.iter_markers("exhaustive")]
    return None in pers or any(not _is_in_part(item, per) for per in pers)


def _is_in_part(item: pytest.Item, per: str) -> bool:
    axes = _axes(item)
    of_test = values[item.nodeid.split("[")[0]]
    taken = [(names, axis.at) for names, axis in axes.items()]
    fixed = [] if per == "test" else [next(names for names in axes if name in names) for name in per.split()]
    turn = sum(axes.pop(names).at for names in fixed)
    found = covers(list(axes.values()), turn)
    of_test.update({value: found or of_test.get(value, False) for value in taken})
    return found


def _axes(item: pytest.Item) -> dict[tuple[str, ...], Axis]:
    """The axes of a test by the names of their parameters; several parameters of one `parametrize` are one axis.

    A fixture with parameters is an axis, too.
    """
    call: Any = item.callspec  # pyright: ignore[reportAttributeAccessIssue]
    params: dict[str, Any] = call.params
    found: dict[tuple[str, ...], Axis] = {}
    for mark in item.iter_markers("parametrize"):
        names, of_mark = mark.args[:2]
        names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        case = [params[name] for name in names]
        rows = [_row(value, len(names)) for value in of_mark if not _is_for_all(value)]
        index = next(i for i, row in enumerate(rows) if all(a is b for a, b in zip(row, case, strict=True)))
        found[names] = Axis(len(rows), index)
    fixtures: dict[str, Any] = item._fixtureinfo.name2fixturedefs  # pyright: ignore[reportAttributeAccessIssue]
    of_marks = {name for names in found for name in names}
    for name in (name for name in params if name not in of_marks):
        of_fixture = list(fixtures[name][-1].params)
        at = sum(not _is_for_all(value) for value in of_fixture[: call.indices[name]])
        found[name,] = Axis(sum(not _is_for_all(value) for value in of_fixture), at)
    return found


def _is_for_all(value: Any) -> bool:
    """Whether a value of `parametrize` is marked to run with `--all` only."""
    return isinstance(value, ParameterSet) and any(mark.name == "exhaustive" for mark in value.marks)


def _row(value: Any, names: int) -> tuple[Any, ...]:
    """One value of `parametrize`, as a value for each of its names."""
    if isinstance(value, ParameterSet):
        return tuple(value.values)
    return (value,) if names == 1 else tuple(value)
