"""The attention function that models of transformers call, by itself: its keywords, masks and outputs."""

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, DynamicCache

from regard import Causal, ProblemError, RefusalError
from regard.integrate.attention_function import attention
from regard.integrate.layer_mask import LayerMask
from regard.integrate.transformers import register, use_regard
from tests.integrate.zoo import VOCABULARY, close, model, tokens, with_cache


def test_dropout_given_outside_training_is_ignored():
    """Some models hand on their probability as it stands; eager looks at `module.training` too."""
    q = torch.randn(1, 2, 9, 4)
    module = Plain().eval()
    assert torch.equal(attention(module, q, q, q, None, dropout=0.9)[0], attention(module, q, q, q, None)[0])


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
