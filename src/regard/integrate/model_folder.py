"""The folder of a model, looked at without torch or transformers: errors in a name come at once."""

import json
from pathlib import Path
from typing import Any, cast

from regard.errors import ProblemError
from regard.folders import expanded

SMOLLM2 = (30, 9)
"""Layers and query heads of SmolLM2-135M-Instruct, the default model."""


def check_name(name: str | None) -> None:
    """Raise `ProblemError` if the name is empty, or a path without a model; a name of the hub passes."""
    if name is None:
        return
    if not name.strip():
        raise ProblemError("the name of the model is empty: give a directory or a model id.")
    path = expanded(name)
    if path.exists():
        _check_folder(path)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ProblemError(f"there is no directory {name}.")


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ProblemError(
            f"{path} is a file: give the directory of a model, with its config.json, weights and tokenizer."
        )
    if not (path / "config.json").is_file():
        raise ProblemError(f"{path} is no model: it has no config.json (what save_pretrained writes).")


def sizes_of(name: str | None) -> tuple[int, int] | None:
    """(layers, query heads) of the default model, or from the config.json of a folder; None where neither says.

    Each attention call of a layer counts as one.
    """
    if name is None:
        return SMOLLM2
    try:
        config: Any = json.loads((expanded(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    entries = cast("dict[str, Any]", config)
    layers, heads = entries.get("num_hidden_layers"), entries.get("num_attention_heads")
    if entries.get("is_encoder_decoder") or type(layers) is not int or type(heads) is not int:
        return None
    return layers * calls_per_layer(entries.get("model_type")), heads


def calls_per_layer(model_type: Any) -> int:
    """The attention calls of each layer of a type of models, which a survey numbers one by one as layers.

    >>> calls_per_layer("llama"), calls_per_layer("diffllama")  # whose output is the difference of two calls
    (1, 2)
    """
    return 2 if model_type == "diffllama" else 1
