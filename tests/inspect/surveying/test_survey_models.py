"""Surveys of models of every kind: encoders, windows, learned positions, shared layers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BitNetConfig,
    BitNetForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from regard.errors import ProblemError
from regard.inspect.observing.observe import observe
from regard.inspect.surveying.inputs import projection
from regard.inspect.surveying.measure import measure
from regard.inspect.surveying.survey import check, survey
from regard.integrate.transformers import use_regard
from tests.inspect.small import LLAMA, SIZES, TEXT, VOCABULARY, agrees_with_eager, small


class Renamed(nn.Module):
    """A projection that is no `nn.Linear`, and whose weight is in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_an_encoder_has_no_continuation_and_no_induction(tokenizer):
    report = survey(small(BertForMaskedLM, BertConfig), tokenizer, TEXT)
    assert report.continuation == ""
    assert report.run.decode_tokens_per_second is None
    assert len(report.heads) == 18
    assert all(h.value("induction") is None for h in report.heads)
    assert agrees_with_eager(report)
    assert report.run.eager_output == "logits"
    assert report.heads[0].score("previous").chance == pytest.approx(1 / len(report.tokens))
    assert report.heads[0].value("value_weighted") is not None  # by the projection beside the module that attends
    induction, copying = sorted(report.run.notes, key=len)
    assert induction.startswith("Not measured: duplicate, induction, induction_jittered, best_shift, because attention")
    assert copying.startswith("Not measured: copying, copying_eigenvalues, because circuits cannot be extracted: Bert")


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("induction", "measures has induction, which cannot be measured here: attention sees later tokens"),
        ("copying", r"measures has copying, .* here: circuits cannot be extracted: BertForMaskedLM \(bert\): expected"),
    ],
)
def test_what_a_model_cannot_be_put_to_is_an_error_by_its_name(tokenizer, measure, message):
    bert = small(BertForMaskedLM, BertConfig)
    with pytest.raises(ProblemError, match=message):
        survey(bert, tokenizer, TEXT, measures=["sink", measure])
    if measure == "copying":  # a property of the weights: found before anything runs
        with pytest.raises(ProblemError, match=message):
            check(bert, tokenizer, TEXT, measures=[measure])


