"""Memory of training: parameters and their states, and the activations that the backward pass needs.

Activations are the tensors that autograd stores: Korthikanti et al. 2022, arXiv:2205.05198, §4, generalised to any
heads, gated MLPs, experts and latents. For their model (MHA, an MLP 4 d wide, dropout, two bytes an element) the sum is
theirs: s b h (34 + 5 a s / h) bytes a layer. Tiled attention stores no square, which leaves 34 s b h.
"""

from dataclasses import dataclass

from regard.cost.model import Attention, Layer, Mlp, Model
from regard.cost.parameter_count import parameters
from regard.cost.storage import item_bytes

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

    >>> from regard.cost import find_model
    >>> m = training_memory(find_model("gpt3"), 2048)
    >>> round(m.activations / 2**30), round(m.recomputed / 2**30)
    (73, 6)
    """
    item, tokens, source = item_bytes(dtype), batch * context, model.source_length(context)
    layers = [*((x, context) for x in model.layers), *((x, source) for x in model.encoder)]
    flat = [layer_bytes(x, model.d_model, item, dropout=dropout) * batch * n for x, n in layers]
    squares = [
        _square(a, item, dropout=dropout) * batch * n * (source if a.is_cross else n)
        for x, n in layers
        for a in x.attentions
    ]
    ends = _ends(model, item) * tokens
    states = STATES if item < 4 else STATES_FLOAT32
    return TrainingMemory(
        states=parameters(model).total * states,
        activations=sum(flat) + ends,
        recomputed=sum(batch * n for _, n in layers) * model.d_model * item + max(flat) + ends,
        naive=sum(flat) + sum(squares) + ends,
    )


def layer_bytes(layer: Layer, d_model: int, item: int, *, dropout: bool = False) -> int:
    """Bytes of one token that a layer stores, without squares of the length.

    >>> from regard.cost import find_model
    >>> layer_bytes(find_model("gpt3").layers[0], 12288, 2, dropout=True) / 12288
    34.0
    """
    masks = d_model * (1 + len(layer.attentions)) if dropout else 0  # a byte for each output of attention and MLP
    norms = layer.norms * d_model
    attentions = sum(_attention(a, d_model) for a in layer.attentions)
    recurrent = d_model + layer.recurrent.width if layer.recurrent else 0
    return (norms + attentions + recurrent + (_mlp(layer.mlp, d_model) if layer.mlp else 0)) * item + masks


def _attention(a: Attention, d_model: int) -> int:
    """Elements of one token: the input of the projections, q, k, v, and the input of the output's projection."""
    queries, out = a.heads * a.qk_dim, a.heads * a.v_dim
    gate = {"": 0, "element": 2 * out, "head": a.heads + out}[a.gate]  # the gate, and its product with the output
    if a.latent is None:
        outs = out if a.calls == 1 else (a.calls + 1) * out  # of several calls, those before and after they are one
        return d_model + gate + queries + a.kv_heads * (a.qk_dim + a.v_dim) + outs
    latents = 2 * (a.latent.kv_rank + (a.latent.q_rank or 0))  # before and after their norms
    return d_model + latents + 2 * queries + 2 * out


def _mlp(m: Mlp, d_model: int) -> int:
    """Elements of one token: the input, the hidden layer before and after its activation, and a gate and product."""
    hidden = (4 if m.gated else 2) * (m.active * m.width + m.shared)
    return d_model + hidden


def _square(a: Attention, item: int, *, dropout: bool) -> int:
    """Bytes of one pair that attention without tiles stores: its weights, and with dropout its mask and result."""
    return a.calls * a.heads * (2 * item + 1 if dropout else item)


def _ends(model: Model, item: int) -> int:
    """Bytes of one token outside the layers: the last norm and the output, whose softmax is in float32."""
    return model.d_model * item * 2 + model.vocab * (item + 4) * model.has_output
