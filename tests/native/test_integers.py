"""Few rows of bf16 against codes that are multiplied as they are, and here is that in plain.

int8 and int4 meet queries and weights in fixed point (native/fixed.h), fp8 as bf16 on machines with such products.
Codes of NaN are tried where fp8 is decoded, too.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from regard import Causal, Window, attend, attend_state
from regard.bench.rounds import on_threads
from regard.cache import Codec, Fp8, Int4, Int8, StoredTensor
from regard.storage.codec import Codes, decode_rows, decode_tiled
from regard.storage.stored import Part
from tests.native.engines import ALL, INTEGERS, PAIRS
from tests.stored import coded

CODECS = {"int8": Int8(), "int4": Int4(), "int8, groups of 16": Int8(group=16), "int4, groups of 48": Int4(group=48)}
FLOATS = {"fp8": Fp8(), "fp8, groups of 48": Fp8(group=48)}

INTEGER_CASES = [pytest.param(e, codec, id=f"{e}-{name}") for e in INTEGERS for name, codec in CODECS.items()]
CASES = INTEGER_CASES + [pytest.param(e, codec, id=f"{e}-{name}") for e in PAIRS for name, codec in FLOATS.items()]

for_integers = pytest.mark.parametrize(("engine", "codec"), INTEGER_CASES)
for_all = pytest.mark.parametrize(("engine", "codec"), CASES)


class Made(NamedTuple):
    """A call, and the float32 numbers that its codes stand for."""

    q: Tensor  # bf16 [1, heads, queries, dim]
    k: StoredTensor
    v: StoredTensor
    keys: Tensor
    values: Tensor

    @property
    def exact(self) -> Tensor:
        return attend(self.q.double(), self.keys.double(), self.values.double(), backend="reference")


def normal(*sizes: int, seed: int = 0) -> Tensor:
    """Random numbers, some channels of which are large."""
    g = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=g) * (1 + 6 * (torch.rand(sizes[-1], generator=g) > 0.9))


def stored(part: Part, t: Tensor) -> StoredTensor:
    return StoredTensor((part,), (t.shape[0], t.shape[1], t.shape[2], t.shape[3]), torch.bfloat16)


def numbers(part: Part, dim: int, *, codes: bool = False) -> Tensor:
    """What a part of codes in one page stands for, or the codes alone."""
    assert part.scale is not None
    scale, low = (torch.ones_like(part.scale), None) if codes else (part.scale, part.zero_point)
    read = Codes(part.data, scale, low)
    if part.tiled:
        return decode_tiled(read, part.kind, dim=dim, per_token=part.per_token, group=part.group)
    return decode_rows(read, part.kind, dim=dim, group=part.group)


def made(
    codec: Codec, tokens: int, *, queries: int = 1, dim: int = 64, heads: int = 4, per_token: bool = False
) -> Made:
    k, v = normal(1, 1, tokens, dim), normal(1, 1, tokens, 64, seed=1)
    parts = coded(k, codec, keys=True, per_token=per_token), coded(v, codec, keys=False)
    q = normal(1, heads, queries, dim, seed=2).bfloat16()
    both = [stored(part, t) for part, t in zip(parts, (k, v), strict=True)]
    return Made(q, both[0], both[1], numbers(parts[0], dim), numbers(parts[1], 64))


# ---- the plain form ----


def fixed(x: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """(whole numbers, what one of them is) of float32 [..., n] whose n are summed together; as bf16 for fp8."""
    if part.kind == "fp8":
        return x.bfloat16().double(), torch.ones_like(x[..., :1])
    most = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-111)
    steps = torch.tensor(32639.0) / most
    return (x.double() * steps.double()).round(), most * (torch.tensor(1.0) / 32639)


def spread(t: Tensor, times: int, axis: int) -> Tensor:
    return t.float().repeat_interleave(times, axis)


def plain_scores(q: Tensor, part: Part) -> Tensor:
    """float64 [rows, tokens] of q [rows, dim]."""
    codes = numbers(part, q.shape[-1], codes=True)[0, 0].double()
    assert part.scale is not None
    low = torch.zeros_like(part.scale) if part.zero_point is None else part.zero_point
    if part.per_token:
        whole, unit = fixed(q.float(), part)
        products = (whole @ codes.T).float() * unit
        return products.double() * part.scale[0, 0].double() + q.double().sum(-1)[:, None] * low[0, 0].double()
    scale, low = (spread(t[0, 0], part.group, 0)[: len(codes)] for t in (part.scale, low))
    whole, unit = fixed(q.float()[:, None] * scale, part)
    products = (whole * codes).sum(-1).float() * unit[..., 0]
    return products.double() + q.double() @ low.double().T


def plain_output(p: Tensor, part: Part, dim: int) -> Tensor:
    """float64 [rows, dim]: weights float32 [rows, tokens] of one block times values, by groups of channels."""
    codes = numbers(part, dim, codes=True)[0, 0].double()
    assert part.scale is not None
    found = list[Tensor]()
    for g in range(part.scale.shape[-1]):
        mine = codes[:, g * part.group : (g + 1) * part.group]
        whole, unit = fixed(p * part.scale[0, 0, :, g].float(), part)
        low = 0 if part.zero_point is None else (p.double() @ part.zero_point[0, 0, :, g].double())[:, None]
        found.append((whole @ mine) * unit.double() + low)
    return torch.cat(found, -1)


def rough_exp2(x: Tensor) -> Tensor:
    """2^x as native/exp.h has it for products of bf16."""
    whole = x.floor()
    f, p = x - whole, torch.tensor(0.07706705142)
    for coefficient in (0.2276449809, 0.6951167888, 1.0):
        p = p * f + coefficient
    return p * 2.0**whole


@for_all
@pytest.mark.exhaustive(per="dim")
@pytest.mark.parametrize("per_token", [False, True], ids=["by channel", "by token"])
@pytest.mark.parametrize("dim", [1, 5, 33, 64, 128, 300, 1061])
def test_scores_are_those_of_the_plain_form(engine: str, codec: Codec, dim: int, per_token: bool) -> None:
    call = made(codec, 96, queries=16, dim=dim, heads=1, per_token=per_token)
    # each row sees one key, so its lse is that score
    found = attend_state(call.q, call.k, call.v, mask=Causal() & Window(1), scale=1.0, backend=engine).lse[0, 0]
    expected = plain_scores(call.q[0, 0], call.k.parts[0])[:, -16:].diagonal()
    size = float((call.q.float().norm(dim=-1) * call.keys[0, 0, -16:].norm(dim=-1)).max())
    assert (found - expected).abs().max() < 1e-6 * size


@for_integers
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_of_many_channels_leave_no_sum(engine: str, codec: Codec, sign: int) -> None:
    dim = 3000
    k, v, q = torch.ones(1, 1, 96, dim), torch.ones(1, 1, 96, 64), torch.full((1, 4, 1, dim), float(sign)).bfloat16()
    part = coded(k, codec, keys=True)
    most = part._replace(data=torch.full_like(part.data, 127 if codec.kind == "int8" else 255))
    low = torch.zeros_like(part.scale) if part.scale is not None and part.zero_point is not None else None
    most = most._replace(scale=torch.ones_like(part.scale) if part.scale is not None else None, zero_point=low)
    found = attend_state(q, stored(most, k), stored(coded(v, codec, keys=False), v), scale=1.0, backend=engine).lse
    expected = sign * dim * (127.0 if codec.kind == "int8" else 15.0) + torch.log(torch.tensor(96.0))
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-6, atol=0)


@for_integers
@pytest.mark.parametrize("dim", [16, 48, 80, 144])
def test_the_largest_codes_of_a_whole_block_leave_no_sum_of_values(engine: str, codec: Codec, dim: int) -> None:
    k, v, q = torch.ones(1, 1, 192, 64), torch.ones(1, 1, 192, dim), torch.zeros(1, 4, 1, 64).bfloat16()
    part = coded(v, codec, keys=False)
    assert part.scale is not None
    signs = torch.where(torch.arange(part.data.shape[-1]) % 3 == 0, 1, -1)
    codes = (127 * signs).to(torch.int8) if codec.kind == "int8" else torch.full_like(signs, 255).to(torch.uint8)
    most = part._replace(data=codes.view(part.data.dtype).expand_as(part.data).contiguous())
    low = None if part.zero_point is None else torch.zeros_like(part.scale)
    most = most._replace(scale=torch.ones_like(part.scale), zero_point=low)
    found = attend(q, stored(coded(k, codec, keys=True), k), stored(most, v), backend=engine)
    expected = codes[:dim].bfloat16() if codec.kind == "int8" else torch.full((dim,), 15.0).bfloat16()
    assert torch.equal(found, expected.expand_as(found))


@for_all
def test_outputs_are_those_of_the_plain_form(engine: str, codec: Codec) -> None:
    call = made(codec, 96)
    scores = plain_scores(call.q[0, :, 0], call.k.parts[0]).float()
    exp2 = rough_exp2 if engine in PAIRS else torch.exp2
    p = exp2((scores - scores.amax(-1, keepdim=True)) * (64**-0.5 / torch.log(torch.tensor(2.0))))
    expected = (plain_output(p, call.v.parts[0], 64) / p.double().sum(-1, keepdim=True)).bfloat16()
    found = attend(call.q, call.k, call.v, backend=engine)[0, :, 0]
    assert (found == expected).double().mean() > 0.98  # elsewhere they round to neighbours
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=1e-4)


@for_all
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_query_gives_nan_where_all_codes_of_a_channel_have_one_sign(
    engine: str, codec: Codec, sign: int
) -> None:
    call = made(codec, 96)
    keys = sign * (1 + call.keys.abs())
    q = call.q.clone()
    q[0, 1, 0, 5] = sign * torch.inf
    found = attend_state(q, stored(coded(keys, codec, keys=True), keys), call.v, backend=engine)
    assert bool(found.out[0, 1].isnan().all())
    assert bool(found.lse[0, 1].isnan().all())


# ---- what it is for ----


@for_integers
@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("per_token", [False, True], ids=["by channel", "by token"])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_error_is_less_than_that_of_numbers_in_bf16(
    engine: str, codec: Codec, queries: int, per_token: bool
) -> None:
    call = made(codec, 960, queries=queries, per_token=per_token)
    whole = attend(call.q, call.k, call.v, backend=engine).double() - call.exact
    rounded = attend(call.q, call.k.dense(), call.v.dense(), backend=engine).double() - call.exact
    assert whole.norm() < 0.8 * rounded.norm()
    lse = [torch.logsumexp(call.q.double() @ call.keys.double().mT / 8, -1)]
    lse += [attend_state(call.q, k, call.v, backend=engine).lse for k in (call.k, call.k.dense())]
    assert (lse[1] - lse[0]).norm() < 0.5 * (lse[2] - lse[0]).norm()


@for_all
def test_neither_rows_beside_nor_threads_change_a_bit(engine: str, codec: Codec) -> None:
    call = made(codec, 576, queries=4)
    whole = attend_state(call.q, call.k, call.v, mask=Causal(), backend=engine)
    for last in (1, 2, 3):
        few = attend_state(call.q[:, :, -last:], call.k, call.v, mask=Causal(), backend=engine)
        assert torch.equal(few.out, whole.out[:, :, -last:])
        assert torch.equal(few.lse, whole.lse[:, :, -last:])
    for head in range(4):
        alone = attend(call.q[:, head : head + 1, -1:], call.k, call.v, backend=engine)
        assert torch.equal(alone[0, 0, 0], whole.out[0, head, -1])
    with on_threads(2):
        assert torch.equal(attend(call.q, call.k, call.v, mask=Causal(), backend=engine), whole.out)


@for_all
@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("window", [9, 40, 130, 333])
def test_what_a_window_hides_from_one_row_changes_no_bit_of_another(engine: str, codec: Codec, window: int) -> None:
    call = made(codec, 576, queries=4)
    mask = Causal() & Window(window)
    whole = attend(call.q, call.k, call.v, mask=mask, backend=engine)
    for row in range(4):
        alone = attend(call.q[:, :, row : row + 1], call.k, call.v, mask=mask, offset=572 + row, backend=engine)
        assert torch.equal(alone, whole[:, :, row : row + 1])


@for_all
def test_pages_in_any_order_change_nothing(engine: str, codec: Codec) -> None:
    call = made(codec, 576)
    k, v = normal(1, 1, 576, 64), normal(1, 1, 576, 64, seed=1)
    expected = attend(call.q, call.k, call.v, backend=engine)
    for page in (codec.group, 3 * codec.group):
        paged = (stored(coded(t, codec, keys=keys, page=page), t) for t, keys in ((k, True), (v, False)))
        assert torch.equal(attend(call.q, *paged, backend=engine), expected)


def with_value_scale(call: Made, token: int, x: float) -> StoredTensor:
    part = call.v.parts[0]
    assert part.scale is not None
    scale = part.scale.clone()
    scale[:, :, token] = x
    return stored(part._replace(scale=scale), call.values)


@for_all
@pytest.mark.parametrize("x", [torch.nan, torch.inf])
def test_a_hidden_scale_that_is_not_finite_never_shows(engine: str, codec: Codec, x: float) -> None:
    call = made(codec, 576, queries=3)
    mask = Causal() & Window(60)
    v = with_value_scale(call, 514, x)  # the first row sees it, the others do not
    found = attend(call.q, call.k, v, mask=mask, backend=engine)
    assert not bool(torch.isfinite(found[:, :, 0]).any())
    assert torch.equal(found[:, :, 1:], attend(call.q, call.k, call.v, mask=mask, backend=engine)[:, :, 1:])


@pytest.mark.parametrize("engine", PAIRS)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_hidden_code_that_is_nan_never_shows(engine: str, rows: int, groups: int) -> None:
    call = made(Fp8(group=64 // groups), 576, queries=3, heads=rows)
    mask = Causal() & Window(60)
    part = call.v.parts[0]
    codes = part.data.clone()
    codes[:, :, 514, 3] = 127  # the first row sees it, the others do not
    found = attend(call.q, call.k, stored(part._replace(data=codes), call.values), mask=mask, backend=engine)
    assert bool(found[:, :, 0, 3].isnan().all())
    expected = attend(call.q, call.k, call.v, mask=mask, backend=engine)
    assert torch.equal(found[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(found[:, :, 0, 4:], expected[:, :, 0, 4:])


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize(("token", "code"), [(514, 127), (521, 255)], ids=["lower half", "upper half"])
def test_a_code_of_a_key_that_is_nan_reaches_only_rows_that_see_it(engine: str, token: int, code: int) -> None:
    call = made(Fp8(), 576, queries=3)
    mask = Causal() & Window(574 - token)  # the first row sees it, the others do not
    part = call.k.parts[0]
    codes = part.data.clone()
    codes[:, :, token // 16, 3, token % 16] = code
    found = attend(call.q, stored(part._replace(data=codes), call.keys), call.v, mask=mask, backend=engine)
    assert bool(found[:, :, 0].isnan().all())
    assert torch.equal(found[:, :, 1:], attend(call.q, call.k, call.v, mask=mask, backend=engine)[:, :, 1:])


@for_all
@pytest.mark.parametrize("spoil", [lambda x: x * torch.nan, lambda x: x * torch.inf], ids=["nan", "inf"])
def test_a_query_that_is_not_finite_gives_nan(engine: str, codec: Codec, spoil: Callable[[Tensor], Tensor]) -> None:
    call = made(codec, 96)
    q = call.q.clone()
    q[0, 1, 0, 5] = spoil(q[0, 1, 0, 5])
    found = attend(q, call.k, call.v, backend=engine)
    assert bool(found[0, 1].isnan().all())
    assert torch.equal(found[0, 2:], attend(call.q, call.k, call.v, backend=engine)[0, 2:])


@for_all
@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_numbers_of_any_size_keep_their_precision(engine: str, codec: Codec, size: float) -> None:
    call = made(codec, 96)
    q, scale = call.q.double() * size, 1 / (8 * size)
    found = attend(q.bfloat16(), call.k, call.v, scale=scale, backend=engine)
    exact = attend(q.bfloat16().double(), call.keys.double(), call.values.double(), scale=scale, backend="reference")
    atol = 2e-2 if codec.kind == "fp8" else 1e-2  # queries times scales are rounded to bf16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=atol)
