"""How alike the tokens of each layer are, in a model as it is and without its skip connections and MLPs."""

import copy

import pytest
import torch
from torch import nn

from regard.errors import ProblemError
from regard.inspect.intervene.blocks import VARIANTS
from regard.inspect.intervene.rank_collapse import rank_collapse, residual
from regard.integrate.transformers import use_regard
from regard.nn import Decoder, MultiHeadAttention
from regard.nn.transformer import Block
from tests.inspect.intervene.models import albert, decoder, texts
from tests.integrate import zoo

AS_IT_IS = ["as it is"]
FAMILIES = ("llama", "gemma2", "gpt_neox", "gpt_oss", "opt", "llama4", "modernbert")
"""Norms before branches and behind them, branches side by side, experts, tokens laid side by side, no causal mask."""


def test_the_residual_is_0_for_equal_tokens_and_1_for_tokens_that_cancel():
    assert residual(torch.ones(4, 3).cumsum(1)).item() == 0
    assert residual(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).item() == 1


def test_tokens_that_count_may_be_numbers_which_are_no_weights():
    x, documents = torch.randn(3, 7, 5), torch.randint(3, (3, 7))  # 0 is padding
    assert torch.equal(residual(x, documents), residual(x, documents > 0))


def test_no_other_token_is_nearer_than_the_mean():
    x = torch.randn(7, 5).double()
    nearest = residual(x)
    for _ in range(20):
        other = x.mean(0) + 0.1 * torch.randn(5)
        assert (x - other).norm() / x.norm() > nearest


def test_padding_can_be_left_out():
    x, rows = torch.randn(2, 7, 5), torch.ones(2, 7, dtype=torch.bool)
    rows[0, 4:] = False
    assert torch.allclose(residual(x, rows)[0], residual(x[0, :4]))
    assert torch.allclose(residual(x, rows)[1], residual(x[1]))
    x[0, 5] = torch.nan
    assert torch.allclose(residual(x, rows)[0], residual(x[0, :4]))


@pytest.mark.parametrize("rows", [None, torch.ones(2, 5) > 0])
def test_rows_are_those_of_the_tokens(rows):
    with pytest.raises(ProblemError, match=r"x is \[7\].*: expected \[..., tokens, width\]"):
        residual(torch.ones(7), rows)


def test_layers_of_a_model_are_those_of_its_hidden_states():
    model, ids = zoo.model("llama"), zoo.tokens()
    use_regard(model)
    states = model(ids, output_hidden_states=True).hidden_states
    found = rank_collapse(model, lambda: model(ids))
    assert found.modules == ("model.layers.0", "model.layers.1")
    assert tuple(found.after) == VARIANTS
    assert torch.allclose(found.before, residual(states[0].double()))
    assert torch.allclose(found.after["as it is"][0], residual(states[1].double()))


def test_a_module_with_shared_weights_is_a_layer_each_time_that_it_runs():
    model, ids = albert(), texts()
    use_regard(model)
    states = model(ids, output_hidden_states=True).hidden_states
    found = rank_collapse(model, lambda: model(ids), variants=AS_IT_IS)
    assert found.modules == ("encoder.albert_layer_groups.0",) * 3
    torch.testing.assert_close(found.before, residual(states[0]))
    torch.testing.assert_close(found.after["as it is"], torch.stack([residual(x) for x in states[1:]]))


def test_of_several_forward_passes_the_last_is_measured():
    model, ids = decoder(), texts()
    several = rank_collapse(model, lambda: (model(ids[:, :5]), model(ids)), variants=AS_IT_IS)
    last = rank_collapse(model, lambda: model(ids), variants=AS_IT_IS)
    assert several.modules == last.modules
    assert torch.equal(several.before, last.before)
    assert torch.equal(several.after["as it is"], last.after["as it is"])


