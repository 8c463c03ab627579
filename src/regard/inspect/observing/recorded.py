"""Recorded attention calls: in memory, or in files.

A layer of 32 heads of 128 dims has 256 MiB of queries at 32,768 tokens in bfloat16. Where memory cannot hold a whole
model's calls the disk can (`disk.py`); a file is mapped into memory, so only what is used is read.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.describe.fingerprint import Fingerprint
from regard.describe.serialized import deserialize
from regard.describe.spec import Spec
from regard.errors import ProblemError
from regard.inspect.names import Heads, read_head, read_heads
from regard.inspect.observing.disk import Folder, Parts, copy_of, is_serializable, read_folder
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights

To = str | torch.device | Path | None
"""Where calls are recorded: None for the device of each call, a device, "disk", or a folder."""

DISK = "disk"

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One recorded call.

    Attributes:
        layer, module: the layer, and the path of the module that attended; see `observe`.
        parts: returns what was recorded, from memory or from a file.

    >>> from regard import attend
    >>> from regard.inspect import observe
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with observe(values=True) as calls:
    ...     _ = attend(q, q, q + 1)
    >>> calls[0].weights.shape, calls[0].v.shape, calls[0].out[0, 0, 0]
    ((1, 1, 2, 2), torch.Size([1, 1, 2, 4]), tensor([1., 1., 1., 1.]))
    """

    layer: int
    module: str | None
    parts: Callable[[], Parts]

    @property
    def weights(self) -> Weights:
        """The weights, lazily: q, k, lse, mask and bias of the call. From a file they are mapped, not read."""
        return self.parts().weights

    def heads(self, heads: int | Heads) -> Weights:
        """The weights of some heads of this layer, by name or by number: `call.heads("18.6")`, `call.heads(6)`.

        Raises:
            ProblemError: a head is not of this layer.
        """
        return heads_of_layer(self.weights, heads, self.layer, self.module)

    @property
    def v(self) -> Tensor:
        """[batch, kv_heads, keys, v_dim]. Raises `ProblemError` where values were not recorded."""
        return self._recorded(self.parts().v)

    @property
    def out(self) -> Tensor:
        """The output, [batch, heads, queries, v_dim]. Raises `ProblemError` where values were not recorded."""
        return self._recorded(self.parts().out)

    def _recorded(self, part: Tensor | None) -> Tensor:
        if part is None:
            raise ProblemError(f"{self} has neither values nor output: record them with observe(values=True).")
        return part

    def __repr__(self) -> str:
        return f"RecordedCall(layer={self.layer}, module={self.module!r})"


def heads_of_layer(weights: Weights, heads: int | Heads, layer: int, module: str | None) -> Weights:
    """The weights of some heads of one layer, each by its name or its number in the layer."""
    value: Any = read_heads(heads) if isinstance(heads, str) else heads
    several: list[Any] = list(value) if isinstance(value, Iterable) and not _is_name(value) else [value]
    return weights.heads([_number(head, layer, module) for head in several])


def read_calls(folder: str | Path) -> list[RecordedCall]:
    """The calls that `observe(..., to=folder)` recorded, in order, in this process or another.

    Raises:
        ProblemError: there are none, or a mask or bias contains a function, which no file can store.

    >>> from regard import Causal, attend
    >>> from regard.inspect import observe
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with TemporaryDirectory() as folder:
    ...     with observe(to=folder):
    ...         _ = attend(q, q, q, mask=Causal())
    ...     read_calls(folder)[0].weights.dense()
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    return [RecordedCall(*call) for call in read_folder(Path(folder))]


class Memory:
    """Copies of calls on a device, None for the device of each call.

    Copies, because KV caches overwrite tensors that they returned, and decoding loops change the lengths in masks.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._specs: dict[Fingerprint, Spec] = {}

    def add(self, layer: int, module: str | None, parts: Parts) -> Callable[[], Parts]:
        """Copy a call, and return a function that returns the copy."""
        w = parts.weights
        weights = replace(
            w,
            **{name: self._copy(getattr(w, name)) for name in ("q", "k", "lse", "sink")},
            mask=self._copy_spec(w.mask),
            bias=self._copy_spec(w.bias),
        )
        copied = Parts(weights, self._copy(parts.v), self._copy(parts.out))
        return partial(_in_memory, copied)

    def _copy(self, t: Tensor | None) -> Tensor | None:
        """A copy that takes no more than its own memory: q is often a view of a larger tensor."""
        return None if t is None else copy_of(t, self._device or t.device)

    def _copy_spec(self, spec: S | None) -> S | None:
        """A mask or bias with copied tensors; calls with equal ones share the copy."""
        if spec is None or not is_serializable(spec) or not spec.tensors():
            return spec
        fingerprint = spec.fingerprint()
        if fingerprint not in self._specs:
            tensors: list[Tensor] = []
            numbers: list[int] = []
            text = spec.serialize(tensors, numbers)
            copies = [copy_of(t, self._device or t.device) for t in tensors]
            self._specs[fingerprint] = deserialize(text, copies, numbers)
        return cast(S, self._specs[fingerprint])


@contextmanager
def recorder(to: To) -> Generator[Memory | Folder]:
    """Records calls; a temporary folder is removed when the block ends."""
    if to == "":  # as a path, it is the working directory
        raise ProblemError("to is '': expected a device, 'disk' or the name of a folder; '.' is the working directory.")
    if not isinstance(cast(object, to), str | PathLike | torch.device | None):
        raise ProblemError(f"to is {to!r}: expected a device, such as 'cuda:1', 'disk', a folder, or None.")
    device = _device(to)
    _check_exists(device)
    if to is None or device is not None:
        yield Memory(device)
    elif to == DISK:
        with TemporaryDirectory(prefix="regard-") as own:
            yield Folder(Path(own))
    else:
        yield Folder(Path(str(to)))


def _in_memory(parts: Parts) -> Parts:
    return parts


def _is_name(value: Any) -> bool:
    """Whether it is one (layer, head), and not several head numbers."""
    return isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2


def _number(head: Any, layer: int, module: str | None) -> int:
    number = index_of(head)
    if number is None:
        named, number = read_head(head)
        if named not in (layer, module):
            where = f"layer {layer}" + ("" if module is None else f" ({module})")
            raise ProblemError(f"head {named}.{number} is not in {where}, whose weights these are.")
    return number


def _device(to: To) -> torch.device | None:
    """The device of that name, if there is one: any other text is a folder."""
    if not isinstance(to, str):
        return to if isinstance(to, torch.device) else None
    try:
        return torch.device(to)
    except RuntimeError:
        return None


def _check_exists(device: torch.device | None) -> None:
    """Raise `ProblemError` if this machine, or this torch, has no such device, or it stores nothing ("meta")."""
    try:
        exists = device is None or torch.empty(1, device=device).device.type != "meta"
    except (RuntimeError, AssertionError, NotImplementedError):  # CUDA's absence is an AssertionError
        exists = False
    if not exists:
        raise ProblemError(
            f"to={str(device)!r}: torch has no such device here to record calls on. Name an existing one ('cpu'), "
            f"'disk', or a folder; for a folder of that name pass Path({str(device)!r})."
        )
