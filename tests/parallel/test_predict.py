"""The predicted time and traffic of sharded sequences, against counts by hand and against each other."""

from collections.abc import Generator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, Prefix, Window
from regard.cost import Attention, Machine, Pattern, cost
from regard.cost.fields import from_fields
from regard.errors import ProblemError
from regard.parallel.layout import Layout
from regard.parallel.pair_counts import pair_counts, rank_pairs
from regard.parallel.predict import Link, exchanged, shardings
from regard.parallel.route import ring_steps
from tests.parallel import cases
from tests.parallel.workers import Workers, workers

FAST = Machine("m", "m", "here", {"bfloat16": 1e12}, bandwidth=1e15, memory=2**40, fast_memory=2**20)
"""Bound by products alone: 1e12 FLOP/s."""


def model(heads=8, kv_heads=2, dim=16, **more):
    fields = {"d_model": 128, "layers": 3, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "vocab": 9, "mlp": 8}
    return from_fields("m", "here", fields | more)


def predicted(tokens, ranks, bandwidth, machine=FAST, **more):
    c = cost(model(**more), context=tokens, machine=machine)
    return {each.name: each for each in shardings(c, ranks, Link(bandwidth))}


def test_a_ring_without_waiting_takes_the_steps_of_its_slowest_rank():
    """4 ranks of 256 tokens, causal: each step has a whole rectangle but the first, a triangle; 4 d FLOPs a pair."""
    found = predicted(1024, 4, 1e18)["ring, contiguous"]
    pairs = 256 * 257 // 2 + 3 * 256**2
    assert found.seconds == pytest.approx(3 * 8 * pairs * 4 * 16 / 1e12)
    assert found.seconds == found.compute_seconds
    assert found.balance == pytest.approx(pairs * 4 / (1024 * 1025 // 2))


def test_zigzag_halves_the_time_of_a_causal_ring():
    found = predicted(4096, 8, 1e18)
    assert found["ring, zigzag"].balance == pytest.approx(1, abs=1e-3)
    assert found["ring, contiguous"].seconds / found["ring, zigzag"].seconds == pytest.approx(1.87, abs=0.02)
    assert found["ring, balanced"].seconds <= found["ring, zigzag"].seconds * 1.01


def test_each_rank_sends_its_keys_and_values_to_the_next_for_all_ranks_but_one():
    found = predicted(1024, 4, 1e9)["ring, zigzag"]
    assert (
        found.sent_bytes == 3 * 3 * 256 * 2 * 2 * 16 * 2
    )  # layers x steps x tokens x key heads x (k, v) x dim x bytes


def test_a_slow_link_is_waited_for():
    found = predicted(1024, 4, 1e3)["ring, zigzag"]
    last = 3 * 8 * 256**2 * 4 * 16 / 1e12  # nothing is sent while the last block is computed with
    assert found.seconds == pytest.approx(found.sent_bytes / 1e3 + last, rel=1e-3)
    assert found.compute_seconds < found.seconds / 1000


def test_a_window_sends_to_the_next_rank_alone():
    window = predicted(1024, 4, 1e9, window=100)["ring, contiguous"]
    assert window.sent_bytes == 3 * 256 * 2 * 2 * 16 * 2
    steps = ring_steps(rank_pairs(pair_counts(Pattern(window=100), 1024), Layout.contiguous(1024, 4)), (256,) * 4)
    assert steps.sent.tolist() == [[256, 256, 256, 0], [0, 0, 0, 0]]
    assert steps.pairs[1].tolist() == [0, 99 * 100 // 2, 99 * 100 // 2, 99 * 100 // 2]


def test_independent_documents_send_nothing():
    found = predicted(1024, 4, 1e9, chunk=256, pattern="c")["ring, contiguous"]
    assert (found.sent_bytes, found.buffer_bytes) == (0, 0)


PATTERNS = st.one_of(
    st.just(Pattern()),
    st.just(Pattern(causal=False)),
    st.builds(lambda n, s: Pattern(window=n, sinks=s), st.integers(1, 50), st.integers(0, 4)),
    st.builds(lambda n: Pattern(chunk=n), st.integers(1, 60)),
)


@given(PATTERNS, st.integers(2, 6), st.integers(12, 90), st.sampled_from(["contiguous", "zigzag", "striped"]))
def test_every_needed_rectangle_is_computed_once_and_its_keys_were_sent_there(pattern, ranks, tokens, name):
    layout = getattr(Layout, name)(tokens, ranks)
    pairs = rank_pairs(pair_counts(pattern, tokens), layout)
    steps = ring_steps(pairs, layout.counts)
    assert steps.pairs.sum() == pairs.sum() == pattern.pairs(queries=tokens, keys=tokens)
    assert (steps.pairs.sum(axis=0) == pairs.sum(axis=1)).all()
    assert (steps.pairs[steps.read == 0] == 0).all()
    needed = np.array([[pairs[i, j] > 0 and i != j for j in range(ranks)] for i in range(ranks)])
    assert steps.sent.sum() >= (needed * np.array(layout.counts)).sum()
    assert steps.sent.sum() <= (ranks - 1) * tokens
    assert not steps.sent[-1].any()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(4, tmp_path_factory.mktemp("four")) as made:
        yield made


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (None, Pattern(causal=False)),
        (Causal(), Pattern()),
        (Causal() & Window(9), Pattern(window=9)),
        (Causal() & (Window(9) | Prefix(2)), Pattern(window=9, sinks=2)),
    ],
)
def test_ring_attend_sends_the_bytes_that_are_predicted(four, name, mask, pattern):
    layout = getattr(Layout, name)(53, 4)
    q, k, v = (torch.randn(2, heads, 53, dim) for heads, dim in ((4, 16), (2, 16), (2, 8)))
    measured = four.run(cases.sent_in_ring, q=q, k=k, v=v, mask=mask, layout=layout, timeout=30.0)
    steps = ring_steps(rank_pairs(pair_counts(pattern, 53), layout), layout.counts)
    assert measured == [2 * tokens * 2 * (16 + 8) * 4 for tokens in steps.sent.sum(axis=0).tolist()]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (8, 2), (6, 3), (3, 1)])
