"""A finite number in place of -inf may hide every key of a row: its weights are then the softmax of what is left."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, TensorBias
from regard.calls import Call
from regard.inspect.measures import Inputs, entropy
from regard.inspect.measures.blocks import whole_rows
from regard.inspect.sweep import by_native, sweep
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called

LEAST = torch.finfo(torch.float32).min
CALLS: dict[str, dict[str, Any]] = {
    "a bias alone": {},
    "a causal mask": {"mask": Causal()},
    "a softcap": {"softcap": 2.0},
    "sinks as far away": {"sink": torch.tensor([0.5, LEAST, -1e9, -torch.inf])},
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    """Rows 3 and 4 have no bias but a number near the least one, and row 7 none but -1e9."""
    bias = torch.randn(2, 1, 13, 13)
    bias[:, :, 3:5], bias[:, :, 7] = LEAST, -1e9
    return called(torch.randn(2, 4, 13, 8), torch.randn(2, 2, 13, 8), bias=TensorBias(bias), **CALLS[request.param])


def softmax(call: Call) -> tuple[Tensor, Tensor]:
    """The weights and the share of the sink, by the softmax of torch over the scores in float32."""
    scores = Weights.of(call).scores(0, 13)
    sink = torch.full((4,), -torch.inf) if call.sink is None else call.sink
    both = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 13, 1)], -1).softmax(-1)
    return both[..., :-1], both[..., -1]


def test_weights_are_the_softmax_however_they_are_read(call: Call):
    weights, (exact, share) = Weights.of(call), softmax(call)
    torch.testing.assert_close(weights.dense(), exact, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.sink_share, share, atol=1e-6, rtol=0)
    i, j = torch.tensor([3, 4, 7, 9]), torch.tensor([1, 4, 0, 2])
    torch.testing.assert_close(weights.pairs(i, j), exact[:, :, i, j], atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.pooled(13), exact, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole_rows(weights.only(1), i).weights[0], exact[1][:, i], atol=1e-6, rtol=0)
    assert (weights.in_float64().dense().sum(-1) <= 1 + 1e-6).all()


def test_a_sweep_and_its_measures_are_those_of_the_softmax(call: Call):
    weights, (exact, share) = Weights.of(call), softmax(call)
    assert not by_native.takes(weights)
    found = sweep(weights, picture=13)
    assert found.mean is not None
    torch.testing.assert_close(found.mass, exact.sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.columns, exact.sum(-2), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mean, exact, atol=1e-6, rtol=0)
    nats = torch.special.entr(exact).sum(-1) + torch.special.entr(share)
    torch.testing.assert_close(found.entropy, nats, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy(Inputs(weights)).value, nats.mean(-1), atol=1e-5, rtol=0)
