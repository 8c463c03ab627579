"""`flex_attention` gives what its definition gives, and its gradients, on the native kernels where they can."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from regard import observe_calls
from regard.flex import AuxRequest, and_masks, create_block_mask, flex_attention, noop_mask, or_masks
from regard.torch_internals import VERSION
from tests.flex.definition import Mod, attended, visible

BATCH, HEADS, TOKENS, DIM = 2, 4, 151, 16
IDS = torch.arange(TOKENS) * 5 // TOKENS
STARTS = torch.searchsorted(IDS, torch.arange(5))


class Straight(torch.autograd.Function):
    """tanh with a gradient of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Learned:
    """The tensors that functions of a score capture."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.per_head = torch.randn(HEADS, requires_grad=True)
        self.per_query = torch.rand(TOKENS, requires_grad=True)
        self.scalar = torch.tensor(1.7, requires_grad=True)
        self.square = torch.randn(TOKENS, TOKENS, requires_grad=True)
        self.whole = torch.randn(BATCH, HEADS, TOKENS, TOKENS + 9, requires_grad=True)
        self.relative = torch.randn(HEADS, 2 * TOKENS, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        return list(vars(self).values())


def score_mods(t: Learned) -> dict[str, tuple[Mod, str]]:
    """By name, the function and the backend that computes it."""
    return {
        "nothing": (lambda s, b, h, q, k: s, "native"),
        "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), "native"),
        "causal filled": (lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf), "native"),
        "relative": (lambda s, b, h, q, k: s + (q - k), "native"),
        "relative causal": (lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -math.inf), "native"),
        "alibi": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)), "native"),
        "learned alibi": (lambda s, b, h, q, k: s - (q - k).abs() * t.per_head[h], "native"),
        "times two": (lambda s, b, h, q, k: s * 2, "native"),
        "negative": (lambda s, b, h, q, k: 1 - s, "native"),
        "squared": (lambda s, b, h, q, k: s * s, "reference"),
        "a factor per head": (lambda s, b, h, q, k: s * t.per_head[h], "native"),
        "a factor per query": (lambda s, b, h, q, k: s * t.per_query[q] + t.per_head[h], "native"),
        "a factor per key": (lambda s, b, h, q, k: s * t.per_query[k], "reference"),
        "a learned scale": (lambda s, b, h, q, k: s * t.scalar, "native"),
        "divided": (lambda s, b, h, q, k: s / t.scalar, "native"),
        "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "native"),
        "softcap and a table": (lambda s, b, h, q, k: (s / 5).tanh().mul(5) + t.square[q, k], "native"),
        "softcap of a biased score": (lambda s, b, h, q, k: 5 * torch.tanh((s + t.square[q, k]) / 5), "reference"),
        "a position": (lambda s, b, h, q, k: k, "reference"),
        "sine": (lambda s, b, h, q, k: torch.sin(torch.cos(s)), "reference"),
        "a bias per head": (lambda s, b, h, q, k: s + t.per_head[h], "native"),
        "a table": (lambda s, b, h, q, k: s + t.square[q, k], "native"),
        "a transposed table": (lambda s, b, h, q, k: s + t.square[k, q], "native"),
        "a whole table": (lambda s, b, h, q, k: s + t.whole[b, h, q, k], "native"),
        "a table, step by step": (lambda s, b, h, q, k: s + t.square[q][k] * 2, "native"),
        "a relative table": (lambda s, b, h, q, k: s + t.relative[h, q - k + TOKENS], "native"),
        "a clipped relative table": (lambda s, b, h, q, k: s + t.relative[h, torch.clamp(q - k, -7, 7) + 7], "native"),
        "an outer product": (lambda s, b, h, q, k: s + t.per_query[q] * t.per_query[k], "native"),
        "documents": (
            lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s - (q - STARTS[IDS[q]]) * t.scalar, -math.inf),
            "native",
        ),
        "a bias of minus infinity": (lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -math.inf), "native"),
        "an own gradient": (lambda s, b, h, q, k: Straight.apply(s), "reference"),
        "opaque": (lambda s, b, h, q, k: s + torch.stack([t.per_head[h], t.scalar]).sum(), "reference"),
    }


NAMES = tuple(score_mods(Learned()))


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (IDS[q] == IDS[k]) & (q - STARTS[IDS[q]] >= k - STARTS[IDS[k]])


def some_rows_empty(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q % 7 != 3)


def natten(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    row, column = (q // 13).clamp(2, 9), (q % 13).clamp(2, 10)
    return ((row - k // 13).abs() <= 2) & ((column - k % 13).abs() <= 2)


def opaque(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.stack([q, k + h]).sum() % 5 < 3


MASK_MODS: dict[str, Mod] = {
    "noop": noop_mask,
    "causal": causal,
    "strictly causal": lambda b, h, q, k: q > k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 32),
    "window of both sides": lambda b, h, q, k: (q - k).abs() <= 20,
    "prefix": or_masks(causal, lambda b, h, q, k: k < 30),
    "documents": documents,
    "lengths": lambda b, h, q, k: k < torch.tensor([90, 151])[b],
    "per head": lambda b, h, q, k: q - k < (h + 1) * 8,
    "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
    "natten": natten,
    "table": lambda b, h, q, k: (torch.arange(TOKENS * TOKENS).view(TOKENS, TOKENS) * 7 % 11 < 5)[q, k],
    "documents of shifted positions": lambda b, h, q, k: IDS[q] == IDS[(k + 5).clamp(max=TOKENS - 1)],
    "both": and_masks(causal, documents),
    "not": lambda b, h, q, k: ~(q < k) | (b == 1),
    "some rows empty": some_rows_empty,
    "opaque": opaque,
}


def compared(score_mod: Mod | None, mask_mod: Mod | None, kv_heads: int, leaves: list[Tensor]) -> set[str]:
    """Compare a call with its definition, forward and backward; returns the backends that it used."""
    torch.manual_seed(1)
    q = torch.randn(BATCH, HEADS, TOKENS, DIM, requires_grad=True)
    k = torch.randn(BATCH, kv_heads, TOKENS, DIM, requires_grad=True)
    v = torch.randn(BATCH, kv_heads, TOKENS, DIM + 3, requires_grad=True)
    made = None
    if mask_mod is not None:
        made = create_block_mask(mask_mod, BATCH, HEADS, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=32)
    used = set[str]()
    with observe_calls(lambda call: used.add(call.plan.backend)):
        out, aux = flex_attention(q, k, v, score_mod, made, enable_gqa=True, return_aux=AuxRequest(lse=True))
    expected, lse = attended(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(aux.lse.double(), lse, atol=2e-5, rtol=1e-4)
    weight, lse_weight, inputs = torch.randn_like(out), torch.randn_like(aux.lse), [q, k, v, *leaves]
    grads, wanted = (
        torch.autograd.grad((o * weight).sum() + (visible(s) * lse_weight).sum(), inputs, materialize_grads=True)
        for o, s in ((out, aux.lse), (expected, lse))
    )
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, atol=2e-4 * max(1.0, float(want.abs().max())), rtol=1e-3)
    return used


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_score_mod_gives_what_its_definition_gives(name: str, kv_heads: int):
    tensors = Learned()
    score_mod, backend = score_mods(tensors)[name]
    assert compared(score_mod, None, kv_heads, tensors.leaves()) == {backend}


@pytest.mark.parametrize("name", NAMES)
def test_a_score_mod_and_a_mask_with_empty_rows(name: str):
    tensors = Learned()
    score_mod, backend = score_mods(tensors)[name]
    assert compared(score_mod, some_rows_empty, HEADS, tensors.leaves()) == {backend}


NARROW: dict[str, Mod] = {
    "int8 twice": lambda s, b, h, q, k: s * 0.002 * INT8[h] * INT8[h],
    "float16 beyond its range": lambda s, b, h, q, k: (s / 300 + HALF[k]) * HALF[q],
    "int8 times a sum": lambda s, b, h, q, k: (s / 300 + INT8[k % 4]) * INT8[h],
    "bfloat16 times a number": lambda s, b, h, q, k: (s + BFLOAT[k]) * 1.3,
    "divided by bfloat16": lambda s, b, h, q, k: s / BFLOAT[h],
    "positions times a number": lambda s, b, h, q, k: -(s + 0.1 * (q - k)),
}
INT8, HALF = torch.tensor([20, 30, 40, 50], dtype=torch.int8), torch.full((TOKENS,), 300.0).half()
BFLOAT = (torch.arange(TOKENS) * 0.37 + 1.7).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_tables_of_narrow_types_are_multiplied_in_the_type_of_scores(name: str, dtype: torch.dtype):
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, dtype=dtype) for _ in range(3))
    expected, _ = attended(q, k, v, NARROW[name], None)
    largest = 300 * 300 if "float16" in name else 2000
    error = (flex_attention(q, k, v, NARROW[name]).double() - expected).abs().max()
    assert error < 4 * largest * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", MASK_MODS)
def test_a_mask_mod_gives_what_its_definition_gives(name: str):
    assert compared(None, MASK_MODS[name], 2, []) == {"native"}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("block", [128, 32, (16, 40), 50])
def test_a_block_mask_has_torchs_lists(name: str, block: Any):
    together: dict[str, Any] = {"separate_full_blocks": False}  # torch before 2.13 lacks it
    for keys, options in ((TOKENS, {}), *([(TOKENS - 23, together)] if VERSION >= (2, 13) else [])):
        sizes = (BATCH, HEADS, TOKENS, keys, "cpu", block)
        own = create_block_mask(MASK_MODS[name], *sizes, **options)
        theirs = of_torch.create_block_mask(MASK_MODS[name], *sizes, **options)
        assert own.shape == theirs.shape
        assert own.sparsity() == theirs.sparsity()
        assert str(own) == str(theirs)
        for attribute in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks",
                          "q_indices", "full_q_num_blocks", "full_q_indices"):  # fmt: skip
            torch.testing.assert_close(getattr(own, attribute), getattr(theirs, attribute))


def written(score: Tensor, *_: Tensor) -> Tensor:
    return score.mul_(2)


def written_through_a_view(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    made = score.new_zeros(2)
    made[0], made[1] = score, q * 0.01
    return made.sum()


def written_to_an_alias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    other = score * 1
    other[...].add_(k * 0.1)
    return other


def subtracted_in_reverse(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.rsub(torch.rsub(score, q * 0.01, alpha=2), 3.0, alpha=2)


@pytest.mark.parametrize(
    "mod", [written, written_through_a_view, written_to_an_alias, subtracted_in_reverse], ids=lambda mod: mod.__name__
)
def test_a_score_may_be_written_in_place(mod: Mod):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    expected, _ = attended(q, k, v, mod, None)
    torch.testing.assert_close(flex_attention(q, k, v, mod).double(), expected, atol=1e-5, rtol=1e-4)
