"""How sure a head is of its kind: whether it has it on other texts."""

import numpy as np
import pytest
import torch

from regard.inspect.measures import HeadScores
from regard.inspect.measures.catalogue import BY_KEY
from regard.inspect.observing.observe import observe
from regard.inspect.surveying.layer import LayerScores, sureness
from regard.inspect.surveying.other_texts import OTHERS, on_other_texts, other_texts
from regard.inspect.surveying.survey import survey
from regard.integrate.transformers import use_regard
from tests.inspect.small import TEXT, llama, words


def sinks(*masses):
    """Scores of heads that put so much of their mass on the first token, in every row."""
    rows = torch.tensor(masses)[None, :, None].expand(1, len(masses), 64)
    score = HeadScores.of_rows(rows, torch.full_like(rows, 0.1), torch.ones_like(rows, dtype=torch.bool))
    scores = LayerScores()
    scores.add(BY_KEY["sink"], score)
    return scores


def test_a_head_is_as_sure_as_it_has_its_kind_on_other_texts():
    """All draws of the text itself agree; on other texts the second head is a sink once of three times."""
    here, elsewhere = sinks(0.9, 0.9, 0.1), [sinks(0.9, 0.9, 0.1), sinks(0.8, 0.1, 0.1), sinks(0.7, 0.2, 0.9)]
    assert sureness(here, elsewhere) == pytest.approx([1, 1 / 3, 2 / 3])
    assert sureness(here, []) is None


def test_other_texts_are_as_long_as_the_text():
    tokenizer = words()
    shortest = min(len(tokenizer(text)["input_ids"]) for text in OTHERS)
    ids = other_texts(tokenizer, 23)
    assert ids is not None
    assert ids.tolist() == [tokenizer(text)["input_ids"][:23] for text in OTHERS]
    longest = other_texts(tokenizer, 10_000)
    assert longest is not None
    assert longest.shape == (3, shortest)


def test_each_of_several_texts_is_measured_as_by_itself():
    tokenizer, model = words(), llama()
    ids = other_texts(tokenizer, 61)
    assert ids is not None
    use_regard(model)
    with torch.no_grad():
        with observe(model, lambda look: on_other_texts(look, sweep=True), layers=1) as together:
            model(ids)
        for text in range(3):
            with observe(model, lambda look: on_other_texts(look, sweep=True), layers=1) as alone:
                model(ids[text : text + 1])
            (own,), of = alone[0].value, together[0].value[text]
            assert set(of.of) == {"previous", "sink", "entropy", "positional"}
            for measure, scores in of.of.items():
                for ours, theirs in zip(scores, own.of[measure], strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-5), measure
                np.testing.assert_allclose(of.drawn[measure], own.drawn[measure], atol=1e-5)


def test_a_survey_reads_the_other_texts_in_one_pass():
    model, passes = llama(), []
    model.model.register_forward_pre_hook(
        lambda module, given, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    report = survey(model, words(), TEXT, new_tokens=0, compare_eager=False, measures=["sink"])
    assert passes.count((3, len(report.tokens))) == 1
    assert {head.sure for head in report.heads} != {None}
