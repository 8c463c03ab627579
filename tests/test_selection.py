"""The default run has every value of every parameter, and `--all` has all of their combinations."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests import selection
from tests.selection import Axis, covers

TEXT = """
import pytest

@pytest.mark.exhaustive
def test_long():
    pass

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_some(case):
    pass

@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("dtype", "ab")
@pytest.mark.parametrize("engine", ["x", "y"])
@pytest.mark.parametrize(("name", "size"), [(0, 0), (1, 1), (2, 2)])
def test_product(dtype, engine, name, size):
    pass

@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("dtype", "abc")
@pytest.mark.parametrize("engine", ["x", pytest.param("y", marks=pytest.mark.exhaustive), "z"])
def test_marked_value(dtype, engine):
    pass

@pytest.mark.exhaustive(per="engine name")
@pytest.mark.parametrize("dtype", "ab")
@pytest.mark.parametrize("engine", ["x", "y"])
@pytest.mark.parametrize(("name", "size"), [(0, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("way", ["to", "fro"])
def test_pairs(dtype, engine, name, size, way):
    pass

@pytest.fixture(params=["a", "b", pytest.param("c", marks=pytest.mark.exhaustive), "d"])
def call(request):
    return request.param

@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("engine", ["x", "y"])
def test_of_fixture(call, engine):
    pass
"""

WHOLE = {
    "tests/benchmarks/test_gpu_kernels.py",
    "tests/examples/test_ring.py",
    "tests/fresh/test_memory_of_forgetting.py",
    "tests/fresh/test_shapes.py",
    "tests/inspect/surveying/test_smollm2.py",
    "tests/parallel/test_network.py",
}
"""The files of which no test is in the default run: each test takes long, and what it runs is in others."""


@pytest.mark.parametrize("sizes", [(1,), (7,), (2, 7), (7, 2, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_a_covering_part_has_every_value(sizes: tuple[int, ...], turn: int):
    product = itertools.product(*map(range, sizes))
    kept = [case for case in product if covers([Axis(*one) for one in zip(sizes, case, strict=True)], turn)]
    assert len(kept) == max(sizes)
    assert [set(values) for values in zip(*kept, strict=True)] == [set(range(size)) for size in sizes]


def test_short_parameters_meet_in_all_combinations_beside_a_long_one():
    product = itertools.product(range(7), range(2), range(2))
    kept = [case for case in product if covers([Axis(*one) for one in zip((7, 2, 2), case, strict=True)])]
    assert {case[1:] for case in kept} == set(itertools.product(range(2), repeat=2))


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ([], {"some": 2, "product": 6, "marked_value": 3, "pairs": 12, "of_fixture": 3}),
        (["--all"], {"long": 1, "some": 3, "product": 12, "marked_value": 9, "pairs": 24, "of_fixture": 8}),
    ],
)
def test_all_runs_what_the_default_leaves_out(options: list[str], passed: dict[str, int], tmp_path: Path):
    (tmp_path / "test_marked.py").write_text(TEXT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive")
    seen = Passed()
    command = [
        "--disable-plugin-autoload",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        f"--rootdir={tmp_path}",
        str(tmp_path),
        *options,
    ]
    assert pytest.main(command, plugins=[selection, seen]) == 0
    assert Counter(seen.names) == passed


def test_the_default_run_has_every_value_of_every_parameter(request: pytest.FixtureRequest):
    if request.config.getoption("--all"):
        pytest.skip("everything runs")
    parts = selection.values.items()
    assert [f"{test} {value}" for test, found in parts for value, is_kept in found.items() if not is_kept] == []


def test_the_default_run_has_tests_of_every_file(request: pytest.FixtureRequest):
    if request.config.getoption("--all"):
        pytest.skip("everything runs")
    assert {name for name, is_kept in selection.files.items() if not is_kept} <= WHOLE


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("skip", ["pytest.skip('no tea')", "pytest.skip('no tea', allow_module_level=True)", "pass"])
@pytest.mark.parametrize("options", [[], ["--no-skips"]])
def test_no_skips_fails_where_a_test_or_a_whole_file_is_skipped(
    skip: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [f"def test_it(): {skip}"] if "module" not in skip else [skip]
    name = f"{tmp_path.name}.py"  # pytest keeps what it imported by its name
    (tmp_path / name).write_text("\n".join(["import pytest", *lines, "def test_two(): pass"]))
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [
        "--disable-plugin-autoload",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        f"--rootdir={tmp_path}",
        str(tmp_path),
        *options,
    ]
    assert pytest.main(command, plugins=[selection]) == int(bool(options) and skip != "pass")
    assert ("no tea" in capsys.readouterr().out) == (bool(options) and skip != "pass")


class Passed:
    """The names of the functions whose cases passed, and the names of these."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.cases: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.cases.append(report.nodeid)
            self.names.append(report.nodeid.split("::test_")[1].split("[")[0])
