"""Whether a model computes with what its cache gives is read off its source."""

import importlib
from typing import Any

import pytest
import transformers
from torch import nn

from regard.integrate.touches import attention_classes, touch
from tests.integrate.zoo import DECODERS, PAIRS, model

HANDED_ON = [
    "llama",
    "mistral",
    "qwen3",
    "gemma3",
    "gpt_oss",
    "gpt2",
    "gpt_neox",
    "phi3",
    "cohere",
    "opt",
    "deepseek_v3",  # by way of `expand_kv`
    "t5",
    "bart",
]
COMPUTED_WITH = {
    "diffllama": "torch.chunk(value_states, 2, dim=1)",
    "doge": "dt_states = self.dt_proj(",
    "jetmoe": "key_states.repeat(1, self.top_k, 1, 1)",
    "idefics": "self.k_layer_norm(key_states)",
    "bloom": "torch.bmm(",
}


def classes(name: str) -> list[type[nn.Module]]:
    """The attention classes of a model's file."""
    file = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    return attention_classes(next(c for c in vars(file).values() if getattr(c, "model_type", "") == name)())


@pytest.mark.parametrize("name", HANDED_ON)
def test_most_models_hand_their_keys_on(name: str):
    assert [touch(kind) for kind in attention_classes(model(name))] == [None]


@pytest.mark.parametrize("name", COMPUTED_WITH)
def test_the_first_line_that_computes_is_said(name: str):
    assert any(COMPUTED_WITH[name] in (touch(kind) or "") for kind in classes(name))


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_a_config_leads_to_the_classes_of_its_model(name: str):
    of_model = attention_classes(model(name))
    assert set(of_model) <= set(attention_classes(model(name).config))
    assert of_model


class Made(nn.Module):
    """A model's file that asks transformers for nothing."""

    def forward(self, x: Any, past_key_values: Any, layer: int) -> Any:
        k, v = past_key_values.update(x, x, layer)
        return k.shape, v.dtype


class Computing(Made):
    def forward(self, x: Any, past_key_values: Any, layer: int) -> Any:
        k, v = past_key_values.update(x, x, layer)
        return k.shape, v + 1


class Nameless(Made):
    def forward(self, x: Any, past_key_values: Any, layer: int) -> Any:
        return past_key_values.update(x, x, layer)


class Late(Made):
    def forward(self, x: Any, past_key_values: Any, layer: int) -> Any:
        k = v = x * 2
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, layer)
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("regard", None)
        return attend(self, x, k, v, None)


def without_source() -> type[nn.Module]:
    space: dict[str, Any] = {"Made": Made}
    exec(
        "class Hidden(Made):\n    def forward(self, x, p, i):\n        k, v = p.update(x, x, i)\n        return k + v",
        space,
    )
    return space["Hidden"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Made, None),
        (Late, None),
        (Computing, "return (k.shape, v + 1)"),
        (Nameless, "what its cache gives is not kept under a name"),
        (without_source(), "its source cannot be read"),
    ],
    ids=["asks", "hands on", "computes", "nameless", "hidden"],
)
def test_a_file_of_ones_own_is_read_as_well(kind: type[nn.Module], said: str | None):
    assert touch(kind) == said
