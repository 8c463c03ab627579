"""Decoding by the GPU kernels, run by Triton's interpreter: keys and values are read where they are stored."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    KeyLengths,
    KVCache,
    Prefix,
    RefusalError,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
    explain,
)
from regard.backend import triton
from regard.cache import Codec, Contiguous, Fp8, Int4, Int8, Latent, Layout, Paged, StoredTensor
from regard.cache.store import CachedTensor, leading_channels
from regard.plan.pose import pose
from regard.plan.request import Request
from tests.oracle import worst
from tests.pretended_gpu import PretendedGpu
from tests.stored import coded, paged, plain

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

CODECS = [None, Int8(), Int8(keys="token"), Fp8(), Int4(), Int8(rotate=True)]
LONG = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that copies what is stored fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("stored keys and values were gathered")

    monkeypatch.setattr(triton, "gathered", refuse)


def tensors(keys: int, heads: int = 8, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """One query of two rows; values are wider than keys."""
    return torch.randn(2, heads, 1, 32), torch.randn(2, kv_heads, keys, 32), torch.randn(2, kv_heads, keys, 48)


def agree(q: Tensor, k: Any, v: Any, within: float = 1e-6, **words: Any) -> None:
    out = attend(q, k, v, **words, backend="triton")
    assert out.dtype == q.dtype
    assert worst(out, attend(q, k, v, **words, backend="reference")) <= within


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (1100, {}),
        pytest.param(2500, {}, marks=LONG),
        (1100, {"mask": Causal() & (Window(700) | Prefix(4))}),
        (1100, {"mask": KeyLengths(torch.tensor([1100, 0]))}),
        (1100, {"softcap": 2.0, "sink": torch.linspace(-1, 3, 4), "bias": Alibi(4)}),
        (1100, {"bias": TensorBias(torch.linspace(-2, 2, 1100).expand(2, 1, 1, 1100))}),
    ],
    ids=str,
)
def test_one_query_over_several_spans(keys: int, words: dict[str, Any]):
    agree(*tensors(keys, heads=4, kv_heads=1), **words)


def test_several_queries_and_their_heads_are_the_rows_of_a_program():
    q, k, v = torch.randn(1, 8, 7, 32), torch.randn(1, 2, 1100, 32), torch.randn(1, 2, 1100, 32)
    agree(q, k, v, mask=Causal())
    agree(q, k, v, mask=Tree([-1, 0, 0, 1, 1, 2, -1]), bias=Alibi(8))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("layout", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_stored_is_read_in_place(codec: Codec | None, layout: Layout):
    cache = KVCache(layout=layout, codec=codec)
    q, k, v = tensors(150, heads=2, kv_heads=1)
    agree(q, *cache.append(k, v), mask=Causal())
    agree(q, *cache.append(k[:, :, :1], v[:, :, :1]), mask=Causal() & Window(90))


@pytest.mark.parametrize(
    "codec", [c if c in (None, Fp8(), Int4()) else pytest.param(c, marks=LONG) for c in CODECS], ids=str
)
def test_half_types_meet_what_a_dense_call_would_give_them(codec: Codec | None):
    cache = KVCache(codec=codec)
    q, k, v = (t.bfloat16() for t in tensors(150, heads=2, kv_heads=1))
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


@pytest.mark.parametrize("dims", [(32, 48), (27, 21), (16, 16)], ids=str)
@pytest.mark.parametrize("codec", [Int8(16), Fp8(16), Int4(16), Int4(32), Int8(16, keys="token")], ids=str)
def test_codes_that_begin_inside_a_tile(codec: Codec, dims: tuple[int, int]):
    q, both = torch.randn(2, 4, 1, dims[0]), list[StoredTensor]()
    for dim, keys in zip(dims, (True, False), strict=True):
        part = coded(torch.randn(2, 2, 1152, dim), codec, keys=keys, per_token=keys and codec.keys == "token", page=64)
        both.append(StoredTensor((part._replace(tokens=1101, first_slot=21),), (2, 2, 1101, dim), q.dtype))
    agree(q, *both, mask=Causal() & Window(1000))


@pytest.mark.parametrize("dim", [36, 72, 100])
@pytest.mark.parametrize("codec", [Int8(), Fp8(), Int4()], ids=str)
def test_values_that_are_no_whole_pieces_of_codes(codec: Codec, dim: int):
    q = torch.randn(1, 4, 1, dim).half()
    keys, values = KVCache(codec=codec).append(*(torch.randn(1, 2, 100, dim).half() for _ in range(2)))
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    found = attend(q, keys, values, backend="triton")
    exact = attend(q.double(), keys.dense().double(), values.dense().double(), backend="reference64")
    assert (found - exact).abs().max() <= 2e-3


def test_a_row_has_the_same_bits_in_any_batch():
    q, k, v = tensors(1100, heads=4, kv_heads=1)
    whole = attend(q, k, v, backend="triton")
    assert torch.equal(whole[1:], attend(q[1:], k[1:], v[1:], backend="triton"))


def test_hidden_values_that_are_not_finite_reach_nothing():
    q, k, v = tensors(130, heads=2, kv_heads=1)
    v[:, :, 5] = torch.nan
    out = attend(q, k, v, mask=Causal() & Window(100), backend="triton")
    assert torch.isfinite(out).all()
    assert attend(q, k, v, mask=Causal(), backend="triton").isnan().all()
    v[:, :, 5], v[:, :, 120, 7] = 0.0, torch.inf
    out = attend(q, k, v, mask=Causal(), backend="triton")
    assert out[..., 7].isposinf().all()
    assert torch.isfinite(out[..., :7]).all()


LATENTS = [
    None,
    pytest.param(Int8(16, 5), marks=LONG),
    Int8(16, 5, keys="token"),
    pytest.param(Fp8(16, 5), marks=LONG),
    Int4(16, 5),
]


def latent_call(rank: int = 21, rope: int = 6, keys: int = 300, heads: int = 8) -> tuple[Tensor, Tensor]:
    """Queries of latent and rotated part, and the entries of a cache."""
    return torch.randn(2, heads, 1, rank + rope), torch.randn(2, 1, keys, rank + rope)


def are_values_read_with_keys(k: CachedTensor, v: CachedTensor) -> bool:
    from regard.gpu.few_rows import is_in_keys

    both = (t if isinstance(t, StoredTensor) else StoredTensor.of(t) for t in (k, v))
    return all(is_in_keys(a, b) for a, b in zip(*(t.parts for t in both), strict=True))


@pytest.mark.parametrize("codec", LATENTS, ids=str)
def test_latents_are_keys_and_values_read_once(codec: Codec | None):
    cache = KVCache(Latent(21), codec)
    q, entries = latent_call()
    k, v = cache.append(entries)
    assert are_values_read_with_keys(k, v)
    agree(q, k, v, scale=0.2, mask=Causal() & Window(200))
    k, v = cache.append(entries[:, :, :1])
    agree(q, k, v, scale=0.2, softcap=5.0, sink=torch.linspace(-1, 1, 8))


@pytest.mark.parametrize("codec", [Int8(16, 5), Int8(16, 5, keys="token"), Fp8(16, 5), Int4(16, 5)], ids=str)
def test_large_latents_of_codes_are_summed_in_chunks(codec: Codec):
    cache = KVCache(Latent(201), codec)
    q, entries = latent_call(rank=201, keys=70, heads=3)
    agree(q, *cache.append(entries), scale=0.1, mask=Causal() & Window(60))


def test_latents_over_several_spans_are_those_of_the_definition():
    q, entries = latent_call(keys=1300)
    agree(q, entries, entries[..., :21], mask=KeyLengths(torch.tensor([1300, 1030])))
    agree(q, entries, entries[..., :21], bias=Alibi(8))


def test_the_heads_of_a_latent_are_shared_out_between_programs():
    q, entries = torch.randn(1, 20, 5, 272 + 16), torch.randn(1, 1, 150, 272 + 16)
    agree(q, entries, entries[..., :272], mask=Causal() & Window(90), bias=Alibi(20))


def test_latents_in_pages():
    q, entries = latent_call(keys=100)
    k = paged(entries, 16, first_slot=5)
    agree(q, k, leading_channels(k, 21), mask=Causal() & Window(70))
    k = StoredTensor((coded(entries[:, :, :96], Int8(16), keys=True, page=32),), (2, 1, 96, 27), q.dtype)
    agree(q, k, leading_channels(k, 21))


def test_half_types_of_latents():
    q, entries = (t.bfloat16() for t in latent_call())
    out = attend(q, entries, entries[..., :21], backend="triton")
    assert worst(out, attend(q.double(), entries.double(), entries[..., :21].double(), backend="reference")) <= 2**-7


def test_a_row_of_latents_has_the_same_bits_in_any_batch():
    q, entries = latent_call(keys=1100)
    whole = attend(q, entries, entries[..., :21], backend="triton")
    assert torch.equal(whole[1:], attend(q[1:], entries[1:], entries[1:, ..., :21], backend="triton"))


def test_hidden_latents_that_are_not_finite_reach_nothing():
    q, entries = latent_call(keys=130)
    entries[:, :, 5, 3], entries[:, :, 9, 25] = torch.nan, torch.inf
    out = attend(q, entries, entries[..., :21], mask=Causal() & Window(100), backend="triton")
    clean = entries.nan_to_num(posinf=0.0)
    assert worst(out, attend(q, clean, clean[..., :21], mask=Causal() & Window(100), backend="reference")) <= 1e-6
    assert attend(q, entries, entries[..., :21], backend="triton").isnan().all()


def test_large_heads_with_values_of_their_own():
    q, k, v = torch.randn(2, 4, 1, 272), torch.randn(2, 2, 90, 272), torch.randn(2, 2, 90, 16)
    agree(q, k, v, mask=Causal() & Window(60))


def test_a_mask_per_head():
    keep = torch.rand(1, 8, 3, 150) < 0.5
    q, k, v = torch.randn(2, 8, 3, 32), torch.randn(2, 2, 150, 32), torch.randn(2, 2, 150, 48)
    agree(q, k, v, mask=TensorMask(keep))


def test_large_heads_have_no_kernel_for_long_calls():
    q = torch.randn(1, 2, 600, 288)
    with pytest.raises(RefusalError, match=r"at most 256 dimensions \(decoding: 1024, with up to 1024 query rows"):
        attend(q, q[:, :1], q[:, :1], backend="triton")


def test_batches_of_any_size_have_programs_along_one_axis_alone(monkeypatch: pytest.MonkeyPatch):
    from regard.gpu import few_rows

    grids = list[tuple[int, ...]]()

    class Started:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(few_rows, "_SPAN", Started())
    monkeypatch.setattr(few_rows, "_MERGE", Started())
    q, k = torch.randn(70001, 2, 1, 16), torch.randn(70001, 1, 3, 16)  # CUDA takes 65,535 along the other two axes
    attend(q, k, k.clone(), backend="triton")
    assert grids == [(70001,), (140002,)]


def test_biases_of_heads_that_do_not_exist_are_not_read():
    """A program has 16 rows, of which 3 heads have 3: behind their biases is memory that nothing may read."""
    program = """
