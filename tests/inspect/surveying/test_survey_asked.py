"""What a survey can be asked for: measures, layers, heads, tokens, ablation."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from regard.errors import ProblemError
from regard.inspect.intervene import ablated, mean_outputs
from regard.inspect.measures import measure as measures_module
from regard.inspect.measures.catalogue import MEASURES
from regard.inspect.surveying import closeup
from regard.inspect.surveying.closeup import close_up_rows
from regard.inspect.surveying.kinds import Head, strength
from regard.inspect.surveying.report import Report
from regard.inspect.surveying.survey import check, survey
from regard.integrate.transformers import use_regard
from tests.inspect.small import TEXT, agrees_with_eager, assert_between, small

SURVEYED = [measure.key for measure in MEASURES]
ON_DEMAND = [measure.key for measure in MEASURES if measure.on_demand]


def test_heads_that_are_asked_for_are_kept_to_the_last_weight(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=0, heads=["2.5", (0, 1)], compare_eager=False)
    llama.set_attn_implementation("eager")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        eager = llama(ids, output_attentions=True).attentions
    assert [(close.layer, close.head) for close in report.close_ups] == [(2, 5), (0, 1)]
    for close in report.close_ups:
        shown = close_up_rows(close, 0, ids.shape[1])
        assert np.abs(shown - eager[close.layer][0, close.head].numpy()).max() < 1e-3


def test_of_a_long_text_the_most_remarkable_heads_are_kept_within_a_budget(llama, tokenizer, monkeypatch):
    one = 256 * (4 * 4 + 12)
    monkeypatch.setattr(closeup, "BUDGET", 20 * one)
    report = survey(llama, tokenizer, TEXT * 18, tokens=246, new_tokens=10, compare_eager=False)
    assert len(report.tokens) == 256
    assert {close.bytes for close in report.close_ups} == {one}
    kept = [(close.layer, close.head) for close in report.close_ups]
    order = [(head.layer, head.head) for head in report.heads]
    assert kept == sorted(kept, key=order.index)
    assert strongest_of_their_kinds(report, kept, each=2)
    monkeypatch.setattr(closeup, "BUDGET", 1)
    least = survey(llama, tokenizer, TEXT * 18, tokens=246, new_tokens=10, compare_eager=False)
    assert len(least.close_ups) == 1
    assert strongest_of_their_kinds(report, [(least.close_ups[0].layer, least.close_ups[0].head)], each=1)
    some = survey(llama, tokenizer, TEXT * 18, tokens=246, new_tokens=10, compare_eager=False, heads=order[-2:])
    assert [(close.layer, close.head) for close in some.close_ups] == order[-2:]


def strongest_of_their_kinds(report: Report, kept: list[tuple[int, int]], each: int) -> bool:
    """Whether those kept are so many of each of some kinds, and no other of a kind is stronger."""
    of_kind: dict[str, list[Head]] = {}
    for head in sorted(report.heads, key=strength, reverse=True):
        of_kind.setdefault(head.kind, []).append(head)
    best = {(head.layer, head.head) for heads in of_kind.values() for head in heads[:each]}
    return set(kept) <= best


def test_layers_that_are_asked_for_are_the_only_ones(llama, tokenizer):
    whole = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False)
    some = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False, layers=[2, 0])
    assert {head.layer for head in some.heads} == {0, 2}
    scores = {(head.layer, head.head): head.scores for head in whole.heads}
    for head in some.heads:
        assert head.scores == scores[head.layer, head.head]
    assert {picture.layer for picture in some.pictures} == {0, 2}
    assert some.run.notes == ("2 of 3 layers were measured (0, 2), and kinds are counted and ranked among them.",)


def test_a_survey_makes_every_measure_that_can_be_asked_for(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False, measures=SURVEYED)
    places = {"best_offset_at", "best_shift_at", "column_at", "positional_at"}
    assert set(SURVEYED) | places == set(report.measures)
    for head in report.heads:
        for measure in SURVEYED:
            assert head.value(measure) is not None, measure
            assert head.score(measure).chance is not None, measure
        assert head.value("best_shift_at") in range(1, 9)
        assert head.value("best_offset_at") in range(1, 9)
        assert head.value("positional_at") in range(len(report.tokens))
        assert head.value("column_at") in range(len(report.tokens))
    usual = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False)
    assert set(report.measures) - set(usual.measures) == set(ON_DEMAND)


def test_without_a_measure_that_takes_one_no_sweep_is_made(llama, tokenizer, monkeypatch):
    monkeypatch.setattr(measures_module, "sweep", lambda *_, **__: pytest.fail("a sweep"))
    report = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False, measures=["sink"])
    assert report.pictures == ()
    assert report.profiles == {}
    assert {"sink", "previous", "induction"} <= set(report.measures)
    assert "entropy" not in report.measures
    monkeypatch.undo()
    swept = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False, measures=["entropy"])
    assert len(swept.pictures) == 18
    assert not {"effective_tokens", "column_at", "best_offset_at"} & set(swept.measures)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_ablation_says_what_the_loss_is_without_each_head(llama, tokenizer, how):
    report = survey(llama, tokenizer, TEXT, new_tokens=2, compare_eager=False, layers=[1], ablate=how)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    use_regard(llama)

    def loss():
        logits = llama(ids).logits
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    made = report.ablations
    assert made is not None
    assert (made.how, made.tokens) == (how, ids.shape[1] - 1)
    with torch.no_grad():
        assert made.loss == pytest.approx(loss(), abs=1e-5)
        assert set(made.deltas) == {(1, head) for head in range(6)}
        for place, delta in made.deltas.items():
            by = "zero" if how == "zero" else mean_outputs(llama, [ids], llama)
            with ablated(llama, [place], by):
                assert delta == pytest.approx(loss() - made.loss, abs=1e-5)
    for head in report.heads:
        assert head.value("delta_loss") == made.deltas[head.layer, head.head]
        assert_between(head)
    assert "understate" in made.caveat


def test_a_model_that_writes_nothing_has_no_loss_to_ablate(tokenizer):
    with pytest.raises(ProblemError, match="ablate needs a causal language model"):
        survey(small(BertForMaskedLM, BertConfig), tokenizer, TEXT, ablate="zero")


def test_a_text_is_read_as_far_as_was_asked(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT * 3, tokens=20, new_tokens=3, compare_eager=False)
    ids = tokenizer(TEXT * 3)["input_ids"][:20]
    assert (report.prompt_tokens, len(report.tokens)) == (20, 23)
    assert report.text == tokenizer.decode(ids)
    assert report.run.notes == ()
    shorter = survey(llama, tokenizer, TEXT, tokens=200, new_tokens=3, compare_eager=False)
    assert shorter.text == TEXT
    assert shorter.run.notes == (
        f"The text has only {shorter.prompt_tokens} of the requested 200 tokens: all of it was read.",
    )


def test_a_rotating_model_reads_on_beyond_its_positions_with_a_note(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT * 20, tokens=270, new_tokens=2)
    assert agrees_with_eager(report)
    assert len(report.tokens) == 272
    [note] = report.run.notes
    assert "272 tokens, and the model was trained on 256 positions" in note


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tokens": 1}, "tokens is 1: expected the number"),
        ({"measures": ["sinks"]}, "measures has 'sinks': expected some of .*sink, "),
        ({"measures": ["kind"]}, "measures has 'kind'"),
        ({"ablate": "half"}, "ablate is 'half': expected 'zero' or 'mean'"),
        ({"layers": [0, 3]}, "layer 3 does not exist: the model has 3 layers, 0 to 2"),
        ({"heads": [(3, 0)]}, "layer 3 does not exist"),
        ({"heads": [(1, 6)]}, "head 1.6 does not exist: layer 1 has 6 heads, 1.0 to 1.5"),
        ({"heads": [(1, 1)], "layers": [0]}, r"head 1.1 is in none of the selected layers \(0\)"),
    ],
)
def test_what_the_model_does_not_have_is_refused(llama, tokenizer, asked, message):
    with pytest.raises(ProblemError, match=message):
        survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False, **asked)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": "3"}, "layers is '3': expected layer numbers"),
        ({"layers": 1.5}, "layers is 1.5"),
        ({"layers": [True]}, "layers has True: expected layer numbers"),
        ({"layers": -1}, "layer -1 does not exist: the model has 3 layers, 0 to 2"),
        ({"heads": [18]}, "18 names no head: expected"),
        ({"heads": (1, 2)}, "1 names no head"),
        ({"heads": 18.6}, "heads is 18.6: expected a list of names"),
        ({"heads": ["18-6"]}, "'18-6' names no head: expected"),
        ({"heads": [(0, 1.0)]}, r"\(0, 1.0\) names no head"),
        ({"heads": [(0, -1)]}, "head 0.-1 does not exist"),
        ({"measures": 3}, "measures is 3: expected a list of names"),
        ({"measures": [3]}, "measures has 3"),
        ({"tokens": "32k"}, "tokens is '32k': expected the number"),
        ({"tokens": 3.5}, "tokens is 3.5"),
        ({"new_tokens": None}, "new_tokens is None: expected the number of tokens to generate"),
    ],
    ids=str,
)
def test_what_names_no_layer_head_measure_or_count_is_an_error(asked, reason, llama, tokenizer):
    for refusing in (check, survey):
        with pytest.raises(ProblemError, match=reason):
            refusing(llama, tokenizer, TEXT, **asked)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "text is NoneType"),
        (b"a b", "text is bytes"),
        (["a"], "is list"),
        ("a\ud800b", r"the text has the surrogate '\\ud800' at 1: expected characters of UTF-8"),
    ],
    ids=["nothing", "bytes", "list", "surrogate"],
)
def test_what_is_no_text_is_an_error(text, reason, llama, tokenizer):
    for refusing in (check, survey):
        with pytest.raises(ProblemError, match=reason):
            refusing(llama, tokenizer, text)
        with pytest.raises(ProblemError, match="tokenizer is NoneType: expected"):
            refusing(llama, None, TEXT)


def test_a_layer_by_its_number_is_a_list_of_one(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False, layers=np.int64(1), measures="sink")
    assert {head.layer for head in report.heads} == {1}


@pytest.mark.parametrize("asked", [{"layers": [0, 99]}, {"heads": [(40, 2)]}, {"heads": [(2, 6)]}], ids=str)
def test_what_the_config_does_not_have_is_refused_before_anything_runs(asked, llama, tokenizer, monkeypatch):
    monkeypatch.setattr(llama, "forward", lambda *_, **__: pytest.fail("the model runs"))
    for refusing in (check, survey):
        with pytest.raises(
            ProblemError, match=r"does not exist: (the model has 3 layers, 0 to 2|layer 2 has 6 heads, 2.0 to 2.5)"
        ):
            refusing(llama, tokenizer, TEXT, **asked)


def test_a_check_says_what_a_survey_would_and_computes_nothing(llama, tokenizer, monkeypatch):
    monkeypatch.setattr(llama, "forward", lambda *_, **__: pytest.fail("the model runs"))
    check(llama, tokenizer, TEXT, measures=["sink"], layers=[0, 2], heads=[(2, 5)], tokens=9, ablate="mean")
    with pytest.raises(ProblemError, match="is 1 token"):
        check(llama, tokenizer, "t")
    with pytest.raises(ProblemError, match="Linear"):
        check(torch.nn.Linear(2, 2), tokenizer, TEXT)
