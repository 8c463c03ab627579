"""Nothing travels to the host in silence: what calls of each kind read from a GPU, and copy to it."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    Dilated,
    Documents,
    KeyLengths,
    Mask,
    Prefix,
    ProblemError,
    Rope,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
    explain,
)
from regard.cache import Contiguous, Int4, Int8, Knorm, KVCache, Paged, Rolling
from regard.inspect.measures.induction import best, induction_scan
from regard.inspect.measures.measure import Inputs
from regard.inspect.measures.spread import positional
from regard.inspect.surveying.survey import survey
from regard.inspect.sweep import sweep
from regard.inspect.weights.lazy import Weights
from regard.integrate.cache import regard_cache
from regard.integrate.transformers import use_regard
from regard.nn import MultiHeadAttention
from regard.storage.stored import StoredTensor
from tests.inspect.small import TEXT, llama, words
from tests.integrate.zoo import with_cache
from tests.pretended_gpu import CUDA, Event, Launches, PretendedGpu, pretended_gpu

few_rows = pytest.importorskip("regard.gpu.few_rows", reason="Triton is not installed", exc_type=ImportError)

TABLES = "gpu/tables.py"


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


def made(gpu: PretendedGpu, *sizes: int) -> Tensor:
    return gpu.put(torch.randn(*sizes))


def events(gpu: PretendedGpu) -> list[Event]:
    """What happened since the last call."""
    found = list(gpu.events)
    gpu.events.clear()
    return found


class Mixed(torch.autograd.Function):
    """Its backward pass mixes a tensor of the host with one of the GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] + torch.ones(3, device="cpu")


def test_the_pretended_gpu_sees_what_torch_would_refuse_and_what_waits(gpu: PretendedGpu):
    x, host = made(gpu, 3), torch.randn(3)
    assert x.device == (x + 1).device == torch.zeros(2, device="cuda").device == CUDA
    assert host.device == x.cpu().device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="same device"):
        _ = x + host
    with pytest.raises(RuntimeError, match="same device"):
        gpu.backward(Mixed.apply(x.requires_grad_()).sum())
    x = x.detach()
    events(gpu)
    assert float(x.sum())
    assert x.tolist()
    assert bool(torch.isfinite(x).all())
    assert [event.kind for event in events(gpu)] == ["read"] * 3
    assert (host.to(x) + x).is_cuda
    assert [event.kind for event in events(gpu)] == ["upload"]


