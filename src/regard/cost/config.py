"""The shapes of a model from its config.json, as transformers writes it.

What models of a family share (biases, norms, gated MLPs) is not in a config.json: it comes from families.toml, by
`model_type`. A family that is not there is read as Llama's, a causal decoder, with a note; layers that
are no softmax attention raise an error.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from regard.cost.config_fields import NAMES, checked_value
from regard.cost.entries import SHARED_EXPERTS, checked_entries
from regard.cost.families import Family, default_entries, entry, find_family, is_sum, value_of
from regard.cost.family_rules import add_family, add_key_heads
from regard.cost.fields import from_fields, missing_fields
from regard.cost.layer_patterns import add_pattern
from regard.cost.mixtures import add_experts, check_experts
from regard.cost.model import Model
from regard.cost.recurrent import Recurrent, recurrent_layer
from regard.errors import ProblemError

TEXT_CONFIGS = ("text_config", "llm_config")
"""Entries with the text model of a model for images or sounds."""

OUTER = ("tie_word_embeddings", "quantization_config")
"""Entries of such a model that hold for its text model, whatever its own entries are."""

OF_PROMPTS = ("use_bidirectional_attention",)
"""Entries of such a text model that hold for its prompt alone: PaliGemma generates text."""


def read_config(path: Path) -> Model:
    """The model that a config.json describes."""
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ProblemError(f"{path} is no config.json: its lists or objects are nested too deep.") from None
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ProblemError(f"{path} is no JSON: {error}.") from None
    if not isinstance(content, dict):
        raise ProblemError(f"{path} has no settings: expected a JSON object, as save_pretrained writes it.")
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return from_config(name, cast("dict[str, Any]", content), source=str(path))


def from_config(name: str, config: Mapping[str, Any], source: str = "its config.json") -> Model:
    """The model that the entries of a config.json describe.

    >>> entries = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...            "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100}
    >>> from_config("tiny", entries).layers[1].attention.kind
    'GQA-2'
    """
    notes: list[str] = []
    config = _text_model(config, notes)
    family = _family(name, str(config.get("model_type", "")), notes)
    is_known = config.get("model_type") == family.name
    config = checked_entries(name, family.name if is_known else None, config)
    if missing := [each for each in family.needs if not config.get(each)]:
        raise ProblemError(f"{name} has no {', '.join(missing)}: expected what {family.name} has there.")
    if is_known:
        config = _with_defaults(config, family.name, notes)
    _check_encoder(name, family, config)
    if config.get("quantization_config"):
        notes.append("The checkpoint is quantised; its weights count in the type of the option.")
    fields = _fields(name, family, config)
    add_pattern(name, family.name, config, fields)
    check_experts(name, family, fields)
    add_experts(name, family.name, config, fields)
    if not is_known:
        add_key_heads(name, config, fields)
    add_family(name, family.name, config, fields)
    _check_complete(name, family, config, fields)
    return from_fields(name, source, {**_computed(config, fields), "notes": [*fields.get("notes", ()), *notes]})


def _text_model(config: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """The entries of the text model, of a model for images or sounds."""
    nested = next((each for each in TEXT_CONFIGS if isinstance(config.get(each), dict)), None)
    if nested is None:
        return config
    notes.append("The text model alone.")
    text = {key: value for key, value in config[nested].items() if key not in OF_PROMPTS}
    return {**text, **{each: config[each] for each in OUTER if config.get(each) is not None}}


def _check_encoder(name: str, family: Family, config: Mapping[str, Any]) -> None:
    if "encoder_layers" in family.read:
        _check_has_both(name, family, config)
        return
    if config.get("is_encoder_decoder"):
        raise ProblemError(f"{name}: {family.name} is an encoder with a decoder, which is not read from a config.json.")
    if config.get("add_cross_attention"):
        raise ProblemError(f"{name} has add_cross_attention: attention to an encoder of another model is not counted.")


def _check_has_both(name: str, family: Family, config: Mapping[str, Any]) -> None:
    """Raise `ProblemError` for the encoder or the decoder of a family alone: its config.json has the sizes of both."""
    names = config.get("architectures")
    names = cast("list[Any]", names) if isinstance(names, list) else []
    parts = [each for each in map(str, names) if each.endswith(OF_A_PART)]
    if parts or config.get("is_encoder_decoder") is False:
        why = f"architectures {parts[0]}" if parts else "is_encoder_decoder false"
        raise ProblemError(
            f"{name} has {why}: the encoder or the decoder of {family.name} alone is not counted, only both together."
        )


OF_A_PART = (
    "Encoder", "EncoderModel", "EncoderOnlyModel", "ForAudioClassification", "ForTokenClassification",
    "Decoder", "ForCausalLM",
)  # fmt: skip
"""Ends of the names of classes that have an encoder or a decoder alone, in families that have both."""


def _fields(name: str, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the family, and those of the entries that `NAMES`, or the family, maps to fields."""
    fields: dict[str, Any] = dict(family.fields)
    for field, keys in {**NAMES, **family.read}.items():
        key = next((each for each in keys if each and entry(config, each) is not None), None)
        if key is not None:
            fields[field] = checked_value(name, field, key, entry(config, key))
    fields = {key: value for key, value in fields.items() if key not in family.when or entry(config, family.when[key])}
    fields.setdefault("mlp", 4 * fields.get("d_model", 0))
    if family.recurrent:
        fields["recurrent"] = _recurrent(family.recurrent, config, fields)
    return fields


