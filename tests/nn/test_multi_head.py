"""The module: against float64 from the formulas, against layers of transformers, with caches, traced, copied."""

import copy
import pickle
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from benchmarks.modules import CASES, compare, parts_of
from regard import (
    Alibi,
    Causal,
    KeyLengths,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    observe_calls,
)
from regard.bench.rounds import Effort
from regard.cache import KVCache
from regard.cost.model import Attention
from regard.cost.parameter_count import attention_parameters
from regard.describe.position import Rope, Sinusoidal
from regard.describe.rope_scaling import DynamicNTK, LongRope
from regard.nn import MultiHeadAttention, SpecModule
from regard.nn.norm import RMSNorm
from regard.scores import Additive, Bilinear, Cosine, Gaussian, Score
from tests.oracle import Case, dense

BATCH, TOKENS, CONTEXT, WIDTH = 2, 7, 5, 11


def turned(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """Rotation as multiplication of complex numbers: number i and number i + dim / 2 are one."""
    half = rope.dim // 2
    angles = positions.double()[..., None] * rope.base ** (-torch.arange(half).double() / half)
    if positions.ndim == 2:
        angles = angles[:, None]
    product = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([product.real, product.imag], dim=-1)


def has_bias(linear: nn.Linear) -> bool:
    return "bias" in dict(linear.named_parameters())


def projected(linear: nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.T + (linear.bias if has_bias(linear) else 0)


def judged(module: MultiHeadAttention, x: Tensor, context: Tensor | None = None, **call: Any) -> Tensor:
    """What the module should give, in float64, from its weights and the formulas."""
    m, x = copy.deepcopy(module).double(), x.double()
    source = x if context is None else context.double()

    def heads(linear: nn.Linear, of: Tensor, norm: RMSNorm | None) -> Tensor:
        made = projected(linear, of)
        made = made.reshape(*made.shape[:2], -1, m.head_dim).transpose(1, 2)
        return made if norm is None else made / (made.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    q, k, v = heads(m.q_proj, x, m.q_norm), heads(m.k_proj, source, m.k_norm), heads(m.v_proj, source, None)
    positions = call.get("positions", 0)
    if m.position is not None:
        first = torch.arange(x.shape[1]) + positions if isinstance(positions, int) else positions
        q = turned(q, m.position.spec, first)
        k = turned(k, m.position.spec, first if context is None else torch.arange(source.shape[1]))
    words: dict[str, Any] = {"scale": m.scale, "softcap": m.softcap, "sink": m.sinks}
    words["offset"] = (positions if isinstance(positions, int) else 0) if context is not None else None
    masks = [one for one in (m.mask and m.mask.spec, call.get("mask")) if one is not None]
    words["mask"] = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    words["bias"] = m.bias and m.bias.spec
    out = dense(Case(q, k, v, words))[0].transpose(1, 2).reshape(*x.shape[:2], -1)
    if m.gate_proj is not None:
        out = out * torch.sigmoid(m.gate_proj(x))
    return projected(m.o_proj, out)


@st.composite
def modules(draw: st.DrawFn, cross: bool) -> MultiHeadAttention:
    torch.manual_seed(draw(st.integers(0, 999)))
    kv_heads, head_dim = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads, maybe = kv_heads * draw(st.integers(1, 3)), st.booleans()
    biases = [None, Alibi(heads), T5Bias(torch.randn(32, heads, requires_grad=True))]
    module = MultiHeadAttention(
        WIDTH, heads, kv_heads=kv_heads, head_dim=head_dim, context_dim=13 if cross else None, qk_norm=draw(maybe),
        qkv_bias=draw(maybe), out_bias=draw(maybe), gate=draw(maybe), sink=draw(maybe),
        position=draw(st.sampled_from([None, Rope(head_dim, base=100.0)])),
        mask=draw(st.sampled_from([None, Causal(), Window(3) | Prefix(1)])), bias=draw(st.sampled_from(biases)),
        scale=draw(st.sampled_from([None, 0.3])), softcap=draw(st.sampled_from([None, 1.7])),
    )  # fmt: skip
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            nn.init.normal_(norm.weight)
    if module.sinks is not None:
        nn.init.normal_(module.sinks)
    return module


MASKS = st.sampled_from([None, KeyLengths(torch.tensor([3, 5])), TensorMask(torch.rand(TOKENS, 1) < 0.8)])
PLACES = st.sampled_from([None, 0, 3, torch.arange(TOKENS) * 2 + 1, torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)])


@settings(max_examples=60)
@given(modules(cross=False), MASKS, PLACES)
def test_it_is_the_formula(module: MultiHeadAttention, mask: Any, positions: Any):
    x, positions = torch.randn(BATCH, TOKENS, WIDTH), None if module.position is None else positions
    found = module(x, mask=mask, positions=positions)
    truth = judged(module, x, mask=mask, **({} if positions is None else {"positions": positions}))
    assert torch.allclose(found.double(), truth, atol=3e-6, rtol=1e-5)


@settings(max_examples=60)
@given(modules(cross=True), MASKS, PLACES)
def test_it_is_the_formula_over_a_context(module: MultiHeadAttention, mask: Any, positions: Any):
    x, context = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, CONTEXT, 13)
    positions = positions if module.position is not None or isinstance(positions, int) else None
    found = module(x, context, mask=mask, positions=positions)
    truth = judged(module, x, context, mask=mask, **({} if positions is None else {"positions": positions}))
    assert torch.allclose(found.double(), truth, atol=3e-6, rtol=1e-5)


@given(modules(cross=False), modules(cross=True))
def test_its_parameters_are_those_that_regard_cost_counts(own: MultiHeadAttention, cross: MultiHeadAttention):
    for m in (own, cross):
        options: Any = {
            "qkv_bias": has_bias(m.q_proj), "out_bias": has_bias(m.o_proj), "sink": m.sinks is not None,
            "norm": "" if m.q_norm is None else "head", "gate": "" if m.gate_proj is None else "element",
        }  # fmt: skip
        counted = attention_parameters(Attention(m.heads, m.kv_heads, m.head_dim, m.head_dim, **options), m.d_model)
        counted += (m.context_dim - m.d_model) * m.kv_heads * 2 * m.head_dim  # weights of keys and values
        counted += sum(0 if part is None else sum(p.numel() for p in part.parameters()) for part in (m.bias, m.mask))
        assert sum(p.numel() for p in m.parameters()) == counted


def in_steps(module: MultiHeadAttention, x: Tensor, ends: tuple[int, ...], **words: Any) -> Tensor:
    cache, starts = KVCache(), (0, *ends[:-1])
    with torch.no_grad():
        parts = [module(x[:, a:b], cache=cache, **words) for a, b in zip(starts, ends, strict=True)]
    return torch.cat(parts, dim=1)


@settings(max_examples=30)
@given(modules(cross=False))
def test_a_cache_gives_what_one_shot_gives(module: MultiHeadAttention):
    """Token by token and in chunks, under a mask that lets nobody look ahead."""
    x = torch.randn(BATCH, TOKENS, WIDTH)
    truth = module(x, mask=Causal())
    for ends in ((3, 4, 7), (1, 2, 3, 4, 5, 6, 7)):
        assert torch.allclose(in_steps(module, x, ends, mask=Causal()), truth, atol=2e-6)


def test_chunks_attend_to_the_same_bits():
    """What is handed to attend chunk by chunk gives the bits of the whole; only torch's projections may round else."""
    module, x = MultiHeadAttention(32, 4, mask=Causal(), backend="native").double(), torch.randn(1, 101, 32).double()
    calls: list[Any] = []
    with torch.no_grad(), observe_calls(calls.append):
        module(x)
        in_steps(module, x, (53, 54, 101))
    whole, *chunks = calls
    cache = KVCache()
    for chunk, (a, b) in zip(chunks, ((0, 53), (53, 54), (54, 101)), strict=True):
        k, v = cache.append(whole.k[:, :, a:b], whole.v[:, :, a:b])
        assert torch.equal(attend(whole.q[:, :, a:b], k, v, mask=Causal()), whole.out[:, :, a:b])
        assert torch.allclose(chunk.out, whole.out[:, :, a:b], atol=1e-14)


def test_a_context_is_cached_once_and_seen_again():
    module = MultiHeadAttention(WIDTH, 3, kv_heads=1, head_dim=4, context_dim=13, position=Rope(4))
    x, context, cache = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, CONTEXT, 13), KVCache()
    with torch.no_grad():
        first = module(x[:, :4], context, cache=cache)
        later = module(x[:, 4:], context[:, :0], positions=4, cache=cache)
    assert cache.tokens == CONTEXT
    assert torch.allclose(torch.cat([first, later], dim=1), module(x, context), atol=1e-6)


