"""Ready calls: a call that looks like an earlier one takes the short way only where nothing that matters differs."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, Documents, KeyLengths, Prefix, ProblemError, RefusalError, TensorMask, Window, attend
from regard.calls import observe_calls, replace_outputs
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Dilated
from regard.describe.spec import spec
from regard.dispatch import choose, ready

Call = tuple[Tensor, Tensor, Tensor, dict[str, Any]]


pytestmark = pytest.mark.usefixtures("no_plans")


def _tensors(queries: int = 3, keys: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, h, n, 16, dtype=dtype) for h, n in ((4, queries), (2, keys), (2, keys)))  # pyright: ignore[reportReturnType]


def _run(q: Any, k: Any, v: Any, **words: Any) -> Tensor | None:
    names = ("mask", "scale", "softcap", "offset", "backend")
    return ready.run(q, k, v, *(words.get(name) for name in names))[1]


def _is_ready(q: Any, k: Any, v: Any, **words: Any) -> bool:
    return _run(q, k, v, **words) is not None


WORDS: dict[str, dict[str, Any]] = {
    "no words": {},
    "causal": {"mask": Causal()},
    "a window written again": {"mask": Causal() & (Window(9) | Prefix(2))},
    "a scale": {"scale": 0.3},
    "a softcap": {"softcap": 5.0},
    "an offset": {"mask": Causal(), "offset": 2},
    "a backend": {"backend": "native"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WORDS)
def test_a_repeated_call_is_ready_and_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    q, k, v = _tensors(dtype=dtype)
    first = attend(q, k, v, **WORDS[name])
    again = _run(q, k, v, **WORDS[name])
    assert again is not None
    assert torch.equal(again, first)
    assert torch.equal(attend(q, k, v, **WORDS[name]), first)


@pytest.mark.parametrize("queries", [1, 3])
def test_other_elements_strides_and_numbers_of_keys_are_ready_too(queries: int) -> None:
    q, k, v = _tensors(queries)
    attend(q, k, v, mask=Causal())
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    longer = [torch.cat([t, t], 2) for t in (k, v)]
    for q1, k1, v1 in ((q, k[:, :, :queries], v[:, :, :queries]), (q, *longer), by_token, (q * 2, k - 1, v + 1)):
        found = _run(q1, k1, v1, mask=Causal())
        assert found is not None
        ready.forget()
        plain = attend(q1, k1, v1, mask=Causal())
        assert torch.equal(found, plain)
        assert found.stride() == plain.stride()


@pytest.mark.parametrize("queries", [1, 3])
def test_a_bound_call_gives_the_same_bits_with_tokens_before_heads(queries: int) -> None:
    q, k, v = _tensors(queries)
    by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
    for q1 in (q, by_token):
        for offset in (None, 2):
            first = attend(q1, k, v, mask=Causal(), offset=offset)
            key, _ = ready.run(q1, k, v, Causal(), None, None, offset, None)
            assert key is not None
            bound = ready.bind(key, q1, k, v, Causal(), offset)
            assert bound is not None
            assert bound(q1, k, v, 37, offset).is_contiguous()
            assert torch.equal(bound(q1, k, v, 37, offset).transpose(1, 2), first)
            other = q1 * 2, k, -v
            plain = attend(*other, mask=Causal(), offset=offset)
            assert torch.equal(bound(*other, 37, offset).transpose(1, 2), plain)


@pytest.mark.parametrize("by_token", [False, True], ids=["by head", "by token"])
@pytest.mark.parametrize("name", WORDS)
def test_a_call_with_the_strides_of_the_last_one_is_known_by_a_guard(
    name: str, by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = _tensors()
    if by_token:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    words = WORDS[name]
    calls = [(q, k, v, words), (q * 2, k - 1, v + 1, words), (q, k[:, :, :9], v[:, :, :9], words)]
    if "offset" in words:
        calls.append((q, k, v, words | {"offset": 30}))
    expected = [attend(*tensors, **more) for *tensors, more in calls]
    _guarded(q, k, v, **words)
    monkeypatch.setattr(ready, "_ready", {})  # no call is known by a key
    for (*tensors, more), plain in zip(calls, expected, strict=True):
        found = _run(*tensors, **more)
        assert found is not None
        assert torch.equal(found, plain)
        assert found.stride() == plain.stride()
    ready.forget()
    assert not _is_ready(q, k, v, **words)


def _guarded(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> Tensor:
    """The output of a call that is then known by a guard."""
    for _ in range(2):
        attend(q, k, v, **words)
        assert _is_ready(q, k, v, **words)
    assert len(ready._last) == 1
    return attend(q, k, v, **words)


def test_calls_whose_strides_always_differ_have_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(ready, "guard_of", lambda *_, **__: made.append(1))
    q, k, v = _tensors()
    for keys in range(1, 30):
        attend(q, *(t[:, :, :keys].contiguous() for t in (k, v)), mask=Causal())
    assert not made
    assert ready._last == ()
    assert _is_ready(q, k, v, mask=Causal())


def test_a_call_has_a_guard_again_once_its_strides_have_changed() -> None:
    q, k, v = _tensors()
    expected = attend(q, k, v, mask=Causal())
    for capacity in range(1, 12):
        memory = [t.repeat(1, 1, capacity, 1)[:, :, :37] for t in (k, v)]
        assert torch.equal(_guarded(q, *memory, mask=Causal()), expected)
        assert ready._last[0][1](q, *memory)


@pytest.mark.parametrize("name", "qkv")
def test_a_call_without_gradients_is_not_taken_for_one_with_gradients(name: str) -> None:
    tensors = dict(zip("qkv", _tensors(), strict=True))
    tensors[name].requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            attend(*tensors.values())
    assert attend(*tensors.values()).requires_grad
    plain = [t.detach() for t in tensors.values()]
    for _ in range(4):
        attend(*plain)
    assert attend(*tensors.values()).requires_grad


def _gradients(q: Any, k: Any, v: Any, **words: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_(learns) for t, learns in zip((q, k, v), words.pop("learn"), strict=True)]
    out = attend(*leaves, **words)
    wanted = [t for t in leaves if t.requires_grad]
    return out, *torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))


@pytest.mark.parametrize("learn", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_a_call_that_learns_is_ready_and_gives_the_same_gradients(name: str, learn: tuple[bool, bool, bool]) -> None:
    words = WORDS[name] | {"learn": learn}
    others = [t.transpose(1, 2).contiguous().transpose(1, 2) * 2 for t in _tensors(3, 41)]
    calls = [_tensors(), others, [t.repeat_interleave(2, 3)[..., ::2] for t in _tensors()]]
    expected: list[tuple[Tensor, ...]] = []
    for tensors in calls:
        ready.forget()
        expected.append(_gradients(*tensors, **words))
    for tensors, plain in zip(calls, expected, strict=True):
        for found, one in zip(_gradients(*tensors, **words), plain, strict=True):
            assert torch.equal(found, one)
    q, k, v = (t.requires_grad_() for t in _tensors())
    found = _run(q, k, v, **WORDS[name])
    assert found is not None
    assert found.requires_grad


def test_a_ready_call_that_learns_has_no_second_derivative() -> None:
    q, k, v = (t.requires_grad_() for t in _tensors())
    attend(q, k, v)
    assert _is_ready(q, k, v)
    (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match="second derivative"):
        dq.sum().backward()


def test_a_call_with_one_tensor_twice_has_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 4, 9, 16)
    expected = attend(x, x.clone(), x.clone())
    made: list[Any] = []
    monkeypatch.setattr(ready, "guard_of", lambda *_, **__: made.append(1))
    for _ in range(4):
        assert torch.equal(attend(x, x, x), expected)
    assert not made


def test_tensors_whose_last_dimension_has_gaps_are_not_bound() -> None:
    q, k, v = _tensors()
    attend(q, k, v, mask=Causal())
    key, _ = ready.run(q, k, v, Causal(), None, None, None, None)
    assert key is not None
    assert ready.bind(key, q, k.mT.contiguous().mT, v, Causal(), None) is None


def test_a_mask_that_is_written_in_the_call_is_ready() -> None:
    q, k, v = _tensors()
    attend(q, k, v, mask=Causal() & Window(5))
    assert _is_ready(q, k, v, mask=Causal() & Window(5))
    assert not _is_ready(q, k, v, mask=Causal() & Window(6))


def test_masks_that_come_and_go_are_never_taken_for_each_other() -> None:
    q, k, v = _tensors()
    for left in [*range(1, 37), *range(1, 37)]:
        found = attend(q, k, v, mask=Causal() & Window(left))
        ready.forget()
        assert torch.equal(found, attend(q, k, v, mask=Window(left) & Causal()))


@spec
class _Own(Mask):
    size: int

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return k < self.size


class _Derived(Window):
    """A window in name only."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return k > -1

    def intervals(self, sizes: Any) -> None:
        return None


