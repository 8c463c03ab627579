"""Positions: the laws of rotation, worked numbers of every formula, and transformers as the second opinion."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_to_first_dims
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from regard import Alibi, ProblemError, RefusalError, T5Bias
from regard.describe import position_table, rotation
from regard.describe.position import Learned, Rope, Sinusoidal
from regard.describe.recent import Recent
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn
from regard.describe.spec import deserialize

FAR = 1_000_000


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Tensor]:
    """No table from another test."""
    fresh: Recent[Any, Tensor] = Recent(entries=1024, nbytes=position_table.KEPT, size=lambda table: table.nbytes)
    monkeypatch.setattr(position_table, "_tables", fresh)
    return fresh._kept


def turned_by_hand(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Every pair as a 2 x 2 matrix times a vector, in Python's numbers."""
    out, pairs = x.clone(), angles.shape[-1]
    for token in range(x.shape[-2]):
        for i in range(pairs):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
            cos, sin = math.cos(angles[token, i]), math.sin(angles[token, i])
            out[..., token, a] = cos * x[..., token, a] - sin * x[..., token, b]
            out[..., token, b] = sin * x[..., token, a] + cos * x[..., token, b]
    return out


# ---- laws -----------------------------------------------------------------------------------------------------------


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    dim, fraction = draw(st.sampled_from([(4, 1.0), (8, 0.5), (10, 1.0), (14, 1.0), (26, 1.0), (64, 0.25), (80, 0.4)]))
    pairs = int(dim * fraction) // 2
    factor = draw(st.sampled_from([1.0, 1.7, 8.0, 40.0]))
    original = draw(st.sampled_from([23, 4096, 32768]))
    divisors = st.tuples(*[st.floats(1.0, 64.0)] * pairs)
    scaling = draw(
        st.one_of(
            st.none(),
            st.just(Linear(factor)),
            st.just(NTK(factor)),
            st.just(DynamicNTK(factor, original)),
            st.builds(Yarn, st.just(factor), st.just(original), truncate=st.booleans()),
            st.just(Llama3(factor, original=original)),
            st.builds(LongRope, divisors, divisors, st.just(original), st.just(factor)),
            st.builds(Proportional, st.floats(0.1, 1.0)),
        )
    )
    return Rope(dim, draw(st.floats(2.0, 1e7)), scaling, fraction, draw(st.booleans()))


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


@settings(max_examples=60)
@given(ropes(), st.integers(-FAR, FAR), st.integers(1, 50_000))
def test_scores_depend_on_the_distance_alone(rope: Rope, shift: int, tokens: int):
    q, k, i, j = unit(1, 2, 5, rope.dim), unit(1, 2, 7, rope.dim), torch.arange(5) * 3, torch.arange(7) * 11
    near = rope.rotate(q, i, tokens) @ rope.rotate(k, j, tokens).mT
    far = rope.rotate(q, i + shift, tokens) @ rope.rotate(k, j + shift, tokens).mT
    torch.testing.assert_close(near, far, atol=1e-9 * rope.attention_factor() ** 2, rtol=0)


@settings(max_examples=30)
@given(ropes(), st.integers(-FAR, FAR))
def test_turning_keeps_norms_and_turning_back_gives_x(rope: Rope, position: int):
    x, p, square = unit(1, 1, 3, rope.dim), torch.tensor([position, 0, 1]), rope.attention_factor() ** 2
    turned, rotated = rope.rotate(x, p, 7), rope.rotated
    torch.testing.assert_close(turned[..., :rotated].norm(dim=-1) ** 2, x[..., :rotated].norm(dim=-1) ** 2 * square)
    back = rope.rotate(turned, -p, 7)
    torch.testing.assert_close(back[..., :rotated], x[..., :rotated] * square, atol=1e-12, rtol=0)
    assert torch.equal(back[..., rotated:], x[..., rotated:])  # what does not turn is not touched


