"""What the default run leaves to `./test --all` because it takes long, as measured: tests/long_tests.txt.

The file has a line for each long test, with the number of its cases that the default run keeps, spread over the values
of its parameters; most keep none. `./test --write-long` measures the tests of the default run and writes the file anew.
It changes nothing with `--long`, as scripts/ run tests, nor where tests are chosen by name or by mark (`-k`, `-m`,
`FILE::TEST`). Some tests stay whatever they take: those marked `representative`, which are the first to fail where a
whole way of calling breaks (compiled, on a GPU's kernels, from the command line), the rules of tests/architecture,
doctests, and the shortest test of a file that would have none.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.atomic_write import write_whole
from tests.selection import in_share, of_share

LISTED = Path(__file__).with_name("long_tests.txt")

SECONDS = 0.3
"""The longest time that the kept cases of one test may take together."""

SINGLE = 0.5
"""A test whose cases take longer than this keeps none."""

Times = Mapping[str, list[float]]
"""The seconds of each case, by the name of the test."""

stale: list[str] = []
"""Tests that are listed, and that the collected files do not have or whose file does not exist."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help=f"run the tests that tests/{LISTED.name} leaves out as well")
    parser.addoption("--write-long", action="store_true", help=f"measure the default run and write tests/{LISTED.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-long") and not hasattr(config, "workerinput"):
        if not is_default_run(config):
            raise pytest.UsageError("--write-long measures the whole default run: name no tests, and choose none.")
        config.pluginmanager.register(_Measured(), "the times of tests")


@pytest.hookimpl(trylast=True)  # after tests/selection.py
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not applies(config):
        return
    kept = read(LISTED.read_text())
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.stash.get(of_share, False):
            cases[name_of(item.nodeid)].append(item)
    stale[:] = without_a_test(kept, cases, config.rootpath)
    left: list[pytest.Item] = []
    for test in kept.keys() & cases.keys():
        own = cases[test]
        stay = chosen([_values_of(item) for item in own], kept[test])
        others = (item for i, item in enumerate(own) if i not in stay and not item.get_closest_marker("representative"))
        left += [item for item in others if not in_share(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]


def _values_of(item: pytest.Item) -> tuple[int, ...]:
    """Which value of each parameter a case has."""
    call: Any = getattr(item, "callspec", None)
    return () if call is None else tuple(call.indices.values())


def applies(config: pytest.Config) -> bool:
    """Whether this run leaves long tests out: not where all are run or measured, nor where some are chosen."""
    chooses = config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args)
    return not (chooses or any(config.getoption(option) for option in ("--all", "--long", "--write-long")))


def is_default_run(config: pytest.Config) -> bool:
    """Whether this run collects what `./test` does, and runs it."""
    o = config.option
    if o.keyword or o.markexpr or o.collectonly or o.all or o.share:
        return False
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def without_a_test(names: Collection[str], collected: Collection[str], root: Path) -> list[str]:
    """The names of tests that the collected files do not have, or whose file does not exist."""
    files = {test.split("::")[0] for test in collected}
    in_question = [name for name in names if (file := name.split("::")[0]) in files or not (root / file).exists()]
    return [name for name in in_question if name not in collected]


def name_of(nodeid: str) -> str:
    """The name of the test that a case belongs to."""
    return nodeid.partition("[")[0].partition("@")[0]


def chosen(cases: Sequence[tuple[int, ...]], kept: int) -> set[int]:
    """The indices of the cases that the default run keeps.

    A greedy cover: each case that is added has the most parameter values that no case before it has. Ties go to cases
    at regular intervals, then to the first.

    Args:
        cases: for each case, the index of its value of each parameter.
        kept: how many cases are kept.
    """
    even = {i for i in range(len(cases)) if (i + 1) * kept // len(cases) != i * kept // len(cases)}
    found, seen = set[int](), set[tuple[int, int]]()
    for _ in range(min(kept, len(cases))):
        rest = (i for i in range(len(cases)) if i not in found)
        best = max(rest, key=lambda i: (len({*enumerate(cases[i])} - seen), i in even))
        found.add(best)
        seen |= {*enumerate(cases[best])}
    return found


def read(text: str) -> dict[str, int]:
    """The number of cases that the default run keeps of each listed test."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return {test: int(kept) for kept, test in lines}


def listed(times: Times, stay: Collection[str]) -> dict[str, int]:
    """The number of cases that the default run keeps of each long test, except the tests in `stay`, which keep all."""
    found = {test: to_keep(own) for test, own in times.items() if sum(own) > SECONDS and test not in stay}
    files = {test.split("::")[0] for test in times}
    for file in files:
        own = [test for test in times if test.startswith(f"{file}::")]
        if not any(found.get(test, 1) for test in own):
            found[min(own, key=lambda test: max(times[test]))] = 1
    return {test: kept for test, kept in sorted(found.items()) if kept < len(times[test])}


def to_keep(seconds: list[float]) -> int:
    """The number of cases that a long test keeps, by the seconds of each."""
    mean = sum(seconds) / len(seconds)
    if len(seconds) == 1 or mean > SINGLE:
        return 0
    return max(1, int(SECONDS / mean))


class _Measured:
    """Measures the tests, in whichever process of pytest-xdist they run, and writes the list at the end."""

    def __init__(self) -> None:
        self.times = defaultdict[str, list[float]](list)
        self.stay = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or report.skipped:
            return
        test = name_of(report.nodeid)
        self.times[test].append(report.duration)
        if "representative" in report.keywords or test.startswith(("tests/architecture/", "src/")):
            self.stay.add(test)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus:  # what failed or did not run was not measured
            return
        head = "# Written by `./test --write-long`: cases that the default run keeps, and the test (long_tests.py).\n"
        lines = [f"{kept} {test}\n" for test, kept in listed(self.times, self.stay).items()]
        write_whole(LISTED, (head + "".join(lines)).encode())
