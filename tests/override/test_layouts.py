"""How outputs lie in memory inside `regard.everywhere()`: as torch's, since programs call `.view` on them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import native
from regard.override import decide
from tests.override.of_torch import of_size

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")

B, H, T, D = 2, 8, 256, 64

LAYOUTS = {
    "by head": lambda heads: of_size(B, heads, T, D),
    "by token": lambda heads: of_size(B, T, heads, D).transpose(1, 2),
    "by token of a joint projection": lambda heads: of_size(B, T, 3, heads, D)[:, :, 1].transpose(1, 2),
    "tokens first": lambda heads: of_size(T, B, heads, D).permute(1, 2, 0, 3),
    "one for all heads": lambda heads: of_size(B, 1, T, D).expand(B, heads, T, D),
}

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "a learned bias": {"attn_mask": of_size(1, H, T, T, requires_grad=True)},
    "a learned bias of two axes": {"attn_mask": of_size(T, T, requires_grad=True)},
    "a mask of three axes": {"attn_mask": of_size(H, T, T) > -1},
    "a bias of three axes": {"attn_mask": of_size(H, T, T)},
    "a mask of two axes": {"attn_mask": of_size(T, T) > -1},
    "a bias for keys": {"attn_mask": of_size(1, 1, 1, T)},
    "padding": {"attn_mask": of_size(B, 1, 1, T) > -1},
    "a transposed bias": {"attn_mask": of_size(T, T).T},
    "dropout": {"dropout_p": 0.1},
}


def as_torch(query: Tensor, key: Tensor, value: Tensor, **words: Any) -> Tensor:
    """The output of a call, whose strides must be those of torch's output."""
    theirs = F.scaled_dot_product_attention(query, key, value, **words)
    with regard.everywhere() as caught:
        ours = F.scaled_dot_product_attention(query, key, value, **words)
    assert caught.rows[0].form.why == (decide.DROPOUT if "dropout_p" in words else None)
    assert ours.stride() == theirs.stride()
    return ours


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_an_output_lies_as_torchs(layout: str, call: str):
    q, k, v = (LAYOUTS[layout](H) for _ in range(3))
    as_torch(q, k, v, **CALLS[call])
    with torch.no_grad():
        as_torch(q, k, v, **CALLS[call])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_lies_as_torchs_whatever_keys_and_values_are(layout: str):
    q, k, v = (LAYOUTS[layout](H) for _ in range(3))
    few = LAYOUTS[layout](2)
    as_torch(q, few, few, enable_gqa=True)
    as_torch(q, k[:, :1], v[:, :1])
    as_torch(q, k[:1], v[:1])
    for at in range(3):
        spaced = [torch.stack([t, t], 4).flatten(3)[..., ::2] if n == at else t for n, t in enumerate((q, k, v))]
        as_torch(*spaced)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_an_output_of_another_dtype_lies_as_torchs(dtype: torch.dtype, learned: bool):
    q, k, v = (LAYOUTS["by token"](H).to(dtype) for _ in range(3))
    as_torch(q, k, v, attn_mask=of_size(1, H, T, T, dtype=dtype, requires_grad=learned))


@pytest.mark.parametrize("layout", ["by token", "tokens first"])
def test_gradients_pass_through_an_output_that_was_laid_out(layout: str):
    q = LAYOUTS[layout](H).requires_grad_()
    bias = of_size(1, H, T, T, requires_grad=True)
    grad = of_size(B, H, T, D)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, attn_mask=bias), (q, bias), grad)
    ours = torch.autograd.grad(as_torch(q, q, q, attn_mask=bias), (q, bias), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q), q, grad)
    torch.testing.assert_close(torch.autograd.grad(as_torch(q, q, q), q, grad), theirs, atol=2e-5, rtol=1e-4)


def test_a_traced_output_with_a_learned_bias_can_be_viewed_as_torchs():
    run: Any = torch.compile(
        lambda q, bias: F.scaled_dot_product_attention(q, q, q, attn_mask=bias).view(B * H, T, D), backend="aot_eager"
    )
    q, bias = LAYOUTS["by token"](H), of_size(1, H, T, T, requires_grad=True)
    theirs = F.scaled_dot_product_attention(q, q, q, attn_mask=bias).view(B * H, T, D)
    with regard.everywhere():
        torch.testing.assert_close(run(q, bias), theirs, atol=1e-5, rtol=1e-5)
