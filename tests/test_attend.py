"""The front door: worked numbers, watching, and that every argument counts."""

from collections.abc import Generator
from contextvars import copy_context
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Call,
    Causal,
    Documents,
    Global,
    MaskFunction,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
    attend_state,
    draw,
    native,
    observe_calls,
    replace_outputs,
)
from regard.calls import Observers, active_observers, after_dropped, check_unobserved, current_observers
from regard.scores import Dot


def test_a_worked_example():
    """Queries and keys of two dimensions, scaled by sqrt 2: scores, softmax and mix checked by hand to four digits."""
    q = torch.tensor([[[[1.18, 0.78], [0.62, 0.59], [0.66, 0.71]]]])
    k = torch.tensor([[[[0.83, 0.71], [0.53, 0.66], [0.76, 0.41]]]])
    v = torch.tensor([[[[1.02, 1.07], [0.52, 0.93], [0.79, 0.56]]]])
    expected = torch.tensor([[0.8000, 0.8691], [0.7893, 0.8649], [0.7904, 0.8673]])
    assert torch.allclose(attend(q, k, v)[0, 0], expected, atol=6e-5)


def test_one_hot_scores_look_up_their_value():
    q = k = 50 * torch.eye(4)[None, None]
    v = torch.randn(1, 1, 4, 3)
    assert torch.allclose(attend(q, k, v), v, atol=1e-6)


