"""Attention that a model calls without a mask: in models of transformers all keys are seen, as in eager attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BridgeTowerConfig, BridgeTowerModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from regard.integrate.attention_function import attention
from regard.integrate.transformers import use_regard
from tests.integrate.test_cache_cross import ids, inputs, mllama
from tests.integrate.zoo import VOCABULARY, close, tokens

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def both(m: Any, run: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    m.set_attn_implementation("eager")
    with torch.no_grad():
        eager = run(m)
        return eager, run(use_regard(m))


class OfTransformers(nn.Module):
    """A module that says nothing of itself, as Mllama's cross-attention."""

    __module__ = "transformers.models.another.modeling_another"


class Extended(OfTransformers):
    """A class that FSDP makes of one, or a program."""


class OfAnother(nn.Module):
    """Written by hand or with a checkpoint; with torch's kernel it is causal."""


@pytest.mark.parametrize(("kind", "is_causal"), [(OfTransformers, False), (Extended, False), (OfAnother, True)])
def test_a_module_that_says_nothing_sees_every_key_if_it_is_of_transformers(kind: type[nn.Module], is_causal: bool):
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    wide = [x.double().repeat_interleave(2, dim=1) for x in (k, v)]
    scores = q.double() @ wide[0].mT * 0.5
    hidden = torch.ones(3, 7, dtype=torch.bool).triu(1) & is_causal
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ wide[1]
    out, _ = attention(kind(), q, k, v, None, scaling=0.5)
    assert torch.allclose(out.transpose(1, 2).double(), expected, atol=1e-6)


def test_a_module_of_another_that_says_nothing_computes_what_torchs_kernel_computes():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    theirs, _ = sdpa_attention_forward(OfAnother(), q, k, k, None, scaling=0.5)
    assert torch.allclose(attention(OfAnother(), q, k, k, None, scaling=0.5)[0], theirs, atol=1e-6)


def test_words_see_a_whole_image_that_is_given_without_a_mask():
    """Mllama's cross-attention does not say `is_causal`; torch's kernel would hide most of the image."""
    given = inputs() | {"input_ids": ids()}
    del given["cross_attention_mask"]
    eager, ours = both(mllama(), lambda m: m(**given).logits[given["attention_mask"].bool()])
    assert close(ours, eager)


def test_the_tokens_of_an_image_see_one_another_in_a_layer_made_for_text():
    """BridgeTower's says `is_causal`, and gets no mask."""
    text = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_hidden_layers": 3}
    image: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    config = BridgeTowerConfig(**SIZES, text_config=text, vision_config=image)
    m = BridgeTowerModel(config).eval()
    with torch.no_grad():
        for weight in m.parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)  # as initialised, all attention would be as good as uniform
    given = {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 32, 32)}
    eager, ours = both(m, lambda m: m(**given).image_features)
    assert close(ours, eager)
