"""A model as its shapes: what a cost is computed from. Weights are not read, and nothing of torch is imported.

`find_model` reads models.toml, the shapes of published models, each with its source; `config.py` reads a config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from regard.cost.families import shared_fields
from regard.cost.near_names import unknown_name
from regard.cost.pairs import Pattern
from regard.cost.recurrent import Recurrent
from regard.errors import ProblemError

CAUSAL = Pattern()


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

    def __post_init__(self) -> None:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "qk_dim": self.qk_dim, "v_dim": self.v_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ProblemError(f"{name} is {size}: expected 1 or more.")
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
        if self.d_model < 1 or self.vocab < 1 or not self.layers:
            raise ProblemError(
                f"{self.name}: d_model {self.d_model}, vocab {self.vocab} and {len(self.layers)} layers: expected 1 or "
                "more of each."
            )

    @property
    def is_causal(self) -> bool:
        """Whether it generates tokens."""
        return any(layer.recurrent or (layer.attention and layer.attention.pattern.causal) for layer in self.layers)

    @property
    def attention(self) -> Attention | None:
        """The attention of the first layer that has one."""
        return next((layer.attention for layer in self.layers if layer.attention), None)

    def source_length(self, context: int) -> int:
        """Tokens that the encoder reads beside this context."""
        return context if self.source_tokens is None else self.source_tokens

    def with_attention(self, **changes: Any) -> "Model":
        """The same model with other attention in every layer that stores keys and values of its own context."""
        layers = (replace(x, attention=replace(x.attention, **changes)) if x.attention else x for x in self.layers)
        return replace(self, layers=tuple(layers))


# ---- from fields ----------------------------------------------------------------------------------------------------

FIELDS = {
    "d_model", "layers", "heads", "vocab", "kv_heads", "head_dim", "v_dim", "mlp", "context", "pattern", "window",
    "chunk", "causal", "encoder_layers", "kv_rank", "q_rank", "rope_dim", "nope_dim", "experts", "active", "expert_mlp",
    "shared_mlp", "dense_layers", "dense_mlp", "moe_every", "shared_cache_layers", "full_kv_heads", "full_head_dim",
    "gated", "mlp_bias", "qkv_bias", "out_bias", "norms", "norm_weights", "final_norm", "qk_norm", "sink", "tied",
    "has_output", "positions", "router_bias", "gate", "mlp_pattern", "recurrent", "encoder_heads", "encoder_mlp",
    "source_tokens", "expert_bias", "shared_gate", "other_parameters", "published_parameters", "notes",
}  # fmt: skip
"""Fields of a row of models.toml, beside `family` and `source`; `from_fields` says what they are."""


def from_fields(name: str, source: str, fields: Mapping[str, Any]) -> Model:
    """A model from the fields of its row in models.toml, with those of its family.

    `pattern` is one letter per layer, repeated as often as there are layers: f full, s sliding window, c chunks, r
    recurrent, p full and recurrent in parallel, n neither; `mlp_pattern` the same of the feed-forward parts: d dense, e
    experts, n none.

    Raises:
        ProblemError: a field is not known or missing, or sizes contradict each other.
    """
    if unknown := sorted(fields.keys() - FIELDS):
        raise unknown_name("field", unknown[0], sorted(FIELDS))
    needed = ["d_model", "layers", "heads", "vocab", "mlp"]
    if set(str(fields.get("pattern", "f"))) <= {"r", "n"}:
        needed.remove("heads")
    if missing := [field for field in needed if field not in fields]:
        raise ProblemError(f"{name} has no {', '.join(missing)}.")
    try:
        return _model(name, source, fields)
    except ProblemError as error:
        raise ProblemError(f"{name}: {error}") from None


def _model(name: str, source: str, f: Mapping[str, Any]) -> Model:
    count, encoders, norms = f["layers"], f.get("encoder_layers", 0), f.get("norms", 2)
    layers = tuple(
        Layer(
            attention=_attention(f, index),
            mlp=_mlp(f, index),
            cross=_cross(f) if encoders else None,
            norms=norms + bool(encoders),
            recurrent=f["recurrent"] if _letter(f, index) in RECURRENT else None,
        )
        for index in range(count)
    )
    kept = (
        "context", "tied", "has_output", "norm_weights", "final_norm", "positions", "source_tokens", "other_parameters"
    )  # fmt: skip
    return Model(
        name=name,
        source=source,
        d_model=f["d_model"],
        vocab=f["vocab"],
        layers=layers,
        encoder=(_encoder_layer(f, norms),) * encoders if encoders else (),
        published_parameters=f.get("published_parameters"),
        notes=tuple(f.get("notes", ())),
        **{key: f[key] for key in kept if key in f},
    )


def _encoder_layer(f: Mapping[str, Any], norms: int) -> Layer:
    own = {"causal": False, "pattern": "f", "mlp_pattern": "d"}
    sizes = {field: f.get(f"encoder_{field}", f[field]) for field in ("heads", "mlp")}
    return Layer(_attention({**f, **own, **sizes}, 0), _mlp({**f, **own, **sizes}, 0), norms=norms)


RECURRENT = "rp"
"""Letters of layers with a recurrent part: r alone, p parallel to attention."""


def _letter(f: Mapping[str, Any], index: int) -> str:
    letters: str = f.get("pattern", "s" if f.get("window") else "f")
    letter = letters[index % len(letters)]
    needs = {"s": "window", "c": "chunk", "r": "recurrent", "p": "recurrent"}
    if letter not in "fscrpn" or (letter in needs and not f.get(needs[letter])):
        raise ProblemError(
            f"layer {index} is {letter!r}: expected f (full), s (with window), c (with chunk), r (recurrent), p (full "
            "and recurrent in parallel) or n (neither)."
        )
    return letter


def _attention(f: Mapping[str, Any], index: int) -> Attention | None:
    letter, causal = _letter(f, index), f.get("causal", True)
    if letter in "rn":
        return None
    latent, full = None, letter in "fp"
    if "kv_rank" in f:
        latent = Latent(f["kv_rank"], f["rope_dim"], f["nope_dim"], f.get("q_rank"))
        dim = latent.nope_dim + latent.rope_dim
    else:
        dim = (full and f.get("full_head_dim")) or f.get("head_dim") or _head_dim(f)
    return Attention(
        heads=f["heads"],
        kv_heads=(full and f.get("full_kv_heads")) or f.get("kv_heads", f["heads"]),
        qk_dim=dim,
        v_dim=f.get("v_dim", dim),
        pattern=Pattern(
            causal=causal, window=f["window"] if letter == "s" else None, chunk=f["chunk"] if letter == "c" else None
        ),
        latent=latent,
        qkv_bias=f.get("qkv_bias", False),
        out_bias=f.get("out_bias", False),
        norm=f.get("qk_norm", ""),
        sink=f.get("sink", False),
        shares_cache=index >= f["layers"] - f.get("shared_cache_layers", 0),
        gate=f.get("gate", ""),
    )


def _cross(f: Mapping[str, Any]) -> Attention | None:
    own = _attention({**f, "pattern": "f", "causal": False}, 0)
    return None if own is None else replace(own, is_cross=True)


def _head_dim(f: Mapping[str, Any]) -> int:
    if f["d_model"] % f["heads"]:
        raise ProblemError(f"d_model {f['d_model']} is no whole multiple of {f['heads']} heads: give head_dim.")
    return f["d_model"] // f["heads"]


def _mlp(f: Mapping[str, Any], index: int) -> Mlp | None:
    gated, bias = f.get("gated", False), f.get("mlp_bias", False)
    if "mlp_pattern" in f:  # d dense, e experts, n none
        letter = f["mlp_pattern"][index % len(f["mlp_pattern"])]
        if letter == "n":
            return None
        has_experts = letter == "e"
    else:
        has_experts = "experts" in f and index >= f.get("dense_layers", 0) and not (index + 1) % f.get("moe_every", 1)
    if not has_experts:
        return Mlp(f.get("dense_mlp", f["mlp"]), gated=gated, bias=bias)
    return Mlp(
        f.get("expert_mlp", f["mlp"]),
        gated=gated,
        experts=f["experts"],
        active=f["active"],
        shared=f.get("shared_mlp", 0),
        bias=bias,
        expert_bias=f.get("expert_bias", False),
        router_bias=f.get("router_bias", False),
        shared_gate=f.get("shared_gate", False),
    )


# ---- published models -----------------------------------------------------------------------------------------------


@cache
def _tables() -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 - `import regard` needs no table

    return tomllib.loads((Path(__file__).parent / "models.toml").read_text())


def model_names() -> list[str]:
    """The published models, in the order of models.toml."""
    return list(_tables()["models"])


def find_model(name: str) -> Model:
    """A published model by its name, in any case; `_`, `.` and spaces count as `-`.

    Raises:
        ProblemError: there is no such model; near names are listed.

    >>> model = find_model("Llama-2-70B")
    >>> len(model.layers), model.layers[0].attention.kind
    (80, 'GQA-8')
    """
    models = {_plain(each): each for each in model_names()}
    models |= {
        _plain(alias): each for each in models.values() for alias in _tables()["models"][each].get("aliases", ())
    }
    found = models.get(_plain(name)) or models.get(_plain(name.rpartition("/")[2]))
    if found is None:
        raise unknown_name("model", name, model_names(), "or give a folder with a config.json")
    row: dict[str, Any] = dict(_tables()["models"][found])
    family, source = row.pop("family", None), row.pop("source")
    row.pop("aliases", None)
    if "config" in row:
        from regard.cost.config import from_config  # noqa: PLC0415 - it makes a Model

        read = from_config(found, {"model_type": family, **row["config"]}, source)
        return replace(read, published_parameters=row["published_parameters"])
    return from_fields(found, source, {**(shared_fields(family) if family else {}), **row})


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-").replace(".", "-")
