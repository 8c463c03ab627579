"""Costs of models against figures that others published, and against each other."""

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from regard.cost import (
    Attention,
    Layer,
    Mlp,
    ModelCost,
    Storage,
    call_cost,
    cost,
    find_machine,
    find_model,
    load_model,
    parameters,
)
from regard.cost.fields import from_fields
from regard.cost.fit import USABLE, largest_batch, largest_context, weight_bytes
from regard.cost.model import Latent, Model
from regard.cost.model_cost import with_kv_heads, with_latent, with_window
from regard.cost.published import model_names
from regard.cost.storage import cache_bytes, state_bytes, stored_bytes, token_bytes
from regard.cost.traffic import naive_elements, tiled_elements
from regard.cost.training import layer_bytes, training_memory
from regard.cost.work import forward, prompt_call, step_call, training_step
from regard.errors import ProblemError

GIB = 2**30

TOKEN_BYTES = {
    "gpt3": 4_718_592,
    "opt-13b": 819_200,
    "llama-2-7b": 524_288,
    "llama-2-70b": 327_680,
    "llama-3-1-70b": 327_680,
    "qwen2.5-72b": 327_680,
    "llama-3-1-405b": 516_096,
    "llama-3-1-8b": 131_072,
    "mistral-7b": 131_072,
    "falcon-40b": 122_880,
    "falcon-7b": 8_192,
    "gemma-7b": 458_752,
    "gemma-2-9b": 344_064,
    "qwen3-0.6b": 114_688,
    "smollm2-135m": 23_040,
    "gpt2": 36_864,
    "deepseek-v3": 70_272,
    "deepseek-v2": 69_120,
    "deepseek-v2-lite": 31_104,
}
"""Bytes of a token in 2-byte elements, as papers and model cards print them (docs/cost.md)."""


@pytest.mark.parametrize(("name", "nbytes"), TOKEN_BYTES.items())
def test_a_token_takes_the_published_bytes(name, nbytes):
    assert token_bytes(find_model(name)) == nbytes


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", "fp8"])
def test_one_more_token_takes_no_cache_in_an_encoder(kind):
    assert token_bytes(find_model("bert-base"), Storage(kind)) == 0


def test_llama_2_70b_at_32k_takes_80_gib_with_all_heads_and_10_gib_with_8():
    model = find_model("llama-2-70b")
    assert cache_bytes(model, 32768) == 10 * GIB
    assert cache_bytes(with_kv_heads(model, None), 32768) == 80 * GIB


def test_public_caches_of_whole_contexts():
    assert cache_bytes(find_model("gpt3"), 2048) == 9 * GIB
    assert cache_bytes(find_model("qwen2.5-72b"), 32768) == 10 * GIB
    assert cache_bytes(find_model("mistral-7b"), 10**6) == 512 * 2**20  # its window
    assert round(cache_bytes(find_model("llama-3-1-70b"), 10**6) / 1e9) == 328  # kvpress prints 330 GB
    assert cache_bytes(find_model("deepseek-v3"), 160 * 1024) / GIB == pytest.approx(10.72, abs=0.01)


def test_a_square_of_512_weights_takes_a_mebibyte_and_144_heads_of_them_144():
    """512 tokens, float32: one head's weights, and those of BERT-base's 12 layers of 12 heads."""
    heads = sum(layer.attention.heads for layer in find_model("bert-base").layers)
    assert (512 * 512 * 4 / 2**20, heads * 512 * 512 * 4 / 2**20) == (1, 144)


def test_dot_products_cost_n_squared_d():
    """The order of growth: four times the FLOPs at twice the length, without a mask, and projections twice."""
    encoder = find_model("bert-base")
    short, long = (forward(encoder, prompt_call(n)) for n in (256, 512))
    assert long.attention.flops == 4 * short.attention.flops == 4 * 12 * 4 * 256**2 * 768
    assert long.projections.flops == 2 * short.projections.flops == 2 * 12 * 2 * 4 * 768**2 * 256


