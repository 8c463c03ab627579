"""A model from its fields: of a row of models.toml and its family, or of a config.json."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from regard.cost.model import Attention, Latent, Layer, Mlp, Model
from regard.cost.near_names import unknown_name
from regard.cost.pairs import Pattern
from regard.errors import ProblemError

FIELDS = {
    "d_model", "layers", "heads", "vocab", "kv_heads", "head_dim", "v_dim", "mlp", "context", "pattern", "window",
    "chunk", "causal", "encoder_layers", "kv_rank", "q_rank", "rope_dim", "nope_dim", "experts", "active", "expert_mlp",
    "shared_mlp", "dense_layers", "dense_mlp", "moe_every", "shared_cache_layers", "full_kv_heads", "full_head_dim",
    "gated", "mlp_bias", "qkv_bias", "out_bias", "norms", "norm_weights", "final_norm", "qk_norm", "sink", "tied",
    "has_output", "positions", "router_bias", "gate", "mlp_pattern", "recurrent", "encoder_heads", "encoder_mlp",
    "source_tokens", "expert_bias", "shared_gate", "other_parameters", "published_parameters", "notes", "calls",
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
    if missing := missing_fields(fields):
        raise ProblemError(f"{name} has no {', '.join(missing)}.")
    try:
        return _model(name, source, fields)
    except ProblemError as error:
        text = str(error)
        raise ProblemError(text if text.startswith(f"{name}: ") else f"{name}: {text}") from None


def missing_fields(fields: Mapping[str, Any]) -> list[str]:
    """The fields that every model needs, and that are not there.

    >>> missing_fields({"d_model": 64, "layers": 2, "pattern": "r", "vocab": 100})
    ['mlp']
    """
    needed = ["d_model", "layers", "heads", "vocab", "mlp", *(("rope_dim", "nope_dim") if "kv_rank" in fields else ())]
    if set(str(fields.get("pattern", "f"))) <= {"r", "n"}:
        needed.remove("heads")
    return [field for field in needed if field not in fields]


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
        calls=f.get("calls", 1),
    )


def _cross(f: Mapping[str, Any]) -> Attention | None:
    own = _attention({**f, "pattern": "f", "causal": False}, 0)
    return None if own is None else replace(own, is_cross=True)


def _head_dim(f: Mapping[str, Any]) -> int:
    if f["heads"] < 1:
        raise ProblemError(f"heads is {f['heads']}: expected 1 or more.")
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
        if has_experts and "experts" not in f:
            raise ProblemError(f"layer {index} has experts: expected a number of experts of 2 or more.")
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
