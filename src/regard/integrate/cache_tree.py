"""A cache as JSON and tensors, and back, for a file that runs no code when it is read.

A cache is a tree of objects of regard. An object is written as the name of its class and its state (`__getstate__`, as
in a pickle); reading makes objects of regard's classes alone, and calls only their `__setstate__`. An object that
occurs twice is written once.
"""

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import ProblemError, RefusalError

HOMES = ("regard.cache.", "regard.describe.", "regard.storage.")
"""Where classes of objects in a tree may be defined."""

_PLAIN = (bool, int, float, str, type(None))


class Writer:
    """Turns values into JSON; their tensors gather in `tensors`, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._met: dict[int, int] = {}
        self._alive: list[object] = []  # else the id of a freed object could be that of another

    def write(self, value: Any) -> Any:
        """JSON that `Reader.read` reads.

        Raises:
            RefusalError: an object of a class that is not regard's.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": value.type}
        if isinstance(value, list):
            return {"list": [self.write(part) for part in cast("list[Any]", value)]}
        if isinstance(value, dict):
            return {"dict": [[self.write(part) for part in pair] for pair in cast("dict[Any, Any]", value).items()]}
        if isinstance(value, tuple):
            name = _name(type(cast(object, value))) if hasattr(cast(object, value), "_fields") else None
            return {"tuple": [self.write(part) for part in cast("tuple[Any, ...]", value)], "class": name}
        return self._once(value)

    def _once(self, value: Any) -> Any:
        if id(value) in self._met:
            return {"again": self._met[id(value)]}
        number = self._met[id(value)] = len(self._met)
        self._alive.append(value)
        if not isinstance(value, Tensor):
            return {"class": _name(cast("type[Any]", type(value))), "state": self.write(value.__getstate__())}
        order = sorted(range(value.ndim), key=lambda axis: -value.stride(axis))  # as in memory
        self.tensors[f"{number:05d}"] = value.detach().permute(order).contiguous().cpu()
        return {"tensor": f"{number:05d}", "order": order}


class Reader:
    """Makes values of JSON that `Writer.write` gave.

    Args:
        tensors: by name.
        device: where they go.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._met: list[Any] = []

    def read(self, data: Any) -> Any:
        """The value.

        Raises:
            ProblemError: a class that is not regard's.
        """
        match data:
            case {"dtype": name}:
                return _dtype(name)
            case {"device": _}:
                return self._device
            case {"list": parts}:
                return [self.read(part) for part in parts]
            case {"dict": pairs}:
                return {self.read(key): self.read(value) for key, value in pairs}
            case {"tuple": parts, "class": name}:
                values = [self.read(part) for part in parts]
                return tuple(values) if name is None else _class(name, tuple)(*values)
            case {"again": number}:
                return self._met[number]
            case {"tensor": name, "order": order}:
                return self._tensor(name, order)
            case {"class": name, "state": state}:
                return self._object(_class(name), state)
            case _:
                return data

    def _tensor(self, name: str, order: list[int]) -> Tensor:
        back = sorted(range(len(order)), key=order.__getitem__)
        with torch.inference_mode(mode=False):
            made = self._tensors[name].to(self._device).clone(memory_format=torch.contiguous_format).permute(back)
        self._met.append(made)
        return made

    def _object(self, kind: type[Any], data: Any) -> Any:
        made = object.__new__(kind)
        self._met.append(made)  # before its state, which may refer to it
        state = self.read(data)
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            made.__dict__.update(state or {})
        return made


def _name(kind: type[Any]) -> str:
    if not kind.__module__.startswith(HOMES):
        raise RefusalError(
            f"a cache with a {kind.__module__}.{kind.__qualname__} cannot be saved to a file: expected objects and "
            "policies of regard alone. torch.save, or pickle, takes any."
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProblemError(f"the file names a type {name!r}, which torch does not have.")
    return found


def _class(name: str, base: type[Any] = object) -> type[Any]:
    module, _, own = name.rpartition(".")
    found = getattr(importlib.import_module(module), own, None) if module.startswith(HOMES) else None
    if not isinstance(found, type) or not found.__module__.startswith(HOMES) or not issubclass(found, base):
        raise ProblemError(f"the file names a class {name!r}, which is no class of regard's caches.")
    return found