CALLS: dict[str, Any] = {
    "no mask": lambda gpu: {},
    "causal": lambda gpu: {"mask": Causal()},
    "window, sinks": lambda gpu: {"mask": Causal() & (Window(9) | Prefix(2)), "sink": made(gpu, 4), "softcap": 3.0},
    "biases": lambda gpu: {"bias": T5Bias(made(gpu, 32, 4)) + Alibi(4) + TensorBias(made(gpu, 4, 40, 40))},
    "documents": lambda gpu: {"mask": Causal() & Documents(gpu.put(torch.arange(40) // 7))},
    "lengths": lambda gpu: {"mask": KeyLengths(gpu.put(torch.tensor([40, 20])))},
    "a mask tensor": lambda gpu: {"mask": TensorMask(gpu.put(torch.rand(40, 40) > 0.5))},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name in ("causal", "lengths") else name for name in CALLS],
)
def test_a_call_on_a_gpu_reads_nothing_of_it_and_a_repeated_call_copies_nothing(name: str, gpu: PretendedGpu):
    arguments = CALLS[name](gpu)
    q, k, v = made(gpu, 2, 4, 40, 16), made(gpu, 2, 2, 40, 16), made(gpu, 2, 2, 40, 16)
    attend(q, k, v, **arguments)
    assert all(event.kind == "upload" or "Mask" in name for event in events(gpu) if "describe/" not in event.where)
    out = attend(q, k, v, **arguments)
    assert out.is_cuda
    assert events(gpu) == []


@pytest.mark.parametrize("name", [pytest.param("window, sinks", marks=pytest.mark.exhaustive), "biases"])
def test_a_backward_pass_on_a_gpu_reads_nothing_and_copies_nothing(name: str, gpu: PretendedGpu):
    arguments = CALLS[name](gpu)
    q, k, v = made(gpu, 1, 4, 40, 16).requires_grad_(), made(gpu, 1, 2, 40, 16), made(gpu, 1, 2, 40, 16)
    for _ in range(2):
        events(gpu)
        gpu.backward(attend(q, k, v, **arguments).sum())
    assert events(gpu) == []
    assert gpu.is_on_gpu(q.grad)


@pytest.mark.parametrize("queries", [40, 1], ids=["a prompt", "a step"])
def test_the_interpreter_computes_in_bfloat16_on_a_gpu_what_it_does_on_a_cpu(queries: int, gpu: PretendedGpu):
    """It has neither products of bfloat16 nor a rounding to it, wherever the tensors are."""
    tensors = [torch.randn(1, heads, tokens, 16).bfloat16() for heads, tokens in ((4, queries), (2, 40), (2, 40))]
    words: dict[str, Any] = {"mask": Causal(), "softcap": 3.0, "backend": "triton"}
    out = attend(*(gpu.put(t.clone()) for t in tensors), **words)
    assert torch.allclose(out.cpu().float(), attend(*tensors, **words).float(), atol=2**-7)


def test_the_interpreter_differentiates_in_bfloat16_on_a_gpu_as_on_a_cpu(gpu: PretendedGpu):
    tensors = [torch.randn(1, heads, 40, 16).bfloat16() for heads in (4, 2, 2)]
    on_gpu, host = ([place(t.clone()).requires_grad_() for t in tensors] for place in (gpu.put, Tensor.cpu))
    gpu.backward(attend(*on_gpu, mask=Causal(), backend="triton").sum())
    attend(*host, mask=Causal(), backend="triton").sum().backward()
    for ours, exact in zip(on_gpu, host, strict=True):
        assert torch.allclose(ours.grad.cpu().float(), exact.grad.float(), atol=2**-6)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_gpus_are_served_by_the_reference_for_a_reason(kind: str):
    q = torch.empty(1, 4, 40, 16, device="meta")
    plan = explain(q, q, q, mask=Causal(), bias=Alibi(4), softcap=3.0, device=kind)
    assert plan.backend == "reference"
    assert set(plan.passed_over) == {"native", "sdpa", "triton", "flex", "reference64"}
    assert "not chosen: triton (it computes on cuda)" in str(plan)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("name", [*CALLS, "learned slopes"])
def test_other_gpus_compute_what_a_cpu_does(name: str, kind: str):
    with pretended_gpu(kind) as gpu:
        slopes = made(gpu, 4).requires_grad_()
        arguments = {"bias": Alibi(slopes=slopes)} if name == "learned slopes" else CALLS[name](gpu)
        leaves = [made(gpu, 2, heads, 40, 16).requires_grad_() for heads in (4, 2, 2)]
        out = attend(*leaves, **arguments)
        assert gpu.is_on_gpu(out)
        out.sum().backward()
        assert gpu.is_on_gpu(leaves[0].grad)
        cache, module = KVCache(), gpu.put_module(MultiHeadAttention(64, 4, position=Rope(16), mask=Causal()))
        with torch.no_grad():
            for tokens in (20, 1):
                assert gpu.is_on_gpu(module(made(gpu, 2, tokens, 64), cache=cache))


CACHES: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "of a capacity": {"layout": Contiguous(capacity=64)},
    "rolling": {"layout": Rolling(24, sinks=2)},
    "int8": {"codec": Int8()},
    "evicting": {"evict": Knorm(24)},
    "paged": {"layout": Paged(32)},
    "pages of int4": {"layout": Paged(32), "codec": Int4()},
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("contiguous", "pages of int4") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in CACHES
    ],
)
def test_a_step_of_decoding_reads_nothing_and_copies_nothing_but_block_tables(name: str, gpu: PretendedGpu):
    cache, steps = KVCache(**CACHES[name]), list[list[Event]]()
    kinds: set[bool] = set()
    for tokens in (30, *[1] * 12):
        q, k, v = (made(gpu, 2, heads, tokens, 32) for heads in (4, 2, 2))
        events(gpu)
        stored = cache.append(k, v)
        kinds.add(isinstance(stored[0], StoredTensor))
        assert attend(q, *stored, mask=Causal()).is_cuda
        steps.append(events(gpu))
    assert kinds == {"int" in name or "paged" in name}
    assert not any(event.kind == "read" for step in steps for event in step)
    assert all(event.where.startswith("cache/page_storage.py") for step in steps[1:] for event in step)
    assert sum(map(bool, steps[1:])) <= (4 if "page" in name else 0)  # of 12 steps, those that begin a page


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mask", [Causal(), Causal() & (Window(11) | Prefix(3)), Causal() & Window(8)], ids=str)
def test_a_step_whose_position_is_on_the_gpu_is_the_same_for_the_host_at_every_position(
    mask: Mask, rows: int, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
):
    seen: list[object] = []
    for name in ("_SPAN", "_MERGE"):
        monkeypatch.setattr(few_rows, name, Launches(getattr(few_rows, name), seen))
    k, v = made(gpu, 2, 2, 80, 16), made(gpu, 2, 2, 80, 16)
    k[:, :, 60:], v[:, :, 60:] = torch.nan, torch.inf  # not written yet
    position, sink = gpu.put(torch.tensor([41, 7][:rows])), made(gpu, 4)
    launches: list[list[object]] = []
    for _ in range(3):
        q = made(gpu, 2, 4, 1, 16)
        events(gpu)
        out = attend(q, k, v, mask=mask, sink=sink, softcap=3.0, offset=position)
        assert events(gpu) == []
        launches.append(list(seen))
        seen.clear()
        for row in range(2):
            end = int(position[row % rows]) + 1
            each = [t[row : row + 1, :, :end].cpu() for t in (k, v)]
            words = {"mask": mask, "sink": sink.cpu(), "softcap": 3.0}
            exact = attend(q[row : row + 1].cpu(), *each, **words, backend="reference64")
            assert torch.allclose(out[row : row + 1].cpu(), exact, atol=1e-6)
        position.add_(1)
    assert launches[0] == launches[1] == launches[2]
    assert len(launches[0]) == 2


