"""A text behind padding scores as the text alone, where a measure is about its first token."""

import pytest
import torch

from regard import Causal, MaskFunction, TensorMask, Window, attend
from regard.errors import ProblemError
from regard.inspect.measures import Inputs, alpha, output_norms, sink, sink_output, value_norms, value_weighted
from regard.inspect.measures.sink import first_tokens
from regard.inspect.measures.values import first_value
from regard.inspect.observing.observe import observe
from regard.inspect.weights.lazy import Weights
from regard.integrate import use_regard
from tests.inspect.dense import called
from tests.inspect.small import llama

PADDING, TEXT = 5, 12
MASKS = {"causal": Causal(), "window": Causal() & Window(4)}


def measured(q, k, v, mask, token=None):
    """The scores of a call that are about one token."""
    with observe(values=True) as calls:
        attend(q, k, v, mask=mask)
    weights, w_o = calls[0].weights, torch.arange(6.0 * 7 * 8).sin().view(6, 7, 8)
    inputs = Inputs(weights, norms=output_norms(v, w_o), v=v, out=calls[0].out, w_o=w_o)
    by_token = sink(weights, token), alpha(weights, token), value_weighted(inputs, token), sink_output(inputs, token)
    return *by_token, first_value(inputs)


@pytest.fixture(params=MASKS)
def batch(request):
    """q, k, v and mask of two texts, of which the second has padding before it; and the mask of a text alone."""
    mask, real = MASKS[request.param], torch.ones(2, PADDING + TEXT, dtype=torch.bool)
    real[1, :PADDING] = False
    q, k, v = (torch.randn(2, heads, PADDING + TEXT, 7) for heads in (6, 3, 3))
    return (q, k, v), mask & TensorMask(real[:, None, None]), mask


@pytest.mark.parametrize("token", [None, torch.tensor([0, PADDING])], ids=["found", "given"])
def test_the_first_token_is_that_of_each_sequence(batch, token):
    tensors, padded, mask = batch
    together = measured(*tensors, padded, token)
    alone = [measured(*(t[b : b + 1, :, b * PADDING :] for t in tensors), mask) for b in range(2)]
    for i, score in enumerate(together):
        for b in range(2):
            torch.testing.assert_close(score.only(b).value, alone[b][i].value)
            torch.testing.assert_close(score.only(b).chance.expand(1, 6), alone[b][i].chance.expand(1, 6))
    assert (together[0].value > 0).all()


def test_padding_that_is_nan_changes_no_score(batch):
    (q, k, v), padded, _ = batch
    hidden = k.clone(), v.clone()
    for of in hidden:
        of[1, :, :PADDING] = torch.nan
    for score, expected in zip(measured(q, *hidden, padded), measured(q, k, v, padded), strict=True):
        torch.testing.assert_close((score.value, score.chance), (expected.value, expected.chance))
        assert score.value.isfinite().all()


def test_a_sequence_of_padding_alone_has_no_score():
    q, real = torch.randn(2, 6, 9, 7), torch.ones(2, 9, dtype=torch.bool)
    real[1] = False
    weights = Weights.of(called(q, q[:, :3], mask=Causal() & TensorMask(real[:, None, None])))
    assert sink(weights).value.isnan().tolist() == [[False] * 6, [True] * 6]


def test_the_mean_value_is_over_the_keys_that_rows_see():
    v, real = torch.randn(2, 3, 11, 7, dtype=torch.float64), torch.ones(2, 11, dtype=torch.bool)
    real[0, 8:] = real[1, :4] = False  # padding on the right, on the left
    mask = MaskFunction(lambda b, h, q, k: q > k) & TensorMask(real[:, None, None])  # nor does a row see itself
    weights = Weights.of(called(torch.randn(2, 6, 11, 7), torch.randn(2, 3, 11, 7), mask=mask))
    real[1, 10] = False  # so no row sees the last key
    for b, first in ((0, 0), (1, 4)):
        norms = (v[b] ** 2).sum(-1).sqrt()
        expected = norms[:, first] / norms[:, real[b]].mean(-1)
        torch.testing.assert_close(first_value(Inputs(weights, v=v)).value[b], expected.repeat_interleave(2))


def test_a_call_behind_a_window_counts_every_value():
    v = torch.randn(1, 3, 9, 7)
    weights = Weights.of(called(torch.randn(1, 6, 1, 7), torch.randn(1, 3, 9, 7), mask=Causal() & Window(4)))
    expected = value_norms(v)[:, :, 0].repeat_interleave(2, dim=1)
    torch.testing.assert_close(first_value(Inputs(weights, v=v)).value, expected)


def test_key_0_stays_the_token_of_a_step_behind_a_window():
    weights = Weights.of(called(torch.randn(1, 6, 1, 7), torch.randn(1, 3, 9, 7), mask=Causal() & Window(4)))
    assert first_tokens(weights) == [0]
    assert not sink(weights).value.any()


@torch.no_grad()
def test_a_padded_prompt_of_a_model_has_its_sinks():
    model, ids = use_regard(llama()), torch.randint(1, 300, (1, TEXT))
    padded, real = torch.nn.functional.pad(ids, (PADDING, 0)), torch.ones(1, PADDING + TEXT, dtype=torch.long)
    real[:, :PADDING] = 0
    with observe(model) as calls:
        model(ids)
        model(padded, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0))
    alone, behind = calls[0].weights, calls[3].weights
    torch.testing.assert_close(sink(behind).value, sink(alone).value)
    torch.testing.assert_close(sink(behind, rows=real.bool()).chance, sink(alone).chance)


def test_one_token_for_each_sequence_is_one_of_its_keys():
    q = torch.randn(3, 6, 9, 7)
    weights = Weights.of(called(q, q[:, :3], mask=Causal()))
    each = torch.tensor([2, 0, 4])
    expected = torch.cat([sink(weights.only(b), int(token)).value for b, token in enumerate(each)])
    torch.testing.assert_close(sink(weights, each).value, expected)
    for wrong in (torch.tensor([1, 2]), torch.tensor([0, 1, 9]), torch.tensor([0.0, 1.0, 2.0])):
        with pytest.raises(ProblemError, match="token is"):
            sink(weights, wrong)
