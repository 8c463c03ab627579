"""Tensors in descriptions: the key of their content, and tables derived from them.

A description is compared and hashed by content, so each of its tensors has a `ContentKey`. On the CPU that is a digest
of the elements: a write to them, in place, through `.data`, or through a numpy array that shares the memory, makes a
different description. The digest costs little: 16 MiB take 0.4 ms (`./bench schedules`).

Elsewhere (CUDA, ...) a digest would wait for the device, so a tensor there is identified by identity, by the version
that in-place operations increment, and by its memory, which is another after an assignment to `.data`. **On a GPU,
never write to elements of a mask's tensor through `.data`: torch counts no version there.**

A content key keeps no tensor alive, so neither does a cache whose keys have content keys.
"""

import ctypes
import itertools
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.weak import WeakIdKeyDictionary
from xxhash import xxh3_128_digest

from regard.torch_internals import (
    FakeTensor,
    current_func_transform,
    ignore_func_transforms,
    ignore_torch_function,
    in_forward_mode,
    is_func_wrapper,
    version,
    without_gradient_wrappers,
)

T = TypeVar("T")

_serials = itertools.count()
_serial_of = WeakIdKeyDictionary()
_derived = WeakIdKeyDictionary()
_views = WeakIdKeyDictionary()
_memory_of = WeakIdKeyDictionary()
"""The number of each storage: an address may be that of memory that was freed."""

_read: ContextVar[dict[int, tuple[Tensor, "ContentKey"]] | None] = ContextVar("read", default=None)
"""The tensors read within `unchanged`, and their content keys."""


class Untraceable:
    """The content of an object that cannot be followed: equal to no other, so a cache never finds it."""


class ClassRef(ref[type]):
    """Represents a class in a content without keeping it alive; equal for the same class only.

    A plain reference compares classes by `==`, which a metaclass may define, and hashes by it.
    """

    __slots__ = ("_id",)

    _id: int

    def __new__(cls, kind: type) -> Self:
        made = super().__new__(cls, kind)
        made._id = id(kind)
        return made

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ClassRef) and (kind := self()) is not None and kind is other())

    def __hash__(self) -> int:
        return self._id


@dataclass(frozen=True, slots=True)
class ContentKey:
    """Represents a tensor or a function in a fingerprint; equal keys mean equal content.

    Attributes:
        content: a digest, identity and version, or the content of a function (`content.py`); `Untraceable` if changes
            of the elements cannot be detected.
        text: the printed form.
    """

    content: Hashable
    text: str

    def __repr__(self) -> str:
        return self.text


def is_without_data(t: object) -> bool:
    """Whether it is a tensor without data: on the meta device, or fake."""
    return isinstance(t, Tensor) and (t.is_meta or isinstance(t, FakeTensor))


def has_tangent(t: Tensor) -> bool:
    """Whether a tensor has a tangent, of forward-mode differentiation."""
    return in_forward_mode() and unpack_dual(t).tangent is not None


def beside(table: Tensor, x: Any) -> Tensor:
    """The table as a DTensor, where x is one: torch computes with both or with none.

    A table that is a DTensor already stays as it is; of any other, every rank has the whole.
    """
    is_dtensor, is_placed = (type(t).__name__ == "DTensor" for t in (x, table))  # torch imports their class late
    if not is_dtensor or is_placed:
        return table
    return type(x).from_local(table, x.device_mesh)


def form(tensor: Tensor) -> ContentKey:
    """The content key of the type and shape of a tensor, without its elements."""
    return ContentKey("form", _text(tensor))


def content_key(tensor: Tensor) -> ContentKey:
    """The content key of a tensor: a digest on the CPU, elsewhere identity and version."""
    read = _read.get()
    if read is not None and id(tensor) in read:
        return read[id(tensor)][1]
    made = ContentKey(_content(tensor), _text(tensor))
    if read is not None:
        read[id(tensor)] = tensor, made  # keeps the tensor alive, so that its id is not reused
    return made


@contextmanager
def unchanged() -> Generator[None]:
    """A context, of this thread, in which no code writes to tensors: each is read once for its content key."""
    token = _read.set(_read.get() or {})
    try:
        yield
    finally:
        _read.reset(token)


def reads_again(read: Callable[[], object], before: object) -> bool:
    """Whether reading the tensors again gives what was read before: if not, another thread wrote to them meanwhile.

    To be asked before a result is cached by content that was read before the result was computed.
    """
    token = _read.set(None)
    try:
        return read() == before
    finally:
        _read.reset(token)


def derived(tensor: Tensor, name: str, make: Callable[[Tensor], T]) -> T:
    """`make(tensor)`, cached while the tensor lives and is unchanged; the result must not refer to the tensor."""
    kept = cast("dict[str, tuple[ContentKey, Any]]", _derived.setdefault(tensor, {}))
    now = content_key(tensor)
    found = kept.get(name)
    if found is not None and found[0] == now:
        return found[1]
    made = make(tensor)
    if reads_again(lambda: content_key(tensor), now):
        kept[name] = (now, made)
    return made


