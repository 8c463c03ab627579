"""Models with regard's attention give what they give with transformers' eager attention."""

import copy
import importlib
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CLIPVisionConfig,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GptOssConfig,
    GptOssModel,
    InformerConfig,
    InformerModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
    XGLMConfig,
    XGLMForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.xglm.modeling_xglm import XGLMAttention

from regard import Alibi, Causal, ProblemError, RefusalError, attend
from regard.calls import Call, observe_calls
from regard.integrate.attention_function import attention
from regard.integrate.continuous import continuous_batching
from regard.integrate.implementation import attends_by_itself
from regard.integrate.layer_mask import LayerMask
from regard.integrate.mask_function import ADD_THEIR_MASK
from regard.integrate.switch_implementation import with_implementation
from regard.integrate.transformers import check_model, register, use_regard
from tests.integrate.zoo import (
    ADDING,
    BY_THEMSELVES,
    DECODERS,
    ENCODERS,
    PAIRS,
    VOCABULARY,
    both,
    close,
    model,
    padding,
    tokens,
    with_cache,
)

SIDES = ["left", "right", "hole"]


def calls_of(name: str, *args: Any, **kwargs: Any) -> list[Call]:
    """What regard was asked for in one forward pass."""
    calls: list[Call] = []
    use_regard(model(name))
    with torch.no_grad(), observe_calls(calls.append):
        model(name)(*args, **kwargs)
    return calls


# ---- forward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_are_those_of_eager(name: str):
    ids = tokens()
    with torch.no_grad():
        eager, ours = both(name, lambda m: m(ids).logits)
    assert close(ours, eager)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_of_a_padded_batch_are_those_of_eager(name: str):
    ids, masks = tokens(), [padding(side) for side in SIDES]
    with torch.no_grad():
        eager, ours = both(name, lambda m: torch.cat([m(ids, attention_mask=mask).logits for mask in masks]))
    real = torch.cat(masks).bool()
    assert close(ours[real], eager[real])


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.filterwarnings("ignore:.*block_sparse")
def test_a_mask_that_a_model_adds_itself_hides_what_it_hides_in_eager(name: str):
    ids, mask = tokens(), padding("right")
    with torch.no_grad():
        eager, ours = both(name, lambda m: torch.stack([m(ids).logits, m(ids, attention_mask=mask).logits]))
    real = torch.stack([torch.ones_like(mask), mask]).bool()
    assert close(ours[real], eager[real])


@pytest.mark.parametrize("name", sorted(ADD_THEIR_MASK))
@pytest.mark.filterwarnings("ignore:.*block_sparse")
def test_a_mask_that_a_model_adds_itself_hides_what_it_hides_in_a_graph_too(name: str):
    ids, mask = tokens(), padding("right")

    def run(m: Any) -> Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(lambda: m(ids, attention_mask=mask, use_cache=False).logits, backend="eager")
        return compiled()[mask.bool()]

    with torch.no_grad():
        eager, ours = both(name, run)
    assert close(ours, eager)


def test_an_encoder_of_sounds_that_attends_by_itself_gets_the_mask_that_it_computes_with():
    sounds = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "attention_chunk_size": 4}
    sounds |= {"attention_context_left": 5, "output_proj_dims": 32, "subsampling_conv_channels": [128, 4]}
    images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images |= {"head_dim": 8, "num_key_value_heads": 4}
    words = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    words |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}
    words |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    config = Gemma4Config(text_config=words, audio_config=sounds, vision_config=images)
    m = Gemma4ForConditionalGeneration(config).eval()
    heard, real = torch.randn(1, 40, 128), torch.arange(40)[None] < 28

    def run() -> Tensor:
        with torch.no_grad():
            return cast(Any, m).model.audio_tower(heard, real).last_hidden_state

    m.set_attn_implementation("eager")
    eager = run()
    use_regard(m)
    assert close(run(), eager)


