"""A mask for some of the queries and keys of a sequence is the mask of the sequence at their positions."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Mask, TensorBias, check_mask
from regard.describe.mask import CallSizes
from regard.describe.some_heads import bias_of_heads
from regard.extend import spec
from regard.parallel import Layout
from regard.parallel.placed import Pieces, PlacedMask, pieces_of, place_bias, positions_of
from regard.plan.tiling import schedule
from tests.expressions import BATCH, HEADS, masks
from tests.parallel.comparing import layouts

N = 61
PLACES: dict[str, tuple[Pieces, ...]] = {
    name: tuple(pieces_of(layout.positions(rank)) for rank in range(3)) for name, layout in layouts(3, N).items()
}
PLACES["in blocks"] = tuple(((rank * 5, 17, 5, 15),) for rank in range(3))


@pytest.mark.parametrize("tile", [8, 64])
@given(data=st.data(), mask=masks(N, N))
def test_its_schedule_keeps_what_the_mask_keeps(tile: int, data: Any, mask: Mask):
    places = data.draw(st.sampled_from(list(PLACES.values())))
    queries, keys = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    bound = mask.bind(CallSizes(BATCH, HEADS, N, N, 0))
    q, k = (torch.tensor(positions_of(each)) for each in (queries, keys))
    if not len(q) or not len(k):
        return
    placed = PlacedMask(bound, queries, keys)
    tiles = schedule(placed, batch=BATCH, heads=HEADS, queries=len(q), keys=len(k), offset=0, tile=tile)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    exact = bound.keep(b, h, q[:, None], k).expand(BATCH, HEADS, len(q), len(k))
    assert torch.equal(torch.as_tensor(tiles.keep()).expand_as(exact), exact)


@given(mask=masks(N, N), place=st.sampled_from(list(PLACES)))
def test_it_keeps_the_rules_of_masks(mask: Mask, place: str):
    bound = mask.bind(CallSizes(BATCH, HEADS, N, N, 0))
    queries, keys = PLACES[place][0], PLACES[place][1]
    q, k = len(positions_of(queries)), len(positions_of(keys))
    check_mask(PlacedMask(bound, queries, keys), batch=BATCH, heads=HEADS, queries=q, keys=k, offset=0)


def test_pieces_are_positions():
    layout = Layout.zigzag(N, 3)
    assert positions_of(pieces_of(layout.positions(1))).tolist() == layout.indices(1).tolist()
    assert positions_of(((2, 5, 2, 4),)).tolist() == [2, 3, 6, 7, 10]


def test_the_positions_of_many_tokens_are_not_kept_for_ever():
    tokens = range(1 << 20, (1 << 20) + 20)
    kept = [weakref.ref(positions_of(((0, n, n, n),))) for n in tokens]
    assert sum(at.nbytes for each in kept if (at := each()) is not None) <= 64 << 20


@spec
class Squared(TensorBias):
    """The squares of a table."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return super().value(b, h, q, k).square()


def test_a_subclass_of_a_table_has_its_own_values_at_its_places_and_in_its_heads():
    table = torch.randn(HEADS, N, N)
    own = Squared(table).bind(CallSizes(BATCH, HEADS, N, N, 0))
    queries, keys = PLACES["zigzag"][0], PLACES["zigzag"][1]
    at, to = (torch.tensor(positions_of(each)) for each in (queries, keys))
    h, i, j = torch.arange(HEADS)[:, None, None], torch.arange(len(at))[:, None], torch.arange(len(to))
    placed = place_bias(own, queries, keys)
    assert placed is not None
    assert torch.equal(placed.value(0, h, i, j), table[:, at[:, None], to].square())
    last = bias_of_heads(own, tuple(range(1, HEADS)))
    assert last is not None
    assert torch.equal(last.value(0, h[:-1], i, j), table[1:, i, j].square())
