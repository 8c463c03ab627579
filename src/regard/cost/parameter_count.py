"""Parameters of a model, by part.

| part | parameters |
|---|---|
| MHA, GQA, MQA | d h q + d g (q + v) + h v d; biases h q + g (q + v) and d |
| MLA | d (c + r) + c + c h (n + v) + h v d, and for queries d h (n + r), or d c' + c' + c' h (n + r) |
| recurrent layers | see `regard.cost.recurrent` |
| MLP | 2 d w, or 3 d w if gated, times the experts; a router of d for each expert |
| embeddings | vocab d, twice if the output has weights of its own; learned positions d each |

d = d_model, h = heads, g = kv_heads, q = qk_dim, v = v_dim, c = kv_rank, c' = q_rank, r = rope_dim, n = nope_dim.
"""

from dataclasses import dataclass
from typing import NamedTuple

from regard.cost.model import Attention, Layer, Mlp, Model


@dataclass(frozen=True)
class Parameters:
    """Parameters by part.

    Attributes:
        attention, recurrent, mlp, norms: of all layers.
        embeddings: of tokens, positions, and the output if it has weights of its own.
        other: what the shapes do not explain.
        active: parameters used for one token: its own experts only, and the output embedding only.
    """

    attention: int
    recurrent: int
    mlp: int
    norms: int
    embeddings: int
    other: int
    active: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.attention + self.recurrent + self.mlp + self.norms + self.embeddings + self.other


def parameters(model: Model) -> Parameters:
    """The parameters of a model.

    Raises:
        ProblemError: it is no `Model`.

    >>> from regard.cost import find_model
    >>> parameters(find_model("llama-2-7b")).total
    6738415616
    """
    Model.check(model)
    d, layers = model.d_model, [*model.counted_encoder.items(), *model.counted_layers.items()]
    attention = sum(n * attention_parameters(a, d) for layer, n in layers for a in layer.attentions)
    recurrent = sum(n * (r.weights + r.other) for layer, n in layers if (r := layer.recurrent))
    networks = [(layer.mlp, n) for layer, n in layers if layer.mlp]
    mlp = sum(n * mlp_parameters(each, d) for each, n in networks)
    norms = sum(n * _norms(layer, model) for layer, n in layers)
    norms += model.final_norm * d * model.norm_weights * (1 + bool(model.encoder))
    output = model.vocab * d * model.has_output
    embeddings = (model.vocab + model.positions) * d + (0 if model.tied else output)
    idle = mlp - sum(n * active_mlp_parameters(each, d) for each, n in networks)
    active = attention + recurrent + mlp - idle + norms + output
    return Parameters(attention, recurrent, mlp, norms, embeddings, model.other_parameters, active)


class Weights(NamedTuple):
    """Elements of the weight matrices of an attention, without biases and norms.

    Attributes:
        queries: of the projections to queries, and to a gate of the output.
        keys: of the projections to keys and values, or down to their latent.
        expand: from the latent up to the keys and values of all heads; 0 without a latent.
        out: of the projection of the output.
    """

    queries: int
    keys: int
    expand: int
    out: int


def attention_weights(a: Attention, d_model: int) -> Weights:
    """The weight matrices of an attention.

    >>> attention_weights(Attention(8, 2, 64, 64), 512)
    Weights(queries=262144, keys=131072, expand=0, out=262144)
    """
    heads, out, c = a.heads * a.qk_dim, a.heads * a.v_dim * d_model, a.latent
    gate = d_model * {"": 0, "element": a.heads * a.v_dim, "head": a.heads}[a.gate]
    if c is None:
        keys = 0 if a.shares_cache else d_model * a.kv_heads * (a.qk_dim + a.v_dim)
        return Weights(d_model * heads + gate, keys, 0, out)
    queries = d_model * heads if c.q_rank is None else c.q_rank * (d_model + heads)
    return Weights(queries + gate, d_model * c.cached, c.kv_rank * a.heads * (c.nope_dim + a.v_dim), out)


def attention_parameters(a: Attention, d_model: int) -> int:
    """Parameters of the projections of an attention, with their biases and norms."""
    matrices = sum(attention_weights(a, d_model)) + a.out_bias * d_model + a.sink * a.heads
    gate = a.heads * a.v_dim * (a.gate == "element")
    if a.latent is not None:
        c = a.latent
        return matrices + c.kv_rank + (c.q_rank or 0) + a.qkv_bias * (c.cached + (c.q_rank or 0) + gate)
    width = a.heads * a.qk_dim + gate + (0 if a.shares_cache else a.kv_heads * (a.qk_dim + a.v_dim))
    norms = {"": 0, "head": (2 - a.shares_cache) * a.qk_dim, "all": (a.heads + a.kv_heads) * a.qk_dim}[a.norm]
    return matrices + a.qkv_bias * width + norms


def mlp_parameters(m: Mlp, d_model: int) -> int:
    """Parameters of the feed-forward part of a layer: all experts, and the router."""
    return m.experts * _expert(m, d_model) + _always(m, d_model)


def active_mlp_parameters(m: Mlp, d_model: int) -> int:
    """The same, of the experts that one token takes."""
    return m.active * _expert(m, d_model) + _always(m, d_model)


def mlp_weights(m: Mlp, d_model: int) -> tuple[int, int]:
    """Elements of the weight matrices of (one expert, what every token takes: router, shared experts, their gate)."""
    router = m.experts * d_model if m.experts > 1 else 0
    return m.matrices * d_model * m.width, router + (m.matrices * m.shared + m.shared_gate) * d_model


def _expert(m: Mlp, d_model: int) -> int:
    has_bias = m.bias and (m.experts == 1 or m.expert_bias)
    return mlp_weights(m, d_model)[0] + has_bias * ((m.matrices - 1) * m.width + d_model)


def _always(m: Mlp, d_model: int) -> int:
    """The router and the experts that every token takes."""
    biases = m.bias * bool(m.shared) * ((m.matrices - 1) * m.shared + d_model)
    return mlp_weights(m, d_model)[1] + biases + m.experts * (m.experts > 1 and m.router_bias)


def _norms(layer: Layer, model: Model) -> int:
    return layer.norms * model.d_model * model.norm_weights
