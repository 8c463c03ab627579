"""The closed form of a schedule gives the same arrays as recursive splitting, for every mask that it takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, Documents, KeyLengths, Mask, MaskFunction, Prefix, Window
from regard.describe.mask import CallSizes
from regard.describe.ragged import Ragged
from regard.plan.closed_form import Grid, bits_of, closed_form, is_by_query
from regard.plan.few_rows import few_rows
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule, split_recursively

LISTS = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile", "patch_pattern", "patterns")


@st.composite
def interval_masks(draw: st.DrawFn, batch: int, queries: int, keys: int) -> Mask:
    """A mask whose kept keys are an interval, or several documents."""
    tokens = max(queries, keys)
    size = st.integers(1, tokens + 2)
    rows = torch.tensor(draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch)))
    ends = draw(st.lists(st.integers(1, tokens), max_size=5))
    ids = torch.bucketize(torch.arange(tokens), torch.tensor(sorted(ends), dtype=torch.int64), right=True)
    inner = draw(st.sampled_from([None, Causal(), Causal() & (Window(draw(size)) | Prefix(3)), ~Window(5)]))
    return draw(
        st.sampled_from(
            [
                Causal(),
                Window(draw(size)),
                Window(None, draw(size)),
                Window(draw(size), draw(size)),
                Prefix(draw(size) - 1),
                Prefix(rows),
                KeyLengths(rows),
                Documents(ids),
                Documents(ids[None]),
                Documents(torch.stack([ids, *[(ids + i).roll(i) * 0 + ids.flip(0) for i in range(1, batch)]])),
                Ragged(inner, rows.tolist(), keys),
            ]
        )
    )


def expressions(batch: int, queries: int, keys: int) -> st.SearchStrategy[Mask]:
    def combined(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        pair = st.tuples(inner, inner)
        return st.one_of(pair.map(lambda p: p[0] & p[1]), pair.map(lambda p: p[0] | p[1]), inner.map(lambda m: ~m))

    return st.recursive(interval_masks(batch, queries, keys), combined, max_leaves=4)


def grid_of(mask: Mask, batch: int, queries: int, keys: int, offset: int, tile: int) -> Grid:
    return Grid(batch, 3, queries, keys, offset, tile, (batch if mask.broadcast_shape()[0] > 1 else 1, 1))


def assert_same(a: Schedule, b: Schedule) -> None:
    for name in LISTS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert np.array_equal(x, y), name
    assert (a.maps, a.pairs, a.covered, a.tiles) == (b.maps, b.pairs, b.covered, b.tiles)


@given(data=st.data(), tile=st.sampled_from([8, 16, 64, 128]), batch=st.sampled_from([1, 3]))
def test_a_closed_form_is_what_splitting_finds(data: st.DataObject, tile: int, batch: int):
    keys = data.draw(st.integers(1, 300))
    queries = data.draw(st.one_of(st.just(1), st.integers(1, keys)))
    offset = data.draw(st.integers(0, keys - queries))
    mask = data.draw(expressions(batch, queries, keys)).bind(CallSizes(batch, 3, queries, keys, offset))
    union = mask.intervals(CallSizes(batch, 3, queries, keys, offset))
    if union is None:  # more intervals than the closed form takes
        return
    grid = grid_of(mask, batch, queries, keys, offset, tile)
    assert_same(closed_form(union, grid), split_recursively(mask, grid))
    if not is_by_query(union):
        assert_same(few_rows(union, grid), closed_form(union, grid))


@pytest.mark.parametrize("offset", [-40, 0, 7, 500])
@pytest.mark.parametrize("queries", [1, 64, 100])
def test_queries_may_start_anywhere(offset: int, queries: int):
    for mask in (Causal(), Window(30, 4), ~Causal() | Prefix(5), Prefix(5), Prefix(0)):
        grid = grid_of(mask, 2, queries, 90, offset, 16)
        union = mask.intervals(CallSizes(2, 3, queries, 90, offset))
        assert union is not None
        assert_same(closed_form(union, grid), split_recursively(mask, grid))
        if not is_by_query(union):
            assert_same(few_rows(union, grid), closed_form(union, grid))


@pytest.mark.parametrize("tile", [64, 128])
def test_long_calls_agree_too(tile: int):
    ids = torch.repeat_interleave(torch.arange(40), torch.randint(1, 200, (40,)))[:2999]
    compared = 0
    for mask in (Causal() & (Window(256) | Prefix(4)), Causal() & Documents(ids), Documents(ids) & ~Window(3)):
        grid = grid_of(mask, 1, len(ids), len(ids), 0, tile)
        union = mask.intervals(CallSizes(1, 3, len(ids), len(ids), 0))
        assert union is not None
        assert_same(closed_form(union, grid), split_recursively(mask, grid))
        if not is_by_query(union):
            assert_same(few_rows(union, grid), closed_form(union, grid))
            compared += 1
    assert compared == 1  # documents give each query edges of its own, which `few_rows` leaves to others


def test_a_call_wider_than_the_table_of_tiles_agrees():
    grid = grid_of(Causal(), 1, 3, 64 * 300, 64 * 300 - 3, 64)
    mask = Window(700) | Prefix(4)
    union = mask.intervals(CallSizes(1, 3, 3, 64 * 300, 64 * 300 - 3))
    assert union is not None
    assert_same(closed_form(union, grid), split_recursively(mask, grid))
    if not is_by_query(union):
        assert_same(few_rows(union, grid), closed_form(union, grid))


def test_masks_without_intervals_are_split():
    sizes = CallSizes(1, 1, 8, 8, 0)
    assert (Causal() & MaskFunction(lambda b, h, q, k: q != k)).intervals(sizes) is None
    assert Documents(torch.tensor([0, 1, 0, 1, 2, 2, 2, 2])).intervals(sizes) is None  # documents in several pieces
    assert (Window(2) | ~Window(3, 3) | Window(5, 2) | Prefix(1) | ~Prefix(7)).intervals(sizes) is None  # too many


def test_documents_in_a_row_are_an_interval():
    (found,) = Documents(torch.tensor([4, 4, 9, 1])).intervals(CallSizes(1, 1, 2, 4, 1)) or []
    assert [np.asarray(edge).tolist() for edge in (found.start, found.stop)] == [[[0, 2]], [[2, 3]]]


def test_tiles_are_drawn_once_for_calls_of_any_length():
    bits_of.clear()
    mask = Causal() & (Window(77) | Prefix(3))
    for tokens in range(512, 1024, 64):
        schedule(mask, batch=1, heads=1, queries=tokens, keys=tokens, offset=0, tile=64)
    assert 0 < len(bits_of) <= 8


def test_few_rows_give_what_a_backend_reads_as_the_schedule_would_compute_it():
    for mask in (
        Causal(),
        Causal() & (Window(70) | Prefix(4)),
        Window(9),
        Prefix(0),
        KeyLengths(torch.tensor([3, 90])),
    ):
        union = mask.intervals(CallSizes(2, 3, 70, 130, 60))
        assert union is not None
        made = few_rows(union, grid_of(mask, 2, 70, 130, 60, 64))
        expected = closed_form(union, grid_of(mask, 2, 70, 130, 60, 64))
        assert np.array_equal(made.transposed_patterns, expected.transposed_patterns)
        assert np.array_equal(made.lists, expected.lists)
