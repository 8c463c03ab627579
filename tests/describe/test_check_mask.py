"""`check_mask` accepts every mask of regard, and finds each way in which one of your own can be wrong."""

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Causal, MaskFunction, ProblemError, TensorMask, attend, check_mask, explain
from regard.describe.mask import intervals_of
from regard.extend import CallSizes, Interval, Mask, Rectangles, spec
from tests.expressions import BATCH, HEADS, masks


@pytest.mark.representative
@settings(max_examples=25)
@given(data=st.data())
def test_every_mask_of_regard_is_right(data: st.DataObject):
    queries, keys = data.draw(st.sampled_from([(31, 31), (1, 37), (19, 43)]))
    check_mask(data.draw(masks(queries, keys)), queries=queries, keys=keys, batch=BATCH, heads=HEADS)


def test_sizes_have_defaults():
    check_mask(Causal())


@spec
class Diagonal(Mask):
    """k <= q, right; the wrong ones below change one method each."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q

    def bounds(self, r: Rectangles) -> Any:
        return r.k0 <= r.q1 - 1, r.k1 - 1 <= r.q0


@spec
class HidesTooMuch(Diagonal):
    def bounds(self, r: Rectangles) -> Any:
        return r.k0 < r.q1 - 1, r.k1 - 1 <= r.q0


@spec
class KeepsTooMuch(Diagonal):
    def bounds(self, r: Rectangles) -> Any:
        return r.k0 <= r.q1 - 1, r.k1 - 2 <= r.q0


@spec
class SameEverywhere(Diagonal):
    def signature(self, r: Rectangles) -> Any:
        return np.zeros((len(r.b), 1), dtype=np.int64)


@spec
class FlatSignature(Diagonal):
    def signature(self, r: Rectangles) -> Any:
        return r.q0 - r.k0


@spec
class WrongIntervals(Diagonal):
    def intervals(self, sizes: CallSizes) -> Any:
        return [Interval(right=2)]


@spec
class Narrowing(Diagonal):
    """The last key moves to the left from a query to the next."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 30 - q

    def bounds(self, r: Rectangles) -> Any:
        return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)

    def intervals(self, sizes: CallSizes) -> Any:
        return [Interval(stop=30 - np.arange(sizes.offset, sizes.positions)[None])]


@spec
class NarrowingByDistance(Narrowing):
    def intervals(self, sizes: CallSizes) -> Any:
        return [Interval(right=30 - 2 * np.arange(sizes.offset, sizes.positions)[None])]


@spec
class NarrowingUnsigned(Narrowing):
    """Its edges are unsigned integers, whose differences would wrap around."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 60 - q

    def intervals(self, sizes: CallSizes) -> Any:
        return [Interval(stop=(60 - np.arange(sizes.offset, sizes.positions)[None]).astype(np.uint8))]


@spec
class GivesIntervals(Diagonal):
    """Its intervals are anything that a user may return."""

    given: Any

    def intervals(self, sizes: CallSizes) -> Any:
        return self.given


@spec
class From5Before(GivesIntervals):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= q - 5

    def bounds(self, r: Rectangles) -> Any:
        return r.k1 - 1 >= r.q0 - 5, r.k0 >= r.q1 - 6


@spec
class Stripes(GivesIntervals):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k % 8 < 3

    def bounds(self, r: Rectangles) -> Any:
        return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)

    def signature(self, r: Rectangles) -> Any:
        return (r.k0 % 8)[:, None]


@spec
class ByIndex(Diagonal):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool).tril()


@spec
class MovesQueries(Diagonal):
    """It keeps what `Diagonal` keeps, and masks that are read after it get other positions."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        q += 1
        return k < q


@spec
class OneForAll(Diagonal):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.ones(3, 5, dtype=torch.bool)


@spec
class OfInts(Diagonal):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k


@spec
class PerHead(Diagonal):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q - h

    def bounds(self, r: Rectangles) -> Any:
        return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)

    def broadcast_shape(self) -> tuple[int, int]:
        return 1, 1