@pytest.mark.parametrize("distil", [True, False])
@pytest.mark.parametrize("attention_type", ["prob", "full"])
def test_forecasts_of_sparse_attention_of_its_own_are_those_of_eager(attention_type: str, distil: bool):
    """`distil` halves the tokens of the encoder, under a mask of all of them."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "num_time_features": 1}
    sizes |= {"prediction_length": 3, "context_length": 6, "lags_sequence": [1]}
    m = InformerModel(InformerConfig(**sizes, attention_type=attention_type, distil=distil)).eval()
    past, future = torch.randn(2, 7), torch.randn(2, 3)
    given = {"past_values": past, "past_time_features": past[..., None], "past_observed_mask": torch.ones(2, 7)}
    given |= {"future_values": future, "future_time_features": future[..., None]}

    def run() -> Tensor:
        torch.manual_seed(5)  # it draws the keys by which it chooses queries
        with torch.no_grad():
            return m(**given).last_hidden_state

    m.set_attn_implementation("eager")
    eager = run()
    use_regard(m)
    assert close(run(), eager)


@pytest.mark.parametrize("name", PAIRS)
def test_logits_of_an_encoder_decoder_are_those_of_eager(name: str):
    read, mask, written = tokens(), padding("right"), tokens(length=7)

    def run(m: Any) -> Tensor:
        whole = m(input_ids=read, decoder_input_ids=written).logits
        return torch.cat([whole, m(input_ids=read, attention_mask=mask, decoder_input_ids=written).logits])

    with torch.no_grad():
        eager, ours = both(name, run)
    assert close(ours, eager)


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4", "gpt2"])
def test_packed_documents_do_not_see_each_other(name: str):
    ids = tokens()
    positions = torch.cat([torch.arange(7), torch.arange(6)]).expand(2, -1)
    with torch.no_grad():
        eager, ours = both(name, lambda m: m(ids, position_ids=positions, use_cache=False).logits)
        alone = torch.cat([model(name)(ids[:, part]).logits for part in (slice(0, 7), slice(7, 13))], dim=1)
    assert close(ours, eager)
    assert close(ours, alone) or name == "llama4"  # whose chunks ran on across documents before 5.23


def test_a_mask_of_four_dimensions_may_be_bool_or_float():
    ids, keep = tokens(), torch.rand(2, 1, 13, 13) < 0.5
    keep |= torch.eye(13, dtype=torch.bool)
    added = torch.zeros(2, 1, 13, 13).masked_fill(~keep, torch.finfo(torch.float32).min)
    slopes = torch.randn(2, 4, 13, 13)
    with torch.no_grad():
        eager, ours = both("llama", lambda m: torch.cat([m(ids, attention_mask=x).logits for x in (added, slopes)]))
        by_bool = model("llama")(ids, attention_mask=keep).logits
    assert close(ours, eager)
    assert close(by_bool, eager[:2])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_in_bfloat16_it_is_no_further_from_float32_than_eager_is_twice(name: str):
    ids = tokens()
    with torch.no_grad():
        exact, _ = both(name, lambda m: m(ids).logits)
        half = model(name).to(torch.bfloat16)
        try:
            eager, ours = both(name, lambda m: m(ids).logits.float())
        finally:
            half.float()
            model.cache_clear()  # its weights are rounded now
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


# ---- generation -----------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedily": {},
    "with a static cache": {"cache_implementation": "static"},
    "with beams": {"num_beams": 3},
    "by sampling": {"do_sample": True},
    "without a cache": {"use_cache": False},
    "by looking up the prompt": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("llama", way) for way in WAYS),
        ("mistral", "greedily"),
        ("mistral", "without a cache"),
        ("gemma3", "with a static cache"),
        ("gemma3", "by looking up the prompt"),
        ("gpt_oss", "greedily"),
        ("t5", "with beams"),
    ],
)
def test_it_writes_what_eager_writes(name: str, way: str):
    rows = 1 if way == "by looking up the prompt" else 2  # transformers' rule
    ids, mask = tokens(rows), padding("right" if name in PAIRS else "left", rows)

    def run(m: Any) -> Tensor:
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0} | WAYS[way]
        return m.generate(ids, attention_mask=mask, **options)

    eager, ours = both(name, run)
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "deepseek_v3"])
def test_a_text_may_come_in_pieces(name: str, cache: Any):
    """Through caches that slide on (the windows and chunks here are of 5), by one token and by several."""
    ids, mask = tokens(length=21), padding("left", length=21)
    room: dict[str, Any] = {"max_cache_len": 32} if cache is StaticCache else {}

    def run(m: Any) -> Tensor:
        past, start, pieces = cache(config=m.config, **room), 0, []
        for end in (9, 10, 16, 17, 21):
            piece = {"attention_mask": mask[:, :end], **with_cache(past), "use_cache": True}
            pieces.append(m(ids[:, start:end], **piece).logits)
            start = end
        return torch.cat(pieces, dim=1)[mask.bool()]

    with torch.no_grad():
        eager, ours = both(name, run)
    assert close(ours, eager)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "bert"])
def test_gradients_are_those_of_eager(name: str):
    ids, mask = tokens(), padding("left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100  # predicted by a token of padding, which sees nothing here and everything in eager

    def run(m: Any) -> Tensor:
        m.zero_grad()
        m(ids, attention_mask=mask, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None])

    eager, ours = both(name, run)
    assert eager.abs().max() > 1e-3
    assert close(ours, eager)


def test_gradients_reach_the_position_bias_of_t5():
    read, written = tokens(), tokens(length=7)

    def run(m: Any) -> Tensor:
        m.zero_grad()
        m(input_ids=read, labels=written).loss.backward()
        stacks = (m.encoder, m.decoder)
        return torch.stack([s.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad for s in stacks])

    eager, ours = both("t5", run)
    assert eager.abs().max() > 1e-4
    assert torch.allclose(ours, eager, rtol=1e-4, atol=1e-6)


def test_dropout_is_for_training():
    subject, calls = model("llama"), []
    for layer in subject.model.layers:
        layer.self_attn.attention_dropout = 0.25
    use_regard(subject)
    try:
        with observe_calls(calls.append):
            subject(tokens())
            subject.train()(tokens())
    finally:
        model.cache_clear()
    assert [call.dropout for call in calls] == [0, 0, 0.25, 0.25]


def test_dropout_given_outside_training_is_ignored():
    """Some models hand on their probability as it stands; eager looks at `module.training` too."""
    q = torch.randn(1, 2, 9, 4)
    module = Plain().eval()
    assert torch.equal(attention(module, q, q, q, None, dropout=0.9)[0], attention(module, q, q, q, None)[0])


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
def test_a_compiled_model_is_one_graph(name: str):
    ids, mask = tokens(), padding("left")
    use_regard(model(name))
    torch.compiler.reset()  # all models of transformers 5.24 share a function around `forward`, and its compilations
    compiled = torch.compile(model(name), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours = compiled(ids, attention_mask=mask, use_cache=False).logits
        plain = model(name)(ids, attention_mask=mask, use_cache=False).logits
    assert close(ours[mask.bool()], plain[mask.bool()])


# ---- what it is given -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ["Causal()"] * 2),
        ("mistral", ["Causal() & Window(left=5)"] * 2),
        ("gemma3", ["Causal() & Window(left=5)", "Causal()"]),
        ("llama4", ["Causal() & Documents(ids=int64[2, 13])", "Causal()"]),
        ("bert", ["None"] * 2),
        ("modernbert", ["None", "Window(left=4, right=4)"]),
    ],
)
def test_masks_arrive_in_words(name: str, expected: list[str]):
    assert [repr(call.mask) for call in calls_of(name, tokens())] == expected


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "Causal() & ~KeyLengths(lengths=int64[2])"),
        ("right", "Causal() & KeyLengths(lengths=int64[2])"),
        ("hole", "Causal() & TensorMask(mask=bool[2, 1, 1, 13], offset=0)"),
    ],
)
def test_padding_arrives_in_words(side: str, expected: str):
    assert {repr(call.mask) for call in calls_of("llama", tokens(), attention_mask=padding(side))} == {expected}


def test_packed_documents_arrive_in_words():
    positions = torch.cat([torch.arange(7), torch.arange(6)]).expand(2, -1)
    calls = calls_of("mistral", tokens(), position_ids=positions, use_cache=False)
    assert {repr(call.mask) for call in calls} == {"Causal() & Window(left=5) & Documents(ids=int64[2, 13])"}


@pytest.mark.parametrize("mask", [None, padding("left")])
def test_the_layers_of_a_pass_share_one_plan(mask: Tensor | None):
    first, second = calls_of("llama", tokens(), attention_mask=mask)
    assert first.plan is second.plan


def test_keys_are_not_repeated_for_grouped_heads():
    assert [(call.q.shape[1], call.k.shape[1]) for call in calls_of("llama", tokens())] == [(4, 2)] * 2


def test_a_static_cache_is_masked_by_position_alone():
    """The keys that are still to come are hidden by Causal: no padding is needed for them."""
    cache = StaticCache(model("llama").config, max_cache_len=32)
    prompt = calls_of("llama", tokens(), attention_mask=padding("left") * 0 + 1, **with_cache(cache))
    step = calls_of("llama", tokens(length=1), attention_mask=torch.ones(2, 14), **with_cache(cache))
    assert [(repr(c.mask), c.offset, c.k.shape[2]) for c in (*prompt, *step)] == [
        *[("Causal()", 0, 32)] * 2,
        *[("Causal()", 13, 32)] * 2,
    ]


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "bert"])
def test_weights_are_given_when_asked_for(name: str):
    """GPT-2 does not hand the wish on to its attention function; the weights come all the same."""
    ids = tokens()
    with torch.no_grad():
        eager, ours = both(name, lambda m: torch.stack(m(ids, output_attentions=True).attentions))
    assert ours.shape == (2, 2, 4, 13, 13)
    assert close(ours, eager)


def test_weights_sum_to_1_in_a_model_that_applies_its_sink_to_the_output():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "sliding_window": 5, "bos_token_id": 1}
    file = pytest.importorskip("transformers.models.granite_swa")
    m = file.GraniteSWAForCausalLM(file.GraniteSWAConfig(**sizes, eos_token_id=2)).eval()
    for layer in m.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    m.set_attn_implementation("eager")
    with torch.no_grad():
        ids = tokens()
        eager, ours = m(ids, output_attentions=True), use_regard(m)(ids, output_attentions=True)
    assert close(ours.logits, eager.logits)
    assert all(close(a, b) for a, b in zip(ours.attentions, eager.attentions, strict=True))


def test_whoever_watches_sees_a_call_once_though_weights_are_asked_for():
    assert len(calls_of("llama", tokens(), output_attentions=True)) == 2


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_model_that_attends_by_itself_is_refused(name: str):
    with pytest.raises(ProblemError, match="never asks transformers' AttentionInterface"):
        use_regard(model(name))


def test_a_model_without_attention_is_not_said_to_have_some():
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    with pytest.raises(ProblemError, match="MambaForCausalLM computes its attention, if it has any, in its own file"):
        use_regard(MambaForCausalLM(MambaConfig(**sizes)))


@pytest.mark.parametrize("heads", [4, 6])
def test_the_alibi_that_the_refusal_of_falcon_names_gives_its_attention(heads: int):
    sizes = {"vocab_size": 50, "hidden_size": 8 * heads, "num_hidden_layers": 1, "num_attention_heads": heads}
    config = FalconConfig(**sizes, alibi=True, multi_query=False, attn_implementation="sdpa")
    falcon = FalconForCausalLM(config).eval()
    with pytest.raises(ProblemError, match=r"in Falcon with slopes=regard.Alibi\(heads\).slope_per_head\(\) \*"):
        use_regard(falcon)
    layer: Any = falcon.transformer.h[0].self_attention
    found: dict[str, Tensor] = {}
    layer.query_key_value.register_forward_hook(lambda _, args, out: found.update(qkv=out))
    layer.dense.register_forward_pre_hook(lambda _, args: found.update(out=args[0]))
    with torch.no_grad():
        falcon(torch.randint(50, (2, 12)))
    q, k, v = (t.transpose(1, 2) for t in layer._split_heads(found["qkv"]))
    bias = Alibi(slopes=Alibi(heads).slope_per_head() * q.shape[3] ** -0.5)
    assert close(attend(q, k, v, mask=Causal(), bias=bias).transpose(1, 2).flatten(2), found["out"])


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_the_name_is_refused_where_a_model_that_attends_by_itself_makes_a_mask(name: str):
    register()
    made = type(model(name))._from_config(copy.deepcopy(model(name).config), attn_implementation="regard")
    for run in (made, torch.compile(made, backend="eager")):
        message = r'"regard" with \w+Config: models of this kind compute attention'
        with torch.no_grad(), pytest.raises(ProblemError, match=message):
            run(tokens())


class AskingAttention(XGLMAttention):
    """A user's attention for XGLM, whose own never asks the interface."""

    is_causal = True

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        projected = (each(hidden_states) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        attend = ALL_ATTENTION_FUNCTIONS["regard"]
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.out_proj(out.flatten(2)), None


def xglm(attention: type[XGLMAttention], layers: int = 2) -> Any:
    """XGLM with the attention of a class in the first layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2}
    m: Any = XGLMForCausalLM(XGLMConfig(**sizes, attention_heads=4)).eval()
    for layer in m.model.layers[:layers]:
        layer.self_attn.__class__ = attention
    return m


def test_a_users_attention_classes_serve_where_those_of_transformers_attend_by_themselves():
    ids, ours = tokens(), use_regard(xglm(AskingAttention))
    with torch.no_grad():
        eager = xglm(XGLMAttention)(ids).logits
        assert close(ours(ids).logits, eager)
        assert close(torch.compile(ours, backend="eager")(ids).logits, eager)
        again = copy.deepcopy(ours)
        with pytest.raises(ProblemError, match=r"has attention classes of your own, which ask, call use_regard"):
            again(ids)
        assert close(use_regard(again)(ids).logits, eager)


def test_a_users_attention_class_in_one_layer_does_not_serve_for_the_others():
    m = use_regard(xglm(AskingAttention, layers=1))
    with torch.no_grad(), pytest.raises(ProblemError, match="with XGLMConfig: models of this kind"):
        m(tokens())


def test_a_model_that_only_prepares_the_masks_of_another_is_not_taken_for_one_that_attends_by_itself():
    importlib.import_module("transformers.models.paligemma.modeling_paligemma")
    assert not attends_by_itself("transformers.models.paligemma.configuration_paligemma")


def test_the_files_of_a_users_model_are_not_judged_by_their_names(monkeypatch: pytest.MonkeyPatch):
    """`use_regard` looks at its classes."""
    file = ModuleType("mine.modeling_mine")
    cast(Any, file).MyAttention = type("MyAttention", (nn.Module,), {"__module__": "mine.modeling_mine"})
    monkeypatch.setitem(sys.modules, "mine.modeling_mine", file)
    assert not attends_by_itself("mine.configuration_mine")


def test_a_model_without_source_files_is_checked_all_the_same():
    """As one of a frozen application, or of a notebook."""
    code = "def forward(self, x, **more):\n    return ALL_ATTENTION_FUNCTIONS.get_interface(x)(self, {}, **more)"
    for passed, keyword in (("x", None), ("x, block_indices=x", "passes block_indices= to its attention")):
        made: dict[str, Any] = {}
        exec(code.format(passed), made)
        layer = type("MadeUpAttention", (nn.Module,), made | {"set_attn_implementation": None})()
        if keyword is None:
            check_model(layer)
        else:
            with pytest.raises(RefusalError, match=f"MadeUpAttention {keyword}"):
                check_model(layer)


SMALL = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


class AttentionByName(nn.Module):
    """As models were written before transformers' interface had `get_interface`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.is_causal = config, True
        self.projection = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return function(self, q, k, v, None, scaling=1.0)[0].flatten(2)


class WithoutGetInterface(LlamaPreTrainedModel):
    _can_set_attn_implementation_cached_value = False  # what a file without `get_interface` gives, and this one has it

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.attention = AttentionByName(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def without_a_file() -> type[LlamaForCausalLM]:
    """A class of a module whose source cannot be read."""
    made: dict[str, Any] = {"__name__": "made_in_a_notebook", "LlamaForCausalLM": LlamaForCausalLM}
    sys.modules["made_in_a_notebook"] = ModuleType("made_in_a_notebook")
    exec("class Made(LlamaForCausalLM): _can_set_attn_implementation_cached_value = None", made)
    return made["Made"]


@pytest.mark.parametrize("kind", [without_a_file(), WithoutGetInterface])
def test_a_model_that_transformers_would_leave_as_it_is_gets_the_attention_of_regard(kind: type[LlamaForCausalLM]):
    made, calls = kind(LlamaConfig(vocab_size=11, **SMALL)), []
    x = torch.tensor([[1, 2, 3]]) if kind.__name__ == "Made" else torch.randn(1, 3, 16)
    with observe_calls(calls.append):
        use_regard(made)(x)
    assert len(calls) == 1
    made.set_attn_implementation("sdpa")
    with observe_calls(calls.append):
        made(x)
    assert len(calls) == 1


def test_models_in_a_model_get_their_attention_back():
    register()
    text, vision = LlamaConfig(vocab_size=11, **SMALL), CLIPVisionConfig(image_size=8, patch_size=4, **SMALL)
    config: Any = LlavaConfig(text_config=text, vision_config=vision, image_token_index=10)
    made = LlavaForConditionalGeneration(config)
    made.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    for block in (continuous_batching(made), with_implementation(made, "regard")):
        with block:
            assert config.vision_config._attn_implementation != "eager"
        configs = config, config.text_config, config.vision_config
        assert [each._attn_implementation for each in configs] == ["sdpa", "sdpa", "eager"]


class WithModel(LlamaForCausalLM):
    """A model with another in it, whose config is not in its own."""

    def __init__(self, config: LlamaConfig, inner: PreTrainedModel):
        super().__init__(config)
        self.inner = inner


@pytest.mark.parametrize(
    "inner",
    [
        lambda: BertModel(BertConfig(vocab_size=11, **SMALL)),
        lambda: GptOssModel(GptOssConfig(vocab_size=11, **SMALL, head_dim=8, num_local_experts=2)),
    ],
    ids=["with sdpa as well", "without sdpa"],
)
def test_a_model_whose_config_is_in_no_other_gets_its_attention_back(inner: Callable[[], PreTrainedModel]):
    register()
    made = WithModel(LlamaConfig(vocab_size=11, **SMALL), inner())
    made.inner.set_attn_implementation("eager")
    with with_implementation(made, "regard"):
        assert made.inner.config._attn_implementation == "regard"
    assert [each.config._attn_implementation for each in (made, made.inner)] == ["sdpa", "eager"]


def test_only_models_of_transformers_are_taken():
    with pytest.raises(ProblemError, match=r"got Linear: expected a model of transformers"):
        use_regard(nn.Linear(2, 2))


def module_with_eager(**named: Any) -> nn.Module:
    """A module of a model file whose own eager attention takes `named` by name."""
    file = ModuleType("modeling_made_up")
    exec(f"def eager_attention_forward(module, query, {', '.join(named) or 'key'}=None, **kwargs): ...", file.__dict__)
    sys.modules[file.__name__] = file
    return type("MadeUpAttention", (nn.Module,), {"__module__": file.__name__})()


@pytest.mark.parametrize(("name", "module"), [("block_indices", nn.Module()), ("twist", module_with_eager(twist=None))])
def test_a_keyword_that_changes_the_result_is_refused(name: str, module: nn.Module):
    q, given = torch.randn(1, 2, 3, 4), {name: torch.ones(1)}
    with pytest.raises(RefusalError, match=f"passes {name}="):
        attention(module, q, q, q, None, 0.0, None, None, None, None, None, None, False, **given)


def test_a_keyword_that_eager_drops_is_dropped():
    q = torch.randn(1, 2, 3, 4)
    out, weights = attention(module_with_eager(), q, q, q, None, position_ids=torch.arange(3), colour="green")
    assert out.shape == (1, 3, 2, 4)
    assert weights is None


# ---- the attention function by itself -------------------------------------------------------------------------------


class Plain(nn.Module):
    """An attention module that says nothing of itself."""


class CausalPlain(Plain):
    is_causal = True


def test_without_a_mask_the_first_query_is_at_the_first_key():
    """As a static cache has it when the prompt comes: 3 queries, 7 keys of which 4 are still to come."""
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    whole, _ = attention(CausalPlain(), q, k, v, None)
    prompt, _ = attention(CausalPlain(), q, k[:, :, :3], v[:, :, :3], None)
    assert torch.allclose(whole, prompt, atol=1e-6)


def test_a_single_query_without_a_mask_sees_every_key():
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 7, 4)
    ours, _ = attention(CausalPlain(), q, k, k, None)
    assert torch.equal(ours, attention(Plain(), q, k, k, None, is_causal=False)[0])


def test_the_output_has_tokens_before_heads_and_is_contiguous():
    q = torch.randn(2, 5, 4, 8).transpose(1, 2)
    out, _ = attention(Plain(), q, q, q[..., :3], None)
    assert out.shape == (2, 5, 4, 3)
    assert out.is_contiguous()


def test_one_set_of_learned_queries_serves_every_row():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(5, 2, 7, 4)
    out, _ = attention(Plain(), q, k, k, None, is_causal=False)
    each = torch.cat([attention(Plain(), q, row[None], row[None], None, is_causal=False)[0] for row in k])
    assert torch.allclose(out, each, atol=1e-6)


def test_a_mask_for_other_keys_is_a_problem():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ProblemError, match="for 3 queries and 5 keys, and Plain has 3 and 3"):
        attention(Plain(), q, q, q, LayerMask(Causal(), (1, 1, 3, 5), 2, "cpu"))


