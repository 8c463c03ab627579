"""The OV circuits of a model, for `copying`: where its values, outputs, norms and embeddings are."""

from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.measures.copying import Circuit, Vocabulary
from regard.integrate import modules
from regard.integrate.modules import with_weights_of
from regard.integrate.projections import projections_of
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projections import compute_tensors
from regard.nn.transformer import Decoder


class Names(NamedTuple):
    """Where a model of transformers has its layers and its last norm, and a layer its attention and the norm before."""

    layers: str = "layers"
    attention: str = "self_attn"
    norm: str = "input_layernorm"
    last: str = "norm"
    embedding_norm: str | None = None


NAMES = dict.fromkeys(modules.SUPPORTED, Names()) | {
    "bloom": Names("h", "self_attention", last="ln_f", embedding_norm="word_embeddings_layernorm"),
    "falcon": Names("h", "self_attention", last="ln_f"),
    "gpt2": Names("h", "attn", "ln_1", "ln_f"),
    "gpt_bigcode": Names("h", "attn", "ln_1", "ln_f"),
    "gpt_neox": Names("layers", "attention", last="final_layer_norm"),
    "opt": Names("decoder.layers", norm="self_attn_layer_norm", last="decoder.final_layer_norm"),
    "phi": Names(last="final_layernorm"),
    "stablelm": Names(),
}
"""The model types whose circuits can be extracted. Learned position embeddings are no part of a token's circuit."""


class Parts(NamedTuple):
    """The parts of circuits: each layer's attention and the norm before it, the last norm, the embedding tables."""

    layers: list[tuple[Any, Any]]
    last: Any
    embedding: Tensor
    unembedding: Tensor
    config: Any = None
    embedding_norm: Any = None


def circuits(model: nn.Module) -> tuple[list[Circuit], Vocabulary]:
    """The circuit of every layer, and the vocabulary.

    Args:
        model: a `Decoder` of regard, or a causal language model of transformers of a type among `NAMES`.

    Raises:
        ProblemError: another model, or weights that are quantised or not loaded.

    >>> found, vocabulary = circuits(Decoder(19, 32, layers=2, heads=4, kv_heads=2))
    >>> len(found), found[0].w_v.shape, found[0].w_o.shape, vocabulary.embedding.shape
    (2, torch.Size([2, 8, 32]), torch.Size([4, 8, 32]), torch.Size([19, 32]))
    """
    parts = parts_of(model)
    return [circuit_at(parts, layer) for layer in range(len(parts.layers))], vocabulary_of(parts)


def parts_of(model: nn.Module) -> Parts:
    """The modules and tables of the circuits of a model; nothing is copied.

    Raises:
        ProblemError: a model whose parts are not known, or whose weights are quantised or not loaded.
    """
    whole: Any = model
    if isinstance(model, Decoder):
        body = cast(Any, model.body)
        compute_tensors(body.embedding, model.unembedding)
        layers = [(block.attention, block.attention_norm) for block in body.blocks]
        return Parts(layers, body.norm, body.embedding.weight, model.unembedding.weight)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in NAMES or whole.get_output_embeddings() is None:
        raise ProblemError(
            f"{type(model).__name__} ({kind}): expected a Decoder of regard.nn or a causal language model of "
            f"{', '.join(NAMES)}. For others give a Circuit and a Vocabulary of your own."
        )
    try:
        found = _parts_by_name(whole, config, NAMES[kind])
    except AttributeError as error:  # OPT of 350m, whose norms come after: a config that moves parts
        raise ProblemError(f"{type(model).__name__} ({kind}) of this config differs: {error}.") from None
    if any(weight.device.type == "meta" for weight in model.parameters()):
        raise ProblemError(f"weights of {type(model).__name__} are not loaded (on the meta device): load all of them.")
    return found