def test_a_context_may_arrive_in_parts():
    module = MultiHeadAttention(WIDTH, 3, head_dim=4, context_dim=13, position=Rope(4))
    x, context, cache = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, CONTEXT, 13), KVCache()
    with torch.no_grad():
        module(x, context[:, :2], cache=cache)
        assert torch.allclose(module(x, context[:, 2:], cache=cache), module(x, context), atol=1e-6)


def test_rotation_makes_scores_depend_on_distances_alone():
    module, x = MultiHeadAttention(WIDTH, 3, head_dim=4, position=Rope(4)).double(), torch.randn(1, 7, WIDTH).double()
    assert torch.allclose(module(x, positions=1000), module(x), atol=1e-10)
    assert not torch.allclose(module(x, positions=3 * torch.arange(7)), module(x), atol=1e-4)


def test_a_scaling_is_given_the_length_of_the_sequence():
    """By the positions where they are given, with a cache by all that it holds, with a context by the longer one."""
    rope, x, context = Rope(4, scaling=DynamicNTK(2.0, original=3)), torch.randn(1, 7, WIDTH), torch.randn(1, 11, WIDTH)
    module, calls = MultiHeadAttention(WIDTH, 3, head_dim=4, position=rope), []
    raw = MultiHeadAttention(WIDTH, 3, head_dim=4)
    raw.load_state_dict(module.state_dict())

    def turned_by(*positions: int, of: Tensor, tokens: int) -> Tensor:
        k = raw.k_proj(of).unflatten(2, (3, 4)).transpose(1, 2)
        return rope.rotate(k, torch.tensor(positions), tokens)

    cache = KVCache()
    with torch.no_grad(), observe_calls(lambda call: calls.append(call.k)):
        module(x)
        module(x, positions=3 * torch.arange(7))
        module(x[:, :5], cache=cache)
        module(x[:, 5:], cache=cache)
        module(x, context)
        module(x, context, positions=torch.arange(7) + 23)
    assert torch.equal(calls[0], turned_by(*range(7), of=x, tokens=7))
    assert torch.equal(calls[1], turned_by(*range(0, 21, 3), of=x, tokens=19))
    assert torch.equal(calls[3][:, :, 5:], turned_by(5, 6, of=x[:, 5:], tokens=7))
    assert torch.equal(calls[4], turned_by(*range(11), of=context, tokens=11))
    assert torch.equal(calls[5], turned_by(*range(11), of=context, tokens=30))