BY_HAND = {
    "as it is": lambda x, a, m: x + a(x) + m(x + a(x)),
    "without MLPs": lambda x, a, m: x + a(x),
    "without skips": lambda x, a, m: m(a(x)),
    "without both": lambda x, a, m: a(x),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_runs_as_composed_by_hand(variant):
    model, ids = decoder(), texts()
    x, expected = model.body.embedding(ids) * model.body.d_model**0.5, []
    for block in model.body.blocks:
        x = BY_HAND[variant](
            x, lambda x, b=block: b.attention(b.attention_norm(x)), lambda x, b=block: b.mlp(b.mlp_norm(x))
        )
        expected.append(residual(x))
    found = rank_collapse(model, lambda: model(ids)).after[variant]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_with_shared_weights_run_as_composed_by_hand(variant):
    model, ids = decoder(), texts()
    block = model.body.blocks[0]
    model.body.blocks[1] = block
    x, expected = model.body.embedding(ids) * model.body.d_model**0.5, []
    for _ in range(2):
        x = BY_HAND[variant](
            x, lambda x: block.attention(block.attention_norm(x)), lambda x: block.mlp(block.mlp_norm(x))
        )
        expected.append(residual(x))
    found = rank_collapse(model, lambda: model(ids)).after[variant]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_llama_runs_as_composed_by_hand(variant):
    model, ids = zoo.model("llama"), zoo.tokens()
    use_regard(model)
    x, expected = model.model.embed_tokens(ids), []
    turns = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])

    def attention(layer, x):
        return layer.self_attn(layer.input_layernorm(x), position_embeddings=turns, attention_mask=None)[0]

    for layer in model.model.layers:
        x = BY_HAND[variant](
            x, lambda x, o=layer: attention(o, x), lambda x, o=layer: o.mlp(o.post_attention_layernorm(x))
        )
        expected.append(residual(x.double()))
    found = rank_collapse(model, lambda: model(ids)).after[variant]
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)


def test_branches_side_by_side_run_as_composed_by_hand():
    model, ids = zoo.model("gpt_neox"), zoo.tokens()
    use_regard(model)
    x = model.gpt_neox.embed_in(ids)
    turns = model.gpt_neox.rotary_emb(x, torch.arange(ids.shape[1])[None])
    layer = model.gpt_neox.layers[0]
    a = layer.attention(layer.input_layernorm(x), attention_mask=None, position_embeddings=turns)[0]
    m = layer.mlp(layer.post_attention_layernorm(x))
    found = rank_collapse(model, lambda: model(ids)).after
    for variant, y in zip(VARIANTS, (x + a + m, x + a, a + m, a), strict=True):
        torch.testing.assert_close(found[variant][0], residual(y.double()), atol=1e-5, rtol=0)


def test_branches_side_by_side_are_found_in_float64():
    """A block and the comparison may add in different orders, and both round."""
    model, ids = copy.deepcopy(zoo.model("gpt_neox")).double(), zoo.tokens(rows=7, length=61)
    use_regard(model)
    found = rank_collapse(model, lambda: model(ids), variants=["without both"])
    assert found.modules == ("gpt_neox.layers.0", "gpt_neox.layers.1")


@pytest.mark.parametrize("name", FAMILIES)
def test_many_families_run_without_skips_and_mlps(name):
    model, ids = zoo.model(name), zoo.tokens()
    use_regard(model)
    before, hooks = model(ids).logits, hooks_of(model)
    after = rank_collapse(model, lambda: model(ids)).after
    assert after["without both"][-1].mean() < after["as it is"][-1].mean() - 0.1
    assert len({tuple(one[-1].tolist()) for one in after.values()}) == 4
    assert torch.equal(model(ids).logits, before)
    assert hooks_of(model) == hooks


def hooks_of(model):
    """How many hooks each module has; transformers leaves its own."""
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


class Bare(nn.Module):
    """Blocks without norms whose tokens all see each other: what the theorem is about, with skips and MLPs."""

    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(Block(MultiHeadAttention(64, 4)) for _ in range(layers))
        self.double()
        for block in self.blocks:
            block.attention_norm = block.mlp_norm = nn.Identity()  # one module in two places
            for linear in (m for m in block.modules() if isinstance(m, nn.Linear)):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_nothing_but_attention_collapses_doubly_exponentially():
    model, x = Bare(layers=4), torch.randn(2, 64, 64).double()
    after = rank_collapse(model, lambda: model(x)).after
    first, second, third, _ = after["without both"].mean(1).tolist()
    assert first > 0.7
    assert 1e-3 < second < 0.1
    assert third < 1e-6
    assert after["without skips"][-1].max() < 1e-9
    assert after["as it is"].min() > 0.5
    assert after["without MLPs"].min() > 0.8


def test_behind_norms_and_a_causal_mask_collapse_is_slower_and_skips_still_hold_against_it():
    model, ids = Decoder(19, 64, layers=16, heads=4).eval().double(), texts(tokens=32)
    after = rank_collapse(model, lambda: model(ids)).after
    assert after["without both"][-1].max() < 1e-3
    assert (after["without both"][4:] < 0.5 * after["without both"][:-4]).all()
    assert after["as it is"].min() > 0.7
    assert after["without MLPs"].min() > 0.7