@settings(max_examples=40)
@given(ropes(), st.integers(-3, FAR), st.sampled_from([1, 5]))
def test_every_pair_is_turned_by_its_angle(rope: Rope, first: int, tokens: int):
    x = torch.randn(2, 3, tokens, rope.dim, dtype=torch.float64)
    p = torch.arange(first, first + tokens)
    angles = p[:, None].double() * rope.frequencies(13)
    expected = turned_by_hand(x, angles, interleaved=rope.interleaved)
    expected[..., : rope.rotated] *= rope.attention_factor()
    torch.testing.assert_close(rope.rotate(x, p, 13), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rope.rotate(x, first, 13), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("base", [10000.0, 71.0])
def test_sinusoids_move_on_by_one_rotation_for_all_positions(base: float):
    word, ahead = Sinusoidal(14, base), 17
    here = word.table(torch.arange(0, FAR, 9973, dtype=torch.float64)).unflatten(-1, (7, 2))
    there = word.table(torch.arange(0, FAR, 9973, dtype=torch.float64) + ahead).unflatten(-1, (7, 2))
    angle = ahead * base ** (-torch.arange(7, dtype=torch.float64) / 7)
    block = torch.stack((angle.cos(), angle.sin(), -angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
    torch.testing.assert_close(torch.einsum("ixy,piy->pix", block, here), there, atol=1e-9, rtol=0)


# ---- worked by hand -------------------------------------------------------------------------------------------------


def test_sinusoids_are_the_papers():
    table = Sinusoidal(4, base=100.0).table(torch.tensor([[0, 3]]))  # frequencies 1 and 1/10
    hand = [[0.0, 1.0, 0.0, 1.0], [math.sin(3), math.cos(3), math.sin(0.3), math.cos(0.3)]]
    torch.testing.assert_close(table, torch.tensor([hand]))


@pytest.mark.parametrize("word", [Rope, Sinusoidal])
def test_a_width_is_a_whole_number_of_any_kind(word: Any):
    assert word(np.int64(16)) == word(16)
    for width, says in ((True, "whole number"), (16.0, "whole number"), (7, "even number"), (0, "at least 2")):
        with pytest.raises(ProblemError, match=says):
            word(width)


def test_plain_frequencies_are_powers_of_the_base():
    assert Rope(8, base=16.0).frequencies().tolist() == [1.0, 0.5, 0.25, 0.125]
    assert Rope(16, base=16.0, fraction=0.5).frequencies().tolist() == [1.0, 0.5, 0.25, 0.125]  # of what turns
    assert Rope(8, base=16.0, scaling=Linear(4.0)).frequencies().tolist() == [0.25, 0.125, 0.0625, 0.03125]


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor():
    # d = 4: base' = base * s ** (4 / 2) = 16 * 9, of which the frequencies are 1 and 144 ** -0.5 = 1/12 = 1/4 / 3
    assert Rope(4, base=16.0, scaling=NTK(3.0)).frequencies().tolist() == pytest.approx([1.0, 1 / 12])
    assert Rope(6, base=8.0, scaling=NTK(4.0)).frequencies().tolist() == pytest.approx([1.0, 0.5 / 2, 0.25 / 4])


def test_dynamic_ntk_stretches_with_the_length():
    rope = Rope(4, base=16.0, scaling=DynamicNTK(2.0, original=10))
    assert rope.frequencies().tolist() == rope.frequencies(10).tolist() == [1.0, 0.25]
    assert rope.frequencies(15).tolist() == pytest.approx([1.0, 0.25 / 2])  # s = 2 * 15 / 10 - 1 = 2
    assert rope.frequencies(40).tolist() == pytest.approx([1.0, 0.25 / 7])  # s = 2 * 40 / 10 - 1 = 7


def test_yarn_ramps_between_the_pairs_of_the_paper():
    # d = 128, base 1e6, 32768 tokens: pair of 32 turns 128 ln(32768 / (64 pi)) / (2 ln 1e6) = 23.6, of 1 turn 39.7
    yarn = Yarn(4.0, 32768)
    assert yarn.ramp(128, 1e6) == (23, 40)
    assert Yarn(4.0, 32768, truncate=False).ramp(128, 1e6) == pytest.approx((23.596, 39.651), abs=1e-3)
    ratio = Rope(128, 1e6, yarn).frequencies() / Rope(128, 1e6).frequencies()
    torch.testing.assert_close(ratio[:24], torch.ones(24, dtype=torch.float64))
    torch.testing.assert_close(ratio[40:], torch.full((24,), 0.25, dtype=torch.float64))
    assert ratio[31].item() == pytest.approx(1 - (31 - 23) / (40 - 23) * 0.75)


def test_yarn_keeps_pairs_that_all_turn_often():
    rope = Rope(16, 10.0, Yarn(4.0, 100_000))  # the slowest pair turns 2,100 times
    assert torch.equal(rope.frequencies(), Rope(16, 10.0).frequencies())


def test_yarn_sharpens_scores_by_its_attention_factor():
    assert Yarn(4.0, 32768).magnitude() == pytest.approx(0.1 * math.log(4) + 1)
    assert Yarn(4.0, 32768, attention_factor=1.5).magnitude() == 1.5
    deepseek_v2 = Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert deepseek_v2.magnitude() == 1.0
    assert deepseek_v2.score_factor() == pytest.approx((0.0707 * math.log(40) + 1) ** 2)
    assert Yarn(math.e, 64, mscale=2.0, mscale_all_dim=1.0).magnitude() == pytest.approx(1.2 / 1.1)
    x = torch.randn(1, 1, 3, 8)
    turned = Rope(8, scaling=Yarn(4.0, 64), fraction=0.5).rotate(x)
    torch.testing.assert_close(turned[..., 0, :4], x[..., 0, :4] * (0.1 * math.log(4) + 1))  # position 0: no angle
    assert torch.equal(turned[..., 4:], x[..., 4:])


def test_llama3_divides_long_wavelengths_alone():
    # original 2 pi * 8: the pair of frequency f makes 8 f turns; d = 8, base 16: f = 1, 1/2, 1/4, 1/8, turns 8, 4, 2, 1
    turns = Llama3(10.0, low=1.5, high=3.5, original=50)  # 50 / (2 pi) = 7.96
    got = (Rope(8, 16.0, turns).frequencies() / Rope(8, 16.0).frequencies()).tolist()
    kept = (50 / (2 * math.pi) / 4 - 1.5) / 2  # of the pair with 1.99 turns
    assert got == pytest.approx([1.0, 1.0, (1 - kept) / 10 + kept, 0.1])


def test_longrope_divides_by_its_tuples():
    rope = Rope(4, 16.0, LongRope((1.0, 2.0), (4.0, 8.0), original=16, factor=16.0))
    assert rope.frequencies().tolist() == rope.frequencies(16).tolist() == [1.0, 0.125]
    assert rope.frequencies(17).tolist() == [0.25, 0.03125]
    assert rope.attention_factor(5) == rope.attention_factor(17) == pytest.approx(math.sqrt(2))  # ln 16 / ln 16 = 1
    assert LongRope((1.0,), (1.0,), original=16).magnitude() == 1.0


def test_proportional_leaves_slow_pairs_unturned():
    rope = Rope(8, 16.0, Proportional(0.5, factor=2.0))
    assert rope.frequencies().tolist() == [0.5, 0.25, 0.0, 0.0]
    x = torch.randn(1, 1, 3, 8)
    assert torch.equal(rope.rotate(x, 5)[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]])


# ---- transformers ---------------------------------------------------------------------------------------------------


def spread(pairs: int, last: float) -> tuple[float, ...]:
    """Divisors as searched ones are: near 1 for fast pairs, tens for slow ones."""
    return tuple(1.0 + (last - 1.0) * (i / pairs) ** 3 for i in range(pairs))


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


def llama3(factor: float) -> dict[str, Any]:
    named = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "factor": factor, **named}


def longrope(pairs: int, short: float, long: float, **more: Any) -> dict[str, Any]:
    tuples = {"short_factor": list(spread(pairs, short)), "long_factor": list(spread(pairs, long))}
    return {"rope_type": "longrope", "original_max_position_embeddings": 4096, **tuples, **more}


# name: our word, its rope_parameters without rope_theta, max_position_embeddings
PUBLISHED: dict[str, tuple[Rope, dict[str, Any], int]] = {
    "Llama-3.1": (Rope(128, 500000.0, Llama3(8.0)), llama3(8.0), 131072),
    "Llama-3.2": (Rope(64, 500000.0, Llama3(32.0)), llama3(32.0), 131072),
    "Qwen2.5 and Qwen3 YaRN": (Rope(128, 1e6, Yarn(4.0, 32768)), yarn(4.0, 32768), 131072),
    "DeepSeek-V3": (
        Rope(64, 10000.0, Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), interleaved=True),
        yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
        163840,
    ),
    "an mscale of each": (
        Rope(64, 10000.0, Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)),
        yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707),
        163840,
    ),
    "a ramp from the first pair": (Rope(16, 10000.0, Yarn(4.0, 64)), yarn(4.0, 64), 256),
    "a ramp past the last pair": (Rope(16, 100.0, Yarn(4.0, 100_000)), yarn(4.0, 100_000), 400_000),
    "gpt-oss": (
        Rope(64, 150000.0, Yarn(32.0, 4096, truncate=False)),
        yarn(32.0, 4096, truncate=False, beta_fast=32.0, beta_slow=1.0),
        131072,
    ),
    "Phi-3-mini-128k": (
        Rope(96, 10000.0, LongRope(spread(48, 2.9), spread(48, 64.8), 4096, factor=32.0)),
        longrope(48, 2.9, 64.8),
        131072,
    ),
    "Phi-3-medium-128k": (
        Rope(128, 10000.0, LongRope(spread(64, 2.3), spread(64, 62.4), 4096, factor=32.0)),
        longrope(64, 2.3, 62.4),
        131072,
    ),
    "Phi-4-mini": (
        Rope(128, 10000.0, LongRope(spread(48, 1.0), spread(48, 55.5), 4096, factor=32.0), fraction=0.75),
        longrope(48, 1.0, 55.5, partial_rotary_factor=0.75),
        131072,
    ),
    "an attention factor given": (
        Rope(96, 10000.0, LongRope(spread(48, 2.9), spread(48, 64.8), 4096, attention_factor=1.25)),
        longrope(48, 2.9, 64.8, attention_factor=1.25),
        131072,
    ),
    "CodeLlama, stretched": (Rope(128, 1e6, Linear(4.0)), {"rope_type": "linear", "factor": 4.0}, 16384),
    "Yi-200K, stretched": (Rope(128, 5e6, DynamicNTK(2.0, 4096)), {"rope_type": "dynamic", "factor": 2.0}, 4096),
    "GPT-NeoX, stretched": (
        Rope(96, 10000.0, Linear(2.0), fraction=0.25),
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25},
        2048,
    ),
    "Gemma 4, full attention": (
        Rope(512, 1e6, Proportional(0.25)),
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        131072,
    ),
}