class _Subclass(torch.Tensor):
    """Of a class of its own."""


def _sparse(t: Tensor) -> Tensor:
    return t.to_sparse()


def _negative(t: Tensor) -> Tensor:
    return torch.complex(t, -t).conj().imag


def _lazily_negated(t: Tensor) -> Tensor:
    return cast(Any, torch)._neg_view(-t)


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], Call]] = {
    "other elements": lambda q, k, v: (q + 1, k, v, {}),
    "gradients of queries": lambda q, k, v: (q.clone().requires_grad_(), k, v, {}),
    "gradients of keys": lambda q, k, v: (q, k.clone().requires_grad_(), v, {}),
    "gradients of values": lambda q, k, v: (q, k, v.clone().requires_grad_(), {}),
    "a parameter": lambda q, k, v: (torch.nn.Parameter(q), k, v, {}),
    "a subclass": lambda q, k, v: (q.as_subclass(_Subclass), k, v, {}),
    "queries negated lazily": lambda q, k, v: (_lazily_negated(q), k, v, {}),
    "keys negated lazily": lambda q, k, v: (q, _lazily_negated(k), v, {}),
    "values negated lazily": lambda q, k, v: (q, k, _lazily_negated(v), {}),
    "imaginary parts": lambda q, k, v: (_negative(q), k, v, {}),
    "queries not contiguous": lambda q, k, v: (q.mT.contiguous().mT, k, v, {}),
    "keys not contiguous": lambda q, k, v: (q, torch.stack([k, k], -1)[..., 0], v, {}),
    "values repeated": lambda q, k, v: (q, k, v[..., :1].expand_as(v), {}),
    "sparse queries": lambda q, k, v: (_sparse(q), k, v, {}),
    "sparse keys": lambda q, k, v: (q, _sparse(k), v, {}),
    "values of mkldnn": lambda q, k, v: (q, k, v.to_mkldnn(), {}),
    "nested queries": lambda q, k, v: (torch.nested.as_nested_tensor(q), k, v, {}),
    "nested keys": lambda q, k, v: (q, torch.nested.as_nested_tensor(k), v, {}),
    "meta keys": lambda q, k, v: (q, k.to("meta"), v, {}),
    "meta tensors": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta"), {}),
    "keys of another type": lambda q, k, v: (q, k.double(), v, {}),
    "all of another type": lambda q, k, v: (q.half(), k.half(), v.half(), {}),
    "integers": lambda q, k, v: (q.int(), k.int(), v.int(), {}),
    "fewer values than keys": lambda q, k, v: (q, k, v[:, :, 1:], {}),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0], {}),
    "no queries": lambda q, k, v: (q[:, :, :0], k, v, {}),
    "another dim": lambda q, k, v: (q[..., :8], k, v, {}),
    "another dim of values": lambda q, k, v: (q, k, v[..., :8].contiguous(), {}),
    "heads that do not divide": lambda q, k, v: (q[:, :3], k, v, {}),
    "another batch": lambda q, k, v: (q, k[:1], v[:1], {}),
    "three axes": lambda q, k, v: (q, k[0], v[0], {}),
    "an array": lambda q, k, v: (q.numpy(), k.numpy(), v.numpy(), {}),
    "no tensor": lambda q, k, v: (q, k, None, {}),  # type: ignore[dict-item, return-value] # pyright: ignore[reportReturnType]
    "an integer for the scale": lambda q, k, v: (q, k, v, {"scale": 1}),
    "a scale that is true": lambda q, k, v: (q, k, v, {"scale": True}),
    "a scale that is no number": lambda q, k, v: (q, k, v, {"scale": float("nan")}),
    "a tensor for the scale": lambda q, k, v: (q, k, v, {"scale": torch.tensor(0.25)}),
    "a text for the scale": lambda q, k, v: (q, k, v, {"scale": "0.25"}),
    "a softcap": lambda q, k, v: (q, k, v, {"softcap": 2.0}),
    "an integer for the softcap": lambda q, k, v: (q, k, v, {"softcap": 2}),
    "a softcap below 0": lambda q, k, v: (q, k, v, {"softcap": -2.0}),
    "an offset": lambda q, k, v: (q, k, v, {"mask": Causal(), "offset": 1}),
    "an offset that is true": lambda q, k, v: (q, k, v, {"mask": Causal(), "offset": True}),
    "a tensor for the offset": lambda q, k, v: (q, k, v, {"mask": Causal(), "offset": torch.tensor(1)}),
    "offsets of rows": lambda q, k, v: (q, k, v, {"mask": Causal(), "offset": torch.tensor([1, 20])}),
    "an offset far away": lambda q, k, v: (q, k, v, {"mask": Causal(), "offset": 1 << 80}),
    "a sink": lambda q, k, v: (q, k, v, {"sink": torch.ones(4)}),
    "dropout": lambda q, k, v: (q, k, v, {"dropout": 0.5}),
    "no dropout, as a tensor": lambda q, k, v: (q, k, v, {"dropout": torch.tensor(0.0)}),
    "another backend": lambda q, k, v: (q, k, v, {"backend": "reference"}),
    "an unknown backend": lambda q, k, v: (q, k, v, {"backend": "nobody"}),
    "a mask": lambda q, k, v: (q, k, v, {"mask": Causal()}),
    "a text for the mask": lambda q, k, v: (q, k, v, {"mask": "causal"}),
    "a tensor for the mask": lambda q, k, v: (q, k, v, {"mask": torch.ones(3, 37, dtype=torch.bool)}),
    "a mask of tensors": lambda q, k, v: (q, k, v, {"mask": TensorMask(torch.arange(37) < 9)}),
    "a mask of a class outside": lambda q, k, v: (q, k, v, {"mask": _Own(5)}),
    "a mask of a class not registered": lambda q, k, v: (q, k, v, {"mask": _Derived(5)}),
    "a mask without intervals": lambda q, k, v: (q, k, v, {"mask": Dilated(3)}),
}


