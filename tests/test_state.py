"""States: merging is associative, commutative, safe for empty states and differentiable; a sink is counted once."""

import math
import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import ProblemError, State, attend, attend_state

SIZES = (2, 3, 5)


def random_state(*, empty: float = 0.0) -> State:
    lse = torch.randn(SIZES, dtype=torch.float64)
    gone = torch.rand(SIZES) < empty
    lse[gone] = -torch.inf
    out = torch.randn(*SIZES, 7, dtype=torch.float64)
    out[gone] = 0
    return State(out, lse)


def same(a: State, b: State) -> bool:
    return torch.allclose(a.out, b.out, atol=1e-14) and torch.allclose(a.lse, b.lse, atol=1e-14)


def test_states_merge_in_any_order():
    a, b, c = (random_state(empty=0.3) for _ in range(3))
    assert same(a | b, b | a)
    assert same((a | b) | c, a | (b | c))


def test_an_empty_state_changes_nothing():
    a = random_state()
    nothing = State(torch.zeros_like(a.out), torch.full_like(a.lse, -torch.inf))
    assert same(a | nothing, a)
    assert same(nothing | a, a)
    both = nothing | nothing
    assert torch.equal(both.out, nothing.out)
    assert torch.equal(both.lse, nothing.lse)


def test_garbage_in_an_empty_state_does_not_spread():
    a = random_state()
    garbage = State(torch.full_like(a.out, torch.nan), torch.full_like(a.lse, -torch.inf))
    assert same(a | garbage, a)


def test_merging_by_hand():
    one, three = (State(torch.full((1, 1, 1, 1), x), torch.tensor([[[w]]]).log()) for x, w in ((1.0, 1.0), (3.0, 3.0)))
    merged = one | three
    assert merged.out.item() == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert merged.lse.exp().item() == pytest.approx(4)


def test_far_apart_states_do_not_overflow():
    a, b = (State(torch.ones(1, 1, 1, 1) * x, torch.full((1, 1, 1), lse)) for x, lse in ((1.0, 1e4), (2.0, -1e4)))
    assert (a | b).out.item() == 1
    assert (b | a).lse.item() == 1e4


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)],
)
def test_states_of_two_dtypes_merge_to_the_wider_one(narrow: torch.dtype, wide: torch.dtype):
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    a, b = (attend_state(q.to(dtype), k.to(dtype), k.to(dtype)) for dtype in (narrow, wide))
    for merged in (a | b, b | a):
        assert (merged.out.dtype, merged.lse.dtype) == (wide, b.lse.dtype)
    assert torch.equal((a | b).out, (b | a).out)


def test_merging_is_differentiable():
    a, b = random_state(), random_state()

    def merge(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        merged = State(*tensors[:2]) | State(*tensors[2:])
        return merged.out, merged.lse

    tensors = [t.requires_grad_() for t in (a.out, a.lse, b.out, b.lse)]
    assert torch.autograd.gradcheck(merge, tensors)
    assert torch.autograd.gradgradcheck(merge, tensors)


def test_gradients_through_empty_states_are_zero_and_not_nan():
    lse = torch.full(SIZES, -torch.inf, requires_grad=True)
    out = torch.zeros(*SIZES, 7, requires_grad=True)
    merged = State(out, lse) | State(out, lse)
    merged.out.sum().backward()
    assert lse.grad is not None
    assert out.grad is not None
    assert not lse.grad.any()
    assert not out.grad.any()


def test_a_sink_takes_its_share_and_gives_nothing():
    state = State(torch.ones(1, 1, 1, 1), torch.tensor([[[3.0]]]).log())
    assert state.with_sink(torch.tensor([1.0])).item() == pytest.approx(3 / (3 + torch.e))


def test_the_sink_of_a_row_that_sees_nothing_gives_zero():
    state = State(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf))
    assert state.with_sink(torch.tensor([-torch.inf])).tolist() == [[[[0, 0]]]]


def test_the_gradient_of_a_sink_is_right_where_its_share_is_nearly_nothing():
    lse = torch.tensor([[[20.0]]])
    sink = torch.zeros(1, requires_grad=True)
    (found,) = torch.autograd.grad(State(torch.ones(1, 1, 1, 1), lse).with_sink(sink).sum(), sink)
    assert found.item() == pytest.approx(-math.exp(-20), rel=1e-4)