def test_batch_rows_do_not_know_of_one_another():
    module, x = MultiHeadAttention(WIDTH, 3, head_dim=4, qk_norm=True, gate=True), torch.randn(5, TOKENS, WIDTH)
    other = torch.cat([x[:2], torch.full_like(x[2:3], torch.nan), x[3:]])
    kept = [0, 1, 3, 4]
    assert torch.equal(module(x)[kept], module(other)[kept])


CONFIG: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 100.0,
    "attn_implementation": "eager", "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_of_transformers_with_the_same_weights_gives_the_same(kind: str):
    """Names match, so weights come by `load_state_dict`."""
    config = (LlamaConfig if kind == "llama" else Qwen3Config)(**CONFIG)
    theirs = LlamaAttention(config, 0) if kind == "llama" else Qwen3Attention(config, 0)
    position = Rope(4, base=CONFIG["rope_theta"])
    assert config.rope_parameters == {"rope_theta": CONFIG["rope_theta"], "rope_type": "default"}
    ours = MultiHeadAttention(24, 6, kv_heads=2, head_dim=4, qk_norm=kind == "qwen3", position=position, mask=Causal())
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    x, places = torch.randn(2, 13, 24), torch.arange(13)[None]
    hidden = torch.full((13, 13), -torch.inf).triu(1)[None, None]
    truth, _ = theirs(x, position_embeddings=LlamaRotaryEmbedding(config)(x, places), attention_mask=hidden)
    assert torch.allclose(ours(x), truth, atol=2e-5)


