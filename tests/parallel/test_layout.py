"""Layouts hold every token once, and their pair counts are those of the mask."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Causal, Dilated, Documents, KeyLengths, Mask, MaskFunction, Prefix, ProblemError, TensorMask, Window
from regard.cost import Pattern
from regard.extend import spec
from regard.parallel import Layout
from regard.parallel.balance import balanced_by, imbalance, steps_of, time_of
from regard.parallel.pair_counts import pair_counts, rank_pairs, step_pairs
from regard.parallel.route import Route, ring_steps

TOKENS = 211


def _documents(tokens: int) -> Documents:
    return Documents(torch.arange(tokens) // 37)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(30),
    "sinks": Causal() & (Window(17) | Prefix(5)),
    "documents": Causal() & _documents(TOKENS),
    "both ways": Window(20, 10) | Prefix(3),
    "dilated": Causal() & Dilated(3),
    "lengths": Causal() & KeyLengths(torch.tensor([100, 211, 3])),
    "random": TensorMask(torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.7),
    "hole": Causal() & ~(Prefix(90) & ~Prefix(20)),
}


def _dense(mask: Mask | None, tokens: int) -> torch.Tensor:
    """[tokens, tokens]: in how many batch rows the pair is kept."""
    at = torch.arange(tokens)
    if mask is None:
        return torch.ones(tokens, tokens, dtype=torch.int64)
    if isinstance(mask, TensorMask):
        return mask.mask.long()
    rows = mask.broadcast_shape()[0]
    batch = torch.arange(rows)[:, None, None]
    kept = mask.keep(batch, torch.zeros(1, 1, 1, dtype=torch.int64), at[:, None], at)
    return kept.expand(rows, tokens, tokens).long().sum(0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", [Layout.contiguous, Layout.zigzag, Layout.striped, partial(Layout.striped, block=7)])
def test_the_pairs_of_ranks_are_those_of_the_dense_mask(mask: Mask | None, make: Callable[[int, int], Layout]) -> None:
    layout = make(TOKENS, 3)
    dense = _dense(mask, TOKENS)
    parts = [layout.shard(torch.arange(TOKENS), rank, dim=0) for rank in range(3)]
    expected = [[int(dense[rows][:, columns].sum()) for columns in parts] for rows in parts]
    counts = pair_counts(mask, TOKENS)
    assert rank_pairs(counts, layout).tolist() == expected
    assert counts.before(np.arange(TOKENS + 1)).tolist() == [0, *dense.sum(1).cumsum(0).tolist()]


@spec
class PerHead(Mask):
    """A window per head; without `broadcast_shape`."""

    width: int

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q >= k) & (q - k < self.width * (h + 1))


@pytest.mark.parametrize("mask", [PerHead(20), MaskFunction(lambda b, h, q, k: (q >= k) & (q - k < 20 * (h + 1)))])
def test_a_mask_that_differs_between_heads_without_saying_so_is_counted_in_each(mask: Mask) -> None:
    layout, masks = Layout.zigzag(TOKENS, 3), [Causal() & Window(20 * (h + 1)) for h in range(4)]
    pairs = [rank_pairs(pair_counts(each, TOKENS), layout) for each in masks]
    assert rank_pairs(pair_counts(mask, TOKENS, batch=2, heads=4), layout).tolist() == np.sum(pairs, axis=0).tolist()
    both = mask & KeyLengths(torch.tensor([TOKENS, TOKENS, 0]))  # which knows its 3 rows by itself
    assert rank_pairs(pair_counts(both, TOKENS, heads=4), layout).tolist() == (2 * np.sum(pairs, axis=0)).tolist()
    assert rank_pairs(pair_counts(mask, TOKENS), layout).tolist() == pairs[0].tolist()


def test_the_balanced_layout_has_the_work_of_all_heads() -> None:
    wide = MaskFunction(lambda b, h, q, k: (q >= k) & ((h > 0) | (q - k < 2)))
    assert Layout.balanced(512, 4, wide) == Layout.contiguous(512, 4)
    assert Layout.balanced(512, 4, wide, heads=8) == Layout.balanced(512, 4, Causal()) != Layout.contiguous(512, 4)


@pytest.mark.parametrize(
    ("pattern", "mask"),
    [
        (Pattern(), Causal()),
        (Pattern(causal=False), None),
        (Pattern(window=30), Causal() & Window(30)),
        (Pattern(window=30, causal=False), Window(30, 30)),
        (Pattern(window=17, sinks=5), Causal() & (Window(17) | Prefix(5))),
        (Pattern(prefix=9), Causal() | Prefix(9)),
        (Pattern(chunk=37), Causal() & _documents(TOKENS)),
    ],
)
def test_a_pattern_counts_as_its_mask(pattern: Pattern, mask: Mask | None) -> None:
    layout = Layout.zigzag(TOKENS, 4)
    ours, theirs = (rank_pairs(pair_counts(each, TOKENS), layout) for each in (pattern, mask))
    assert ours.tolist() == theirs.tolist()
    assert int(ours.sum()) == pattern.pairs(queries=TOKENS, keys=TOKENS)


def test_zigzag_shares_causal_work_in_every_step() -> None:
    steps = step_pairs(rank_pairs(pair_counts(Causal(), 4096), Layout.zigzag(4096, 8)))
    assert (steps == steps[:, :1]).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 90), st.integers(1, 9), st.integers(1, 5))
def test_every_layout_puts_a_sequence_together_again(tokens: int, ranks: int, block: int) -> None:
    whole = torch.randn(2, tokens, 3)
    for layout in (
        Layout.contiguous(tokens, ranks),
        Layout.zigzag(tokens, ranks),
        Layout.striped(tokens, ranks, block),
    ):
        shards = [layout.shard(whole, rank, dim=1) for rank in range(ranks)]
        assert tuple(shard.shape[1] for shard in shards) == layout.counts
        assert torch.equal(layout.unshard(shards, dim=1), whole)
        assert max(layout.counts) - min(layout.counts) <= max(2, block)


@pytest.mark.parametrize(
    "runs",
    [
        ((range(4),), (range(5, 8),)),
        ((range(4),), (range(3, 8),)),
        ((range(4),), (range(4, 7),)),
        ((range(4, 8), range(4)), ()),
        ((range(4, 8), range(0), range(4)), ()),
        ((range(8),), (range(8, 9),)),
    ],
)
def test_a_layout_that_loses_or_doubles_a_token_is_an_error(runs: tuple[tuple[range, ...], ...]) -> None:
    with pytest.raises(ProblemError, match=r"each position 0 to 7 on one rank"):
        Layout(8, runs)


def test_a_layout_of_lists_equals_that_of_tuples() -> None:
    made = Layout(8, [[range(4), range(0)], [range(4, 8)]])  # pyright: ignore[reportArgumentType]
    assert made == Layout.contiguous(8, 2)
    assert hash(made) == hash(Layout.contiguous(8, 2))


def test_layouts_of_iterators_equal_those_of_tuples() -> None:
    assert Layout.of_counts(count for count in (4, 4)) == Layout.contiguous(8, 2)
    assert Layout(8, (iter([part]) for part in (range(4), range(4, 8)))) == Layout.contiguous(8, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("integer", [np.int64, torch.tensor])
def test_counts_are_any_integers(integer: Callable[[int], Any]) -> None:
    tokens, ranks, block = integer(97), integer(3), integer(8)
    found = [
        Layout.contiguous(tokens, ranks),
        Layout.zigzag(tokens, ranks),
        Layout.striped(tokens, ranks),
        Layout.striped(tokens, ranks, block),
        Layout.balanced(tokens, ranks, Causal()),
    ]
    expected = [
        Layout.contiguous(97, 3),
        Layout.zigzag(97, 3),
        Layout.striped(97, 3),
        Layout.striped(97, 3, 8),
        Layout.balanced(97, 3, Causal()),
    ]
    assert found == expected
    assert [each.digest for each in found] == [each.digest for each in expected]


def test_sending_is_any_real_number() -> None:
    assert Layout.balanced(97, 3, Causal(), sending=np.float32(4)) == Layout.balanced(97, 3, Causal(), sending=4.0)  # pyright: ignore[reportArgumentType]


def test_the_digest_of_a_layout_tells_apart_which_rank_has_which_positions() -> None:
    made = [Layout.contiguous(8, 2), Layout.zigzag(8, 2), Layout.striped(8, 2), Layout.of_counts([8, 0])]
    made += [Layout.of_counts([0, 8]), Layout.of_counts([8]), Layout.of_counts([0, 0])]
    assert len({layout.digest for layout in made}) == len(made)
    assert Layout.of_counts([4, 4]).digest == made[0].digest


def test_a_tensor_of_another_length_is_an_error() -> None:
    with pytest.raises(ProblemError, match=r"expected 8 tokens in dim 1"):
        Layout.zigzag(8, 2).shard(torch.zeros(1, 9), 0, dim=1)
    with pytest.raises(ProblemError, match=r"expected \[4, 4\]"):
        Layout.zigzag(8, 2).unshard([torch.zeros(4), torch.zeros(3)], dim=0)
    with pytest.raises(ProblemError, match=r"rank 2 in a layout of 8 tokens on 2 ranks"):
        Layout.zigzag(8, 2).positions(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.contiguous(8.0, 2), "8.0 tokens in 2 parts: expected whole numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout.zigzag(8, True), "8 tokens in True parts: expected whole numbers"),
        (lambda: Layout.balanced(8, 0, None), "8 tokens in 0 parts: expected whole numbers"),
        (lambda: Layout.striped(8, 2, block=1.5), r"block=1.5\): expected a whole number of tokens"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout.of_counts([2.5, 2]), r"of_counts\(\[2.5, 2\]\): expected whole numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout(8.0, ((range(8),),)), r"a layout of 8.0 tokens with .*: expected a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout(8, ((slice(8),),)), "for each rank a tuple of ranges"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout(8, ((0, 1), (2, 3))), r"with the ranges \(\(0, 1\), \(2, 3\)\): expected"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout(8, None), "with the ranges None: expected"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout.of_counts(np.array(3)), r"of_counts\(array\(3\)\): expected whole numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout.of_counts(torch.tensor(3)), r"of_counts\(tensor\(3\)\): expected whole numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout.of_counts([1 << 62, 1 << 62]), f"a layout of {1 << 63} tokens: expected fewer than {1 << 60}"),
        (lambda: Layout.contiguous(1 << 64, 1), f"a layout of {1 << 64} tokens: expected fewer than"),
        (lambda: Layout.of_counts(None), r"of_counts\(None\): expected whole numbers"),  # pyright: ignore[reportArgumentType]
        (
            lambda: Layout.balanced(8, 2, None, sending=-1),
            r"sending=-1\): expected a finite number of pairs, 0 or more",
        ),
        (lambda: Layout.balanced(8, 2, None, sending=math.nan), r"sending=nan\): expected a finite number of pairs"),
        (lambda: Layout.balanced(8, 2, Causal(), heads=0), r"batch=1, heads=0\): expected whole numbers, 1 or more"),
        (lambda: Layout.balanced(8, 2, None, sending=True), r"sending=True\): expected a finite number of pairs"),
        (lambda: Layout.balanced(8, 2, 3), "mask is 3: expected a regard Mask, a regard.cost.Pattern, or None"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_makes_no_layout_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make()


def test_layouts_and_the_counts_of_patterns_need_no_torch() -> None:
    program = (
        "import sys; from regard.parallel.layout import Layout; from regard.cost.pairs import Pattern;"
        "from regard.parallel.pair_counts import pair_counts, rank_pairs;"
        "rank_pairs(pair_counts(Pattern(), 64), Layout.balanced(64, 4, Pattern())); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "random"])
def test_the_balanced_layout_is_near_the_ideal_in_each_step(name: str, ranks: int) -> None:
    tokens = 8191
    generator = torch.Generator().manual_seed(ranks)
    lengths = torch.randint(1, 2000, (40,), generator=generator)
    masks: dict[str, Mask | None] = {
        "none": None,
        "causal": Causal(),
        "window": Causal() & Window(300),
        "documents": Causal() & Documents(torch.repeat_interleave(torch.arange(40), lengths)[:tokens]),
        "random": Causal() & MaskFunction(lambda b, h, q, k: (q // 64 * 7 + k // 64 * 3) % 5 < 2),
    }
    counts = pair_counts(masks[name], tokens)
    layout = balanced_by(counts, ranks)
    pairs = rank_pairs(counts, layout)
    assert max(layout.counts) - min(layout.counts) <= 128
    assert pairs.sum(1).max() / pairs.sum(1).mean() < 1.05
    assert imbalance(pairs) <= imbalance(rank_pairs(counts, Layout.zigzag(tokens, ranks)))
    assert balanced_by(pair_counts(masks[name], tokens), ranks) == layout


def test_the_balanced_layout_keeps_neighbours_together_where_that_is_as_good() -> None:
    assert Layout.balanced(4096, 4, None) == Layout.contiguous(4096, 4)
    assert Layout.balanced(4096, 4, Causal()) == Layout.zigzag(4096, 4)
    assert Layout.balanced(65536, 4, Causal() & Window(16)) == Layout.contiguous(65536, 4)


def test_a_mask_that_keeps_nothing_and_a_sequence_of_nothing_have_a_layout() -> None:
    assert Layout.balanced(100, 4, ~(Causal() | ~Causal())).counts == (25, 25, 25, 25)
    assert Layout.balanced(0, 4, Causal()).counts == (0, 0, 0, 0)
    assert sum(Layout.balanced(3, 4, Causal()).counts) == 3


def test_the_balanced_layout_for_a_slow_link_sends_less_and_takes_no_longer() -> None:
    lengths = torch.randint(1, 1500, (60,), generator=torch.Generator().manual_seed(5))
    mask = Causal() & Documents(torch.repeat_interleave(torch.arange(60), lengths)[:16384])
    counts, sending = pair_counts(mask, 16384), 2000.0
    even, near = Layout.balanced(16384, 8, mask), Layout.balanced(16384, 8, mask, sending=sending)
    pairs = [rank_pairs(counts, layout) for layout in (even, near, Layout.zigzag(16384, 8))]
    times = [time_of(each, even.counts, sending) for each in pairs]
    assert times[1] <= min(times)
    assert steps_of(pairs[1], near.counts).sent.sum() < steps_of(pairs[0], even.counts).sent.sum()


@pytest.mark.parametrize("mask", [Causal() & Window(300), Causal(), Window(2000, 100), None], ids=str)
@pytest.mark.parametrize("make", [Layout.zigzag, Layout.contiguous, Layout.striped])
def test_the_steps_of_a_ring_are_those_of_its_route(mask: Mask | None, make: Callable[[int, int], Layout]) -> None:
    layout = make(4099, 6)
    pairs = rank_pairs(pair_counts(mask, 4099), layout)
    steps, route = ring_steps(pairs, layout.counts), Route(pairs > 0)
    assert len(steps.pairs) == route.steps + 1
    for rank, tokens in enumerate(layout.counts):
        assert (steps.pairs[0, rank], steps.read[0, rank]) == (pairs[rank, rank], tokens * (pairs[rank, rank] > 0))
        assert steps.sent[0, rank] == tokens * (int(route.up[rank] > 0) + int(route.down[rank] > 0))
        for step in range(1, route.steps + 1):
            visits = route.visits(rank, step)
            assert steps.pairs[step, rank] == sum(pairs[rank, visit.origin] for visit in visits)
            assert steps.read[step, rank] == sum(layout.counts[visit.origin] for visit in visits if visit.is_needed)
            assert steps.sent[step, rank] == sum(layout.counts[visit.origin] for visit in visits if visit.goes_on)
