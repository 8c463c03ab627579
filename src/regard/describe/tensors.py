"""What descriptions need to know of the tensors that they carry: who a tensor is, and tables derived from it.

A description is a value: it is compared and hashed. A tensor is not a value to compare (that would read all of it),
so a tensor is known by a `Ticket`: its serial number, and its version, which every in-place change raises. A ticket
keeps nothing alive, so whoever keeps tickets (the cache of plans) keeps no tensor.
"""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

_serials = itertools.count()
_serial_of = WeakIdKeyDictionary()
_derived = WeakIdKeyDictionary()


@dataclass(frozen=True, slots=True)
class Ticket:
    """Stands for a tensor or a function; equal tickets mean the same unchanged thing."""

    serial: int | str
    version: int
    text: str

    def __repr__(self) -> str:
        return self.text


def ticket(thing: Tensor | Callable[..., Any]) -> Ticket:
    """The ticket of a tensor or function.

    Tensors made under `torch.inference_mode` count no versions; those are known by a digest of their content.
    """
    if not isinstance(thing, Tensor):
        return Ticket(_serial(thing), 0, getattr(thing, "__name__", type(thing).__name__))
    text = f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}"
    if thing.is_inference():
        return Ticket(_digest(thing), 0, text)
    return Ticket(_serial(thing), thing._version, text)  # pyright: ignore[reportPrivateUsage]


def derived(tensor: Tensor, name: str, make: Callable[[Tensor], T]) -> T:
    """`make(tensor)`, kept as long as the tensor lives and is unchanged; what is made must not hold the tensor."""
    kept = cast("dict[str, tuple[Ticket, Any]]", _derived.setdefault(tensor, {}))
    now = ticket(tensor)
    if name not in kept or kept[name][0] != now:
        kept[name] = (now, make(tensor))
    return kept[name][1]


def _serial(thing: object) -> int:
    try:
        return cast(int, _serial_of.setdefault(thing, next(_serials)))
    except TypeError:  # cannot be weakly referenced (a builtin): such things live as long as the program
        return id(thing)


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest() + str(tensor.device)
