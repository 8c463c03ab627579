"""Caches that forget, in models whose prompts, or images in them, see all of themselves: prefix language models."""

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard import Causal, Documents, RefusalError
from regard.cache import TOVA, Knorm, SinksAndRecent
from regard.integrate.cache import regard_cache
from regard.integrate.layer_mask import LayerMask
from regard.integrate.transformers import use_regard
from tests.integrate.writing import on_regard
from tests.integrate.zoo import with_cache

IMAGE = 97
_TEXT: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}  # fmt: skip


@functools.cache
def seeing(name: str) -> Any:
    """A tiny model that sees: 4 tokens an image."""
    torch.manual_seed(0)
    if name == "paligemma":
        config: Any = transformers.PaliGemmaConfig(
            text_config=_TEXT | {"model_type": "gemma"}, vision_config=_VISION | {"projection_dim": 32},
            image_token_id=IMAGE, projection_dim=32, hidden_size=32,
        )  # fmt: skip
        made: Any = transformers.PaliGemmaForConditionalGeneration(config)
    else:
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        config = transformers.Gemma3Config(
            text_config=_TEXT | {"model_type": "gemma3_text", "sliding_window": 5, "layer_types": kinds},
            vision_config=_VISION, image_token_id=IMAGE, mm_tokens_per_image=4,
        )  # fmt: skip
        made = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(3)  # as initialised, all attention would be as good as uniform
    use_regard(made.eval())
    return made


def seen(name: str, rows: int = 2) -> dict[str, Tensor]:
    """Prompts of 13 tokens as the model's processor makes them: the first row has 3 of padding."""
    torch.manual_seed(3)
    ids = torch.randint(3, 90, (rows, 13))
    ids[:, 4:8] = IMAGE
    mask = torch.ones(rows, 13, dtype=torch.int64)
    mask[0, : 3 * (rows > 1)] = 0
    types = torch.zeros_like(ids) if name == "paligemma" else (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": types,
        "pixel_values": torch.randn(rows, 3, 8, 8),
    }


def read(name: str, given: dict[str, Tensor], cache: Any) -> tuple[list[list[int]], Tensor]:
    """(tokens, logits [steps, rows, vocabulary]) that it writes."""
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "output_logits": True}
    made = seeing(name).generate(**given, **with_cache(cache), return_dict_in_generate=True, **options)
    return made.sequences.tolist(), torch.stack(made.logits)


NAMES = pytest.mark.parametrize("name", ["paligemma", "gemma3"])


@NAMES
@pytest.mark.parametrize("policy", [SinksAndRecent(8), Knorm(8), TOVA(8), TOVA(8, every=3)], ids=repr)
def test_a_model_that_sees_writes_with_a_policy(name: str, policy: Any):
    """The whole prompt is read before eviction, so the first logits equal those of a cache without a policy."""
    given = seen(name, rows=1)
    tokens, logits = read(name, given, regard_cache(seeing(name), evict=policy))
    plain = read(name, given, None)[1]
    assert len(tokens[0]) == 13 + 9
    assert torch.allclose(logits[0], plain[0], atol=1e-5)
    assert not torch.allclose(logits[2:], plain[2:], atol=1e-3)


@NAMES
def test_a_budget_that_is_never_reached_changes_nothing(name: str):
    given = seen(name, rows=1)
    assert torch.allclose(
        read(name, given, regard_cache(seeing(name), evict=TOVA(50)))[1], read(name, given, None)[1], atol=1e-5
    )


@NAMES
@pytest.mark.parametrize("policy", [SinksAndRecent(8), TOVA(8)], ids=repr)
def test_a_padded_prompt_sees_all_of_itself_too(name: str, policy: Any):
    given = seen(name)
    _, together = read(name, given, regard_cache(seeing(name), evict=policy))
    plain = read(name, given, None)[1]
    assert torch.allclose(together[0], plain[0], atol=1e-5)
    alone = {key: t[:1] if key == "pixel_values" else t[:1, 3:] for key, t in given.items()}
    assert torch.allclose(
        together[:, 0], read(name, alone, regard_cache(seeing(name), evict=policy))[1][:, 0], atol=1e-5
    )


def test_a_mask_that_may_hide_what_is_kept_is_refused():
    """Documents packed into a row: which of them the tokens that are left belong to is not known."""
    layer = regard_cache(on_regard("llama"), evict=SinksAndRecent(8)).layers[0]
    packed = LayerMask(Causal() & Documents(torch.tensor([0, 0, 1])), (1, 1, 1, 3), 2, "cpu")
    with pytest.raises(RefusalError, match=r"tells by position .* Use a cache that keeps all"):
        layer.mask_for(packed, 1, 2)
