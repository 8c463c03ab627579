"""A layer of a trained model as a module of regard: its weights, its rotation, its mask.

```python
model, _, _ = load()                                                # SmolLM2-135M
attention = attention_of(model.model.layers[7].self_attn, model.config)      # MultiHeadAttention, the same outputs
fewer, latent = share_heads(attention, 1), to_latent(attention, 256)
```
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, Window
from regard.describe.position import Rope
from regard.describe.rope_scaling import DynamicNTK, Linear, Llama3, LongRope, Proportional, Scaling, Yarn
from regard.errors import ProblemError
from regard.integrate.projections import Affine, affine_of, has_matrix, projections_of
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.norm import RMSNorm
from regard.nn.projections import check_linear

SEPARATE = (
    "arcee", "gemma", "granite", "llama", "mistral", "mixtral", "nemotron", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "starcoder2",
)  # fmt: skip
FUSED = ("phi3", "gpt_neox")
LATENT = ("deepseek_v2", "deepseek_v3")
WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2")
"""Model types whose layers all have the window of the config; layers of others say whether they have one."""
SUPPORTED = (*SEPARATE, *FUSED, *LATENT)
"""Model types whose attention layers can be taken over."""
PARTIAL = ("nemotron", *FUSED)
"""Those of them that read `partial_rotary_factor`; the others rotate all dimensions, whatever it is."""


def attention_of(layer: nn.Module, config: Any) -> MultiHeadAttention | LatentAttention:
    """A module with copies of the weights of an attention layer of transformers, that computes the same.

    Causal unless `config.is_causal` is False, with the layer's window if it has one. Its input is that of the layer,
    after the norm. A weight is trained if that of the layer is.

    Args:
        layer: such as `model.model.layers[0].self_attn`, or `model.gpt_neox.layers[0].attention`.
        config: of the model, `model.config`.

    Raises:
        ProblemError: a model type that is not among `SUPPORTED`, a rotation that no `Rope` computes, or weights that
            are no floats (quantised).
        RefusalError: a projection has an adapter, a forward hook or a replaced forward.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(
    ...     vocab_size=7, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4))
    >>> attention_of(model.layers[0].self_attn, model.config).position
    SpecModule(Rope(dim=8))
    """
    _check_kind("an attention layer", config)
    check_linear(layer, *(name for name, part in layer.named_children() if has_matrix(part)))
    return with_weights_of(layer, config)


def with_weights_of(layer: nn.Module, config: Any) -> MultiHeadAttention | LatentAttention:
    """What `attention_of` makes, whatever the forward hooks of the projections do: those of an observer only look."""
    with torch.enable_grad():  # where gradients are disabled, views of trained weights would not require them
        made = (_latent if config.model_type in LATENT else _multi_head)(cast(Any, layer), config)
    return made.train(layer.training)


def rope_of(config: Any) -> Rope:
    """The rotation that `config.rope_parameters` describes.

    Raises:
        ProblemError: an unknown type, or a rotation for each type of layers; or a model type that is not among
            `SUPPORTED`, as the config does not say which dimensions are a pair.

    >>> from transformers import LlamaConfig
    >>> rope_of(LlamaConfig(head_dim=64, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}))
    Rope(dim=64, base=500.0, scaling=Linear(factor=4.0))
    """
    _check_kind("the rotation", config)
    parameters: dict[str, Any] = dict(config.rope_parameters)
    if "rope_theta" not in parameters:
        raise ProblemError(
            f"rope_parameters of {config.model_type} are {list(parameters)}: expected one rotation for all layers."
        )
    latent = config.model_type in LATENT
    interleaved = latent and bool(getattr(config, "rope_interleave", True))
    dim = config.qk_rope_head_dim if latent else _head_dim(config)
    fraction = fraction_of(parameters) if config.model_type in PARTIAL else Rope.fraction
    rope = Rope(dim, float(parameters["rope_theta"]), scaling_of(parameters, config), fraction, interleaved)
    if isinstance(rope.scaling, Yarn) and rope.scaling.falls(rope.rotated, rope.base):
        raise ProblemError(
            f"{rope}: transformers' ramp falls there, from pairs that make beta_slow={rope.scaling.beta_slow} turns to "
            f"pairs that make beta_fast={rope.scaling.beta_fast}, and no Rope has its frequencies."
        )
    return rope


def _check_kind(what: str, config: Any) -> None:
    kind = getattr(config, "model_type", None)
    if kind not in SUPPORTED:
        raise ProblemError(f"{what} of a {kind} model: expected one of {', '.join(SUPPORTED)}.")


def fraction_of(parameters: dict[str, Any]) -> float:
    """The share of the dimensions that `rope_parameters` rotate; all, where the scaling chooses among the pairs."""
    is_proportional = parameters.get("rope_type") == "proportional"
    return (None if is_proportional else parameters.get("partial_rotary_factor")) or Rope.fraction


def scaling_of(parameters: dict[str, Any], config: Any) -> Scaling | None:
    """The scaling that `rope_parameters` describe; None for none.

    Raises:
        ProblemError: an unknown type.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(parameters["factor"])
    if kind == "proportional":
        return Proportional(parameters.get("partial_rotary_factor") or 1.0, parameters.get("factor") or 1.0)
    if kind == "dynamic":
        return DynamicNTK(parameters["factor"], config.max_position_embeddings)
    if kind == "llama3":
        original = parameters["original_max_position_embeddings"]
        return Llama3(parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"], original)
    if kind == "yarn":
        return _yarn(parameters, config)
    if kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        return LongRope(
            tuple(parameters["short_factor"]), tuple(parameters["long_factor"]), original,
            max(1.0, parameters.get("factor") or config.max_position_embeddings / original),
            parameters.get("attention_factor"),
        )  # fmt: skip
    known = "default, linear, proportional, dynamic, yarn, llama3 or longrope"
    raise ProblemError(f"rope_type {kind!r} is not known: expected {known}.")


def _yarn(parameters: dict[str, Any], config: Any) -> Yarn:
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or config.max_position_embeddings / original
    scale, mscale, all_dim = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None and not (mscale and all_dim):  # transformers ignores one of the two alone
        scale, mscale, all_dim = 0.1 * math.log(factor) + 1.0, None, None
    elif scale is not None:
        mscale = all_dim = None
    return Yarn(
        factor, original, parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0,
        scale, mscale, all_dim, parameters.get("truncate", True),
    )  # fmt: skip


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _multi_head(layer: Any, config: Any) -> MultiHeadAttention:
    q, k, v, o = projections_of(layer, config)
    normed = getattr(layer, "q_norm", None) is not None
    made = MultiHeadAttention(
        config.hidden_size, config.num_attention_heads, head_dim=_head_dim(config), qk_norm=normed,
        kv_heads=k[0].shape[0] // _head_dim(config),
        qkv_bias=_have_biases(q, k, v), out_bias=_have_biases(o), position=rope_of(config), mask=_mask(layer, config),
        scale=layer.scaling, dropout=config.attention_dropout, device=q[0].device, dtype=q[0].dtype,
    )  # fmt: skip
    for projection, (weight, bias) in zip(
        (made.q_proj, made.k_proj, made.v_proj, made.o_proj), (q, k, v, o), strict=True
    ):
        _fill(projection, weight, bias)
    if normed:
        _fill_norm(made.q_norm, layer.q_norm)
        _fill_norm(made.k_norm, layer.k_norm)
    return made


def _mask(layer: Any, config: Any) -> Mask | None:
    """Causal unless the config says otherwise, and the window of the layer if it has one."""
    window = getattr(config if config.model_type in WINDOWED else layer, "sliding_window", None)
    if not getattr(config, "is_causal", True):  # then a token sees those at a distance of the window, too
        return None if window is None else Window(window + 1, window + 1)
    return Causal() if window is None else Causal() & Window(window)


def _latent(layer: Any, config: Any) -> LatentAttention:
    down, (up, up_bias), out = (affine_of(part) for part in (layer.kv_a_proj_with_mqa, layer.kv_b_proj, layer.o_proj))
    if up_bias is not None:
        raise ProblemError("kv_b_proj has a bias, and latents have keys and values without one: set it to None first.")
    q_down = None if config.q_lora_rank is None else affine_of(layer.q_a_proj)
    q_up = affine_of(layer.q_proj if q_down is None else layer.q_b_proj)
    sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
    k_up, v_up = up.unflatten(0, (config.num_attention_heads, -1)).split(
        [config.qk_nope_head_dim, config.v_head_dim], 1
    )
    made = LatentAttention(
        config.hidden_size, config.num_attention_heads, kv_rank=config.kv_lora_rank, q_rank=config.q_lora_rank,
        nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim, v_dim=config.v_head_dim,
        position=rope_of(config), qkv_bias=_have_biases(down, q_down), q_bias=_have_biases(q_up),
        out_bias=_have_biases(out), mask=_mask(layer, config), scale=layer.scaling, dropout=config.attention_dropout,
        device=up.device, dtype=up.dtype,
    )  # fmt: skip
    if q_down is None:
        _fill(made.q_proj, *q_up)
    else:
        _fill(made.q_down, *q_down)
        _fill(made.q_up, *q_up)
        _fill_norm(made.q_norm, layer.q_a_layernorm)
    biases = (None, None) if down.bias is None else down.bias.split(sizes)
    for projection, weight, bias in zip((made.kv_down, made.k_rope), down.weight.split(sizes), biases, strict=True):
        _fill(projection, weight, bias)
    _fill_norm(made.kv_norm, layer.kv_a_layernorm)
    _fill(made.k_up, k_up.flatten(0, 1), None)
    _fill(made.v_up, v_up.flatten(0, 1), None)
    _fill(made.o_proj, *out)
    return made


def _have_biases(*projections: Affine | None) -> bool:
    """Whether some of them has a bias."""
    return any(projection is not None and projection.bias is not None for projection in projections)


def _fill(projection: nn.Linear | None, weight: Tensor, bias: Tensor | None) -> None:
    """Set weight and bias: where other projections have a bias and this one has none, 0 that is not trained."""
    assert projection is not None
    _copy(projection.weight, weight)
    if cast(object, projection.bias) is not None:
        _copy(projection.bias, weight.new_zeros(weight.shape[0]) if bias is None else bias)


def _fill_norm(norm: RMSNorm | None, source: Any) -> None:
    assert norm is not None
    _copy(norm.weight, source.weight)
    norm.eps = source.variance_epsilon


@torch.no_grad()
def _copy(parameter: Tensor, source: Tensor) -> None:
    """The values of the source, trained if it is."""
    parameter.copy_(source)
    parameter.requires_grad_(source.requires_grad)