def _check_complete(name: str, family: Family, config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    if missing := missing_fields(fields):
        names = {**NAMES, **family.read}
        lacks = ", ".join(_alternatives(names[field]) for field in missing)
        raise ProblemError(
            f"{name} has no {lacks}: expected in a config.json of model_type {config.get('model_type', '')!r}, "
            f"which is read as the family {family.name}."
        )


def _alternatives(keys: Sequence[str]) -> str:
    """The keys that a field may have in a config.json: `num_hidden_layers (or n_layer, n_layers)`."""
    first, *others = filter(None, keys)
    return f"{first} (or {', '.join(others)})" if others else first


def _with_defaults(config: Mapping[str, Any], family: str, notes: list[str]) -> Mapping[str, Any]:
    """The entries, completed by the defaults of the family: transformers writes only those that differ."""
    groups = {each: names for names in (*NAMES.values(), SHARED_EXPERTS) for each in names}  # names of one value
    missing = {
        key: value
        for key, value in default_entries(family).items()
        if key not in config and not any(each in config for each in groups.get(key, ()))
    }
    sizes = [f"{key} {value:,}" for key, value in missing.items() if key in SIZES]
    if sizes:
        notes.append(f"Defaults of {family}: {', '.join(sizes)}.")
    entries = {**missing, **config}
    return {key: _automatic(key, entries) if value == "auto" else value for key, value in entries.items()}


def _automatic(key: str, entries: Mapping[str, Any]) -> Any:
    """What "auto" means for an entry."""
    width, heads = entries.get("hidden_size") or 0, entries.get("mamba_n_heads") or 1
    if key == "mamba_d_head":
        return (entries.get("mamba_d_ssm") or width * entries.get("mamba_expand", 2)) // heads
    return -(-width // 16) if key in ("mamba_dt_rank", "time_step_rank") else "auto"


SIZES = {each for field in ("d_model", "layers", "heads", "kv_heads", "mlp", "vocab") for each in NAMES[field]}
"""Entries that a reader of a cost wants to know to be defaults."""


def _recurrent(sizes: Mapping[str, Any], config: Mapping[str, Any], fields: Mapping[str, Any]) -> Recurrent:
    entries = _entries(config, _computed(config, fields))
    numbers = {key: value_of(str(text), entries) for key, text in sizes.items() if key != "kind"}
    return recurrent_layer(sizes["kind"], fields.get("d_model", 0), numbers)


def _family(name: str, family: str, notes: list[str]) -> Family:
    try:
        found = find_family(family)
    except ProblemError as error:
        raise ProblemError(f"{name}: {error}") from None
    if found is None:
        notes.append(
            f"model_type {family!r} is not known: it counts as a causal decoder with Llama's biases, norms and MLP."
        )
        found = find_family("llama")
        assert found is not None
    return found


def _entries(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What sums of products may name: entries of the config.json, fields, the size of a head, layers with experts."""
    head_dim = fields.get("head_dim") or fields.get("d_model", 0) // (fields.get("heads") or 1)
    pattern, layers = fields.get("mlp_pattern"), fields.get("layers", 0)
    expert_layers = layers - fields.get("dense_layers", 0) if pattern is None else str(pattern).count("e")
    untied = not fields.get("tied", False)
    return {**config, **fields, "head_dim": head_dim, "expert_layers": expert_layers, "untied": untied}


def _computed(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with sums of products computed."""
    entries = _entries(config, fields)
    return {key: value_of(value, entries) if is_sum(key, value) else value for key, value in fields.items()}
