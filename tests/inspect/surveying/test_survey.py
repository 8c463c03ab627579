"""A survey, end to end, on a small random model: what it reports is so, and it leaves the model as it was."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama

from regard.errors import ProblemError
from regard.inspect.surveying.survey import survey
from tests.inspect.small import TEXT, agrees_with_eager, assert_between


def test_a_decoder_is_run_checked_and_measured(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=5)
    prompt = tokenizer(TEXT)["input_ids"]
    run = report.run
    assert (run.layers, run.heads, run.kv_heads, run.head_dim) == (3, 6, 2, 4)
    assert run.parameters == sum(p.numel() for p in llama.parameters())
    assert len(run.backends) == 3
    assert agrees_with_eager(report)
    n = len(prompt) + 5
    assert run.pairs == 3 * 6 * n * (n + 1) // 2
    assert run.attention_gflop == pytest.approx(run.pairs * 4 * 4 / 1e9)  # q.k and a.v: 2 x 2 x 4 dimensions a pair
    assert list(run.seconds) == [
        "prompt",
        "continuation",
        "comparison",
        "induction",
        "layers",
        "other texts",
    ]
    assert run.tokens_per_second > 0
    assert run.decode_tokens_per_second is not None
    assert report.prompt_tokens == len(prompt)
    assert "".join(report.tokens[: len(prompt)]) == TEXT
    assert len(report.heads) == 18
    assert {(h.layer, h.head, h.kv_head) for h in report.heads} == {(a, b, b // 3) for a in range(3) for b in range(6)}
    assert all(0 < (h.value("induction") or 0) < 1 for h in report.heads)
    chance = sum((i - 1) // 25 / (i + 1) for i in range(26, 101)) / 75  # earlier periods, of the keys that a row sees
    assert all(h.score("induction").chance == pytest.approx(chance) for h in report.heads)
    assert all(h.sure is not None and 0 <= h.sure <= 1 for h in report.heads)
    assert run.notes == ()
    assert report.close_ups == ()  # nobody asked, and the pictures show every weight


def test_attention_that_differs_from_eager_is_noticed(llama, tokenizer, monkeypatch):
    exact = modeling_llama.eager_attention_forward

    def off(*args: Any, **kwargs: Any) -> Any:
        out, weights = exact(*args, **kwargs)
        return out * 1.5, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", off)
    assert not agrees_with_eager(survey(llama, tokenizer, TEXT, new_tokens=1))


def test_the_continuation_is_the_greedy_one(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=7)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    written = llama.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert report.continuation == tokenizer.decode(written)
    assert len(report.tokens) == ids.shape[1] + 7


def test_a_continuation_ends_where_the_model_ends_it(llama, tokenizer):
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    third = llama.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, -1]
    llama.generation_config.eos_token_id = int(third)
    report = survey(llama, tokenizer, TEXT, new_tokens=9)
    assert len(report.tokens) <= ids.shape[1] + 2


def test_where_nothing_is_written_the_text_is_read_once(llama, tokenizer):
    passes: list[int] = []
    llama.register_forward_pre_hook(lambda *_: passes.append(1))
    run = survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False, measures="sink").run
    assert passes == []  # what is measured is its body alone
    assert (run.tokens_per_second, run.decode_tokens_per_second) == (None, None)
    assert "prompt" not in run.seconds


def test_scores_and_pictures_are_those_of_the_eager_weights(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT, new_tokens=0)
    llama.set_attn_implementation("eager")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        eager = llama(ids, output_attentions=True).attentions
    for head in report.heads:
        weights = eager[head.layer][0, head.head].double()
        assert head.value("sink") == pytest.approx(float(weights[1:, 0].mean()), abs=1e-6)
        assert head.value("previous") == pytest.approx(float(weights.diagonal(-1).mean()), abs=1e-6)
        assert head.value("entropy") == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), abs=1e-6)
        assert_between(head)
        profile = report.profiles[head.layer, head.head]
        assert profile[:2] == pytest.approx(
            [float(weights.diagonal(d).sum()) / len(weights) for d in (0, -1)], abs=1e-6
        )
        assert sum(profile) == pytest.approx(1, abs=1e-5)
        assert profile[-1] > 0
    for picture in report.pictures:
        assert (picture.size, picture.pooled) == (ids.shape[1], 1)
        exact = eager[picture.layer][0, picture.head].numpy()
        assert np.abs(picture.weights / 255 - np.sqrt(exact)).max() <= 0.5 / 255 + 1e-4


def test_long_texts_are_pooled(llama, tokenizer):
    report = survey(llama, tokenizer, TEXT * 14, new_tokens=3, compare_eager=False)
    assert len(report.tokens) > 192
    assert {(p.size, p.pooled) for p in report.pictures} == {(-(-len(report.tokens) // 2), 2)}
    for picture in report.pictures:
        assert picture.largest is not None
        assert (picture.largest >= picture.weights).all()
        assert picture.largest.max() > picture.weights.max()


def test_the_model_is_left_as_it_was(llama, tokenizer):
    llama.train()
    llama.model.layers[1].eval()
    llama.set_attn_implementation("eager")
    before = {name: module.training for name, module in llama.named_modules()}
    survey(llama, tokenizer, TEXT, new_tokens=2)
    assert llama.config._attn_implementation == "eager"
    assert {name: module.training for name, module in llama.named_modules()} == before
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in llama.modules())
    with pytest.raises(ProblemError):
        survey(llama, tokenizer, "")
    assert llama.config._attn_implementation == "eager"
    assert llama.training


def test_progress_is_shown_by_stage(llama, tokenizer):
    output = []
    survey(llama, tokenizer, TEXT, new_tokens=4, progress=lambda *step: output.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in output)) == [
        "prompt", "continuation", "comparison", "induction", "layers", "other texts",
    ]  # fmt: skip
    for stage, total in (("continuation", 4), ("layers", 3), ("induction", 6)):
        steps = [(done, of) for name, done, of in output if name == stage]
        assert steps[0] == (0, total)
        assert steps[-1] == (total, total)
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)


@pytest.mark.parametrize(
    ("text", "new_tokens", "message"),
    [
        ("", 3, "text is empty"),
        (" \n ", 3, "text is empty"),
        ("t", 3, "is 1 token"),
        (TEXT, -1, "new_tokens is -1"),
    ],
)
def test_texts_that_cannot_be_surveyed_are_refused(llama, tokenizer, text, new_tokens, message):
    with pytest.raises(ProblemError, match=message):
        survey(llama, tokenizer, text, new_tokens=new_tokens)


def test_what_is_no_model_is_refused(tokenizer):
    with pytest.raises(ProblemError, match="Linear"):
        survey(torch.nn.Linear(2, 2), tokenizer, TEXT)
