"""What the benchmark commands share: they print, and write pages only where they are asked to."""

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import (
    cache_kvpress,
    cache_memory,
    cache_quality,
    caches,
    command,
    cost,
    flex,
    gpu,
    inspect,
    lengths,
    linear,
    modules,
    others,
    programs,
    ring,
    schedules,
)

WRITING = [
    bench,
    linear,
    caches,
    cache_quality,
    cache_memory,
    cache_kvpress,
    schedules,
    inspect,
    cost,
    others,
    ring,
    gpu,
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", WRITING)
def test_nothing_is_written_unless_it_is_asked_for(module, tmp_path):
    parser = module._parser()
    assert parser.parse_args([]).write is None
    assert parser.parse_args(["--write"]).write == command.DOCS
    assert parser.parse_args(["--write", str(tmp_path)]).write == tmp_path


@pytest.mark.parametrize("module", [*WRITING, lengths, modules, flex, programs])
def test_arguments_that_a_command_does_not_have_are_refused_in_one_line(module, capsys):
    with pytest.raises(SystemExit) as end:
        module.main(["--nothing"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_is_printed_or_written_with_its_pictures(tmp_path, capsys):
    command.publish_page(None, "page.md", "A", {"picture.svg": "<svg/>"})
    assert capsys.readouterr().out == "A\n"
    command.publish_page(tmp_path, "page.md", "A", {"picture.svg": "<svg/>"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"page.md": "A", "picture.svg": "<svg/>"}
    assert capsys.readouterr().out == ""


def test_a_part_is_printed_or_written_between_its_marks(tmp_path, capsys):
    command.publish_part(None, "page.md", "one", "A")
    assert capsys.readouterr().out == "A\n"
    (tmp_path / "page.md").write_text("<!-- begin one -->\n<!-- end one -->\n")
    command.publish_part(tmp_path, "page.md", "one", "A")
    assert (tmp_path / "page.md").read_text() == "<!-- begin one -->\n\nA\n\n<!-- end one -->\n"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (caches, ["--only", "memory"]),
        (cache_memory, ["--only", "x"]),
        (cache_quality, ["--only", "x"]),
        (inspect, ["--quick"]),
        (gpu, ["--quick"]),
    ],
)
def test_a_page_is_written_as_a_whole(module, arguments, tmp_path, capsys):
    assert module.main(["--write", str(tmp_path), *arguments]) == 2


def test_every_benchmark_that_the_script_lists_is_run_by_it():
    script = (ROOT / "bench").read_text()
    listed = set(re.findall(r"^#   \./bench ([a-z][a-z-]*)", script, re.MULTILINE))
    run = set(
        re.search(r"case \$\{1-\} in\n(.*?)\) what=", script, re.DOTALL)[1].replace("|", " ").replace("\\", " ").split()
    )
    assert listed == run
    assert all((ROOT / "benchmarks" / f"{name.replace('-', '_')}.py").is_file() for name in run)
