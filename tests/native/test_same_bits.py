"""A row of the output has the same bits whoever is computed beside it, on however many threads, in whatever chunk."""

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    Documents,
    KeyLengths,
    Mask,
    Prefix,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
)
from regard.bench.rounds import on_threads
from regard.cache import PagePool
from tests.native.engines import LEAST_AND_BEST

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KEYS = 1200  # more than one span of the kernels, which is 1,024
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "a window and sinks": Causal() & (Window(150) | Prefix(4)),
    "documents": Causal() & Documents(torch.arange(KEYS) // 217),
}

pytestmark = [pytest.mark.parametrize("engine", LEAST_AND_BEST), pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def tensors(dtype: torch.dtype, batch: int = 1, dim: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """6 heads on 2, values narrower than keys; large enough that the softmax has peaks."""
    q, k = 2 * torch.randn(batch, 6, KEYS, dim), torch.randn(batch, 2, KEYS, dim)
    return q.to(dtype), k.to(dtype), torch.randn(batch, 2, KEYS, 40).to(dtype)


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64, 100, 333])
def test_a_prompt_in_chunks_is_the_prompt(engine: str, dtype: torch.dtype, mask: str, chunk: int):
    q, k, v = tensors(dtype)
    words = {"mask": MASKS[mask], "bias": Alibi(6), "softcap": 20.0, "backend": engine}
    if chunk % 2:
        words |= {"bias": None, "softcap": None}
    whole = attend_state(q, k, v, **words)
    for first in [0, chunk, 1023, 1024, KEYS - chunk] if chunk < 64 else range(0, KEYS, chunk):
        last = min(first + chunk, KEYS)
        part = attend_state(q[:, :, first:last], k[:, :, :last], v[:, :, :last], offset=first, **words)
        assert torch.equal(part.out, whole.out[:, :, first:last])
        assert torch.equal(part.lse, whole.lse[:, :, first:last])


@pytest.mark.exhaustive(per="engine dtype")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [20, 40, 64])
def test_heads_that_read_keys_together_have_the_bits_of_each_alone(
    engine: str, dtype: torch.dtype, mask: str, queries: int
):
    batch, heads, kv_heads = 4, 10, 2  # enough work for two tiles in a unit, of the last heads of a group one
    q = 2 * torch.randn(batch, heads, queries, 48).to(dtype)
    k, v = (torch.randn(batch, kv_heads, KEYS, dim).to(dtype) for dim in (48, 40))
    bias = torch.randn(1, heads, queries, KEYS) if queries == 40 else None
    words = {"mask": MASKS[mask], "offset": KEYS - queries, "backend": engine}
    with on_threads(1):
        whole = attend_state(q, k, v, bias=None if bias is None else TensorBias(bias), **words)
    for b, h in [(0, 0), (1, 4), (2, 5), (3, 8), (3, 9)]:
        kv, own = h // (heads // kv_heads), None if bias is None else TensorBias(bias[:, h : h + 1])
        one = attend_state(q[b, None, h, None], k[b, None, kv, None], v[b, None, kv, None], bias=own, **words)
        assert torch.equal(one.out[0, 0], whole.out[b, h])
        assert torch.equal(one.lse[0, 0], whole.lse[b, h])


