"""`scaled_dot_product_attention` is torch's: shapes, masks, corners, broadcasting, errors."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import ProblemError, scaled_dot_product_attention


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


CALLS = {
    "two axes": ((r(5, 8), r(7, 8), r(7, 4)), {}),
    "three axes": ((r(3, 5, 8), r(3, 7, 8), r(3, 7, 8)), {}),
    "four axes": ((r(2, 3, 5, 8), r(2, 3, 7, 8), r(2, 3, 7, 8)), {}),
    "five axes, broadcast": ((r(2, 3, 4, 5, 8), r(2, 1, 4, 7, 8), r(2, 3, 4, 7, 8)), {}),
    "a batch of 1 broadcast": ((r(2, 4, 5, 8), r(1, 4, 7, 8), r(2, 4, 7, 8)), {}),
    "heads broadcast": ((r(2, 4, 5, 8), r(2, 1, 7, 8), r(2, 1, 7, 8)), {}),
    "queries broadcast": ((r(1, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {}),
    "causal, fewer queries": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"is_causal": True}),
    "causal, more queries": ((r(2, 4, 9, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"is_causal": True}),
    "grouped": ((r(2, 4, 5, 8), r(2, 2, 7, 8), r(2, 2, 7, 8)), {"enable_gqa": True}),
    "keys and values grouped apart": ((r(2, 4, 5, 8), r(2, 2, 7, 8), r(2, 1, 7, 8)), {"enable_gqa": True}),
    "a bool mask of two axes": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(5, 7) > 0}),
    "a bool mask of one row": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(1, 7) > 0}),
    "a mask per batch row": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(2, 1, 5, 7) > 0}),
    "a mask of three axes": ((r(3, 5, 8), r(3, 7, 8), r(3, 7, 8)), {"attn_mask": r(3, 5, 7) > 0}),
    "a mask of five axes": (
        (r(2, 3, 4, 5, 8), r(2, 3, 4, 7, 8), r(2, 3, 4, 7, 8)),
        {"attn_mask": r(2, 1, 4, 5, 7) > 0},
    ),
    "a float mask": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(2, 1, 5, 7)}),
    "a row that sees nothing": ((r(1, 1, 2, 8), r(1, 1, 2, 8), r(1, 1, 2, 8)), {"attn_mask": torch.eye(2, 2) > 1}),
    "scale": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": 0.3}),
    "no batch": ((r(0, 4, 5, 8), r(0, 4, 7, 8), r(0, 4, 7, 8)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_torchs(name: str):
    tensors, words = CALLS[name]
    ours, theirs = scaled_dot_product_attention(*tensors, **words), F.scaled_dot_product_attention(*tensors, **words)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=2e-6)


def test_the_names_and_defaults_are_torchs():
    found = {name: p.default for name, p in inspect.signature(scaled_dot_product_attention).parameters.items()}
    assert found == {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }


def test_gradients_reach_a_float_mask():
    q, mask = r(2, 4, 5, 8), r(2, 1, 5, 5).requires_grad_()
    (ours,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q, mask).sin().sum(), mask)
    (theirs,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, mask).sin().sum(), mask)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_dropout_is_applied_whenever_asked_for():
    q = r(1, 1, 64, 8)
    assert not torch.equal(scaled_dot_product_attention(q, q, q, dropout_p=0.5), scaled_dot_product_attention(q, q, q))


WRONG = {
    "a mask and causal": ((r(2, 2, 8),) * 3, {"attn_mask": r(2, 2) > 0, "is_causal": True}, "both set"),
    "heads that do not fit": ((r(1, 4, 2, 8), r(1, 2, 2, 8), r(1, 2, 2, 8)), {}, "enable_gqa"),
    "groups that do not fit": ((r(1, 4, 2, 8), r(1, 3, 2, 8), r(1, 3, 2, 8)), {"enable_gqa": True}, "whole multiple"),
    "fewer values than keys": ((r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 3, 8)), {}, "4 keys"),
    "one axis": ((r(8), r(8), r(8)), {}, "expected"),
    "a mask that does not fit": ((r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 4, 8)), {"attn_mask": r(2, 3) > 0}, "columns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_calls_an_error_is_one(name: str):
    tensors, words, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        scaled_dot_product_attention(*tensors, **words)
