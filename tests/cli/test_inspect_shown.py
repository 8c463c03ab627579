"""What `regard inspect` says, with a survey made up for it."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from regard.cli import heads_table
from regard.cli.main import main
from regard.inspect.surveying.closeup import OTHER_WEIGHTS, strongest
from regard.inspect.surveying.kinds import DEFINITIONS, Estimate, Head
from tests.cli.surveyed import Surveyed, without_stages
from tests.inspect.reports import report

pytestmark = pytest.mark.usefixtures("here")

LONG_TOKENS = [f" t{n}{'_and_more' * 8}" for n in range(29)]
LONG_NAME = f"models/{'trained-again-' * 7}[final]"


def of_long_names():
    """A report of long tokens, compared with a model of a long name whose heads have no induction."""
    options = {"tokens": LONG_TOKENS, "prompt": 3, "close_ups": [(1, 1)]}
    here, there = (report(**options, model=name) for name in ("one", LONG_NAME))
    heads = [replace(head, scores={**head.scores, "induction": Estimate(0.05, 0.1)}) for head in there.heads]
    return replace(here, other=replace(there, heads=tuple(heads)))


def test_it_says_what_ran_what_was_written_and_which_heads_stand_out(capsys):
    assert main(["inspect", "--top", "2"], tools=Surveyed()) == 0
    out, err = capsys.readouterr()
    assert without_stages(err) == ""
    made = report()
    for words in (
        "label",
        "3 layers of 4 heads on 2 key heads, 64 wide; 12.3 M parameters",
        "sdpa x3; 0.50 GFLOP for 5,220 query-key pairs",
        "24 tokens, 321 per second",
        "5 tokens, 12.3 per second",
        "logits at most 2.0e-05 from transformers' eager attention",
        "t22 t23 t24 t25 t26 t27 t28",
        "The 2 most remarkable:",
        "page: regard.html",
    ):
        assert words in out
    rows = [line.split()[0] for line in out.splitlines() if line[:1].isdigit() and "heads" not in line]
    assert rows == [head.name for head in made.heads[:2]]


def test_heads_are_counted_by_kind_first_with_how_sure_that_is(capsys):
    main(["inspect", "--top", "2"], tools=Surveyed())
    out = capsys.readouterr().out
    made = report()
    at = out.index("12 heads")
    lines = out[at:].splitlines()[1:5]
    assert sorted(line.split("  ")[0] for line in lines) == ["broad", "induction", "previous token", "sink"]
    for line in lines:
        kind, rest = line.split("  ", 1)
        own = [head.name for head in made.heads if head.kind == kind]
        assert rest.split() == ["3", "98", "%", *own]
    assert at < out.index("most remarkable:")


def test_a_narrow_table_of_kinds_breaks_the_names_of_heads_and_cuts_nothing():
    heads = [Head(20 + i, 10 + i, 0, {}, kind="shifted induction", sure=0.9) for i in range(7)] * 20
    printed = io.StringIO()
    Console(file=printed, width=72).print(heads_table.kinds(replace(report(), heads=tuple(heads))))
    out = printed.getvalue()
    assert "…" not in out
    assert out.split()[-10:] == ["140", "90", "%", "20.10", "21.11", "22.12", "23.13", "24.14", "25.15", "..."]


def test_the_columns_are_explained_below_the_table(capsys):
    main(["inspect", "--top", "2"], tools=Surveyed())
    out = capsys.readouterr().out
    legend = out[out.index("same kind: the share") :].splitlines()[:3]
    assert legend[0].startswith("same kind: the share of draws from three other texts")
    assert legend[1].startswith("chance: the score of uniform attention")
    assert legend[2] == "induction: measured on random tokens that repeat, not on the prompt"
    main(["inspect", "--top", "2", "--measures", "sink", "--force"], tools=Surveyed())
    assert "random tokens" not in capsys.readouterr().out


def test_sinks_are_shown_by_both_thresholds_in_a_row(capsys):
    main(["inspect", "--top", "2"], tools=Surveyed())
    lines = capsys.readouterr().out.splitlines()
    [row] = [i for i, line in enumerate(lines) if line.startswith("  sinks ")]
    assert lines[row : row + 2] == [
        "  sinks     25 % of heads have alpha (mean over rows of A[i,0]) above 0.3: token 0 at 0.50 of the mean |v|",
        "            17 % have it above 0.8: token 0 at 0.38 of the mean |v|",
    ]


def test_into_a_pipe_go_plain_columns(capsys):
    main(["inspect"], tools=Surveyed())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "━" not in out
    header = next(line for line in out.splitlines() if line.startswith("head"))
    assert header.split() == ["head", "kind", "same", "sink", "previous", "induction", "entropy"]


def test_a_pipe_gets_every_column_whole(capsys):
    asked = [
        "sink", "alpha", "previous", "current", "best_offset", "duplicate", "induction", "entropy", "effective_tokens"
    ]  # fmt: skip
    main(["inspect", "--measures", ",".join(asked)], tools=Surveyed())
    out = capsys.readouterr().out
    header = next(line for line in out.splitlines() if line.startswith("head"))
    assert header.split() == ["head", "kind", "same", *asked]
    first = report().heads[0]
    row = next(line for line in out.splitlines() if line.startswith(f"{first.name} "))
    assert row.split()[-2:] == [f"{first.value(measure):.3f}" for measure in ("entropy", "effective_tokens")]


def test_a_pipe_gets_long_tokens_and_long_names_of_models_whole(capsys):
    from regard.cli import survey_view

    survey_view.show(of_long_names(), top=1, heads=[(1, 1)])
    out = capsys.readouterr().out
    assert "…" not in out
    best = strongest(of_long_names().close_ups[0], 1)[0]
    query, key = (f"{LONG_TOKENS[at]!r} {at} " for at in (best.query, best.key))
    rows = [line.split() for line in out.splitlines() if query in line and key in line]
    assert [row[0] for row in rows] == 2 * [f"{best.weight:.3f}"]  # of both models
    [header] = [line for line in out.splitlines() if line.startswith("head  measure")]
    assert LONG_NAME in header


def test_a_closed_pipe_ends_the_report_with_its_own_error(monkeypatch):
    from regard.cli import survey_view

    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "write", write)
    with pytest.raises(BrokenPipeError):
        survey_view.show(report(), top=1)


def in_a_terminal(width, of=None, **options):
    from rich.console import Console

    from regard.cli.survey_view import show

    console = Console(force_terminal=True, width=width, file=io.StringIO(), highlight=False, record=True, _environ={})
    show(of or report(), **{"top": 12} | options, console=console)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_bars_within_its_width(width):
    text = in_a_terminal(width)
    assert "━" in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [30, 60])
def test_a_narrow_terminal_gets_every_number(width):
    text = in_a_terminal(width)
    assert "━" not in text
    first = report().heads[0]
    [row] = [line for line in text.splitlines() if line.startswith(f"{first.name} ")]
    scores = [first.value(measure) for measure in ("sink", "previous", "induction", "entropy")]
    assert row.split()[-4:] == [f"{score:.3f}" for score in scores]


def test_a_terminal_breaks_long_tokens_and_long_names_of_models_and_cuts_no_number():
    text = in_a_terminal(80, of_long_names(), top=1, heads=[(1, 1)])
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    best = strongest(of_long_names().close_ups[0], 1)[0]
    assert sum(line.startswith(f"  {best.weight:.3f}    ") for line in text.splitlines()) >= 2  # of both models
    assert "[final]" in text[text.index("differ most") :]
    assert ["0.2", "induction", "0.900", "0.050", "induction"] in [line.split() for line in text.splitlines()]


def test_the_end_of_a_long_prompt_begins_with_a_word():
    words = [f" word{n}" for n in range(99)]
    assert "  … word56 word57 " in in_a_terminal(120, report(tokens=words, prompt=90))


def test_the_end_of_a_long_prompt_without_spaces_is_shown(capsys):
    from regard.cli import survey_view

    made = report(tokens=["灯", *"台" * 299, " 海", "光"], prompt=301)
    survey_view.show(made, top=0)
    assert f"\n… {'台' * 238} 海光\n" in capsys.readouterr().out
    assert in_a_terminal(120, made).count("台") == 238


def test_measures_for_which_a_terminal_has_no_room_are_named():
    asked = ["entropy", "effective_tokens", "induction", "sink", "previous"]
    text = in_a_terminal(80, top=3, measures=asked)
    assert max(map(len, text.splitlines())) <= 80
    header = next(line for line in text.splitlines() if line.startswith("head "))
    assert header.split() == ["head", "kind", "same", "entropy", "effective_tokens", "induction", "sink"]
    assert "No room for previous: see the page" in text


def test_a_terminal_without_these_characters_gets_others(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["inspect"], tools=Surveyed(tokens=[" \xe9"] * 9)) == 0
    assert b" ? ? ? " in shown.getvalue()


def test_what_a_terminal_would_obey_is_only_shown(capsys):
    from regard.cli import survey_view

    survey_view.show(report(tokens=(" a", " b\x1b]0;title\x07", "[bold]", " c\r"), prompt=2), top=0)
    out = capsys.readouterr().out
    assert not set("\x1b\x07\r") & set(out)
    assert "[bold]" in out


# ---- what it shows when asked ---------------------------------------------------------------------------------------


def test_measures_that_were_asked_for_are_the_columns(capsys):
    main(["inspect", "--measures", "effective_tokens,sink", "--measures", "sink"], tools=Surveyed())
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("head"))
    assert header.split() == ["head", "kind", "same", "effective_tokens", "sink"]


def test_a_head_in_detail_has_every_score_its_meaning_and_its_strongest_pairs(capsys):
    main(["inspect", "--top", "0", "--heads", "1.1"], tools=Surveyed())
    out = capsys.readouterr().out
    detail = out[out.index("head 1.1, key head 0: ") :]
    made = report(close_ups=[(1, 1)])
    head = next(head for head in made.heads if head.name == "1.1")
    assert f"{head.kind}, the same in 98 % of draws on other texts" in detail
    score = head.score("induction")
    line = next(line for line in detail.splitlines() if line.split()[:1] == ["induction"])
    assert line.split()[1:6] == [f"{n:.3f}" for n in score[:3]] + ["to", f"{score[3]:.3f}"]
    for measure in made.measures:
        assert DEFINITIONS[measure].formula in detail
        assert DEFINITIONS[measure].source in detail
    best = strongest(made.close_ups[0], 1)[0]
    assert f"{best.weight:.3f}" in detail
    assert f"{made.tokens[best.query]!r} {best.query}" in detail
    assert f"{made.tokens[best.key]!r} {best.key}" in detail


def test_a_head_whose_weights_were_not_kept_says_so(capsys):
    from regard.cli import survey_view

    made = replace(report(), missing_close_ups={(1, 1): OTHER_WEIGHTS})
    survey_view.show(made, top=0, heads=[(1, 1), (0, 1)])
    out = capsys.readouterr().out
    assert f"No close-up: {OTHER_WEIGHTS}." in out
    assert "No close-up: none was asked for." in out


def test_chance_is_a_range_where_layers_have_other_masks(capsys):
    from regard.cli import survey_view

    made = report()
    windowed = [replace(h, scores={**h.scores, "sink": Estimate(0.5, 0.5 * (h.layer == 1))}) for h in made.heads]
    survey_view.show(replace(made, heads=tuple(windowed)), top=12)
    lines = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.split()[:4] == ["head", "kind", "same", "sink"])
    column = lines[at].index("sink")
    assert [line[column:].split("  ")[0] for line in lines[at + 1 : at + 3]] == ["0.000", "to 0.500"]
    shown = [head for head in windowed if head.layer != 1]
    survey_view.show(replace(made, heads=tuple(shown)), top=len(shown))
    assert "to 0." not in capsys.readouterr().out


def test_columns_with_ranges_of_chance_fit_the_terminal():
    made = report()
    heads = [replace(h, scores={"entropy": Estimate(0.5, 10.0 + h.layer)}) for h in made.heads]
    printed = io.StringIO()
    console = Console(file=printed, width=72, force_terminal=True, color_system=None)
    for measures in (("entropy",) * 3, ("sink", "entropy", "entropy")):
        console.print(heads_table.table(heads, heads_table.fitting(heads, measures, 72), console))
    assert max(map(len, printed.getvalue().splitlines())) <= 72
    assert "to 12.000" in printed.getvalue()


def test_what_is_compared_with_eager_is_named(capsys):
    from regard.cli import survey_view

    made = report()
    survey_view.show(replace(made, run=replace(made.run, eager_output="hidden states")), top=0)
    assert "hidden states at most 2.0e-05 from transformers' eager attention" in capsys.readouterr().out


def test_spaces_and_joiners_of_other_languages_are_shown_as_they_are():
    from regard.cli.survey_view import visible

    text = "« Où ? »\u00a0100\u202f000 東京\u3000大阪 می\u200cخواهم 👩\u200d👧 soft\u00adhyphen"
    assert visible(text) == text
    assert visible("\x00\x7f\x9b\ud800\ue000\u0378") == "␀" + 5 * "\ufffd"
    assert visible("\u202aa\u202eb\u2066c\u2069\u2028") == "\ufffda\ufffdb\ufffdc\ufffd\ufffd"


def test_what_ablation_cost_is_shown_with_its_caveat(capsys):
    main(["inspect", "--ablate", "zero"], tools=Surveyed())
    out = capsys.readouterr().out
    assert "loss 2.500 nats per token; with nothing in place of one head, at most +0.120 (0.3). No importance." in out
    assert next(line for line in out.splitlines() if line.startswith("head")).split()[-1] == "delta_loss"


def test_two_models_are_compared_kind_by_kind_and_head_by_head(capsys):
    from regard.cli import survey_view

    here, there = report(model="one"), report(model="two")
    heads = {head.name: head for head in there.heads}
    moved = replace(heads["1.1"], kind="broad", scores={**heads["1.1"].scores, "induction": Estimate(0.05, 0.1)})
    there = replace(there, heads=tuple(moved if head.name == "1.1" else head for head in there.heads))
    survey_view.show(replace(here, other=there), top=1)
    out = capsys.readouterr().out
    output = out[out.index("compared with two") :].splitlines()
    assert next(line.split() for line in output if line.startswith("induction")) == ["induction", "3", "2"]
    row = output[-2].split()
    assert row[:4] == ["1.1", "induction", "0.850", "0.050"]
    assert row[4:] == ["broad"]
    survey_view.show(replace(here, other=report(model="two")), top=1)
    out = capsys.readouterr().out
    assert "No score that names a head differs" in out
    assert "differ most" not in out
    survey_view.show(replace(here, other=report(layers=2)), top=1)
    assert "heads cannot be compared one by one" in capsys.readouterr().out


def test_what_was_asked_for_is_shown_of_the_second_model_too(capsys):
    tools = Surveyed(lambda name: (name, "tokenizer", name))
    options = ["--model", "one", "--compare-model", "two", "--heads", "1.1,0.2", "--ablate", "mean"]
    assert main(["inspect", *options], tools=tools) == 0
    out = capsys.readouterr().out
    output = out[out.index("compared with two") :]
    assert "loss 2.500 nats per token" in output
    assert report().continuation in output
    for name in ("1.1", "0.2"):
        assert f"head {name}, key head" in out
        assert f"head {name} of two, key head" in output


def test_two_models_are_compared_by_the_measures_that_were_asked_for(capsys):
    from regard.cli import survey_view

    here, there = report(model="one"), report(model="two")
    heads = {head.name: head for head in there.heads}
    moved = replace(heads["1.1"], scores={**heads["1.1"].scores, "entropy": Estimate(1.7, 2.6)})
    there = replace(there, heads=tuple(moved if head.name == "1.1" else head for head in there.heads))
    survey_view.show(replace(here, other=there), top=3, measures=["entropy", "sink"])
    out = capsys.readouterr().out
    output = out[out.index("compared with two") :].splitlines()
    assert output[-2].split()[:4] == ["1.1", "entropy", "0.400", "1.700"]
    survey_view.show(replace(here, other=there), top=3, measures=["sink"])
    assert "No head's sink differs: both models do the same on this prompt." in capsys.readouterr().out


def test_notes_of_a_run_are_shown(capsys):
    from regard.cli import survey_view

    survey_view.show(report(notes=["The text is short.\x1b"]), top=0)
    assert "note      The text is short.␛" in capsys.readouterr().out
