"""torch's kernels for CUDA, by operators that are pretended: what they let through is computed again."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual

from regard import Causal, RefusalError, attend, attend_state, explain
from regard.backend import triton
from regard.backend.contract import ResumableKernel
from regard.dispatch.choose import forget_plans
from regard.plan.problem import Operands
from tests.oracle import worst
from tests.pretended_gpu import PretendedGpu, pretended_gpu

sdpa_cuda = pytest.importorskip("regard.backend.sdpa_cuda", reason="Triton is not installed", exc_type=ImportError)


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
    assert dout.stride() == out.stride() == torch.empty_like(q).stride()
    return leaky_gradients(dout, q, k, v, out, lse[..., 0], causal, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    dropout, causal, debugs = rest
    assert (dropout, debugs) == (0.0, False)
    out, *others = leaky(q, k, v, causal, scale)
    return out.transpose(1, 2).contiguous().transpose(1, 2), *others


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
    with torch.no_grad():
        state = attend_state(q, k, v, mask=Causal(), backend=backend)
    out = attend(q, k, v, mask=Causal(), backend=backend)
    assert torch.equal(out.detach().cpu().nan_to_num(), state.out.cpu().nan_to_num())
    backward((out * place(dout.clone())).sum())
    return [t.detach().cpu() for t in (out, state.lse, q.grad, k.grad, v.grad)]


def compare(gpu: PretendedGpu, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The results on the GPU, which are those of the definition; NaN where it has NaN."""
    found = results(gpu.put, gpu.backward, tensors, dout, "sdpa")
    exact = results(torch.clone, Tensor.backward, tensors, dout, "native")
    for one, true in zip(found, exact, strict=True):
        assert torch.equal(one.isnan(), true.isnan())
        size = max(1.0, float(true.nan_to_num(0, 0, 0).abs().max()))
        assert worst(one.nan_to_num(0, 9, -9), true.nan_to_num(0, 9, -9)) <= 4 * torch.finfo(torch.bfloat16).eps * size
    return found


def drawn(heads: int = 4, tokens: int = 200) -> tuple[list[Tensor], Tensor]:
    """q, k and v of two key heads, and the gradient of the output."""
    tensors = [torch.randn(2, n, tokens, 16).bfloat16() for n in (heads, 2, 2)]
    return tensors, torch.randn(2, heads, tokens, 16).bfloat16()


