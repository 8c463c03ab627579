"""A schedule of all pairs at once has the arrays of recursive splitting, for every mask that it takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, Dilated, Global, KeyLengths, Mask, MaskFunction, TensorMask, Window
from regard.describe.mask import Bools, CallSizes, Positions, Rectangles, as_tensors, broadcast_shape_of
from regard.describe.spec import bound_to, spec
from regard.plan import tiling
from regard.plan.closed_form import Grid
from regard.plan.few_pairs import few_pairs, has_few_pairs
from regard.plan.tiling import schedule, split_recursively
from tests.expressions import BATCH, HEADS, masks
from tests.plan.test_closed_form import assert_same


def bound(mask: Mask, queries: int, keys: int, tile: int) -> tuple[Mask, Grid]:
    offset = keys - queries
    mask = bound_to(mask, CallSizes(BATCH, HEADS, queries, keys, offset))
    rows, heads = broadcast_shape_of(mask)
    maps = BATCH if rows > 1 else 1, HEADS if heads > 1 else 1
    return mask, Grid(BATCH, HEADS, queries, keys, offset, tile, maps)


@given(data=st.data(), tile=st.sampled_from([8, 16, 64]))
def test_all_pairs_at_once_give_what_splitting_finds(data: st.DataObject, tile: int):
    keys = data.draw(st.integers(1, 150))
    queries = data.draw(st.one_of(st.just(1), st.integers(1, keys)))
    mask, grid = bound(data.draw(masks(queries, keys)), queries, keys, tile)
    assert has_few_pairs(mask, grid)
    assert_same(few_pairs(mask, grid), split_recursively(mask, grid))


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & (Window(64) | Global([0, 90])),
        Causal() & Dilated(3),
        ~Global([5]) & KeyLengths(torch.tensor([300, 20])),
        TensorMask(torch.arange(700) < 650),
        MaskFunction(lambda b, h, q, k: (q - k < 100) & (k % (h + 1) == 0) | (b > 0)),
    ],
    ids=str,
)
def test_tiles_that_are_whole_become_runs(mask: Mask):
    mask, grid = bound(mask, 90, 700, 64)
    made = few_pairs(mask, grid)
    assert_same(made, split_recursively(mask, grid))
    assert_same(made, schedule(mask, batch=BATCH, heads=HEADS, queries=90, keys=700, offset=610, tile=64))


def test_calls_of_many_pairs_are_split():
    mask, grid = bound(TensorMask(torch.ones(400, 400, dtype=torch.bool)), 400, 400, 64)
    assert not has_few_pairs(mask, grid)
    assert not has_few_pairs(mask, grid._replace(queries=1, keys=20000, maps=(BATCH, 1)))  # tiles of 64 rows
    assert has_few_pairs(mask, grid._replace(queries=1, keys=8000, maps=(BATCH, 1)))
    assert not has_few_pairs(mask, grid._replace(queries=0))


@spec
class Odd(Mask):
    """A mask of a user, whose bounds do not agree with `keep`."""

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        _, _, q, k = as_tensors(b, h, q, k)
        return (q + k) % 2 == 1

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return r.b >= 0, r.b >= 0


@pytest.mark.parametrize("mask", [Odd(), Odd() & Dilated(2), ~Odd()], ids=str)
def test_the_bounds_of_a_users_mask_count_at_any_size(mask: Mask, monkeypatch: pytest.MonkeyPatch):
    mask, grid = bound(mask, 9, 9, 64)
    assert not has_few_pairs(mask, grid)
    split = []
    monkeypatch.setattr(tiling, "split_recursively", lambda *call: split.append(call) or split_recursively(*call))
    schedule(mask, batch=BATCH, heads=HEADS, queries=9, keys=9, offset=0, tile=64)
    assert split