def _outcome(q: Any, k: Any, v: Any, **words: Any) -> Any:
    torch.manual_seed(1)
    try:
        out: Any = attend(q, k, v, **words)
    except Exception as error:  # noqa: BLE001  # any: the same with and without an earlier call
        return type(error), str(error)
    if not isinstance(out, Tensor):
        return type(out), out.tobytes()
    elements = None if out.is_meta else out.detach().double().tolist()
    return type(out), out.shape, out.dtype, out.device, out.requires_grad, out.is_inference(), elements


@pytest.mark.exhaustive(per="test")
@pytest.mark.filterwarnings("ignore::UserWarning")  # sparse tensors are in beta
@pytest.mark.parametrize("words", [{}, {"mask": Causal()}], ids=["plain", "causal"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_differs_gives_what_it_gives_without_an_earlier_one(name: str, words: dict[str, Any]) -> None:
    q, k, v = _tensors()
    q1, k1, v1, more = CHANGES[name](q, k, v)
    expected = _outcome(q1, k1, v1, **(words | more))
    for changed in (more, words | more, more, words | more):
        ready.forget()
        _guarded(q, k, v, **words)
        found = _outcome(q1, k1, v1, **changed)
        if changed == words | more:
            assert found == expected


def test_a_tensor_that_is_changed_in_place_is_seen() -> None:
    q, k, v = _tensors()
    _guarded(q, k, v)
    q.requires_grad_()
    assert attend(q, k, v).requires_grad
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad
    q.requires_grad_(False)
    k.data = k.data.double()
    with pytest.raises(ProblemError):
        attend(q, k, v)


def test_contexts_are_seen() -> None:
    q, k, v = _tensors()
    plain = _guarded(q, k, v)
    assert torch.equal(attend(q, k, v), plain)
    seen: list[object] = []
    with observe_calls(seen.append):
        attend(q, k, v)
    assert len(seen) == 1
    with replace_outputs(lambda call: call.out * 0):
        assert not attend(q, k, v).any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v)
    assert counter.get_total_flops() > 0
    with torch.inference_mode():
        assert attend(q, k, v).is_inference()
    assert torch.allclose(torch.func.vmap(attend)(q[None], k[None], v[None])[0], plain, atol=1e-6)
    tangent = torch.func.jvp(lambda x: attend(x, k, v), (q,), (torch.ones_like(q),))[1]
    assert tangent.abs().max() > 0
    assert torch.equal(attend(q, k, v), plain)


def test_a_traced_call_is_one_operator() -> None:
    q, k, v = _tensors()
    attend(q, k, v)
    graphs: list[str] = []

    def see(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module.forward

    compiled = torch.compile(attend, backend=see, fullgraph=True)
    assert torch.equal(compiled(q, k, v), attend(q, k, v))
    assert "regard.attend" in graphs[0]


def test_a_call_whose_plan_is_gone_is_not_ready() -> None:
    q, k, v = _tensors()
    _guarded(q, k, v)
    choose.forget_plans()
    assert not _is_ready(q, k, v)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
def test_a_call_that_torch_jit_traces_is_refused_after_others_too() -> None:
    q, k, v = _tensors()
    _guarded(q, k, v)
    with pytest.raises(RefusalError, match=r"torch\.jit\.trace"):
        torch.jit.trace(attend, (q, k, v))


def test_masks_with_tensors_are_read_in_each_call() -> None:
    q, k, v = _tensors()
    lengths, ids = torch.tensor([5, 7]), torch.zeros(37, dtype=torch.long)
    for mask, content in ((KeyLengths(lengths), lengths), (Documents(ids), ids)):
        before = attend(q, k, v, mask=mask)
        content[:1] += 1
        assert not _is_ready(q, k, v, mask=mask)
        assert not torch.equal(attend(q, k, v, mask=mask), before)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_read_in_each_call(threads: int) -> None:
    q, k, v = _tensors(queries=300, keys=300)
    expected, before = attend(q, k, v, mask=Causal()), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(attend(q, k, v, mask=Causal()), expected)
    finally:
        torch.set_num_threads(before)


def test_a_bounded_number_of_calls_is_kept() -> None:
    q, k, v = _tensors(queries=1, keys=2)
    for i in range(ready.KEPT + 3):
        attend(q, k, v, scale=1.0 + i)
    assert len(ready._ready) <= ready.KEPT
