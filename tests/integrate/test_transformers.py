"""Models with regard's attention give what they give with transformers' eager attention."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    InformerConfig,
    InformerModel,
    StaticCache,
)

from regard.calls import Call, observe_calls
from regard.integrate.mask_function import ADD_THEIR_MASK
from regard.integrate.transformers import use_regard
from tests.integrate.zoo import (
    ADDING,
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
