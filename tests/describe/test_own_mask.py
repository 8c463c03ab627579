"""Masks of a user: what each method may return, and which batch rows and heads `keep` may tell apart."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import (
    Causal,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    TensorMask,
    Window,
    attend,
    check_mask,
    draw,
    explain,
)
from regard.describe.some_heads import MaskOfHeads
from regard.extend import spec
from regard.parallel.placed import PlacedMask


def _of(**methods: Any) -> Mask:
    """A mask of a class of a user with these methods."""
    return spec(type("Own", (Mask,), {"__module__": __name__, "keep": lambda self, b, h, q, k: k <= q} | methods))()


KEPT = {
    "floats": (lambda self, b, h, q, k: (k - q).float(), "keep returned torch.float32; expected a bool tensor"),
    "integers": (lambda self, b, h, q, k: k - q, "keep returned torch.int64; expected a bool tensor"),
    "nothing": (lambda self, b, h, q, k: None, "keep returned NoneType; expected a bool tensor"),
    "another shape": (
        lambda self, b, h, q, k: torch.ones(3, 5, dtype=torch.bool),
        r"keep returned bool \[3, 5\] for positions that broadcast to .*: expected that shape, or one that broadcasts",
    ),
}
CALLS = {"draw": lambda m: draw(m, 4, 4), "attend": lambda m: attend(*[torch.ones(1, 1, 4, 8)] * 3, mask=m)}
COMBINED = {"alone": lambda m: m, "and": lambda m: m & Window(9), "or": lambda m: Window(2) | m, "not": lambda m: ~m}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", KEPT)
def test_the_keep_of_a_mask_gives_a_bool_tensor_of_the_shape_of_its_positions(name: str, combined: Any, call: Any):
    keep, says = KEPT[name]
    with pytest.raises(ProblemError, match=rf"^Own\(\): {says}"):
        call(combined(_of(keep=keep)))


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("always", [True, False])
def test_a_keep_may_be_one_truth_value_for_all_positions(combined: Any, always: bool):
    x = torch.randn(1, 1, 4, 8)
    plain = combined(TensorMask(torch.full((4, 4), always)))
    found = combined(_of(keep=lambda self, b, h, q, k: always))
    assert torch.equal(attend(x, x, x, mask=found), attend(x, x, x, mask=plain))
    assert draw(found, 4, 4) == draw(plain, 4, 4)


def test_a_combined_mask_of_whole_positions_is_a_truth_value():
    assert (Causal() & ~Prefix(1)).keep(0, 0, 3, 2) is True


BOUNDS = {
    "a number": 3,
    "nothing": None,
    "truth values": (True, True),
    "floats": (np.ones(1), np.ones(1)),
    "another length": (np.ones(999, dtype=bool), np.ones(999, dtype=bool)),
    "tensors": (torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)),
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_the_bounds_of_a_mask_are_two_arrays_with_an_element_for_each_rectangle(bounds: Any, combined: Any):
    mask, x = combined(_of(bounds=lambda self, r: bounds)), torch.ones(1, 1, 4, 8)
    says = r"^Own\(\): bounds returned .*; expected a tuple \(some, all\) of two bool arrays of shape \[1\]"
    with pytest.raises(ProblemError, match=says):
        attend(x, x, x, mask=mask)


SIGNATURES = {
    "nothing": (lambda self, r: None, "None"),
    "one axis": (lambda self, r: r.q0 - r.k0, r"int64 \[1\]"),
    "three axes": (lambda self, r: np.zeros((len(r.b), 1, 1), np.int64), r"int64 \[1, 1, 1\]"),
    "another length": (lambda self, r: np.zeros((999, 1), np.int64), r"int64 \[999, 1\]"),
    "floats": (lambda self, r: np.zeros((len(r.b), 1)), r"float64 \[1, 1\]"),
    "a tensor": (lambda self, r: torch.zeros(len(r.b), 1, dtype=torch.int64), r"tensor\(.*\)"),
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_of_a_mask_is_an_array_of_integers_with_a_row_for_each_rectangle(name: str, combined: Any):
    signature, got = SIGNATURES[name]
    mask, x = combined(_of(signature=signature)), torch.ones(1, 1, 4, 8)
    says = rf"^Own\(\): signature returned {got}; expected an array of integers \[rectangles, n\] = \[1, n\]"
    for of_heads in (mask, MaskOfHeads(mask, (0,)), PlacedMask(mask, ((0, 4, 1, 1),), ((0, 4, 1, 1),))):
        with pytest.raises(ProblemError, match=says):
            attend(x, x, x, mask=of_heads)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_a_signature_may_be_of_any_type_of_integer(dtype: Any):
    """A tile of which the mask keeps nothing, and one whose signature is 0, are told apart."""
    sides = {
        "bounds": lambda self, r: (r.k0 < r.q1, r.k1 - 1 <= r.q0),
        "signature": lambda self, r: (r.q0 - r.k0)[:, None].astype(dtype),
    }
    mask = _of(**sides) | _of(keep=lambda self, b, h, q, k: k % 64 == 5, signature=lambda self, r: (r.k0 % 64)[:, None])
    check_mask(mask, queries=256, keys=256, batch=1, heads=1)
    q = torch.randn(1, 1, 256, 8)
    expected = attend(q, q, q, mask=Causal() | MaskFunction(lambda b, h, q, k: k % 64 == 5))
    torch.testing.assert_close(attend(q, q, q, mask=mask), expected)


SHAPES = {
    "nothing": (lambda self: None, "returned None"),
    "an attribute": ((1, 1), r"is \(1, 1\)"),
    "one size": (lambda self: (1,), r"returned \(1,\)"),
    "three sizes": (lambda self: (1, 1, 1), r"returned \(1, 1, 1\)"),
    "a text": (lambda self: "11", "returned '11'"),
}


@pytest.mark.parametrize("call", [*CALLS.values(), check_mask], ids=[*CALLS, "check_mask"])
@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", SHAPES)
def test_the_broadcast_shape_of_a_mask_is_a_method_that_returns_two_ints(name: str, combined: Any, call: Any):
    shape, says = SHAPES[name]
    with pytest.raises(
        ProblemError, match=rf"^Own\(\): broadcast_shape {says}; expected a method that returns two ints"
    ):
        call(combined(_of(broadcast_shape=shape)))


def test_a_broadcast_shape_may_be_a_list_or_have_numbers_of_numpy():
    x = torch.randn(1, 1, 4, 8)
    for shape in ([1, 1], (np.int64(1), np.int64(1))):
        found = attend(x, x, x, mask=_of(broadcast_shape=lambda self, shape=shape: shape))
        assert torch.equal(found, attend(x, x, x, mask=Causal()))


@spec
class PerHead(Mask):
    """A window per head, one wider in each further batch row; without `broadcast_shape`."""

    widths: torch.Tensor

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return q - k < self.widths[h] + b


@spec
class Scaled(Mask):
    """It takes methods of tensors as given, also where all positions are the same."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q - k).float() < (b + h).float() + 1


