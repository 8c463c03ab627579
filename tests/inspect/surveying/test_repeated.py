"""What a survey says of heads on repeated random tokens, against the eager weights."""

import pytest
import torch
from torch import Tensor

from regard.inspect.measures.stimulus import plain_tokens
from regard.inspect.surveying.inputs import repeated_tokens
from regard.inspect.surveying.report import Report
from regard.inspect.surveying.survey import survey
from tests.inspect.small import TEXT, llama, words


def followers(tokens: list[int], shift: int) -> Tensor:
    """Which keys j of a query i come `shift` after an earlier occurrence of its token: [n, n]."""
    n = range(len(tokens))
    return torch.tensor([[shift <= j <= i and tokens[j - shift] == tokens[i] and j - shift < i for j in n] for i in n])


def matched(weights: Tensor, masks: list[Tensor]) -> Tensor:
    """The definition, from weights [batch, heads, n, n] and masks of `followers`, one a sequence: [heads]."""
    found = [(w * mask).sum(-1)[:, mask.any(-1)].mean(-1) for w, mask in zip(weights, masks, strict=True)]
    return torch.stack(found).mean(0)


@pytest.fixture(scope="module")
def surveyed() -> tuple[Report, list[list[Tensor]]]:
    """A report, and for each stimulus the score of every layer at shifts 0 to 8, [shifts, heads], by the definition."""
    model, tokenizer = llama(), words()
    report = survey(model, tokenizer, TEXT, new_tokens=0, compare_eager=False)
    vocabulary = plain_tokens(tokenizer, model.get_input_embeddings().weight.shape[0])
    texts = repeated_tokens(vocabulary, tokenizer.bos_token_id, model.config.max_position_embeddings)
    assert texts is not None
    assert list(texts) == ["repeats", "jittered repeats"]
    model.set_attn_implementation("eager")
    found: list[list[Tensor]] = []
    for ids_of_text in texts.values():
        with torch.no_grad():
            layers = model(ids_of_text, output_attentions=True).attentions
        masks = [[followers(ids.tolist(), shift) for ids in ids_of_text] for shift in range(9)]
        found.append([torch.stack([matched(layer, masks_of_rows) for masks_of_rows in masks]) for layer in layers])
    return report, found


def test_each_score_is_of_its_stimulus_and_its_shift(surveyed: tuple[Report, list[list[Tensor]]]):
    report, (fixed, jittered) = surveyed
    for head in report.heads:
        own = {
            "duplicate": fixed[head.layer][0, head.head],
            "induction": fixed[head.layer][1, head.head],
            "induction_jittered": jittered[head.layer][1, head.head],
        }
        for measure, score in own.items():
            assert head.value(measure) == pytest.approx(float(score), abs=1e-6), measure


def test_the_best_shift_is_one_from_1_on_and_reported(surveyed: tuple[Report, list[list[Tensor]]]):
    report, (_, jittered) = surveyed
    for head in report.heads:
        at = head.value("best_shift_at")
        assert at in range(1, 9)
        assert head.value("best_shift") == pytest.approx(float(jittered[head.layer][int(at), head.head]), abs=1e-6)
    assert any(head.value("best_shift_at") == 1 for head in report.heads)