@pytest.mark.exhaustive(per="engine dtype")
@pytest.mark.parametrize("queries", [3, 40])
def test_heads_with_masks_of_their_own_have_the_bits_of_each_alone(engine: str, dtype: torch.dtype, queries: int):
    batch, heads, kv_heads = 4, 10, 2
    q = 2 * torch.randn(batch, heads, queries, 48).to(dtype)
    k, v = (torch.randn(batch, kv_heads, KEYS, dim).to(dtype) for dim in (48, 40))
    keep = torch.rand(1, heads, queries, KEYS) < torch.linspace(0.02, 1, heads)[:, None, None]
    keep[:, 3, 1], keep[:, 7, :, 64:1100] = False, False  # a row that sees no key; tiles that are not listed
    with on_threads(1):
        whole = attend_state(q, k, v, mask=TensorMask(keep), backend=engine)
    for b, h in [(0, 0), (1, 3), (2, 5), (3, 7), (3, 9)]:
        kv, own = h // (heads // kv_heads), TensorMask(keep[:, h : h + 1])
        one = attend_state(q[b, None, h, None], k[b, None, kv, None], v[b, None, kv, None], mask=own, backend=engine)
        assert torch.equal(one.out[0, 0], whole.out[b, h])
        assert torch.equal(one.lse[0, 0], whole.lse[b, h])


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("dim", [112, 113, 192, 257])
def test_few_rows_of_many_dims_have_the_bits_of_many_rows(engine: str, dtype: torch.dtype, dim: int):
    """Kernels for many rows may multiply so many dims in parts."""
    q, k, v = (x[:, :, :150] for x in tensors(dtype, dim=dim))
    whole = attend_state(q, k, v, mask=Causal(), backend=engine)
    few = attend_state(q[:, :, -3:], k, v, mask=Causal(), backend=engine)
    assert torch.equal(few.out, whole.out[:, :, -3:])
    assert torch.equal(few.lse, whole.lse[:, :, -3:])


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 15, 16])
@pytest.mark.parametrize(("dim", "wide"), [(64, 128), (128, 64), (33, 17), (80, 40), (20, 112), (96, 256)])
@pytest.mark.parametrize("kind", ["normal", "rising", "tiny", "wild"])
def test_few_rows_have_the_bits_of_a_prompt(engine: str, dtype: torch.dtype, rows: int, dim: int, wide: int, kind: str):
    """Each number of rows has loops of its own; blocks that are seen whole, one after another, and all others too."""
    keys = 2 * 1024 + 70
    q, k = 2 * torch.randn(1, rows, 65, dim).to(dtype), torch.randn(1, 1, keys, dim).to(dtype)
    v = torch.randn(1, 1, keys, wide).to(dtype)
    if kind == "rising":  # from block to block, so that sums are rescaled, and nearly are
        k = k * (1 + torch.arange(keys) // 128)[:, None].to(dtype)
    if kind == "tiny":
        v = v * torch.finfo(dtype).tiny  # some below the normal numbers, which AMX takes as 0
    if kind == "wild":
        k[..., 5, 7], v[..., 6, 3], v[..., -1, :2] = -torch.inf, torch.nan, torch.inf
    keep = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    for hidden in (slice(300), slice(700, 705), slice(1408, 1536)):  # blocks are seen whole from 384, 768 and 1,536 on
        keep[..., hidden] = False
    most = torch.rand(65, keys) < 0.7  # each row sees most keys of a block, and none of some sixteens
    most &= (torch.rand(65, keys // 16 + 1) < 0.8).repeat_interleave(16, 1)[:, :keys]
    for mask in (
        Causal(),
        Causal() & Window(70),
        Causal() & Window(1500),
        Causal() & TensorMask(keep),
        Causal() & TensorMask(most, offset=keys - 65),
    ):
        whole = attend_state(q, k, v, mask=mask, backend=engine)
        few = attend_state(q[:, :, -1:], k, v, mask=mask, backend=engine)
        assert torch.equal(few.out.nan_to_num(3.0), whole.out[:, :, -1:].nan_to_num(3.0))
        assert torch.equal(few.lse.nan_to_num(3.0), whole.lse[:, :, -1:].nan_to_num(3.0))
        last = attend(q[:, :, -2:], k, v, mask=mask, backend=engine)  # the first of them does not see the last token
        assert torch.equal(last.nan_to_num(3.0), whole.out[:, :, -2:].nan_to_num(3.0))


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("queries", [1, 3, KEYS])
def test_a_row_of_the_batch_does_not_see_the_others(engine: str, dtype: torch.dtype, queries: int):
    q, k, v = tensors(dtype, batch=3)
    q, lengths = q[:, :, -queries:], torch.tensor([KEYS, 65, 1100])
    for words in ({}, {"mask": Causal() & KeyLengths(lengths)}, {"sink": torch.randn(6)}):
        whole = attend(q, k, v, **words, backend=engine)
        for b in range(3):
            mine = {"mask": Causal() & KeyLengths(lengths[b : b + 1])} if "mask" in words else words
            alone = attend(*(t[b : b + 1] for t in (q, k, v)), **mine, backend=engine)
            assert torch.equal(alone, whole[b : b + 1])
        assert torch.equal(
            attend(*(t.flip(0) for t in (q, k, v)), backend=engine), attend(q, k, v, backend=engine).flip(0)
        )


def test_a_nan_that_all_see_is_seen_beside_a_hidden_one_in_the_same_block(engine: str, dtype: torch.dtype):
    q, k, v = torch.randn(3, 2, 8, 128, 64).to(dtype)
    v[:, :, :3] = v[:, :, 100] = torch.nan
    shown = (torch.arange(128) >= 3) & ((torch.arange(128)[:, None] < 64) | (torch.arange(128) >= 64))
    with on_threads(1):
        out = attend(q, k, v, mask=TensorMask(shown), backend=engine)
        alone = attend(q[:1, :1], k[:1, :1], v[:1, :1], mask=TensorMask(shown), backend=engine)
    assert out.isnan().all()
    torch.testing.assert_close(out[:1, :1], alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("queries", [1, 7, KEYS])
def test_threads_change_nothing(engine: str, dtype: torch.dtype, queries: int):
    q, k, v = tensors(dtype, batch=2)

    def gradients(number: int) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q[:, :, -queries:], k, v)]
        with on_threads(number):
            out = attend(*leaves, mask=Causal(), sink=torch.zeros(6), backend=engine)
            return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    one = gradients(1)
    for number in (2, 8):  # with 8, all values are paired before the first tile is computed
        assert all(torch.equal(a, b) for a, b in zip(gradients(number), one, strict=True))


def test_strides_change_nothing(engine: str, dtype: torch.dtype):
    q, k, v = tensors(dtype)
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(attend(*moved, mask=Causal(), backend=engine), attend(q, k, v, mask=Causal(), backend=engine))


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("dim", "wide"), [(64, 128), (80, 64), (47, 33), (9, 1)])
def test_tokens_one_after_another_give_the_bits_of_tokens_apart(
    engine: str, dtype: torch.dtype, heads: int, dim: int, wide: int
):
    """Keys of a whole span (1,024) that are one piece of memory may be multiplied before any of its values."""
    keys = 2 * 1024 + 70
    q = 2 * torch.randn(1, 2 * heads, 1, dim).to(dtype)
    k, v = torch.randn(1, 2, keys, dim).to(dtype), torch.randn(1, 2, keys, wide).to(dtype)
    apart = [torch.nn.functional.pad(t, (0, 3))[..., :-3] for t in (k, v)]
    for words in ({}, {"bias": Alibi(2 * heads), "sink": torch.randn(2 * heads)}, {"softcap": 5.0, "dropout": 0.2}):
        for seen in (k, v), (apart[0], v), (k, apart[1]):
            torch.manual_seed(0)
            found = attend(q, *seen, mask=Causal(), **words, backend=engine)
            torch.manual_seed(0)
            assert torch.equal(found, attend(q, *apart, mask=Causal(), **words, backend=engine))


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dim", "wide", "page"), [(64, 128, 16), (80, 64, 48), (128, 128, 2048), (192, 128, 32), (64, 64, 24)]
)
def test_scattered_pages_give_the_bits_of_tokens_apart(
    engine: str, dtype: torch.dtype, heads: int, dim: int, wide: int, page: int
):
    """Pages of whole sixteens, so not of 24, may be multiplied like tokens that are one piece of memory (Zen 5)."""
    pool = PagePool(page=page)
    rows = [pool.sequence(), pool.sequence()]
    k, v = torch.randn(2, 2, 2 * 1024 + 70, dim).to(dtype), torch.randn(2, 2, 2 * 1024 + 70, wide).to(dtype)
    lengths = (k.shape[2] - 1, 1100)
    for first in range(0, max(lengths), page):  # in turns, so that no two pages of a row are neighbours
        for b, length in enumerate(lengths):
            tokens = slice(first, min(first + page, length))
            if tokens.stop > first:
                pool.append(rows[b : b + 1], k[b : b + 1, :, tokens], v[b : b + 1, :, tokens])
    stored = pool.append(rows, k[:, :, -1:], v[:, :, -1:])
    q = 2 * torch.randn(2, 2 * heads, 1, dim).to(dtype)
    for words in ({}, {"sink": torch.randn(2 * heads)}, {"softcap": 5.0}):
        found = attend(q, *stored, mask=Causal(), **words, backend=engine)
        for b, length in enumerate(lengths):
            whole = (torch.cat((t[b : b + 1, :, :length], t[b : b + 1, :, -1:]), 2) for t in (k, v))
            apart = (torch.nn.functional.pad(t, (0, 3))[..., :-3] for t in whole)
            expected = attend(q[b : b + 1], *apart, mask=Causal(), **words, backend=engine)
            assert torch.equal(found[b : b + 1], expected)


@pytest.mark.parametrize("queries", [1, 5])
def test_keys_without_dims_give_the_mean_of_the_values(engine: str, dtype: torch.dtype, queries: int):
    """Also where all keys have one address, as those of an expanded tensor have."""
    v = torch.randn(1, 2, 2048, 64).to(dtype)
    q, k = torch.empty(1, 4, queries, 0, dtype=dtype), torch.empty(1, 2, 1, 0, dtype=dtype).expand(1, 2, 2048, 0)
    found = attend(q, k, v, backend=engine)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(found.shape)
    torch.testing.assert_close(found.double(), mean, atol=2e-4, rtol=1e-2)
