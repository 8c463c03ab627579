"""Shared prefixes: what rows have in common is computed once, and every row gets what it would get alone."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import Causal, ProblemError, Window, attend, observe_calls, shared_prefix
from regard.cache.paged import keep_tokens
from regard.cache.pool import PagePool
from regard.cache.sequence import Sequence
from regard.extend import spec
from regard.scores import Dot
from regard.shared_prefix import attend_shared
from regard.storage.codec import Codec, Int4, Int8
from regard.storage.stored import StoredTensor

QK, V = 16, 24


def tokens_of(count: int, batch: int = 1, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, kv_heads, count, QK), torch.randn(batch, kv_heads, count, V)


def calls(run: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What comes out, and q's batch, its queries and the keys of every call that was made for it."""
    seen: list[tuple[int, ...]] = []
    with observe_calls(lambda call: seen.append((call.q.shape[0], call.q.shape[2], call.k.shape[2]))):
        out = run()
    return out, seen


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
def test_a_shared_prefix_is_computed_once(queries: int, mask: Causal | None, sink: bool):
    q, prefix, own = torch.randn(5, 4, queries, QK), tokens_of(97), tokens_of(11, batch=5)
    words = {"mask": mask, "sink": torch.randn(4) if sink else None, "softcap": 3.0, "scale": 0.3, "score": Dot()}
    out, seen = calls(lambda: attend_shared(q, *own, prefix=prefix, **words))
    whole = [torch.cat([one.expand(5, -1, -1, -1), t], 2) for one, t in zip(prefix, own, strict=True)]
    torch.testing.assert_close(out, attend(q, *whole, **words))
    assert seen == [(5, queries, 11), (1, 5 * queries, 97)]


@pytest.mark.parametrize(("batch", "queries"), [(0, 1), (3, 0), (0, 0)])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["all", "causal"])
def test_a_call_of_no_rows_or_no_queries_is_empty(batch: int, queries: int, mask: Causal | None):
    q, own = torch.randn(batch, 4, queries, QK, requires_grad=True), tokens_of(11, batch=batch)
    out = attend_shared(q, *own, prefix=tokens_of(97), mask=mask)
    assert out.shape == attend(q, *own, mask=mask).shape == (batch, 4, queries, V)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    stored = (StoredTensor.of(t) for t in own)
    assert attend_shared(q, *stored, mask=mask).shape == out.shape