def test_positions_outside_of_the_keys_see_none_or_all(gpu: PretendedGpu):
    q, k = made(gpu, 2, 4, 1, 16), made(gpu, 2, 2, 40, 16)
    state = attend_state(q, k, k, mask=Causal(), offset=gpu.put(torch.tensor([-3, 90])))
    assert float(state.out[0].abs().max()) == 0
    assert bool((state.lse[0] == -torch.inf).all())
    assert torch.allclose(state.out[1:].cpu(), attend(q[1:].cpu(), k[1:].cpu(), k[1:].cpu()), atol=1e-6)


@pytest.mark.parametrize(
    "more", [{"mask": Causal() & Dilated(3)}, {"mask": Causal(), "bias": Alibi(4)}, {}], ids=["dilated", "bias", "none"]
)
def test_other_calls_read_a_position_on_the_gpu_once(more: dict[str, Any], gpu: PretendedGpu):
    q, k = made(gpu, 2, 4, 1, 16), made(gpu, 2, 2, 40, 16)
    out = attend(q, k, k, **more, offset=gpu.put(torch.tensor(17)))
    assert [event.where.split(":")[0] for event in events(gpu) if event.kind == "read"] == ["plan/checks.py"]
    assert torch.allclose(out.cpu(), attend(q.cpu(), k.cpu(), k.cpu(), **more, offset=17), atol=1e-6)


@pytest.mark.parametrize(
    "offset", [torch.tensor([1.5]), torch.tensor([True]), torch.tensor([1, 2, 3]), torch.tensor([[1], [2]])], ids=str
)
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_a_position_on_the_gpu_that_is_none_is_an_error_beside_a_mask_tensor(
    mask: Mask | None, offset: Tensor, gpu: PretendedGpu
):
    q, k, shown = made(gpu, 2, 4, 1, 16), made(gpu, 2, 2, 40, 16), TensorMask(gpu.put(torch.rand(2, 1, 1, 40) > 0.4))
    with pytest.raises(ProblemError, match="expected an int, an integer tensor of one element or one for each batch"):
        attend(q, k, k, mask=shown if mask is None else mask & shown, offset=gpu.put(offset.clone()))


