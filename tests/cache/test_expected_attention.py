"""ExpectedAttention: the moments of queries, the closed form, and the tokens that stay."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, ProblemError
from regard.cache import expected_attention as room
from regard.cache.expected_attention import ExpectedAttention, Moments, expected_scores
from regard.cache.kv_cache import KVCache
from regard.describe.mask_by_table import TensorMask
from regard.describe.position import Rope
from regard.describe.rope_scaling import DynamicNTK, Yarn
from regard.storage.stored import Latent
from tests.cache.evicted import Stream, feed, inside, kept_by, stream
from tests.own_rope import Mirrored


@given(sizes=st.lists(st.integers(1, 13), min_size=1, max_size=5))
def test_moments_of_parts_join_to_those_of_the_whole(sizes: list[int]):
    q = 3 + torch.randn(2, 3, sum(sizes), 5, dtype=torch.float64)
    every = torch.ones(1, 1, sum(sizes), dtype=torch.bool)
    joined = None
    for part, counts in zip(q.split(sizes, dim=2), every.split(sizes, dim=2), strict=True):
        joined = Moments.of(part, counts) if joined is None else joined | Moments.of(part, counts)
    assert joined is not None
    torch.testing.assert_close(joined.mean, q.mean(2))
    expected = torch.stack([torch.stack([torch.cov(head.T, correction=0) for head in row]) for row in q])
    torch.testing.assert_close(joined.covariance, expected.view_as(joined.covariance))


def test_moments_of_no_query_change_nothing():
    q = torch.randn(1, 2, 7, 3)
    some, none = Moments.of(q, torch.ones(1, 1, 7)), Moments.of(q, torch.zeros(1, 1, 7))
    for joined in (some | none, none | some):
        assert all(map(torch.equal, joined, some))


def test_the_closed_form_is_the_mean_over_queries():
    """Of 10^6 normal queries; the standard error of the mean is about 1e-3."""
    made = torch.Generator().manual_seed(0)
    root = 0.4 * torch.randn(3, 3, generator=made)
    q = torch.tensor([0.5, -0.2, 0.1]) + torch.randn(10**6, 3, generator=made) @ root.T
    k = torch.randn(1, 1, 5, 3, generator=made)
    found = expected_scores(Moments.of(q[None, None], torch.ones(1, 1, 1)), k, scale=0.7)
    torch.testing.assert_close(found[0, 0, 0].exp(), (0.7 * q @ k[0, 0].T).exp().mean(0), rtol=1e-2, atol=0)


def dense_scores(q: Tensor, s: Stream, tokens: int, *, sinks: int, scale: float, values: bool = True) -> Tensor:
    """By the definition, from the queries [batch, heads, queries, dim] that count; of keys sinks <= j < tokens."""
    scores = torch.zeros(*s.k.shape[:2], tokens, dtype=torch.float64)
    group = q.shape[1] // s.k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            mean, covariance = q[b, h].mean(0), torch.cov(q[b, h].T, correction=0)
            k = s.k[b, h // group, sinks:tokens]
            z = torch.stack([(scale * mean @ one + scale**2 / 2 * one @ covariance @ one).exp() for one in k])
            scores[b, h // group, sinks:] += z / z.sum() / group
    return scores * s.v[:, :, :tokens].norm(dim=-1) if values else scores


def best(scores: Tensor, budget: int, sinks: int, recent: int = 0) -> Tensor:
    """The tokens that stay, [batch, kv_heads, budget]."""
    middle = scores[:, :, sinks : scores.shape[2] - recent].argsort(-1, descending=True) + sinks
    ends = [torch.arange(n, m) for n, m in ((0, sinks), (scores.shape[2] - recent, scores.shape[2]))]
    places = [*(end.expand(*scores.shape[:2], -1) for end in ends), middle[:, :, : budget - sinks - recent]]
    return torch.cat(places, dim=2).sort(-1).values


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(("sinks", "recent"), [(4, 0), (0, 3)])
@pytest.mark.parametrize("sizes", [[40], [2, 17, 1, 20], [33, 7]], ids=str)
def test_the_keys_of_the_most_expected_attention_stay(sizes: list[int], sinks: int, recent: int, values: bool):
    s = stream(60)
    s.v[..., 1:] *= 20 * torch.rand(2, 3, 60, 1)  # so that norms of values matter beside the first number
    word = ExpectedAttention(13, sinks=sinks, recent=recent, values=values)
    if len(sizes) > 1:
        word = ExpectedAttention(13, sinks=sinks, recent=recent, values=values, every=27)  # when 40 are there
    found = kept_by(word, s, [*sizes, 1])[-1]
    scores = dense_scores(s.q[:, :, sinks:40], s, 40, sinks=sinks, scale=8**-0.5, values=values)
    assert torch.equal(found, best(scores, 13, sinks, recent))


def test_many_queries_and_keys_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch):
    s = stream(60)
    monkeypatch.setattr(room, "CHUNK", 7)
    monkeypatch.setattr(room, "TILE", 2 * 6 * 8 * 5)  # five keys at a time
    scores = dense_scores(s.q[:, :, 4:40], s, 40, sinks=4, scale=8**-0.5)
    cache = KVCache(evict=ExpectedAttention(13))
    feed(cache, s, [40])
    watch, store = inside(cache)
    torch.testing.assert_close(watch.scores(store), scores)


def test_queries_count_after_their_keys_are_gone():
    s = stream(60, heads=3, kv_heads=3)
    found = kept_by(ExpectedAttention(13, sinks=2), s, [40, 8, 1])
    scores = dense_scores(s.q[:, :, 2:48], s, 48, sinks=2, scale=8**-0.5)
    for b in range(2):
        for h in range(3):
            alive = [*found[1][b, h].tolist(), *range(40, 48)]
            top = sorted(alive[2:], key=lambda j: -scores[b, h, j])[:11]
            assert found[2][b, h].tolist() == [0, 1, *sorted(top)]


def test_the_scale_goes_along():
    s, cache = stream(60), KVCache(evict=ExpectedAttention(13, values=False))
    q, k, v = s.tokens(0, 40)
    cache.append(k, v)
    cache.observe(q, scale=0.9)
    scores = dense_scores(q[:, :, 4:], s, 40, sinks=4, scale=0.9, values=False)
    assert torch.equal(feed(cache, s, [1], 40)[0], best(scores, 13, 4))


def test_padding_asks_nothing():
    """Queries that do not see their own token are no text: what they are changes nothing."""
    s, keep = stream(60), torch.ones(2, 1, 40, 40, dtype=torch.bool)
    keep[1, :, :, :9] = False  # the first nine tokens of the second row
    kept = []
    for noise in (0, 100):
        cache = KVCache(evict=ExpectedAttention(13, values=False))
        q, k, v = s.tokens(0, 40)
        q = q.clone()
        q[1, :, :9] += noise
        cache.append(k, v)
        cache.observe(q, mask=Causal() & TensorMask(keep))
        kept += feed(cache, s, [1], 40)
    assert torch.equal(*kept)
    scores = dense_scores(s.q[1:, :, 9:40], s.rows([1]), 40, sinks=4, scale=8**-0.5, values=False)
    assert torch.equal(kept[0][1:], best(scores, 13, 4))


ROPES = [
    pytest.param(Rope(8, base=100.0), id="rope"),
    pytest.param(Rope(8, base=100.0, fraction=0.5, interleaved=True), id="half of the dimensions"),
    pytest.param(Rope(8, base=100.0, scaling=Yarn(4.0, original=16)), id="yarn, with a factor"),
]


@pytest.mark.parametrize("rope", ROPES)
def test_with_a_rope_queries_are_taken_before_it_and_turned_ahead(rope: Rope):
    """The paper's form: moments before the rotation, turned by the mean rotation of the next positions."""
    s = stream(60)
    plain = s.q + torch.tensor([1.0, 0.5, -0.5, 0.0, 1.0, 0.0, 0.5, -1.0])
    turned = Stream(rope.rotate(plain), rope.rotate(s.k), s.v)
    found = kept_by(ExpectedAttention(13, rope=rope, future=7, values=False), turned, [40, 1])[1]
    matrices = torch.stack(
        [rope.rotate(torch.eye(8, dtype=torch.float64)[None, :, None], at)[0, :, 0] for at in range(40, 47)]
    )
    ahead = plain[:, :, 4:40] @ matrices.mean(0)
    scores = dense_scores(ahead, turned, 40, sinks=4, scale=8**-0.5, values=False)
    assert torch.equal(found, best(scores, 13, 4))


