"""Costs against what is measured: torch's FLOP counter, a run of the definition, caches, and stored activations."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, Mask, Prefix, Window, attend, explain, observe_calls
from regard.backend.definition import attention
from regard.cache import Contiguous, Fp8, Int4, Int8, KVCache, Paged, Rolling
from regard.cost import Attention, Pattern, Storage, call_cost, cost, find_machine, training_memory
from regard.cost.config import from_config
from regard.cost.fields import from_fields
from regard.cost.model import Layer, Mlp, Model
from regard.cost.storage import TILE, VALUE_CHUNK, cache_bytes, stored_bytes
from regard.cost.training import layer_bytes, source_bytes
from regard.cost.work import Call, forward, prompt_call, training_step
from regard.errors import ProblemError
from regard.integrate import regard_cache, use_regard
from regard.integrate.cache_argument import as_argument, cache_of
from regard.storage.codec import CHUNK
from regard.storage.codec import TILE as TOKENS

# ---- FLOPs ----------------------------------------------------------------------------------------------------------

SMALL = {
    "llama": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "gemma2": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "phi": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96},
    "falcon": {"hidden_size": 64, "num_attention_heads": 4},
    "deepseek_v3": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 3, "intermediate_size": 96,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", SMALL)
def test_torchs_counter_counts_the_projections_the_mlps_and_the_output(family):
    """With eager attention torch counts its products over the whole square: here the pattern keeps every pair."""
    auto = pytest.importorskip("transformers.models.auto")
    settings = {"num_hidden_layers": 3, "vocab_size": 101} | SMALL[family]
    config = auto.configuration_auto.CONFIG_MAPPING[family](**settings, attn_implementation="eager")
    model = auto.AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 37, dtype=torch.long), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    read = from_config(family, config.to_dict())
    parts = forward(read, Call(2, 37, outputs=37))
    square = sum(x.attention.heads * 2 * 37**2 * 2 * (x.attention.qk_dim + x.attention.v_dim) for x in read.layers)
    rope = 0 if family == "gpt2" else counted[torch.ops.aten.bmm] - square  # angles are a product of positions
    assert 0 <= rope <= 3 * 2 * 2 * 37 * 64
    assert sum(counted.values()) - rope == parts.total.flops - parts.attention.flops + square


def test_torchs_counter_misses_the_default_attention_of_transformers_on_a_cpu():
    """As docs/cost.md says of counters of FLOPs: the products of torch's fused attention have no formula there."""
    auto = pytest.importorskip("transformers.models.auto")
    config = auto.configuration_auto.CONFIG_MAPPING["llama"](num_hidden_layers=2, vocab_size=101, **SMALL["llama"])
    model = auto.AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 37, dtype=torch.long), use_cache=False)
    parts = forward(from_config("m", config.to_dict()), Call(1, 37, outputs=37))
    assert counter.get_total_flops() == pytest.approx(parts.total.flops - parts.attention.flops, rel=0.001)