def test_attention_outweighs_its_projections_from_twice_d_on_without_a_mask_and_four_times_with_one():
    """Not from n = d on: projections take 8 n d^2, attention 4 n^2 d, of which a causal mask keeps half."""
    assert cost("bert-base", context=512).crossing == 2 * 768
    assert cost("llama-2-7b").crossing == 4 * 4096 - 1
    assert cost("mistral-7b").crossing is None  # 4,096 keys for each query, whatever the length


def test_latents_of_deepseek_are_71_times_smaller_than_heads():
    model = find_model("deepseek-v3")
    a = model.layers[0].attention
    assert len(model.layers) * a.heads * (a.qk_dim + a.v_dim) * 2 == 4_997_120
    assert 4_997_120 // token_bytes(model) == 71


def test_latent_attention_runs_expanded_for_a_prompt_and_absorbed_for_a_step():
    model, c = find_model("deepseek-v3"), 512
    step = forward(model, step_call(4096)).attention.flops / 61
    assert step == 4096 * 2 * 128 * (2 * c + 64)
    prompt = forward(model, prompt_call(4096)).attention.flops / 61
    assert prompt == 2 * 128 * (192 + 128) * (4096 * 4097 // 2)


def test_a_prompt_of_latents_reads_the_keys_and_values_of_all_heads():
    c = cost("deepseek-v3", context=4096, machine="h100")
    assert c.prompt.attention.moved == c.traffic.least


def test_the_gate_of_a_shared_expert_is_a_product_of_each_token():
    sizes = {"experts": 4, "active": 2, "shared_mlp": 32}
    without, gated = (forward(tiny(**sizes, shared_gate=each), prompt_call(10)).mlp for each in (False, True))
    assert gated.flops - without.flops == 2 * 10 * 2 * 64
    assert gated.moved - without.moved == 2 * 64 * 2


def test_shared_caches_store_and_project_nothing():
    model = find_model("gemma-3n-e4b")
    kept = [layer for layer in model.layers if layer.attention.cached]
    assert (len(model.layers), len(kept)) == (35, 20)
    assert token_bytes(model) == 20 * 2 * (256 + 256) * 2


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_a_step_reads_a_shared_cache_as_it_is_stored(kind):
    c = cost("gemma-3n-e4b", context=4096, storage=kind)
    attentions = [layer.attention for layer in c.model.layers]
    own = [replace(a, shares_cache=False) for a in attentions]
    stored = sum(stored_bytes(a, 4096, Storage() if a.pattern.window else c.storage, 2) for a in own)
    rows = sum(a.heads * (a.qk_dim + a.v_dim) * 2 for a in attentions)
    assert c.step.attention.moved == pytest.approx(stored + rows, rel=1e-6)


def mixed(pattern: str) -> Model:
    return tiny(layers=len(pattern), pattern=pattern, window=1024, chunk=1024)


@pytest.mark.parametrize("count", [token_bytes, partial(cache_bytes, context=8192)], ids=["token", "cache"])
def test_a_codec_leaves_windows_and_chunks_beside_layers_of_full_attention_plain(count):
    codes = Storage("int4")
    assert count(mixed("fsc"), storage=codes) == count(mixed("f"), storage=codes) + count(mixed("sc"))
    assert count(mixed("sc"), storage=codes) == 2 * count(mixed("s"), storage=codes) != 2 * count(mixed("s"))


@pytest.mark.parametrize(("pattern", "kept"), [("fs", 1024), ("ss", 0)])
def test_a_step_reads_windows_in_the_type_in_which_they_are_stored(pattern, kept):
    narrow, wide = (cost(mixed(pattern), context=8192, storage=kind) for kind in ("bfloat16", "float32"))
    token = token_bytes(mixed("f"))
    growth = narrow.cache_bytes - kept * token  # what float32 doubles: all but windows beside full attention
    assert wide.cache_bytes - narrow.cache_bytes == growth
    assert wide.step.attention.moved - narrow.step.attention.moved == growth
    assert wide.token_bytes - narrow.token_bytes == narrow.token_bytes - (token if kept else 0)


def test_a_window_that_a_policy_keeps_has_codes_beside_a_window_of_the_model():
    changed = with_window(mixed("fs"), 4096, 4)
    coded = cache_bytes(with_window(mixed("f"), 4096, 4), 8192, storage=Storage("int4"))
    assert cache_bytes(changed, 8192, storage=Storage("int4")) == coded + cache_bytes(mixed("s"), 8192)


def test_chinchillas_rule_holds_for_long_training():
    """Training takes about 6 FLOPs a parameter and token, where attention is small (Kaplan et al. 2020, §2.1)."""
    model = find_model("llama-2-7b")
    step = training_step(model, 128)
    assert step.total.flops / (6 * parameters(model).active * 128) == pytest.approx(1, abs=0.01)
    again = training_step(model, 128, recompute=True)
    assert again.projections.flops / step.projections.flops == 4 / 3


def test_gpt3s_training_takes_its_published_flops():
    """Brown et al. 2020, table D.1: 3.14e23 FLOPs for 300 billion tokens, counted without attention's own products."""
    step = training_step(find_model("gpt3"), 2048)
    per_token = (step.total.flops - step.attention.flops) / 2048
    assert per_token * 300e9 == pytest.approx(3.14e23, rel=0.01)


def test_activations_are_those_of_korthikanti():
    """34 s b h bytes of a layer, and 5 a s / h more for the squares; arXiv:2205.05198, equation 2."""
    model = find_model("gpt3")
    assert layer_bytes(model.layers[0], 12288, 2, dropout=True) == 34 * 12288
    m = training_memory(model, 2048, dropout=True)
    assert m.naive - m.activations == 96 * 5 * 96 * 2048**2
    assert m.recomputed < m.activations / 10


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if i % 3 else []) for i, name in enumerate(model_names())],
)
def test_every_model_has_a_cost_and_grows_with_context_and_batch(name):
    model = find_model(name)
    length = min(model.context or 4096, 4096)
    one = cost(model, context=length // 2, machine="h100")
    assert one.to_dict()["parameters"]["total"] == parameters(model).total
    for more in (replace(one, context=length), replace(one, batch=2)):
        assert more.cache_bytes >= one.cache_bytes
        assert more.prompt.total.flops > one.prompt.total.flops
        assert (more.seconds(more.prompt) or 0) >= (one.seconds(one.prompt) or 1)
    assert one.traffic is not None
    assert one.traffic.least <= one.traffic.tiled
    assert one.training_memory.recomputed <= one.training_memory.activations <= one.training_memory.naive


def test_what_fits_fits_and_one_more_does_not():
    c = cost("llama-3-8b", context=8192, batch=3, storage="int8", machine="a100")
    room = int(c.machine.memory * USABLE) - c.weight_bytes

    def size(context, batch):
        return cache_bytes(c.model, context, batch=batch, storage=c.storage)

    assert size(8192, c.largest_batch) <= room < size(8192, c.largest_batch + 1)
    assert size(c.largest_context, 3) <= room < size(c.largest_context + 32, 3)
    assert c.fits
    assert not replace(c, context=c.largest_context + 32).fits
    assert cost("llama-2-70b", machine="a100").largest_context == 0


def test_pages_waste_what_their_last_one_does_not_fill():
    model = find_model("llama-2-7b")
    assert cache_bytes(model, 100, storage=Storage(page=16)) == 112 * token_bytes(model)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("fields", [{"window": 60}, {"pattern": "cc", "chunk": 60}])
def test_windows_and_chunks_are_in_no_pages(fields, kind):
    model = tiny(**fields)
    assert any(layer.attention.pattern.is_local for layer in model.layers)
    in_pages, plain = (cost(model, context=1000, storage=Storage(kind, page=page)) for page in (64, None))
    assert (in_pages.cache_bytes, in_pages.token_bytes) == (plain.cache_bytes, plain.token_bytes)
    assert in_pages.step == plain.step


def test_a_step_reads_no_free_places_of_a_page():
    in_pages, plain = (cost("llama-2-7b", context=100, storage=Storage(page=page)) for page in (16, None))
    assert in_pages.cache_bytes > plain.cache_bytes
    assert in_pages.step == plain.step


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16"])
def test_types_have_short_names_and_those_of_torch(name):
    model, long = find_model("llama-2-7b"), cost("llama-2-7b", context=100, machine="h100")
    short = cost("llama-2-7b", context=100, machine="h100", dtype=name)
    assert (short.dtype, short.to_dict()) == ("bfloat16", long.to_dict())
    assert replace(long, dtype=name) == long
    assert cache_bytes(model, 100, dtype=name) == long.cache_bytes
    assert training_memory(model, 100, dtype=name) == long.training_memory
    for call in (cache_bytes, training_memory):
        with pytest.raises(ProblemError, match=r"unknown dtype 'bf61'\. Near: bf16"):
            call(model, 100, dtype="bf61")


OF_A_TYPE = {
    "weights": weight_bytes,
    "states": lambda model, dtype: state_bytes(model, dtype=dtype),
    "a token": lambda model, dtype: token_bytes(model, dtype=dtype),
    "a token of a cache of codes": lambda model, dtype: token_bytes(model, Storage("int8"), dtype=dtype),
    "the largest context": lambda model, dtype: largest_context(model, 80 * GIB, dtype=dtype),
    "the largest batch": lambda model, dtype: largest_batch(model, 80 * GIB, context=1000, dtype=dtype),
    "a prompt": lambda model, dtype: forward(model, prompt_call(1000, dtype=dtype)).total,
    "a step": lambda model, dtype: forward(model, step_call(1000, dtype=dtype)).total,
    "a step of training": lambda model, dtype: training_step(model, 1000, dtype=dtype).total,
}


@pytest.mark.parametrize("kind", OF_A_TYPE)
def test_every_function_of_a_type_takes_its_names(kind):
    count = OF_A_TYPE[kind]
    for model in (tiny(), find_model("gemma-2-9b"), find_model("gpt2")):
        for names in (("bf16", "torch.bfloat16", "bfloat16"), ("fp32", "torch.float32", "float32")):
            short, torchs, long = (count(model, name) for name in names)
            assert short == torchs == long
        with pytest.raises(ProblemError, match=r"unknown dtype 'bf61'\. Near: bf16"):
            count(model, "bf61")


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_token_of_codes_in_pages_takes_its_share_of_scales(kind):
    model, storage = find_model("llama-2-7b"), Storage(kind, group=64, page=16)
    more = cache_bytes(model, 64 * 300, storage=storage) - cache_bytes(model, 64 * 200, storage=storage)
    assert more == 64 * 100 * token_bytes(model, storage)


@pytest.mark.parametrize(
    ("window", "kinds"),
    [(1000, ["window 1,000 + 4 sinks"] * 2), (5000, ["window 4,096", "window 5,000 + 4 sinks"])],
)
def test_windows_change_the_layers_that_store_more(window, kinds):
    model = with_window(find_model("gemma-2-9b"), window, 4)
    assert [str(layer.attention.pattern) for layer in model.layers[:2]] == kinds
    assert cache_bytes(model, 10**6) < cache_bytes(find_model("gemma-2-9b"), 10**6)


def test_what_ifs_are_changes_alone():
    names = [name for name, _ in cost("llama-2-70b", context=32768).what_if()]
    assert names == ["as it is", "MHA", "MQA", "MLA", "int8 cache", "int4 cache", "window 4,096 + 4 sinks"]
    names = [name for name, _ in cost("deepseek-v3", context=2048).what_if()]
    assert names == ["as it is", "int8 cache", "int4 cache"]
    assert [name for name, _ in cost("bert-base").what_if()] == ["as it is"]
    names = [name for name, _ in cost("llama-2-70b", context=2048, storage=Storage(page=7)).what_if()]
    assert names == ["as it is", "MHA", "MQA", "MLA"]  # no codes in pages of 7 tokens
    names = [name for name, _ in cost("gemma-2b", context=2048).what_if()]  # which has 8 heads
    assert names == ["as it is", "MHA", "MLA", "int8 cache", "int4 cache"]


@pytest.mark.parametrize(("gate", "width"), [("element", 4 * 16), ("head", 4)])
def test_a_model_keeps_its_gates_with_latents(gate, width):
    plain, gated = with_latent(tiny(qkv_bias=True)), with_latent(tiny(qkv_bias=True, gate=gate))
    biases = width * (gate == "element")
    assert parameters(gated).total - parameters(plain).total == 2 * (64 * width + biases)
    work = [forward(model, prompt_call(10)).projections for model in (plain, gated)]
    assert work[1].flops - work[0].flops == 2 * 10 * 2 * 64 * width
    assert work[1].moved - work[0].moved == 2 * (64 + 10) * width * 2  # weights, and the gates of each token


def test_attention_of_two_calls_has_no_latents():
    assert with_latent(tiny(calls=2)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama-2-70b", "dtype": "bf61"}, "unknown dtype 'bf61'. Near: bf16"),
        ({"model": "llama-2-70b", "context": 0}, "context 0: expected 1 or more"),
        ({"model": "gpt2", "context": 2048}, "gpt2 has 1,024 learned positions"),
        ({"model": "transformer-base"}, "transformer-base has no longest context: give context"),
        ({"model": "llama-2-70b", "storage": "int9"}, "unknown storage 'int9'. Near: int"),
        ({"model": "llama-2-70b", "context": 1.5}, "context 1.5: expected a whole number"),
        ({"model": "llama-2-70b", "context": "32k"}, "context '32k': expected a whole number"),
        ({"model": "llama-2-70b", "batch": 1.5}, "batch 1.5: expected a whole number"),
        ({"model": "llama-2-70b", "batch": True}, "batch True: expected a whole number"),
        ({"model": "llama-2-70b", "dtype": 3}, "unknown dtype '3'. Known: bf16, bfloat16"),
        ({"model": "llama-2-70b", "storage": 3}, "storage is 3: expected a name such as 'int8'"),
        ({"model": "llama-2-70b", "machine": 3}, "machine is 3: expected a name such as 'h100'"),
        ({"model": ""}, "the name of the model is empty: expected a published model or a folder"),
        ({"model": None}, "model is None: expected the name of a published model"),
    ],
)
def test_wrong_arguments_say_why(arguments, message):
    with pytest.raises(ProblemError, match=message):
        cost(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": 3}, "unknown storage '3'"),
        ({"group": 16.0}, "group 16.0: expected a whole number"),
        ({"group": 8}, "group 8: expected a multiple of 16"),
        ({"sinks": True}, "sinks True: expected a whole number"),
        ({"page": 0}, "page 0: expected 1 or more"),
    ],
)
def test_a_storage_takes_whole_numbers(arguments, message):
    with pytest.raises(ProblemError, match=message):
        Storage(**arguments)