def test_weights_of_gpt2_are_read(tokenizer):
    """Its projections are transposed, and queries, keys and values come from one."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4, eos_token_id=None)
    gpt2 = GPT2LMHeadModel(config).eval()
    report = survey(gpt2, tokenizer, TEXT, new_tokens=0, compare_eager=False)
    assert report.run.notes == ()
    assert {"value_weighted", "copying", "copying_eigenvalues"} <= set(report.measures)
    use_regard(gpt2)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    norms: list[Any] = []
    with torch.no_grad(), observe(gpt2, lambda look: norms.append((look.call.v, projection(gpt2, look)))):
        gpt2(ids)
    v, w_o = norms[1]
    whole: Any = gpt2.get_parameter("transformer.h.1.attn.c_proj.weight")  # [heads * v_dim, d_model]: x @ weight
    torch.testing.assert_close(v[0, 2] @ w_o[2], v[0, 2] @ whole[12:18])


def test_an_unknown_output_projection_is_reported_once(llama, tokenizer):
    for layer in llama.model.layers:
        layer.self_attn.o_proj = Renamed(layer.self_attn.o_proj)
    report = survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False, measures=["entropy", "sink"])
    assert report.run.notes == ()
    report = survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False)
    assert "value_weighted" not in report.measures
    projection, copying = sorted(report.run.notes, key=len)
    assert projection == ("Not measured: value_weighted, because the output projection of LlamaAttention is not known.")
    assert "copying" in copying
    with pytest.raises(ProblemError, match="measures has value_weighted, which cannot be measured here: the output"):
        survey(llama, tokenizer, TEXT, new_tokens=0, compare_eager=False, measures=["value_weighted"])


def test_what_changes_between_the_heads_and_their_projection_is_not_passed_over(tokenizer):
    """BitNet has a norm there: the output of a head is not its weights times projected values."""
    bitnet = small(BitNetForCausalLM, BitNetConfig, num_key_value_heads=2, eos_token_id=None)
    report = survey(bitnet, tokenizer, TEXT, new_tokens=0, compare_eager=False)
    assert "value_weighted" not in report.measures
    assert "sink_value" in report.measures
    assert (
        "Not measured: value_weighted, because BitNetAttention changes the outputs of its heads before the output "
        "projection."
    ) in report.run.notes
    with pytest.raises(ProblemError, match=r"measures has value_weighted, .*: BitNetAttention changes the outputs"):
        measure(bitnet, torch.arange(9), "value_weighted")


def test_a_layer_that_does_not_attend_is_named(tokenizer):
    """Of Lfm2 some layers are convolutions."""
    kinds = ["conv", "full_attention", "conv"]
    lfm2 = small(Lfm2ForCausalLM, Lfm2Config, num_key_value_heads=2, layer_types=kinds, eos_token_id=None)
    message = "layers has 0, which did not attend: only 1 did"
    with pytest.raises(ProblemError, match=message):
        survey(lfm2, tokenizer, TEXT, new_tokens=0, compare_eager=False, layers=[0, 1])
    with pytest.raises(ProblemError, match=message):
        measure(lfm2, torch.arange(9), "sink", layers=[0])


def test_positions_behind_a_row_for_padding_are_fewer_than_rows(tokenizer):
    sizes = SIZES | {"max_position_embeddings": 34, "pad_token_id": 1}
    roberta = RobertaModel(RobertaConfig(**sizes)).eval()
    assert agrees_with_eager(survey(roberta, tokenizer, TEXT * 9, tokens=32))
    with pytest.raises(ProblemError, match=r"33 tokens, .* has a table of 32 positions: shorten the text to 32 tokens"):
        survey(roberta, tokenizer, TEXT * 9, tokens=33)


def test_layers_that_share_weights_are_layers(tokenizer):
    report = survey(small(AlbertModel, AlbertConfig, embedding_size=8), tokenizer, TEXT)
    assert sorted({h.layer for h in report.heads}) == [0, 1, 2]


def test_a_model_without_a_head_is_measured(tokenizer):
    torch.manual_seed(1)
    report = survey(LlamaModel(LlamaConfig(**LLAMA)), tokenizer, TEXT)
    assert report.continuation == ""
    assert report.heads[0].value("induction") is not None


def test_windows_and_learned_positions(tokenizer):
    torch.manual_seed(1)
    windowed = survey(MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=5)), tokenizer, TEXT, new_tokens=9)
    assert agrees_with_eager(windowed)
    n = len(windowed.tokens)
    assert windowed.heads[0].score("entropy").chance == pytest.approx(np.log(np.minimum(np.arange(n) + 1, 5)).mean())
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=24, n_layer=2, n_head=4, eos_token_id=None)
    gpt2 = survey(GPT2LMHeadModel(config), tokenizer, TEXT, new_tokens=4)
    assert agrees_with_eager(gpt2)
    assert (gpt2.run.layers, gpt2.run.heads) == (2, 4)
    with pytest.raises(
        ProblemError, match=r"has a table of 64 positions: shorten the text to 60 tokens, or generate fewer"
    ):
        survey(GPT2LMHeadModel(config), tokenizer, TEXT * 6, new_tokens=4)


def test_a_model_without_positions_reads_on_beyond_its_context_with_a_note(tokenizer):
    sizes: dict[str, Any] = LLAMA | {"max_position_embeddings": 32, "head_dim": 4}
    nemotron = NemotronHForCausalLM(NemotronHConfig(**sizes, layers_block_type=["attention"]))
    report = survey(nemotron, tokenizer, TEXT * 9, tokens=33, new_tokens=0)
    assert agrees_with_eager(report)
    assert "33 tokens, and the model was trained on 32 positions" in report.run.notes[0]


def test_of_an_encoder_and_decoder_the_encoder_is_measured(tokenizer):
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 24}
    heads: dict[str, Any] = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, d_kv=4, d_ff=16, num_layers=2, num_heads=6))
    bart = BartForConditionalGeneration(BartConfig(**sizes, **heads, encoder_layers=3))
    for model, layers in ((t5, 2), (bart, 3)):
        before = model.config._attn_implementation
        report = survey(model, tokenizer, TEXT)
        assert report.run.layers == layers
        assert report.heads[0].value("induction") is None
        assert agrees_with_eager(report)
        assert report.run.eager_output == "hidden states"
        assert model.config._attn_implementation == before
