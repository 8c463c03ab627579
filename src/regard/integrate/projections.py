"""The projections of an attention layer of transformers: where queries, keys, values and output have their weights.

    separate      q_proj, k_proj, v_proj                                        Llama, Mistral, OPT, Phi ...
    contiguous    one matrix: all queries, all keys, all values                 GPT-2 (a `Conv1D`, transposed), Phi-3
    grouped       one matrix: of each key head its queries, its key, its value  GPT-NeoX, BLOOM, Falcon, GPT-BigCode

Multi-query attention is one group; where every head has a key of its own a group is one query, one key, one value.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import ProblemError
from regard.nn.projections import compute_tensors, with_forward_of_its_own
from regard.plan.checks import has_own_operators

CONTIGUOUS = {"gpt2": "c_attn", "phi3": "qkv_proj"}
GROUPED = {
    "bloom": "query_key_value",
    "falcon": "query_key_value",
    "gpt_bigcode": "c_attn",
    "gpt_neox": "query_key_value",
}
"""Model types whose queries, keys and values come from one matrix, and its name."""

OUTPUTS = ("o_proj", "out_proj", "o", "dense", "c_proj", "out_lin", "Wo")
"""What layers call the projection of the output."""

PLAIN = ("Conv1D", "FalconLinear")
"""Classes of transformers whose forward is that of `nn.Linear`, written out."""


class Affine(NamedTuple):
    """A weight [outputs, inputs], and a bias or None: of an `nn.Linear`, or of a `Conv1D`, transposed."""

    weight: Tensor
    bias: Tensor | None


class Projections(NamedTuple):
    """The projections of a layer: heads are contiguous, in the rows of q, k and v and in the columns of o."""

    q: Affine
    k: Affine
    v: Affine
    o: Affine


def projections_of(layer: nn.Module, config: Any) -> Projections:
    """The projections of an attention layer; views of its weights where possible.

    Args:
        layer: such as `model.model.layers[0].self_attn`, or `model.transformer.h[0].attn`.
        config: of the model, `model.config`.

    Raises:
        ProblemError: projections of other names, with adapters, or with weights that are no floats (quantised).

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=7, n_positions=8, n_embd=12, n_layer=1, n_head=2))
    >>> projections_of(model.h[0].attn, model.config).v.weight.shape
    torch.Size([12, 12])
    """
    o, kind = output_projection(layer), config.model_type
    if o is None:
        raise ProblemError(f"{type(layer).__name__} has no projection of its output by a name of {', '.join(OUTPUTS)}.")
    if (name := CONTIGUOUS.get(kind) or GROUPED.get(kind)) is None:
        missing = [name for name in ("q_proj", "k_proj", "v_proj") if not hasattr(layer, name)]
        if missing:
            raise ProblemError(f"{type(layer).__name__} ({kind}) has no {' and no '.join(missing)}.")
        q, k, v = (affine_of(getattr(layer, f"{letter}_proj")) for letter in "qkv")
        return Projections(q, k, v, o)
    fused, split = affine_of(getattr(layer, name)), _contiguous if kind in CONTIGUOUS else _split_by_group
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    weights = split(fused.weight, heads, kv_heads)
    biases = (None, None, None) if fused.bias is None else split(fused.bias, heads, kv_heads)
    q, k, v = (Affine(weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return Projections(q, k, v, o)


def output_projection(layer: nn.Module, width: int | None = None) -> Affine | None:
    """The projection of a layer's output, by the first of `OUTPUTS` that it has; None where it has none.

    Args:
        width: the inputs that it must have, heads x v_dim; None takes any.

    Raises:
        ProblemError: it has an adapter, or its weights are no floats (quantised).
    """
    for name in OUTPUTS:
        found = getattr(layer, name, None)
        if isinstance(found, nn.Linear) or _is_transposed(found):
            made = affine_of(found)
            if width in (None, made.weight.shape[1]):
                return made
    return None


def affine_of(projection: Any) -> Affine:
    """The weight and bias of an `nn.Linear` or a `Conv1D`.

    Raises:
        ProblemError: it is neither, or computes more than them (an adapter), or its weights are no floats (quantised).
    """
    if not has_matrix(projection):
        raise ProblemError(
            f"a projection is {type(projection).__name__}, whose weight is no matrix of floats: load the model without "
            "quantisation."
        )
    if type(projection).__name__ not in PLAIN and (reason := with_forward_of_its_own(projection)) is not None:
        raise ProblemError(f"a projection {reason}")
    compute_tensors(projection)
    weight = projection.weight
    return Affine(weight.mT if _is_transposed(projection) else weight, projection.bias)


def has_matrix(part: nn.Module) -> bool:
    """Whether the weight of a part of a layer is a matrix of floats: not of a norm, and not quantised.

    The quantised weights of torchao say that they are of floats, and compute little more than the product with them.
    """
    weight = getattr(part, "weight", None)
    if not (isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()):
        return False
    return type(weight).__name__ == "DTensor" or not has_own_operators(weight)  # only who has DTensors needs the module


def _is_transposed(projection: Any) -> bool:
    """Whether it is transformers' `Conv1D`, whose weight is [inputs, outputs]."""
    return type(projection).__name__ == "Conv1D"


def _kv_heads(config: Any) -> int:
    """Key heads of a model whose projections are one matrix; not all types read what their config says of them."""
    if config.model_type == "phi3":
        return config.num_key_value_heads
    if config.model_type == "falcon" and config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if getattr(config, "multi_query", False) else config.num_attention_heads


def _contiguous(fused: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """[all queries, all keys, all values] along the first dimension."""
    size = fused.shape[0] // (heads + 2 * kv_heads)
    return fused.split([heads * size, kv_heads * size, kv_heads * size])


def _split_by_group(fused: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """[queries of a group, its key, its value] for each key head, along the first dimension."""
    group = heads // kv_heads
    parts = fused.unflatten(0, (kv_heads, group + 2, -1)).split([group, 1, 1], dim=1)
    return tuple(part.flatten(0, 2) for part in parts)