import ctypes, mmap
import torch
from regard import Alibi, Causal, TensorBias, attend
from regard.backend import triton

GUARD = 1 << 20

def guarded(t):
    size = t.numel() * t.element_size()
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + GUARD)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + whole), GUARD, 0) == 0
    return torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=whole - size).view(t.shape).copy_(t)

vectors = triton.vectors
triton.vectors = lambda *of: None if (found := vectors(*of)) is None else guarded(found)
q, k = torch.randn(1, 3, 1, 16), torch.randn(1, 1, 61, 16)
for bias in (TensorBias(guarded(torch.randn(1, 3, 1, 61))), Alibi(3)):
    both = (attend(q, k, k, mask=Causal(), bias=bias, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(*both, atol=1e-6, rtol=0)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


KIB = 1 << 10


@pytest.mark.parametrize(
    ("chip", "item", "tokens", "rows", "expected"),
    [
        (99, 2, (128, 128, "plain"), 4, (16, 32, 3, 0)),  # as large as registers allow
        (227, 4, (256, 256, "plain"), 64, (32, 32, 3, 0)),  # 64 rows took 272 KiB
        (99, 4, (128, 128, "plain"), 64, (64, 32, 1, 0)),  # two stages took 128 KiB
        (99, 2, (128, 128, "int8"), 4, (16, 64, 2, -32)),  # one warp
        (64, 4, (1024, 1024, "int4"), 4, (16, 16, 1, 0)),  # of AMD's chips, which takes 64 KiB
        (163, 4, (128, 128, "plain"), 64, (64, 32, 2, 0)),  # three stages took 176 KiB
        (99, 4, (256, 256, "int8"), 64, (32, 16, 1, 0)),  # 64 rows took 136 KiB
        (99, 4, (512, 512, "plain"), 4, (16, 16, 1, 0)),  # two stages took 132 KiB
        (99, 4, (512, 512, "plain", True, 64), 128, (16, 16, 1, 128)),  # all of q took 136 KiB
        (99, 2, (1024, 1024, "int8"), 4, (16, 16, 1, 0)),  # two stages took 115 KiB
        (163, 4, (1024, 1024, "plain"), 4, (16, 16, 1, 128)),  # all of q took 192 KiB
        (227, 4, (1024, 1024, "plain"), 4, (16, 16, 1, 0)),  # two stages took 260 KiB
    ],
)
def test_a_span_is_cut_so_that_it_fits_the_shared_memory_of_the_chip(
    chip: int, item: int, tokens: Any, rows: int, expected: tuple[int, ...]
):
    from regard.gpu.few_rows import Tokens, span_blocks

    cut = span_blocks(item, Tokens(*tokens), rows, chip * KIB)
    assert cut is not None
    assert (cut.blocks.rows, cut.blocks.tokens, cut.blocks.stages, cut.chunk) == expected


def test_a_chip_without_room_for_the_smallest_span_has_none():
    from regard.gpu.few_rows import Tokens, span_blocks

    assert span_blocks(4, Tokens(1024, 1024, "int4"), 4, 99 * KIB) is None
    assert span_blocks(4, Tokens(1024, 1024, "int4"), 4, 163 * KIB) is not None


def test_a_gpu_of_an_older_generation_is_refused(monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, (7, 5))
    q = torch.zeros(1, 2, 1, 64, device="meta")
    with pytest.raises(RefusalError, match=r"compute capability 8\.0 or newer, and this one has 7\.5"):
        explain(q, q, q, device="cuda", backend="triton")


def test_each_gpu_has_its_own_generation_and_a_machine_that_is_named_is_none_of_them(monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, (7, 5), (9, 0))
    q = torch.zeros(1, 2, 1, 64, device="meta")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(RefusalError, match=r"this one has 7\.5"):
            explain(q, q, q, device=device, backend="triton")
    for device in ("cuda:1", "cuda:2", "cuda:h100"):
        assert explain(q, q, q, device=device, backend="triton").backend == "triton"


def test_tensors_are_posed_with_the_generation_of_their_own_gpu(monkeypatch: pytest.MonkeyPatch):
    pretend_gpus(monkeypatch, (7, 5), (9, 0))
    q = torch.zeros(1, 2, 1, 64)
    with PretendedGpu(torch.device("cuda", 1)) as gpu:
        assert pose(Request(gpu.put(q), gpu.put(q), gpu.put(q)).resolved())[0].capability == (9, 0)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """GPUs of these compute capabilities, the first of which is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
