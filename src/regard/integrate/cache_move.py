"""Moving a `KVCache` to another device and back: codes remain codes, and views of one memory remain views of one.

A cache is a tree of objects of `regard.cache` with tensors in it. Each memory is copied once, and every view of it is
made again over the copy, so block tables and views are as before.
"""

from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import RefusalError
from regard.storage.stored import FixedParts


def move(kept: object, device: torch.device | str, *, copy: bool = False) -> None:
    """Move all tensors in an object of `regard.cache`, and its record of their device, in place.

    Args:
        kept: a `KVCache`.
        device: where to.
        copy: whether tensors that are already on the device are copied as well.

    Raises:
        RefusalError: it uses pages of a pool that other caches use as well.

    >>> from regard.cache import KVCache
    >>> cache, k = KVCache(), torch.randn(1, 2, 3, 4)
    >>> _ = cache.append(k, k)
    >>> move(cache, "meta")
    >>> cache.append(k.to("meta"), k.to("meta"))[0].device
    device(type='meta')
    """
    if getattr(getattr(kept, "layout", None), "pool", None) is not None:
        raise RefusalError(
            f"{kept!r} shares its pool with other caches, whose pages stay where they are: a cache with "
            "Paged(pool=...) is not moved to another device. Leave the pool out."
        )
    _Move(torch.device(device), copy).into(kept)


class _Move:
    """One move, with the objects that it has met, by identity."""

    def __init__(self, device: torch.device, copy: bool) -> None:
        self.device, self.copy = device, copy
        self.memories: dict[int, tuple[Any, Any]] = {}  # by address: a memory, which must not be freed, and its copy
        self.met: dict[int, object] = {}

    def into(self, kept: object) -> None:
        """Everything below an object of regard's."""
        if id(kept) in self.met:
            return
        self.met[id(kept)] = kept
        for name in (*getattr(kept, "__dict__", ()), *getattr(type(kept), "__slots__", ())):
            if name != "__dict__" and hasattr(kept, name):
                old = getattr(kept, name)
                new = self.moved(old)
                if new is not old:
                    object.__setattr__(kept, name, new)

    def moved(self, value: Any) -> Any:
        """What replaces a value; itself where nothing in it moves."""
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, FixedParts):
            parts = self.moved(value.parts)
            return value if parts is value.parts else FixedParts(parts)
        if isinstance(value, tuple):
            parts = [self.moved(part) for part in cast("tuple[Any, ...]", value)]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, list):
            value[:] = [self.moved(part) for part in cast("list[Any]", value)]
        elif isinstance(value, dict):
            value.update({key: self.moved(part) for key, part in cast("dict[Any, Any]", value).items()})
        elif type(value).__module__.startswith("regard.cache"):
            self.into(value)
        return value

    def tensor(self, old: Tensor) -> Tensor:
        """The same view of the copy of a memory."""
        if old.device == self.device and not self.copy:
            return old
        memory = old.untyped_storage()
        if memory.data_ptr() not in self.memories or not memory.data_ptr():
            whole = torch.empty(0, dtype=torch.uint8, device=old.device).set_(memory)
            with torch.inference_mode(mode=False):
                copy = torch.empty(len(whole), dtype=torch.uint8, device=self.device)
                self.memories[memory.data_ptr()] = memory, copy.copy_(whole).untyped_storage()
        copied = self.memories[memory.data_ptr()][1]
        made = torch.empty(0, dtype=old.dtype, device=self.device)
        return made.set_(copied, old.storage_offset(), old.shape, old.stride())