@spec
class NoKeep(Mask):
    size: int


@spec
class OfTwo(Mask):
    def keep(self, q: Any, k: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return q >= k


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_mask_of_a_user_may_differ_between_heads_and_rows_without_saying_so(backend: str | None):
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    own = PerHead(torch.tensor([1, 2, 3, 4]))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    i, j = torch.arange(9)[:, None], torch.arange(9)
    same = TensorMask(own.keep(b, h, i, j))
    for mask, expected in ((own, same), (~own & Causal(), ~same & Causal()), (own | Prefix(2), same | Prefix(2))):
        out = attend(q, k, v, mask=mask, backend=backend)
        torch.testing.assert_close(out, attend(q, k, v, mask=expected, backend=backend))
    assert draw(own, 3, 3, batch=1, head=1) == draw(TensorMask(same.mask[1, 1, :3, :3]), 3, 3)
    assert "mask PerHead(widths=int64[4])," in str(explain(q, k, v, mask=own))


def test_a_picture_gives_tensors_to_a_mask_of_a_user():
    assert draw(Scaled(), 2, 2, head=1) == "█ █\n█ █"


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (NoKeep(3), r"NoKeep is a mask without keep: define keep\(self, b, h, q, k\)"),
        (OfTwo() & Causal(), r"OfTwo\.keep takes \(q, k\): expected keep\(self, b, h, q, k\)"),
    ],
)
def test_a_mask_of_a_user_that_is_no_mask_says_what_it_lacks(mask: Mask, says: str):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ProblemError, match=says):
        attend(q, q, q, mask=mask)


@pytest.mark.parametrize("name", ["data", "real"])
def test_an_attribute_of_a_head_that_is_a_tensor_counts_as_its_use(name: str):
    widths, q = torch.tensor([1, 3, 5, 9]), torch.randn(2, 4, 9, 8)
    own = MaskFunction(lambda b, h, q, k: q - k < widths[getattr(h, name).reshape(h.shape)])
    i, j = torch.arange(9)[:, None], torch.arange(9)
    expected = attend(q, q, q, mask=TensorMask(i - j < widths[:, None, None]))
    torch.testing.assert_close(attend(q, q, q, mask=own), expected)


@spec
class Written(Mask):
    """A condition on b, h, q and k that is evaluated; `keep` names none of them."""

    text: str

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return eval(self.text)


@spec
class Looked(Mask):
    """Its `keep` reads the head without its name."""

    names: str = "b h"

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return q - k < vars()[self.names.split()[1]] + 1


@pytest.mark.parametrize("own", [Written("q - k < h + 1"), Looked()])
def test_a_head_is_used_also_where_keep_does_not_name_it(own: Mask):
    q = torch.randn(1, 4, 9, 8)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    expected = attend(q, q, q, mask=TensorMask(i - j < torch.arange(4)[:, None, None] + 1))
    torch.testing.assert_close(attend(q, q, q, mask=own), expected)