def test_an_encoder_with_a_cache_sees_all_keys_in_it():
    """transformers makes a mask of an encoder for the new tokens alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    m, ids = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **sizes)).eval(), tokens()

    def run(name: str) -> Tensor:
        m.set_attn_implementation(name)
        cache = DynamicCache(config=m.config)
        with torch.no_grad():
            m(ids[:, :6], use_cache=True, **with_cache(cache))
            return m(ids[:, 6:], use_cache=True, **with_cache(cache)).logits

    register()
    assert close(run("regard"), run("eager"))


def test_a_mask_for_one_key_stands_for_all_of_them():
    """What MiniMax makes of a cache whose first layer keeps no keys; tensors broadcast."""
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 7, 4)
    given = LayerMask(Causal(), (1, 1, 1, 1), 0, "cpu")
    assert torch.equal(attention(Plain(), q, k, k, given)[0], attention(Plain(), q, k, k, None)[0])


@pytest.mark.parametrize("shape", [(9,), (2, 9, 9)])
def test_a_mask_of_another_number_of_dimensions_is_a_problem(shape: tuple[int, ...]):
    with pytest.raises(ProblemError, match=re.escape(f"attention_mask is {list(shape)}: expected [batch, tokens]")):
        use_regard(model("llama"))(tokens(2, 9), attention_mask=torch.ones(shape, dtype=torch.int64))


def test_a_mask_of_integers_is_a_problem():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ProblemError, match=r"attention_mask is torch.int64 \[1, 1, 3, 3\]"):
        attention(Plain(), q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.int64))


def test_the_name_can_be_given_when_a_model_is_made():
    register()
    register()
    made = LlamaForCausalLM._from_config(model("llama").config, attn_implementation="regard").eval()
    calls: list[Call] = []
    with torch.no_grad(), observe_calls(calls.append):
        made(tokens())
    assert len(calls) == 2


def test_use_regard_returns_the_model_and_is_undone_by_the_name_of_another_attention():
    made = model("llama")
    assert use_regard(made) is made
    assert made.config._attn_implementation == "regard"
    made.set_attn_implementation("sdpa")
    assert made.config._attn_implementation == "sdpa"
