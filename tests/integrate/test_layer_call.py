"""The call of a layer is known by the layers after it, where nothing that matters differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, KeyLengths, ProblemError, RefusalError, TensorBias, TensorMask, Window, attend, native
from regard.calls import observe_calls, replace_outputs
from regard.describe.mask import Mask
from regard.dispatch import ready
from regard.integrate import attention_function, layer_call
from regard.integrate.attention_function import attention
from regard.integrate.layer_mask import LayerMask
from regard.torch_internals import guard_of

KEYS = 13
Tensors = tuple[Tensor, Tensor, Tensor]


def tensors(queries: int = 5, dtype: torch.dtype = torch.float32, dim: int = 16) -> Tensors:
    torch.manual_seed(0)
    return tuple(torch.randn(2, h, n, dim, dtype=dtype) for h, n in ((6, queries), (2, KEYS), (2, KEYS)))  # pyright: ignore[reportReturnType]


def mask_of(queries: int = 5, mask: Mask | None = None) -> LayerMask:
    return LayerMask(Causal() if mask is None else mask, (2, 1, queries, KEYS), KEYS - queries, "cpu")


def run(t: Tensors, mask: LayerMask, **options: Any) -> Tensor:
    return attention(nn.Module().eval(), *t, mask, **options)[0]


def expected(t: Tensors, mask: LayerMask, **options: Any) -> Tensor:
    return attend(*t, mask=mask.mask, offset=mask.offset, **options).transpose(1, 2)


def known(t: Tensors, **options: Any) -> LayerMask:
    """A mask whose first layers had these tensors."""
    mask = mask_of(t[0].shape[2])
    for _ in range(2):  # the first call of a process is planned
        run(t, mask, **options)
    return mask


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries of calls that were not known."""
    calls: list[Tensor] = []

    def run_layer(q: Tensor, *others: Any) -> Tensor:
        calls.append(q)
        return layer_call.run_layer(q, *others)

    monkeypatch.setattr(attention_function, "run_layer", run_layer)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("queries", [1, 5])
def test_later_layers_give_the_bits_of_a_call_of_their_own(
    queries: int, dtype: torch.dtype, long_way: list[Tensor]
) -> None:
    q, k, v = tensors(queries, dtype)
    mask = known((q, k, v))
    if not native.available() or guard_of(q, k, v) is None:
        pytest.skip("calls are known by the compiled library and by a guard of torch")
    assert mask.known is not None
    long_way.clear()
    out = run((q + 1, k * 2, v - 1), mask)
    assert not long_way
    assert out.shape == (2, queries, 6, 16)
    assert out.is_contiguous()
    assert torch.equal(out, expected((q + 1, k * 2, v - 1), mask))


PADDED = {
    "to the right": lambda: Causal() & KeyLengths(torch.tensor([9, 13])),
    "to the left": lambda: Causal() & ~KeyLengths(torch.tensor([0, 4])),
}


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("side", PADDED)
def test_later_layers_under_padding_are_known_too(side: str, queries: int, long_way: list[Tensor]) -> None:
    t = q, k, v = tensors(queries)
    if not native.available() or guard_of(q, k, v) is None:
        pytest.skip("calls are known by the compiled library and by a guard of torch")
    for _ in range(2):  # two passes, each with a mask of its own
        mask = mask_of(queries, PADDED[side]())
        for _ in range(2):  # the first call of a process is planned
            run(t, mask)
        assert mask.known is not None
        long_way.clear()
        out = run((q + 1, k * 2, v - 1), mask)
        assert not long_way
        assert out.is_contiguous()
        assert torch.equal(out, expected((q + 1, k * 2, v - 1), mask))
    other = mask_of(queries, Causal() & KeyLengths(torch.tensor([2, 3])))
    assert torch.equal(run(t, other), expected(t, other))


def test_a_tensor_of_bools_that_changes_between_layers_is_read_in_each() -> None:
    t, kept = tensors(), torch.ones(2, 1, 5, KEYS, dtype=torch.bool)
    mask = mask_of(mask=TensorMask(kept))
    for hidden in range(4):
        assert torch.equal(run(t, mask), expected(t, mask))
        assert torch.equal(run(t, mask), expected(t, mask))
        kept[..., hidden] = False


def test_a_layer_of_other_strides_is_another_call(long_way: list[Tensor]) -> None:
    q, k, v = tensors()
    mask = known((q, k, v))
    longer = torch.cat([k, k], 2)[:, :, :KEYS]
    by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
    for t in ((q, longer, v), (by_token, k, v), (q.mT.contiguous().mT, k, v)):
        long_way.clear()
        out = run(t, mask)
        assert long_way
        assert out.is_contiguous()
        assert torch.equal(out, expected((q, k, v), mask))