def test_gradients_flow_to_the_prefix_from_every_row():
    q, prefix, own = torch.randn(3, 4, 2, QK), tokens_of(31), tokens_of(5, batch=3)
    leaves = [t.double().requires_grad_() for t in (q, *prefix, *own)]
    q, k0, v0, k1, v1 = leaves
    shared = attend_shared(q, k1, v1, prefix=(k0, v0), mask=Causal()).square().sum()
    whole = [torch.cat([a.expand(3, -1, -1, -1), b], 2) for a, b in ((k0, k1), (v0, v1))]
    expected = attend(q, *whole, mask=Causal()).square().sum()
    for mine, theirs in zip(torch.autograd.grad(shared, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs)


def begun(pool: PagePool, common: int, own: list[int]) -> list[Sequence]:
    """Sequences of so many tokens of their own behind common ones."""
    root = pool.sequence()
    pool.append([root], *tokens_of(common))
    rows = [root.fork() for _ in own]
    for row, count in zip(rows, own, strict=True):
        pool.append([row], *tokens_of(count))
    root.free()
    return rows


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("codec", [None, Int8(), Int4(residual=16, rotate=True)], ids=["plain", "int8", "int4 rotated"])
def test_what_pages_have_in_common_is_found(codec: Codec | None, queries: int):
    pool = PagePool(page=16, codec=codec)
    rows = begun(pool, 211, [3, 71, 17, 0])
    k, v = pool.append(rows, *tokens_of(queries, batch=4))
    q = torch.randn(4, 4, queries, QK)
    out, seen = calls(lambda: attend_shared(q, k, v, mask=Causal()))
    torch.testing.assert_close(out, attend(q, k, v, mask=Causal()))
    assert seen[1][:2] == (1, 4 * queries)
    assert seen[0][2] + seen[1][2] == k.shape[2]  # the longest row: what is shared, and the rest
    assert seen[1][2] >= (208 if codec is None else 128)


def test_groups_within_groups_are_found():
    pool = PagePool(page=16)
    first, other = pool.sequence(), pool.sequence()
    pool.append([first], *tokens_of(160))
    pool.append([other], *tokens_of(160))
    branch = first.fork()
    pool.append([branch], *tokens_of(112))
    rows = [branch, other, first, branch.fork(), other.fork(), pool.sequence()]
    k, v = pool.append(rows, *tokens_of(7, batch=6))
    q = torch.randn(6, 4, 7, QK)
    out, seen = calls(lambda: attend_shared(q, k, v, mask=Causal()))
    torch.testing.assert_close(out, attend(q, k, v, mask=Causal()))
    assert seen == [(6, 7, 7), (1, 21, 160), (1, 14, 112), (1, 14, 160)]


def test_a_short_stretch_of_all_does_not_hide_a_long_one_of_some():
    pool = PagePool(page=16)
    root = pool.sequence()
    pool.append([root], *tokens_of(32))
    branch = root.fork()
    pool.append([branch], *tokens_of(96))
    k, v = pool.append([root, branch, branch.fork()], *tokens_of(1, batch=3))
    q = torch.randn(3, 2, 1, QK)
    out, seen = calls(lambda: attend_shared(q, k, v))
    torch.testing.assert_close(out, attend(q, k, v))
    assert seen == [(3, 1, 33), (1, 2, 128)]


def test_rows_that_share_nothing_are_one_call():
    pool = PagePool(page=16)
    rows = [pool.sequence(), pool.sequence()]
    k, v = pool.append(rows, *tokens_of(100, batch=2))
    q = torch.randn(2, 2, 1, QK)
    out, seen = calls(lambda: attend_shared(q, k, v, mask=Causal()))
    assert torch.equal(out, attend(q, k, v, mask=Causal()))
    assert seen == [(2, 1, 100)]


def test_no_query_stands_within_what_is_shared():
    """Forks that were appended to nothing: the last pages of all are the same, and queries stand in them."""
    pool = PagePool(page=16)
    rows = begun(pool, 128, [0, 0, 0])
    k, v = pool.append(rows, *tokens_of(0, batch=3))
    for queries, shared in ((1, 128), (2, 112), (19, 96)):
        q = torch.randn(3, 2, queries, QK)
        out, seen = calls(lambda q=q: attend_shared(q, k, v, mask=Causal()))
        torch.testing.assert_close(out, attend(q, k, v, mask=Causal()))
        assert seen[1] == (1, 3 * queries, shared)


def test_pages_that_are_shared_by_their_tokens_count_as_well():
    pool, ids = PagePool(page=16), list(range(100))
    first = pool.sequence(ids)
    k, v = tokens_of(100)
    pool.append([first], k, v)
    second = pool.sequence(ids)
    pool.append([second], k[:, :, second.tokens :], v[:, :, second.tokens :])
    stored = pool.append([first, second], *tokens_of(1, batch=2))
    q = torch.randn(2, 2, 1, QK)
    out, seen = calls(lambda: attend_shared(q, *stored, mask=Causal()))
    torch.testing.assert_close(out, attend(q, *stored, mask=Causal()))
    assert seen == [(2, 1, 5), (1, 2, 96)]


@spec
class OwnCausal(Causal):
    """A class whose `keep` may be any."""


def test_what_cannot_be_shared_is_refused():
    q, prefix, own = torch.randn(2, 2, 3, QK), tokens_of(40), tokens_of(5, batch=2)
    with pytest.raises(ProblemError, match="expected None or Causal"):
        attend_shared(q, *own, prefix=prefix, mask=Window(4))
    with pytest.raises(ProblemError, match=r"mask is OwnCausal\(\): expected None or Causal"):
        attend_shared(q, *own, prefix=prefix, mask=OwnCausal())
    with pytest.raises(ProblemError, match=r"the keys of the prefix are \[1, 1, 40, 16\] and k is \[2, 2, 5, 16\]"):
        attend_shared(q, *own, prefix=tokens_of(40, kv_heads=1))
    with pytest.raises(ProblemError, match=r"are \[1, 2, 40, 8\] and v is .*: expected \[1, 2, keys, 24\]"):
        attend_shared(q, *own, prefix=(prefix[0], prefix[1][..., :8]))
    for wrong in (None, 3, [q]):
        with pytest.raises(ProblemError, match=f"q is {type(wrong).__name__}: expected a tensor"):
            attend_shared(cast(Any, wrong), *own, prefix=prefix)
    for sink in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64), torch.zeros(3)):
        with pytest.raises(ProblemError, match=r"sink is torch.*: expected a float tensor with a logit per query head"):
            attend_shared(q, *own, prefix=prefix, sink=sink)
    with pytest.raises(ProblemError, match="k is NoneType"):
        attend_shared(q, *cast(Any, (None, None)), prefix=prefix)
    with pytest.raises(ProblemError, match="k is Tensor and no prefix is given"):
        attend_shared(q, *own)
    with pytest.raises(ProblemError, match=r"the keys of the prefix are \[2, 2, 40, 16\]: expected \[1, "):
        attend_shared(q, *own, prefix=tokens_of(40, batch=2))
    with pytest.raises(ProblemError, match=r"expected \(keys, values\)"):
        attend_shared(q, *own, prefix=prefix[0])
    with pytest.raises(ProblemError, match="3 queries, and a row with 1 keys after the prefix"):
        attend_shared(q, own[0][:, :, :1], own[1][:, :, :1], prefix=prefix, mask=Causal())


