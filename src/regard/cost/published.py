"""The published models of models.toml, by name; each row has the shapes of a model and their source."""

from dataclasses import replace
from os import PathLike
from typing import Any

from regard.cost.config import from_config, read_config
from regard.cost.families import shared_fields
from regard.cost.fields import from_fields
from regard.cost.model import Model
from regard.cost.near_names import near_names, unknown_name
from regard.cost.tables import table
from regard.errors import ProblemError
from regard.folders import expanded, name_of


def model_names() -> list[str]:
    """The published models, in the order of models.toml."""
    return list(table("models.toml")["models"])


def find_model(name: str) -> Model:
    """A published model by its name, in any case; `_`, `.` and spaces count as `-`.

    Raises:
        ProblemError: there is no such model; near names are listed.

    >>> model = find_model("Llama-2-70B")
    >>> len(model.layers), model.layers[0].attention.kind
    (80, 'GQA-8')
    """
    name = name_of(name)
    rows = table("models.toml")["models"]
    models = {_plain(each): each for each in rows}
    models |= {_plain(alias): each for each, row in rows.items() for alias in row.get("aliases", ())}
    found = models.get(_plain(name)) or models.get(_plain(name.rpartition("/")[2]))
    if found is None:
        raise unknown_name("model", name, model_names(), "or give a folder with a config.json")
    row: dict[str, Any] = dict(rows[found])
    family, source = row.pop("family", None), row.pop("source")
    row.pop("aliases", None)
    if "config" in row:
        read = from_config(found, {"model_type": family, **row["config"]}, source)
        return replace(read, published_parameters=row["published_parameters"])
    return from_fields(found, source, {**(shared_fields(family) if family else {}), **row})


def load_model(name: str | PathLike[str]) -> Model:
    """A published model by name, or the one of a folder or file with a config.json.

    Raises:
        ProblemError: there is no such model; the file is no configuration, or one that cannot be counted.
    """
    if not (name := name_of(name)):
        raise ProblemError("the name of the model is empty: expected a published model or a folder with a config.json.")
    path = expanded(name)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ProblemError(f"{name} has no config.json: expected a folder as save_pretrained writes it.")
        return read_config(path / "config.json")
    if path.suffix == ".json":
        return read_config(path)
    if not path.exists() and (name.startswith((".", "/", "~")) or "\\" in name):
        raise ProblemError(f"there is no directory {name}.")
    try:
        return find_model(name)
    except ProblemError:
        if path.exists():
            raise ProblemError(f"{name} is no config.json: expected one, its folder, or a published model.") from None
        if "/" in name and not near_names(name, model_names()):
            raise ProblemError(f"there is no directory {name}, and no published model of this name.") from None
        raise


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-").replace(".", "-")
