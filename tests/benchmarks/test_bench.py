"""`./bench`: the project's cases, their goals, and the page that is made of them."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as bench
from benchmarks import cases, instruction_set, memory, peers, report
from benchmarks.machine_kind import machine_kind, title
from benchmarks.performance_pages import CASES
from benchmarks.picture import draw
from benchmarks.report import Line
from regard import Causal, Window, attend
from regard.bench.case import Case
from regard.bench.measure import Result
from regard.bench.torch_calls import torch_calls

ROWS = [row for section in (*cases.SECTIONS, cases.MEMORY) for row in section.rows]

RESULT = Result(
    name="", dtype="float32", threads=2, backend="native", rounds=5, interrupted=False, seconds=0.01, pairs=1000,
    flops=4e9, bound="products", limit=5e11, share=0.8, torch_seconds=0.03, ratio=3.0, torch_share=0.27,
    torch_call="is_causal", cost=1.05,
)  # fmt: skip


def line(goal=cases.Goal(), **more):  # noqa: B008 - it is frozen
    return Line(cases.PREFILL.title, "causal", "float32", goal, replace(RESULT, **more))


def every_line():
    """A line for each case and type, with made-up numbers."""
    for job in bench._jobs(bench._parser().parse_args([])):
        found = Line(job.section, job.row.name, str(job.dtype)[6:], job.row.goals.get(job.dtype, cases.Goal()))
        inside = job.section == cases.MEMORY.title
        yield replace(found, mebibytes=12.0) if inside else replace(found, result=replace(RESULT, name=job.row.name))


def test_no_two_cases_of_a_section_have_the_same_name():
    for section in (*cases.SECTIONS, cases.MEMORY):
        names = [row.name for row in section.rows]
        assert len(set(names)) == len(names)


def test_what_is_quoted_of_others_belongs_to_a_case():
    assert {name for name, _ in peers.BEST} <= {row.name for row in ROWS}
    assert {dtype for _, dtype in peers.BEST} == set(report.TYPES)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.exhaustive if row.case.batch > 1 else ())
        for row in ROWS
        if row.case.queries <= 512
    ],
    ids=lambda row: row.name,
)
def test_a_case_is_the_same_to_torch(row):
    case = replace(row.case, cold=False)
    words = case.options(torch.float32)
    q, k, v = case.tensors(torch.float32)
    for way in torch_calls(case, torch.float32, words).values():
        torch.testing.assert_close(way(q, k, v), attend(q, k, v, **words))


@pytest.mark.parametrize(
    ("goal", "missed"),
    [
        (cases.Goal(), []),
        (cases.Goal(share=0.8, ratio=3.0, cost=1.05, microseconds=10_001), []),
        (cases.Goal(share=0.81, ratio=2.3), ["limit"]),
        (cases.Goal(share=0.81, ratio=3.1, cost=1.04), ["limit", "torch", "cost"]),
        (cases.Goal(microseconds=12), ["time"]),
        (cases.Goal(mebibytes=64), ["memory"]),
    ],
)
def test_a_goal_is_reached_or_reported_as_missed(goal, missed):
    assert line(goal).missed() == missed


def test_a_goal_whose_number_is_not_known_is_missed():
    assert line(cases.Goal(share=0.1), share=None).reached() == "no: limit"
    assert line().reached() == ""


def test_a_goal_beyond_the_limit_is_missed_with_the_greatest_ratio_that_the_limit_allows():
    assert line(cases.Goal(ratio=4.0)).reached() == "no: torch (limit: 3.75x)"  # 3 times as fast, at 0.8 of the limit
    assert line(cases.Goal(ratio=3.5)).reached() == "no: torch"


def test_columns_that_say_nothing_are_left_out():
    head, rows = report.cells(cases.PREFILL, [line(torch_seconds=None, ratio=None)])
    assert head == ["case", "type", "time", "speed", "limit", "of limit"]
    assert rows == [["causal", "fp32", "10.0 ms", "400 GFLOP/s", "500 GFLOP/s", "80.0 %"]]
    assert "backend" in report.cells(cases.PREFILL, [line(), line(backend="sdpa")])[0]


def test_the_page_has_every_section_and_its_picture():
    lines = list(every_line())
    page = report.page(lines, "a machine", "zen-9", "picture.svg")
    for section in (*cases.SECTIONS, cases.MEMORY):
        assert f"\n## {section.title}\n" in page
    assert "](picture.svg)" in page
    assert page.endswith("|\n")


def test_the_picture_is_sound_and_shows_each_case_and_no_limit_twice():
    lines = [line for line in every_line() if line.section == cases.DECODE.title]
    svg = ET.fromstring(draw(lines))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(row.name) for row in cases.DECODE.rows] == [1] * len(cases.DECODE.rows)
    bars = [rect for rect in svg.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == "ours"]
    assert len(bars) == 1 + len(lines)  # and one in the legend


def test_a_machine_that_was_not_quiet_is_distinguished_from_one_that_was():
    assert report.unrest([line(limit=5.0e11), line(limit=5.2e11), line(limit=9e11, threads=4)]) == []
    assert report.unrest([line(limit=5.0e11), line(limit=2.0e11)]) == [
        "The machine was not quiet: its own limit moved between 200 and 500 GFLOP/s (fp32, 2 threads)."
    ]


def test_the_picture_does_without_limits():
    assert ET.fromstring(draw([line(share=None)])) is not None


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Two cases that take no time in place of all."""
    rows = (
        cases.Row(Case("small, causal", 37, 37, 4, 2, 8, mask=Causal), {torch.float32: cases.Goal(ratio=1e9)}),
        cases.Row(Case("small, window", 37, 37, 4, 2, 8, mask=lambda: Causal() & Window(5)), dtypes=(torch.float32,)),
    )
    section = cases.Section("Prompts", "Small ones.", rows, cases.BESIDE_LIMIT)
    monkeypatch.setattr(cases, "SECTIONS", (section,))
    monkeypatch.setattr(report, "SECTIONS", (section,))
    monkeypatch.setattr(bench, "is_older", lambda: False)
    for module in (cases, report):
        monkeypatch.setattr(module, "MEMORY", replace(cases.MEMORY, rows=()))


