"""Which attention each layer of a model has: the kinds that a config.json lists, or the rule of its family.

The letters are those of `regard.cost.fields.from_fields`: f full, s sliding window, c chunks, r recurrent, n neither.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regard.cost.config_fields import checked_value
from regard.cost.entries import INTERVALS, KINDS, check_length
from regard.errors import ProblemError

LETTERS = {
    "full_attention": "f", "attention": "f", "global": "f", "sliding_attention": "s", "local": "s",
    "chunked_attention": "c", "linear_attention": "r", "mamba": "r", "conv": "r", "mlp": "n", "moe": "n",
}  # fmt: skip
"""Kinds of layers of transformers; n for MLPs where they are layers of their own."""

MLP_LETTERS = {"mlp": "d", "moe": "e"}
"""Letters of `mlp_pattern` for such layers; n for all others."""

Entries = Mapping[str, Any]


def add_pattern(name: str, family: str, config: Entries, fields: dict[str, Any]) -> None:
    """Set the pattern of the layers, the window, and what depends on them.

    Raises:
        ProblemError: layers of a kind that is not counted, too many or too few, or without the window they need.
    """
    window = _window(name, family, config, fields)
    letters = _letters(name, family, config, fields, has_window=window is not None)
    if window is not None:
        fields["window"] = window
        if family == "minimax":  # transformers gives its window to the layers that it calls full
            letters = letters.replace("f", "s")
    elif "s" in letters:
        raise ProblemError(f"{name} has sliding layers and no sliding_window.")
    if "c" not in letters:
        fields.pop("chunk", None)
    fields["pattern"] = letters


def _window(name: str, family: str, config: Entries, fields: Mapping[str, Any]) -> int | None:
    window = fields.get("window") or config.get("sliding_window") or (config.get("local_attention") or 0) // 2
    if not window:
        return None
    window = checked_value(name, "window", "sliding_window", window)
    if config.get("use_sliding_window") is False or (family == "llama4_text" and not fields.get("chunk")):
        return None
    return window + 1 if family == "modernbert" else window  # the key at a distance of half the window is seen as well


def _letters(name: str, family: str, config: Entries, fields: dict[str, Any], *, has_window: bool) -> str:
    key = next((each for each in KINDS if config.get(each)), None)
    if key is not None:
        return _listed(name, family, key, config[key], fields)
    if "pattern" in fields and not any(config.get(each) for each in INTERVALS):
        return str(fields["pattern"])
    layers = fields.get("layers", 0)
    if family in ("llama4_text", "smollm3") and (rotated := config.get("no_rope_layers")):
        check_length(name, "no_rope_layers", rotated, layers)
    return _by_rule(family, config, layers, has_window=has_window)


def _listed(name: str, family: str, key: str, kinds: Sequence[str], fields: dict[str, Any]) -> str:
    """The letters of a list of kinds; where MLPs are layers of their own, the list says how many layers there are."""
    known = {kind for kind, letter in LETTERS.items() if letter != "r" or fields.get("recurrent")}
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise ProblemError(
            f"{name} has layers of {unknown!r}: expected {', '.join(sorted(known))}; others are not counted."
        )
    letters = "".join(LETTERS[kind] for kind in kinds)
    if family == "nemotron_h" or "n" in letters:  # each layer is a mixer or an MLP
        fields["layers"] = len(kinds)
        fields["mlp_pattern"] = "".join(MLP_LETTERS.get(kind, "n") for kind in kinds)
    elif "layers" in fields:
        check_length(name, key, kinds, fields["layers"])
    return letters


def _by_rule(family: str, config: Entries, layers: int, *, has_window: bool) -> str:
    """The letters of a family that lists no kinds, to be repeated as often as there are layers."""
    every = config.get("sliding_window_pattern")
    if isinstance(every, str):
        return every.replace("L", "s").replace("G", "f") if has_window else "f"
    if family in ("llama4_text", "smollm3"):
        return _by_rotation(family, config, has_window=has_window)
    if interval := config.get("full_attention_interval"):  # of qwen3_next: other layers are recurrent
        return "r" * (interval - 1) + "f"
    if family in HYBRID:
        is_full = HYBRID[family](config)
        return "".join("f" if is_full(index) else "r" for index in range(layers))
    if not has_window:
        return "f"
    if family in WINDOWED:
        return WINDOWED[family](config, layers)
    return "s" * (every - 1) + "f" if isinstance(every, int) else "s"


def _by_rotation(family: str, config: Entries, *, has_window: bool) -> str:
    """Layers with RoPE of llama4 have chunks; those without it of smollm3 have a window."""
    rotated = config.get("no_rope_layers") or [1] * (config.get("no_rope_layer_interval", 4) - 1) + [0]
    chunk = "c" if family == "llama4_text" and config.get("attention_chunk_size") else "f"
    plain = "s" if family == "smollm3" and has_window else "f"
    return "".join(chunk if each else plain for each in rotated)


def _bamba(config: Entries) -> Callable[[int], bool]:
    full = config.get("attn_layer_indices") or []
    return lambda index: index in full


def _jamba(config: Entries) -> Callable[[int], bool]:
    period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
    return lambda index: index % period == offset


def _lfm2(config: Entries) -> Callable[[int], bool]:
    full = config.get("full_attn_idxs")
    return lambda index: full is None or index in full


HYBRID: dict[str, Callable[[Entries], Callable[[int], bool]]] = {"bamba": _bamba, "jamba": _jamba, "lfm2": _lfm2}
"""The rule of each hybrid family: from its entries, whether a layer has attention; other layers are recurrent."""


def _every(default: int) -> Callable[[Entries, int], str]:
    """One layer of full attention after some with a window; the default is how many there are of both."""
    return lambda config, _layers: "s" * (config.get("sliding_window_pattern", default) - 1) + "f"


def _cohere2_moe(config: Entries, layers: int) -> str:
    letters = _every(4)(config, layers)
    dense = min(config.get("first_k_dense_replace") or 0, layers)  # these count on their own
    before = "s" * (config.get("prefix_dense_sliding_window_pattern", 1) - 1) + "f"
    return _repeated(before, dense) + _repeated(letters, layers - dense) if dense else letters


def _modernbert(config: Entries, _layers: int) -> str:
    return "f" + "s" * (config.get("global_attn_every_n_layers", 3) - 1)


def _later_layers(config: Entries, layers: int) -> str:
    first = min(config.get("max_window_layers", layers), layers)
    return "f" * first + "s" * (layers - first)


def _qwen2_moe(config: Entries, layers: int) -> str:
    """Windows before `max_window_layers`, in every second layer."""
    first = min(config.get("max_window_layers", layers), layers)
    return _repeated("sf", first) + "f" * (layers - first)


def _repeated(letters: str, layers: int) -> str:
    return (letters * layers)[: max(layers, 0)]


WINDOWED: dict[str, Callable[[Entries, int], str]] = {
    "cohere2": _every(4),
    "cohere2_moe": _cohere2_moe,
    "dots1": _later_layers,
    "gemma2": _every(2),
    "gemma3_text": _every(6),
    "gemma3n_text": _every(5),
    "gpt_oss": _every(2),
    "modernbert": _modernbert,
    "modernbert-decoder": _modernbert,
    "olmo3": _every(4),
    "qwen2": _later_layers,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _later_layers,
}
"""The rule of each family with windows: the letters from its entries and the number of layers."""
