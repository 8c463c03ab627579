"""A finite number in place of -inf may hide every key of a row: then its gradients are those of its softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import (
    Causal,
    KeyLengths,
    Mask,
    MaskFunction,
    RegardError,
    T5Bias,
    TensorBias,
    TensorMask,
    attend,
    attend_state,
)
from regard.backend.definition import attention

LEAST = torch.finfo(torch.float32).min


def tensors(*, hidden: slice = slice(5, 9), heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a bias whose hidden rows have no other number; one more row has it for some keys."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, t, 16, generator=g) for n, t in ((heads, 70), (2, 90), (2, 90)))
    bias = torch.randn(2, 1, 70, 90, generator=g)
    bias[:, :, hidden] = LEAST
    bias[:, :, 20, 40:] = LEAST
    return q, k, v, bias


def gradients(of: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    outs = of(*leaves)
    g = torch.Generator().manual_seed(2)
    moves = [torch.randn(out.shape, generator=g).to(out.dtype) for out in outs]
    return list(torch.autograd.grad(outs, leaves, moves))


CALLS: dict[str, dict[str, Any]] = {
    "a bias alone": {},
    "a causal mask": {"mask": Causal()},
    "a mask by batch row": {"mask": KeyLengths(torch.tensor([90, 43]))},
    "a mask by head": {"mask": TensorMask(torch.rand(2, 4, 70, 90, generator=torch.Generator().manual_seed(4)) < 0.7)},
    "a softcap and a scale": {"softcap": 3.0, "scale": 0.7},
    "a bias by distance as well": {"more": T5Bias(torch.randn(32, 4, generator=torch.Generator().manual_seed(3)))},
    "a sink as far away": {"sink": torch.tensor([0.5, LEAST, -1e9, 0.0])},
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_rows_hidden_by_a_finite_number_are_those_of_the_definition(name: str):
    arguments = dict(CALLS[name])
    more = arguments.pop("more", None)

    def call(function: Any, named: dict[str, Any]) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            term = TensorBias(bias)
            out = function(q, k, v, bias=term if more is None else term + more, **arguments, **named)
            return (out[0] if isinstance(out, tuple) else out,)

        return run

    inputs = tensors()
    found = gradients(call(attend, {"backend": "native"}), *inputs)
    exact = gradients(call(attention, {}), *(t.double() for t in inputs))
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_an_infinite_sink_takes_all_weight_or_none_of_such_rows():
    def call(backend: str) -> Callable[..., tuple[Tensor]]:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor]:
            return (attend(q, k, v, bias=TensorBias(bias), sink=sink, backend=backend),)

        return run

    inputs = *tensors(), torch.tensor([0.5, torch.inf, -torch.inf, 0.0])
    found, exact = gradients(call("native"), *inputs), gradients(call("reference"), *(t.double() for t in inputs))
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_gradients_of_the_log_sum_exp_of_such_rows_are_those_of_the_definition():
    def state(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = attend_state(q, k, v, bias=TensorBias(bias), backend="native")
        return found.out, found.lse

    def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.repeat_interleave(2, 1).mT / 4 + bias
        top = scores.detach().amax(-1, keepdim=True)  # the gradient of logsumexp itself would be 1 for each key
        return scores.softmax(-1) @ v.repeat_interleave(2, 1), (scores - top).logsumexp(-1)

    inputs = tensors()
    found = gradients(state, *inputs)
    exact = gradients(definition, *(t.double() for t in inputs))
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_dropout_in_such_rows_drops_what_it_drops_elsewhere():
    q, k, v, bias = tensors()
    torch.manual_seed(5)
    gone = attend(q, k, torch.eye(90).expand(2, 2, 90, 90), dropout=0.3, backend="native") == 0

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        torch.manual_seed(5)
        return (attend(q, k, v, bias=TensorBias(bias), dropout=0.3, backend="native"),)

    def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        weights = (q @ k.repeat_interleave(2, 1).mT / 4 + bias).softmax(-1)
        return (weights.masked_fill(gone, 0) / 0.7 @ v.repeat_interleave(2, 1),)

    found = gradients(call, q, k, v, bias)
    exact = gradients(definition, *(t.double() for t in (q, k, v, bias)))
    for ours, true in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-4)


def test_a_traced_call_has_the_same_gradients():
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (attend(q, k, v, bias=TensorBias(bias)),)

    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(gradients(traced, *tensors()), gradients(call, *tensors()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_attention_in_a_program_has_the_gradients_of_its_definition(dtype: torch.dtype):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 512, 32, generator=g).to(dtype) for _ in range(3))
    mask = torch.zeros(1, 1, 512, 512, dtype=dtype)
    mask[:, :, 5:200] = torch.finfo(dtype).min

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.to(q.dtype)),)

    with regard.everywhere() as caught:
        found = gradients(call, q, k, v)
    assert "1 run by regard" in str(caught)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = gradients(call, *(t.double() for t in (q, k, v)))
    for ours, true in zip(found, exact, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours.double(), true, atol=tolerance, rtol=tolerance)


def test_a_backward_pass_inside_autocast_has_the_same_gradients():
    leaves = [t.requires_grad_() for t in tensors()]
    q, k, v, bias = leaves
    out = attend(q, k, v, bias=TensorBias(bias), backend="native").sin().sum()
    outside = torch.autograd.grad(out, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(out, leaves)
    assert all(map(torch.equal, outside, inside))


def lengths_mask() -> tuple[Mask, Tensor]:
    lengths = torch.tensor([90, 43])
    return KeyLengths(lengths) & Causal(), lengths


def tensor_mask() -> tuple[Mask, Tensor]:
    keep = torch.rand(2, 4, 70, 90, generator=torch.Generator().manual_seed(4)) < 0.7
    return TensorMask(keep), keep


def function_mask() -> tuple[Mask, Tensor]:
    lengths = torch.tensor([90, 43])
    return MaskFunction(lambda b, h, q, k: k < lengths[b]), lengths


@pytest.mark.parametrize("made", [lengths_mask, tensor_mask, function_mask])
def test_a_mask_may_be_written_to_before_the_backward_pass(made: Callable[[], tuple[Mask, Tensor]]):
    mask, read = made()
    leaves = [t.requires_grad_() for t in tensors()]
    q, k, v, bias = leaves
    out = attend(q, k, v, bias=TensorBias(bias), mask=mask, backend="native").sin().sum()
    before = torch.autograd.grad(out, leaves, retain_graph=True)
    read.fill_(1)
    assert all(map(torch.equal, before, torch.autograd.grad(out, leaves)))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("which", ["hidden key", "hidden value", "query of another row", "key of another batch row"])
def test_numbers_that_a_row_does_not_see_may_be_nan_infinite_or_large(which: str, number: float, softcap: float | None):
    q, k, v, bias = tensors()
    words: dict[str, Any] = {"mask": KeyLengths(torch.tensor([43, 90])), "softcap": softcap, "backend": "native"}
    seen = (slice(0, 1), slice(None), slice(5, 9)), (slice(0, 1), slice(None), slice(0, 43))

    def found() -> list[Tensor]:
        dq, dk, dv, dbias = gradients(
            lambda q, k, v, bias: (100 * attend(q, k, v, bias=TensorBias(bias), **words)[:1, :, 5:9],),
            *(q, k, v, bias),
        )
        return [dq[seen[0]], dk[seen[1]], dv[seen[1]], dbias[0, :, 5:9]]

    expected = found()
    t, at = {
        "hidden key": (k, (0, 1, 60)),
        "hidden value": (v, (0, 1, 60)),
        "query of another row": (q, (1, 1, 6)),
        "key of another batch row": (k, (1, 1, 3)),
    }[which]
    t[at] = number * torch.tensor([1, 1, -1, -1]).repeat(4)
    assert all(map(torch.equal, expected, found()))


def test_hidden_products_that_are_inf_less_inf_do_not_matter_under_a_softcap():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, tokens, 8, generator=g) for tokens in (6, 50, 50))
    words: dict[str, Any] = {"bias": TensorBias(torch.full((6, 50), -1e9)), "mask": KeyLengths(torch.tensor([40]))}

    def found() -> list[Tensor]:
        grads = gradients(lambda *t: (attend(*t, **words, softcap=5.0, backend="native"),), 3 * q, k, v)
        return [grad[:, :, :40] for grad in grads]

    expected = found()
    k[:, :, 45:] = 3e38 * torch.randn(8, generator=g).sign()
    assert all(map(torch.equal, expected, found()))


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_nan_that_far_rows_see_reaches_their_gradients(which: str):
    q, k, v, bias = tensors()
    bias = torch.full_like(bias, -1e9)
    (k if which == "key" else v)[0, 0, 3] = torch.nan

    def found(backend: str) -> list[Tensor]:
        call = gradients(lambda q, k, v, b: (attend(q, k, v, bias=TensorBias(b), backend=backend),), q, k, v, bias)
        return [grad.isnan() for grad in call]

    assert all(map(torch.equal, found("native"), found("reference")))


def test_a_row_that_is_not_finite_and_a_second_derivative_are_as_for_other_rows():
    q, k, v, bias = tensors()
    k[0, 0, 3] = torch.nan
    dq = gradients(lambda *t: (attend(*t, bias=TensorBias(bias), backend="native"),), q, k, v)[0]
    assert dq[0, :2].isnan().all()
    assert dq[1].isfinite().all()
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v, bias=TensorBias(bias), backend="native").sum()
    (first,) = torch.autograd.grad(out, leaf, create_graph=True)
    with pytest.raises(RegardError, match="differentiated once"):
        torch.autograd.grad(first.sum(), leaf)


@pytest.mark.parametrize("scale", [1e6, 1e9, 1e20])
@pytest.mark.parametrize("words", [{}, {"mask": Causal()}, {"sink": torch.tensor([0.5, 3e7, -1e9, 0.0])}], ids=str)
def test_scores_as_large_without_a_bias_have_the_gradients_of_the_definition(scale: float, words: dict[str, Any]):
    def call(function: Any, **named: Any) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            out = function(q, k, v, scale=scale, **words, **named)
            return (out[0] if isinstance(out, tuple) else out,)

        return run

    q, k, v, _ = tensors()
    k[:, :, 1::2] = k[:, :, ::2]  # pairs of keys share the weight of a row
    found = gradients(call(attend, backend="native"), q, k, v)
    exact = gradients(call(attention), *(t.double() for t in (q, k, v)))
    torch.testing.assert_close(found[2].double(), exact[2], atol=1e-4, rtol=1e-4)
    assert all(bool(torch.isfinite(grad).all()) for grad in found)
