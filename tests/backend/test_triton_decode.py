"""Decoding by the GPU kernels, run by Triton's interpreter: keys and values are read where they are stored."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, KeyLengths, KVCache, Prefix, TensorBias, Tree, Window, attend
from regard.backend import triton
from regard.cache import Codec, Contiguous, Fp8, Int4, Int8, Layout, Paged, StoredTensor
from tests.oracle import worst
from tests.stored import paged, plain

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

CODECS = [None, Int8(), Int8(keys="token"), Fp8(), Int4(), Int8(rotate=True)]


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that copies what is stored fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("stored keys and values were gathered")

    monkeypatch.setattr(triton, "gathered", refuse)


def tensors(keys: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 8, 1, 32, dtype=dtype), torch.randn(2, 2, keys, 32), torch.randn(2, 2, keys, 48)


def agree(q: Tensor, k: Any, v: Any, within: float = 1e-6, **words: Any) -> None:
    out = attend(q, k, v, **words, backend="triton")
    assert out.dtype == q.dtype
    assert worst(out, attend(q, k, v, **words, backend="reference")) <= within


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"mask": Causal() & (Window(700) | Prefix(4))},
        {"mask": KeyLengths(torch.tensor([2500, 0]))},
        {"softcap": 2.0, "sink": torch.linspace(-1, 3, 8), "bias": Alibi(8)},
        {"bias": TensorBias(torch.linspace(-2, 2, 2500).expand(2, 1, 1, 2500))},
    ],
    ids=str,
)
def test_one_query_over_several_spans(words: dict[str, Any]):
    agree(*tensors(2500), **words)


def test_several_queries_and_their_heads_are_the_rows_of_a_program():
    q, k, v = torch.randn(2, 8, 7, 32), torch.randn(2, 2, 1100, 32), torch.randn(2, 2, 1100, 32)
    agree(q, k, v, mask=Causal())
    agree(q, k, v, mask=Tree([-1, 0, 0, 1, 1, 2, -1]), bias=Alibi(8))


@pytest.mark.parametrize("layout", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_stored_is_read_in_place(codec: Codec | None, layout: Layout):
    cache = KVCache(layout=layout, codec=codec)
    q, k, v = tensors()
    agree(q, *cache.append(k, v), mask=Causal())
    agree(q, *cache.append(k[:, :, :1], v[:, :, :1]), mask=Causal() & Window(200))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_half_types_meet_what_a_dense_call_would_give_them(codec: Codec | None):
    cache = KVCache(codec=codec)
    q, k, v = (t.bfloat16() for t in tensors())
    stored = cache.append(k, v)
    dense = (t if isinstance(t, Tensor) else t.dense() for t in stored)
    out = attend(q, *stored, mask=Causal(), backend="triton")
    assert worst(out, attend(q, *dense, mask=Causal(), backend="triton")) <= (0 if codec is None else 2**-7)


def test_rows_of_their_own_lengths_and_a_part_behind_them():
    ends, more = torch.tensor([83, 40]), torch.tensor([90, 47])
    q, k, v = tensors(83)
    both = list[StoredTensor]()
    for t in (k, v):
        first, last = plain(t)._replace(row_ends=ends), plain(t[:, :, :7])
        both.append(StoredTensor((first, last), (2, 2, 90, t.shape[3]), t.dtype, more))
    agree(q, *both, mask=Causal() & Window(60))
    agree(q, *both)


def test_pages_that_begin_inside_a_page():
    q, k, v = tensors(100)
    agree(q, paged(k, 16, first_slot=5), paged(v, 16, first_slot=5), mask=Causal() & Window(70))


def test_a_row_has_the_same_bits_in_any_batch():
    q, k, v = tensors(1500)
    whole = attend(q, k, v, backend="triton")
    assert torch.equal(whole[1:], attend(q[1:], k[1:], v[1:], backend="triton"))


def test_hidden_values_that_are_not_finite_reach_nothing():
    q, k, v = tensors(130)
    v[:, :, 5] = torch.nan
    out = attend(q, k, v, mask=Causal() & Window(100), backend="triton")
    assert torch.isfinite(out).all()
    assert attend(q, k, v, mask=Causal(), backend="triton").isnan().all()
    v[:, :, 5], v[:, :, 120, 7] = 0.0, torch.inf
    out = attend(q, k, v, mask=Causal(), backend="triton")
    assert out[..., 7].isposinf().all()
    assert torch.isfinite(out[..., :7]).all()