def config_of(rope: Rope, parameters: dict[str, Any], longest: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=rope.dim * 2,
        num_attention_heads=2,
        head_dim=rope.dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": rope.base, **parameters},
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tokens", [None, 4096, 9973, 200_003])
def test_frequencies_are_those_of_published_models(name: str, tokens: int | None):
    rope, parameters, longest = PUBLISHED[name]
    config = config_of(rope, parameters, longest)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=tokens)
    torch.testing.assert_close(rope.frequencies(tokens).float(), expected, rtol=3e-6, atol=1e-12)  # theirs is float32
    assert rope.attention_factor(tokens) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("base", "dim"), [(1e4, 128), (1e6, 128), (5e6, 128), (1e5, 64)])
def test_big_bases_are_as_transformers_has_them(base: float, dim: int):
    rope = Rope(dim, base)
    config = config_of(rope, {"rope_type": "default"}, 200_000)
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    torch.testing.assert_close(rope.frequencies().float(), expected, rtol=3e-6, atol=0)


def cos_sin(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers hands them to `apply_rotary_pos_emb`: [batch, tokens, rotated]."""
    angles = positions[..., None].double() * rope.frequencies()
    whole = torch.cat((angles, angles), -1)
    return (whole.cos() * rope.attention_factor()).float(), (whole.sin() * rope.attention_factor()).float()


def test_halves_turn_as_in_llama():
    rope, p = Rope(26, 500.0, Yarn(4.0, 64)), torch.randint(0, 97, (2, 5))
    q, k = torch.randn(2, 6, 5, 26), torch.randn(2, 3, 5, 26)
    expected = apply_rotary_pos_emb(q, k, *cos_sin(rope, p))
    torch.testing.assert_close((rope.rotate(q, p), rope.rotate(k, p)), expected)


def test_the_first_dimensions_turn_as_in_gpt_neox():
    rope, p = Rope(24, fraction=0.25), torch.arange(7)[None] + 3
    q, k = torch.randn(2, 6, 7, 24), torch.randn(2, 6, 7, 24)
    expected = apply_to_first_dims(q, k, *cos_sin(rope, p))
    torch.testing.assert_close((rope.rotate(q, 3), rope.rotate(k, 3)), expected)


def test_neighbours_turn_as_in_deepseek():
    rope, p = Rope(10, interleaved=True), torch.arange(7)[None]
    q, k = torch.randn(2, 6, 7, 10), torch.randn(2, 1, 7, 10)
    theirs_q, theirs_k = apply_rotary_pos_emb_interleave(q, k, *cos_sin(rope, p))
    ours_q, ours_k = rope.rotate(q), rope.rotate(k)
    torch.testing.assert_close(ours_q @ ours_k.mT, theirs_q @ theirs_k.mT)
    apart = torch.cat((ours_q[..., 0::2], ours_q[..., 1::2]), -1)  # they lay the halves one after the other
    torch.testing.assert_close(apart, theirs_q)


# ---- numbers and memory ---------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "heads beside tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimensions apart": lambda x: x.mT.contiguous().mT,
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a slice of wider rows": lambda x: torch.cat((x, x, x), -1)[..., x.shape[-1] - 1 : 2 * x.shape[-1] - 1].roll(1, -1),
    "at an odd address": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "in odd rows": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
    "the same for all heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("few", [0, rotation.FEW])
def test_any_strides_serve(few: int, layout: str, fraction: float, interleaved: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rotation, "FEW", few)  # numbers up to which nothing is written in place
    rope = Rope(20, 50.0, fraction=fraction, interleaved=interleaved)
    x = LAYOUTS[layout](torch.randn(2, 3, 7, 20, dtype=torch.float64))
    before = x.clone()
    expected = turned_by_hand(x, torch.arange(7)[:, None] * rope.frequencies(), interleaved=interleaved)
    torch.testing.assert_close(rope.rotate(x), expected, atol=1e-14, rtol=1e-14)
    assert torch.equal(x, before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_inputs_are_turned_in_pieces(dtype: torch.dtype, interleaved: bool):
    rope = Rope(64, fraction=0.75, interleaved=interleaved)
    x, p = torch.randn(1, 1, 31, 64).to(dtype).expand(2, 199, 31, 64), torch.randint(0, 97, (2, 31))
    whole = rope.rotate(x, p)  # 789,632 numbers, in 4 pieces
    assert whole.numel() > 3 * rotation.PIECE
    for row in range(2):
        assert torch.equal(whole[row, 101], rope.rotate(x[row : row + 1, :1], p[row])[0, 0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("few", [0, rotation.FEW])
def test_half_precision_is_rounded_once(
    few: int, dtype: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rotation, "FEW", few)
    rope, x = Rope(26, scaling=Yarn(4.0, 32), interleaved=interleaved), torch.randn(2, 3, 53, 26).to(dtype)
    exact, got = rope.rotate(x.double(), 100_003), rope.rotate(x, 100_003)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert ((got.double() - exact).abs() <= 0.5001 * unit * exact.abs().clamp(min=1e-2)).all()
    y = x.clone().requires_grad_()
    assert torch.equal(rope.rotate(y, 100_003), got)


def test_angles_are_exact_far_out():
    rope, x = Rope(4, 3.0), torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]])
    got = rope.rotate(x, FAR)[0, 0, 0].tolist()
    assert got == pytest.approx([f(FAR * w) for f in (math.cos, math.sin) for w in (1.0, 3.0**-0.5)], abs=1e-7)


def test_positions_in_every_form_agree():
    rope, x = Rope(6), torch.randn(2, 3, 5, 6)
    expected = rope.rotate(x, 4)
    at = torch.arange(4, 9)
    forms = (at, at[None], at.expand(2, 5), at.int(), at.to(torch.uint8), at.float(), at.double()[None])
    for positions in forms:
        torch.testing.assert_close(rope.rotate(x, positions), expected, msg=str(positions.dtype))
    assert torch.equal(rope.rotate(x), rope.rotate(x, 0))
    torch.testing.assert_close(rope.rotate(x, -2)[..., 2:, :], rope.rotate(x[..., 2:, :]))
    both = torch.stack((at, at + 90))
    torch.testing.assert_close(rope.rotate(x, both)[1:], rope.rotate(x[1:], 94))


@pytest.mark.parametrize("shape", [(0, 3, 5, 6), (2, 0, 5, 6), (2, 3, 0, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_gives_nothing(interleaved: bool, shape: tuple[int, ...]):
    x, rope = torch.randn(shape), Rope(6, scaling=DynamicNTK(2.0, 3), interleaved=interleaved)
    for positions in (None, 3, torch.zeros(shape[2], dtype=torch.int64), torch.zeros(shape[0], shape[2])):
        assert rope.rotate(x, positions).shape == shape
        assert torch.vmap(lambda x: rope.rotate(x, tokens=7))(x[None]).shape == (1, *shape)


def test_the_length_is_taken_from_the_positions():
    rope, x = Rope(6, scaling=DynamicNTK(2.0, original=8)), torch.randn(2, 3, 5, 6)
    assert torch.equal(rope.rotate(x), rope.rotate(x, tokens=3))  # within the training length
    expected = rope.rotate(x, 7, tokens=12)
    assert not torch.allclose(expected, rope.rotate(x, 7, tokens=8))
    assert torch.equal(rope.rotate(x, 7), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7, 12)), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7, 12).expand(2, 5)), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7.0, 12.0)), expected)


def test_tables_are_made_once_and_grow(tables: dict[Any, Tensor]):
    rope, x = Rope(6), torch.randn(1, 2, 50, 6)
    rope.rotate(x)
    ((key, table),) = tables.items()
    assert len(table) == 64
    Rope(6).rotate(x, 14)
    Rope(6).rotate(x[:, :, :3], torch.tensor([0, 63, 7]))
    assert tables[key] is table  # an equal word takes the same one
    rope.rotate(x[:, :, :1], 64)
    assert list(map(len, tables.values())) == [128]
    rope.rotate(x, torch.arange(100_000, 100_050))
    assert list(map(len, tables.values())) == [128]  # few tokens far out are computed ...
    for position in range(100_000, 100_096):
        rope.rotate(x[:, :, :1], position)
    assert list(map(len, tables.values())) == [128, 256]  # ... and have a table of their own where they are decoded
    rope.rotate(x.double())
    Sinusoidal(6).add(x[0])
    assert len(tables) == 4


def test_tables_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch, tables: dict[Any, Tensor]):
    monkeypatch.setattr(position_table, "KEPT", 4 * 64 * 16 * 4)  # four tables of 64 rows of 16 float32
    monkeypatch.setattr(position_table._tables, "_most", position_table.KEPT)
    x = torch.randn(1, 1, 64, 8)
    expected = [Rope(8, base).rotate(x) for base in range(2, 9)]
    assert len(tables) == 4
    assert all(torch.equal(Rope(8, base).rotate(x), y) for base, y in zip(range(2, 9), expected, strict=True))
    Rope(8, 9.0).rotate(torch.randn(1, 1, 1031, 8))
    assert max(map(len, tables.values())) == 64  # too large to be kept


def test_threads_share_tables():
    rope, x = Rope(6), torch.randn(1, 2, 300, 6)
    expected = [rope.rotate(x[:, :, :n]) for n in range(1, 300)]
    wrong: list[int] = []

    def turn() -> None:
        wrong.extend(n for n in range(1, 300) if not torch.equal(Rope(6).rotate(x[:, :, :n]), expected[n - 1]))

    threads = [threading.Thread(target=turn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tables_made_in_any_mode_serve_in_every_other(tables: dict[Any, Tensor]):
    rope, x = Rope(6), torch.randn(1, 2, 5, 6)
    with torch.inference_mode():
        expected = rope.rotate(x)
    assert len(tables) == 1
    y = x.clone().requires_grad_()
    rope.rotate(y).sum().backward()  # a tensor of inference mode could not be saved for it
    tables.clear()
    mapped = torch.vmap(rope.rotate)(x[None])[0]
    with FakeTensorMode() as mode:
        assert rope.rotate(mode.from_tensor(x)).shape == x.shape
    assert rope.rotate(x.to("meta")).device.type == "meta"
    assert not [t for t in tables.values() if t.device.type == "cpu"]
    with torch.device("meta"):
        torch.testing.assert_close((rope.rotate(x), mapped), (expected, expected))


# ---- gradients and torch's transforms -------------------------------------------------------------------------------

SOME = [
    Rope(6),
    Rope(8, interleaved=True, scaling=Yarn(4.0, 16)),
    Rope(8, fraction=0.5, scaling=DynamicNTK(4.0, 4)),
    Rope(4, scaling=LongRope((1.0, 2.0), (2.0, 3.0), 4, factor=2.0)),
    Rope(8, fraction=0.5, interleaved=True, scaling=Llama3(8.0, original=32)),
]


@pytest.mark.parametrize("rope", SOME, ids=str)
def test_gradients_of_any_order_flow(rope: Rope):
    x = torch.randn(2, 1, 3, rope.dim, dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[0, 4, 7], [9, 2, 3]])

    def turned(x: Tensor) -> Tensor:
        return rope.rotate(x, p)

    assert torch.autograd.gradcheck(turned, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: rope.rotate(x, p).sin(), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_turned_back(dtype: torch.dtype, interleaved: bool):
    rope, x = Rope(26, fraction=0.5384616, interleaved=interleaved), torch.randn(2, 3, 1009, 26).to(dtype)
    p, grad = torch.randint(-50, 50, (2, 1009)), torch.randn_like(x)
    (got,) = torch.autograd.grad(rope.rotate(x.requires_grad_(), p), x, grad)
    torch.testing.assert_close(got, rope.rotate(grad, -p))
    for frozen in (torch.no_grad, torch.inference_mode):
        with frozen():
            assert not rope.rotate(x, p).requires_grad


def test_gradients_flow_to_positions_that_are_not_whole():
    rope, x = Rope(6), torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0.5, 2.25, 7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope.rotate, (x, p))


@pytest.mark.parametrize("rope", SOME, ids=str)
def test_it_maps_and_differentiates_as_a_function(rope: Rope):
    x = torch.randn(3, 2, 1, 5, rope.dim, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(rope.rotate)(x), torch.stack([rope.rotate(one) for one in x]))
    pushed: Any = torch.func.jvp(rope.rotate, (x[0],), (x[1],))
    torch.testing.assert_close(pushed, (rope.rotate(x[0]), rope.rotate(x[1])))
    hessian = torch.func.hessian(lambda x: rope.rotate(x).square().sum())(x[0])
    eye = torch.eye(x[0].numel(), dtype=torch.float64) * 2
    scale = torch.ones(rope.dim, dtype=torch.float64)
    scale[: rope.rotated] = rope.attention_factor(5) ** 2
    torch.testing.assert_close(hessian.reshape(eye.shape), eye * scale.repeat(x[0].numel() // rope.dim))


@pytest.mark.parametrize(
    "rope", [SOME[1], *(pytest.param(r, marks=pytest.mark.exhaustive) for r in SOME[2:4])], ids=str
)
def test_it_is_traced_whole(rope: Rope):
    torch._dynamo.reset()  # it counts the ropes that one function was traced for
    traced = torch.compile(rope.rotate, backend="eager", fullgraph=True, dynamic=True)
    for tokens, first in ((5, 3), (7, 30)):
        x = torch.randn(2, 3, tokens, rope.dim, dtype=torch.float64)
        torch.testing.assert_close(traced(x, first), rope.rotate(x, first))


def test_gradients_are_traced():
    torch._dynamo.reset()
    rope, x = Rope(6, scaling=Yarn(4.0, 16)), torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    here, there = torch.compile(rope.rotate, backend="aot_eager", fullgraph=True)(x), rope.rotate(x)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (here, there)))


def test_a_tensor_of_positions_is_traced_when_the_length_is_told():
    rope, x, p = Rope(6, scaling=DynamicNTK(2.0, 4)), torch.randn(2, 3, 5, 6), torch.randint(0, 30, (2, 5))
    torch._dynamo.reset()
    traced = torch.compile(rope.rotate, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x, p, tokens=30), rope.rotate(x, p, tokens=30))
    with pytest.raises(RefusalError, match="give tokens="):
        torch.vmap(rope.rotate)(x[None], p[None])


# ---- added to embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sinusoids_are_added_in_the_type_of_the_embeddings(dtype: torch.dtype):
    word, x = Sinusoidal(6), torch.randn(2, 5, 6).to(dtype)
    wide = word.table(torch.arange(5, dtype=torch.float64))
    torch.testing.assert_close(word.add(x), (x.double() + wide).to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(word.add(x, torch.tensor([[0, 1, 2, 3, 4]] * 2)), word.add(x))
    torch.testing.assert_close(word.add(x[:, 2:], 2), word.add(x)[:, 2:])


def test_learned_positions_are_rows_of_the_weight():
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    word, x = Learned(weight), torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(word.add(x), x + weight[:5])
    assert torch.equal(word.add(x, 6), x + weight[6:])
    p = torch.randint(0, 11, (2, 5))
    assert torch.equal(word.add(x, p), x + weight[p])
    assert torch.equal(word.table(p), weight[p])
    assert torch.autograd.gradcheck(lambda w: Learned(w).add(x, p), weight)
    assert word.add(x.bfloat16()).dtype == torch.bfloat16


def test_absolute_positions_are_traced_whole():
    x, weight = torch.randn(2, 5, 6), torch.randn(11, 6)
    for word in (Sinusoidal(6), Learned(weight)):
        traced = torch.compile(word.add, backend="eager", fullgraph=True)
        torch.testing.assert_close(traced(x, 3), word.add(x, 3))
        torch.testing.assert_close(traced(x, torch.arange(5)), word.add(x))


# ---- words ----------------------------------------------------------------------------------------------------------


def test_words_are_values():
    assert Rope(8, scaling=Yarn(4.0, 64)) == Rope(8, scaling=Yarn(4.0, 64))
    assert hash(Rope(8)) == hash(Rope(8))
    assert Rope(8) != Rope(8, interleaved=True)
    assert repr(Rope(8, scaling=Yarn(4.0, 64))) == "Rope(dim=8, scaling=Yarn(factor=4.0, original=64))"
    rope = Rope(4, scaling=LongRope((1.0, 2.0), (2.0, 3.0), 4))
    tensors: list[Tensor] = []
    numbers: list[int] = []
    assert deserialize(rope.serialize(tensors, numbers), tensors, numbers) == rope


X = torch.zeros(2, 3, 5, 8)


def test_positions_and_tokens_may_be_integers_of_numpy():
    rope = Rope(8, scaling=DynamicNTK(2.0, 4))
    assert torch.equal(rope.rotate(X + 1, np.int64(2), tokens=np.int64(9)), rope.rotate(X + 1, 2, tokens=9))  # pyright: ignore[reportArgumentType]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "an odd dim": (lambda: Rope(7), "dim=7.*even"),
    "a negative dim": (lambda: Sinusoidal(-2), "dim=-2.*even"),
    "an odd embedding": (lambda: Sinusoidal(5), "dim=5.*even"),
    "a base of 1": (lambda: Rope(8, base=1.0), "base=1.0.*above 1"),
    "no fraction": (lambda: Rope(8, fraction=0.0), "fraction=0.0"),
    "more than all": (lambda: Rope(8, fraction=1.5), "fraction=1.5"),
    "an odd number that turns": (lambda: Rope(10, fraction=0.5), r"int\(10 \* 0.5\) = 5 dimensions.*even"),
    "nothing that turns": (lambda: Rope(8, fraction=0.1), "= 0 dimensions"),
    "a factor as the scaling": (lambda: Rope(8, scaling=4.0), "scaling=4.0.*Yarn"),
    "a factor below 1": (lambda: Linear(0.5), "factor=0.5.*at least 1"),
    "a factor of text": (lambda: NTK("4"), "factor='4'"),
    "no training length": (lambda: Yarn(4.0, 0), "original=0"),
    "half a training length": (lambda: DynamicNTK(4.0, 2.5), "original=2.5"),
    "betas swapped": (lambda: Yarn(4.0, 64, 1.0, 32.0), "beta_fast > beta_slow"),
    "one mscale": (lambda: Yarn(4.0, 64, mscale=1.0), "mscale=1.0, mscale_all_dim=None.*both or neither"),
    "an mscale of 0": (lambda: Yarn(4.0, 64, mscale=0.0, mscale_all_dim=1.0), "mscale=0.0"),
    "low above high": (lambda: Llama3(8.0, 4.0, 1.0), "low=4.0, high=1.0"),
    "tuples of two lengths": (lambda: LongRope((1.0, 2.0), (1.0,), 4), "short has 2 divisors and long has 1"),
    "tuples for another dim": (lambda: Rope(8, scaling=LongRope((1.0,) * 3, (1.0,) * 3, 4)), "3 divisors.*expected 4"),
    "a list of divisors": (lambda: LongRope([1.0], (1.0,), 4), "expected a tuple"),
    "a divisor of 0": (lambda: LongRope((0.0,), (1.0,), 4), "above 0"),
    "a share above 1": (lambda: Proportional(1.5), "share=1.5"),
    "ntk for a single pair": (lambda: Rope(2, scaling=NTK(2.0)), "at least 4.*not 2"),
    "x of another dim": (lambda: Rope(6).rotate(X), r"x is \[2, 3, 5, 8\].*dim 6"),
    "x of integers": (lambda: Rope(8).rotate(X.long()), r"torch.int64 \[2, 3, 5, 8\]"),
    "x that is no tensor": (lambda: Rope(8).rotate([1.0]), r"x is \[1.0\]"),
    "too few positions": (lambda: Rope(8).rotate(X, torch.arange(4)), r"positions are \[4\].*\[tokens\] = \[5\]"),
    "positions of another batch": (lambda: Rope(8).rotate(X, torch.zeros(3, 5)), r"\[3, 5\].*\[2, 5\]"),
    "a position alone": (lambda: Rope(8).rotate(X, torch.tensor(4)), r"positions are \[\]"),
    "positions per head": (lambda: Rope(8).rotate(X, torch.zeros(2, 3, 5)), r"\[2, 3, 5\]"),
    "positions that are a mask": (lambda: Rope(8).rotate(X, torch.ones(5, dtype=torch.bool)), "torch.bool"),
    "a float as the offset": (lambda: Rope(8).rotate(X, 1.5), "positions is 1.5"),
    "no tokens": (lambda: Rope(8).rotate(X, tokens=0), "tokens is 0"),
    "embeddings of another dim": (lambda: Sinusoidal(6).add(X[0]), r"\[3, 5, 8\].*dim 6"),
    "embeddings and positions": (lambda: Sinusoidal(8).add(X[0], torch.zeros(2, 5)), r"\[2, 5\].*\[3, 5\]"),
    "a weight of integers": (lambda: Learned(torch.zeros(4, 8, dtype=torch.int64)), "int64"),
    "a flat weight": (lambda: Learned(torch.zeros(4)), r"\[4\]"),
    "beyond the table": (lambda: Learned(torch.zeros(4, 8)).add(X[0]), "from 0 to 4.*for 0 to 3"),
    "beyond by an offset": (lambda: Learned(torch.zeros(6, 8)).add(X[0], 2), "from 2 to 6.*for 0 to 5"),
    "before the table": (lambda: Learned(torch.zeros(6, 8)).add(X[0], -1), "from -1 to 3"),
    "one beyond the table": (lambda: Learned(torch.zeros(6, 8)).table(torch.tensor([0, 6])), "from 0 to 6.*for 0 to 5"),
    "learned in between": (lambda: Learned(torch.zeros(6, 8)).table(torch.tensor([0.5])), "whole positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_said_to_make_none(name: str):
    make, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        make()


# ---- the biases by distance -----------------------------------------------------------------------------------------


def alibi_of_the_paper(heads: int) -> list[float]:
    """Press et al. 2022, and the authors' `get_slopes`: a geometric row, for the rest every second of twice as many."""
    nearest = 2 ** math.floor(math.log2(heads))
    row = [2.0 ** (-(2.0 ** -(math.log2(nearest) - 3)) * (i + 1)) for i in range(nearest)]
    return row if nearest == heads else row + alibi_of_the_paper(2 * nearest)[::2][: heads - nearest]


@pytest.mark.parametrize("heads", [*range(1, 18), 40, 71, 112])
def test_alibi_slopes_for_any_number_of_heads(heads: int):
    assert Alibi(heads).slope_per_head().tolist() == pytest.approx(alibi_of_the_paper(heads))


def test_alibi_reaches_past_the_training_length():
    h, long = torch.arange(6)[:, None, None], torch.arange(2 * 53)
    bias = Alibi(6).value(0, h, long[:, None], long)
    short = Alibi(6).value(0, h, long[:53, None], long[:53])
    assert torch.equal(bias[:, :53, :53], short)
    assert torch.equal(bias[:, 53:, 53:], short)  # and the same anywhere


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (32, 256), (64, 128)])
def test_t5_buckets_are_those_of_transformers(buckets: int, limit: int, bidirectional: bool):
    distance = torch.arange(-1000, 1001)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, limit)
    assert torch.equal(T5Bias(torch.zeros(buckets, 1), bidirectional, limit).bucket(distance), expected)