class Pairs(TorchDispatchMode):
    """Counts the weights above zero in every softmax that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket == torch.ops.aten._softmax:
            self.pairs += int((out > 0).sum())
        return out


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (None, Pattern(causal=False)),
        (Causal(), Pattern()),
        (Causal() & Window(11), Pattern(window=11)),
        (Causal() & (Window(11) | Prefix(3)), Pattern(window=11, sinks=3)),
    ],
)
def test_a_run_of_the_definition_computes_the_pairs_that_are_counted(mask, pattern):
    """Weights of a definition in full: those above zero are the kept pairs, for each of which two products count."""
    q, k, v = (torch.randn(2, heads, tokens, 16) for heads, tokens in ((6, 29), (3, 47), (3, 47)))
    plan = explain(q, k, v, mask=mask)
    with Pairs() as counter:
        attention(q, k, v, mask=mask)
    expected = 2 * 6 * pattern.pairs(queries=29, keys=47)
    assert counter.pairs == expected == call_cost(plan).pairs
    assert plan.flops == call_cost(plan).flops == expected * 2 * (16 + 16)


def test_the_counter_of_torch_sees_our_operator_as_the_model_counts_it():
    model = from_fields("m", "here", {"d_model": 64, "layers": 1, "heads": 4, "kv_heads": 2, "vocab": 9, "mlp": 8})
    q, k = torch.randn(1, 4, 53, 16, requires_grad=True), torch.randn(1, 2, 53, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, k, mask=Causal()).sum().backward()
    assert counter.get_total_flops() == training_step(model, 53).attention.flops


def test_the_cost_of_a_call_is_that_of_its_plan():
    q, k = (torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    plan = explain(q, k, k, mask=Causal())
    c = call_cost(plan, machine="a100")
    assert (c.flops, c.least_bytes) == (plan.flops, plan.bytes)
    assert c.seconds == find_machine("a100").seconds(c.flops, c.least_bytes, "bfloat16")
    assert c.tiled_bytes is not None
    assert c.least_bytes < c.tiled_bytes < c.naive_bytes
    assert c.intensity == plan.flops / plan.bytes


def test_differential_attention_takes_the_two_calls_of_each_layer():
    auto = pytest.importorskip("transformers.models.auto")
    config = auto.configuration_auto.CONFIG_MAPPING["diffllama"](
        num_hidden_layers=3, vocab_size=101, pad_token_id=0, **SMALL["llama"]
    )
    model, calls = use_regard(auto.AutoModelForCausalLM.from_config(config).eval()), []
    with torch.no_grad(), observe_calls(calls.append):
        model(torch.zeros(1, 37, dtype=torch.long), use_cache=False)
    read = from_config("m", config.to_dict())
    made = sum(explain(call.q, call.k, call.v, mask=Causal()).flops for call in calls)
    assert (len(calls), made) == (2 * 3, forward(read, prompt_call(37)).attention.flops)
    once = read.with_attention(calls=1)
    assert training_step(read, 37).attention.flops == 2 * training_step(once, 37).attention.flops
    assert training_memory(read, 37).naive > training_memory(once, 37).naive


# ---- bytes of caches ------------------------------------------------------------------------------------------------


def filled(cache: KVCache, tokens: int, *, heads: int = 3, dim: int = 48, v_dim: int = 40) -> KVCache:
    for start in range(0, tokens, 37):
        n = min(37, tokens - start)
        cache.append(torch.randn(2, heads, n, dim).bfloat16(), torch.randn(2, heads, n, v_dim).bfloat16())
    return cache


PLAIN = Attention(6, 3, 48, 40)


@pytest.mark.parametrize("tokens", [1, 31, 64, 100, 331])
@pytest.mark.parametrize(
    ("codec", "storage"),
    [
        (None, Storage("bfloat16")),
        (Int8(), Storage("int8")),
        (Int4(), Storage("int4")),
        (Fp8(), Storage("fp8")),
        (Int8(group=16, residual=50, sinks=0), Storage("int8", group=16, residual=50, sinks=0)),
        (Int4(group=64), Storage("int4", group=64)),
    ],
)
def test_a_cache_stores_the_bytes_that_are_counted(codec, storage, tokens):
    cache = filled(KVCache(codec=codec), tokens)
    assert cache.bytes == 2 * stored_bytes(PLAIN, tokens, storage, 2)


@pytest.mark.parametrize("tokens", [10, 64, 331])
def test_a_cache_of_known_size_allocates_the_bytes_that_are_counted(tokens):
    cache = filled(KVCache(layout=Contiguous(capacity=tokens)), tokens)
    assert cache.allocated_bytes == 2 * stored_bytes(PLAIN, tokens, Storage(), 2)


@pytest.mark.parametrize("tokens", [10, 64, 331])
def test_a_window_stores_the_tokens_that_the_next_query_sees(tokens):
    cache = filled(KVCache(layout=Rolling(64, sinks=4)), tokens - 1)
    cache.append(torch.zeros(2, 3, 1, 48).bfloat16(), torch.zeros(2, 3, 1, 40).bfloat16())
    windowed = Attention(6, 3, 48, 40, pattern=Pattern(window=60, sinks=4))
    assert cache.bytes == 2 * stored_bytes(windowed, tokens, Storage(), 2)


@pytest.mark.parametrize(("codec", "kind"), [(Int8(), "int8"), (Int4(), "int4"), (Fp8(), "fp8")])
@pytest.mark.parametrize("tokens", [1024, 1061, 2100])
def test_codes_in_a_window_are_estimated(codec, kind, tokens):
    cache = filled(KVCache(layout=Rolling(1024, sinks=4), codec=codec), tokens - 1)
    cache.append(torch.zeros(2, 3, 1, 48).bfloat16(), torch.zeros(2, 3, 1, 40).bfloat16())
    windowed = Attention(6, 3, 48, 40, pattern=Pattern(window=1020, sinks=4))
    assert cache.bytes == pytest.approx(2 * stored_bytes(windowed, tokens, Storage(kind), 2), rel=0.12)


@pytest.mark.parametrize("tokens", [10, 64, 331])
def test_pages_hold_whole_pages(tokens):
    cache = filled(KVCache(layout=Paged(16)), tokens)
    counted = 2 * stored_bytes(PLAIN, tokens, Storage(page=16), 2)
    assert cache.bytes == 2 * stored_bytes(PLAIN, tokens, Storage(), 2)
    assert cache.bytes <= counted <= cache.allocated_bytes
    assert counted % (16 * PLAIN.cached * 2) == 0


@pytest.mark.parametrize(("codec", "kind"), [(Int8, "int8"), (Int4, "int4"), (Fp8, "fp8")])
@pytest.mark.parametrize(("page", "group"), [(16, 32), (32, 32), (64, 32), (48, 32), (16, 64), (32, 128)])
@pytest.mark.parametrize(("sinks", "residual"), [(4, 32), (0, 0), (40, 20)])
def test_pages_of_codes_hold_the_bytes_that_are_counted(codec, kind, page, group, sinks, residual):
    options = {"group": group, "sinks": sinks, "residual": residual}
    for tokens in (1, 16, 100, 256, 331):
        cache = filled(KVCache(Paged(page), codec(**options)), tokens)
        counted = 2 * stored_bytes(PLAIN, tokens, Storage(kind, page=page, **options), 2)
        free = -tokens % page  # tokens of the last page, which counts whole
        assert cache.bytes == counted - 2 * free * PLAIN.cached * 2
        assert counted <= cache.allocated_bytes


@pytest.mark.parametrize("page", [7, 8, 40])
@pytest.mark.parametrize(("codec", "kind"), [(Int8(), "int8"), (Int4(), "int4"), (Fp8(), "fp8")])
def test_pages_that_no_cache_has_are_refused_as_by_the_cache(codec, kind, page):
    with pytest.raises(ProblemError) as of_cache:
        KVCache(Paged(page), codec)
    with pytest.raises(ProblemError) as of_cost:
        Storage(kind, page=page)
    assert str(of_cost.value) == str(of_cache.value).replace(repr(codec), kind)


def test_constants_of_codecs_are_those_of_the_codecs():
    assert (TILE, VALUE_CHUNK) == (TOKENS, CHUNK)


@pytest.mark.parametrize(("codec", "kind"), [(None, "bfloat16"), (Int8(), "int8"), (Int4(), "int4")])
def test_keys_and_values_of_cross_attention_stay_as_they_are(codec, kind):
    auto = pytest.importorskip("transformers.models.auto")
    sizes = {"d_model": 64, "vocab_size": 101, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    layers = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = auto.configuration_auto.CONFIG_MAPPING["bart"](**sizes, **layers)
    model = use_regard(auto.AutoModelForSeq2SeqLM.from_config(config).eval().bfloat16())
    cache, tokens = regard_cache(model, codec=codec), torch.zeros(1, 300, dtype=torch.long)
    with torch.no_grad():
        model.model(input_ids=tokens, decoder_input_ids=tokens, use_cache=True, **as_argument(model.model, cache))
    assert cache.bytes == cache_bytes(from_config("m", config.to_dict()), 300, storage=Storage(kind))


@pytest.mark.parametrize(("codec", "kind"), [(None, "bfloat16"), (Int8(), "int8"), (Int4(), "int4")])
def test_windows_beside_layers_of_full_attention_stay_as_they_are(codec, kind):
    auto = pytest.importorskip("transformers.models.auto")
    settings = {**SMALL["qwen3"], "num_hidden_layers": 3, "vocab_size": 101, "intermediate_size": 96}
    settings |= {"sliding_window": 256, "sliding_window_pattern": 3}
    config = auto.configuration_auto.CONFIG_MAPPING["gemma3_text"](**settings)
    model = use_regard(auto.AutoModelForCausalLM.from_config(config).eval().bfloat16())
    cache = regard_cache(model, codec=codec)
    with torch.no_grad():
        for count in (700, 1):
            model(torch.zeros(1, count, dtype=torch.long), use_cache=True, **as_argument(model, cache))
    counted = cache_bytes(from_config("m", config.to_dict()), 701, storage=Storage(kind))
    assert cache.bytes == pytest.approx(counted, rel=0.01)  # a window may store its last token or leave it to the next


@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "float64"])
def test_windows_beside_layers_of_full_attention_keep_the_type_of_the_model(kind, tokens):
    auto = pytest.importorskip("transformers.models.auto")
    settings = {**SMALL["gemma2"], "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 101, "intermediate_size": 96}
    config = auto.configuration_auto.CONFIG_MAPPING["gemma2"](**settings, sliding_window=30)
    model = use_regard(auto.AutoModelForCausalLM.from_config(config).eval())
    cache = regard_cache(model, codec=getattr(torch, kind))
    with torch.no_grad():
        model(torch.zeros(2, tokens, dtype=torch.long), use_cache=True, **as_argument(model, cache))
    read = from_config("m", config.to_dict())
    counted = cost(read, context=tokens, batch=2, dtype="float32", storage=kind)
    rows = 3 * 2 * 4 * (16 + 16) * 4  # queries and results of layers, batch rows and heads
    assert cache.bytes == counted.cache_bytes == counted.step.attention.moved - rows


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_model_in_pages_stores_and_reads_the_bytes_that_are_counted(tokens):
    """Its windows are in no pages."""
    auto = pytest.importorskip("transformers.models.auto")
    settings = {**SMALL["gemma2"], "head_dim": 16, "num_hidden_layers": 3, "vocab_size": 101, "intermediate_size": 96}
    config = auto.configuration_auto.CONFIG_MAPPING["gemma2"](**settings, sliding_window=30)
    model = use_regard(auto.AutoModelForCausalLM.from_config(config).eval())
    cache = regard_cache(model, layout=Paged(16))
    with torch.no_grad():
        model(torch.zeros(2, tokens, dtype=torch.long), use_cache=True, **as_argument(model, cache))
    read = from_config("m", config.to_dict())
    counted = cost(read, context=tokens, batch=2, dtype="float32", storage=Storage("float32", page=16))
    free = 2 * (-tokens % 16) * 2 * (16 + 16) * 4  # of the last page of each row, in the one layer of full attention
    rows = 3 * 2 * 4 * (16 + 16) * 4  # queries and results of layers, batch rows and heads
    assert cache.bytes == counted.cache_bytes - free == counted.step.attention.moved - rows


def test_every_layer_of_a_qwen3_moe_has_its_window():
    auto = pytest.importorskip("transformers.models.auto")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 101}
    settings = {**SMALL["llama"], **sizes, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 5}
    config = auto.configuration_auto.CONFIG_MAPPING["qwen3_moe"](**settings, attn_implementation="eager")
    with torch.no_grad():
        out = auto.AutoModelForCausalLM.from_config(config).eval()(
            torch.zeros(1, 23, dtype=torch.long), output_attentions=True
        )
    read = from_config("m", {"model_type": "qwen3_moe", **settings})
    counted = [layer.attention.pattern.pairs(queries=23, keys=23) for layer in read.layers]
    assert counted == [int((weights[0, 0] > 0).sum()) for weights in out.attentions] == [23 * 5 - 10] * 2


RECURRENT = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
    "jamba": {"num_experts": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_hidden_layers": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "falcon_h1": {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "olmo_hybrid": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    },
    "qwen3_next": {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "num_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def small_recurrent(family):
    """(config, model) of a family with layers without attention."""
    auto = pytest.importorskip("transformers.models.auto")
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 101, "pad_token_id": 0}
    if not family.startswith("mamba"):
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    settings = {**sizes, **RECURRENT[family], "attn_implementation": "eager"}
    config = auto.configuration_auto.CONFIG_MAPPING[family](**settings)
    return config, auto.AutoModelForCausalLM.from_config(config).eval()


def tensors_in(value) -> list[Tensor]:
    """The tensors of a layer of a cache, in dicts as well."""
    if isinstance(value, dict):
        return [t for each in value.values() for t in tensors_in(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_without_attention_keep_the_states_that_are_counted(family, dtype):
    config, model = small_recurrent(family)
    with torch.no_grad():
        out = model.to(dtype)(torch.zeros(2, 24, dtype=torch.long), use_cache=True)
    cache = cache_of(out) or out.get("cache_params")
    kept = sum(t.nbytes for layer in cache.layers for t in tensors_in(vars(layer)))
    read = from_config(family, config.to_dict())
    assert cache_bytes(read, 24, batch=2, dtype=str(dtype).removeprefix("torch.")) == kept


@pytest.mark.parametrize("family", sorted(RECURRENT.keys() - {"jamba", "qwen3_next"}))  # experts have no formula there
def test_torchs_counter_counts_the_projections_of_layers_without_attention(family):
    config, model = small_recurrent(family)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 37, dtype=torch.long), use_cache=False)
    parts = forward(from_config(family, config.to_dict()), Call(2, 37, outputs=37))
    products = parts.projections.flops + parts.mlp.flops + parts.logits.flops
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == products


class Moved(TorchDispatchMode):
    """Counts the elements that matrix products with weights read and write, the weights included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.counts = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if self.counts and function is torch.ops.aten.mm.default:
            self.elements += sum(t.numel() for t in (*args, out))
        return out