def test_as_many_keys_as_queries_before_the_last_are_enough():
    q, prefix, own = torch.randn(2, 2, 3, QK), tokens_of(40), tokens_of(2, batch=2)
    out = attend_shared(q, *own, prefix=prefix, mask=Causal())
    whole = [torch.cat([one.expand(2, -1, -1, -1), t], 2) for one, t in zip(prefix, own, strict=True)]
    torch.testing.assert_close(out, attend(q, *whole, mask=Causal()))


def test_handles_serve_as_a_prefix():
    pool, own = PagePool(page=16, codec=Int8()), PagePool(page=16)
    prefix: tuple[StoredTensor, StoredTensor] = pool.append([pool.sequence()], *tokens_of(150))
    rows = [own.sequence() for _ in range(3)]
    own.append(rows[:1], *tokens_of(20))
    k, v = own.append(rows, *tokens_of(2, batch=3))
    q = torch.randn(3, 4, 2, QK)
    out = attend_shared(q, k, v, prefix=prefix, mask=Causal())
    for row, count in enumerate((22, 2, 2)):
        whole = [
            torch.cat([a.dense(), b.dense()[row : row + 1, :, :count]], 2) for a, b in zip(prefix, (k, v), strict=True)
        ]
        torch.testing.assert_close(out[row : row + 1], attend(q[row : row + 1], *whole, mask=Causal()))


def test_less_than_a_call_is_worth_is_not_split_off(monkeypatch: pytest.MonkeyPatch):
    pool = PagePool(page=16)
    k, v = pool.append(begun(pool, 48, [1, 1]), *tokens_of(1, batch=2))
    q = torch.randn(2, 2, 1, QK)
    assert len(calls(lambda: attend_shared(q, k, v))[1]) == 1
    monkeypatch.setattr(shared_prefix, "LEAST", 48)
    assert calls(lambda: attend_shared(q, k, v))[1] == [(2, 1, 2), (1, 2, 48)]


def test_nothing_is_shared_behind_a_page_that_is_part_empty():
    """Where tokens were forgotten from among codes, the last page of codes is not full."""
    pool = PagePool(page=16, codec=Int8(keys="token", residual=96, sinks=0))
    first = pool.sequence()
    pool.append([first], *tokens_of(220))
    keep_tokens(pool.storage, [first], torch.arange(20, 220).expand(1, 2, 200))
    k, v = pool.append([first, first.fork()], *tokens_of(1, batch=2))
    q = torch.randn(2, 2, 1, QK)
    out, seen = calls(lambda: attend_shared(q, k, v, mask=Causal()))
    torch.testing.assert_close(out, attend(q, k, v, mask=Causal()))
    assert seen == [(2, 1, 201 - 96), (1, 2, 96)]
