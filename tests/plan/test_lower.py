"""Lowering: each step says the same problem, is named in the plan, and acts on the operands of every call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, ProblemError, T5Bias, TensorBias, attend, explain
from regard.extend import Bias, spec
from tests.oracle import Case, dense
from tests.test_native import needs_library

Q, K, V = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)


def steps(*tensors: Tensor, **words: object) -> list[str]:
    return [str(step) for step in explain(*tensors, **words).steps]


def test_a_tensor_with_gaps_is_copied_and_the_plan_says_so():
    k = K.mT.contiguous().mT
    assert steps(Q, K, V) == []
    assert steps(Q, k, V) == ["pack: k copied: last dimension not contiguous"]
    both = steps(Q[..., ::2], K[..., ::2], V[..., :4])
    assert both == ["pack: q, k copied: last dimension not contiguous"]
    assert torch.allclose(attend(Q, k, V), attend(Q, K, V), atol=1e-6)
    assert steps(Q[..., :1], k[..., :1], V[..., :1]) == []  # one number has no gaps


@needs_library
def test_bias_tensors_are_added_into_one_and_distances_stay_a_vector():
    whole, row = torch.randn(2, 5, 9, dtype=torch.bfloat16), torch.randn(1, 9)
    far, table = Alibi(2), T5Bias(torch.randn(8, 2), max_distance=16)
    assert steps(Q, K, V, bias=TensorBias(whole) + far + table) == []
    added = TensorBias(whole) + far + TensorBias(row) + table
    plan = explain(Q, K, V, bias=added)
    assert [str(step) for step in plan.steps] == ["add_biases: the 2 tensors of the bias are added into one"]
    expected = "Alibi(heads=2) + T5Bias(table=float32[8, 2], max_distance=16) + TensorBias(tensor=2 added"
    assert expected in str(plan.problem.bias)
    expected = dense(Case(Q, K, V, {"bias": added}))[0]
    assert torch.allclose(attend(Q, K, V, bias=added).double(), expected, atol=1e-6)


@needs_library
def test_added_biases_are_placed_each_by_its_own_rows():
    placed, rows = torch.randn(9, 9), torch.randn(5, 9)
    bias = TensorBias(placed, offset=0) + TensorBias(rows)
    expected = dense(Case(Q, K, V, {"bias": TensorBias(placed[4:] + rows)}))[0]
    assert torch.allclose(attend(Q, K, V, bias=bias).double(), expected, atol=1e-6)


def test_gradients_pass_through_the_steps():
    q, k, v = Q.double(), K.double().mT.contiguous().mT.requires_grad_(), V.double()
    a, b = torch.randn(5, 9, dtype=torch.float64, requires_grad=True), torch.randn(1).double().requires_grad_()
    bias = TensorBias(a) + TensorBias(b)
    found, truth = (
        torch.autograd.grad(attend(q, k, v, bias=bias, backend=engine).sin().sum(), (k, a, b))
        for engine in (None, "reference")
    )
    assert all(torch.allclose(x, y, atol=1e-14) for x, y in zip(found, truth, strict=True))


@spec
class Whole(Bias):
    """The distance, in a type."""

    dtype: torch.dtype

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (q - k).to(self.dtype)


@needs_library
@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.bool, r"returned torch.bool; expected numbers to add to scores; to hide pairs, define keep of a Mask"),
        (torch.complex64, r"returned torch.complex64; expected numbers to add to scores\.$"),
    ],
)
def test_the_value_of_a_bias_is_numbers_that_can_be_added(dtype: torch.dtype, says: str):
    for bias in (Whole(dtype), Whole(dtype) + TensorBias(torch.randn(5, 9))):
        with pytest.raises(ProblemError, match=rf"^Whole\(.*\): value\(b, h, q, k\) {says}"):
            attend(Q, K, V, bias=bias)
    assert attend(Q, K, V, bias=Whole(torch.int32)).isfinite().all()