def test_gradients_are_those_of_the_formula():
    module = MultiHeadAttention(
        5, 4, kv_heads=2, head_dim=2, context_dim=3, qk_norm=True, gate=True, qkv_bias=True, position=Rope(2),
        bias=T5Bias(torch.randn(8, 4, requires_grad=True)), sink=True, softcap=2.0, dtype=torch.float64,
        backend="reference",
    ).double()  # fmt: skip
    x, context = torch.randn(1, 3, 5).double().requires_grad_(), torch.randn(1, 4, 3).double().requires_grad_()
    names, values = zip(*module.named_parameters(), strict=True)

    def run(x: Tensor, context: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x, context))

    assert torch.autograd.gradcheck(run, (x, context, *values))


def whole() -> MultiHeadAttention:
    return MultiHeadAttention(
        24, 6, kv_heads=2, head_dim=4, qk_norm=True, gate=True, position=Rope(4), sink=True, softcap=3.0,
        mask=Causal(), bias=T5Bias(torch.randn(32, 6, requires_grad=True)),
    )  # fmt: skip


@pytest.mark.representative
def test_it_is_traced_whole():
    module, x = whole(), torch.randn(2, 7, 24)
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(traced(x), module(x), atol=1e-6)
    traced(x, mask=Window(3)).sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is None] == []


def test_it_is_copied_pickled_and_loaded():
    module, x = whole(), torch.randn(2, 7, 24)
    other = whole()
    other.load_state_dict(module.state_dict())
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), other):
        assert torch.equal(same(x), module(x))


def test_it_moves_to_other_types_and_to_no_device():
    module, x = whole(), torch.randn(2, 7, 24)
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert module.to("meta")(x.bfloat16().to("meta")).shape == (2, 7, 24)
    made = MultiHeadAttention(24, 6, qk_norm=True, gate=True, sink=True, device="meta", dtype=torch.float16)
    assert {(str(p.device), p.dtype) for p in made.parameters()} == {("meta", torch.float16)}


def test_half_precision_comes_by_autocast():
    module, x = whole(), torch.randn(2, 7, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), module(x), atol=0.05)


def test_dropout_is_for_training():
    module, x = MultiHeadAttention(24, 6, dropout=0.5), torch.randn(2, 7, 24)
    assert not torch.equal(module(x), module(x))
    plain = MultiHeadAttention(24, 6)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), plain(x))


