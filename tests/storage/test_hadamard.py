"""The Hadamard rotation: what it computes, and that a row has the same bits in every call."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from regard.storage.hadamard import PIECE, hadamard

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sylvester(size: int) -> Tensor:
    """The orthonormal matrix by its definition."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


@pytest.mark.parametrize("dim", [1, 2, 3, 12, 64, 96, 128, 256])
def test_it_is_the_product_with_the_matrix_of_each_block(dim: int):
    x, block = normal(5, dim).double(), dim & -dim
    expected = (x.unflatten(-1, (-1, block)) @ sylvester(block)).flatten(-2)
    assert torch.allclose(hadamard(x), expected, rtol=0, atol=1e-14)


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(0, 99))
def test_it_undoes_itself_and_keeps_products(dim: int, seed: int):
    x, y = normal(3, dim, seed=seed).double(), normal(3, dim, seed=seed + 1).double()
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-12)
    assert torch.allclose((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 12, 32, 64, 96, 128, 256])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(dim: int, dtype: torch.dtype):
    rows = 2 * PIECE // dim + 17  # more than two pieces
    x = normal(rows, dim).to(dtype)
    whole = hadamard(x)
    for count in (1, 2, 3, 7, 16, 33, 101):
        for first in (0, 5, rows // 2, rows - count):
            assert torch.equal(hadamard(x[first : first + count]), whole[first : first + count])
    for count in (7, rows):
        assert torch.equal(hadamard(x[:count].t().contiguous().t()), whole[:count])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(hadamard(x), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_torch_watches_gets_the_same_bits(dtype: torch.dtype):
    x = normal(7, 3, 96).to(dtype)
    assert torch.equal(hadamard(x.clone().requires_grad_()), hadamard(x))
    assert torch.equal(torch.func.vmap(hadamard)(x), hadamard(x))


def test_gradients_are_rotated_back():
    x, grad = normal(3, 48).double().requires_grad_(), normal(3, 48, seed=1).double()
    (found,) = torch.autograd.grad(hadamard(x), x, grad)
    assert torch.allclose(found, hadamard(grad), atol=1e-14)
    assert torch.autograd.gradcheck(hadamard, (x,), check_forward_ad=True)


def test_half_precision_is_rounded_once():
    x = normal(7, 128)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(hadamard(x.to(dtype)), hadamard(x.to(dtype).float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 500])
def test_a_lazily_negated_tensor_has_its_sign(rows: int, dtype: torch.dtype):
    negated = cast(Any, torch)._neg_view(normal(rows, 48).to(dtype))
    assert torch.equal(hadamard(negated), hadamard(negated.clone().resolve_neg()))


def test_tensors_without_data_tell_their_shape():
    x = normal(2, 24)
    with FakeTensorMode() as mode:
        assert hadamard(mode.from_tensor(x)).shape == x.shape
    assert hadamard(torch.empty(5, 0, 24)).shape == (5, 0, 24)
    assert hadamard(x.to("meta")).shape == x.shape
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-6)