DIFFERENT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensors]] = {
    "other heads": lambda q, k, v: (torch.cat([q, q], 1), k, v),
    "other key heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "another dim": lambda q, k, v: (q[..., :8], k[..., :8], v),
    "another dim of values": lambda q, k, v: (q, k, v[..., :8].contiguous()),
    "another type": lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_layer_of_other_sizes_or_types_is_another_call(name: str) -> None:
    t = tensors()
    mask = known(t)
    other = DIFFERENT[name](*t)
    assert torch.equal(run(other, mask), expected(other, mask))
    assert torch.equal(run(other, mask), expected(other, mask))
    assert torch.equal(run(t, mask), expected(t, mask))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("words", [{"scale": 0.5}, {"scale": 2.0}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 3.0}])
def test_a_layer_of_another_scale_or_cap_is_another_call(scale: float | None, words: dict[str, float]) -> None:
    t = tensors()
    mask = known(t, scaling=scale)
    options = {"scaling" if name == "scale" else name: number for name, number in words.items()}
    for _ in range(2):
        assert torch.equal(run(t, mask, **options), expected(t, mask, **words))
        assert torch.equal(run(t, mask, scaling=scale), expected(t, mask, scale=scale))


def test_an_equal_scale_of_another_layer_is_the_same_call(long_way: list[Tensor]) -> None:
    t = tensors()
    mask = known(t, scaling=0.5)
    assert mask.known is not None
    long_way.clear()
    assert torch.equal(run(t, mask, scaling=float("0.5")), expected(t, mask, scale=0.5))
    assert not long_way