@spec
class TooManyHeads(Diagonal):
    def broadcast_shape(self) -> tuple[int, int]:
        return 1, 5


@spec
class Shrinks(Diagonal):
    """Its field is changed again whenever it is made."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size - 1)

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < self.size)

    def bounds(self, r: Rectangles) -> Any:
        return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)


@spec
class WrittenShorter(Shrinks):
    """It serialises another mask than itself."""

    def serialize(self, tensors: list[torch.Tensor], ints: list[int]) -> str:
        return Shrinks.serialize(self.with_fields(size=self.size - 1), tensors, ints)


WRONG: dict[str, tuple[Mask, str]] = {
    "bounds that hide": (HidesTooMuch(), "bounds say that nothing of queries .* is kept, and keep keeps the pair of"),
    "bounds that keep": (KeepsTooMuch(), "bounds say that all of queries .* is kept, and keep does not keep the pair"),
    "a signature": (SameEverywhere(), "signature is the same for queries .* and queries .* at the pair of query"),
    "a signature of one axis": (FlatSignature(), r"signature returned int64 \[.*; expected an array of integers"),
    "intervals": (WrongIntervals(), "intervals keep the pair of query position 0 and key position 1"),
    "an edge": (Narrowing(), r"stop of intervals decreases from query position 0 to 1 \(batch row 0\)"),
    "a distance": (NarrowingByDistance(), r"q \+ right of intervals decreases from query position 0 to 1"),
    "one interval": (
        GivesIntervals(Interval(right=1)),
        r"intervals returned Interval\(.*; expected None or a list",
    ),
    "an edge by row": (GivesIntervals([Interval(stop=np.array([9]))]), r"an int64 array \[batch or 1, queries or 1\]"),
    "an edge that wraps around": (NarrowingUnsigned(), "stop of intervals decreases from query position 0 to 1"),
    "an edge of floats": (
        GivesIntervals([Interval(stop=np.array([[9.0]]))]),
        r"whose stop is float64 \[1, 1\]",
    ),
    "keep in place": (MovesQueries(), "keep changes its argument q in place"),
    "keep in place, in a function": (
        MaskFunction(lambda b, h, q, k: k.add_(1) <= q + 1) & Causal(),
        "keep changes its argument k in place",
    ),
    "keep by index": (ByIndex(), "keep is not pointwise: it gives"),
    "a shape": (OneForAll(), re.escape("keep returned bool [3, 5] for positions that broadcast to [1, 3, 40, 40]")),
    "a type": (OfInts(), "keep returned torch.int64; expected a bool tensor"),
    "heads that differ": (PerHead(), "broadcast_shape says that heads are alike, and keep differs"),
    "heads of another call": (TooManyHeads(), "broadcast_shape has 5 heads and the call 3: expected 1 or these"),
    "serialization": (WrittenShorter(9), re.escape("is another mask after serialize and deserialize")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mask_is_found(name: str):
    mask, message = WRONG[name]
    with pytest.raises(ProblemError, match=message):
        check_mask(mask, queries=40, keys=40, batch=1, heads=3)


def test_a_mask_of_ones_own_is_right():
    check_mask(Diagonal() & ~Diagonal() | Causal(), queries=70, keys=90, offset=3)


def test_a_mask_whose_constructor_changes_a_field_is_right():
    check_mask(Shrinks(9), queries=40, keys=40, batch=1, heads=3)


@pytest.mark.parametrize(
    "mask", [Narrowing(), NarrowingByDistance(), NarrowingUnsigned(), Narrowing() & Causal(), ~Narrowing()]
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_an_edge_that_moves_to_the_left_hides_the_right_keys(mask: Mask, backend: str | None):
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    keep = mask.keep(0, 0, torch.arange(40)[:, None], torch.arange(40))
    torch.testing.assert_close(
        attend(q, k, k, mask=mask, backend=backend), attend(q, k, k, mask=TensorMask(keep), backend="reference")
    )


@pytest.mark.parametrize("queries", [1, 40])
def test_intervals_of_another_form_are_refused_in_a_call(queries: int):
    q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 40, 8)
    wrong = GivesIntervals([Interval(stop=np.array([9]))])
    for mask in (wrong, wrong | Causal(), wrong & Causal(), ~wrong):
        with pytest.raises(ProblemError, match=r"^GivesIntervals\(.*: intervals returned .*; expected None or a list"):
            attend(q, k, k, mask=mask)


EDGES = {
    "the largest int": {"left": -5, "right": sys.maxsize},
    "beyond int64": {"left": -5, "right": 1 << 64, "start": -(1 << 64)},
    "the largest int64 in an array": {"left": -5, "right": np.full((1, 1), sys.maxsize)},
    "the largest int64 for each query": {"left": np.full((1, 40), -5), "right": np.full((1, 40), sys.maxsize)},
    "the largest uint64 in an array": {"left": -5, "stop": np.full((1, 1), (1 << 64) - 1, np.uint64)},
    "uint64": {"left": -5, "stop": np.uint64((1 << 64) - 1)},
    "uint16": {"left": np.int16(-5), "stop": np.uint16(40)},
    "uint8": {"left": np.int8(-5), "stop": np.uint8(200)},
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_every_size_and_type_of_integer_keep_the_same_pairs(name: str):
    mask = From5Before([Interval(**EDGES[name])])
    check_mask(mask, queries=40, keys=40)
    assert_attends(mask, ~mask, mask & Causal(), mask | Causal())


def test_a_mask_of_more_intervals_than_a_union_may_have_is_split():
    mask = Stripes([Interval(start=8 * i, stop=8 * i + 3) for i in range(5)])
    check_mask(mask, queries=40, keys=40)
    assert_attends(mask, ~mask, mask & Causal(), mask | Causal())


def test_empty_intervals_do_not_count_as_intervals_of_a_union():
    mask = From5Before([Interval(start=7, stop=7)] * 4 + [Interval(left=-5)])
    sizes = CallSizes(1, 1, 40, 40, 0)
    assert intervals_of(mask, sizes) == [Interval(left=-5)]
    assert intervals_of(Stripes([Interval(start=8 * i, stop=8 * i + 3) for i in range(5)]), sizes) is None


def assert_attends(*masks: Mask) -> None:
    """Outputs and counts of pairs are those of the table of the pairs that `keep` keeps."""
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    for mask in masks:
        table = TensorMask(mask.keep(0, 0, torch.arange(40)[:, None], torch.arange(40)))
        for backend in (None, "reference"):
            expected = attend(q, k, k, mask=table, backend="reference")
            torch.testing.assert_close(attend(q, k, k, mask=mask, backend=backend), expected)
            pairs = explain(q, k, k, mask=mask, backend=backend).schedule.pairs
            assert pairs == explain(q, k, k, mask=table).schedule.pairs


def test_a_tuple_of_intervals_is_taken():
    check_mask(GivesIntervals((Interval(right=1),)) | Causal(), queries=30, keys=50)


def test_what_is_no_mask_is_refused():
    with pytest.raises(ProblemError, match="takes a mask, and got Tensor"):
        check_mask(torch.ones(2, 2), queries=2, keys=2)  # pyright: ignore[reportArgumentType]


class Unregistered(Mask):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q


@pytest.mark.parametrize("mask", [Unregistered(), Unregistered() & Causal()], ids=repr)
def test_a_mask_without_spec_is_refused_as_in_a_call(mask: Mask):
    with pytest.raises(ProblemError, match=r"^mask is or contains Unregistered, a class that is not registered"):
        check_mask(mask, queries=2, keys=2)


@spec
class WithoutBounds(Mask):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q


def test_a_mask_without_bounds_works():
    mask, q = WithoutBounds(), torch.randn(1, 2, 131, 8)
    check_mask(mask, queries=41, keys=67)
    check_mask(~mask | Causal(), queries=41, keys=67)
    assert torch.equal(attend(q, q, q, mask=mask), attend(q, q, q, mask=Causal()))