@torch.no_grad()
def test_a_module_reads_nothing_and_copies_the_frequencies_of_rope_once(gpu: PretendedGpu):
    module = gpu.put_module(MultiHeadAttention(64, 4, kv_heads=2, position=Rope(16), mask=Causal()))
    cache, x = KVCache(), made(gpu, 2, 20, 64)
    module(x)
    assert {event.where.split(":")[0] for event in events(gpu)} <= {"describe/position.py", TABLES}
    module(x, cache=cache)
    for _ in range(3):
        module(x[:, :1], cache=cache)
    assert events(gpu) == []


@pytest.mark.exhaustive  # in the default run a padded batch of the model decodes
@torch.no_grad()
@pytest.mark.parametrize("steps", [3, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    ["of a capacity", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("paged", "contiguous", "int8"))],
)
def test_a_model_of_transformers_decodes_without_reads_in_regard(name: str, steps: int, gpu: PretendedGpu):
    model = use_regard(on_gpu(gpu, llama()))
    ids = gpu.put(torch.randint(0, 300, (2, 20)))
    model(ids, use_cache=False)
    assert {event.where.split(":")[0] for event in events(gpu)} <= {TABLES, "transformers/masking_utils.py"}
    cache = regard_cache(model, **CACHES[name])
    model(ids, **with_cache(cache))
    events(gpu)
    found = [model(ids[:, :1], **with_cache(cache)).logits for _ in range(steps)]
    assert events(gpu) == []
    if name == "of a capacity":
        whole = model(torch.cat([ids, *[ids[:, :1]] * steps], 1), use_cache=False).logits[:, -steps:]
        assert torch.allclose(torch.cat(found, 1), whole, atol=1e-4)


