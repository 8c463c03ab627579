"""Codecs: what is written and read again is near to what came, stays in its group, and is the same in every form."""

import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.cache import Codec, Fp8, Int4, Int8
from regard.storage.codec import Codes, code_bytes, decode_rows, decode_tiled, encode_rows, encode_tiled
from regard.storage.hadamard import hadamard
from tests.stored import normal

CODECS = (Int8(), Int4(), Fp8(), Int4(group=16), Int8(group=48))
STEP = {"int8": 0.5 / 127, "int4": 0.5 / 15, "fp8": 2**-4}
"""The largest error, as a share of the range of a group: half a step; of e4m3, half of the last of 3 bits."""


def tiled(x: Tensor, codec: Codec, *, per_token: bool = False) -> Tensor:
    codes = encode_tiled(x, codec, per_token=per_token)
    return decode_tiled(codes, codec.kind, dim=x.shape[-1], per_token=per_token, group=codec.group)


def rows(x: Tensor, codec: Codec) -> Tensor:
    return decode_rows(encode_rows(x, codec), codec.kind, dim=x.shape[-1], group=codec.channels(x.shape[-1]))


def span(x: Tensor, codec: Codec, axis: int) -> Tensor:
    """What the step is a share of: the range of a group, its least number rounded down to a bf16; or the largest."""
    if codec.kind == "int4":
        least = x.amin(axis, keepdim=True)
        return x.amax(axis, keepdim=True) - least + 2**-7 * least.abs()
    return x.abs().amax(axis, keepdim=True)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dim", [1, 13, 37, 64])
def test_a_number_errs_by_half_a_step_of_its_group_at_most(codec: Codec, dim: int) -> None:
    x = 3 * normal(2, 2 * codec.group, dim) + 10 * normal(dim)
    grouped = x.unflatten(1, (2, codec.group))
    most = span(grouped, codec, 2).expand_as(grouped).flatten(1, 2) * STEP[codec.kind] * 1.02
    assert ((tiled(x, codec) - x).abs() <= most + 1e-2 * most.mean()).all()
    token = span(x, codec, 2) * STEP[codec.kind] * 1.02
    assert ((tiled(x, codec, per_token=True) - x).abs() <= token + 1e-6).all()
    assert ((rows(x, codec) - x).abs() <= token + 1e-6).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_group_is_written_from_its_own_numbers_alone(codec: Codec) -> None:
    x = normal(1, 3 * codec.group, 11)
    first = tiled(x[:, : codec.group], codec)
    x[:, codec.group :] *= 100
    assert torch.equal(tiled(x, codec)[:, : codec.group], first)
    changed = rows(x, codec)
    x[:, 5] = 7.0
    others = [i for i in range(x.shape[1]) if i != 5]
    assert torch.equal(rows(x, codec)[:, others], changed[:, others])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_was_read_is_written_as_the_same_numbers_where_scales_can_say_them(codec: Codec) -> None:
    x = torch.randint(0, 8, (1, 2 * codec.group, 13)).float()  # exact in all of them
    x[:, 0::16], x[:, 1::16] = 0.0, 7.0
    again = tiled(tiled(x, codec), codec)
    assert torch.equal(again, tiled(x, codec))


def test_a_constant_group_and_zeros_are_exact_to_a_bf16() -> None:
    for codec in CODECS:
        zeros = torch.zeros(1, codec.group, 5)
        assert torch.equal(tiled(zeros, codec), zeros)
        assert torch.equal(rows(zeros, codec), zeros)
        sevens = torch.full((1, codec.group, 5), -7.0)
        assert torch.allclose(tiled(sevens, codec), sevens, rtol=2**-4 if codec.kind == "fp8" else 2**-7)


def test_codes_lie_as_the_description_says() -> None:
    x = torch.zeros(1, 32, 5)
    x[0, 17, 3] = 127.0
    data = encode_tiled(x, Int8(), per_token=False).data
    assert data.shape == (1, 2, 5, 16)
    assert data.nonzero().tolist() == [[0, 1, 3, 1]]
    four = encode_tiled(x, Int4(), per_token=False).data
    assert four.shape == (1, 2, 3, 16)
    assert four[0, 1, 1, 1] == 15 << 4  # channel 3 above channel 2
    values = torch.zeros(1, 1, 40)
    values[0, 0, 17], values[0, 0, 33] = 1.0, 1.0
    row = encode_rows(values, Int4(group=16)).data
    assert row.shape == (1, 1, code_bytes("int4", 40, tiled=False)) == (1, 1, 32)
    assert {i: int(b) for i, b in enumerate(row[0, 0]) if b} == {1: 15 << 4, 17: 15}


def test_fp8_reads_every_code_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # the two NaN
    one = torch.ones(len(codes), 1, dtype=torch.bfloat16)
    found = decode_rows(Codes(codes[:, None], one, None), "fp8", dim=1, group=1)
    assert torch.equal(found[:, 0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_elements_that_cannot_be_stored_are_refused(bad: float) -> None:
    x = normal(1, 32, 4)
    x[0, 3, 2] = bad
    for codec in CODECS[:3]:
        with pytest.raises(ProblemError, match="cannot be stored"):
            encode_tiled(x, codec, per_token=False)
        with pytest.raises(ProblemError, match="cannot be stored"):
            encode_rows(x, codec)


@pytest.mark.exhaustive(per="codec")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("least", [-1.0, -0.01, 0.0, 0.99])
def test_what_is_finite_is_read_finite_and_near(least: float, codec: Codec, dtype: torch.dtype) -> None:
    """Scales cover what came, but no further than the type goes: of float16 to 65,504."""
    end = torch.finfo(dtype).max * (1.0 if dtype == torch.float16 or least >= 0 else 0.49)  # a range that float32 has
    share = torch.rand(1, codec.group, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = ((least + (1 - least) * share) * end).to(dtype)
    x[..., 3], x[..., 7] = end, least * end
    for signed in (x, -x):
        most = 1.02 * end * ((1 - least if codec.kind == "int4" else 1) * STEP[codec.kind] + 2**-6)
        for found in (tiled(signed, codec), tiled(signed, codec, per_token=True), rows(signed, codec)):
            read = found.to(dtype)
            assert read.isfinite().all()
            assert ((read.double() - signed.double()).abs() <= most).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"group": 8},
        {"group": 24},
        {"residual": -1},
        {"sinks": -1},
        {"keys": "row"},
        {"group": 1.5},
        {"rotate": "no"},
    ],
    ids=str,
)
def test_codecs_that_make_no_sense_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ProblemError, match="expected"):
        Int4(**arguments)  # pyright: ignore[reportArgumentType]


def test_a_rotation_spreads_a_large_channel() -> None:
    x = normal(64, 64) * 0.1
    x[:, 7] = 20.0
    plain = (rows(x, Int4()) - x).norm()
    turned = (hadamard(rows(hadamard(x), Int4())) - x).norm()
    assert turned < 0.7 * plain
