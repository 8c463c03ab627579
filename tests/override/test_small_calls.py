"""Small calls of torch's attention inside `regard.everywhere()`: known ones go the short way, and all others do not."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import native
from regard.override import decide, report, small_calls
from regard.torch_internals import MISSING, VERSION

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    small_calls.forget()
    yield
    regard.everywhere(False)
    small_calls.forget()


def known_call() -> list[Tensor]:
    """q, k and v of a small call, as a model makes them."""
    x = torch.randn(1, 16, 3 * 128)
    return [t.unflatten(2, (2, 64)).transpose(1, 2) for t in x.chunk(3, 2)]


def is_known(*inputs: Tensor, causal: bool = True) -> bool:
    return any(each.causal is causal and each.is_like(*inputs) for each in small_calls._last)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The queries of each call that goes to the fused kernel at once."""
    found: list[int] = []
    kernel = small_calls.fused_attention_of_torch

    def seen(query: Tensor, *arguments: Any, **options: Any) -> Any:
        found.append(query.shape[2])
        return kernel(query, *arguments, **options)

    monkeypatch.setattr(small_calls, "fused_attention_of_torch", seen)
    return found


def test_a_small_call_is_known_from_the_second_time_on_and_counted_each_time(fused: list[int]):
    q, k, v = known_call()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for _ in range(2):
        with regard.everywhere() as caught:
            for _ in range(5):
                ours = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                assert torch.equal(ours, theirs)
                assert is_known(q, k, v)
        assert [(row.form.why, row.calls) for row in caught.rows] == [(decide.SMALL, 5)]
    assert fused == [16] * 10


def test_calls_outside_of_a_block_are_counted_no_more():
    q, k, v = known_call()
    with regard.everywhere() as outer:
        with regard.everywhere() as inner:
            for _ in range(3):
                F.scaled_dot_product_attention(q, k, v)
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v)
    assert (inner.rows[0].calls, outer.rows[0].calls) == (3, 5)


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


def other_strides(t: Tensor) -> Tensor:
    return t.transpose(2, 3).contiguous().transpose(2, 3)


class Own(Tensor):
    pass


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "device": meta,
    "dtype": Tensor.double,
    "strides": other_strides,
    "number of tokens": lambda t: t[:, :, :9],
    "number of heads": lambda t: t[:, :1],
    "batch": lambda t: t.expand(2, -1, -1, -1),
    "class": lambda t: t.as_subclass(Own),
    "parameter": nn.Parameter,
    "requires_grad": lambda t: t.detach().requires_grad_(),
    "negative bit": getattr(torch, "_neg_view"),  # noqa: B009
    "sparse": lambda t: t.contiguous().to_sparse(),
}


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_another_tensor_is_another_call(change: str, which: str):
    inputs = known_call()
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(*inputs, is_causal=True)
        assert is_known(*inputs)
        changed = [CHANGES[change](t) if which in ("all", "qkv"[i]) else t for i, t in enumerate(inputs)]
        assert not is_known(*changed)
        ours = outcome(changed)
    theirs = outcome(changed)
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        assert (ours.device, ours.dtype, ours.stride()) == (theirs.device, theirs.dtype, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
        assert ours.is_meta or torch.equal(ours, theirs)
    else:
        assert ours == theirs or change == "sparse"  # torch has another message if a kernel is named


@pytest.mark.parametrize("which", ["qkv", "q", "k", "v"])
def test_a_nested_tensor_is_another_call_and_does_not_end_the_process(which: str):
    inputs = known_call()
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(*inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: nested tensors may change
            nested = [
                torch.nested.nested_tensor(list(t)) if n in which else t for n, t in zip("qkv", inputs, strict=True)
            ]
            ours = outcome(nested, causal=False)
    if which == "qkv":
        assert isinstance(ours, Tensor)
        torch.testing.assert_close(ours.to_padded_tensor(0.0), F.scaled_dot_product_attention(*inputs))
    else:
        assert isinstance(ours, str)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:The PyTorch API of nested tensors")
def test_vmap_over_a_nested_tensor_does_not_end_the_process():
    inputs = known_call()
    nested = torch.nested.nested_tensor([torch.randn(2, 8, 16), torch.randn(2, 6, 16)])
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(*inputs)
        with pytest.raises(RuntimeError, match="batched nested tensors"):
            torch.vmap(lambda x: F.scaled_dot_product_attention(x, x.clone(), x.clone()))(nested)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (4, 0)])
def test_a_call_without_elements_needs_no_kernel(queries: int, keys: int):
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = F.scaled_dot_product_attention(q, k, k)
        with regard.everywhere():
            assert torch.equal(F.scaled_dot_product_attention(q, k, k), theirs)


def outcome(inputs: list[Tensor], causal: bool = True) -> Tensor | str:
    """What a call gives, or the error that it raises."""
    try:
        return F.scaled_dot_product_attention(*inputs, is_causal=causal)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "a counter of FLOPs": lambda: FlopCounterMode(display=False),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": nullcontext,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_call_in_another_setting_gives_what_torch_gives_there(name: str, requires_grad: bool, fused: list[int]):
    inputs = [t.detach().requires_grad_(requires_grad) for t in known_call()]
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(*inputs, is_causal=True)
        assert len(fused) == 2
        with SETTINGS[name]():
            ours = F.scaled_dot_product_attention(*inputs, is_causal=True)
        assert len(fused) == (2 if name in ("autocast", "another kernel") else 3)
        assert torch.equal(F.scaled_dot_product_attention(*inputs), unpatched(*inputs))
    with SETTINGS[name]():
        theirs = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert (ours.dtype, ours.requires_grad, ours.is_inference()) == (
        theirs.dtype, theirs.requires_grad, theirs.is_inference(),
    )  # fmt: skip
    assert torch.equal(ours, theirs)
    if ours.requires_grad:
        for a, b in zip(*(torch.autograd.grad(t.float().sum(), inputs) for t in (ours, theirs)), strict=True):
            assert torch.equal(a, b)