def on_gpu(gpu: PretendedGpu, model: Any) -> Any:
    """The model, whose `device` transformers takes from its own record."""
    model.__class__ = type("OnGpu", (type(model),), {"device": CUDA})
    return gpu.put_module(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sweep_over_all_weights_of_a_call_reads_nothing(dtype: torch.dtype, gpu: PretendedGpu):
    q, k = made(gpu, 2, 4, 40, 16).to(dtype), made(gpu, 2, 2, 40, 16).to(dtype)
    mask = Causal() & Window(9)
    lse = attend_state(q, k, k, mask=mask, scale=1.0).lse
    events(gpu)
    found = sweep(Weights(q, k, lse, mask), picture=8, along=gpu.put(torch.arange(40.0)[None, None]))
    assert found.mass.is_cuda
    assert [event for event in events(gpu) if event.kind == "read"] == []
    host = sweep(Weights(q.cpu(), k.cpu(), lse.cpu(), mask), picture=8, along=torch.arange(40.0)[None, None])
    for name in ("entropy", "squares", "mass", "top", "bins", "columns", "along", "mean", "largest"):
        assert torch.allclose(getattr(found, name).cpu(), getattr(host, name), atol=1e-5), name


@pytest.mark.exhaustive
def test_a_survey_computes_on_the_gpu_and_reads_results_alone(gpu: PretendedGpu):
    model = llama()
    with torch.no_grad():
        on_gpu(gpu, model)
    found = survey(model, words(), TEXT * 2, tokens=16, new_tokens=2, layers=[0])
    rooms = {event.where.split("/")[0] for event in gpu.events}
    assert "backend" not in rooms
    assert not any(event.where.startswith(("inspect/sweep", "inspect/weights/tiles")) for event in gpu.events)
    assert found.run.eager_difference is not None
    assert found.run.eager_difference < 1e-5


def test_induction_and_positional_heads_read_tokens_and_distances_once(gpu: PretendedGpu):
    q, k = made(gpu, 2, 4, 60, 16), made(gpu, 2, 2, 60, 16)
    mask, tokens = Causal() & Window(40), torch.arange(60).remainder(13).repeat(2, 1)
    lse = attend_state(q, k, k, mask=mask, scale=1.0).lse
    on_gpu, host = Weights(q, k, lse, mask), Weights(q.cpu(), k.cpu(), lse.cpu(), mask)
    events(gpu)
    found = best(induction_scan(on_gpu, gpu.put(tokens.clone())))
    assert [event.function for event in events(gpu) if event.kind == "read"] == ["cpu"]
    expected = best(induction_scan(host, tokens))
    measured = Inputs(on_gpu)
    _ = measured.swept
    events(gpu)
    placed = positional(measured)
    assert [event.function for event in events(gpu) if event.kind == "read"] == ["cpu", "cpu"]
    for ours, exact in ((found, expected), (placed, positional(Inputs(host)))):
        assert torch.allclose(ours.value.cpu(), exact.value, atol=1e-5)
        assert torch.allclose(ours.chance.cpu(), exact.chance, atol=1e-5)
        assert ours.at is not None
        assert exact.at is not None
        assert torch.equal(ours.at.cpu(), exact.at)


MASKS = {
    "padding": None,
    "causal": Causal(),
    "window": Causal() & Window(8),
    "window, sinks": Causal() & (Window(11) | Prefix(3)),
}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("stored", ["tensors", "pages", "rotated int8"])
@pytest.mark.parametrize("name", MASKS)
def test_one_query_under_a_mask_tensor_of_keys_reads_nothing_of_it(name: str, stored: str, gpu: PretendedGpu):
    """Each step has a new tensor, which a plan would have to read."""
    kinds = {"tensors": {}, "pages": {"layout": Paged(16)}, "rotated int8": {"codec": Int8(rotate=True)}}
    cache, sink = KVCache(**kinds[stored]), made(gpu, 4)
    cache.append(made(gpu, 2, 2, 70, 32), made(gpu, 2, 2, 70, 32))
    for _ in range(3):
        q, keys, values = made(gpu, 2, 4, 1, 32), *cache.append(made(gpu, 2, 2, 1, 32), made(gpu, 2, 2, 1, 32))
        shown = torch.rand(2, 1, 1, cache.tokens) > 0.4
        k, v = ((t if isinstance(t, Tensor) else t.dense()).cpu() for t in (keys, values))
        if stored == "tensors":
            hidden = ~shown[:, 0, 0, None, :, None]
            keys, values = (gpu.put(t.masked_fill(hidden, torch.nan)) for t in (k, v))
        on_gpu, mask = TensorMask(gpu.put(shown.clone())), MASKS[name]
        events(gpu)
        out = attend(q, keys, values, mask=on_gpu if mask is None else mask & on_gpu, sink=sink, softcap=3.0)
        assert events(gpu) == []
        words: Any = {"sink": sink.cpu(), "softcap": 3.0}
        words["mask"] = TensorMask(shown) if mask is None else mask & TensorMask(shown)
        assert torch.allclose(out.cpu(), attend(q.cpu(), k, v, **words, backend="reference64"), atol=2e-6)


def test_a_position_and_a_mask_tensor_of_keys_are_both_read_on_the_gpu(gpu: PretendedGpu):
    q, k = made(gpu, 2, 4, 1, 16), made(gpu, 2, 2, 60, 16)
    shown = torch.rand(2, 1, 1, 60) > 0.4
    events(gpu)
    mask = Causal() & Window(20) & TensorMask(gpu.put(shown.clone()))
    out = attend(q, k, k, mask=mask, offset=gpu.put(torch.tensor([41, 7])))
    assert events(gpu) == []
    for row, position in enumerate((41, 7)):
        each = [t[row : row + 1].cpu() for t in (q, k, k)]
        exact = attend(*each, mask=Causal() & Window(20) & TensorMask(shown[row : row + 1]), offset=position)
        assert torch.allclose(out[row : row + 1].cpu(), exact, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["paged", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("of a capacity", "contiguous", "int8"))],
)
def test_a_padded_batch_of_a_model_decodes_without_reads_in_regard(name: str, gpu: PretendedGpu):
    model = llama()
    on_host = use_regard(copy.deepcopy(model))
    model = use_regard(on_gpu(gpu, model))
    ids, padding = torch.randint(0, 300, (2, 20)), torch.ones(2, 23, dtype=torch.int64)
    padding[0, :7] = 0
    whole = on_host(torch.cat([ids, *[ids[:, :1]] * 3], 1), attention_mask=padding, use_cache=False).logits[:, -3:]
    ids, padding = gpu.put(ids), gpu.put(padding)
    cache = regard_cache(model, **CACHES[name])
    model(ids, attention_mask=padding[:, :20], **with_cache(cache))
    events(gpu)
    found = [
        model(ids[:, :1], attention_mask=padding[:, : 21 + step].clone(), **with_cache(cache)).logits
        for step in range(3)
    ]
    assert events(gpu) == []
    assert torch.allclose(torch.cat(found, 1).cpu(), whole, atol=1e-4 if name != "int8" else 5e-2)