@pytest.mark.parametrize("given", ["gpt2", 3, None])
@pytest.mark.parametrize(
    ("count", "sizes"), [(parameters, ()), (cache_bytes, (7,)), (training_memory, (7,)), (ModelCost, (7,))]
)
def test_what_counts_a_model_takes_no_name(count, sizes, given):
    with pytest.raises(ProblemError, match=rf"^model is {given!r}: expected a regard.cost.Model; load_model\(name\)"):
        count(given, *sizes)


@pytest.mark.parametrize("find", [find_model, load_model])
def test_the_name_of_a_model_is_a_text(find):
    with pytest.raises(ProblemError, match=r"^the name of the model is 3: expected a text, or the path of a folder"):
        find(3)


def test_a_folder_may_be_a_path(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 11}
    config = {"model_type": "llama", "intermediate_size": 128, "max_position_embeddings": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path) == load_model(str(tmp_path)) == cost(tmp_path).model
    with pytest.raises(ProblemError, match="there is no directory"):
        load_model(tmp_path / "nope")


@pytest.mark.parametrize("count", [cache_bytes, training_memory])
@pytest.mark.parametrize("sizes", [{"context": -1}, {"context": 1.5}, {"context": 7, "batch": 1.5}])
def test_sizes_are_whole(count, sizes):
    with pytest.raises(ProblemError, match=r"^(context|batch) .*: expected"):
        count(find_model("gpt2"), **sizes)


