"""Layers of cross-attention in a decoder's one cache (Mllama): kept as they come, whatever the others do."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from regard import ProblemError
from regard.cache.evict import SinksAndRecent
from regard.integrate.cache import regard_cache
from regard.integrate.cache_load import load_cache
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Contiguous, Paged
from tests.integrate.writing import written
from tests.integrate.zoo import padding, tokens, with_cache

IMAGE = 90
"""The token in place of an image."""


def mllama() -> Any:
    """A tiny one, whose middle layer attends to the image."""
    text: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0}
    image: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1}
    image |= {"attention_heads": 4, "image_size": 16, "patch_size": 8, "max_num_tiles": 1, "vision_output_dim": 64}
    image |= {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]}
    torch.manual_seed(0)
    config = transformers.MllamaConfig(text_config=text, vision_config=image, image_token_index=IMAGE)
    made = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "attn_gate" in name or "mlp_gate" in name:
                weight.fill_(1.0)  # as initialised, 0, the image would not be seen
    return made


def inputs() -> dict[str, Any]:
    """An image for each of two rows, the first of which is padded."""
    torch.manual_seed(2)
    found: dict[str, Any] = {"pixel_values": torch.randn(2, 1, 1, 3, 16, 16), "attention_mask": padding("left")}
    found |= {"aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long)}
    found |= {"aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long)}
    return found | {"cross_attention_mask": torch.ones(2, 13, 1, 1, dtype=torch.long)}


def ids() -> Tensor:
    torch.manual_seed(1)
    made = tokens() % 80 + 3
    made[:, 5] = IMAGE
    return made


ALL = SinksAndRecent(100)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    "words",
    [{}, {"evict": ALL}, {"evict": [ALL, None, ALL]}, {"evict": ALL, "layout": Paged(4)}, {"offload": True},
     {"layout": Contiguous(capacity=40)}],
    ids=str,
)  # fmt: skip
def test_a_model_with_cross_attention_writes_what_it_writes_with_its_own_cache(words: dict[str, Any], beams: int):
    m = mllama()
    m.set_attn_implementation("eager")
    expected = written(m, ids(), DynamicCache(), num_beams=beams, **inputs())
    use_regard(m)
    cache = regard_cache(m, **words)
    found = written(m, ids(), cache, num_beams=beams, **inputs())
    assert found[0] == expected[0]
    assert torch.allclose(found[1], expected[1], atol=1e-5)
    assert cache.layers[1].keys.shape == (2 * beams, 2, 5, 8)


@pytest.mark.parametrize("words", [{"evict": SinksAndRecent(8)}, {"codec": Int8(group=16, residual=0)}], ids=str)
def test_options_are_for_the_layers_of_self_attention(words: dict[str, Any], tmp_path: Path):
    m = use_regard(mllama())
    cache, plain = regard_cache(m, **words), regard_cache(m)
    text = torch.tensor(written(m, ids(), cache, **inputs())[0])
    written(m, ids(), plain, **inputs())
    assert torch.equal(cache.layers[1].keys, plain.layers[1].keys)
    lines = cache.explain().splitlines()
    assert lines[1].startswith("  0, 2  full attention  Contiguous(capacity=None), ")
    assert lines[2] == "  1  cross attention  as transformers keeps it: tensors"
    cache.save(tmp_path / "cache", text)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), load_cache(m, tmp_path / "cache")):
        restored: Any = other.layers[1]
        assert torch.equal(restored.values, cache.layers[1].values)
        assert other.explain() == cache.explain()


def test_tokens_that_are_taken_back_leave_the_image():
    m = use_regard(mllama())
    cache, text = regard_cache(m), ids()
    with torch.no_grad():
        whole = m(text, **inputs(), use_cache=False).logits
        m(text, **inputs(), **with_cache(cache))
        cache.crop(-4)
        masks = {name: inputs()[name] for name in ("attention_mask", "cross_attention_mask")}
        again = m(text[:, 9:], **masks, **with_cache(cache)).logits
    assert torch.allclose(again, whole[:, 9:], atol=1e-5)


@pytest.mark.parametrize("words", [{}, {"layout": Contiguous(capacity=40)}], ids=["grows", "fixed"])
def test_a_cache_that_was_reset_takes_another_image(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(DynamicLayer, "reset", raising=False)  # transformers 5.17 has none but that of the base class
    m, text = use_regard(mllama()), ids()
    cache = regard_cache(m, **words)
    with torch.no_grad():
        m(text, **inputs(), **with_cache(cache))
        cache.reset()
        others = inputs() | {"pixel_values": torch.randn(2, 1, 1, 3, 16, 16)}
        again = m(text, **others, **with_cache(cache)).logits
        assert torch.allclose(again, m(text, **others, use_cache=False).logits, atol=1e-5)


def test_a_policy_for_cross_attention_is_refused():
    with pytest.raises(ProblemError, match=r"for layer 1 of Mllama.*, whose kind is cross_attention: .* 0, 2\."):
        regard_cache(mllama(), evict=[ALL] * 3)
