"""Kept pairs in closed form, against the schedule of the same mask and against every pair tried."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from regard import Causal, Dilated, Documents, Prefix, Window
from regard.cost.pairs import Pattern
from regard.errors import ProblemError
from regard.plan.tiling import schedule


def mask_of(p: Pattern, keys: int):
    """The mask that a pattern stands for, as its docstring says."""
    if p.window is not None:
        if not p.causal:
            return Window(p.window, p.window)
        return Causal() & (Window(p.window) | Prefix(p.sinks) if p.sinks else Window(p.window))
    if p.chunk:
        return Causal() & Documents(torch.arange(keys) // p.chunk)
    if p.prefix:
        return Causal() | Prefix(p.prefix)
    if p.step > 1:
        return Causal() & Dilated(p.step)
    return Causal() if p.causal else None


size = st.integers(1, 90)
PATTERNS = st.one_of(
    st.just(Pattern()),
    st.just(Pattern(causal=False)),
    st.builds(Pattern, window=size),
    st.builds(Pattern, window=size, causal=st.just(False)),
    st.builds(Pattern, window=size, sinks=st.integers(0, 20)),
    st.builds(Pattern, prefix=size),
    st.builds(Pattern, chunk=size),
    st.builds(Pattern, step=st.integers(1, 9)),
)


@given(PATTERNS, st.integers(1, 97), st.integers(0, 61))
def test_pairs_are_those_of_the_schedule(pattern, queries, past):
    keys = queries + past
    tiles = schedule(mask_of(pattern, keys), batch=1, heads=1, queries=queries, keys=keys, offset=past, tile=16)
    assert pattern.pairs(queries=queries, keys=keys) == tiles.pairs


def keeps(p: Pattern, q: int, k: int) -> bool:
    """Whether the query at position q may see key k, by the definition of the pattern."""
    if p.prefix and k < p.prefix:
        return True
    if p.chunk:
        return k <= q and k // p.chunk == q // p.chunk
    if p.window is not None:
        return (k <= q or not p.causal) and (abs(q - k) < p.window or k < p.sinks)
    return (k <= q or not p.causal) and (q - k) % p.step == 0


@given(PATTERNS, st.integers(0, 14), st.integers(0, 14), st.integers(-6, 12))
def test_pairs_are_those_of_every_pair_tried_at_any_offset(pattern, queries, keys, offset):
    tried = sum(keeps(pattern, q, k) for q in range(offset, offset + queries) for k in range(keys))
    assert pattern.pairs(queries=queries, keys=keys, offset=offset) == tried


@given(PATTERNS, st.integers(0, 14), st.integers(0, 14))
@example(Pattern(step=4), 2, 12)
def test_keys_are_seen_once_however_many_queries_see_them(pattern, queries, past):
    keys = queries + past
    seen = sum(any(keeps(pattern, q, k) for q in range(past, keys)) for k in range(keys))
    assert pattern.keys_seen(queries=queries, keys=keys) == seen


def test_lengths_beyond_every_schedule_are_exact():
    n = 10**9
    assert Pattern().pairs(queries=n, keys=n) == n * (n + 1) // 2
    assert Pattern(window=4096).pairs(queries=n, keys=n) == 4096 * n - 4095 * 4096 // 2
    assert Pattern(chunk=8192).pairs(queries=8192 * 10**5, keys=8192 * 10**5) == 10**5 * (8192 * 8193 // 2)


@given(PATTERNS.filter(lambda p: p.causal and p.step == 1 and not p.prefix), st.integers(1, 300))
def test_a_cache_stores_no_more_than_the_next_query_may_see(pattern, context):
    seen = [pattern.pairs(queries=1, keys=n + 1, offset=n) for n in range(context)]
    assert pattern.stored(context) == max(seen)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 0}, {"window": 4.5}, {"window": 4, "sinks": "1"}, {"sinks": 4}, {"window": 4, "chunk": 4},
        {"prefix": 3, "causal": False}, {"step": 0},
    ],
)  # fmt: skip
def test_patterns_that_contradict_themselves_are_refused(fields):
    with pytest.raises(ProblemError, match=r"expected|without a window"):
        Pattern(**fields)
