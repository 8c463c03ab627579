"""The GGUF file format: numbers and texts by name, and tensors in blocks of few bits.

    "GGUF" version tensors pairs | key type value ... | name dims type offset ... | padding | blocks ...

Everything is little-endian and read once, front to back. A tensor of type Q4_1 is stored in blocks of 32 weights: a
scale d and a minimum m (float16) and 32 numbers q of 4 bits, `w = d q + m`; 5 bits a weight. In Q8_0 `w = d q`, with q
of 8 bits; 8.5 bits a weight.

Source: the specification in ggml's `docs/gguf.md`, version 3; block layouts in its `ggml-common.h`.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import ProblemError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Gguf:
    """What a file holds: `values` by key, and the tensors, dequantised when asked for."""

    values: dict[str, Any]
    _stored: dict[str, tuple[tuple[int, ...], int, NDArray[np.uint8]]]  # shape, type, bytes

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._stored)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32, rows first: `[out, in]` for a linear layer."""
        shape, kind, data = self._stored[name]
        return _KINDS[kind].read(data).reshape(shape)


def read(path: Path) -> Gguf:
    """Read a GGUF file. Tensors stay on disk until they are asked for.

    Raises:
        ProblemError: not a GGUF file of version 2 or 3, cut short, or with a tensor of a type that is not known here.
    """
    try:
        with path.open("rb") as file:
            return _gguf(_Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ProblemError(f"{path} is not a GGUF file that can be read: {error}. Is it whole?") from None


def _gguf(reader: "_Reader") -> Gguf:
    magic, version, tensors, pairs = reader.take("<4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r}, version {version}; expected b'GGUF', version 2 or 3")
    values = {reader.text(): reader.value(*reader.take("<I")) for _ in range(pairs)}
    infos = [(reader.text(), *reader.tensor_info()) for _ in range(tensors)]
    start = -(-reader.at // (step := values.get("general.alignment", 32))) * step
    stored: dict[str, tuple[tuple[int, ...], int, NDArray[np.uint8]]] = {}
    for name, shape, kind, offset in infos:
        if kind not in _KINDS:
            raise ValueError(f"tensor {name} is of ggml type {kind}, and only {sorted(_KINDS)} are known here")
        size = int(np.prod(shape)) // _KINDS[kind].weights * _KINDS[kind].bytes
        stored[name] = shape, kind, np.frombuffer(reader.data, np.uint8, size, start + offset)
    return Gguf(values, stored)


class _Reader:
    """A position in the bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return found

    def text(self) -> str:
        (size,) = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        item, count = self.take("<IQ")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(count)]
        return list(self.take(f"<{count}{_SCALARS[item][1]}"))

    def tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        """(shape, rows first; type; offset in the data)."""
        (dims,) = self.take("<I")
        shape = self.take(f"<{dims}Q")
        return tuple(reversed(shape)), *self.take("<IQ")


def _q4_1(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = data.reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)  # low halves first, then high halves
    return d * q + m


def _q8_0(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = data.reshape(-1, 34)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)


@dataclass(frozen=True)
class _Kind:
    weights: int  # per block
    bytes: int  # per block
    read: Callable[[NDArray[np.uint8]], NDArray[np.float32]]


_KINDS = {
    0: _Kind(1, 4, lambda data: data.view(np.float32).copy()),
    1: _Kind(1, 2, lambda data: data.view(np.float16).astype(np.float32)),
    3: _Kind(32, 20, _q4_1),
    8: _Kind(32, 34, _q8_0),
}
