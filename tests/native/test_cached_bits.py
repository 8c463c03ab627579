"""Bits of attention to caches: rows of a batch, threads, chunks and pages change none, in any layout and codec.

A codec leaves the latest tokens as they came until they are older than its residual, so a query inside a chunk meets
more exact keys than in smaller chunks: what is promised there is what is stored, and with it every step from then on.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from regard import Causal, Rope, attend
from regard.bench.rounds import on_threads
from regard.cache import KVCache, PagePool
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from tests.native.engines import BEST

KV_HEADS, HEADS, QK, V = 2, 6, 128, 96
LAYOUTS = {
    "contiguous": Contiguous(),
    "rolling": Rolling(229, 3, Rope(QK)),
    "paged": Paged(16),
    "latent": Latent(V),
}
KINDS = {"int8": Int8, "fp8": Fp8, "int4": Int4}
CODECS: dict[str, Codec | torch.dtype | None] = {
    "plain": None,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **{name: kind(32, 40) for name, kind in KINDS.items()},
    **{f"{name} per token": kind(32, 40, keys="token") for name, kind in KINDS.items()},
    **{f"{name} rotated": kind(32, 40, rotate=True) for name, kind in KINDS.items()},
}
PLAIN = [name for name, codec in CODECS.items() if not isinstance(codec, Codec)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WORDS = [(x, y) for x in LAYOUTS for y in CODECS if not (x == "latent" and "rotated" in y)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_word = pytest.mark.parametrize(
    ("layout", "codec"),
    [word if n % 2 else pytest.param(*word, marks=pytest.mark.exhaustive) for n, word in enumerate(WORDS)],
)
"""Of every other pair, so that the default run has each layout and each codec."""


class Text(NamedTuple):
    """Queries, keys and values of some tokens."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, tokens: int, dtype: torch.dtype, batch: int = 1) -> "Text":
        sizes = ((HEADS, QK), (KV_HEADS, QK), (KV_HEADS, V))
        return cls(*(torch.randn(batch, heads, tokens, dim).to(dtype) for heads, dim in sizes))

    def rows(self, rows: slice) -> "Text":
        return Text(*(t[rows] for t in self))


def outputs(cache: KVCache, text: Text, chunks: list[int]) -> list[Tensor]:
    """Attention of each chunk as it comes; keys of a rolling cache are rotated to their positions."""
    found: list[Tensor] = []
    first = 0
    for count in chunks:
        q, k, v = (t[:, :, first : first + count] for t in text)
        if count % 2:  # others are views of the whole text
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        keys, values = cache.append(k, None if isinstance(cache.layout, Latent) else v)
        found.append(attend(q, keys, values, mask=Causal(), backend=BEST))
        first += count
    return found


@pytest.mark.exhaustive(per="test")
@every_dtype
@every_word
def test_a_row_of_a_batch_has_the_bits_that_it_has_alone(layout: str, codec: str, dtype: torch.dtype):
    text, chunks = Text.of(211, dtype, batch=3), [150, 1, 5, 1, 53, 1]
    together = outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, chunks)
    for b in range(3):
        row = slice(b, b + 1)
        alone = outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text.rows(row), chunks)
        assert all(torch.equal(one, all_[row]) for one, all_ in zip(alone, together, strict=True))


@pytest.mark.exhaustive(per="test")
@every_dtype
@every_word
def test_strides_change_nothing_in_a_cache(layout: str, codec: str, dtype: torch.dtype):
    text, chunks = Text.of(211, dtype, batch=2), [150, 1, 5, 1, 53, 1]
    moved = Text(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in text))
    found, expected = (outputs(KVCache(LAYOUTS[layout], CODECS[codec]), one, chunks) for one in (moved, text))
    assert all(map(torch.equal, found, expected))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_word
def test_threads_change_nothing_in_a_cache(layout: str, codec: str, dtype: torch.dtype):
    text, found = Text.of(409, dtype, batch=2), []
    for number in (1, 3):
        with on_threads(number):
            found.append(outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, [401, 1, 6, 1]))
    assert all(map(torch.equal, *found))


@pytest.mark.exhaustive(per="test")
@every_dtype
@pytest.mark.parametrize("codec", PLAIN)
@pytest.mark.parametrize("layout", ["contiguous", "paged", "latent"])
def test_a_prompt_that_is_stored_plain_has_the_same_bits_in_any_chunks(layout: str, codec: str, dtype: torch.dtype):
    text = Text.of(211, dtype)
    whole = outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, [211])[0]
    for chunks in ([1, 100, 7, 103], [16] * 13 + [3], [210, 1]):
        assert torch.equal(torch.cat(outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, chunks), 2), whole)


@pytest.mark.exhaustive(per="test")
@every_dtype
@every_word
def test_a_step_has_the_same_bits_in_whatever_chunks_the_prompt_came(layout: str, codec: str, dtype: torch.dtype):
    text = Text.of(311, dtype)
    expected = outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, [309, 1, 1])[1:]
    for chunks in ([1, 100, 7, 201], [16] * 19 + [5], [308, 1]):
        found = outputs(KVCache(LAYOUTS[layout], CODECS[codec]), text, [*chunks, 1, 1])[-2:]
        assert all(map(torch.equal, found, expected))


@pytest.mark.exhaustive(per="test")
@every_dtype
@pytest.mark.parametrize("codec", CODECS)
def test_pages_in_any_order_have_the_bits_of_tokens_side_by_side(codec: str, dtype: torch.dtype):
    """Pages as large as a group, so that both write the same codes."""
    words, text, chunks = CODECS[codec], Text.of(311, dtype), [200, 1, 105, 1, 3, 1]
    expected = outputs(KVCache(Contiguous(), words), text, chunks)
    pool = PagePool(page=32, codec=words)
    others = [pool.sequence() for _ in range(3)]
    for count in (70, 33, 129):  # pages are taken in turns and given back out of order
        for other in others:
            more = Text.of(count, dtype)
            pool.append([other], more.k, more.v)
    others[1].free()
    assert all(map(torch.equal, outputs(KVCache(Paged(32, pool), words), text, chunks), expected))


def subclasses(kind: type) -> set[type]:
    """Those of regard; tests make others."""
    return {each for each in kind.__subclasses__() if each.__module__.startswith("regard.")}


def test_layouts_and_codecs_are_all_of_them():
    assert {type(layout) for layout in LAYOUTS.values()} == subclasses(Layout)
    assert {type(codec) for codec in CODECS.values() if isinstance(codec, Codec)} == subclasses(Codec)
