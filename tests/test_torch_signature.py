"""`scaled_dot_product_attention` is torch's: shapes, masks, corners, broadcasting, errors."""

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

from regard import ProblemError, RefusalError, RegardError, attend, scaled_dot_product_attention
from regard.errors import TorchError


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


CALLS = {
    "two axes": ((r(5, 8), r(7, 8), r(7, 4)), {}),
    "three axes": ((r(3, 5, 8), r(3, 7, 8), r(3, 7, 8)), {}),
    "four axes": ((r(2, 3, 5, 8), r(2, 3, 7, 8), r(2, 3, 7, 8)), {}),
    "five axes, broadcast": ((r(2, 3, 4, 5, 8), r(2, 1, 4, 7, 8), r(2, 3, 4, 7, 8)), {}),
    "a batch of 1 broadcast": ((r(2, 4, 5, 8), r(1, 4, 7, 8), r(2, 4, 7, 8)), {}),
    "heads broadcast": ((r(2, 4, 5, 8), r(2, 1, 7, 8), r(2, 1, 7, 8)), {}),
    "keys without a batch": ((r(3, 3, 5, 8), r(3, 3, 8), r(3, 3, 3, 8)), {}),
    "queries broadcast": ((r(1, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {}),
    "causal, fewer queries": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"is_causal": True}),
    "causal, more queries": ((r(2, 4, 9, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"is_causal": True}),
    "grouped": ((r(2, 4, 5, 8), r(2, 2, 7, 8), r(2, 2, 7, 8)), {"enable_gqa": True}),
    "keys and values grouped apart": ((r(2, 4, 5, 8), r(2, 2, 7, 8), r(2, 1, 7, 8)), {"enable_gqa": True}),
    "a bool mask of two axes": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(5, 7) > 0}),
    "a bool mask of one row": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(1, 7) > 0}),
    "a mask per batch row": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(2, 1, 5, 7) > 0}),
    "a mask of three axes": ((r(3, 5, 8), r(3, 7, 8), r(3, 7, 8)), {"attn_mask": r(3, 5, 7) > 0}),
    "a mask of five axes": (
        (r(2, 3, 4, 5, 8), r(2, 3, 4, 7, 8), r(2, 3, 4, 7, 8)),
        {"attn_mask": r(2, 1, 4, 5, 7) > 0},
    ),
    "a float mask": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"attn_mask": r(2, 1, 5, 7)}),
    "a row that sees nothing": ((r(1, 1, 2, 8), r(1, 1, 2, 8), r(1, 1, 2, 8)), {"attn_mask": torch.eye(2, 2) > 1}),
    "scale": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": 0.3}),
    "a scale in a tensor": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": torch.tensor(0.3)}),
    "a whole scale in a tensor": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": torch.tensor(2)}),
    "a scale of numpy": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": np.float32(0.3)}),
    "a scale that is true": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"scale": True}),
    "no dropout in a tensor": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"dropout_p": torch.tensor(0)}),
    "all dropped": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"dropout_p": 1.0}),
    "all dropped, by a whole number": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"dropout_p": 1}),
    "all dropped, causal": ((r(2, 4, 5, 8), r(2, 4, 7, 8), r(2, 4, 7, 8)), {"dropout_p": 1.0, "is_causal": True}),
    "a parameter": ((torch.nn.Parameter(r(2, 4, 5, 8)), r(2, 4, 7, 8), r(2, 4, 7, 8)), {}),
    "no batch": ((r(0, 4, 5, 8), r(0, 4, 7, 8), r(0, 4, 7, 8)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_torchs(name: str):
    tensors, words = CALLS[name]
    ours, theirs = scaled_dot_product_attention(*tensors, **words), F.scaled_dot_product_attention(*tensors, **words)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs, atol=2e-6)


def test_the_names_and_defaults_are_torchs():
    found = {name: p.default for name, p in inspect.signature(scaled_dot_product_attention).parameters.items()}
    assert found == {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }


def test_gradients_reach_a_float_mask():
    q, mask = r(2, 4, 5, 8), r(2, 1, 5, 5).requires_grad_()
    (ours,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q, mask).sin().sum(), mask)
    (theirs,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q, mask).sin().sum(), mask)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_dropout_is_applied_whenever_asked_for():
    q = r(1, 1, 64, 8)
    assert not torch.equal(scaled_dot_product_attention(q, q, q, dropout_p=0.5), scaled_dot_product_attention(q, q, q))