def _parts_by_name(model: Any, config: Any, names: Names) -> Parts:
    body = model.base_model
    pairs = [
        (getattr(layer, names.attention), getattr(layer, "ln_attn", None) or getattr(layer, names.norm))
        for layer in attrgetter(names.layers)(body)
    ]
    if not getattr(config, "do_layer_norm_before", True) or (last := attrgetter(names.last)(body)) is None:
        raise AttributeError("its norms come after attention")
    for attention, _ in pairs if config.model_type not in modules.LATENT else ():
        projections_of(attention, config)
    of_tables = model.get_input_embeddings(), model.get_output_embeddings()
    compute_tensors(*of_tables)
    tables = of_tables[0].weight, of_tables[1].weight
    if tables[0].shape != tables[1].shape:
        raise AttributeError(f"embeddings {list(tables[0].shape)} and unembeddings {list(tables[1].shape)} differ")
    embedding_norm = None if names.embedding_norm is None else getattr(body, names.embedding_norm)
    return Parts(pairs, last, *tables, config, embedding_norm)


@torch.no_grad()
def circuit_at(parts: Parts, layer: int) -> Circuit:
    """The circuit of one layer: copies of its weights."""
    attention, norm = parts.layers[layer]
    circuit = _circuit(attention, parts.config)
    w_o = circuit.w_o - circuit.w_o.mean(-1, keepdim=True) if _centres(parts.last) else circuit.w_o
    device = parts.embedding.device
    return Circuit((circuit.w_v * _gain(norm)).to(device), (w_o * _gain(parts.last).to(w_o.device)).to(device))


@torch.no_grad()
def vocabulary_of(parts: Parts) -> Vocabulary:
    """The embeddings as the first layer's norm leaves them, without its weight, and the unembeddings."""
    e = parts.embedding.detach().float()
    if parts.embedding_norm is not None:
        e = _normalise(e, parts.embedding_norm) * _gain(parts.embedding_norm)
    return Vocabulary(_normalise(e, parts.layers[0][1]), parts.unembedding.detach().to(e.device))


def _normalise(e: Tensor, norm: Any) -> Tensor:
    e = e - e.mean(-1, keepdim=True) if _centres(norm) else e
    return e * (e.square().mean(-1, keepdim=True) + _eps(norm)).rsqrt()


def _circuit(attention: Any, config: Any) -> Circuit:
    if isinstance(attention, MultiHeadAttention | LatentAttention):
        return circuit_of(attention)
    if config.model_type in modules.LATENT:
        return circuit_of(with_weights_of(attention, config))
    found, heads = projections_of(attention, config), config.num_attention_heads
    w_o = found.o.weight.detach().unflatten(1, (heads, -1)).permute(1, 2, 0)
    return Circuit(found.v.weight.detach().unflatten(0, (-1, w_o.shape[1])), w_o)


def circuit_of(attention: MultiHeadAttention | LatentAttention) -> Circuit:
    """The circuit of a module, without any norm of the model (of latent attention with its own norm's weight).

    Raises:
        ProblemError: the attention has a gate, so that the output depends on x.

    >>> found = circuit_of(MultiHeadAttention(32, heads=4, kv_heads=2))
    >>> found.w_v.shape, found.w_o.shape
    (torch.Size([2, 8, 32]), torch.Size([4, 8, 32]))
    """
    is_latent = isinstance(attention, LatentAttention)
    compute_tensors(attention.o_proj, *((attention.kv_down, attention.v_up) if is_latent else (attention.v_proj,)))
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


def _centres(norm: Any) -> bool:
    """Whether a norm subtracts the mean: a layer norm, not an RMS norm."""
    return isinstance(norm, nn.LayerNorm) or "RMS" not in type(norm).__name__


def _gain(norm: Any) -> Tensor:
    """The factor of a norm; Gemma's and Nemotron's store it minus 1."""
    weight = norm.weight.detach()
    return weight + 1 if type(norm).__name__.startswith(("GemmaRMS", "NemotronLayerNorm1P")) else weight


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)
