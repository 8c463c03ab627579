"""Scaled frequencies: worked numbers of every formula, and those of published models in transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from regard.describe.position import Rope, Sinusoidal
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn
from regard.errors import ProblemError

# ---- worked by hand -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(kind: Any):
    """They become numbers of Python."""
    words = [
        (lambda n: Rope(8, n(500), fraction=n(1)), ("base", "fraction")),
        (lambda n: Sinusoidal(8, n(500)), ("base",)),
        (lambda n: Linear(n(4)), ("factor",)),
        (lambda n: NTK(n(4)), ("factor",)),
        (lambda n: DynamicNTK(n(4), 32), ("factor",)),
        (lambda n: Yarn(n(4), 32, n(16), n(2), n(3)), ("factor", "beta_fast", "beta_slow", "attention_factor")),
        (lambda n: Yarn(n(4), 32, mscale=n(2), mscale_all_dim=n(3)), ("mscale", "mscale_all_dim")),
        (lambda n: Llama3(n(4), n(2), n(3)), ("factor", "low", "high")),
        (lambda n: LongRope((n(1), n(2)), (n(2), n(3)), 32, n(2), n(3)), ("factor", "attention_factor")),
        (lambda n: Proportional(n(1), n(2)), ("share", "factor")),
    ]  # fmt: skip
    for word, fields in words:
        made, expected = word(kind), word(float)
        assert made == expected
        assert hash(made) == hash(expected)
        assert {type(getattr(made, name)) for name in fields} == {float}
    assert {type(n) for n in LongRope((kind(1),), (kind(2),), 32).short} == {float}


def test_other_values_of_numpy_are_refused():
    for word in (
        lambda: Rope(8, np.True_),
        lambda: Rope(8, np.float32(1)),
        lambda: Rope(8, np.float32("nan")),
        lambda: Rope(8, np.complex64(500)),
        lambda: Rope(8, fraction=np.True_),
        lambda: Linear(np.float32(0.5)),
        lambda: LongRope((np.float32(0),), (1.0,), 32),
    ):
        with pytest.raises(ProblemError, match="expected"):
            word()


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
    "an empty ramp": (Rope(16, 10000.0, Yarn(4.0, 6)), yarn(4.0, 6), 24),
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