def test_a_storage_may_be_a_name_wherever_one_is_taken():
    model = find_model("gpt2")
    named, made = cache_bytes(model, 700, storage="int8"), cache_bytes(model, 700, storage=Storage("int8"))
    assert named == made == ModelCost(model, 700, storage="int8").cache_bytes  # pyright: ignore[reportArgumentType]
    assert ModelCost(model, 700, machine="h100") == ModelCost(model, 700, machine=find_machine("h100"))  # pyright: ignore[reportArgumentType]


def test_the_step_of_an_encoder_takes_no_time():
    c = cost("bert-base", machine="h100")
    assert c.step is c.seconds(c.step) is c.expected_seconds(c.step, is_step=True) is None


LAYER = Layer(Attention(4, 2, 8, 8), Mlp(16))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Attention(1.5, 1, 8, 8), r"^Attention\(heads=1.5\): expected a whole number, 1 or more"),
        (lambda: Attention(4, None, 8, 8), r"^Attention\(kv_heads=None\): expected a whole number"),
        (lambda: Mlp("16"), r"^Mlp\(width='16'\): expected a whole number"),
        (lambda: Mlp(16, shared=-1), r"^Mlp\(shared=-1\): expected a whole number, 0 or more"),
        (lambda: Latent(8.0, 4, 4), r"^Latent\(kv_rank=8.0\): expected a whole number"),
        (lambda: Model("m", "", 8.5, 9, (LAYER,)), r"^Model\(d_model=8.5\): expected a whole number"),
        (lambda: Model("m", "", 8, 9, (3,)), r"^m: layers is \(3,\): expected a tuple of Layer"),
        (lambda: Model("m", "", 8, 9, LAYER), r"^m: layers is Layer.*: expected a tuple of Layer"),
    ],
)
def test_shapes_are_whole_numbers(made, says):
    with pytest.raises(ProblemError, match=says):
        made()