def test_a_layer_whose_call_is_not_ready_asks_once_whether_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the content of the mask to ask."""
    t, asked, run_ready = tensors(), [], ready.run

    def run_counted(*call: Any) -> Any:
        asked.append(call)
        return run_ready(*call)

    for keep in (torch.rand(2, 1, 5, KEYS) > 0.4, torch.rand(2, 1, 5, KEYS) > 0.6):
        mask = mask_of(mask=TensorMask(keep))
        right = expected(t, mask)
        ready.forget()
        with monkeypatch.context() as patch:
            patch.setattr(ready, "run", run_counted)
            out = run(t, mask)
        assert len(asked) == 1
        asked.clear()
        assert torch.equal(out, right)
        assert torch.equal(run(t, mask), right)


def test_layers_under_two_masks_keep_their_own() -> None:
    t = tensors()
    full, sliding = known(t), mask_of(mask=Causal() & Window(3))
    for _ in range(3):
        assert torch.equal(run(t, sliding), expected(t, sliding))
        assert torch.equal(run(t, full), expected(t, full))
    assert not torch.equal(run(t, sliding), run(t, full))


def test_a_later_layer_with_more_arguments_is_another_call() -> None:
    q, _, v = t = tensors()
    mask = known(t)
    sink, bias = torch.randn(6), torch.randn(1, 6, 5, KEYS)
    assert torch.equal(run(t, mask, s_aux=sink), expected(t, mask, sink=sink))
    assert torch.equal(run(t, mask, sinks=sink), expected(t, mask, sink=sink))
    assert torch.equal(run(t, mask, position_bias=bias), expected(t, mask, bias=TensorBias(bias)))
    chosen = torch.zeros(2, 5, 1, dtype=torch.int64)
    assert torch.equal(
        run(t, mask, indices=chosen), v[:, :, :1].repeat_interleave(3, 1).expand(q.shape).transpose(1, 2)
    )
    weights = attention(nn.Module().eval(), *t, mask, output_attentions=True)[1]
    assert weights is not None
    assert weights.shape == (2, 6, 5, KEYS)
    assert not torch.equal(attention(nn.Module().train(), *t, mask, dropout=0.5)[0], run(t, mask))
    assert torch.equal(run(t, mask, dropout=0.5, position_ids=None, use_cache=True, max_length_q=3), run(t, mask))
    with pytest.raises(RefusalError, match="block_indices"):
        run(t, mask, block_indices=chosen)


def test_a_later_layer_with_other_keys_than_the_mask_is_an_error() -> None:
    q, k, v = t = tensors()
    mask = known(t)
    with pytest.raises(ProblemError, match="and Module has 5 and 12"):
        run((q, k[:, :, 1:], v[:, :, 1:]), mask)


def test_negative_views_are_another_call() -> None:
    q, k, v = t = tensors()
    mask = known(t)
    negative = torch.complex(q, -q).conj().imag  # q, of which the sign is a flag
    assert negative.is_neg()
    # torch's products have other bits where memory begins elsewhere
    assert torch.allclose(run((negative, k, v), mask), expected(t, mask), atol=1e-6)


def test_tensors_without_data_stay_so() -> None:
    t = tensors()
    mask = known(t)
    out = run(tuple(x.to("meta") for x in t), mask)  # pyright: ignore[reportArgumentType]
    assert out.is_meta
    with FakeTensorMode() as mode:
        fake = run(tuple(mode.from_tensor(x) for x in t), mask)  # pyright: ignore[reportArgumentType]
    assert type(fake) is FakeTensor
    assert fake.shape == out.shape == (2, 5, 6, 16)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop")
@pytest.mark.parametrize("which", range(3))
def test_a_nested_tensor_is_an_error_and_does_not_end_the_process(which: int) -> None:
    t = tensors()
    mask = known(t)
    nested = list(t)
    nested[which] = torch.nested.nested_tensor([t[which][0], t[which][1]])
    with pytest.raises((RuntimeError, ProblemError)):
        run((nested[0], nested[1], nested[2]), mask)
    with pytest.raises(RuntimeError, match="nested"):
        torch.vmap(lambda x: run((x, x.clone(), x.clone()), mask))(nested[which])


def test_each_layer_reads_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    t = tensors()
    attend(*t, mask=Causal() & Window(7))
    numbers: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers.append(1) or 1)
    ready.forget()
    mask = mask_of(mask=Causal() & Window(7))
    run(t, mask)
    run(t, mask)
    assert mask.known is not None
    before = len(numbers)
    run(t, mask)
    run(t, mask)
    assert len(numbers) == before + 2
    ready.forget()


def test_a_mask_with_a_tensor_is_read_by_each_layer() -> None:
    t = tensors()
    kept = torch.rand(2, 1, 5, KEYS) < 0.7
    mask = mask_of(mask=TensorMask(kept) & Window(9))
    assert torch.equal(run(t, mask), expected(t, mask))
    kept[:, :, :, 3] = False
    assert torch.equal(run(t, mask), expected(t, mask))
    assert mask.known is None


@pytest.mark.parametrize("index", range(3))
def test_gradients_flow_through_a_layer_after_one_of_the_same_tensors_under_no_grad(index: int) -> None:
    t = tensors()
    t[index].requires_grad_()
    mask = mask_of()
    with torch.no_grad():
        for _ in range(3):
            run(t, mask)
    assert run(t, mask).requires_grad


def test_gradients_flow_through_a_layer_after_one_without() -> None:
    t = tensors()
    mask = known(t)
    for index in range(3):
        wanted = list(t)
        wanted[index] = t[index].clone().requires_grad_()
        out = run((wanted[0], wanted[1], wanted[2]), mask)
        again = attend(*wanted, mask=mask.mask, offset=mask.offset).transpose(1, 2)  # pyright: ignore[reportCallIssue]
        weights = torch.randn_like(out)
        found, right = (torch.autograd.grad((o * weights).sum(), wanted[index])[0] for o in (out, again))
        assert torch.equal(found, right)
        with torch.no_grad():
            assert not run((wanted[0], wanted[1], wanted[2]), mask).requires_grad


def test_contexts_of_a_later_layer_are_seen() -> None:
    q, k, v = t = tensors()
    mask = known(t)
    plain = run(t, mask)
    seen: list[object] = []
    with observe_calls(seen.append):
        run(t, mask)
    assert len(seen) == 1
    with replace_outputs(lambda call: call.out * 0):
        assert not run(t, mask).any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(t, mask).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        run(t, mask)
    assert counter.get_total_flops() > 0
    with torch.inference_mode():
        assert run(t, mask).is_inference()
    assert not run(t, mask).is_inference()
    mapped = torch.func.vmap(lambda x: run((x, k, v), mask))(q[None])
    assert torch.allclose(mapped[0], plain, atol=1e-6)
    with forward_ad.dual_level():
        dual = run((forward_ad.make_dual(q, torch.ones_like(q)), k, v), mask)
        assert forward_ad.unpack_dual(dual).tangent is not None
    assert torch.equal(run(t, mask), plain)


def test_a_traced_call_is_traced_though_its_mask_knows_one() -> None:
    t = tensors()
    mask = known(t)
    compiled = torch.compile(lambda q, k, v: run((q, k, v), mask), backend="eager")
    assert torch.equal(compiled(*t), run(t, mask))
    with pytest.raises(Exception, match=r"trace"):
        torch.jit.trace(lambda q, k, v: run((q, k, v), mask), t)


def test_without_the_guard_of_torch_all_layers_find_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_call, "guard_of", lambda *_: None)
    t = tensors()
    mask = known(t)
    assert mask.known is None
    assert torch.equal(run(t, mask), expected(t, mask))
    assert run(t, mask).is_contiguous()