def derived_view(tensor: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make(tensor)`, a view of it. Where content is identity it is one tensor while `tensor` lives: caches find it.

    A write to `tensor` raises the version of its views too. Memory that was assigned to `tensor.data` has views of its
    own.
    """
    if not _is_by_identity(tensor):
        return make(tensor)
    kept = cast("dict[str, tuple[Hashable, Tensor]]", _views.setdefault(tensor, {}))
    now = _place(tensor), tensor.shape, tensor.stride()
    if (found := kept.get(name)) is None or found[0] != now:
        # A view of `tensor` could keep it alive, and so itself.
        found = kept[name] = now, make(tensor.detach())
    return found[1]


def digest(tensor: Tensor) -> bytes:
    """128 bits that identify the elements of a tensor, in order; 1 us for small tensors, 20 us for 1 MiB.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([1, 2])), digest(torch.arange(2)) == digest(torch.ones(2))
    (True, False)
    """
    plain = tensor.is_contiguous() and _is_plain(tensor)
    if plain and current_func_transform() is None:  # inside torch.func it may be a wrapper, which has no elements
        return xxh3_128_digest(_memory(tensor))
    with ignore_func_transforms():
        if tensor.requires_grad or not _is_plain(tensor):
            with ignore_torch_function():
                tensor = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu()
        data, expanded = _without_repeats(tensor)
        data = data.contiguous()
        found = xxh3_128_digest(_memory(data))
        return found if not expanded else xxh3_128_digest(found + bytes(expanded))


def _without_repeats(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Each element once, and which axes repeated them, which have size 1 then."""
    expanded = [axis for axis, step in enumerate(tensor.stride()) if not step and tensor.shape[axis] > 1]
    for axis in expanded:
        tensor = tensor.narrow(axis, 0, 1)
    return tensor, expanded


def _memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the host, while it lives.

    Not `tensor.numpy()`: after it torch never again resizes that memory, and FSDP frees parameters by resizing them.
    """
    size = tensor.nbytes
    if size and not tensor.data_ptr():  # it has no elements of its own: torch makes them, or says so
        return tensor.numpy(force=True).data
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def elements(tensor: Tensor) -> np.ndarray:
    """The elements of a tensor, copied to the host; also inside `torch.func`, where masks are only read.

    >>> elements(torch.arange(3))
    array([0, 1, 2])
    """
    with ignore_func_transforms():
        return without_gradient_wrappers(tensor).detach().resolve_neg().to("cpu", copy=True).numpy(force=True)


def distinct_elements(tensor: Tensor) -> np.ndarray:
    """The elements of a tensor, once where an axis repeats them (its size is 1 then): to be read at once, not kept.

    They are not copied where the memory of the host has them side by side.

    >>> distinct_elements(torch.arange(3).expand(2, 3))
    array([[0, 1, 2]])
    """
    if not _is_plain(tensor) or current_func_transform() is not None:
        return elements(tensor)
    tensor, _ = _without_repeats(tensor.detach())
    if not tensor.is_contiguous() or not tensor.numel() or not tensor.data_ptr():
        return elements(tensor)
    memory: Any = _memory(tensor)
    memory.owner = tensor  # which lives as long as the array
    kind = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    return np.frombuffer(memory, kind).reshape(tensor.shape)


def _content(tensor: Tensor) -> Hashable:
    if _is_plain(tensor):
        return digest(tensor)
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:  # several tensors inside
        return Untraceable()
    if _is_by_identity(tensor):
        return cast(int, _serial_of.setdefault(tensor, next(_serials))), version(tensor), _place(tensor)
    try:
        return digest(tensor), ClassRef(type(tensor))
    except (KeyError, NotImplementedError, RuntimeError, TypeError):  # a subclass that wraps other tensors
        return Untraceable()


def _is_by_identity(tensor: Tensor) -> bool:
    """Whether content is identity and version: the elements are not there, or not on the host."""
    return is_without_data(tensor) or is_func_wrapper(tensor) or not _is_on_host(tensor)


def _place(tensor: Tensor) -> Hashable:
    """Where its elements are, None where it has none of its own: `tensor.data = other` changes it, and no version.

    Memory that was freed is soon given to another tensor, so an address alone would take it for the same elements.
    """
    if is_without_data(tensor) or is_func_wrapper(tensor):
        return None
    try:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
        return None
    return cast(int, _memory_of.setdefault(storage, next(_serials))), address


def _is_on_host(tensor: Tensor) -> bool:
    """Whether elements are read on the CPU: always for inference tensors, which have no version."""
    return tensor.is_cpu or tensor.is_inference()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory of the host has the elements, unchanged by a subclass, conjugation or negation."""
    own = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
    own = own and not (tensor.is_nested or tensor.is_quantized)
    return own and not tensor.is_neg() and not tensor.is_conj() and not is_func_wrapper(tensor)


def _text(tensor: Tensor) -> str:
    return _written(tensor.dtype, None if tensor.is_nested else tensor.shape)


@lru_cache
def _written(dtype: torch.dtype, shape: torch.Size | None) -> str:
    return f"{str(dtype).removeprefix('torch.')}{'[nested]' if shape is None else list(shape)}"