def test_layers_may_be_a_list():
    assert Model("m", "", 8, 9, [LAYER]) == Model("m", "", 8, 9, (LAYER,))  # pyright: ignore[reportArgumentType]


def test_what_is_no_plan_has_no_cost():
    with pytest.raises(
        ProblemError, match=r"^call_cost takes a plan, and got int: regard.explain\(q, k, v\) makes one"
    ):
        call_cost(3)  # pyright: ignore[reportArgumentType]


def test_the_integers_of_numpy_are_whole_numbers():
    assert cost("gpt2", context=np.int64(100), batch=np.int32(2)) == cost("gpt2", context=100, batch=2)
    assert isinstance(cost("gpt2", context=np.int64(100)).context, int)


# ---- traffic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m", "d", "fast"), [*itertools.product((7, 64), (13, 64), (4, 8), (96, 1024))])
def test_algorithm_1_makes_the_loads_and_stores_that_are_counted(n, m, d, fast):
    """The loops of Dao et al. 2022, algorithm 1, counting elements."""
    columns = max(1, fast // (4 * d))
    rows = min(columns, d)
    moved = 0
    for j in range(0, m, columns):
        moved += min(columns, m - j) * (d + d)  # line 6: load K_j, V_j
        for i in range(0, n, rows):
            height = min(rows, n - i)
            moved += height * (d + d + 2)  # line 8: load Q_i, O_i, l_i, m_i
            moved += height * (d + 2)  # lines 12, 13: write O_i, l_i, m_i
    assert tiled_elements(n, m, d, d, fast) == moved


def test_theorem_2_tiles_move_n_squared_d_squared_by_m():
    n, d, fast = 2**16, 64, 2**16
    base = tiled_elements(n, n, d, d, fast)
    assert tiled_elements(2 * n, 2 * n, d, d, fast) / base == pytest.approx(4, rel=0.01)
    assert tiled_elements(n, n, 2 * d, 2 * d, fast) / base == pytest.approx(4, rel=0.02)
    assert tiled_elements(n, n, d, d, 2 * fast) / base == pytest.approx(1 / 2, rel=0.01)
    assert naive_elements(n, n, d, d) / (4 * n * n) == pytest.approx(1, rel=0.01)


def tiny(**fields) -> Model:
    return from_fields("tiny", "here", {"d_model": 64, "layers": 2, "heads": 4, "vocab": 100, "mlp": 256} | fields)


def test_absorbed_latents_read_the_cache_once_for_all_heads():
    model = tiny(kv_rank=32, rope_dim=8, nope_dim=16, v_dim=16)
    assert model.layers[0].attention.latent == Latent(32, 8, 16)
    moved = forward(model, step_call(10_000)).attention.moved
    assert moved == pytest.approx(2 * 10_000 * (32 + 8) * 2, rel=0.01)
