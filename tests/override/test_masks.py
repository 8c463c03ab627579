"""Masks of torch's attention inside `regard.everywhere()`: added when they are new, and skipped when they are known."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import regard
from regard import native, observe_calls
from regard.override import mask_content
from tests.override.of_torch import of_size, qkv

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")


FUTURE = torch.ones(256, 256, dtype=torch.bool).triu(1)

LEAST = torch.finfo(torch.float32).min

CALLS: dict[str, dict[str, Any]] = {
    "nothing hidden": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "a bool mask": {"attn_mask": torch.ones(256, 256, dtype=torch.bool).tril()},
    "a float mask that hides": {"attn_mask": torch.full((256, 256), -torch.inf).triu(1)},
    "a float mask of least numbers": {"attn_mask": torch.full((256, 256), torch.finfo(torch.float32).min).triu(1)},
    "a float mask of other numbers": {"attn_mask": torch.linspace(-1, 1, 256)[None]},
    "padding": {"attn_mask": (torch.arange(256) < torch.tensor([[200], [256]]))[:, None, None]},
    "the same mask for all heads": {
        "attn_mask": torch.ones(256, 256, dtype=torch.bool).tril().expand(2, 8, 256, 256).contiguous()
    },
    "a bias that hides": {"attn_mask": torch.randn(1, 8, 256, 256).masked_fill_(FUTURE, -torch.inf)},
    "a bias that hides by least numbers": {"attn_mask": torch.randn(2, 8, 256, 256).masked_fill_(FUTURE, LEAST / 2)},
    "a bias whose heads hide other pairs": {
        "attn_mask": torch.randn(1, 8, 256, 256).masked_fill_(torch.rand(1, 8, 1, 256) < 0.7, LEAST / 2)
    },
    "a bias that hides rows by least numbers": {
        "attn_mask": torch.randn(256, 256).masked_fill_(FUTURE.roll(-1, 1), LEAST)
    },
    "a large bias that hides nothing": {"attn_mask": torch.randn(2, 8, 256, 256)},
    "a row that sees nothing": {"attn_mask": torch.ones(256, 256, dtype=torch.bool).tril(-1)},
    "a row that sees nothing, by -inf": {"attn_mask": torch.full((256, 256), -torch.inf).triu(0)},
    "a row that sees nothing, by least numbers": {
        "attn_mask": torch.full((256, 256), torch.finfo(torch.float32).min).triu(0)
    },
}

WRONG_GRADIENTS = ["a row that sees nothing, by least numbers"]
"""Calls whose gradients torch's fused kernel gives too large, as its log-sum-exp loses the number of keys."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_torchs_output_and_gradients_also_when_its_mask_is_known(name: str):
    words = CALLS[name]
    for _ in range(3):
        leaves = qkv(requires_grad=True)
        theirs = F.scaled_dot_product_attention(*leaves, **words)
        with regard.everywhere() as caught:
            ours = F.scaled_dot_product_attention(*leaves, **words)
        assert [row.form.why for row in caught.rows] == [None]
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert ours.stride() == theirs.stride()
        if name in WRONG_GRADIENTS:
            with sdpa_kernel(SDPBackend.MATH):
                theirs = F.scaled_dot_product_attention(*leaves, **words)
        grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, theirs)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_a_new_mask_is_added_and_a_known_one_is_skipped():
    q, k, v = qkv()
    mask = torch.ones(256, 256, dtype=torch.bool).tril().roll(1, 0)
    plans = []
    with regard.everywhere(), observe_calls(lambda call: plans.append(call.plan)):
        F.scaled_dot_product_attention(q, k, v, mask)
        F.scaled_dot_product_attention(q, k, v, mask.clone())
    assert [plan.problem.mask is None for plan in plans] == [True, False]
    assert plans[1].schedule.tiles[2] > 0


