"""A finite number in place of -inf may hide every key of a row: then the GPU kernels give what its softmax gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, T5Bias, TensorBias, attend, attend_state
from regard.backend.definition import attention

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

LEAST = torch.finfo(torch.float32).min


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a bias whose rows 5 to 8 have no other number than the least one; row 20 has it for some keys."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, t, 16, generator=g) for n, t in ((4, 37), (2, 141), (2, 141)))
    bias = torch.randn(2, 1, 37, 141, generator=g)
    bias[:, :, 5:9] = LEAST
    bias[:, :, 20, 40:] = LEAST
    return q, k, v, bias


def assert_equal_with_gradients(ours: Any, exact: Any, inputs: tuple[Tensor, ...]) -> None:
    """Both functions give tuples of tensors; the exact one gets float64."""
    wide = [t.double() for t in inputs]
    for one, true in zip(results(ours, *inputs), results(exact, *wide), strict=True):
        torch.testing.assert_close(one.double(), true, atol=1e-5, rtol=1e-4)


def results(of: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    outs = of(*leaves)
    g = torch.Generator().manual_seed(2)
    moves = [torch.randn(out.shape, generator=g).to(out.dtype) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, moves)]


CALLS: dict[str, dict[str, Any]] = {
    "a bias alone": {},
    "a causal mask": {"mask": Causal()},
    "a softcap and a scale": {"softcap": 3.0, "scale": 0.7},
    "a bias by distance as well": {"more": T5Bias(torch.randn(32, 4, generator=torch.Generator().manual_seed(3)))},
    "a sink as far away": {"sink": torch.tensor([0.5, LEAST, -1e9, -torch.inf])},
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_hidden_by_a_finite_number_have_outputs_and_gradients_of_the_definition(name: str):
    arguments = dict(CALLS[name])
    more = arguments.pop("more", None)

    def call(function: Any, named: dict[str, Any]) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            term = TensorBias(bias)
            out = function(q, k, v, bias=term if more is None else term + more, **arguments, **named)
            return (out[0] if isinstance(out, tuple) else out,)

        return run

    assert_equal_with_gradients(call(attend, {"backend": "triton"}), call(attention, {}), tensors())


def test_gradients_of_the_log_sum_exp_of_such_rows_are_those_of_the_definition():
    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        state = attend_state(q, k, v, bias=TensorBias(bias), backend="triton")
        return state.out, state.lse

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = q @ k.mT / 4 + bias
        top = scores.detach().amax(-1, keepdim=True)  # the gradient of logsumexp itself would be 1 for each key
        return scores.softmax(-1) @ v, (scores - top).logsumexp(-1)

    inputs = tensors()
    found, true = results(ours, *inputs), results(exact, *(t.double() for t in inputs))
    for one, other in zip((found[0], *found[2:]), (true[0], *true[2:]), strict=True):  # lse lacks digits
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


def test_dropout_in_such_rows_drops_what_it_drops_elsewhere():
    q, k, v, bias = tensors()
    torch.manual_seed(5)
    unit = torch.eye(141).expand(2, 2, 141, 141)
    gone = attend(q, k, unit, dropout=0.3, backend="native") == 0

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        torch.manual_seed(5)
        return (attend(q, k, v, bias=TensorBias(bias), dropout=0.3, backend="triton"),)

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        weights = (q @ k.mT / 4 + bias).softmax(-1).masked_fill(gone, 0) / 0.7
        return (weights @ v,)

    assert_equal_with_gradients(ours, exact, (q, k, v, bias))


def test_one_query_whose_keys_are_all_hidden_by_a_finite_number_weighs_them_alike_over_spans_of_keys():
    q, k, v = (torch.randn(2, 2, n, 16) for n in (1, 1091, 1091))  # the second span has 67 keys
    bias = torch.full((1, 1, 1, 1091), LEAST)
    out = attend(q, k, v, bias=TensorBias(bias), backend="triton")
    torch.testing.assert_close(out, v.mean(2, keepdim=True))
    sink = torch.tensor([LEAST, 0.0])
    out = attend(q, k, v, bias=TensorBias(bias), sink=sink, backend="triton")
    torch.testing.assert_close(out, v.sum(2, keepdim=True) / torch.tensor([1092, torch.inf])[:, None, None])