@pytest.mark.parametrize("q_rank", [24, None])
def test_the_projections_of_latents_read_and_write_what_is_counted(q_rank):
    auto = pytest.importorskip("transformers.models.auto")
    sizes = SMALL["deepseek_v3"] | {"q_lora_rank": q_rank, "num_hidden_layers": 2, "vocab_size": 101}
    config = auto.configuration_auto.CONFIG_MAPPING["deepseek_v3"](**sizes)
    model = auto.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    moved = Moved()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: setattr(moved, "counts", True))
        layer.self_attn.register_forward_hook(lambda *_: setattr(moved, "counts", False))
    with torch.no_grad(), moved:
        model(torch.zeros(1, 300, dtype=torch.long), use_cache=False)
    read = from_config("deepseek_v3", config.to_dict())
    assert forward(read, prompt_call(300, dtype="float32")).projections.moved == moved.elements * 4


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_torchs_counter_counts_an_encoder_with_a_decoder(family):
    auto = pytest.importorskip("transformers.models.auto")
    settings = {
        "t5": {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
        "bart": {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
                 "encoder_ffn_dim": 96, "decoder_ffn_dim": 128},
    }[family]  # fmt: skip
    sizes = {"d_model": 64, "vocab_size": 101, "attn_implementation": "eager"}
    config = auto.configuration_auto.CONFIG_MAPPING[family](**sizes, **settings)
    model = auto.AutoModelForSeq2SeqLM.from_config(config).eval()
    tokens = torch.zeros(2, 37, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False)
    read = from_config(family, config.to_dict())
    parts = forward(read, Call(2, 37, outputs=37, source=37, runs_encoder=True))
    attentions = [a for layer in (*read.layers, *read.encoder) for a in layer.attentions]
    square = sum(a.heads * 2 * 37**2 * 2 * (a.qk_dim + a.v_dim) for a in attentions)
    assert counter.get_total_flops() == parts.total.flops - parts.attention.flops + square


# ---- activations ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer as large models have it: norms before its parts, grouped heads, a gated MLP.

    With `normed` queries and keys have norms, with `parallel` all parts read the output of one norm, and with `cross`
    there is attention to an encoder as well.
    """

    def __init__(
        self, d: int, heads: int, kv_heads: int, width: int, *, normed: bool = False, parallel: bool = False,
        cross: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = (d, heads, kv_heads, normed)
        self.own, self.cross = Projections(*sizes), Projections(*sizes) if cross else None
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(1 if parallel else 2 + cross)])
        self.gate, self.up = (nn.Linear(d, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        y = self.norms[0](x)
        mixed = self.own(y, y, Causal())
        if len(self.norms) > 1:
            x = x + mixed
            y, mixed = self.norms[1](x), torch.zeros(())
        if self.cross is not None:
            x = x + self.cross(y, source, None)
            y = self.norms[2](x)
        return x + mixed + self.down(F.silu(self.gate(y)) * self.up(y))


class Projections(nn.Module):
    """Attention with grouped heads, to tokens of its own or of an encoder."""

    def __init__(self, d: int, heads: int, kv_heads: int, normed: bool) -> None:
        super().__init__()
        dim = d // heads
        self.dim, self.out = dim, nn.Linear(d, d, bias=False)
        self.q, self.k, self.v = (nn.Linear(d, n * dim, bias=False) for n in (heads, kv_heads, kv_heads))
        self.q_norm, self.k_norm = (nn.LayerNorm(dim) if normed else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, mask: Mask | None) -> Tensor:
        q, k, v = (p(y).unflatten(2, (-1, self.dim)) for p, y in ((self.q, x), (self.k, source), (self.v, source)))
        q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(*(t.transpose(1, 2) for t in (q, k, v)), mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("form", [{}, {"normed": True}, {"parallel": True}, {"cross": True}], ids=str)
def test_autograd_stores_the_activations_that_are_counted(form):
    """Every tensor that autograd stores for a layer, counted once, without its weights: two statistics in 100 bytes.

    An encoder's output is that of the encoder, and so in no layer of the decoder.
    """
    d, heads, kv_heads, width, tokens, others = 256, 4, 2, 704, 96, 150
    block, x = Block(d, heads, kv_heads, width, **form), torch.randn(1, tokens, d, requires_grad=True)
    source = torch.randn(1, others, d)
    without = {t.untyped_storage().data_ptr() for t in (*block.parameters(), source)}
    stored: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in without:
            stored[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x, source)
    a = Attention(heads, kv_heads, d // heads, d // heads, norm="head" if "normed" in form else "")
    cross = replace(a, is_cross=True) if "cross" in form else None
    layer = Layer(a, Mlp(width, gated=True), cross, norms=len(block.norms))
    counted = layer_bytes(layer, d, 4) * tokens + source_bytes(layer, 4) * others
    assert sum(stored.values()) == pytest.approx(counted, rel=0.015 if "normed" in form else 0.01)
    assert out.requires_grad


def test_a_token_of_the_encoder_takes_keys_and_values_in_each_layer_of_the_decoder():
    own = Attention(4, 4, 64, 64)
    encoder = Layer(replace(own, pattern=Pattern(causal=False)), Mlp(1024))
    decoder = Layer(own, Mlp(1024), replace(own, is_cross=True), norms=3)

    def stored(source: int) -> int:
        model = Model("m", "here", 256, 100, (decoder,) * 3, encoder=(encoder,) * 2, source_tokens=source)
        return training_memory(model, 96, batch=2).activations

    each = 2 * layer_bytes(encoder, 256, 2) + 3 * source_bytes(decoder, 2) + 2 * 256 * 2  # its last norm, its output
    assert source_bytes(decoder, 2) == 2 * 4 * 64 * 2
    assert stored(151) - stored(150) == 2 * each


def test_recomputation_stores_one_layer_in_full_and_the_input_of_each():
    layer = Layer(Attention(4, 4, 64, 64), Mlp(1024))
    model = Model("m", "here", 256, 100, (layer,) * 10)
    m = training_memory(model, 512)
    assert m.activations - m.recomputed == (9 * layer_bytes(layer, 256, 2) - 10 * 256 * 2) * 512
    assert training_memory(model, 512, batch=3).activations == 3 * m.activations
    assert forward(model, prompt_call(512)).total.flops > 0
