"""Models in which several calls of attention share the number of a layer: DiffLlama and LongCat."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LongcatFlashConfig, LongcatFlashForCausalLM

from regard.errors import ProblemError
from regard.inspect.intervene import ablated, mean_outputs
from regard.inspect.measures import sink
from regard.inspect.observing.observe import observe
from regard.inspect.surveying.measure import measure
from regard.inspect.surveying.survey import survey
from regard.integrate.transformers import use_regard
from tests.inspect.small import SIZES, TEXT, small, words

LATENT: dict[str, Any] = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
MIXTURE: dict[str, Any] = {"n_routed_experts": 2, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 8}


def sharp(model: Any) -> Any:
    """Its weights are so large that the loss depends on every head."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model.eval()


def difference() -> Any:
    """Three layers, whose module attends twice with the same weights and other values."""
    return sharp(small(DiffLlamaForCausalLM, DiffLlamaConfig, num_key_value_heads=2, eos_token_id=None))


def two_a_layer() -> Any:
    """Three layers of two modules that attend."""
    torch.manual_seed(1)
    sizes = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "num_hidden_layers")}
    more: dict[str, Any] = {
        "num_layers": 3,
        "v_head_dim": 4,
        "head_dim": 4,
        "ffn_hidden_size": 16,
        "eos_token_id": None,
    }
    config = LongcatFlashConfig(**sizes, **LATENT, **MIXTURE, **more, max_position_embeddings=512)
    return sharp(LongcatFlashForCausalLM(config))


@pytest.fixture(scope="module")
def tokenizer():
    return words()


@pytest.mark.parametrize("made", [difference, two_a_layer])
def test_each_call_has_a_number_of_its_own(made):
    model, ids = made(), torch.arange(1, 16)
    whole = measure(model, ids, "sink")["sink"]
    assert whole.layers == tuple(range(6))
    use_regard(model)
    with torch.no_grad(), observe(model, lambda look: sink(look.weights).value[0]) as seen:
        model(ids[None])
    torch.testing.assert_close(whole.value, torch.stack([call.value for call in seen]).double())
    some = measure(model, ids, "sink", layers=[1, 3])["sink"]
    assert some.layers == (1, 3)
    assert torch.equal(some.value, whole.value[[1, 3]])


@pytest.mark.parametrize("made", [difference, two_a_layer])
def test_a_survey_of_some_layers_names_them_as_one_of_all(made, tokenizer):
    asked: dict[str, Any] = {"new_tokens": 0, "compare_eager": False, "measures": "entropy"}
    whole = survey(made(), tokenizer, TEXT, heads=["2.4"], **asked)
    some = survey(made(), tokenizer, TEXT, heads=["2.4"], layers=[0, 2], **asked)
    assert {head.layer for head in whole.heads} == set(range(6))
    assert {head.layer for head in some.heads} == {picture.layer for picture in some.pictures} == {0, 2}
    for head in some.heads:
        assert head.scores == whole.head((head.layer, head.head)).scores
    (one,), (other,) = whole.close_ups, some.close_ups
    assert (one.layer, one.head) == (other.layer, other.head) == (2, 4)
    assert np.array_equal(one.q, other.q)


@pytest.mark.parametrize("made", [difference, two_a_layer])
def test_each_number_of_a_report_can_be_selected(made, tokenizer):
    asked: dict[str, Any] = {"new_tokens": 0, "compare_eager": False, "measures": "entropy"}
    report = survey(made(), tokenizer, TEXT, layers=[5], heads=["5.0"], **asked)
    assert {head.layer for head in report.heads} == {5}
    assert [(one.layer, one.head) for one in report.close_ups] == [(5, 0)]
    assert "1 of 6 layers were measured (5), and kinds are counted and ranked among them." in report.run.notes
    with pytest.raises(ProblemError, match="layer 6 does not exist: the model has 6 layers, 0 to 5"):
        survey(made(), tokenizer, TEXT, layers=[6], **asked)


@pytest.mark.parametrize(
    ("made", "name"), [(difference, (1, 3)), (two_a_layer, ("model.layers.1.self_attn.0", 3))], ids=["twice", "two"]
)
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_the_head_of_a_call_is_ablated_where_it_is(made, name, how, tokenizer):
    model, ids = made(), torch.tensor([tokenizer(TEXT)["input_ids"]])
    report = survey(model, tokenizer, TEXT, new_tokens=0, compare_eager=False, measures="sink", layers=[2], ablate=how)
    assert report.ablations is not None
    use_regard(model)

    def loss():
        return float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))

    by = "zero" if how == "zero" else mean_outputs(model, [ids], model)
    with torch.no_grad():
        base = loss()
        with ablated(model, [name], by):
            change = loss() - base
    assert report.ablations.deltas[2, 3] == pytest.approx(change, abs=1e-5)
    assert abs(change) > 1e-4
