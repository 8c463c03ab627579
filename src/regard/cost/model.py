"""A model as its shapes: what a cost is computed from. Weights are not read, and nothing of torch is imported.

`published.py` finds the models of models.toml, `config.py` reads a config.json; `fields.py` makes the shapes for both.
"""

import reprlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from regard.cost.pairs import Pattern
from regard.cost.recurrent import Recurrent
from regard.errors import ProblemError
from regard.integers import is_integer

CAUSAL = Pattern()


def _check_counts(owner: object, *names: str, least: int = 1) -> None:
    """Raise `ProblemError` unless each of these fields is a whole number of at least `least`."""
    for name in names:
        if not is_integer(value := getattr(owner, name), least):
            raise ProblemError(f"{type(owner).__name__}({name}={value!r}): expected a whole number, {least} or more.")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434, §2.1.

    Attributes:
        kv_rank: elements of the latent of a token, shared by all heads.
        rope_dim: elements of the rotated key of a token, shared by all heads.
        nope_dim: elements of a head's query and key without position.
        q_rank: elements of the latent of a query; None: queries are projections of the input.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "kv_rank")
        _check_counts(self, "rope_dim", "nope_dim", least=0)

    @property
    def cached(self) -> int:
        """Elements that a cache stores for a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Attention:
    """The attention of a layer.

    Attributes:
        heads, kv_heads: query heads, and key and value heads (MHA, GQA and MQA are their ratio).
        qk_dim, v_dim: elements of a head's query and key, and of its value.
        pattern: which keys a query may see.
        latent: of multi-head latent attention; None: keys and values are stored per head.
        qkv_bias, out_bias: whether the projections have biases.
        norm: normalisation of queries and keys: "" for none, "head" for one weight vector per projection that all heads
            share, "all" for a weight per element of all heads.
        sink: whether each head has a learned logit.
        shares_cache: whether keys and values are those of an earlier layer: no projection, nothing to store.
        is_cross: whether keys and values come from an encoder.
        calls: how often a layer attends with its queries and keys, each time to other values; 2 in differential
            attention.
        gate: whether the output is multiplied by a gate, a projection of the input: "" for none, "element" for one gate
            for each element, "head" for one for each head.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    pattern: Pattern = CAUSAL
    latent: Latent | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    norm: str = ""
    sink: bool = False
    shares_cache: bool = False
    is_cross: bool = False
    gate: str = ""
    calls: int = 1

    def __post_init__(self) -> None:
        _check_counts(self, "heads", "kv_heads", "qk_dim", "v_dim", "calls")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} query heads and {self.kv_heads} key heads: query heads must be a whole multiple of key "
                "heads (grouped-query attention shares key heads in groups of one size)."
            )

    @property
    def kind(self) -> str:
        """MHA, GQA-8, MQA or MLA."""
        if self.latent is not None:
            return "MLA"
        return "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else f"GQA-{self.kv_heads}"

    @property
    def cached(self) -> int:
        """Elements that a cache stores for a token of the context."""
        if self.shares_cache:
            return 0
        return self.latent.cached if self.latent else self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a layer: one network, or experts of which a token takes a few.

    Attributes:
        width: of the hidden layer; of one expert, where there are experts.
        gated: whether the hidden layer is a product of two projections (SwiGLU, GeGLU).
        experts, active: number of experts, and of experts per token; 1 and 1 without experts.
        shared: width of the experts that every token takes; 0 for none.
        bias: whether the projections have biases; expert_bias: whether those of the experts have some too.
        router_bias, shared_gate: whether the router has a bias, and the shared expert a gate of its own.
    """

    width: int
    gated: bool = False
    experts: int = 1
    active: int = 1
    shared: int = 0
    bias: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, "width", "experts", "active")
        _check_counts(self, "shared", least=0)
        if not 1 <= self.active <= self.experts:
            raise ProblemError(f"{self.active} of {self.experts} experts for a token: expected 1 to {self.experts}.")

    @property
    def matrices(self) -> int:
        """Weight matrices of one network."""
        return 3 if self.gated else 2


@dataclass(frozen=True)
class Layer:
    """A layer: its parts, None where it has none, and its norms.

    Attributes:
        attention, cross: attention to its own tokens, and to those of an encoder.
        mlp: its feed-forward part.
        recurrent: a part with a state of fixed size.
        norms: normalisations of width d_model.
    """

    attention: Attention | None
    mlp: Mlp | None
    cross: Attention | None = None
    norms: int = 2
    recurrent: Recurrent | None = None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attention, and that to an encoder."""
        return tuple(each for each in (self.attention, self.cross) if each is not None)