@pytest.mark.usefixtures("tiny")
def test_it_prints_a_table_and_how_many_goals_are_reached(capsys):
    assert bench.main(["--quick", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("small, causal") == 2
    assert out.count("small, window") == 1
    assert "no: torch" in out
    assert out.endswith("0 of 1 goals reached\n")


@pytest.mark.usefixtures("tiny")
def test_cases_and_types_can_be_picked(capsys):
    assert bench.main(["--list", "--cases", "CAUSAL", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == "Prompts: small, causal bf16\n"


@pytest.mark.usefixtures("tiny")
def test_json_has_what_the_table_has(capsys):
    assert bench.main(["--rounds", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in found["lines"]] == ["small, causal", "small, causal", "small, window"]
    assert found["lines"][0]["missed"] == ["torch"]
    assert found["lines"][0]["result"]["rounds"] == 1


@pytest.mark.usefixtures("tiny")
def test_the_page_and_the_picture_are_written(tmp_path, capsys):
    (tmp_path / "performance").mkdir()
    other = tmp_path / "performance" / "cascade-lake.md"
    other.write_text(f"Measured by `./bench` on a machine; backend\n\n| {CASES[0]} | fp32 | 10 ms | 21 ms |\n")
    assert bench.main(["--rounds", "1", "--write", str(tmp_path)]) == 0
    kind = machine_kind()
    assert {path.name for path in other.parent.iterdir()} == {other.name, f"{kind}.md", f"{kind}.svg"}
    assert "small, causal" in (other.parent / f"{kind}.md").read_text()
    overview = (tmp_path / "performance.md").read_text()
    assert f"(performance/{kind}.md)" in overview
    assert "[Cascade Lake](performance/cascade-lake.md): a machine" in overview
    assert "2.10x" in next(line for line in overview.splitlines() if line.startswith(f"| {CASES[0]} | fp32 |"))


@pytest.mark.parametrize(("best", "ratio"), [("avx2", 1.0), ("neon", 1.0), ("avx512", 1e9), ("amx", 1e9), (None, 1e9)])
def test_the_goal_of_a_machine_with_older_instructions_is_to_be_ahead(tiny, monkeypatch, best, ratio):
    monkeypatch.setattr(instruction_set.native, "best_isa", lambda: best)
    monkeypatch.setattr(bench, "is_older", instruction_set.is_older)
    job = next(bench._jobs(bench._parser().parse_args([])))
    assert job.row.goals[torch.float32].ratio == ratio


@pytest.mark.usefixtures("tiny")
def test_a_limited_machine_has_a_page_of_its_own_whose_goal_is_to_be_ahead(monkeypatch, tmp_path, capsys):
    limited = []
    monkeypatch.setattr(bench, "limit", limited.append)
    assert bench.main(["--rounds", "1", "--isa", "portable", "--write", str(tmp_path)]) == 0
    kind = f"{machine_kind()}-as-portable"
    page = (tmp_path / "performance" / f"{kind}.md").read_text()
    assert limited == ["portable"]
    assert page.startswith(
        f"# Performance on {title(machine_kind())} limited to portable\n\nMeasured by `./bench --isa portable`"
    )
    assert "≥ 1x" in page
    assert "Beside others" not in page
    assert f"[{title(kind)}](performance/{kind}.md)" in (tmp_path / "performance.md").read_text()


def test_limits_change_no_other_goal():
    row = cases.Row(
        Case("small", 1, 1), {torch.float32: cases.Goal(share=0.8, ratio=2.3), torch.bfloat16: cases.Goal(cost=1.1)}
    )
    assert row.limited().goals == {
        torch.float32: cases.Goal(share=0.8, ratio=1.0),
        torch.bfloat16: cases.Goal(cost=1.1),
    }
    assert replace(row, goals={torch.float32: cases.Goal(ratio=0.5)}).limited().goals[torch.float32].ratio == 0.5


@pytest.mark.usefixtures("tiny")
def test_an_interruption_shows_what_there_is_and_writes_nothing(monkeypatch, tmp_path, capsys):
    run = bench.Job.run

    def interrupted(job, *more):
        if job.row.name == "small, window":
            raise KeyboardInterrupt
        return run(job, *more)

    monkeypatch.setattr(bench.Job, "run", interrupted)
    assert bench.main(["--rounds", "1", "--write", str(tmp_path)]) == 130
    out = capsys.readouterr().out
    assert "small, causal" in out
    assert "small, window" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tiny")
def test_a_case_that_fails_is_reported_and_the_others_go_on(monkeypatch, capsys):
    measure = bench.measure

    def failing(case, *more, **named):
        if case.name == "small, causal":
            raise RuntimeError("no room")
        return measure(case, *more, **named)

    monkeypatch.setattr(bench, "measure", failing)
    assert bench.main(["--rounds", "1", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "no: no room" in out
    assert "small, window" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing like it"], "no case has 'nothing like it' in its name"),
        (["--write", "--cases", "causal"], "--write writes the whole page"),
        (["--write", "--dtype", "float32"], "--write writes the whole page"),
        (["--quick", "--rounds", "3"], "leave one of them out"),
        (["--json", "/nowhere/found.json"], "there is no folder /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, message, capsys):
    assert bench.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_an_instruction_set_limits_regard_and_torch_of_a_new_process(monkeypatch):
    started = []
    monkeypatch.setattr(instruction_set.os, "execve", lambda *command: started.append(command))
    instruction_set.limit("portable")
    (program, arguments, environment), *more = started
    assert (program, arguments[0], more) == (sys.executable, sys.executable, [])
    assert (environment["REGARD_ISA"], environment["ATEN_CPU_CAPABILITY"]) == ("portable", "default")
    for name, value in instruction_set.limits("portable").items():
        monkeypatch.setenv(name, value)
    instruction_set.limit("portable")
    assert len(started) == 1
    assert "limited to default" in report.machine()


def test_each_instruction_set_limits_torch_to_no_better_one():
    sets = [instruction_set.limits(isa)["ONEDNN_MAX_CPU_ISA"] for isa in ("avx2", "avx512", "avx512vnni", "avx512bf16")]
    assert sets == ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"]
    assert instruction_set.limits("a better one") == {"REGARD_ISA": "a better one"}


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--dtype", "int8"], ["--rounds", "few"], ["more"]])
def test_arguments_that_are_none_are_refused_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_shows_goals_in_colour():
    console = Console(force_terminal=True, width=120, record=True)
    bench._show([line(cases.Goal(share=0.1))], console)
    assert "1 of 1 goals reached" in console.export_text()


@pytest.mark.exhaustive
def test_memory_is_measured_in_a_process_of_its_own(monkeypatch):
    case = next(row.case for row in cases.MEMORY.rows if row.name.startswith("window"))
    assert 0 <= memory.extra_bytes(case, 1) < 2 << 30
