"""The OV circuits of a model, for `copying`: where its values, outputs, norms and embeddings are."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.measures.copying import Circuit, Vocabulary
from regard.integrate.modules import SUPPORTED, attention_of
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.transformer import Decoder


def circuits(model: nn.Module) -> tuple[list[Circuit], Vocabulary]:
    """The circuit of every layer, and the vocabulary.

    Args:
        model: a `Decoder` of regard, or a causal language model of transformers of a type whose attention layers
            `regard.integrate.modules.attention_of` takes over.

    Raises:
        ProblemError: another model.

    >>> found, vocabulary = circuits(Decoder(19, 32, layers=2, heads=4, kv_heads=2))
    >>> len(found), found[0].w_v.shape, found[0].w_o.shape, vocabulary.embedding.shape
    (2, torch.Size([2, 8, 32]), torch.Size([4, 8, 32]), torch.Size([19, 32]))
    """
    with torch.no_grad():
        if isinstance(model, Decoder):
            body = cast(Any, model.body)
            layers = [(block.attention, block.attention_norm) for block in body.blocks]
            return _found(layers, body.norm, body.embedding.weight, model.unembedding.weight)
        config = getattr(model, "config", None)
        kind = getattr(config, "model_type", None)
        if kind not in SUPPORTED or cast(Any, model).get_output_embeddings() is None:
            raise ProblemError(
                f"{type(model).__name__} ({kind}): expected a Decoder of regard.nn or a causal language model of "
                f"{', '.join(SUPPORTED)}. For others give a Circuit and a Vocabulary of your own."
            )
        whole = cast(Any, model)
        body, tables = whole.base_model, (whole.get_input_embeddings().weight, whole.get_output_embeddings().weight)
        layers = [(attention_of(_attention(layer), config), layer.input_layernorm) for layer in body.layers]
        last = body.final_layer_norm if hasattr(body, "final_layer_norm") else body.norm
        return _found(layers, last, *tables)


def circuit_of(attention: MultiHeadAttention | LatentAttention) -> Circuit:
    """The circuit of a module, without any norm of the model (of latent attention with its own norm's weight).

    Raises:
        ProblemError: a gate, by which the output depends on x.

    >>> found = circuit_of(MultiHeadAttention(32, heads=4, kv_heads=2))
    >>> found.w_v.shape, found.w_o.shape
    (torch.Size([2, 8, 32]), torch.Size([4, 8, 32]))
    """
    w_o = attention.o_proj.weight.detach().unflatten(1, (attention.heads, -1)).permute(1, 2, 0)
    if isinstance(attention, LatentAttention):
        down = attention.kv_down.weight if attention.kv_norm is None else _scaled(attention.kv_down.weight, attention)
        return Circuit((attention.v_up.weight @ down).detach().unflatten(0, (attention.kv_heads, -1)), w_o)
    if attention.gate_proj is not None:
        raise ProblemError("the attention has a gate: what a head writes depends on more than the token it looks at.")
    return Circuit(attention.v_proj.weight.detach().unflatten(0, (attention.kv_heads, -1)), w_o)


def _scaled(down: Tensor, attention: LatentAttention) -> Tensor:
    assert attention.kv_norm is not None
    return down * attention.kv_norm.weight[:, None]


def _found(
    layers: list[tuple[Any, Any]], last: Any, embedding: Tensor, unembedding: Tensor
) -> tuple[list[Circuit], Vocabulary]:
    after, made = _gain(last), list[Circuit]()
    for attention, norm in layers:
        one = circuit_of(attention)
        w_o = one.w_o - one.w_o.mean(-1, keepdim=True) if _centres(last) else one.w_o
        made.append(Circuit(one.w_v * _gain(norm), w_o * after))
    first = layers[0][1]
    e = embedding.detach().float()
    e = e - e.mean(-1, keepdim=True) if _centres(first) else e
    e = e * (e.square().mean(-1, keepdim=True) + _eps(first)).rsqrt()
    return made, Vocabulary(e, unembedding.detach())


def _attention(layer: Any) -> Any:
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


def _centres(norm: Any) -> bool:
    """Whether a norm takes the mean off: a layer norm, and no RMS norm."""
    return isinstance(norm, nn.LayerNorm) or "RMS" not in type(norm).__name__


def _gain(norm: Any) -> Tensor:
    """What a norm multiplies by; Gemma's and Nemotron's store it less 1."""
    weight = norm.weight.detach()
    return weight + 1 if type(norm).__name__.startswith(("GemmaRMS", "NemotronLayerNorm1P")) else weight


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)
