"""`use_regard`: which models get regard's attention, which are refused, and how it is undone."""

import copy
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    XGLMConfig,
    XGLMForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.xglm.modeling_xglm import XGLMAttention

from regard import Alibi, Causal, ProblemError, RefusalError, attend
from regard.calls import Call, observe_calls
from regard.integrate.continuous import continuous_batching
from regard.integrate.implementation import attends_by_itself
from regard.integrate.switch_implementation import with_implementation
from regard.integrate.transformers import check_model, register, use_regard
from tests.integrate.zoo import BY_THEMSELVES, VOCABULARY, close, model, tokens


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
