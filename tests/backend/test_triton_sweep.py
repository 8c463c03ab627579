"""The sweep over weights by the GPU kernel, run by Triton's interpreter: its sums are those of the definition."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch import Tensor

from regard import Alibi, Causal, Documents, KeyLengths, Mask, TensorBias, TensorMask, Window
from regard.inspect.sweep import Sweep, by_torch, by_triton
from regard.inspect.weights.lazy import Weights
from tests.expressions import masks
from tests.inspect.dense import called
from tests.selection import examples

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

SUMS = ("entropy", "squares", "mass", "top", "bins", "columns", "along", "mean", "largest")


def drawn(queries: int, keys: int, dim: int = 17, heads: int = 4, batch: int = 2, **words: Any) -> Weights:
    q, k = torch.randn(batch, heads, queries, dim), torch.randn(batch, 2, keys, dim)
    return Weights.of(called(q, k, **words))


def agree(weights: Weights, picture: int | None = None, along: Tensor | None = None) -> None:
    assert by_triton.knows(weights)
    found, expected = (engine.swept(weights, picture, along) for engine in (by_triton, by_torch))
    same(found, expected, weights)


def same(found: Sweep, expected: Sweep, weights: Weights) -> None:
    for name in SUMS:
        ours, exact = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (exact is None)
        if exact is not None:
            assert ours.dtype == exact.dtype
            size = max(1.0, float(exact.abs().max()))
            torch.testing.assert_close(ours, exact, atol=1e-5 * size, rtol=0)
    assert found.cell == expected.cell
    a = weights.dense()
    torch.testing.assert_close(a.gather(-1, found.top_key[..., None])[..., 0], found.top, atol=1e-6, rtol=0)


@pytest.mark.representative
@given(mask=masks(23, 29))
@examples(3, everything=8)
def test_the_sums_under_a_random_mask_are_those_of_the_definition(mask: Mask):
    agree(drawn(23, 29, heads=6, mask=mask), picture=5, along=torch.randn(2, 3, 29))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"mask": Causal() & Window(90), "softcap": 2.0, "sink": torch.linspace(-1, 3, 4), "bias": Alibi(4)},
        {"mask": KeyLengths(torch.tensor([211, 0])), "bias": TensorBias(torch.linspace(-2, 2, 211).expand(150, 211))},
        pytest.param({"mask": Causal() & Documents(torch.arange(211) // 67)}, marks=pytest.mark.exhaustive),
    ],
    ids=["no mask", "window, softcap, sink, alibi", "lengths, bias tensor", "documents"],
)
@pytest.mark.parametrize("picture", [None, 2])
def test_the_sums_over_several_tiles(words: dict[str, Any], picture: int | None):
    agree(drawn(150, 211, **words), picture, along=torch.randn(1, 2, 211))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype: torch.dtype):
    q, k = torch.randn(1, 2, 140, 32, dtype=dtype), torch.randn(1, 1, 140, 32, dtype=dtype)
    agree(Weights.of(called(q, k, mask=Causal())), 3, torch.randn(1, 130, 140))


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1e9, -torch.inf, torch.finfo(torch.float32).min])], ids=str)
def test_rows_hidden_by_a_finite_number_have_the_weights_of_their_softmax(sink: Tensor | None):
    bias = torch.randn(2, 1, 37, 141)
    bias[:, :, 5:9], bias[:, :, 20] = torch.finfo(torch.float32).min, -1e9
    agree(drawn(37, 141, mask=Causal(), bias=TensorBias(bias), sink=sink), 3)


def test_tensors_may_be_negated_lazily():
    q, k, bias = (cast(Any, torch)._neg_view(-t) for t in torch.randn(3, 1, 2, 37, 37))
    agree(Weights.of(called(q, k, mask=Causal(), bias=TensorBias(bias))), 3, torch.randn(1, 2, 37))


def test_one_sequence_of_a_batch_has_its_own_mask():
    keep = torch.rand(3, 2, 150, 150) < 0.5
    agree(drawn(150, 150, heads=2, batch=3, mask=TensorMask(keep)).only(2), 2, torch.randn(1, 1, 150))


def test_the_first_of_equal_keys_is_the_top():
    q = k = torch.zeros(1, 1, 150, 3)
    found = by_triton.swept(Weights.of(called(q, k, mask=Causal() & Window(140))), None, None)
    assert found.top_key.tolist() == [[[max(0, i - 139) for i in range(150)]]]


def test_tensors_of_a_cpu_and_float64_are_left_to_others():
    weights = drawn(5, 5)
    assert by_triton.knows(weights)
    assert not by_triton.takes(weights)
    assert not by_triton.knows(weights.in_float64())
