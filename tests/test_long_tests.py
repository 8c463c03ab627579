"""The default run leaves out what takes long, by a list that is measured."""

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import long_tests, selection
from tests.long_tests import chosen, is_default_run, listed, read, to_keep, without_a_test
from tests.test_selection import Passed


def test_every_test_that_is_listed_exists():
    assert long_tests.stale == []


def test_a_name_without_a_test_or_a_file_is_found(tmp_path: Path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    names = ["a.py::test_one", "a.py::test_gone", "b.py::test_not_collected", "gone.py::test_one"]
    assert without_a_test(names, {"a.py::test_one"}, tmp_path) == ["a.py::test_gone", "gone.py::test_one"]


def config(source: pytest.Config.ArgsSource = pytest.Config.ArgsSource.TESTPATHS, **chosen: object) -> Any:
    """What pytest was asked to run, as far as `is_default_run` looks at it."""
    option = {"keyword": "", "markexpr": "", "collectonly": False, "all": False, "share": None} | chosen
    return SimpleNamespace(option=SimpleNamespace(**option), args_source=source)


def test_a_part_of_the_tests_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert is_default_run(config())
    assert not is_default_run(config(pytest.Config.ArgsSource.ARGS))
    share = selection.Share(1, 2)
    options: list[dict[str, object]] = [{"keyword": "mask"}, {"markexpr": "model"}, {"collectonly": True}]
    for each in [*options, {"all": True}, {"share": share}]:
        assert not is_default_run(config(**each))
    monkeypatch.setattr(long_tests, "LISTED", tmp_path / "long_tests.txt")
    measured = long_tests._Measured()
    measured.times |= {"a.py::test_one": [3.0], "a.py::test_two": [0.1]}
    measured.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not long_tests.LISTED.exists()
    measured.pytest_sessionfinish(pytest.ExitCode.OK)
    assert read(long_tests.LISTED.read_text()) == {"a.py::test_one": 0}


TEXT = """
import pytest

def test_short():
    pass

def test_long():
    pass

@pytest.mark.parametrize("case", range(3))
def test_cases(case):
    pass

@pytest.mark.representative
def test_kept():
    pass
"""

EXHAUSTIVE = """
@pytest.mark.exhaustive
def test_exhaustive():
    pass

@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("dtype", range(5))
@pytest.mark.parametrize("call", range(7))
def test_pairs(dtype, call):
    pass
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ([], {"short": 1, "cases": 1, "kept": 1}),
        (["--long"], {"short": 1, "long": 1, "cases": 3, "kept": 1}),
        (["-k", "cases"], {"cases": 3}),
        (["-m", "not representative"], {"short": 1, "long": 1, "cases": 3}),
    ],
)
def test_long_tests_run_where_they_are_asked_for(
    options: list[str], passed: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / f"{tmp_path.name}.py"  # pytest keeps what it imported by its name
    file.write_text(TEXT)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = representative\npython_files = {file.name}")
    monkeypatch.setattr(long_tests, "LISTED", tmp_path / "long_tests.txt")
    monkeypatch.setattr(long_tests, "stale", [])
    listed = {"long": 0, "cases": 1, "kept": 0}
    long_tests.LISTED.write_text("".join(f"{kept} {file.name}::test_{name}\n" for name, kept in listed.items()))
    seen = Passed()
    command = [
        "--disable-plugin-autoload",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        f"--rootdir={tmp_path}",
    ]
    assert pytest.main([*command, str(tmp_path), *options], plugins=[selection, long_tests, seen]) == 0
    assert Counter(seen.names) == passed


def test_shares_add_each_test_once_to_the_default_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(TEXT + EXHAUSTIVE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = representative\n exhaustive\npython_files = {file.name}")
    monkeypatch.setattr(long_tests, "LISTED", tmp_path / "long_tests.txt")
    monkeypatch.setattr(long_tests, "stale", [])
    long_tests.LISTED.write_text(f"0 {file.name}::test_long\n1 {file.name}::test_cases\n2 {file.name}::test_pairs\n")

    def ran(*options: str) -> Counter[str]:
        seen = Passed()
        command = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "--import-mode=importlib"]
        arguments = [*command, f"--rootdir={tmp_path}", str(tmp_path), *options]
        assert pytest.main(arguments, plugins=[selection, long_tests, seen]) == 0
        return Counter(seen.cases)

    everything, default = ran("--all"), ran()
    assert (everything.total(), default.total()) == (42, 5)
    shares = [ran("--share", f"{number}/3") for number in (1, 2, 3)]
    assert all(default < share < everything for share in shares)
    assert sum((share - default for share in shares), default) == everything


def test_the_share_of_a_test_does_not_depend_on_its_group():
    """`--dist loadgroup` appends it, one process does not: both repeat what failed."""
    shares = [selection.Share(number, 97) for number in range(1, 98)]
    for name in ("a.py::test_one", "a.py::test_one[2-x@y]", "src/a.py::a.f"):
        for group in ("a.py", "model"):
            assert all(share.has(name) == share.has(f"{name}@{group}") for share in shares)


def test_laws_of_the_files_of_a_share_try_all_examples(tmp_path: Path):
    text = """
import pytest
from hypothesis import given, strategies
from tests.selection import examples

@pytest.mark.parametrize("tried", [examples(3, everything=8).max_examples])
def test_tried(tried):
    pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(3))
