"""torch's kernels for CUDA, by operators that are pretended: what they let through is computed again."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, RefusalError, attend, attend_state, explain
from regard.backend import sdpa_cuda
from tests.oracle import worst
from tests.pretended_gpu import PretendedGpu, pretended_gpu

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scores to which a mask of -inf is added, so that NaN of hidden keys stays."""
    found = scale * q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return found + torch.full(found.shape[-2:], -math.inf, device=found.device).triu(1) if causal else found


def leaky(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Any, ...]:
    """The results of a kernel that hides by a weight of 0."""
    s = scores(q, k, causal, scale)
    out = s.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    placed = torch.empty_like(q).copy_(out)
    return placed, s.logsumexp(-1), None, None, q.shape[2], k.shape[2], None, None, None


def leaky_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """The gradients of such a kernel."""
    assert dout.stride() == out.stride()
    group = q.shape[1] // k.shape[1]
    dout, wide_q = dout.float(), q.float()
    wide_k, wide_v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    weights = torch.exp(scores(q, k, causal, scale) - lse[..., None])
    ds = weights * (dout @ wide_v.mT - (dout * out.float()).sum(-1, keepdim=True)) * scale
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ wide_q, weights.mT @ dout))
    return (ds @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    bias, returns_lse, dropout, causal, debugs = rest
    assert (bias, returns_lse, dropout, debugs) == (None, True, 0.0, False)
    out, lse, *others = leaky(q, k, v, causal, scale)
    return out, lse[..., None], *others


def cudnn_attention_backward(*parts: Any, scale: float) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse, *_, bias, _cum_q, _cum_k, queries, keys, dropout, causal = parts
    assert (bias, queries, keys, dropout, lse.ndim) == (None, q.shape[2], k.shape[2], 0.0, 4)
    return leaky_gradients(dout, q, k, v, out, lse[..., 0], causal, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    dropout, causal, debugs = rest
    assert (dropout, debugs) == (0.0, False)
    return leaky(q, k, v, causal, scale)


def flash_attention_backward(*parts: Any, scale: float) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse, _cum_q, _cum_k, queries, keys, dropout, causal, *_ = parts
    assert (queries, keys, dropout, lse.ndim) == (q.shape[2], k.shape[2], 0.0, 3)
    return leaky_gradients(dout, q, k, v, out, lse, causal, scale)


OPERATORS = (cudnn_attention, cudnn_attention_backward, flash_attention, flash_attention_backward)


@pytest.fixture(params=["cudnn", "flash"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """A GPU with such kernels, of which it uses one."""
    for operator in OPERATORS:
        monkeypatch.setattr(sdpa_cuda, operator.__name__, operator)
    monkeypatch.setattr(sdpa_cuda, "usable", lambda *_: request.param)
    with pretended_gpu() as gpu:
        yield gpu


def results(place: Any, backward: Any, tensors: list[Tensor], dout: Tensor, backend: str) -> list[Tensor]:
    """Output, log-sum-exp and gradients of a causal call."""
    q, k, v = (place(t.clone()).requires_grad_() for t in tensors)
    state = attend_state(q, k, v, mask=Causal(), backend=backend)
    out = attend(q, k, v, mask=Causal(), backend=backend)
    backward((out * place(dout.clone())).sum())
    return [t.detach().cpu() for t in (state.out, state.lse, out, q.grad, k.grad, v.grad)]


def compare(gpu: PretendedGpu, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The results on the GPU, which are those of the definition; NaN where it has NaN."""
    found = results(gpu.put, gpu.backward, tensors, dout, "sdpa")
    exact = results(torch.clone, torch.Tensor.backward, tensors, dout, "triton")
    for one, true in zip(found, exact, strict=True):
        assert torch.equal(one.isnan(), true.isnan())
        size = max(1.0, float(true.nan_to_num(0, 0, 0).abs().max()))
        assert worst(one.nan_to_num(0, 9, -9), true.nan_to_num(0, 9, -9)) <= 4 * torch.finfo(torch.bfloat16).eps * size
    return found


def drawn(heads: int, tokens: int) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(2, n, tokens, 16).bfloat16() for n in (heads, 2, 2)]
    return tensors, torch.randn(2, heads, tokens, 16).bfloat16()


@pytest.mark.parametrize("heads", [2, 4])
def test_causal_calls_are_those_of_the_definition(heads: int, gpu: PretendedGpu):
    found = compare(gpu, *drawn(heads, 150))
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "q", "dout"])
def test_what_is_hidden_reaches_nothing(where: str, poison: float, gpu: PretendedGpu):
    tensors, dout = drawn(4, 300)
    bad = dict(zip("qkv", tensors, strict=True)) | {"dout": dout}
    bad[where][0, 0, 150, 3] = poison
    out, _, _, dq, dk, dv = compare(gpu, tensors, dout)
    assert out[0, :, :150].isfinite().all()
    assert out[1].isfinite().all()
    assert dq[0, :, :150].isfinite().all()
    assert dk[0, :, 151:].isfinite().all() or where in "kv"  # rows that see it reach all of their keys
    assert dv[0, 1].isfinite().all()
    assert all(t[1].isfinite().all() for t in (dq, dk, dv))
