"""What comes later changes no bit of what came before, be it huge or NaN; and what is NaN is not hidden."""

import math

import pytest
import torch

from regard.linear import Favor, LinearResult, linear_attend
from tests.linear.calls import FAST, FORMS, KINDS, Numbers, numbers, words

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _call(kind: str, n: Numbers, form: str, dtype: torch.dtype = torch.float32) -> LinearResult:
    n = n.to(dtype)
    return linear_attend(n.q, n.k, n.v, **words(kind, n), form=form, chunk=8)


def _later(n: Numbers, at: int, value: float) -> Numbers:
    """The same up to token `at`, and other numbers from there on."""
    changed = n.clone()
    for t in (changed.q, changed.k, changed.v):
        t[:, :, at:] = value if math.isnan(value) else value * torch.randn_like(t[:, :, at:])
    for t, sign in ((changed.beta, 1), (changed.gate, -1), (changed.one_gate, -1), (changed.log_decay, -1)):
        t[:, :, at:] = value if math.isnan(value) else sign * value * torch.rand_like(t[:, :, at:])
    return changed


@pytest.mark.exhaustive(per="form")
@pytest.mark.parametrize("value", [1.0, 1e4, -torch.nan])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_no_bit_of_earlier_rows(kind: str, form: str, value: float):
    n = numbers(kind, tokens=29, group=2)
    for dtype in DTYPES:
        before = _call(kind, n, form, dtype).out
        for at in (28, 21, 13):
            after = _call(kind, _later(n, at, value), form, dtype).out
            assert torch.equal(after[:, :, :at], before[:, :, :at])
            assert not torch.equal(after[:, :, at:], before[:, :, at:])


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAST)
def test_a_key_that_is_nan_spoils_the_rows_that_see_it_and_the_state(kind: str, form: str, where: str):
    n = numbers(kind, tokens=29)
    (n.k if where == "k" else n.v)[1, 0, 13, 1] = torch.nan
    out, state = _call(kind, n, form)
    bad = out.isnan()
    assert not bad[0].any()
    assert not bad[1, 1].any()
    assert not bad[1, 0, :13].any()
    assert bad[1, 0, 13:, 1].all()
    assert bad[1, 0, 13:].all() == (where == "k")  # a value spoils its own column
    assert torch.equal(state.S.isnan().any(2)[1, 0], torch.tensor([where == "k", True, where == "k"]))
    later = numbers(kind, tokens=3).to(torch.float32)
    assert linear_attend(later.q, later.k, later.v, **words(kind, later), state=state).out[1, 0, :, 1].isnan().all()


def test_a_query_that_is_nan_spoils_its_own_row():
    n = numbers("elu", tokens=11)
    n.q[0, 1, 5, 2] = torch.inf
    bad = _call("elu", n, "chunked").out.isnan()
    assert bad[0, 1, 5].all()
    assert bad.sum() == 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAST)
def test_nan_reaches_no_gradient_of_what_does_not_see_it(kind: str, form: str):
    n = numbers(kind, tokens=29)
    n.k[:, :, 17], n.v[:, :, 19], n.q[:, :, 23] = torch.nan, torch.inf, torch.nan
    inputs = [t.requires_grad_() for t in (n.q, n.k, n.v)]
    out = linear_attend(*inputs, **words(kind, n), form=form, chunk=8).out
    for gradient in torch.autograd.grad(out[:, :, :17].sum(), inputs):
        assert gradient.isfinite().all()
        assert gradient[:, :, :17].abs().sum() > 0
        assert not gradient[:, :, 17:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0.0, 1.0, 1e2, 1e4, 1e10, 1e18])
def test_favor_stays_in_range_whatever_the_norms(size: float, form: str):
    q, k, v = (torch.randn(1, 2, 37, 16) for _ in range(3))
    out, state = linear_attend(size * q, size * k, v, features=Favor(16, features=32), form=form, chunk=8)
    assert out.isfinite().all()
    assert state.S.isfinite().all()
    assert out.abs().amax() <= v.abs().amax() * 1.001  # weights above 0 that sum to 1, so a mean of values
    assert torch.allclose(out[:, :, 0], v[:, :, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_favors_gradients_stay_in_range_where_short_keys_come_after_long_ones(form: str):
    q, k, v = (torch.randn(1, 2, 37, 16) for _ in range(3))
    k[:, :, :20] *= 1e2  # their features are some e^-1000 of those that come after
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = linear_attend(*inputs, features=Favor(16, features=32), form=form, chunk=8).out
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.square().sum(), inputs))


@pytest.mark.parametrize("form", FORMS)
def test_favor_forgets_a_huge_key_as_its_decay_says(form: str):
    n = numbers("favor, decay", tokens=251, dim=5).to(torch.float32)
    n.k[:, :, 3] = 0.0  # the greatest feature of all: |k| = 0
    n.k[:, :, 4:] *= 6  # features some e^-50 of it, which outlive it
    n.gamma[:] = 0.4
    exact = n.to(torch.float64)
    exact.gamma = n.gamma.double()
    right = linear_attend(exact.q, exact.k, exact.v, **words("favor, decay", exact), form="recurrent").out
    found = linear_attend(n.q, n.k, n.v, **words("favor, decay", n), form=form, chunk=16).out
    torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_strong_gates_neither_overflow_nor_lose_the_weak_ones(form: str):
    n = numbers("dot, gated", tokens=131)
    n.gate[:, :, ::3] *= 1e3  # e^-1000 every third token: running products leave the range of floats at once
    n.gate[:, :, 50] = -torch.inf
    n.gate[:, :, 51:] *= 1e-4
    right = linear_attend(n.q, n.k, n.v, **words("dot, gated", n), form="recurrent")
    single = n.to(torch.float32)
    found = linear_attend(single.q, single.k, single.v, **words("dot, gated", single), form=form)
    torch.testing.assert_close(found.out.double(), right.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.state.S.double(), right.state.S, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["dot, gated", "dot, one gate", "gated delta"])
def test_a_gate_of_minus_infinity_forgets_everything(kind: str, form: str):
    n = numbers(kind, tokens=29)
    for gate in (n.gate, n.one_gate, n.log_decay):
        gate[:, :, 13] = -torch.inf
    late = n.cut(13, None)
    found = linear_attend(n.q, n.k, n.v, **words(kind, n), form=form, chunk=8)
    fresh = linear_attend(late.q, late.k, late.v, **words(kind, late), form=form, chunk=8)
    torch.testing.assert_close(found.out[:, :, 13:], fresh.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.state.S, fresh.state.S, rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive(per="form")
@pytest.mark.parametrize("layout", ["heads inside", "shifted", "padded"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FAST)
def test_how_tensors_lie_in_memory_does_not_let_a_later_nan_reach_a_bit(kind: str, form: str, layout: str):
    def laid(t: torch.Tensor) -> torch.Tensor:
        if layout == "heads inside":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "padded":
            return torch.nn.functional.pad(t, (0, 3))[..., :-3]
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    n = numbers(kind, tokens=79)
    q, k, v = (laid(t) for t in (n.q, n.k, n.v))
    before = linear_attend(q, k, v, **words(kind, n), form=form).out
    later = k.clone()  # keeps the strides
    later[:, :, -1] = torch.nan
    assert torch.equal(linear_attend(q, later, v, **words(kind, n), form=form).out[:, :, :-1], before[:, :, :-1])