@given(strategies.none())
def test_law(case, nothing):
    pass
"""
    names = [f"test_law_in_a_share_{number}.py" for number in range(9)]
    for name in names:
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive")
    seen = Passed()
    command = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "--import-mode=importlib", "--share", "1/3"]
    assert pytest.main([*command, f"--rootdir={tmp_path}", str(tmp_path)], plugins=[selection, seen]) == 0
    share = selection.Share(1, 3)
    tried = [f"{name}::test_tried[{8 if share.has(name) else 3}]" for name in names]
    laws = [f"{name}::test_law[{case}]" for name in filter(share.has, names) for case in range(3)]
    assert Counter(seen.cases) == Counter(tried + laws)
    assert 0 < sum(map(share.has, names)) < len(names)


@pytest.mark.parametrize("wrong", ["0/3", "4/3", "2", "a/b"])
def test_a_share_that_is_none_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]):
    assert pytest.main(["--share", wrong, "--collect-only"], plugins=[selection]) == pytest.ExitCode.USAGE_ERROR
    assert "--share" in capsys.readouterr().err


def test_a_short_test_is_not_listed():
    assert listed({"a.py::test_one": [0.2], "a.py::test_two": [0.07] * 4}, ()) == {}


def test_a_long_test_keeps_the_cases_that_its_seconds_are_enough_for():
    assert listed({"a.py::test_one": [0.14] * 5, "a.py::test_two": [0.4] * 5, "a.py::test_three": [0.9] * 5}, ()) == {
        "a.py::test_one": 2,
        "a.py::test_two": 1,
        "a.py::test_three": 0,
    }
    assert to_keep([0.4]) == 0


def test_the_shortest_test_of_a_file_stays():
    assert listed({"a.py::test_one": [3.0], "a.py::test_two": [2.0], "b.py::test": [1.0, 1.5]}, ()) == {
        "a.py::test_one": 0,
        "b.py::test": 1,
    }


def test_representative_tests_stay():
    times = {"a.py::test_one": [3.0], "a.py::test_two": [2.0], "a.py::test_three": [0.1]}
    assert listed(times, {"a.py::test_one"}) == {"a.py::test_two": 0}


def test_cases_that_stay_lie_evenly():
    assert chosen([(i,) for i in range(10)], 3) == {3, 6, 9}
    assert chosen([(i,) for i in range(4)], 0) == set()
    assert chosen([()], 1) == {0}


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (2, 5, 2)])
def test_cases_that_stay_have_every_value_where_they_are_enough(sizes: tuple[int, ...]):
    product = list(itertools.product(*map(range, sizes)))
    for kept in (1, max(sizes), max(sizes) + 1, len(product)):
        stay = [product[i] for i in chosen(product, kept)]
        assert len(stay) == kept
        assert [len(set(values)) for values in zip(*stay, strict=True)] == [min(size, kept) for size in sizes]


def test_what_is_written_is_read():
    assert read("# head\n0 tests/a.py::test_one\n2 tests/b.py::test_two\n") == {
        "tests/a.py::test_one": 0,
        "tests/b.py::test_two": 2,
    }
