"""The tiles that the library lists from intervals are those of the Python algorithm, array by array."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import (
    Causal,
    Dilated,
    Documents,
    KeyLengths,
    Mask,
    Prefix,
    RegardError,
    TensorMask,
    Window,
    attend,
    native_calls,
)
from regard.backend import native_tiles
from regard.backend.native_tiles import ALL, Tiles
from regard.describe.mask import CallSizes
from regard.describe.spec import bound_to, spec
from regard.plan.closed_form import Grid, closed_form, is_by_query
from regard.plan.few_rows import few_rows
from regard.plan.problem import MAX_OFFSET
from regard.plan.schedule import Schedule
from regard.plan.tiling import cached_schedule, split_recursively
from tests.native.engines import BEST
from tests.plan.test_closed_form import expressions, grid_of

AT = {name: number for number, name in enumerate(native_calls.CALL)}
SCHEDULE = slice(AT["maps_batch"], AT["workspace"])
LISTS = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile")


def tiles_of(mask: Mask, grid: Grid) -> Tiles:
    return native_tiles._made(mask, CallSizes(*grid[:5]), 64)


def struct_of(
    tiles: Tiles, grid: Grid, entry: native_calls.Entry, table: torch.Tensor | None = None
) -> tuple[Any, list[torch.Tensor]]:
    """An opened struct of a call, whose tensors have one element a token, and its memory."""
    q, k = torch.ones(grid.batch, grid.heads, grid.queries, 1), torch.ones(grid.batch, 1, grid.keys, 1)
    out, lse, memory = torch.empty_like(q), torch.empty_like(q), torch.empty(1 << 22, dtype=torch.uint8)
    fields = {"isa": -1, "dtype": native_calls.DTYPES[torch.float32], "threads": 1, "scale": 1.0, "batch": grid.batch}
    fields |= {"heads": grid.heads, "kv_heads": 1, "queries": grid.queries, "keys": grid.keys, "qk_dim": 1, "v_dim": 1}
    for name, t in {"q": q, "k": k, "v": k, "out": out}.items():
        strides = zip(("batch", "head", "token"), t.stride(), strict=False)
        fields |= {f"{name}.data": t.data_ptr()} | {f"{name}.{axis}": stride for axis, stride in strides}
    fields |= {"lse": lse.data_ptr(), "workspace": memory.data_ptr(), "workspace_bytes": memory.nbytes}
    struct = entry.opened(entry.packed(fields))
    at = grid.queries, grid.offset
    struct[SCHEDULE] = tiles.fields(*at) if table is None else tiles.fields_with_table(table, *at)
    return struct, [q, k, out, lse, memory]


def array(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64).copy() if count else np.empty(0)


def assert_lists(tiles: Tiles, grid: Grid, expected: Schedule, table: torch.Tensor | None = None) -> None:
    entry = native_calls.Entry("regard_forward", native_calls.CALL)
    struct, kept = struct_of(tiles, grid, entry, table)
    entry(struct)
    for name in LISTS:
        whole: np.ndarray = getattr(expected, name)
        assert np.array_equal(array(struct[AT[f"by_query.{name}"]], len(whole)), whole), name
    number = array(struct[AT["by_query.patch_pattern"]], len(expected.patch_tile)).astype(int)
    assert struct[AT["by_query.pattern_count"]] == len(number)
    drawn = array(struct[AT["by_query.patterns"]], 64 * len(number)).reshape(-1, 64)
    turned = np.ascontiguousarray(expected.transposed_patterns).view(np.int64).reshape(-1, 64)
    assert np.array_equal(drawn[number], turned[expected.patch_pattern])
    del kept


@given(data=st.data(), batch=st.sampled_from([1, 3]))
def test_listed_tiles_are_those_of_the_closed_form(data: st.DataObject, batch: int):
    keys = data.draw(st.integers(1, 400))
    queries = data.draw(st.one_of(st.just(1), st.integers(1, keys)))
    offset = data.draw(st.integers(0, keys - queries))
    sizes = CallSizes(batch, 3, queries, keys, offset)
    mask = data.draw(expressions(batch, queries, keys)).bind(sizes)
    union = mask.intervals(sizes)
    if union is None or is_by_query(union):
        return
    grid = grid_of(mask, batch, queries, keys, offset, 64)
    tiles = tiles_of(mask, grid)
    assert tiles.number == max(len(union), 1)
    if tiles.maps_batch != grid.maps[0]:  # no edge differs from row to row
        grid = grid._replace(maps=(1, 1))
    assert_lists(tiles, grid, closed_form(union, grid))


RESTS = (None, Causal(), Causal() & (Window(30) | Prefix(5)), ~Window(9, 20), Prefix(0), Window(1 << 40))


@given(data=st.data(), rest=st.sampled_from(RESTS))
def test_listed_tiles_of_a_table_are_those_of_splitting(data: st.DataObject, rest: Mask | None):
    batch, heads, keys = (data.draw(st.integers(1, n)) for n in (2, 3, 200))
    queries, offset = data.draw(st.integers(1, 140)), data.draw(st.integers(-70, 200))
    shape = [data.draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    density = data.draw(st.sampled_from([0.0, 0.01, 0.5, 0.999, 1.0]))
    table = torch.rand(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < density
    if data.draw(st.booleans()):
        table = table.mT.contiguous().mT
    sizes = CallSizes(batch, heads, queries, keys, offset)
    grid = Grid(*sizes, 64, (shape[0], shape[1]))
    mask = bound_to(TensorMask(table) if rest is None else TensorMask(table) & rest, sizes)
    tiles = native_tiles.tiles_beside_table(rest, sizes)
    assert tiles is not None
    assert_lists(tiles, grid, split_recursively(mask, grid), table)


@pytest.mark.parametrize(
    "rest",
    [KeyLengths(torch.tensor([3, 9])), Documents(torch.tensor([0, 0, 1])), Prefix(torch.tensor([2, 3])), Dilated(2)],
    ids=str,
)
def test_what_differs_between_rows_or_has_no_intervals_is_not_listed_beside_a_table(rest: Mask):
    sizes = CallSizes(2, 1, 3, 3, 0)
    assert native_tiles.tiles_beside_table(bound_to(rest, sizes), sizes) is None


WRONG_TABLES = {
    "a stride to the left": ({"by_query.table.key": -1}, -1),
    "a table beyond all memory": ({"by_query.table.row": 1 << 62}, -1),
    "too many intervals": ({"by_query.interval_count": 5}, -3),
    "no intervals": ({"by_query.intervals": 0}, -2),
    "maps for no heads": ({"maps_head": 2}, -3),
    "too small a workspace": ({"workspace_bytes": 64}, -4),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_tables_that_make_no_sense_give_their_status(name: str):
    changes, status = WRONG_TABLES[name]
    grid, entry = Grid(2, 3, 70, 90, 20, 64, (1, 1)), native_calls.Entry("regard_forward", native_calls.CALL)
    struct, kept = struct_of(tiles_of(Causal(), grid), grid, entry, torch.rand(70, 90) < 0.5)
    for field, value in changes.items():
        struct[AT[field]] = value
    with pytest.raises(RegardError, match=rf"status {status} "):
        entry(struct)
    assert kept


def some_pairs(heads: int, density: float) -> Mask:
    generator = torch.Generator().manual_seed(heads)
    return TensorMask(torch.rand(2, heads, 101, 203, generator=generator) < density)


PAIRS: dict[str, tuple[Mask | None, bool]] = {
    "no mask": (None, True),
    "a window and sinks": (Causal() & (Window(30) | Prefix(5)), True),
    "a length for each batch row": (KeyLengths(torch.tensor([3, 190])), True),
    "no key": (Prefix(0), True),
    "a tensor for each batch row": (some_pairs(1, 0.7), False),
    "a tensor for each head": (some_pairs(3, 0.7), False),
    "runs of tiles": (Dilated(1) & (Documents(torch.arange(203) // 100) | some_pairs(3, 0.01)), False),
    "no key of a tensor": (some_pairs(3, 0.0), False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_tiles_keep_the_pairs_of_the_schedule(name: str):
    mask, has_intervals = PAIRS[name]
    sizes, rows = CallSizes(2, 3, 101, 203, 102), torch.tensor([0, 3, 63, 64, 70, 100])
    tiles = native_tiles._made(mask, sizes, 64) if mask is not None else ALL
    assert (tiles.number > 0) == has_intervals
    found, expected = tiles.keep(rows, 203, 102), cached_schedule(mask, sizes, 64).keep()[:, :, rows]
    assert torch.equal(found.expand(2, 3, -1, -1), expected.expand(2, 3, -1, -1))


@pytest.mark.parametrize("offset", [-40, 0, 7, 500, MAX_OFFSET, -MAX_OFFSET])
@pytest.mark.parametrize("queries", [1, 64, 100])
def test_queries_may_start_anywhere(offset: int, queries: int):
    for mask in (Causal(), Window(30, 4), ~Causal() | Prefix(5), Prefix(0), KeyLengths(torch.tensor([3, 90]))):
        grid = grid_of(mask, 2, queries, 90, offset, 64)
        union = mask.intervals(CallSizes(2, 3, queries, 90, offset))
        assert union is not None
        assert_lists(tiles_of(mask, grid), grid, few_rows(union, grid))


def test_long_calls_agree_too():
    mask = Causal() & (Window(256) | Prefix(4))
    grid = grid_of(mask, 1, 2999, 2999, 0, 64)
    union = mask.intervals(CallSizes(1, 3, 2999, 2999, 0))
    assert union is not None
    assert_lists(tiles_of(mask, grid), grid, closed_form(union, grid))


WRONG = {
    "too many intervals": ({"by_query.interval_count": 5}, -3),
    "fewer than none": ({"by_query.interval_count": -1}, -3),
    "a map for each head": ({"maps_head": 3}, -3),
    "a map that is not there": ({"maps_batch": 7}, -3),
    "tiles for other queries": ({"by_query.rows": 3}, -3),
    "no intervals": ({"by_query.intervals": 0}, -2),
    "an offset beyond all keys": ({"by_query.offset": MAX_OFFSET + 1}, -1),
    "too small a workspace": ({"workspace_bytes": 64}, -4),
}


@pytest.mark.parametrize("name", WRONG)
def test_intervals_that_make_no_sense_give_their_status(name: str):
    changes, status = WRONG[name]
    grid, entry = Grid(2, 3, 70, 90, 20, 64, (1, 1)), native_calls.Entry("regard_forward", native_calls.CALL)
    struct, kept = struct_of(tiles_of(Causal(), grid), grid, entry)
    for field, value in changes.items():
        struct[AT[field]] = value
    with pytest.raises(RegardError, match=rf"status {status} "):
        entry(struct)
    assert kept


def test_tiles_of_a_call_without_a_batch_are_not_those_of_others():
    q, k = torch.randn(2, 2, 23, 8), torch.randn(2, 2, 11, 8)
    attend(q, k, k, mask=~Causal() & Window(9, 9), backend=BEST)  # the form is known from here on
    assert not attend(q[:0], k[:0], k[:0], mask=~Causal(), backend=BEST).numel()
    assert not attend(q[:0], k[:0], k[:0], mask=~Causal(), backend=BEST).numel()
    assert torch.equal(attend(q, k, k, mask=~Causal(), backend=BEST)[:, :, -1], torch.zeros(2, 2, 8))


def test_a_call_of_very_many_queries_has_its_tiles_from_a_schedule(monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(1, 2, 300, 8)
    expected = attend(q, q, q, mask=Causal(), backend=BEST)
    monkeypatch.setattr(native_tiles, "QUERIES", 100)
    monkeypatch.setattr(native_tiles, "_fixed", {})
    assert torch.equal(attend(q, q, q, mask=Causal(), backend=BEST), expected)


@pytest.mark.parametrize("mask", [Documents(torch.arange(5) // 2), ~Documents(torch.arange(5) // 2), Prefix(2), None])
def test_a_call_without_queries_lists_nothing(mask: Mask | None):
    k = torch.randn(2, 1, 5, 4)
    for offset in (0, torch.tensor([0, 1])):
        assert attend(k[:, :, :0], k, k, mask=mask, offset=offset).shape == (2, 1, 0, 4)


@pytest.mark.parametrize("offset", [MAX_OFFSET, MAX_OFFSET + 1, -MAX_OFFSET - 1, 1 << 62])
def test_a_call_without_a_mask_may_be_anywhere(offset: int):
    q = torch.randn(1, 1, 70, 4)
    assert torch.equal(attend(q, q, q, offset=offset), attend(q, q, q))


def test_lengths_of_a_large_batch_serve_long_calls_after_short_ones():
    lengths, k = torch.arange(128) % 3 + 1, torch.randn(128, 1, 3, 1)
    for queries in (1, 1000):
        q = torch.randn(128, 1, queries, 1)
        out = attend(q, k, k, mask=KeyLengths(lengths), offset=0)
        torch.testing.assert_close(out, attend(q, k, k, mask=KeyLengths(lengths), offset=0, backend="reference"))


@spec
class QuarterOfTheKeys(Mask):
    """A window whose length follows the number of keys."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        raise NotImplementedError

    def bind(self, sizes: CallSizes) -> Mask:
        return Causal() & Window(sizes.keys // 4)


def test_a_mask_that_binds_by_size_has_tiles_of_each_size():
    for keys in (16, 32, 16, 64):
        q, k, v = (torch.randn(1, 2, keys, 8) for _ in range(3))
        for _ in range(2):
            found = attend(q, k, v, mask=QuarterOfTheKeys(), backend="native")
            expected = attend(q, k, v, mask=Causal() & Window(keys // 4), backend="native")
            assert torch.equal(found, expected)