def test_masks_and_biases_of_module_and_call_add_up():
    x, bias = torch.randn(2, 7, 24), TensorBias(torch.randn(7, 7))
    module = MultiHeadAttention(24, 6, mask=Causal(), bias=Alibi(6))
    both = MultiHeadAttention(24, 6, mask=Causal() & Window(3), bias=Alibi(6) + bias)
    both.load_state_dict(module.state_dict(), strict=False)
    assert torch.equal(module(x, mask=Window(3), bias=bias), both(x))
    calls: list[Any] = []
    with observe_calls(calls.append):
        module(x, mask=Window(3), bias=bias)
    assert repr(calls[0].mask) == "Causal() & Window(left=3)"


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    "score", [Cosine(), Bilinear(drawn(6, 4, 4)), Additive(drawn(5, 4), drawn(5, 4), drawn(5)), Gaussian(2.0)], ids=repr
)
def test_any_score_compares_and_its_weights_are_trained(score: Score):
    module, x, calls = MultiHeadAttention(24, 6, score=score, mask=Causal()), torch.randn(2, 7, 24), []
    with observe_calls(calls.append):
        out = module(x)
    q, k, v = (one(x).unflatten(2, (6, 4)).transpose(1, 2) for one in (module.q_proj, module.k_proj, module.v_proj))
    truth = attend(q, k, v, score=score, mask=Causal(), backend="reference64")
    assert torch.allclose(calls[0].out, truth, atol=1e-5)
    out.sum().backward()
    assert [name for name, p in module.named_parameters() if p.grad is None] == []
    assert {p.data_ptr() for p in score.tensors()} <= {p.data_ptr() for p in module.parameters()}
    assert torch.equal(copy.deepcopy(module)(x), out)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "words", [{}, {"qk_norm": True}, {"position": Rope(4)}, {"qk_norm": True, "position": Rope(4)}]
)
def test_the_output_of_the_heads_is_not_copied(words: dict[str, Any], grad: bool):
    """It comes token by token, so that laying the heads side by side is a view."""
    calls: list[Any] = []
    with torch.set_grad_enabled(grad), observe_calls(calls.append):
        MultiHeadAttention(24, 6, **words)(torch.randn(2, 7, 24))
    assert calls[0].out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("case", CASES)
def test_it_is_its_parts_written_out_bit_by_bit(case: str):
    """So its benchmark compares like with like."""
    module, x = MultiHeadAttention(512, 8, mask=Causal(), **CASES[case]), torch.randn(1, 7, 512)
    assert torch.equal(parts_of(module)(x), module(x))
    line = compare(CASES[case], 7, backward=False, effort=Effort(seconds=0, least=1))
    assert min(line) > 0


def test_layers_can_share_a_bias():
    shared = SpecModule(T5Bias(torch.zeros(32, 6, requires_grad=True)))
    layers = nn.ModuleList(MultiHeadAttention(24, 6, bias=shared) for _ in range(3))
    assert [name for name, _ in layers.named_parameters() if "bias" in name] == ["0.bias.table"]


def test_it_shows_what_it_is():
    text = repr(MultiHeadAttention(24, 6, kv_heads=2, context_dim=5, softcap=3.0, sink=True, position=Rope(4)))
    assert "d_model=24, heads=6, kv_heads=2 (GQA), head_dim=4, context_dim=5, softcap=3.0, sink=True" in text
    assert "(position): SpecModule(Rope(dim=4))" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"heads": 5}, r"d_model=24.*heads=5.*head_dim="),
        ({"kv_heads": 4}, r"heads=6, kv_heads=4.*whole multiple"),
        ({"heads": 0}, "heads is 0: expected at least 1 heads"),
        ({"d_model": "16"}, "d_model is '16': expected a whole number of dimensions"),
        ({"context_dim": 8.0}, "context_dim is 8.0: expected a whole number of dimensions"),
        ({"position": Rope(8)}, r"rotates heads of 8 dimensions, and these have 4"),
        ({"position": Sinusoidal(24)}, r"added to embeddings"),
        ({"position": Alibi(6)}, r"position is Alibi.*added to scores: bias="),
        ({"position": 10000.0}, r"position is 10000\.0: expected a Rope\(4\)"),
        ({"mask": Alibi(6)}, r"mask is Alibi"),
        ({"mask": torch.ones(3, 3) > 0}, r"mask is a tensor.*TensorMask\(t\)"),
        ({"bias": Causal()}, r"bias is Causal"),
        ({"dropout": 1.5}, r"dropout is 1\.5"),
        ({"sink": 3}, "sink is 3: expected True or False"),
        ({"qk_norm": "no"}, "qk_norm is 'no': expected True or False"),
        ({"softcap": -1.0}, r"softcap is -1\.0"),
    ],
)
def test_a_module_that_makes_no_sense_is_not_made(words: dict[str, Any], message: str):
    with pytest.raises(ProblemError, match=message):
        MultiHeadAttention(**({"d_model": 24, "heads": 6} | words))