def test_attend_folds_the_sink_in_once():
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    sink = torch.randn(2)
    parts = attend_state(q, k[:, :, :2], v[:, :, :2]) | attend_state(q, k[:, :, 2:], v[:, :, 2:])
    assert torch.allclose(parts.with_sink(sink), attend(q, k, v, sink=sink), atol=1e-6)


@pytest.mark.outside_types
def test_states_of_other_queries_do_not_merge():
    with pytest.raises(ProblemError, match="same queries"):
        _ = State(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)) | State(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3))
    with pytest.raises(ProblemError, match="right side"):
        _ = State(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)) | torch.zeros(1)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(ProblemError, match=r"left side of \| is NoneType: begin with one"):
        _ = cast(Any, None) | random_state()
    with pytest.raises(ProblemError, match="one per head"):
        State(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)).with_sink(torch.zeros(3))


@pytest.mark.parametrize("logits", [3, [0.0]])
@pytest.mark.outside_types
def test_the_logits_of_a_sink_are_a_tensor(logits: Any):
    with pytest.raises(ProblemError, match=rf"sink logits are {re.escape(str(logits))}: expected a tensor"):
        State(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2)).with_sink(logits)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.outside_types
def test_the_logits_of_a_sink_are_floats(dtype: torch.dtype):
    logits, state = torch.ones(3).to(dtype), State(torch.zeros(1, 3, 2, 1), torch.zeros(1, 3, 2))
    with pytest.raises(ProblemError, match=rf"sink logits are {dtype} \[3\]: expected a tensor of floats"):
        state.with_sink(logits)


@pytest.mark.outside_types
def test_the_logits_of_a_sink_are_strided():
    state = State(torch.zeros(1, 3, 2, 1), torch.zeros(1, 3, 2))
    with pytest.raises(ProblemError, match="sink logits have the layout"):
        state.with_sink(torch.ones(3).to_sparse())


@pytest.mark.outside_types
def test_a_state_of_integers_is_refused():
    right, whole = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64)
    for state in (State(right[..., None], whole), State(whole[..., None], right)):
        for call in (lambda s=state: s | s, lambda s=state: s.with_sink(torch.tensor([0.7]))):
            with pytest.raises(ProblemError, match=r"a State has out torch.* and lse torch.*: expected floats"):
                call()


@pytest.mark.parametrize(
    ("out", "lse", "found"),
    [
        (torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), "out [1, 1, 2, 2] and lse [1, 1, 2, 2]"),
        (torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1), "out [1, 1, 2, 2] and lse [1, 1, 1]"),
        (torch.zeros(1, 2, 2), torch.zeros(1, 2), "out [1, 2, 2] and lse [1, 2]"),
        (3, None, "out int and lse NoneType"),
    ],
)
def test_out_and_lse_are_of_the_same_queries(out: Any, lse: Any, found: str):
    right = State(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2))
    wrong = State(right.out, right.lse)
    object.__setattr__(wrong, "out", out)  # the constructor checks shapes in the test run alone
    object.__setattr__(wrong, "lse", lse)
    for call in (lambda: right | wrong, lambda: wrong | right, lambda: wrong.with_sink(torch.zeros(1))):
        with pytest.raises(ProblemError, match=rf"^a State has {re.escape(found)}: expected tensors"):
            call()


def test_states_and_sinks_are_on_one_device():
    here = State(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2))
    there = State(here.out.to("meta"), here.lse.to("meta"))
    with pytest.raises(ProblemError, match="the states are on cpu and meta: they must be on one device"):
        _ = here | there
    with pytest.raises(ProblemError, match="sink logits are on meta and the state is on cpu"):
        here.with_sink(torch.zeros(1, device="meta"))
    with pytest.raises(ProblemError, match="out on cpu and lse on meta: expected both on one device"):
        State(here.out, there.lse).with_sink(torch.zeros(1))


@pytest.mark.outside_types
def test_a_state_is_exported_and_mapped():
    class Merge(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, before: State) -> State:
            return before | attend_state(q, k, k)

    q, k, before = (
        torch.randn(1, 2, 3, 8),
        torch.randn(1, 2, 5, 8),
        State(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3)),
    )
    found, expected = torch.export.export(Merge(), (q, k, before)).module()(q, k, before), Merge()(q, k, before)
    assert torch.allclose(found.out, expected.out, atol=1e-6)
    assert torch.allclose(found.lse, expected.lse, atol=1e-6)
    mapped = torch.vmap(lambda q: attend_state(q, k, k))(q[None])
    assert torch.allclose(mapped.out[0], attend_state(q, k, k).out, atol=1e-6)
