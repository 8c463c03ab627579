"""Column sums: the weights of the definition, summed, without n x n."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from regard import Causal, KeyLengths, ProblemError, Window
from regard.cache import query_observer as room
from regard.cache.query_observer import QueryWindow
from regard.describe.mask import Mask
from regard.describe.mask_by_table import TensorMask
from regard.extend import spec
from tests.cache.evicted import sums_of_weights


def dense_sums(q: Tensor, k: Tensor, keep: Tensor, scale: float | None = None) -> Tensor:
    """By the definition; keep broadcasts to [batch, heads, queries, keys]."""
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * (q.shape[3] ** -0.5 if scale is None else scale)
    a = s.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0)
    return a.sum(2).unflatten(1, (-1, group)).mean(2)


def made(queries: int, keys: int, heads: int = 6, kv_heads: int = 3, dtype: torch.dtype = torch.float64):
    q, k = (
        torch.randn(2, heads, queries, 8, dtype=torch.float64),
        torch.randn(2, kv_heads, keys, 8, dtype=torch.float64),
    )
    return (2 * q).to(dtype), k.to(dtype)


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@given(
    queries=st.integers(1, 41),
    before=st.integers(0, 23),
    kv_heads=st.sampled_from([1, 2, 6]),
    tile=st.sampled_from([1, 97, 2**11, 2**20]),
)
def test_they_are_those_of_the_dense_weights(queries: int, before: int, kv_heads: int, tile: int):
    q, k = made(queries, queries + before, 6, kv_heads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "TILE", tile)
        found = sums_of_weights(q, k)
    torch.testing.assert_close(found, dense_sums(q, k, causal(queries, queries + before)))


def test_old_keys_are_visible_to_all_new_queries():
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    expected = torch.tensor([[[0.45, 0.45, 0.45, 0.45, 0.2]]])  # 1/4 + 1/5 each; the last key is seen by one query
    torch.testing.assert_close(sums_of_weights(q, k), expected)


@pytest.mark.parametrize("tile", [97, 2**20])
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(Causal() & KeyLengths(torch.tensor([29, 11])), id="padding"),
        pytest.param(Causal() & Window(7), id="window"),
        pytest.param(TensorMask(torch.rand(2, 6, 17, 29, generator=torch.Generator().manual_seed(1)) > 0.4), id="any"),
    ],
)
def test_a_mask_counts_as_attend_has_it(mask: Mask, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "TILE", tile)
    q, k = made(17, 29)
    b, h, i, j = (
        torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate((2, 6, 17, 29))
    )
    keep = mask.mask if isinstance(mask, TensorMask) else mask.keep(b, h, i + 12, j)
    torch.testing.assert_close(sums_of_weights(q, k, mask), dense_sums(q, k, keep))


def test_a_key_that_no_query_sees_gets_nothing_whatever_it_holds():
    q, k = made(13, 13)
    k[1, :, 5:] = torch.nan
    sums = sums_of_weights(q, k, Causal() & KeyLengths(torch.tensor([13, 5])))
    assert (sums[1, :, 5:] == 0).all()
    assert sums[0].sum() == pytest.approx(13 * 3)


def test_a_query_that_sees_nothing_gives_nothing():
    q, k = made(5, 5)
    hidden = torch.ones(5, 5, dtype=torch.bool)
    hidden[2] = False
    assert sums_of_weights(q, k, TensorMask(hidden)).sum(-1) == pytest.approx(torch.full((2, 3), 4.0).numpy())


def test_the_scale_is_that_of_the_call():
    q, k = made(11, 11)
    torch.testing.assert_close(sums_of_weights(q, k, scale=0.05), dense_sums(q, k, causal(11, 11), 0.05))


@pytest.mark.parametrize("tile", [97, 2**20])
def test_half_precision_is_summed_in_float32(tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "TILE", tile)
    q, k = made(301, 307, dtype=torch.bfloat16)
    found = sums_of_weights(q, k)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), dense_sums(q.double(), k.double(), causal(301, 307)), rtol=1e-5, atol=1e-5
    )


def test_a_mask_that_does_not_fit_is_refused():
    q, k = made(5, 7)
    with pytest.raises(ProblemError, match="TensorMask"):
        sums_of_weights(q, k, TensorMask(torch.ones(5, 6, dtype=torch.bool)))
    with pytest.raises(ProblemError, match="mask is Tensor: expected a regard mask"):
        sums_of_weights(q, k, torch.ones(5, 7, dtype=torch.bool))


def test_a_part_of_the_queries_keeps_its_places():
    q, k = made(17, 29)
    keep = torch.rand(17, 29) > 0.4
    for mask, kept in ((None, causal(17, 29)), (TensorMask(keep), keep)):
        whole = QueryWindow.last(q, 29, mask)
        some = whole.between(3, 11).column_sums(k)[:, :, :29]
        torch.testing.assert_close(some, dense_sums(q[:, :, 3:11], k, kept[3:11]))
        cropped = whole.cropped(20)  # the queries of tokens 12 to 19
        torch.testing.assert_close(cropped.column_sums(k), dense_sums(q[:, :, :8], k[:, :, :20], kept[:8, :20]))
        rows = torch.tensor([1, 1, 0])
        torch.testing.assert_close(whole.selected(rows).column_sums(k[rows]), dense_sums(q[rows], k[rows], kept))


def test_rows_that_were_selected_keep_their_rows_of_the_mask():
    q, k = made(7, 7)
    keep = torch.rand(2, 1, 7, 7) > 0.4
    rows = torch.tensor([1, 0, 1])
    found = QueryWindow.last(q, 7, TensorMask(keep)).selected(rows).column_sums(k[rows])
    torch.testing.assert_close(found, dense_sums(q[rows], k[rows], keep[rows]))


def test_8192_tokens_take_a_few_tiles_of_memory():
    """All weights would be 2 GiB. Counted by torch: what its allocator gave out and had not got back, at most."""
    q, k = torch.randn(1, 8, 8192, 16), torch.randn(1, 2, 8192, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        QueryWindow.last(q, k.shape[2]).column_sums(k)
    assert seen.profiler is not None
    results: Any = seen.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    assert 1 << 20 < max(accumulate(size for _, size in changes)) < 32 << 20


@spec
class Odd(Causal):
    """A token sees itself and the tokens of odd numbers before it."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return super().keep(b, h, q, k) & ((q == k) | (k % 2 == 1))


def test_a_subclass_of_a_causal_mask_counts_by_its_own_keep():
    q, k = made(17, 29)
    i, j = torch.arange(12, 29)[:, None], torch.arange(29)
    torch.testing.assert_close(sums_of_weights(q, k, Odd()), dense_sums(q, k, (i == j) | (i > j) & (j % 2 == 1)))
