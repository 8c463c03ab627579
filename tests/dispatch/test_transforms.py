"""`torch.func` and vmap, derivatives of every order, and what of these is refused where torch traces the call."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Alibi,
    Causal,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
)
from regard.cache import KVCache, Paged
from tests.dispatch.traced import IDS, K, Q, V, compiled


def test_vmap_over_a_leading_axis():
    q, k, v = (torch.stack([t, 2 * t, 3 * t]) for t in (Q, K, V))
    mask = Causal() & Documents(IDS)
    found = torch.vmap(lambda q, k, v: attend(q, k, v, mask=mask))(q, k, v)
    assert torch.allclose(
        found, torch.stack([attend(*each, mask=mask) for each in zip(q, k, v, strict=True)]), atol=1e-6
    )
    shared = torch.vmap(lambda q: attend(q, K, V))(q)
    assert torch.allclose(shared, torch.stack([attend(each, K, V) for each in q]), atol=1e-6)


def test_vmap_inside_a_graph():
    q = torch.stack([Q, 2 * Q])
    found = compiled(torch.vmap(lambda q: attend(q, K, V, mask=Causal())))(q)
    assert torch.allclose(found, torch.stack([attend(each, K, V, mask=Causal()) for each in q]), atol=1e-6)


LENGTHS = torch.tensor([13, 23])
MASKS = {
    "lengths": lambda: KeyLengths(LENGTHS),
    "documents": lambda: Causal() & Documents(IDS),
    "a table": lambda: TensorMask(IDS[:11, None] != IDS),
    "a prefix of each row": lambda: Window(3) | Prefix(LENGTHS // 2),
    "made inside": lambda: KeyLengths(LENGTHS - 1) & Documents(IDS // 2),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_mask_of_tensors_is_read_under_torch_func(name: str, backend: str | None):
    given = None if name == "made inside" else MASKS[name]()

    def loss(q: Tensor) -> Tensor:
        return attend(q, K, V, mask=MASKS[name]() if given is None else given, backend=backend).sin().sum()

    leaf = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    both, of_both = torch.stack([Q, Q]), torch.stack([expected, expected])
    assert torch.allclose(torch.func.grad(loss)(Q), expected, atol=1e-6)
    assert torch.allclose(torch.vmap(torch.func.grad(loss))(both), of_both, atol=1e-6)
    along = torch.func.jvp(loss, (Q,), (K[:, :1, :11].expand_as(Q),))[1]
    assert torch.allclose(along, (expected * K[:, :1, :11]).sum(), atol=1e-4)


def test_a_mask_that_vmap_maps_over_is_refused_inside_of_a_gradient_too():
    def loss(q: Tensor) -> Tensor:
        return attend(q, q, q, mask=TensorMask(q @ q.mT > 0)).sum()

    for function in (loss, torch.func.grad(loss)):
        with pytest.raises(ProblemError, match="mapped over by vmap"):
            torch.vmap(function)(torch.stack([Q, 2 * Q]))


READ: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda size: size,
    "an element": lambda size: size[0],
    "a reduction": lambda size: size.max(),  # it would end the process
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_a_function_whose_tensor_vmap_maps_over_is_refused_inside_of_other_transforms_too(
    read: Callable[[Tensor], Tensor],
):
    def loss(q: Tensor, size: Tensor) -> Tensor:
        return attend(q, K, V, mask=MaskFunction(lambda b, h, q, k: q - k < read(size))).sum()

    def tangent(q: Tensor, size: Tensor) -> Tensor:
        return torch.func.jvp(lambda q: loss(q, size), (q,), (q,))[1]

    def mapped(q: Tensor, size: Tensor) -> Tensor:
        return torch.vmap(lambda q: loss(q, size))(q[None])

    for function in (torch.func.grad(loss), tangent, mapped):
        with pytest.raises(ProblemError, match=r"MaskFunction\(.*\) is mapped over by vmap"):
            torch.vmap(function, in_dims=(None, 0))(Q, torch.arange(1, 3)[:, None])


def test_a_function_may_read_the_size_of_a_tensor_that_vmap_maps_over():
    def loss(q: Tensor, of_size: Tensor) -> Tensor:
        return attend(q, K, V, mask=MaskFunction(lambda b, h, q, k: q - k < of_size.shape[0] + len(of_size) - 3)).sum()

    expected = torch.func.grad(loss)(Q, torch.ones(4))
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(Q, torch.ones(2, 4))
    torch.testing.assert_close(found, torch.stack([expected, expected]))


def small(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(3), *(pytest.param(mask, marks=pytest.mark.exhaustive) for mask in (~Causal(), None))],
)
def test_derivatives_of_every_order_and_direction(mask: Any):
    q, k, v, sink, bias = small(1, 2, 4, 3), small(1, 1, 5, 3), small(1, 1, 5, 2), small(2), small(1, 2, 4, 5)

    def function(*t: Tensor) -> Tensor:
        return attend(*t[:3], sink=t[3], bias=TensorBias(t[4]), mask=mask, softcap=3.0, backend="reference")

    assert torch.autograd.gradcheck(function, (q, k, v, sink, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v, sink, bias))


def test_a_call_that_sees_nothing_has_second_derivatives_of_zero():
    """A gradient penalty takes them, and a whole batch may be padding."""
    leaves = small(1, 2, 3, 4), small(1, 2, 3, 4), small(1, 2, 3, 4), small(2)
    out = attend(*leaves[:3], mask=Causal(), offset=-3, sink=leaves[3], backend="reference")
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([grad.square().sum() for grad in first]).sum(), leaves)
    assert not any(bool(grad.any()) for grad in (*first, *second))


def test_the_log_sum_exp_is_differentiable():
    q, k, v = small(1, 2, 4, 3), small(1, 1, 5, 3), small(1, 1, 5, 2)
    assert torch.autograd.gradcheck(lambda *t: attend_state(*t, mask=Causal()).lse, (q, k, v))


def test_transforms_choose_an_engine_that_knows_them():
    q = torch.randn(1, 2, 5, 4)
    out, tangent, *_ = torch.func.jvp(lambda t: attend(t, t, t, mask=Causal()), (q,), (torch.ones_like(q),))
    assert torch.allclose(out, attend(q, q, q, mask=Causal()), atol=1e-6)
    assert tangent.shape == q.shape
    hessian = torch.func.hessian(lambda t: attend(t, t, t, mask=Causal()).sum())(q[:, :1, :2, :2])
    assert bool(torch.isfinite(hessian).all())


BIASES = {
    "none": lambda: None,
    "slopes": lambda: Alibi(2),
    "a table": lambda: T5Bias(torch.linspace(-1, 1, 64).view(32, 2)),
    "a tensor": lambda: TensorBias(torch.linspace(-1, 1, 9).view(3, 3)),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(
    "mask", [Causal(), Window(2), TensorMask(torch.eye(3) > 0), MaskFunction(lambda b, h, q, k: k != q)]
)
def test_nested_transforms_leave_nothing_of_theirs_to_later_calls(mask: Mask, bias: str):
    q, k = torch.randn(1, 2, 3, 2), torch.randn(1, 2, 3, 2)

    def loss(q: Tensor) -> Tensor:
        return attend(q, k, k, mask=mask, bias=BIASES[bias]()).square().sum()

    first, again = torch.func.hessian(loss)(q), torch.func.hessian(loss)(q)
    assert torch.equal(first, again)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.allclose(torch.func.grad(loss)(q), expected, atol=1e-6)


def test_nested_transforms_over_stored_keys_leave_them_to_later_calls():
    q, stored = Q[:, :, :3], KVCache(Paged(16)).append(K, V)
    expected = attend(q, K, V, mask=Causal())
    torch.func.hessian(lambda q: attend(q, *stored, mask=Causal()).square().sum())(q)
    assert torch.allclose(attend(q, *stored, mask=Causal()), expected, atol=1e-6)


@pytest.mark.parametrize("how", ["counted", "compiled"])
def test_a_bias_may_be_all_that_vmap_maps_over_where_torch_sees_the_operator(how: str):
    biases = torch.randn(3, 11, 23)

    def mapped(biases: Tensor) -> Tensor:
        return torch.vmap(lambda bias: attend(Q, K, V, bias=TensorBias(bias)))(biases)

    with FlopCounterMode(display=False) if how == "counted" else nullcontext():
        found = mapped(biases) if how == "counted" else compiled(mapped)(biases)
        twice = torch.vmap(mapped)(biases[None])[0]
    expected = torch.stack([attend(Q, K, V, bias=TensorBias(bias)) for bias in biases])
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(twice, expected, atol=1e-6)


def test_an_offset_cannot_be_mapped_over():
    for offsets in (torch.tensor([3, 5]), torch.tensor([[3, 5], [7, 9]])):
        with pytest.raises(ProblemError, match="offset is mapped over by vmap"):
            torch.vmap(lambda offset: attend(Q, K, V, mask=Causal(), offset=offset))(offsets)


def test_a_mask_cannot_be_mapped_over():
    with pytest.raises(ProblemError, match="mapped over by vmap"):
        torch.vmap(lambda lengths: attend(Q, K, V, mask=KeyLengths(lengths)))(torch.tensor([[3, 5], [7, 9]]))
    with pytest.raises(ProblemError, match="mapped over by vmap"):
        torch.vmap(lambda size: attend(Q, K, V, mask=MaskFunction(lambda b, h, q, k: q - k < size)))(torch.arange(1, 3))
    with pytest.raises(ProblemError, match=r"Global\(positions\) is mapped over by vmap"):
        torch.vmap(lambda positions: attend(Q, K, V, mask=Global(positions)))(torch.tensor([[0], [1]]))


def test_a_traced_forward_derivative_is_refused_and_not_zero():
    def tangent(q: Tensor) -> Tensor:
        _, found, *_ = torch.func.jvp(lambda t: attend(t, K, V, mask=Causal()), (q,), (torch.ones_like(q),))
        return found

    with pytest.raises(Exception, match=r"forward-mode derivatives \(jvp\) of a call that torch traces"):
        compiled(tangent)(Q)
    for backend in ("aot_eager", "eager"):  # a graph break: eager, and right
        torch._dynamo.reset()  # or torch compiles `attend` in no later test, having failed once
        assert torch.allclose(torch.compile(tangent, backend=backend)(Q), tangent(Q))
    torch._dynamo.reset()


def test_a_traced_functional_gradient_is_refused_and_eager_where_graphs_may_break():
    def gradient(q: Tensor) -> Tensor:
        return torch.func.grad(lambda t: attend(t, K, V, mask=Causal()).square().sum())(q)

    def of_each(q: Tensor) -> Tensor:
        return torch.vmap(gradient)(q)

    for function, q in ((gradient, Q), (of_each, torch.stack([Q, -Q]))):
        assert torch.allclose(torch.compile(function, backend="aot_eager")(q), function(q))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"torch\.func\.grad of a call that torch traces"):
            compiled(function)(q)
        with FlopCounterMode(display=False), pytest.raises(RefusalError, match=r"FLOP counter.*is not supported"):
            function(q)
    torch._dynamo.reset()
