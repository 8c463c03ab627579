"""Measures and interventions on a GPU, or on two devices: what they are given may be on the host."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, TensorBias, attend_state
from regard.inspect import observe
from regard.inspect.intervene import rank_collapse, rollout
from regard.inspect.intervene.rank_collapse import residual
from regard.inspect.measures import Inputs
from regard.inspect.measures.rare import rare_word, rarity
from regard.inspect.measures.syntactic import syntactic
from regard.inspect.sweep import sweep
from regard.inspect.weights.lazy import Weights
from regard.nn import Decoder
from tests.pretended_gpu import PretendedGpu, pretended_gpu

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


def weights_of(gpu: PretendedGpu, **words: Any) -> Weights:
    q, k = gpu.put(torch.randn(2, 4, 20, 16)), gpu.put(torch.randn(2, 2, 20, 16))
    lse = attend_state(q, k, k, mask=Causal(), scale=0.25, **words).lse
    return Weights(q, k, lse, Causal(), scale=0.25, **words)


def test_a_relation_may_be_a_list_of_pairs(gpu: PretendedGpu):
    weights, pairs = weights_of(gpu), [(0, 5, 2), (1, 7, 3)]
    found, same = (syntactic(weights, given).mass.value for given in (pairs, gpu.put(torch.tensor(pairs))))
    assert torch.equal(found.cpu(), same.cpu())


def test_the_rarity_of_tokens_may_be_on_the_host(gpu: PretendedGpu):
    tokens = torch.arange(20).remainder(7).repeat(2, 1)
    weights, rare = weights_of(gpu), rarity(tokens)
    found, same = (rare_word(Inputs(weights, tokens=tokens, rarity=one)) for one in (rare, gpu.put(rare.clone())))
    assert torch.equal(found.value.cpu(), same.value.cpu())


def test_the_rows_of_a_residual_may_be_on_the_host(gpu: PretendedGpu):
    x, rows = torch.randn(2, 5, 7), torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    assert torch.equal(residual(gpu.put(x.clone()), rows).cpu(), residual(x, rows))


def test_a_sweep_of_rows_that_a_finite_number_hides_reads_nothing(gpu: PretendedGpu):
    bias = torch.randn(1, 1, 20, 20)
    bias[:, :, 3:5] = torch.finfo(torch.float32).min
    weights = weights_of(gpu, bias=TensorBias(gpu.put(bias), 0))
    gpu.events.clear()
    mass = sweep(weights).mass
    assert [event for event in gpu.events if event.kind == "read"] == []
    torch.testing.assert_close(mass.cpu(), torch.ones(2, 4, 20), atol=1e-5, rtol=0)


def of_two_devices(gpu: PretendedGpu) -> Decoder:
    """A model whose second block is on the GPU, with what follows it."""
    model = Decoder(19, 32, layers=2, heads=4, kv_heads=2).eval()
    block = model.body.blocks[1]
    for module in (block, model.body.norm, model.unembedding):
        gpu.put_module(module)
    block.register_forward_pre_hook(lambda _, given: tuple(x.to("cuda") if isinstance(x, Tensor) else x for x in given))
    return model


def test_a_rollout_goes_through_layers_on_two_devices(gpu: PretendedGpu):
    model, ids = of_two_devices(gpu), torch.randint(19, (2, 11))
    with torch.no_grad(), observe(model, lambda look: look.weights) as seen:
        model(ids)
    found = rollout([one.value for one in seen], [-1]).values
    torch.testing.assert_close(found.sum(-1).cpu(), torch.ones(2, 1), atol=1e-5, rtol=0)


def test_the_rank_of_layers_on_two_devices_is_measured(gpu: PretendedGpu):
    model = of_two_devices(gpu)
    texts = (
        torch.randint(19, (2, tokens)) for tokens in count(11)
    )  # of a repeated call, regard does not ask for the device
    found = rank_collapse(model, lambda: model(next(texts)))
    assert all(after.shape == (2, 2) for after in found.after.values())
