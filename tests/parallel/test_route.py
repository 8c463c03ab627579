"""Each block comes to every rank that needs it, once, over neighbours, and no farther than the last of them."""

import gc
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, Documents, KeyLengths, Mask, Prefix, Window
from regard.describe.mask import CallSizes
from regard.describe.mask_function import MaskFunction
from regard.parallel import Layout
from regard.parallel.call import route_of, text_of
from regard.parallel.pair_counts import pair_counts, rank_pairs
from regard.parallel.route import Route, needs_of


@st.composite
def routes(draw: st.DrawFn) -> Route:
    ranks = draw(st.integers(1, 7))
    bits = draw(st.lists(st.booleans(), min_size=ranks**2, max_size=ranks**2))
    return Route(np.array(bits, dtype=bool).reshape(ranks, ranks))


@given(route=routes())
def test_every_rank_gets_the_blocks_that_it_needs_once(route: Route):
    ranks = range(route.ranks)
    for rank in ranks:
        visits = [visit for step in range(1, route.steps + 1) for visit in route.visits(rank, step)]
        origins = [visit.origin for visit in visits]
        assert len(set(origins)) == len(origins)
        assert {visit.origin for visit in visits if visit.is_needed} == {
            origin for origin in ranks if origin != rank and route.needs[rank, origin]
        }


@given(route=routes())
def test_a_block_that_goes_on_comes_from_the_neighbour(route: Route):
    for step in range(1, route.steps + 1):
        for rank in range(route.ranks):
            for visit in route.visits(rank, step):
                following = route.visits((rank + visit.way) % route.ranks, step + 1)
                arrives = any((v.origin, v.way) == (visit.origin, visit.way) for v in following)
                assert arrives == visit.goes_on
                assert visit.goes_on or visit.is_needed  # the last rank needs it


def of(mask: Mask | None, layout: Layout) -> Route:
    sizes = CallSizes(1, 1, layout.tokens, layout.tokens, 0)
    return Route(needs_of(None if mask is None else mask.bind(sizes), layout, layout, 0, (1, 1)))


def test_a_window_of_both_sides_goes_one_hop_each_way():
    route = of(Window(100, 100), Layout.contiguous(4096, 8))
    assert route.steps == 1
    assert route.up == (1,) * 7 + (0,)
    assert route.down == (0,) + (1,) * 7


def test_a_causal_mask_sends_nothing_back():
    route = of(Causal(), Layout.contiguous(4096, 4))
    assert route.up == (3, 2, 1, 0)
    assert route.down == (0, 0, 0, 0)


def test_without_a_mask_blocks_go_around():
    assert of(None, Layout.striped(64, 4)).up == (3, 3, 3, 3)
    assert of(None, Layout.of_counts([64, 0, 0, 0])).steps == 0


@pytest.mark.parametrize("mask", [Causal() & Window(8), Causal() & Documents(torch.arange(33280) // 130)])
def test_the_route_of_many_intervals_on_a_rank_is_the_predicted_one(mask: Mask):
    layout = Layout.striped(33280, 4, block=64)
    assert np.array_equal(of(mask, layout).needs, rank_pairs(pair_counts(mask, 33280), layout) > 0)
    assert of(mask, layout).steps < 3


def test_the_route_of_few_ranges_reads_no_query_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("regard.parallel.route.IntervalCounts", None)
    assert of(Window(100, 100), Layout.zigzag(4096, 4)).steps == 1


LENGTHS = KeyLengths(torch.tensor([9, 50]))


@pytest.mark.parametrize("mask", [Causal(), Window(4, 6), Causal() & (Window(3) | Prefix(2)), Causal() & LENGTHS])
@pytest.mark.parametrize("make", [Layout.contiguous, Layout.zigzag, Layout.striped, partial(Layout.striped, block=3)])
@pytest.mark.parametrize(("tokens", "keys", "offset"), [(60, 60, 0), (20, 60, 13), (60, 30, -55), (20, 60, 70)])
def test_keys_go_to_the_ranks_whose_queries_see_them(mask: Mask, make: Any, tokens: int, keys: int, offset: int):
    sizes = CallSizes(mask.broadcast_shape()[0], 1, tokens, keys, offset)
    bound, queries, layout = mask.bind(sizes), make(tokens, 4), Layout.zigzag(keys, 4)
    batch = torch.arange(sizes.batch)[:, None, None]
    at = torch.arange(tokens)[:, None] + offset
    kept = bound.keep(batch, torch.zeros_like(batch), at, torch.arange(keys))
    kept = kept.expand(sizes.batch, tokens, keys).any(0).numpy()
    seen = [[kept[np.ix_(queries.indices(i), layout.indices(j))].any() for j in range(4)] for i in range(4)]
    assert needs_of(bound, queries, layout, offset, (sizes.batch, 1)).tolist() == seen


def test_no_route_keeps_its_layout_alive():
    """A new mask at each step has a new balanced layout, with an array of the length of the sequence."""
    layout, sizes = Layout.contiguous(1_000, 2), CallSizes(1, 1, 1_000, 1_000, 0)
    assert layout.owners.size == 1_000
    route_of(Causal(), sizes, layout, layout)
    kept = ref(layout)
    del layout
    gc.collect()
    assert kept() is None


def _within(limit: int, b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < limit


class Within:
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 3

    def shows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < 3


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (partial(_within, 3), "partial(_within)"),
        (Within(), "Within"),
        (Within().shows, "shows"),
        (MethodType(partial(_within), 3), "partial(_within)"),
    ],
)
def test_ranks_compare_the_name_of_a_function_and_no_address(function: Any, name: str):
    assert text_of(MaskFunction(function)) == f"MaskFunction({name})"