def placed(gpu: PretendedGpu, tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the GPU that have gradients."""
    return [gpu.put(t.clone()).requires_grad_() for t in tensors]


@pytest.mark.parametrize("heads", [2, 4])
def test_causal_calls_are_those_of_the_definition(heads: int, gpu: PretendedGpu):
    found = compare(gpu, *drawn(heads))
    assert all(t.isfinite().all() for t in found)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("gpu", ["cudnn"], indirect=True)
@pytest.mark.parametrize(
    ("where", "poison"),
    [("k", math.nan), ("v", math.nan), ("v", math.inf), ("q", math.nan), ("dout", math.nan), ("dout", math.inf)],
)
def test_what_is_hidden_reaches_nothing(where: str, poison: float, gpu: PretendedGpu):
    """NaN in the second tile of tokens: rows before it in the same tile, and in others, are as without it."""
    tensors, dout = drawn()
    bad = dict(zip("qkv", tensors, strict=True)) | {"dout": dout}
    bad[where][0, 0, 150, 3] = poison
    out, lse, dq, dk, dv = compare(gpu, tensors, dout)
    for rows in (out, lse, dq):
        assert rows[0, :, :150].isfinite().all()
    for rows in (out, lse, dq, dk, dv):
        assert rows[1].isfinite().all()
    for rows in (dk, dv):
        assert rows[0, 1].isfinite().all()
        assert where in "kv" or rows[0, :, 151:].isfinite().all()
    assert not all(t.isfinite().all() for t in (out, lse, dq, dk, dv))


def test_rows_that_are_finite_are_left_as_they_are(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch):
    """The kernels of triton write to no row of a call without NaN: results are those of torch's kernel, bit by bit."""
    tensors, dout = drawn()
    on_gpu = placed(gpu, tensors)
    gpu.backward((attend(*on_gpu, mask=Causal(), backend="sdpa") * gpu.put(dout.clone())).sum())
    q, k, v = tensors
    out, lse, *_ = leaky(q, k, v, True, 0.25)
    state = attend_state(*(t.detach() for t in on_gpu), mask=Causal(), backend="sdpa")
    assert torch.equal(state.out.cpu(), out)
    assert torch.equal(state.lse.cpu(), lse)
    for one, true in zip(on_gpu, leaky_gradients(dout, q, k, v, out, lse, True, 0.25), strict=True):
        assert torch.equal(one.grad.cpu(), true)


def test_layouts_of_memory_are_read_in_place(gpu: PretendedGpu):
    tensors, dout = drawn()
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    with torch.no_grad():
        found = attend(*(gpu.put(t.clone()) for t in by_token), mask=Causal(), backend="sdpa")
    assert found.stride() == by_token[0].stride()
    tensors[2][0, 0, 150] = math.nan
    by_token[2][0, 0, 150] = math.nan
    for one, other in zip(compare(gpu, by_token, dout), compare(gpu, tensors, dout), strict=True):
        assert torch.allclose(one.float(), other.float(), equal_nan=True)


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_read_on_the_host(backward: bool, gpu: PretendedGpu):
    q, k, v = placed(gpu, drawn(tokens=40)[0])
    for _ in range(2):
        gpu.events.clear()
        with torch.set_grad_enabled(backward):
            out = attend(q, k, v, mask=Causal(), backend="sdpa")
        if backward:
            gpu.backward(out.sum())
        assert gpu.is_on_gpu(out)
    assert gpu.events == []


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_gradient_is_that_of_all(wanted: str, gpu: PretendedGpu):
    tensors, dout = drawn(tokens=40)
    tensors[2][0, 0, 30, 3] = math.nan
    expected = results(torch.clone, Tensor.backward, tensors, dout, "native")[2 + "qkv".index(wanted)]
    on_gpu = dict(zip("qkv", (gpu.put(t.clone()) for t in tensors), strict=True))
    leaf = on_gpu[wanted].requires_grad_()
    gpu.backward((attend(*on_gpu.values(), mask=Causal(), backend="sdpa") * gpu.put(dout)).sum())
    assert torch.allclose(leaf.grad.cpu().float(), expected.float(), atol=0.1, equal_nan=True)


@pytest.mark.parametrize("gpu", ["cudnn"], indirect=True)
def test_the_log_sum_exp_has_gradients(gpu: PretendedGpu):
    tensors, _ = drawn(tokens=70)
    for mask in (Causal(), None):
        grads = list[tuple[Tensor, ...]]()
        for place, backend in ((gpu.put, "sdpa"), (torch.clone, "reference64")):
            q, k, v = (place(t.clone()).requires_grad_() for t in tensors)
            state = attend_state(q, k, v, mask=mask, backend=backend)
            found = torch.autograd.grad((state.out.float().sum() + state.lse.sin().sum()), (q, k, v))
            grads.append(tuple(t.cpu() for t in found))
        assert all(worst(a, b) <= 2**-5 * max(1.0, float(b.abs().max())) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("gpu", ["cudnn"], indirect=True)
def test_where_torch_can_use_no_kernel_ours_compute_the_call(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sdpa_cuda, "usable", lambda *_: None)
    monkeypatch.setattr(sdpa_cuda, "cudnn_attention", None)
    tensors, dout = drawn(tokens=40)
    compare(gpu, tensors, dout)


@pytest.mark.parametrize("gpu", ["cudnn"], indirect=True)
def test_a_second_derivative_is_an_error_and_not_wrong(gpu: PretendedGpu):
    q, k, v = placed(gpu, drawn(tokens=20)[0])
    (grad,) = torch.autograd.grad(attend(q, k, v, mask=Causal(), backend="sdpa").sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match="'sdpa' can be differentiated once"):
        torch.autograd.grad(grad.sum(), q)
    out = attend(q, k, v, mask=Causal(), backend="sdpa")
    with dual_level(), pytest.raises(RefusalError, match="'sdpa' can be differentiated once"):
        torch.autograd.grad(out, q, make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.parametrize("gpu", ["cudnn"], indirect=True)
def test_saved_tensors_may_come_back_in_another_layout(gpu: PretendedGpu):
    q, k, v = placed(gpu, drawn(tokens=40)[0])

    def gradients(unpack: Any) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = attend(q, k, v, mask=Causal(), backend="sdpa")
        q.grad = k.grad = v.grad = None
        gpu.backward(out.sum())
        return [t.grad.cpu() for t in (q, k, v)]

    expected = gradients(lambda t: t)
    for found, right in zip(gradients(lambda t: t.mT.contiguous().mT), expected, strict=True):
        assert torch.allclose(found.float(), right.float())


@pytest.mark.parametrize("gpu", ["flash", "cudnn"], indirect=True)
def test_a_state_is_differentiated_without_computing_it_again(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch):
    tensors, dout = drawn(tokens=40)
    q, k, v = placed(gpu, tensors)
    plan = explain(q, k, v, mask=Causal(), backend="sdpa")
    operands = Operands(q, k, v, Causal(), None, None)
    assert isinstance(plan.kernel, ResumableKernel)
    state = plan.kernel(operands)
    monkeypatch.setattr(sdpa_cuda, "_forward", None)
    monkeypatch.setattr(sdpa_cuda, "_cudnn_lse_axes", lambda: 4)
    again = plan.kernel.resume(operands, state)
    assert torch.equal(again.out.cpu(), state.out.cpu())
    found = torch.autograd.grad((again.out * gpu.put(dout.clone())).sum(), (q, k, v))
    exact = results(torch.clone, Tensor.backward, tensors, dout, "native")[2:]
    assert all(worst(a.cpu(), b) <= 2**-5 * max(1.0, float(b.abs().max())) for a, b in zip(found, exact, strict=True))


def test_cudnn_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch):
    """Lengths that are no multiple of 128 need a version; misaligned memory none of torch's kernels."""
    problem = explain(*drawn()[0], mask=Causal()).problem
    hopper, ampere = (replace(problem, capability=capability) for capability in ((9, 0), (8, 0)))
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda form: True)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda form: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    whole, ragged = drawn(tokens=256)[0], drawn(tokens=200)[0]
    assert [sdpa_cuda.usable(on, *t) for on in (hopper, ampere) for t in (whole, ragged)] == [
        "cudnn", "flash", "flash", "flash",
    ]  # fmt: skip
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    assert sdpa_cuda.usable(hopper, *ragged) == "cudnn"
    odd = torch.zeros(2, 2, 200, 17, dtype=torch.bfloat16)
    assert sdpa_cuda.usable(hopper, ragged[0], odd[..., :16], ragged[2]) is None
    odd = torch.zeros(1 + ragged[1].numel(), dtype=torch.bfloat16)[1:].view_as(ragged[1])
    assert sdpa_cuda.usable(hopper, ragged[0], odd, ragged[2]) is None
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda form: False)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda form: False)
    assert sdpa_cuda.usable(hopper, *whole) is None


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "take float16 and bfloat16, not float32": ({"dtype": torch.float32}, {}),
    "heads of a multiple of 8 dimensions, not 36": ({"dim": 36}, {}),
    "as many keys as queries, not of 90 and 40": ({"keys": 90}, {"offset": 0}),
    "before it multiplies by scale": ({}, {"scale": -1.0}),
    "a sink can be folded in": ({}, {"sink": torch.zeros(4)}),
    "dropout makes torch build all scores": ({}, {"dropout": 0.1}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused_says_why(reason: str):
    sizes, words = REFUSED[reason]
    form = {"dtype": torch.bfloat16, "dim": 64, "keys": 40} | sizes
    q, k = (torch.empty(1, 4, n, form["dim"], dtype=form["dtype"], device="meta") for n in (40, form["keys"]))
    words = {"device": "cuda"} | {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in words.items()}
    plan = explain(q, k, k, mask=Causal(), **words)
    assert plan.backend != "sdpa"
    assert any(reason in each for each in plan.passed_over["sdpa"])


def test_a_plan_says_what_is_computed_again(monkeypatch: pytest.MonkeyPatch):
    q = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16, device="meta")
    text = str(explain(q, q, q, mask=Causal(), device="cuda"))
    assert "repair: rows that are not finite are computed again by the kernels of triton" in text
    assert "runs on sdpa" in text
    assert "repair" not in str(explain(q, q, q, device="cuda"))
    forget_plans()
    monkeypatch.setattr(triton, "_absence", lambda: "Triton is not installed")
    reasons = explain(q, q, q, mask=Causal(), device="cuda").passed_over["sdpa"]
    forget_plans()
    assert reasons == ["triton's kernels must repair what it lets through: Triton is not installed"]