def test_a_mask_of_small_calls_is_read_once_they_had_some_work():
    q, k, v = qkv(1, 4, 128, 64)
    work, plans = q.numel() * 128, []
    with regard.everywhere(), observe_calls(lambda call: plans.append(call.plan)):
        for _ in range(mask_content.READ_AFTER // work + 2):
            F.scaled_dot_product_attention(q, k, v, torch.ones(128, 128, dtype=torch.bool).tril().roll(2, 0))
    is_added = [plan.problem.mask is None for plan in plans]
    assert is_added == [True] * (mask_content.READ_AFTER // work) + [False] * 2


def test_a_write_into_a_known_mask_is_seen():
    q, k, v = qkv()
    mask = torch.full((256, 256), -torch.inf).triu(1)
    with regard.everywhere():
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, mask)
        mask.data[:, 5] = 1.5
        ours = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_a_bias_that_hides_is_added_and_what_it_hides_is_skipped():
    q, k, v = qkv()
    mask = torch.randn(1, 8, 256, 256).masked_fill_(FUTURE, LEAST / 2)
    plans = []
    with regard.everywhere(), observe_calls(lambda call: plans.append(call.plan)):
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, mask)
        mask[..., 0] = LEAST / 2
        mask[..., 0, 0] = 1
        F.scaled_dot_product_attention(q, k, v, mask)
        ours = F.scaled_dot_product_attention(q, k, v, mask)
    assert [plan.problem.mask is not None for plan in plans] == [False, True, True, False, True]
    assert all(plan.problem.bias is not None for plan in plans)
    assert plans[1].schedule.pairs == 256 * 257 // 2 * 16
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("hidden", [None, -torch.inf, LEAST / 2], ids=["nothing", "by -inf", "by least numbers"])
@pytest.mark.parametrize("kind", ["numbers", "zeros"])
def test_gradients_of_a_float_mask_are_torchs(hidden: float | None, kind: str):
    leaves = qkv(requires_grad=True)
    mask = of_size(1, 8, 256, 256) if kind == "numbers" else torch.zeros(1, 8, 256, 256)
    if hidden is not None:
        mask.masked_fill_(FUTURE, hidden)
    with regard.everywhere():  # so that its content is known
        for _ in range(2):
            F.scaled_dot_product_attention(*leaves, mask)
    leaves.append(mask.requires_grad_())
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sin().sum(), leaves)
    with regard.everywhere():
        ours = torch.autograd.grad(F.scaled_dot_product_attention(*leaves).sin().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def save_others(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A selective checkpoint that computes attention again, and keeps the results of all other operators."""
    is_attention = "regard" in str(operator) or "attention" in str(operator)
    return CheckpointPolicy.PREFER_RECOMPUTE if is_attention else CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("tokens", [128, 256])  # below and above READ_AT_ONCE
@pytest.mark.parametrize("kind", ["bools", "floats"])
@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_finds_a_call_with_a_mask_as_it_was_at_first(
    tokens: int, kind: str, selective: bool, monkeypatch: pytest.MonkeyPatch
):
    leaves = qkv(2, 8, tokens, 64, requires_grad=True)
    mask = (torch.rand(2, 1, tokens, tokens) < 0.6) | torch.eye(tokens).bool()
    if kind == "floats":
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    mask_content._seen.clear()
    monkeypatch.setattr(mask_content, "READ_AFTER", 3 * leaves[0].numel() * tokens)  # in the second run

    def twice(*leaves: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(*leaves, mask).clone()
        return F.scaled_dot_product_attention(first, *leaves[1:], mask)

    words = {"context_fn": partial(create_selective_checkpoint_contexts, save_others)} if selective else {}
    theirs = torch.autograd.grad(twice(*leaves).sin().sum(), leaves)
    with regard.everywhere() as caught:
        out = checkpoint(twice, *leaves, use_reentrant=False, **words)
        ours = torch.autograd.grad(out.sin().sum(), leaves)
    assert {row.form.why for row in caught.rows} == {None}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_masks_that_were_seen_take_bounded_memory():
    assert mask_content._seen._most <= 64 << 20


@pytest.mark.parametrize("values", ["floats", "finite"])
def test_a_mask_seen_in_inference_mode_serves_training(values: str):
    mask = torch.randn(512, 512) if values == "floats" else torch.where(torch.rand(512, 512) < 0.5, 0.0, -1e4)
    q = of_size(2, 8, 512, 64)
    with regard.everywhere():
        for _ in range(3):
            with torch.inference_mode():
                F.scaled_dot_product_attention(q, q, q, mask.clone())
        x = q.clone().requires_grad_()
        F.scaled_dot_product_attention(x, x, x, mask.clone()).sum().backward()
    y = q.clone().requires_grad_()
    F.scaled_dot_product_attention(y, y, y, mask).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.exhaustive(per="how")
@pytest.mark.parametrize("tokens", [(4, 7), (100, 256)], ids=["small", "large"])
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=["upper left", "lower right"])
def test_torchs_own_causal_bias_is_understood(make: Callable[..., Any], how: str, tokens: tuple[int, int]):
    queries, keys = tokens
    q, (k, v), bias = of_size(2, 8, queries, 64), (of_size(2, 8, keys, 64) for _ in range(2)), make(queries, keys)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)

    theirs = call(q, k, v)
    with regard.everywhere():
        ours = (torch.compile(call, backend=how, fullgraph=True) if how != "eager" else call)(q, k, v)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [5, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_a_mask_of_a_dtype_that_torch_refuses_raises_torchs_error_in_calls_of_any_size(tokens: int, dtype: torch.dtype):
    with pytest.raises(RuntimeError) as theirs:
        F.scaled_dot_product_attention(*qkv(2, 8, tokens, 64), torch.zeros(tokens, tokens, dtype=dtype))
    with regard.everywhere(), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(*qkv(2, 8, tokens, 64), torch.zeros(tokens, tokens, dtype=dtype))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("shape", [(), (256,)], ids=str)
def test_a_mask_of_fewer_than_two_axes_gives_what_torch_gives(shape: tuple[int, ...]):
    with regard.everywhere(), pytest.raises(IndexError):
        F.scaled_dot_product_attention(*qkv(), torch.zeros(shape))
    q, k, v = qkv(8, 256, 64)
    theirs = F.scaled_dot_product_attention(q, k, v, torch.ones(shape))
    with regard.everywhere():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, torch.ones(shape)), theirs)