def test_a_call_that_makes_no_sense_is_named():
    module, cross, x = MultiHeadAttention(24, 6), MultiHeadAttention(24, 6, context_dim=5), torch.randn(2, 7, 24)
    with pytest.raises(ProblemError, match=r"x has shape \[7, 24\].*\[batch, tokens, 24\]"):
        module(x[0])
    for wrong, words, message in (
        (3, {}, r"x is int: expected a tensor \[batch, tokens, 24\]"),
        (x, {"context": [1.0]}, r"context is list: expected a tensor \[batch, context_tokens, 24\]"),
        (x, {"cache": 3}, "cache is 3: expected a regard.cache.KVCache, or None"),
    ):
        with pytest.raises(ProblemError, match=message):
            module(wrong, **words)
    with pytest.raises(ProblemError, match=r"need a context of width 5: pass context"):
        cross(x)
    with pytest.raises(ProblemError, match=r"context has shape \[2, 7, 24\].*\[2, context_tokens, 5\]"):
        cross(x, x)
    with pytest.raises(ProblemError, match=r"positions= needs a module with a position"):
        module(x, positions=3)
    with pytest.raises(ProblemError, match="is for inference"):
        module(x, cache=KVCache())


def test_an_engine_that_refuses_is_not_passed_over():
    with pytest.raises(RefusalError, match="sdpa"):
        MultiHeadAttention(24, 6, mask=Window(3), backend="sdpa")(torch.randn(2, 7, 24))


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    module, cache, x = MultiHeadAttention(32, 4), KVCache(), torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = module(x)
        with pytest.raises(ProblemError):
            module(x, mask=TensorMask(torch.ones(3, 3, dtype=torch.bool)), cache=cache)
        assert cache.tokens == 0
        assert torch.equal(module(x, cache=cache), expected)


def test_a_bias_of_projections_is_distinguished_from_one_of_scores():
    with pytest.raises(ProblemError, match="projections have biases by qkv_bias= and out_bias="):
        MultiHeadAttention(32, 4, bias=True)


def test_a_first_position_of_numpy_is_an_int():
    x, context, scaling = torch.randn(1, 5, 16), torch.randn(1, 11, 16), DynamicNTK(4.0, 7)
    for position in (Rope(8), None):
        module = MultiHeadAttention(16, 2, position=position, mask=Causal())
        assert torch.equal(module(x, context, positions=np.int64(3)), module(x, context, positions=3))
    module = MultiHeadAttention(16, 2, position=Rope(8, scaling=scaling), mask=Causal())
    assert torch.equal(module(x, positions=np.int64(5)), module(x, positions=5))


@pytest.mark.parametrize("scaling", [None, DynamicNTK(4.0, 7)])
@pytest.mark.parametrize("positions", [[0, 1, 2], 2.0, "a", True])
def test_positions_that_are_none_are_named(scaling: Any, positions: Any):
    module = MultiHeadAttention(16, 2, position=Rope(8, scaling=scaling))
    with pytest.raises(ProblemError, match=r"expected a whole number of tokens \(the first position\), a tensor"):
        module(torch.randn(1, 3, 16), positions=positions)