def test_gradients_are_zeros_where_all_is_dropped():
    def gradients(attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        q, k, v, mask = (r(*t).requires_grad_() for t in ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (5, 7)))
        return torch.autograd.grad(attention(q, k, v, mask, dropout_p=1.0).sin().sum(), (q, k, v, mask))

    ours, theirs = gradients(scaled_dot_product_attention), gradients(F.scaled_dot_product_attention)
    assert not any(torch.count_nonzero(t) for t in theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def bias_of(variant: Callable[..., CausalBias], queries: int, keys: int) -> CausalBias:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NaN where there are more queries than keys, which torch gives no longer
        return variant(queries, keys)


CAUSAL = {"upper left": causal_upper_left, "lower right": causal_lower_right}
SIZES = [(3, 5, 31, 31, 16), (3, 5, 31, 67, 11), (3, 5, 67, 31, 16), (1, 1, 23, 59, 13), (1, 1, 1, 59, 13)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("variant", CAUSAL)
def test_torchs_own_causal_masks_are_understood(variant: str, sizes: tuple[int, ...]):
    understands(variant, sizes, compiled=False)


@pytest.mark.parametrize(
    "sizes", [size if size is SIZES[1] else pytest.param(size, marks=pytest.mark.exhaustive) for size in SIZES], ids=str
)
@pytest.mark.parametrize("variant", CAUSAL)
def test_torchs_own_causal_masks_are_understood_in_a_graph(variant: str, sizes: tuple[int, ...]):
    understands(variant, sizes, compiled=True)


def understands(variant: str, sizes: tuple[int, ...], *, compiled: bool) -> None:
    """As torch's test of its `CausalBias`: against the bool mask that the object says it is, forward and backward."""
    batch, heads, queries, keys, dim = sizes
    bias = bias_of(CAUSAL[variant], queries, keys)
    dense = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if variant == "lower right" else 0)

    def found(attention: Callable[..., Tensor], mask: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (r(batch, heads, n, dim).requires_grad_() for n in (queries, keys, keys))
        out = attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=None)
        return out, *torch.autograd.grad(out.sin().sum(), (q, k, v))

    torch.compiler.reset()
    ours = scaled_dot_product_attention
    call: Any = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    for a, b in zip(found(call, bias), found(F.scaled_dot_product_attention, dense), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 5)], ids=str)
def test_torchs_own_causal_masks_go_with_any_leading_axes(leading: tuple[int, ...]):
    q, k, v = r(*leading, 5, 8), r(*leading, 7, 8), r(*leading, 7, 8)
    found = scaled_dot_product_attention(q, k, v, causal_lower_right(5, 7))
    dense = torch.ones(5, 7, dtype=torch.bool).tril(2)
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, dense), atol=2e-6)


def test_torchs_own_causal_mask_at_the_upper_left_needs_no_sizes():
    q, k = r(2, 4, 5, 8), r(2, 4, 7, 8)
    causal = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    for bias in (causal_upper_left(3, 11), causal_lower_right(5, 5)):
        assert torch.allclose(F.scaled_dot_product_attention(q, k, k, bias), causal)
        assert torch.allclose(scaled_dot_product_attention(q, k, k, bias), causal, atol=2e-6)