def test_a_model_without_mlps_is_the_same_without_them():
    model, ids = Decoder(19, 32, layers=3, heads=4, mlp=False).eval(), texts()
    after = rank_collapse(model, lambda: model(ids)).after
    assert torch.equal(after["as it is"], after["without MLPs"])
    assert torch.equal(after["without skips"], after["without both"])
    assert (after["without both"][-1] < after["as it is"][-1]).all()


def test_halves_are_measured_too():
    model, ids = Decoder(19, 32, layers=3, heads=4).eval(), texts()
    wide = rank_collapse(model, lambda: model(ids)).after
    model.bfloat16()
    for variant, after in rank_collapse(model, lambda: model(ids)).after.items():
        torch.testing.assert_close(after, wide[variant], atol=0.03, rtol=0)


def test_rows_that_count_are_measured_in_every_variant():
    model, ids = decoder(), texts()
    rows = torch.ones(5, 11, dtype=torch.bool)
    rows[:, 6:] = False
    some = rank_collapse(model, lambda: model(ids), rows).after
    short = rank_collapse(model, lambda: model(ids[:, :6])).after
    for variant in VARIANTS:
        torch.testing.assert_close(some[variant], short[variant])


def test_a_stack_of_attention_without_skips_is_measured_as_it_is():
    model = Decoder(19, 32, layers=8, heads=4, skip=False, mlp=False)
    plain = Decoder(19, 32, layers=8, heads=4)
    ids = texts(tokens=23)
    bare, usual = (rank_collapse(m, lambda m=m: m(ids), variants=AS_IT_IS).after["as it is"] for m in (model, plain))
    assert bare[-1].max() < usual[-1].min()
    with pytest.raises(
        ProblemError, match=r"'body.blocks.0' of Decoder does not return x \+ attention.*model.eval\(\)"
    ):
        rank_collapse(model, lambda: model(ids))


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_blocks_of_another_layout_are_reported_and_measured_as_they_are(name):
    model, ids = zoo.model(name), zoo.tokens()
    use_regard(model)
    words, hooks = {"decoder_input_ids": ids} if name == "t5" else {}, hooks_of(model)
    with pytest.raises(ProblemError, match=r"does not return x \+ attention.* variants=\['as it is'\]"):
        rank_collapse(model, lambda: model(ids, **words))
    found = rank_collapse(model, lambda: model(ids, **words), variants=AS_IT_IS)
    assert found.after["as it is"].shape == (len(found.modules), 2)
    assert hooks_of(model) == hooks


class Mixed(nn.Module):
    """A block that adds a mixer's output to its input; attention only adds to what the mixer takes, as in Zamba2."""

    def __init__(self):
        super().__init__()
        self.attention, self.mixer = MultiHeadAttention(32, 4), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.mixer(x + self.attention(x))


def test_the_output_of_a_mixer_is_not_that_of_attention():
    model, x = nn.ModuleDict({"0": Mixed()}), torch.randn(2, 7, 32)
    with pytest.raises(ProblemError, match=r"block '0' of ModuleDict does not return x \+ attention"):
        rank_collapse(model, lambda: model["0"](x))


def test_cross_attention_is_no_mlp():
    model, ids = Decoder(19, 32, layers=2, heads=4, mlp=False, context_dim=8).eval(), texts()
    with pytest.raises(ProblemError, match=r"block 'body.blocks.0' of Decoder does not return x \+ attention"):
        rank_collapse(model, lambda: model(ids, torch.randn(5, 3, 8)))


@pytest.mark.parametrize("variants", [[], ["without"], ["as it is", "without norms"]])
def test_a_variant_that_does_not_exist_is_refused(variants):
    with pytest.raises(ProblemError, match=r"variants is .*: expected some of 'as it is', 'without MLPs'"):
        rank_collapse(decoder(), lambda: None, variants=variants)


def test_results_print_as_a_table():
    model = decoder()
    lines = str(rank_collapse(model, lambda: model(texts()))).splitlines()
    assert [len(line.split()) for line in lines[1:]] == [5, 5, 5]
    assert lines[0].endswith("without both")


def test_a_function_has_no_layers():
    model = decoder()
    with pytest.raises(ProblemError, match=r"none of its attention|no module"):
        rank_collapse(nn.Linear(2, 2), lambda: None)
    assert rank_collapse(model, lambda: model(texts())).after["as it is"].shape == (2, 5)