def test_ulysses_sends_the_bytes_that_are_predicted(four, heads, kv_heads):
    q, k, v = (torch.randn(2, n, 53, dim) for n, dim in ((heads, 16), (kv_heads, 16), (kv_heads, 8)))
    layout = Layout.contiguous(53, 4)
    measured = four.run(cases.sent_by_ulysses, q=q, k=k, v=v, mask=Causal(), layout=layout, timeout=30.0)
    a = Attention(heads, kv_heads, 16, 8)
    found = exchanged(a, layout.counts, cost(model(), context=53, batch=2, dtype="float32"))
    assert measured == [sum(each) for each in zip(*found, strict=True)]


def test_ulysses_exchanges_before_and_after_it_computes():
    found = predicted(1024, 4, 1e9)["Ulysses"]
    c = cost(model(), context=1024, machine=FAST)
    to_heads = 3 * 256 * (2 * 16 + 1 * 32) * 2  # to 3 ranks: 2 query heads and a key head
    to_tokens = 768 * 2 * 17 * 4  # of 768 tokens: 2 heads, with log-sum-exp, in float32
    assert found.sent_bytes == 3 * (to_heads + to_tokens)
    assert found.seconds == pytest.approx(c.prompt.attention.flops / 4 / 1e12 + found.sent_bytes / 1e9)
    assert found.balance == 1


def test_layers_that_attend_twice_compute_and_send_twice():
    once, twice = ({k: v.sent_bytes for k, v in predicted(1024, 4, 1e9, calls=n).items()} for n in (1, 2))
    assert twice == {name: 2 * sent for name, sent in once.items()}
    fast, slow = (predicted(1024, 4, 1e18, calls=n)["ring, contiguous"].compute_seconds for n in (1, 2))
    assert slow == pytest.approx(2 * fast)


def test_ulysses_leaves_ranks_without_heads_idle():
    found = predicted(1024, 16, 1e18)["Ulysses"]
    assert found.balance == 2  # 8 heads on 16 ranks
    assert predicted(1024, 3, 1e18)["Ulysses"].balance == pytest.approx(3 / (8 / 3))


def test_a_rank_holds_the_weights_its_share_of_the_cache_and_the_buffers():
    c = cost(model(), context=1024, machine=FAST)
    found = predicted(1024, 4, 1e9)["ring, zigzag"]
    assert found.buffer_bytes == 2 * 256 * 2 * 2 * 16 * 2
    assert found.memory_bytes == c.weight_bytes + c.cache_bytes // 4 + found.buffer_bytes


def test_latents_travel_expanded():
    c = cost("deepseek-v2-lite", context=4096, machine="h100")
    ring = next(iter(shardings(c, 4, Link(1e9))))
    assert ring.sent_bytes == 27 * 3 * 1024 * 16 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("llama-3-8b", 1, "1 ranks for 8,192 tokens: expected 2 ranks or more"),
        ("llama-3-8b", 9000, "9000 ranks for 8,192 tokens"),
        ("transformer-base", 4, "expected layers of attention alone"),
    ],
)
def test_what_cannot_be_sharded_says_why(name, ranks, message):
    c = cost(name, context=8192 if name == "llama-3-8b" else 512, machine="h100")
    with pytest.raises(ProblemError, match=message):
        list(shardings(c, ranks, Link(1e9)))
    with pytest.raises(ProblemError, match="give the machine of a rank"):
        list(shardings(cost("llama-3-8b"), 2, Link(1e9)))
    for rate in (0, -1.0, float("nan"), True, "100GB/s"):
        with pytest.raises(ProblemError, match=rf"^link of {rate!r} bytes/s: expected a finite number above 0"):
            Link(rate)
    calls = {
        "c is 'llama-3-8b': expected a ModelCost, such as cost": ("llama-3-8b", 2, Link(1e9)),
        "link is 1000000000.0: expected a Link, such as Link": (c, 2, 1e9),
        "2.5 ranks for 8,192 tokens: expected 2 ranks": (cost("llama-3-8b", machine="h100"), 2.5, Link(1e9)),
    }
    for said, call in calls.items():
        with pytest.raises(ProblemError, match=f"^{said}"):
            shardings(*call)
