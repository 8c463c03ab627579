"""Keys and values in pages and codes: every kernel gives the bits that it gives for the tensors they stand for.

But where codes are multiplied without being rounded to bf16: see test_integers.py.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Alibi, Causal, KeyLengths, KVCache, Mask, Window, attend, attend_state, explain
from regard.cache import Codec, Fp8, Int4, Int8
from regard.describe.ragged import Ragged
from regard.storage.codec import TILE, code_bytes, encode_tiled
from regard.storage.stored import Part, StoredTensor
from tests.native.engines import ALL, LEAST_AND_BEST, PLAIN
from tests.native.test_kernels import ROUNDING, same
from tests.selection import examples

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORMS = ["call", "float64", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
PAGES = {"plain": [1, 3, 16, 64, 1300], "rows": [1, 3, 16, 64, 1300], "tiled": [16, 64, 192, 1344]}


class Maker:
    """Parts with random contents; NaN wherever no token stands."""

    def __init__(self, seed: int, heads: int, dtype: torch.dtype) -> None:
        self.g, self.heads, self.dtype = torch.Generator().manual_seed(seed), heads, dtype

    def numbers(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.g)

    def part(
        self,
        form: str,
        counts: list[int],
        dim: int,
        *,
        before: list[int] | None = None,
        tiled: bool = False,
        per_token: bool = False,
        page: int = 64,
        first_slot: int = 0,
        group: int = 16,
        low: bool = True,
        table: bool = True,
    ) -> Part:
        """`counts` tokens in each row, which stand behind `before` others; in pages at random places."""
        batch, tokens = len(counts), max(counts)
        if tiled and not per_token:
            group = page if page % group else group
        if not table:
            page = -(-(first_slot + tokens) // page) * page or page
        own = -(-(first_slot + tokens) // page) or 1
        pages = batch * own + 2 if table else batch
        places = torch.randperm(pages, generator=self.g)[: batch * own].view(batch, own) if table else None
        ends = None
        if len(set(counts)) > 1 or (before is not None and len(set(before)) > 1):
            ends = torch.tensor([n + b for n, b in zip(counts, before or [0] * batch, strict=True)])
        if form in ("int8", "int4", "fp8"):
            data, scale, added = self.codes(form, pages, page, dim, tiled=tiled, per_token=per_token, group=group)
            words: dict[str, Any] = {"kind": form, "scale": scale, "zero_point": added if low else None, "group": group}
            words |= {"tiled": tiled, "per_token": tiled and per_token}
        else:
            kind = self.dtype if form == "call" else getattr(torch, form)
            data, words = self.numbers(pages, self.heads, page, dim).to(kind), {}
            used = [
                (row if places is None else int(places[row, i]), i, row) for row in range(batch) for i in range(own)
            ]
            real = torch.zeros(pages, page, dtype=torch.bool)
            for at, i, row in used:
                slots = torch.arange(page) + i * page - first_slot
                real[at] = (slots >= 0) & (slots < counts[row])
            data = torch.where(real[:, None, :, None], data, torch.nan)
        return Part(tokens, data, first_slot=first_slot, table=places, row_ends=ends, **words)

    def codes(
        self, form: str, pages: int, page: int, dim: int, *, tiled: bool, per_token: bool, group: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        bytes_ = code_bytes(form, dim, tiled)
        sizes = (pages, self.heads, page // TILE, bytes_, TILE) if tiled else (pages, self.heads, page, bytes_)
        data = torch.randint(0, 256, sizes, generator=self.g).to(torch.uint8)
        if form == "fp8":  # no NaN
            data = torch.where((data & 127) == 127, data & 128, data)
        most = {"int8": 127, "int4": 15, "fp8": 448}[form]
        scales = (page, -(-dim // group))
        if tiled:
            scales = (page,) if per_token else (page // group, dim)
        scale, low = (self.numbers(pages, self.heads, *scales) for _ in range(2))
        return data, (scale * 2 / most).bfloat16(), low.bfloat16()


def stored(parts: list[Part], counts: list[int], heads: int, dim: int, dtype: torch.dtype) -> StoredTensor:
    lengths = torch.tensor(counts) if len(set(counts)) > 1 else None
    return StoredTensor(tuple(parts), (len(counts), heads, max(counts), dim), dtype, lengths)


def unrounded(q: Tensor, k: StoredTensor, v: StoredTensor) -> bool:
    """Whether codes may be multiplied before they are rounded to bf16."""
    few = q.shape[1] // k.shape[1] * q.shape[2] <= 16
    coded = any(part.kind in ("int8", "int4", "fp8") for side in (k, v) for part in side.parts)
    return q.dtype == torch.bfloat16 and few and coded


def agree(q: Tensor, k: StoredTensor, v: StoredTensor, engine: str, **words: Any) -> Tensor:
    """What stored ones give, after a look that their tensors give the same bits, or nearly if codes are not rounded."""
    assert not any("gather" in str(step) for step in explain(q, k, v, backend=engine, **words).steps)
    found = attend_state(q, k, v, backend=engine, **words)
    dense = dict(words)
    if k.lengths is not None:
        dense["mask"] = Ragged(words.get("mask"), k.lengths.tolist())
    expected = attend_state(q, k.dense(), v.dense(), backend=engine, **dense)
    assert found.out.dtype == q.dtype
    if unrounded(q, k, v):
        same(found.out, expected.out, ROUNDING[q.dtype])
        same(found.lse, expected.lse, ROUNDING[q.dtype])
        return found.out
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=0, equal_nan=True)
    return found.out


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "by channel, one query": (1, {}),
    "by channel, a tile of queries": (70, {}),
    "by token": (3, {"per_token": True}),
    "without a table": (1, {"table": False, "page": 192}),
    "pages of a tile": (16, {"page": 16, "first_slot": 21}),
}


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_every_form_gives_the_bits_of_its_tensor(engine: str, form: str, dtype: torch.dtype, way: str):
    (queries, words), make, tokens = WAYS[way], Maker(3, 2, dtype), 150 if engine == PLAIN else 1061
    dims = (37, 50) if queries == 3 else (64, 32)
    k = make.part(form, [tokens] * 2, dims[0], tiled=True, low=form == "int4", **words)
    v = make.part(form, [tokens] * 2, dims[1], low=form == "int4", **{**words, "group": 32})
    q = make.numbers(2, 4, queries, dims[0]).to(dtype)
    agree(q, *(stored([p], [tokens] * 2, 2, dim, dtype) for p, dim in zip((k, v), dims, strict=True)), engine=engine)


@pytest.mark.skipif("native amx" not in ALL, reason="needs AMX")
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_few_rows_meet_codes_on_amx_with_the_bits_of_avx512bf16(form: str):
    make, tokens = Maker(3, 2, torch.bfloat16), 1061
    k = make.part(form, [tokens] * 2, 64, tiled=True, low=form == "int4")
    v = make.part(form, [tokens] * 2, 32, low=form == "int4", group=32)
    q = make.numbers(2, 4, 1, 64).bfloat16()
    sides = [stored([p], [tokens] * 2, 2, dim, torch.bfloat16) for p, dim in ((k, 64), (v, 32))]
    tiles, pairs = (attend_state(q, *sides, backend=f"native {isa}") for isa in ("amx", "avx512bf16"))
    assert torch.equal(tiles.out, pairs.out)
    assert torch.equal(tiles.lse, pairs.lse)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, StoredTensor, StoredTensor, Mask | None]:
    dtype = draw(st.sampled_from(DTYPES))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    make = Maker(draw(st.integers(0, 1 << 30)), kv_heads, dtype)
    whole = draw(st.sampled_from([1, 7, 64, 131, 300, 1100]))
    counts = [whole] * batch
    if draw(st.booleans()):
        counts = [draw(st.integers(0, whole)) for _ in range(batch - 1)] + [whole]
    dims = draw(st.sampled_from([(16, 16), (64, 128), (5, 7), (80, 24), (1, 1), (17, 33)]))
    k, v = (stored(draw(parts(make, counts, dim, dim == dims[0])), counts, kv_heads, dim, dtype) for dim in dims)
    queries = draw(st.sampled_from([1, 1, 2, 5, 16, 61, 70]))
    q = make.numbers(batch, kv_heads * group, queries, dims[0]).to(dtype)
    return q, k, v, draw(st.sampled_from([None, Causal(), Causal() & Window(90)]))


@st.composite
def parts(draw: st.DrawFn, make: Maker, counts: list[int], dim: int, keys: bool) -> list[Part]:
    """Tokens of each row in one to four parts, cut anywhere, in some rows later than in others."""
    cuts = sorted(draw(st.lists(st.integers(0, max(counts)), max_size=3)))
    later = [draw(st.sampled_from([0, 0, 3, 19, 50])) for _ in counts]
    found, before = list[Part](), [0] * len(counts)
    for cut in (*cuts, max(counts)):
        until = [min(n, cut + shift) for n, shift in zip(counts, later, strict=True)]
        form, tiled = draw(st.sampled_from(FORMS)), draw(st.booleans()) if keys else draw(st.integers(0, 3)) == 0
        way = "plain" if form not in ("int8", "int4", "fp8") else "tiled" if tiled else "rows"
        words: dict[str, Any] = {
            "page": draw(st.sampled_from(PAGES[way])),
            "first_slot": draw(st.sampled_from([0, 1, 16, 37])),
            "group": draw(st.sampled_from([16, 32] if tiled else [16, 32, dim, 5])),
        }
        words |= {name: draw(st.booleans()) for name in ("low", "table", "per_token")}
        mine = [n - b for n, b in zip(until, before, strict=True)]
        found.append(make.part(form, mine, dim, before=before, tiled=tiled, **words))
        before = until
    return found


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@given(case=cases())
@examples(20, everything=50)
def test_any_parts_give_the_bits_of_their_tensors(
    engine: str, case: tuple[Tensor, StoredTensor, StoredTensor, Mask | None]
):
    q, k, v, mask = case
    agree(q, k, v, engine, mask=mask)


@given(case=cases())
@examples(20, everything=50)
def test_the_plain_loops_read_any_parts(case: tuple[Tensor, StoredTensor, StoredTensor, Mask | None]):
    q, k, v, mask = case
    q = q[:, :, -3:]
    found, expected = (attend(q, k, v, mask=mask, backend=name) for name in (PLAIN, "reference"))
    same(found, expected, ROUNDING[q.dtype])


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_may_be_nan_in_pages_too(dtype: torch.dtype, queries: int, engine: str):
    make, tokens = Maker(1, 2, dtype), 400
    k, v = (make.part(form, [tokens], 32, page=16) for form in ("call", "float32"))
    assert k.table is not None
    assert v.table is not None
    k.data[int(k.table[0, 3]), :, 5] = torch.nan  # token 53
    v.data[int(v.table[0, 10]), :, 9] = torch.inf  # token 169
    v.data[int(v.table[0, 16]), :, 0, 3] = torch.nan  # token 256
    q = make.numbers(1, 4, queries, 32).to(dtype)
    mine = [stored([p], [tokens], 2, 32, dtype) for p in (k, v)]
    assert bool(torch.isfinite(agree(q, mine[0], mine[1], engine, mask=Window(105))).all())
    assert bool(torch.isnan(agree(q, mine[0], mine[1], engine, mask=Causal())).all())


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_every_code_of_fp8_is_the_number_that_torch_reads(engine: str):
    codes = torch.arange(256, dtype=torch.uint8)
    values = Part(1, codes.view(1, 1, 1, 256), "fp8", scale=torch.ones(1, 1, 1, 1).bfloat16(), group=256)
    keys = Part(1, torch.zeros(1, 1, 1, 4))
    k, v = (stored([p], [1], 1, dim, torch.float32) for p, dim in ((keys, 4), (values, 256)))
    found = attend(torch.zeros(1, 1, 1, 4), k, v, backend=engine)[0, 0, 0]
    torch.testing.assert_close(found, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.exhaustive(per="engine dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [16, 48, 64, 112])
@pytest.mark.parametrize("least", [0, 8], ids=["every code", "no subnormal code"])
@pytest.mark.parametrize("engine", ALL)
def test_every_code_of_fp8_gives_the_bits_of_its_number(
    engine: str, least: int, dim: int, rows: int, dtype: torch.dtype
):
    tokens, g = 2 * 128, torch.Generator().manual_seed(9)
    codes = torch.stack([torch.arange(256)[torch.randperm(256, generator=g)] for _ in range(dim)], dim=1).byte()
    codes = torch.where(codes & 127 < least, codes | 64, codes)
    codes[codes & 127 == 127] = 8 * least  # no NaN
    by_token = torch.randn(1, 1, tokens, 1, generator=g).bfloat16()
    by_channel = (
        torch.randn(1, 1, tokens // 32, dim, generator=g) / 64
    )  # scores of about 10: larger ones are rounded more
    by_channel = by_channel.bfloat16()
    tiles = codes.view(1, 1, tokens // TILE, TILE, dim).transpose(3, 4).contiguous()
    keys = Part(tokens, tiles, "fp8", scale=by_channel, tiled=True, group=32)
    values = Part(tokens, codes.view(1, 1, tokens, dim), "fp8", scale=by_token, group=dim)
    q = torch.randn(1, rows, 1, dim, generator=g).to(dtype)
    agree(q, *(stored([part], [tokens], 1, dim, dtype) for part in (keys, values)), engine=engine)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("size", [0.0, 2.0**-132, 2.0**-120, 2.0**-100, 2.0**100, 2.0**115])
@pytest.mark.parametrize("engine", ALL)
def test_scales_of_any_size_give_the_bits_of_the_numbers_of_fp8(engine: str, size: float, rows: int):
    make, tokens = Maker(11, 1, torch.bfloat16), 192
    k = make.part("fp8", [tokens], 64, tiled=True, group=32, low=False)
    v = make.part("fp8", [tokens], 64, group=64, low=False)
    assert k.scale is not None
    assert v.scale is not None
    k.scale[..., ::3] *= size
    v.scale[..., 5::7, :] *= size
    q = make.numbers(1, rows, 1, 64)
    q[..., ::3] /= max(size, 1)
    agree(q.bfloat16(), *(stored([part], [tokens], 1, 64, torch.bfloat16) for part in (k, v)), engine=engine)


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("form", ["call", "int8", "int4"])
def test_words_that_change_scores_do_so_for_stored_keys(engine: str, form: str):
    make, tokens = Maker(5, 2, torch.float32), 300
    k = make.part(form, [tokens], 64, tiled=True, group=32)
    v = make.part(form, [tokens], 64, group=32)
    both = [stored([p], [tokens], 2, 64, torch.float32) for p in (k, v)]
    words = {"bias": Alibi(8), "softcap": 5.0, "mask": Causal() & Window(170)}
    for queries in (1, 3, 40):
        agree(make.numbers(1, 8, queries, 64), both[0], both[1], engine, **words)


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_decoding_gives_the_bits_of_the_prompt(form: str, dtype: torch.dtype, engine: str):
    make, tokens = Maker(7, 2, dtype), 1100
    k = make.part(form, [tokens], 64, tiled=True, first_slot=5)
    v = make.part(form, [tokens], 48, group=32)
    ks, vs = (stored([p], [tokens], 2, dim, dtype) for p, dim in ((k, 64), (v, 48)))
    q = make.numbers(1, 8, 100, 64).to(dtype)
    whole = attend(q, ks, vs, mask=Causal(), backend=engine)
    for last in (1, 2, 3, 4, 16):
        few = attend(q[:, :, -last:], ks, vs, mask=Causal(), backend=engine)
        if unrounded(q[:, :, -last:], ks, vs):
            same(few, whole[:, :, -last:], ROUNDING[dtype])
        else:
            assert torch.equal(few, whole[:, :, -last:])


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("dim", [5, 7, 15, 31])
@pytest.mark.parametrize(
    "codec", [Int4(sinks=0, residual=0), Int4(sinks=0, residual=0, keys="token"), Int8(sinks=0, residual=0)], ids=str
)
def test_heads_that_fill_no_whole_step_of_codes(engine: str, codec: Codec, dim: int):
    g = torch.Generator().manual_seed(dim)
    q, k, v = (
        torch.randn(1, heads, tokens, dim, generator=g).bfloat16() for heads, tokens in ((4, 1), (1, 192), (1, 192))
    )
    keys, values = KVCache(codec=codec).append(k, v)
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    found = attend_state(q, keys, values, backend=engine)
    exact = attend_state(q.float(), keys.dense().float(), values.dense().float(), backend="reference")
    assert (found.lse - exact.lse).abs().max() <= 1e-2


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_a_part_without_zero_points_after_one_that_has_them(engine: str):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 16, generator=g).bfloat16() for heads, tokens in ((4, 1), (1, 64), (1, 64))
    )
    found: list[Part] = []
    for at, codec in ((0, Int4()), (32, Int8())):
        made = encode_tiled(k[:, :, at : at + 32], codec, per_token=False)
        found.append(
            Part(32, made.data, codec.kind, scale=made.scale, zero_point=made.zero_point, tiled=True, group=32)
        )
    keys = StoredTensor(tuple(found), (1, 1, 64, 16), torch.bfloat16)
    out = attend_state(q, keys, v, backend=engine)
    exact = attend_state(q.float(), keys.dense().float(), v.float(), backend="reference")
    assert (out.lse - exact.lse).abs().max() <= 1e-2


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("codec", [Int8(sinks=0, residual=0), Fp8(sinks=0, residual=0)], ids=str)
def test_a_hidden_key_whose_scale_times_the_query_overflows_reaches_no_result(engine: str, codec: Codec):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 64, generator=g) for heads, tokens in ((4, 1), (1, 128), (1, 128)))
    k[:, :, 96:99], k[:, :, 100:] = 0, k[:, :, 100:] * 1e36  # they share scales
    keys, values = KVCache(codec=codec).append(k.bfloat16(), v.bfloat16())
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    mask = KeyLengths(torch.tensor([100]))
    found = attend_state((q * 1000).bfloat16(), keys, values, mask=mask, backend=engine)
    assert found.out.isfinite().all()
    assert found.lse.isfinite().all()
