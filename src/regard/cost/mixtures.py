"""Fields of mixtures of experts, from the entries of a config.json: which layers have experts, and of what width."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regard.cost.config_fields import NAMES
from regard.cost.entries import SHARED_EXPERTS, check_length
from regard.cost.families import Family, default_entries
from regard.errors import ProblemError

MLP_LETTERS = {"dense": "d", "sparse": "e"}
"""`mlp_layer_types` of transformers, as letters of `regard.cost.fields.from_fields`."""

DENSE = {
    0: ("flint", "granitemoehybrid", "jamba", "nemotron_h", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    1: ("jamba", "nemotron_h"),
}
"""The families whose layers are dense MLPs, by the number of experts that says so; nemotron_h's may have none."""

OF_MIXTURES = ("experts", "active", "expert_mlp", "shared_mlp", "dense_layers", "shared_gate")
"""Fields that a model without experts does not have."""


def check_experts(name: str, family: Family, fields: Mapping[str, Any]) -> None:
    """Raise `ProblemError` for a mixture of one expert or none, which has a router all the same, but for `DENSE`."""
    count = fields.get("experts")
    if count not in DENSE or family.name in DENSE[count]:
        return
    of_mixtures = {"experts", *family.read.get("experts", NAMES["experts"]), *NAMES["expert_mlp"]}
    if of_mixtures & {*family.fields, *default_entries(family.name)}:
        number = "one expert" if count else "no expert"
        raise ProblemError(f"{name} has {number}, with a router that is not counted: expected 2 experts or more.")


def add_experts(name: str, family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Set the fields of experts, or remove them where the model has none."""
    if fields.get("experts", 1) <= 1:
        for field in OF_MIXTURES:
            fields.pop(field, None)
        return
    fields.setdefault("active", 1)
    _add_shared(family, config, fields)
    if config.get("decoder_sparse_step", 1) > 1:
        fields["moe_every"] = config["decoder_sparse_step"]
    if "interleave_moe_layer_step" in config:  # llama4_text: intermediate_size is that of an expert
        fields["moe_every"] = config["interleave_moe_layer_step"]
        fields["shared_mlp"] = fields["expert_mlp"] = fields["mlp"]
        fields["dense_mlp"] = config.get("intermediate_size_mlp", fields["mlp"])
    listed = _listed(name, config.get("mlp_layer_types"), fields.get("layers", 0))
    letters = _by_rule(family, config, fields) or listed
    if letters:
        fields["mlp_pattern"] = letters


def _add_shared(family: str, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """The width of what every token takes beside its experts."""
    shared = next((config[each] for each in SHARED_EXPERTS if config.get(each) is not None), 0)
    if family == "hy_v3" and not shared:  # transformers makes a whole MLP of none
        fields["shared_mlp"] = fields["mlp"]
    if family == "nemotron_h" and fields.get("shared_mlp") == 0:  # and here of a width of 0
        fields["shared_mlp"] = fields["mlp"]
    if shared and "shared_mlp" not in fields:
        fields["shared_mlp"] = shared * fields.get("expert_mlp", fields["mlp"])


def _listed(name: str, kinds: Sequence[str] | None, layers: int) -> str | None:
    if not kinds:
        return None
    if unknown := next((kind for kind in kinds if kind not in MLP_LETTERS), None):
        raise ProblemError(f"{name} has MLPs of {unknown!r}: expected {' or '.join(MLP_LETTERS)}.")
    check_length(name, "mlp_layer_types", kinds, layers)
    return "".join(MLP_LETTERS[kind] for kind in kinds)


def _by_rule(family: str, config: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """The letter of each layer by an entry that counts more than a list of kinds; None: there is none."""
    layers, first = fields.get("layers", 0), fields.get("dense_layers", 0)
    if only_dense := config.get("mlp_only_layers"):
        every = fields.get("moe_every", 1)
        return _of(i not in only_dense and not (i + 1) % every for i in range(layers))
    if (with_experts := config.get("moe_layers")) is not None:  # of llama4_text
        return _of(i in with_experts for i in range(layers))
    if family == "axk1" and not config.get("mlp_layer_types") and (every := config.get("moe_layer_freq", 1)) > 1:
        return _of(i >= first and not i % every for i in range(layers))
    if "expert_layer_period" in config:  # jamba
        period, offset = config["expert_layer_period"], config.get("expert_layer_offset", 1)
        return _of(i % period == offset for i in range(layers))
    if "moe_layer_start_index" in config:  # ernie4_5_moe
        start, last = config["moe_layer_start_index"], config.get("moe_layer_end_index", -1)
        last, every = layers - 1 if last == -1 else last, config.get("moe_layer_interval", 1)
        return _of(not (i + 1) % every and start <= i <= last for i in range(layers))
    return None


def _of(has_experts: Iterable[bool]) -> str:
    return "".join("e" if each else "d" for each in has_experts)