def unpatched(*inputs: Tensor) -> Tensor:
    with regard.everywhere(False):
        return F.scaled_dot_product_attention(*inputs)


def test_a_counter_of_flops_counts_a_known_call():
    inputs, counts = known_call(), []
    for on in (False, True):
        with regard.everywhere(on):
            for _ in range(2):
                F.scaled_dot_product_attention(*inputs)
            with FlopCounterMode(display=False) as counter:
                F.scaled_dot_product_attention(*inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_known_calls_inside_torch_func_and_while_torch_traces_are_torchs():
    q, k, v = known_call()

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, k, v, is_causal=True)

    def transformed() -> list[Tensor]:
        return [torch.vmap(attend)(q.expand(3, -1, -1, -1, -1)), torch.func.grad(lambda x: attend(x).sum())(q)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which torch deprecates, and of vmap over an operator
        theirs = [*transformed(), attend(q), attend(q)]
        with regard.everywhere():
            attend(q)
            traced: Any = torch.jit.trace(attend, q)  # pyright: ignore[reportUnknownVariableType]
            compiled: Any = torch.compile(attend, backend="aot_eager")
            ours = [*transformed(), traced(q), compiled(q)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        {"attn_mask": torch.ones(16, 16, dtype=torch.bool).triu()},
        {"is_causal": False},
        {"scale": 0.7, "is_causal": True},
        {"enable_gqa": True, "is_causal": True},
    ],
    ids=str,
)
def test_the_other_arguments_of_a_known_call_are_followed(words: dict[str, Any]):
    q, k, v = known_call()
    with regard.everywhere():
        for _ in range(2):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ours = F.scaled_dot_product_attention(q, k, v, **words)
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, **words))


def test_dropout_of_a_known_call_draws_what_torch_draws():
    q, k, v = known_call()
    found = []
    for on in (False, True):
        with regard.everywhere(on):
            F.scaled_dot_product_attention(q, k, v)
            torch.manual_seed(3)
            found.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    assert torch.equal(*found)


def test_a_known_call_is_decided_anew_with_another_number_of_threads():
    before = torch.get_num_threads()
    q = torch.randn(1, 8, 64, 64)  # 2,097,152 multiply-adds: small for two threads
    k, v = torch.randn(2, 1, 8, 64, 64)
    try:
        with regard.everywhere() as caught:
            for threads in (2, 1, 2):
                torch.set_num_threads(threads)
                F.scaled_dot_product_attention(q, k, v)
    finally:
        torch.set_num_threads(before)
    assert sorted((row.form.why or "", row.calls) for row in caught.rows) == [("", 1), (decide.SMALL, 2)]


def test_one_tensor_as_queries_keys_and_values_takes_the_short_way_too(fused: list[int]):
    x = torch.randn(1, 2, 16, 64)
    with regard.everywhere() as caught:
        for _ in range(3):
            F.scaled_dot_product_attention(x, x, x)
    assert len(fused) == caught.rows[0].calls == 3


def test_more_forms_than_are_known_by_a_guard_take_the_short_way_too(fused: list[int]):
    calls = [torch.randn(3, 1, 2, n, 64) for n in range(2, 12)]
    with regard.everywhere() as caught:
        for _ in range(3):
            for qkv in calls:
                assert torch.equal(F.scaled_dot_product_attention(*qkv), small_calls.attention_of_functional(*qkv))
    assert len(small_calls._last) == small_calls.LAST
    assert [row.calls for row in caught.rows if row.form.query[2] == 11] == [6]  # torch's own function is caught too
    assert fused == [*range(2, 12)] * 3


def test_a_report_that_measures_counts_small_calls(capsys: pytest.CaptureFixture[str]):
    q, k, v = known_call()
    with regard.everywhere(), regard.everywhere(report=True) as caught:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
    assert [(row.form.why, row.calls) for row in caught.rows] == [(decide.SMALL, 3)]
    assert "3 calls of attention, 0 run by regard, 3 by torch" in capsys.readouterr().err


def test_threads_count_known_calls_while_others_turn_regard_on_and_off():
    inputs = known_call()
    theirs = F.scaled_dot_product_attention(*inputs)
    right: list[bool] = []

    def run() -> None:
        right.extend(torch.equal(F.scaled_dot_product_attention(*inputs), theirs) for _ in range(300))

    with regard.everywhere() as caught:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            with regard.everywhere():
                pass
        for thread in threads:
            thread.join()
        for _ in range(3):
            F.scaled_dot_product_attention(*inputs)
    assert all(right)
    assert caught.rows[0].calls >= 3
    assert all(each.tallies is not report.tallies for each in small_calls._last)


def test_without_torchs_guards_every_small_call_is_known_by_a_key(monkeypatch: pytest.MonkeyPatch, fused: list[int]):
    monkeypatch.setattr(small_calls, "guard_of", lambda *_: None)
    q, k, v = known_call()
    with regard.everywhere() as caught:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
    assert (len(fused), caught.rows[0].calls, small_calls._last) == (3, 3, ())


def test_torchs_guards_are_used_in_the_versions_that_were_tried():
    assert small_calls.guard_of(*known_call()) is not None or VERSION > (2, 15) or MISSING