@dataclass(frozen=True)
class Model:
    """The shapes of a model.

    Attributes:
        name, source: what it is called, and where its shapes are published.
        d_model, vocab: width, and tokens of the vocabulary.
        context: the longest context it was made for, in tokens; None where nothing limits it.
        layers: of the decoder, or of an encoder alone.
        encoder: layers of the encoder before a decoder.
        tied: whether the output weights are the embeddings.
        norm_weights: weight vectors of a normalisation: 1 (RMS), 2 (with a bias), 0 (none).
        positions: learned positions.
        source_tokens: tokens that the encoder reads; None: as many as the context has.
        other_parameters: parameters that these shapes do not explain, such as those of a pooler.
        published_parameters: of the source; None where it gives none.
        notes: what a reader of its costs must know.
    """

    name: str
    source: str
    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    context: int | None = None
    encoder: tuple[Layer, ...] = ()
    tied: bool = False
    has_output: bool = True
    norm_weights: int = 1
    final_norm: bool = True
    positions: int = 0
    source_tokens: int | None = None
    other_parameters: int = 0
    published_parameters: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "encoder"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(each, Layer) for each in cast(Any, value)):
                raise ProblemError(f"{self.name}: {name} is {reprlib.repr(value)}: expected a tuple of Layer.")
            object.__setattr__(self, name, tuple(cast(Any, value)))
        _check_counts(self, "d_model", "vocab", least=0)
        if self.d_model < 1 or self.vocab < 1 or not self.layers:
            raise ProblemError(
                f"{self.name}: d_model {self.d_model}, vocab {self.vocab} and {len(self.layers)} layers: expected 1 or "
                "more of each."
            )

    @cached_property
    def counted_layers(self) -> Counter[Layer]:
        """How many layers there are of each kind."""
        return Counter(self.layers)

    @cached_property
    def counted_encoder(self) -> Counter[Layer]:
        """How many layers of the encoder there are of each kind."""
        return Counter(self.encoder)

    @property
    def is_causal(self) -> bool:
        """Whether it generates tokens."""
        return any(layer.recurrent or (layer.attention and layer.attention.pattern.causal) for layer in self.layers)

    @cached_property
    def has_local_and_full(self) -> bool:
        """Whether some layers of a decoder have a window, or chunks, and others have none."""
        own = (layer.attention for layer in self.counted_layers if layer.attention)
        return len({a.pattern.is_local for a in own if a.pattern.causal}) == 2

    @property
    def attention(self) -> Attention | None:
        """The attention of the first layer that has one."""
        return next((layer.attention for layer in self.layers if layer.attention), None)

    @staticmethod
    def check(model: object) -> None:
        """Raise `ProblemError` for what is no model, such as a name."""
        if not isinstance(model, Model):
            raise ProblemError(
                f"model is {reprlib.repr(model)}: expected a regard.cost.Model; load_model(name) finds a published "
                "one, or one of a folder with a config.json."
            )

    def source_length(self, context: int) -> int:
        """Tokens that the encoder reads beside this context."""
        return context if self.source_tokens is None else self.source_tokens

    def with_attention(self, **changes: Any) -> "Model":
        """The same model with other attention in every layer that stores keys and values of its own context."""
        layers = (replace(x, attention=replace(x.attention, **changes)) if x.attention else x for x in self.layers)
        return replace(self, layers=tuple(layers))
