"""What models of a family share: families.toml, by the `model_type` of a config.json.

A row has the fields of `fields.py`, and says where a config.json has others. Families whose costs these shapes cannot
express are in refused.toml, each with the reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from regard.cost.tables import table
from regard.errors import ProblemError

CONDITIONAL = ("read", "when", "needs", "recurrent", "like")


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: its `model_type`.
        fields: fields that all its models have; texts are sums of products, see `value_of`.
        read: entries of config.json that give a field, where their names are unusual; "" for none.
        when: entries of config.json without which the family does not have a field.
        needs: entries of config.json without which its layers are not known.
        recurrent: sizes of its layers without attention, as sums of products.
    """

    name: str
    fields: Mapping[str, Any]
    read: Mapping[str, Sequence[str]]
    when: Mapping[str, str]
    needs: Sequence[str]
    recurrent: Mapping[str, Any] | None


def refusals() -> dict[str, str]:
    """The families that cannot be counted, each with the reason."""
    return {name: each["reason"] for each in table("refused.toml")["refused"] for name in each["families"]}


def find_family(name: str) -> Family | None:
    """A family by its `model_type`; None for one that is not known.

    Raises:
        ProblemError: its costs cannot be counted.

    >>> find_family("qwen3_moe").fields
    {'gated': True, 'qk_norm': 'head'}
    """
    if name not in table("families.toml")["families"]:
        if name in refusals():
            raise ProblemError(f"models of {name!r} are not counted: {refusals()[name]}")
        return None
    row = _row(name)
    fields = {key: value for key, value in row.items() if key not in CONDITIONAL}
    read = {field: [path] if isinstance(path, str) else path for field, path in row.get("read", {}).items()}
    return Family(name, fields, read, row.get("when", {}), row.get("needs", ()), row.get("recurrent"))


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "config_defaults.json").read_text(encoding="utf-8"))


def default_entries(family: str) -> Mapping[str, Any]:
    """What an entry that is missing in a config.json of a family is, by its name; empty for an unknown family.

    The defaults of the configuration classes of transformers, of the entries that costs are computed from.

    >>> default_entries("gemma3_text")["head_dim"]
    256
    """
    return _defaults().get(family, {})


def _row(name: str) -> dict[str, Any]:
    row: dict[str, Any] = table("families.toml")["families"][name]
    if "like" not in row:
        return row
    base = _row(row["like"])
    nested = {key: {**base.get(key, {}), **row.get(key, {})} for key in ("read", "when") if key in base or key in row}
    return {**base, **row, **nested}


def shared_fields(family: str) -> dict[str, Any]:
    """The fields of a family that need no config.json: those of a row of models.toml."""
    found = find_family(family)
    if found is None:
        return {}
    return {key: value for key, value in found.fields.items() if key not in found.when and not is_sum(key, value)}


TEXTS = ("qk_norm", "gate", "pattern", "mlp_pattern")
"""Fields whose texts are values, no sums."""


def is_sum(field: str, value: Any) -> bool:
    """Whether a value is a sum of products to be computed."""
    return isinstance(value, str) and field not in TEXTS


def value_of(formula: str, entries: Mapping[str, Any]) -> int:
    """A sum of products of numbers and entries; an entry that is missing or false is 0.

    >>> value_of("2 d_model + vocab has_bias", {"d_model": 64, "vocab": 100, "has_bias": True})
    228
    """
    total = 0
    for term in formula.split("+"):
        product = 1
        for factor in term.split():
            product *= int(factor) if factor.lstrip("-").isdigit() else _number(factor, entries.get(factor) or 0)
        total += product
    return total


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ProblemError(f"{name} is {value!r}: expected a whole number.")
    return int(value)


def entry(config: Mapping[str, Any], path: str) -> Any:
    """An entry of a config.json by its name, with dots for one inside another; None where there is none.

    >>> entry({"attn_config": {"kv_n_heads": 8}}, "attn_config.kv_n_heads")
    8
    """
    value: Any = config
    for name in path.split("."):
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    return value