def test_equal_scores_give_the_mean_of_what_is_seen():
    q, v = torch.zeros(1, 1, 4, 2), torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 1, 4, 1)
    assert attend(q, q, v, mask=Causal()).flatten().tolist() == [1, 2, 3, 4]


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros without memory, as forward-mode differentiation makes them."""
    return cast(Any, torch)._efficientzerotensor(shape, dtype=dtype)


@pytest.mark.parametrize("backend", ["native", "sdpa", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_zeros_without_memory_are_zeros(name: str, backend: str):
    if backend == "native" and not native.available():
        pytest.skip(native.absence())
    if (backend, name) == ("sdpa", "sink"):
        return
    given = {each: torch.randn(1, 2, 7, 8) for each in "qkv"} | {"sink": torch.randn(2)}
    if name != "sink":
        del given["sink"]
    right = attend(**cast(Any, given | {name: torch.zeros_like(given[name])}), backend=backend)
    for _ in range(3):  # the second call is a ready one, the third one knows its guard
        attend(**cast(Any, given), backend=backend)
        out = attend(**cast(Any, given | {name: lazy_zeros(*given[name].shape)}), backend=backend)
        assert torch.allclose(out, right, atol=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        {"bias": TensorBias(lazy_zeros(7, 7))},
        {"bias": T5Bias(lazy_zeros(32, 2))},
        {"mask": Documents(lazy_zeros(7, dtype=torch.int64))},
        {"mask": ~TensorMask(lazy_zeros(7, 7, dtype=torch.bool))},
    ],
    ids=["bias", "table", "documents", "mask"],
)
def test_masks_and_biases_of_zeros_without_memory_are_those_of_zeros(words: dict[str, Any]):
    q, k, v = torch.randn(3, 1, 2, 7, 8)
    assert torch.allclose(attend(q, k, v, **words), attend(q, k, v), atol=1e-6)


def test_a_gradient_of_zeros_without_memory_is_zero():
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 2, 7, 8))
    out = attend(q, k, v)
    assert not any(t.any() for t in torch.autograd.grad(out, (q, k, v), lazy_zeros(*out.shape)))
    state = attend_state(q, k, v)
    with_zeros = (torch.ones_like(state.out), lazy_zeros(*state.lse.shape))
    found = torch.autograd.grad((state.out, state.lse), (q, k, v), with_zeros)
    for t, right in zip(found, torch.autograd.grad(attend(q, k, v).sum(), (q, k, v)), strict=True):
        assert torch.allclose(t, right, atol=1e-6)


ARGUMENTS = {
    "mask": Causal(),
    "bias": Alibi(2),
    "scale": 0.1,
    "softcap": 0.5,
    "sink": torch.ones(2),
    "dropout": 0.5,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_changes_the_result(name: str):
    q = torch.randn(1, 2, 5, 8)
    assert not torch.allclose(attend(q, q, q, **{name: ARGUMENTS[name]}), attend(q, q, q), atol=1e-3)


def test_offset_moves_the_queries():
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 6, 8)
    assert torch.equal(attend(q, k, k, mask=Causal(), offset=4), attend(q, k, k, mask=Causal()))
    first = attend(q, k, k, mask=Causal(), offset=0)
    assert torch.allclose(first[:, :, 0], k[:, :, 0])


def test_the_dot_product_is_what_no_score_means():
    q = torch.randn(1, 2, 5, 8)
    assert torch.equal(attend(q, q, q, score=Dot()), attend(q, q, q))


def test_any_strides_give_the_same():
    q, k, v = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 4, 8, 7).mT, torch.randn(2, 4, 7, 16)[..., ::2]
    for words in ({}, {"mask": Causal()}, {"bias": Alibi(4)}):
        assert torch.allclose(
            attend(q, k, v, **words), attend(*(t.contiguous() for t in (q, k, v)), **words), atol=1e-6
        )


def test_an_observer_gets_every_call():
    calls: list[Call] = []
    q, sink = torch.randn(1, 2, 5, 8), torch.zeros(2)
    with observe_calls(calls.append):
        out = attend(q, q, q, mask=Causal(), sink=sink)
        state = attend_state(q, q, q, bias=TensorBias(torch.zeros(5, 5)))
    attend(q, q, q)
    assert len(calls) == 2
    assert calls[0].out is out
    assert torch.allclose(
        calls[0].lse, torch.logsumexp(q @ q.mT * 8**-0.5 + torch.where(torch.ones(5, 5).tril() > 0, 0, -torch.inf), 3)
    )
    assert calls[0].scale == 8**-0.5
    assert calls[0].offset == 0
    assert calls[0].plan.backend == ("native" if native.available() else "sdpa")
    assert calls[1].lse is state.lse


def test_a_watcher_leaves_when_an_error_passes():
    calls: list[Call] = []
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError), observe_calls(calls.append):
        raise RuntimeError
    attend(q, q, q)
    assert not calls


@pytest.mark.outside_types
def test_autocast_is_obeyed_as_torch_obeys_it():
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8).bfloat16(), torch.randn(1, 2, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, bias=Alibi(2))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(q.bfloat16(), k, v.bfloat16(), bias=Alibi(2)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ProblemError, match="a value belongs to each key"):
        attend(q, k, v[:, :, :3])


@pytest.mark.outside_types
def test_autocast_leaves_float64_and_integers_what_they_are():
    q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    expected = attend(q, q, q, mask=Causal())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q, q, q, mask=Causal()), expected)
        assert torch.equal(attend_state(q, q, q, mask=Causal()).out, expected)
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == torch.float64
        with pytest.raises(ProblemError, match=r"q is torch\.int64"):
            attend(q.long(), q.long(), q.long())


@pytest.mark.parametrize("backend", [None, "reference"])
def test_hidden_numbers_near_the_largest_change_no_gradient(backend: str | None):
    q, *seen = (torch.randn(1, 2, 7, 8) for _ in range(3))
    grads = []
    for hidden in (0.0, 3e38):
        k, v = (torch.cat([t[:, :, :5], torch.full((1, 2, 2, 8), hidden)], dim=2) for t in seen)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        grads.append(torch.autograd.grad(attend(*leaves, mask=Prefix(5), backend=backend).sum(), leaves))
    for ours, expected in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_row_that_sees_nothing_drops_a_gradient_that_is_nan(backend: str | None):
    leaves = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
    out = attend(*leaves, mask=Causal(), offset=-2, backend=backend)
    norms = out.square().sum(-1).sqrt()  # whose derivative is NaN at 0
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(norms.sum(), leaves))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_changes_nothing(device: str):
    q = torch.randn(1, 2, 300, 8)
    mask = Causal() & (Window(40) | Global([3])) & MaskFunction(lambda b, h, q, k: (q + k) % 5 > 0) | Tree([-1, 0])
    kept = torch.rand(300, 300) > 0.2
    expected = attend(q, q, q, mask=mask & TensorMask(kept), bias=Alibi(2))
    new = kept.clone()  # its schedule is made here
    with torch.device(device):
        assert torch.equal(attend(q, q, q, mask=mask & ~Prefix(0) & TensorMask(new), bias=Alibi(2)), expected)
        assert draw(MaskFunction(lambda b, h, q, k: q >= k), 2, 2) == "█ ·\n█ █"


def test_an_output_is_altered_before_anyone_mixes_the_heads_and_gradients_flow_through_the_change():
    q = torch.randn(1, 2, 5, 7, requires_grad=True)
    kept = torch.tensor([1.0, 0.0])[:, None, None]
    with replace_outputs(lambda call: call.out):
        plain = attend(q, q, q)
    with replace_outputs(lambda call: call.out * kept):
        out, state = attend(q, q, q), attend_state(q, q, q)
    assert torch.equal(out, plain * kept)
    assert torch.equal(state.out, plain * kept)
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0][:, 1], torch.zeros(1, 5, 7))


def test_watchers_and_changes_come_in_the_order_of_entering():
    q, seen = torch.randn(1, 1, 3, 7), []
    with (
        observe_calls(lambda call: seen.append(call.out)),
        replace_outputs(lambda call: call.out + 1),
        replace_outputs(lambda call: call.out * 2),
        observe_calls(lambda call: seen.append(call.out)),
    ):
        out = attend(q, q, q)
    assert torch.equal(seen[1], out)
    assert torch.equal(out, (seen[0] + 1) * 2)


def scaled_by(factor: float) -> Generator[None]:
    """A session, as a fixture or a server may write it."""
    with replace_outputs(lambda call: call.out * factor):
        yield


def test_changes_may_end_in_any_order():
    q = torch.randn(1, 1, 3, 7)
    plain = attend(q, q, q)
    first, second = scaled_by(2), scaled_by(3)
    next(first)
    next(second)
    assert torch.equal(attend(q, q, q), plain * 2 * 3)
    first.close()
    assert torch.equal(attend(q, q, q), plain * 3)
    second.close()
    assert torch.equal(attend(q, q, q), plain)


def test_a_function_that_is_entered_twice_leaves_once_each():
    q, calls = torch.randn(1, 1, 3, 7), []

    def change(call: Call) -> torch.Tensor:
        calls.append(call)
        return call.out

    with replace_outputs(change):
        with replace_outputs(change):
            attend(q, q, q)
        attend(q, q, q)
    attend(q, q, q)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("enter", "says"),
    [
        (observe_calls, r"^observe_calls\(observer=3\): expected a function that takes a Call"),
        (replace_outputs, r"^replace_outputs\(change=3\): expected a function that takes a Call"),
    ],
)
def test_an_observer_is_a_function(enter: Any, says: str):
    with pytest.raises(ProblemError, match=says), enter(3):
        pass


def test_a_change_may_compute_a_call_again_with_another_mask():
    q = torch.randn(1, 2, 5, 7)
    mask = Causal() & MaskFunction(lambda b, h, q, k: k != 1)
    with replace_outputs(lambda call: attend(call.q, call.k, call.v, mask=mask, scale=call.scale)):
        out = attend(q, q, q, mask=Causal())
    assert torch.equal(out, attend(q, q, q, mask=mask))


def test_a_call_that_an_observer_makes_has_dropped_nothing_and_only_observers_of_its_own():
    q, outside, inside = torch.randn(1, 1, 3, 7), [], []

    def change(call: Call) -> torch.Tensor:
        with observe_calls(lambda own: inside.append(own.dropped)):
            return attend(q, q, q)

    with observe_calls(lambda call: outside.append(call.dropped)), replace_outputs(change), after_dropped(4):
        attend(q, q, q)
        attend(q, q, q)
    assert outside == [4, 4]
    assert inside == [0, 0]


def test_an_observer_may_enter_and_leave_blocks():
    q, seen = torch.randn(1, 1, 3, 7), []
    later, ending = scaled_by(2), scaled_by(3)
    plain = attend(q, q, q)
    next(ending)

    def observer(call: Call) -> None:
        seen.append(call)
        if len(seen) == 1:
            next(later)
            ending.close()

    with observe_calls(observer):
        attend(q, q, q)
        assert torch.equal(attend(q, q, q), plain * 2)
    later.close()
    assert active_observers() == ()
    assert len(seen) == 2


def test_an_observer_that_fails_leaves_the_observers_as_they_were():
    q, calls = torch.randn(1, 1, 3, 7), []

    def fail(call: Call) -> torch.Tensor:
        raise RuntimeError("once")

    with observe_calls(calls.append):
        with pytest.raises(RuntimeError, match="once"), replace_outputs(fail):
            attend(q, q, q)
        attend(q, q, q)
    assert len(calls) == 2


def test_a_change_that_ends_in_another_context_has_ended_everywhere():
    q = torch.randn(1, 1, 3, 7)
    plain = attend(q, q, q)
    inside, session = copy_context(), scaled_by(0)
    inside.run(next, session)
    assert not inside.run(attend, q, q, q).any()
    session.close()
    assert torch.equal(inside.run(attend, q, q, q), plain)


def test_ctrl_c_on_the_way_into_a_block_leaves_no_observer(monkeypatch: pytest.MonkeyPatch):
    class Interrupted:
        get = current_observers.get

        def set(self, observers: Observers) -> None:
            monkeypatch.undo()
            current_observers.set(observers)
            raise KeyboardInterrupt

    monkeypatch.setattr("regard.calls.current_observers", Interrupted())
    with pytest.raises(KeyboardInterrupt), replace_outputs(lambda call: call.out * 0):
        pass
    assert active_observers() == ()
    assert attend(*torch.ones(3, 1, 1, 3, 7)).all()


def test_observers_that_have_ended_change_nothing_in_a_copied_context():
    def gradients() -> None:
        check_unobserved("ring_attend")
        attend(q, q, q, backend="sdpa")  # which gives no log-sum-exp with a gradient, as observers need it

    q = torch.randn(1, 1, 3, 7, requires_grad=True)
    with observe_calls(lambda call: None):
        inside = copy_context()
        with pytest.raises(RefusalError):
            inside.run(gradients)
    inside.run(gradients)


@pytest.mark.parametrize(
    "change",
    [lambda call: call.out[:, :1], lambda call: call.out.double(), lambda call: 3],
    ids=["shape", "type", "a number"],
)
def test_a_change_of_another_shape_or_type_is_an_error(change):
    q = torch.randn(1, 2, 3, 7)
    with replace_outputs(change), pytest.raises(ProblemError, match="was replaced by"):
        attend(q, q, q)
