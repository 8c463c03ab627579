"""The GPU kernels, run by Triton's interpreter: outputs and gradients are those of the definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn.functional import pad

from regard import (
    Alibi,
    Bias,
    Causal,
    Documents,
    Mask,
    ProblemError,
    RefusalError,
    TensorBias,
    Window,
    attend,
    attend_state,
    explain,
)
from regard.plan.tiling import schedule
from tests.conformance import CASES, DIFFERENTIATED, differentiated
from tests.expressions import masks
from tests.laws.test_attend import cases
from tests.oracle import Case, worst
from tests.selection import examples

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

PARTS_OF_OTHERS = (
    "window and sinks",
    "prefix-LM",
    "t5",
    "a bias tensor",
    "softcap",
    "sinks learned per head",
)
"""What "everything" and "biases added" have as well."""
BACKWARD = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in PARTS_OF_OTHERS else name for name in DIFFERENTIATED
]


def size(t: Tensor) -> float:
    return max(1.0, float(t.abs().max())) if t.numel() else 1.0


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_those_of_the_definition(name: str):
    case = CASES[name]()
    for found, truth in zip(differentiated(case, "triton"), differentiated(case, "reference64"), strict=True):
        assert worst(found, truth) <= 2e-6 * size(truth)


@pytest.mark.representative
@given(case=cases())
@examples(3, everything=8)
def test_a_random_call_has_the_output_and_gradients_of_the_reference(case: Case):
    case = case.to(torch.float32)
    if not case.q.numel():
        return
    for found, truth in zip(differentiated(case, "triton"), differentiated(case, "reference64"), strict=True):
        assert found.shape == truth.shape
        assert worst(found, truth) <= 4e-6 * size(truth)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.exhaustive), torch.bfloat16], ids=str)
def test_half_types_are_stored_and_float32_is_computed(dtype: torch.dtype):
    case = CASES["everything"]().to(dtype)
    for found, truth in zip(differentiated(case, "triton"), differentiated(case, "reference"), strict=True):
        assert found.dtype == truth.dtype
        assert worst(found, truth) <= 4 * torch.finfo(dtype).eps * size(truth)


def test_states_are_those_of_the_reference_and_their_lse_has_gradients():
    q, k, v = (torch.randn(2, 2, 37, 16, requires_grad=True) for _ in range(3))
    results = list[list[Tensor]]()
    for backend in ("triton", "reference64"):
        state = attend_state(q, k, v, mask=Causal() & Window(11), backend=backend)
        total = state.out.sum() + (state.lse.float() * torch.linspace(0, 1, 37)).sum()
        results.append([state.out.detach(), state.lse.detach(), *torch.autograd.grad(total, (q, k, v))])
    assert all(worst(a, b) < 5e-6 for a, b in zip(*results, strict=True))


def test_dropout_drops_what_it_drops_on_a_cpu():
    q, k, v = (torch.randn(2, 4, 71, 16, requires_grad=True) for _ in range(3))
    results = list[list[Tensor]]()
    for backend in ("triton", "native"):
        torch.manual_seed(5)
        out = attend(q, k, v, mask=Causal(), dropout=0.3, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(worst(a, b) < 2e-5 for a, b in zip(*results, strict=True))
    whole = attend(q, k, v, mask=Causal(), backend="triton").detach()
    assert worst(results[0][0], whole) > 0.1


def test_a_second_derivative_is_an_error_and_not_wrong():
    q = torch.randn(1, 1, 3, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(attend(q, q, q, backend="triton").sin().sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match="'triton' can be differentiated once"):
        torch.autograd.grad(grad.sum(), q)
    out = attend(q, q, q, backend="triton")
    with pytest.raises(RefusalError, match="one gradient at a time"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)
    with dual_level(), pytest.raises(RefusalError, match="'triton' can be differentiated once"):
        torch.autograd.grad(out, q, make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.parametrize("cap", [0.7, 50.0, 1e3, 1e6])
def test_a_softcap_of_any_size_is_as_exact_as_the_scores(cap: float):
    q, k, v = torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16), torch.randn(1, 1, 70, 16)
    case = Case(q, k, v, {"softcap": cap, "scale": 1.0, "mask": Causal()})
    for found, truth in zip(differentiated(case, "triton"), differentiated(case, "reference64"), strict=True):
        assert worst(found, truth) <= 3e-6 * size(truth)
    few = attend(q[:, :, :1], k, v, softcap=cap, scale=1.0, backend="triton")
    assert worst(few, attend(q[:, :, :1], k, v, softcap=cap, scale=1.0, backend="reference64")) <= 3e-6


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_softcap_may_be_an_int_of_more_than_64_bits(backend: str):
    q = torch.randn(1, 1, 9, 16)
    out = attend(q, q, q, softcap=10**20, backend=backend)
    assert worst(out, attend(q, q, q, softcap=1e20, backend="reference64")) <= 3e-6


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_hidden_reaches_nothing_and_what_is_seen_reaches_its_rows(poison: float):
    q, k, v = (torch.randn(1, 2, 150, 16) for _ in range(3))
    clean = attend(q, k, v, mask=Causal(), backend="triton")
    k[0, 0, 140, 3] = v[0, 1, 149, 5] = poison
    case = Case(q, k, v, {"mask": Causal()})
    out, dq, dk, dv = differentiated(case, "triton")
    true, *_ = differentiated(case, "reference")
    assert torch.equal(out[:, 0, :140], clean[:, 0, :140])
    assert torch.equal(out[:, 1, :149], clean[:, 1, :149])
    assert torch.allclose(out[:, 1], true[:, 1], atol=1e-5, equal_nan=True)  # channel by channel
    assert torch.isfinite(dq[:, 0, :140]).all()
    assert torch.isfinite(dv[:, 1]).all()
    if math.isnan(poison):
        assert dq[0, 0, 145].isnan().all()
        assert dk[0, 0, 20].isnan().all()


def test_a_bias_of_minus_infinity_hides_as_a_mask_does():
    q, k, v = (torch.randn(1, 1, 260, 16) for _ in range(3))
    pads = torch.zeros(1, 1, 260, 260)
    pads[..., :200] = -torch.inf  # more than a block of keys
    pads[:, :, 7] = -torch.inf  # a row that sees nothing
    case = Case(q, k, v, {"bias": TensorBias(pads)})
    found, truth = differentiated(case, "triton"), differentiated(case, "reference64")
    assert all(worst(a, b) <= 5e-6 for a, b in zip(found[:4], truth[:4], strict=True))
    assert (found[0][:, :, 7] == 0).all()


def test_a_row_that_a_bias_hides_drops_a_gradient_that_is_nan():
    q, k, v = (torch.randn(1, 1, 260, 16, requires_grad=True) for _ in range(3))
    pads = torch.zeros(1, 1, 260, 260)
    pads[:, :, 7] = -torch.inf
    out = attend(q, k, v, bias=TensorBias(pads), backend="triton")
    norms = out.square().sum(-1).sqrt()  # whose derivative is NaN at 0
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(norms.sum(), (q, k, v)))


def test_a_gradient_that_is_not_finite_reaches_only_what_its_row_sees():
    q, k, v = (torch.randn(1, 1, 90, 16, requires_grad=True) for _ in range(3))
    up = torch.ones(1, 1, 90, 16)
    up[0, 0, 40, 2] = math.nan
    _, dk, dv = torch.autograd.grad(attend(q, k, v, mask=Causal(), backend="triton"), (q, k, v), up)
    assert dv[0, 0, :41, 2].isnan().all()
    assert torch.isfinite(dv[0, 0, :, 3:]).all()
    assert torch.isfinite(dv[0, 0, 41:]).all()
    assert torch.isfinite(dk[0, 0, 41:]).all()


WANTED = {
    "q": ["gradient_of_queries"],
    "k": ["gradient_of_keys"],
    "v": ["gradient_of_keys"],
    "kv": ["gradient_of_keys"],
    "sink": [],
    "slopes": ["gradient_of_queries"],
    "bias": ["gradient_of_queries"],
}
"""The kernels that the gradients of some inputs need, where one pass sums those of keys and values."""


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("names", WANTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_kernels_start_whose_gradients_are_wanted(names: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    from regard.gpu.starts import Starts

    started, run = list[str](), Starts.run

    def record(self: Starts, *arguments: Any) -> None:
        name = self.each[0][0].kernel.fn.__name__
        started.extend([name] if name != "forward" else [])
        run(self, *arguments)

    monkeypatch.setattr(Starts, "run", record)
    sizes = {"q": (1, 4, 40, 16), "k": (1, 2, 40, 16), "v": (1, 2, 40, 8), "bias": (4, 1, 40)}
    inputs = {name: torch.randn(size).to(dtype) for name, size in sizes.items()}
    inputs |= {"sink": torch.randn(4), "slopes": torch.rand(4)}

    def gradients_of(wanted: list[str]) -> tuple[Tensor, ...]:
        started.clear()
        t = {name: t.clone().requires_grad_(name in wanted) for name, t in inputs.items()}
        bias = Alibi(slopes=t["slopes"]) + TensorBias(t["bias"])
        out = attend(t["q"], t["k"], t["v"], mask=Causal(), bias=bias, sink=t["sink"], backend="triton")
        return torch.autograd.grad(out.float().sin().sum(), [t[name] for name in wanted])

    wanted = [*names] if names == "kv" else [names]
    of_all = dict(zip(inputs, gradients_of(list(inputs)), strict=True))
    assert started == ["gradient_of_queries", *["gradient_of_keys"] * (2 if dtype == torch.float32 else 1)]
    for name, found in zip(wanted, gradients_of(wanted), strict=True):
        assert torch.equal(found, of_all[name])
    passes = 2 if names == "kv" and dtype == torch.float32 else 1
    assert started == WANTED[names] * passes


@pytest.mark.parametrize("bias", [None, Alibi(2), TensorBias(torch.zeros(1, 1, 40, 40))], ids=str)
def test_a_sink_of_infinity_leaves_no_weight_and_no_gradient(bias: Bias | None):
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask=Causal(), bias=bias, sink=torch.tensor([torch.inf, 0.0]), backend="triton")
    grads = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for t in (out, *grads):
        assert (t[:, 0] == 0).all()
        assert torch.isfinite(t[:, 1]).all()


def test_a_row_has_the_same_bits_in_any_batch_and_in_each_run():
    q, k, v = (torch.randn(2, 2, 137, 16) for _ in range(3))
    words: dict[str, Any] = {"mask": Causal() & Documents(torch.arange(137) // 67), "backend": "triton"}
    whole = attend(q, k, v, **words)
    assert torch.equal(whole, attend(q, k, v, **words))
    assert torch.equal(whole[1:2], attend(q[1:2], k[1:2], v[1:2], **words))


def test_layouts_of_memory_are_read_in_place():
    q, k, v = (torch.randn(2, 61, 4, 16).transpose(1, 2) for _ in range(3))
    out = attend(q, k, v, mask=Causal(), backend="triton")
    assert out.stride() == q.stride()
    assert torch.equal(out, attend(q.contiguous(), k.contiguous(), v.contiguous(), mask=Causal(), backend="triton"))


def test_saved_tensors_may_come_back_in_another_layout():
    q, k, v = (torch.randn(1, h, n, 16, requires_grad=True) for h, n in ((2, 37), (1, 41), (1, 41)))
    slopes, sink = torch.ones(2, requires_grad=True), torch.randn(2, requires_grad=True)
    words: dict[str, Any] = {"bias": Alibi(slopes=slopes), "sink": sink, "mask": Causal(), "backend": "triton"}

    def gradients(unpack: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = attend(q, k, v, **words)
        return torch.autograd.grad(out.sin().sum(), (q, k, v, slopes, sink))

    expected = gradients(lambda t: t)
    layouts: list[Any] = [lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1), lambda t: pad(t, (0, 1))[..., :-1]]
    others: list[Any] = [torch.Tensor.half, lambda t: t[..., :9, :] if t.ndim == 4 else t]
    for unpack in layouts:
        for found, right in zip(gradients(unpack), expected, strict=True):
            torch.testing.assert_close(found, right)
    for unpack in others:
        with pytest.raises(ProblemError, match=r"^q was saved for the backward pass as torch.float32 \[1, 2, 37, 16\]"):
            gradients(unpack)


@given(mask=masks(23, 29))
@settings(max_examples=60)
def test_the_lists_by_key_are_those_by_query_transposed(mask: Mask):
    from regard.gpu.tables import transposed

    tiles = schedule(mask, batch=2, heads=6, queries=23, keys=29, offset=6, tile=8)
    _, run_start, run_tile, run_length, patch_start, patch_tile, patch_pattern = transposed(tiles)
    found = torch.zeros(tiles.maps[0] * tiles.maps[1] * 4, 8, 24, dtype=torch.bool)
    for line, block in enumerate(found):
        for run in range(run_start[line], run_start[line + 1]):
            block[:, run_tile[run] * 8 : (run_tile[run] + run_length[run]) * 8] = True
        for patch in range(patch_start[line], patch_start[line + 1]):
            first = patch_tile[patch] * 8
            block[:, first : first + 8] = tiles.pattern(int(patch_pattern[patch])).T
    whole = found.view(*tiles.maps, 32, 24)[:, :, :29, :23]
    assert torch.equal(whole, tiles.keep().transpose(2, 3))


def test_plans_for_a_gpu_say_why():
    q = torch.empty(1, 8, 512, 64, device="meta")
    assert explain(q, q, q, mask=Causal() & Window(128), device="cuda").backend == "triton"
    assert explain(q, q, q, device="cuda").backend == "sdpa"
    assert explain(q, q, q, mask=Causal()).passed_over["triton"] == ["it computes on GPUs"]


def test_a_plan_is_made_for_a_named_device():
    q = torch.empty(1, 8, 4096, 128, device="meta", dtype=torch.bfloat16)
    plan = explain(q, q, q, mask=Causal(), device="cuda:h100")
    assert "on NVIDIA H100 SXM5 at least 0.0347 ms" in str(plan)  # 4 * 8 * 4096 * 4097 / 2 * 128 FLOP at 989.4 TFLOP/s
    plan = explain(q, q, q, mask=Causal() & Window(9), device=torch.device("cuda", 0))
    assert str(plan).splitlines()[1] == "runs on triton"
    assert explain(q, q, q, mask=Causal(), device="mps").backend == "reference"
    with pytest.raises(ProblemError, match=r"'cpu:h100': NVIDIA H100 SXM5 is no device of cpu: expected cuda:h100\.$"):
        explain(q, q, q, device="cpu:h100")
    with pytest.raises(ProblemError, match=r"unknown machine 'h10'\. Near: h100"):
        explain(q, q, q, device="cuda:h10")
    with pytest.raises(ProblemError, match=r'device is for tensors on meta, .* on cpu: pass q\.to\("meta"\)'):
        explain(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), device="cuda")