def test_with_a_rope_positions_are_those_of_the_sequence_after_tokens_went():
    rope = Rope(8, base=100.0)
    s = stream(60, heads=3, kv_heads=3)
    turned = Stream(rope.rotate(s.q), rope.rotate(s.k), s.v)
    word = ExpectedAttention(13, rope=rope, future=7, values=False)
    cache = KVCache(evict=word)
    feed(cache, turned, [40, 8, 1])
    torch.testing.assert_close(inside(cache)[0]._moments.mean, s.q[:, :, 4:48].mean(2))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ProblemError, match="DynamicNTK depends on the length"):
        ExpectedAttention(64, rope=Rope(8, scaling=DynamicNTK(2.0, original=64)))
    with pytest.raises(ProblemError, match="Mirrored has a rotate of its own, which cannot be undone: take rope=None"):
        ExpectedAttention(64, rope=Mirrored(8))
    cache = KVCache(evict=ExpectedAttention(13, rope=Rope(16)))
    q, k, v = stream(60).tokens(0, 40)
    cache.append(k, v)
    with pytest.raises(ProblemError, match=r"queries have 8 dimensions, and .* rotates 16"):
        cache.observe(q)


def test_a_large_score_does_not_overflow():
    s = stream(60)
    scaled = Stream(s.q * 50, s.k * 50, s.v)
    found = kept_by(ExpectedAttention(13, values=False), scaled, [40, 1])[1]
    assert found.shape[2] == 13
    cache = KVCache(evict=ExpectedAttention(13, values=False))
    feed(cache, scaled, [40])
    watch, store = inside(cache)
    assert watch.scores(store).isfinite().all()


def test_latents_have_no_values_to_look_at():
    with pytest.raises(ProblemError, match="values=False"):
        KVCache(Latent(rank=6), evict=ExpectedAttention(13))
    s, cache = stream(60, kv_heads=1), KVCache(Latent(rank=6), evict=ExpectedAttention(13, values=False))
    cache.append(s.k[:, :, :40])
    cache.observe(s.q[:, :, :40])
    cache.append(s.k[:, :, 40:41])
    assert cache.tokens == 14


def test_the_worked_example_of_one_number():
    """mu = 1, variance 4, scale 1/2: a key k scores k / 2 + k^2 / 2."""
    q = torch.tensor([[[[3.0], [-1.0]]]])
    found = expected_scores(Moments.of(q, torch.ones(1, 1, 2)), torch.tensor([[[[1.0], [-2.0], [3.0]]]]), scale=0.5)
    assert found.flatten().tolist() == [1.0, 1.0, 6.0]
    assert math.isclose(float(found.logsumexp(-1)), 6 + math.log1p(2 * math.exp(-5)), rel_tol=1e-6)
