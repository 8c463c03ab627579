"""Memory of training: parameters and their states, and the activations that the backward pass needs.

Activations are the tensors that autograd stores: Korthikanti et al. 2022, arXiv:2205.05198, §4, generalised to any
heads, gated MLPs, experts and latents. For their model (MHA, an MLP 4 d wide, dropout, two bytes an element) the sum is
theirs: s b h (34 + 5 a s / h) bytes a layer. Tiled attention stores no square, which leaves 34 s b h.
"""

from dataclasses import dataclass

from regard.cost.model import Attention, Layer, Mlp, Model
from regard.cost.parameter_count import parameters
from regard.cost.storage import item_bytes, whole_count

STATES = 16
"""Bytes for each parameter in mixed precision with Adam: weight, gradient in 2 bytes; weight, mean, variance in 4.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, §3.1."""

STATES_FLOAT32 = 16
"""The same in float32: weight, gradient, mean and variance."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of training.

    Attributes:
        states: parameters, gradients and the optimiser's.
        activations: what autograd stores of all layers.
        recomputed: the same where each layer stores its input alone, and is computed again: one layer in full.
        naive: `activations`, where attention stores its weights.
    """

    states: int
    activations: int
    recomputed: int
    naive: int


def training_memory(
    model: Model, context: int, *, batch: int = 1, dtype: str = "bfloat16", dropout: bool = False
) -> TrainingMemory:
    """The memory of one training step on one machine.

    Raises:
        ProblemError: it is no `Model`, the type is not known, or a number is no whole one.

    >>> from regard.cost import find_model
    >>> m = training_memory(find_model("gpt3"), 2048)
    >>> round(m.activations / 2**30), round(m.recomputed / 2**30)
    (73, 6)
    """
    Model.check(model)
    context, batch = whole_count(context, "context", 1), whole_count(batch, "batch", 1)
    item, tokens, source = item_bytes(dtype), batch * context, batch * model.source_length(context)
    layers = [*((x, tokens) for x in model.layers), *((x, source) for x in model.encoder)]
    flat = [
        layer_bytes(x, model.d_model, item, dropout=dropout) * n + source_bytes(x, item) * source for x, n in layers
    ]
    squares = [
        _square(a, item, dropout=dropout) * n * (source if a.is_cross else n) // batch
        for x, n in layers
        for a in x.attentions
    ]
    ends = _ends(model, item) * tokens + (2 * model.d_model * item * source if model.encoder else 0)
    states = STATES if item < 4 else STATES_FLOAT32
    return TrainingMemory(
        states=parameters(model).total * states,
        activations=sum(flat) + ends,
        recomputed=sum(n for _, n in layers) * model.d_model * item + max(flat) + ends,
        naive=sum(flat) + sum(squares) + ends,
    )


def layer_bytes(layer: Layer, d_model: int, item: int, *, dropout: bool = False) -> int:
    """Bytes of one token that a layer stores, without squares of the length and without `source_bytes`.

    >>> from regard.cost import find_model
    >>> layer_bytes(find_model("gpt3").layers[0], 12288, 2, dropout=True) / 12288
    34.0
    """
    masks = d_model * (1 + len(layer.attentions)) if dropout else 0  # a byte for each output of attention and MLP
    elements = (layer.norms + _inputs(layer)) * d_model + sum(map(_attention, layer.attentions))
    elements += layer.recurrent.width if layer.recurrent else 0
    return (elements + (_mlp(layer.mlp) if layer.mlp else 0)) * item + masks


def source_bytes(layer: Layer, item: int) -> int:
    """Bytes of one token of the encoder that a layer of the decoder stores: its keys and values.

    >>> from regard.cost import find_model
    >>> source_bytes(find_model("whisper-large-v3").layers[0], 2) / 1280
    4.0
    """
    return 0 if layer.cross is None else _keys(layer.cross) * item


def _inputs(layer: Layer) -> int:
    """The outputs of norms that projections read, of width d_model: with a single norm all parts read the same."""
    parts = [bool(layer.attention or layer.recurrent), bool(layer.cross), bool(layer.mlp)]
    return 1 if layer.norms == 1 else sum(parts)


def _attention(a: Attention) -> int:
    """Elements of one token: q, k, v, those before their norms, and the input of the output's projection."""
    queries, out = a.heads * a.qk_dim, a.heads * a.v_dim
    gate = {"": 0, "element": 2 * out, "head": a.heads + out}[a.gate]  # the gate, and its product with the output
    if a.latent is None:
        outs = out if a.calls == 1 else (a.calls + 1) * out  # of several calls, those before and after they are one
        return gate + queries * (2 if a.norm else 1) + (0 if a.is_cross else _keys(a)) + outs
    latents = 2 * (a.latent.kv_rank + (a.latent.q_rank or 0))  # before and after their norms
    return gate + latents + 2 * queries + 2 * out


def _keys(a: Attention) -> int:
    """Elements of the key and the value of one token, and of the key before its norm."""
    return 0 if a.shares_cache else a.kv_heads * (a.qk_dim * (2 if a.norm else 1) + a.v_dim)


def _mlp(m: Mlp) -> int:
    """Elements of one token: the hidden layer before and after its activation, and a gate and product."""
    return (4 if m.gated else 2) * (m.active * m.width + m.shared)


def _square(a: Attention, item: int, *, dropout: bool) -> int:
    """Bytes of one pair that attention without tiles stores: its weights, and with dropout its mask and result."""
    return a.calls * a.heads * (2 * item + 1 if dropout else item)


def _ends(model: Model, item: int) -> int:
    """Bytes of one token outside the layers: the last norm and the output, whose softmax is in float32."""
    return model.d_model * item * 2 + model.vocab * (item + 4) * model.has_output