@pytest.mark.parametrize("scaling", [DynamicNTK(4.0, 7), LongRope((1.0,) * 4, (2.0,) * 4, 7)])
def test_a_scaling_takes_inputs_without_tokens_and_positions_without_data(scaling: Any):
    module, x = MultiHeadAttention(16, 2, position=Rope(8, scaling=scaling), mask=Causal()), torch.randn(2, 11, 16)
    for empty, positions in (
        (x[:, :0], None),
        (x[:, :0], torch.arange(0)),
        (x[:0], torch.zeros(0, 11, dtype=torch.int64)),
    ):
        assert module(empty, positions=positions).shape == empty.shape
    on_meta = copy.deepcopy(module).to("meta")
    assert on_meta(x.to("meta"), positions=torch.arange(11, device="meta")).shape == x.shape
    with pytest.raises(ProblemError, match="the greatest of the positions is nan: expected finite positions"):
        module(x, positions=torch.full((11,), torch.nan))


def test_specs_that_are_assigned_are_those_of_the_constructor():
    bias = T5Bias(torch.randn(32, 2, requires_grad=True))
    words: dict[str, Any] = {"position": Rope(8), "mask": Causal(), "bias": bias, "score": Cosine()}
    made, x = MultiHeadAttention(16, 2, **words), torch.randn(1, 7, 16)
    later = MultiHeadAttention(16, 2)
    for name, spec in words.items():
        setattr(later, name, spec)
    later.load_state_dict(made.state_dict())
    assert torch.equal(later(x), made(x))
    assert [name for name, _ in later.named_parameters() if "table" in name] == ["bias.table"]
    later.bias = later.mask = None
    without = later(x, mask=Causal())
    later.mask = SpecModule(Causal())
    assert torch.equal(later(x), without)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("position", Rope(6), "these have 8"),
        ("position", Alibi(2), "bias="),
        ("mask", "causal", "the text 'causal'"),
        ("mask", SpecModule(Alibi(2)), "expected a regard Mask"),
        ("bias", torch.zeros(2, 7, 7), "expected a regard Bias"),
        ("score", 3, "expected a regard Score"),
    ],
)
def test_what_is_no_spec_of_its_kind_cannot_be_assigned(name: str, given: Any, says: str):
    module = MultiHeadAttention(16, 2)
    with pytest.raises(ProblemError, match=says):
        setattr(module, name, given)
    assert getattr(module, name) is None


def test_a_call_says_that_an_assigned_bias_is_of_other_heads():
    module = MultiHeadAttention(16, 2)
    setattr(module, "bias", Alibi(4))  # noqa: B010 - a type checker knows only what it is afterwards
    with pytest.raises(ProblemError, match=r"Alibi\(heads=4\)"):
        module(torch.randn(1, 7, 16))


class WithModulesOfItsOwn(MultiHeadAttention):
    """A subclass that calls the `forward` it extends, which can use specs alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("name", ["position", "mask", "bias", "score"])
def test_a_module_in_place_of_a_spec_is_named_where_a_spec_is_read(name: str):
    module, x = WithModulesOfItsOwn(16, 2), torch.randn(1, 7, 16)
    expected = module(x)
    setattr(module, name, nn.Identity())
    for call in (lambda: module(x), lambda: module(x, mask=Causal(), bias=Alibi(2))):
        with pytest.raises(ProblemError, match=f"^{name} is the module Identity, .* assign a spec or None to {name}"):
            call()
    setattr(module, name, None)
    assert torch.equal(module(x), expected)


def test_a_wrapper_of_a_spec_module_can_be_assigned():
    """As torch assigns them, to every module of a model."""
    module, x = MultiHeadAttention(16, 2, mask=Causal(), bias=Alibi(2)), torch.randn(1, 7, 16)
    expected = module(x)
    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, SpecModule))
    assert isinstance(module.mask, CheckpointWrapper)
    assert isinstance(module.bias, CheckpointWrapper)
    assert torch.equal(module(x), expected)
    with pytest.raises(ProblemError, match="expected a regard Mask"):
        module.mask = cast(Any, module.bias)
