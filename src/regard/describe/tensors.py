"""What descriptions need to know of the tensors that they carry: which one it is, and tables derived from it.

A description is a value: it is compared and hashed. A tensor in it is known by a `Ticket`. On the CPU that is a digest
of the elements: whoever writes to them, in place, through `.data`, or through a numpy array that shares the memory, has
made another description. Reading them costs little: 16 MiB take 0.4 ms (`./bench schedules`).

Elsewhere (CUDA, ...) a digest would wait for the device, so a tensor there is known by identity and by the version that
in-place operations raise. **On a GPU, never write to a mask's tensor through `.data`: torch counts no version there.**

A ticket keeps no tensor alive, so neither does a cache whose keys have tickets.
"""

import itertools
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary
from xxhash import xxh3_128_digest

T = TypeVar("T")

_NO_NUMPY = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # pyright: ignore[reportPrivateUsage]
_is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor

_serials = itertools.count()
_serial_of = WeakIdKeyDictionary()
_derived = WeakIdKeyDictionary()

_read: ContextVar[dict[int, tuple[Tensor, "Ticket"]] | None] = ContextVar("read", default=None)
"""The tensors read within `unchanged`, and their tickets."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Stands for a tensor or a function in an outline; equal tickets mean equal content.

    Attributes:
        content: a digest, identity and version, or the content of a function (`content.py`).
        text: how it is printed.
    """

    content: Hashable
    text: str

    def __repr__(self) -> str:
        return self.text


def is_without_data(t: object) -> bool:
    """Whether it is a tensor of sizes and a type alone: on the meta device, or fake."""
    return isinstance(t, Tensor) and (t.is_meta or isinstance(t, FakeTensor))


def form(tensor: Tensor) -> Ticket:
    """A ticket that says the type and shape of a tensor, and nothing of its elements."""
    return Ticket("form", _text(tensor))


def ticket(tensor: Tensor) -> Ticket:
    """The ticket of a tensor: by content on the CPU, elsewhere by identity and version."""
    read = _read.get()
    if read is not None and id(tensor) in read:
        return read[id(tensor)][1]
    made = Ticket(_content(tensor), _text(tensor))
    if read is not None:
        read[id(tensor)] = tensor, made  # kept, or its id might become another's
    return made


@contextmanager
def unchanged() -> Generator[None]:
    """Inside, in this thread, every tensor is read for its ticket once: nobody writes to it meanwhile."""
    token = _read.set(_read.get() or {})
    try:
        yield
    finally:
        _read.reset(token)


def derived(tensor: Tensor, name: str, make: Callable[[Tensor], T]) -> T:
    """`make(tensor)`, kept as long as the tensor lives and is unchanged; what is made must not hold the tensor."""
    kept = cast("dict[str, tuple[Ticket, Any]]", _derived.setdefault(tensor, {}))
    now = ticket(tensor)
    if name not in kept or kept[name][0] != now:
        kept[name] = (now, make(tensor))
    return kept[name][1]


def digest(tensor: Tensor) -> bytes:
    """128 bits that say the elements of a tensor, in order; 1 us for small ones, 20 us for 1 MiB.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([1, 2])), digest(torch.arange(2)) == digest(torch.ones(2))
    (True, False)
    """
    with torch._C._DisableFuncTorch():  # pyright: ignore[reportPrivateUsage]
        data = tensor.detach().resolve_neg().cpu() if tensor.requires_grad or not _is_plain(tensor) else tensor
        for axis, step in enumerate(data.stride()):
            if not step and data.shape[axis] > 1:  # expanded: each element once
                data = data.narrow(axis, 0, 1)
        data = data.reshape(-1).view(_NO_NUMPY.get(data.dtype, data.dtype))
        return xxh3_128_digest(data.numpy().data)


def _content(tensor: Tensor) -> Hashable:
    if _is_plain(tensor):
        return digest(tensor)
    if tensor.is_inference() and not is_without_data(tensor):
        return digest(tensor), type(tensor)  # tensors of `torch.inference_mode` count no versions
    return cast(int, _serial_of.setdefault(tensor, next(_serials))), tensor._version  # pyright: ignore[reportPrivateUsage]


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements are in the memory of the host, as they are."""
    own = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
    return own and not tensor.is_neg() and not _is_wrapped(tensor)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
