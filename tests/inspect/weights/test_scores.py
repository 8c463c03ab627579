"""A call read afterwards: its scores at every stage, one sequence of it, and which calls can be read."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, State, attend, attend_state
from regard.calls import observe_calls
from regard.describe.score import Dot
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.inspect.weights import lazy as module
from regard.inspect.weights.lazy import Weights
from regard.scores import Additive, Bilinear, Cosine
from tests.inspect.dense import CASES, called, definition, drawn


def test_the_softmax_of_the_last_stage_and_the_sink_is_the_weights(call):
    weights = Weights.of(call)
    scores = weights.scores(0, weights.shape[2]).double()
    sink = torch.full((weights.shape[1],), -torch.inf) if call.sink is None else call.sink
    column = sink.double()[:, None, None].expand(*scores.shape[:3], 1)
    probabilities = torch.cat([scores, column], dim=-1).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(probabilities[..., :-1], weights.dense().double(), atol=1e-6, rtol=0)


def test_raw_scores_are_scaled_dot_products_of_the_pairs_that_the_mask_keeps(call):
    exact = definition(call)
    k = call.k.double().repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
    raw = (call.scale * call.q.double() @ k.mT).masked_fill(~exact.keep, -torch.inf)
    stage = Weights.of(call).scores(0, call.q.shape[2], "raw").double()
    torch.testing.assert_close(stage, raw, atol=1e-5, rtol=0)


def test_each_stage_is_made_of_the_one_before():
    weights = Weights.of(CASES["all at once"]())
    raw, capped, biased = (weights.scores(3, 11, stage) for stage in ("raw", "capped", "biased"))
    kept = raw > -torch.inf
    i, j = torch.arange(3, 11)[:, None], torch.arange(29)[None]
    assert weights.bias is not None
    bias = weights.bias.value(*weights.coordinates(i, j)).float()
    torch.testing.assert_close(capped[kept], 3 * torch.tanh(raw / 3)[kept])
    torch.testing.assert_close(biased[kept], (capped + bias)[kept])
    assert not torch.equal(raw, capped)
    assert not torch.equal(capped, biased)


def test_a_stage_that_the_call_does_not_have_is_the_one_before():
    weights = Weights.of(drawn(mask=Causal()))
    assert torch.equal(weights.scores(0, 29, "raw"), weights.scores(0, 29, "biased"))


def test_another_stage_is_an_error():
    with pytest.raises(ProblemError, match="stage is 'probabilities': expected one of 'raw', 'capped', 'biased'"):
        Weights.of(drawn()).scores(0, 1, "probabilities")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("chunk", [4, 128])
def test_one_sequence_of_a_batch_keeps_its_own_mask(call, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    weights, last = Weights.of(call), call.q.shape[0] - 1
    one, exact = weights.only(last), definition(call)
    torch.testing.assert_close(one.dense().double(), exact.weights[last:], atol=1e-6, rtol=0)
    assert torch.equal(one.visible.expand(one.shape[:3]), exact.keep[last:].sum(-1))
    assert torch.equal(one.only(0).dense(), one.dense())


@pytest.mark.parametrize("score", [Cosine(), Bilinear(torch.linspace(-0.3, 0.3, 49).view(7, 7)), Dot()], ids=repr)
def test_scores_that_are_dot_products_of_prepared_tokens_are_read_like_any(score):
    weights = Weights.of(drawn(mask=Causal(), bias=Alibi(6), score=score))
    keys = torch.randn(2, 3, 29, 7)
    units = torch.eye(29).expand(2, 3, 29, 29)
    calls = []
    with observe_calls(calls.append):
        expected = attend(torch.randn(2, 6, 29, 7), keys, units, mask=Causal(), bias=Alibi(6), score=score)
    torch.testing.assert_close(Weights.of(calls[0]).dense(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 6, 29), atol=1e-5, rtol=0)


@spec
class Centred(Dot):
    """The dot product of deviations from 1."""

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return super().compare(q - 1, k - 1)


def test_a_call_that_compares_by_no_dot_product_is_refused():
    additive = Additive(torch.randn(5, 7), torch.randn(5, 7), torch.randn(5))
    with pytest.raises(ProblemError, match=r"by Additive\(.*dot products only"):
        Weights.of(replace(drawn(), score=additive))
    with pytest.raises(ProblemError, match=r"by Centred\(\).*dot products only"):
        Weights.of(drawn(score=Centred()))


def test_the_shares_of_a_part_are_those_within_it():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    calls = []
    with observe_calls(calls.append):
        states = (
            attend_state(q, k[:, :, :4], v[:, :, :4], offset=0),
            attend_state(q, k[:, :, 4:], v[:, :, 4:], offset=0),
        )
    whole = State.__or__(*states)
    parts = [Weights.of(c).dense() * (c.lse - whole.lse).exp()[..., None] for c in calls]
    torch.testing.assert_close(torch.cat(parts, dim=-1), Weights.of(called(q, k)).dense(), atol=1e-6, rtol=0)


def test_weights_carry_no_gradients():
    q = torch.randn(1, 2, 5, 3, requires_grad=True)
    weights = Weights.of(called(q, torch.randn(1, 2, 5, 3, requires_grad=True), sink=torch.zeros(2).requires_grad_()))
    assert not weights.rows(0, 5).requires_grad