@pytest.mark.exhaustive
def test_torchs_module_of_causal_masks_is_not_imported_for_those_who_do_not():
    program = (
        "import sys, torch\n"
        "from regard import scaled_dot_product_attention\n"
        "q = torch.zeros(1, 1, 2, 8)\n"
        "scaled_dot_product_attention(q, q, q, torch.ones(2, 2, dtype=torch.bool))\n"
        "print('torch.nn.attention.bias' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


class Metadata(Tensor):
    """A tensor that redefines every function of torch, to pass something on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def jagged(*rows: int) -> Tensor:
    return torch.nested.nested_tensor([r(n, 2, 8) for n in rows], layout=torch.jagged).transpose(1, 2)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # nested tensors are prototypes, says torch
    STRIDED_ROWS = torch.nested.nested_tensor([r(2, 3, 8), r(2, 5, 8)])

Q = r(1, 2, 5, 8)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a mask and causal": ((r(2, 2, 8),) * 3, {"attn_mask": r(2, 2) > 0, "is_causal": True}, "both set"),
    "heads that do not fit": ((r(1, 4, 2, 8), r(1, 2, 2, 8), r(1, 2, 2, 8)), {}, "enable_gqa"),
    "groups that do not fit": ((r(1, 4, 2, 8), r(1, 3, 2, 8), r(1, 3, 2, 8)), {"enable_gqa": True}, "whole multiple"),
    "fewer values than keys": ((r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 3, 8)), {}, "4 keys"),
    "one axis": ((r(8), r(8), r(8)), {}, "expected"),
    "a mask that does not fit": ((r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 4, 8)), {"attn_mask": r(2, 3) > 0}, "columns"),
    "a mask of other rows": ((r(2, 3, 1, 5, 8),) * 3, {"attn_mask": r(3, 1, 1, 5, 5) > 0}, "attn_mask has shape"),
    "a mask of more axes": ((r(3, 5, 8),) * 3, {"attn_mask": r(2, 3, 5, 5) > 0}, "attn_mask has shape"),
    "a mask of more axes than tokens": ((r(5, 8),) * 3, {"attn_mask": r(1, 5, 5)}, r"leading axes \[\]"),
    "a list": (([1.0], Q, Q), {}, "^query is list: expected a tensor"),
    "an array": ((Q, Q.numpy(), Q), {}, "^key is ndarray: expected a tensor"),
    "a list for a mask": ((Q, Q, Q), {"attn_mask": [True]}, "^attn_mask is list: expected a tensor"),
    "mixed types": ((Q, Q.double(), Q), {}, "one type"),
    "sparse": ((Q, Q, Q.to_sparse()), {}, "^value has the layout torch.sparse_coo"),
    "a sparse mask": ((Q, Q, Q), {"attn_mask": r(5, 5).to_sparse()}, "^attn_mask has the layout torch.sparse_coo"),
    "nested": ((STRIDED_ROWS,) * 3, {}, "^query is a nested tensor"),
    "a nested mask": ((Q, Q, Q), {"attn_mask": STRIDED_ROWS}, "^attn_mask is a nested tensor"),
    "jagged": ((jagged(3, 5),) * 3, {}, "^query is a nested tensor"),
    "a jagged mask": ((Q, Q, Q), {"attn_mask": jagged(3, 5)}, "^attn_mask is a nested tensor"),
    "another class": ((Q, Q.as_subclass(Metadata), Q), {}, "^key is of the class Metadata"),
    "a mask of another class": (
        (Q, Q, Q),
        {"attn_mask": r(5, 5).as_subclass(Metadata)},
        "^attn_mask is of the class Metadata",
    ),
    "a causal mask of other sizes": (
        (Q, Q, Q),
        {"attn_mask": causal_lower_right(5, 7)},
        r"causal_lower_right\(5, 7\), and the call has 5 queries and 5 keys",
    ),
    "a causal mask and causal": ((Q, Q, Q), {"attn_mask": causal_upper_left(5, 5), "is_causal": True}, "both set"),
    "a learned scale": ((Q, Q, Q), {"scale": torch.tensor(0.5, requires_grad=True)}, "scale is a tensor"),
    "a scale per head": ((Q, Q, Q), {"scale": torch.ones(2)}, "scale is a tensor"),
    "a complex scale": ((Q, Q, Q), {"scale": torch.tensor(1j)}, "expected a number"),
    "causal in words": ((Q, Q, Q), {"is_causal": "no"}, "^is_causal is 'no': expected True or False"),
    "causal as a number": ((Q, Q, Q), {"is_causal": 1}, "^is_causal is 1: expected True or False"),
    "groups in words": ((Q, Q, Q), {"enable_gqa": "x"}, "^enable_gqa is 'x': expected True or False"),
    "more dropout than all": ((Q, Q, Q), {"dropout_p": 1.5}, "expected a probability, 0 <= dropout_p <= 1"),
    "less dropout than none": ((Q, Q, Q), {"dropout_p": -0.5}, "expected a probability, 0 <= dropout_p <= 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_calls_an_error_is_one(name: str):
    tensors, words, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        scaled_dot_product_attention(*tensors, **words)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ProblemError, RegardError, TorchError])
def test_an_error_is_caught_as_torchs_and_as_ours(kind: type[Exception]):
    with pytest.raises(kind, match="4 keys"):
        scaled_dot_product_attention(r(1, 1, 2, 8), r(1, 1, 4, 8), r(1, 1, 3, 8))


def test_a_second_derivative_is_refused_with_the_function_that_has_it():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match=r'name backend="reference".*takes no backend: call regard\.attend in its'):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(attend(q, q, q, backend="reference").sum(), q, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_an_error_in_the_type_of_the_mask_names_the_argument(dtype: torch.dtype):
    q = torch.randn(1, 2, 5, 7)
    with pytest.raises(TorchError, match=rf"^attn_mask is {dtype} \[5, 5\]: expected bools .* or floats"):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=dtype))
