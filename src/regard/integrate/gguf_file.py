"""A GGUF file, read: what it says in words and numbers, and its tensors as they lie in it.

The package `gguf` reads such files too, with an array of NumPy for each of the 98,000 words of a vocabulary and its
merges: 2.8 s of the default model's start, against 0.1 s here. What the codes of its tensors mean is left to it.

```
"GGUF", version, tensors, values  |  name, type, value ...  |  name, shape, code, offset ...  |  the tensors, aligned
```

Little-endian, versions 2 and 3, as the GGUF specification in ggml has it (docs/gguf.md).
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from regard.errors import ProblemError

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values that are one number, as `struct` names them."""
STRING, ARRAY = 8, 9
ALIGNMENT = 32
"""Bytes that each tensor begins at a multiple of, where the file says nothing else."""


class Stored(NamedTuple):
    """A tensor as it lies in the file: its code, and its bytes, which are not read before they are used."""

    code: gguf.GGMLQuantizationType
    data: NDArray[Any]

    def numbers(self) -> NDArray[np.float32]:
        """The tensor in float32, in memory of its own."""
        return self.data.copy() if self.code.name == "F32" else gguf.dequantize(self.data, self.code)


def values_of(path: Path) -> dict[str, Any]:
    """The values that a file has before its tensors, by their names.

    Raises:
        ProblemError: it is no such file.
    """
    return _Reader(_mapped(path)).values(path)


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a file by their names; errors as of `values_of`."""
    data = _mapped(path)
    reader = _Reader(data)
    alignment = reader.values(path).get("general.alignment", ALIGNMENT)
    places = [reader.tensor() for _ in range(reader.tensors)]
    start = -(-reader.at // alignment) * alignment
    return {
        name: Stored(code, _lying(np.frombuffer(data, np.uint8), start + offset, shape, code))
        for name, shape, code, offset in places
    }


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _lying(
    data: NDArray[np.uint8], start: int, shape: tuple[int, ...], code: gguf.GGMLQuantizationType
) -> NDArray[Any]:
    lies: tuple[int, ...] = gguf.quant_shape_to_byte_shape(shape, code)
    found = data[start : start + int(np.prod(lies))].reshape(lies)
    return found.view(np.float32) if code.name == "F32" else found


class _Reader:
    """Goes through the head of a file; `at` is the byte that comes next, `tensors` how many are announced."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at, self.tensors = data, 0, 0

    def values(self, path: Path) -> dict[str, Any]:
        """The values, from the start of the file."""
        if bytes(self._data[:4]) != b"GGUF" or self._data[4] not in (2, 3):
            raise ProblemError(f"{path} is no GGUF file of version 2 or 3, little-endian: it cannot be read.")
        self.at = 8
        self.tensors, count = self._number("Q"), self._number("Q")
        return {self._text(): self._value(self._number("I")) for _ in range(count)}

    def tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        """(name, shape, code, offset) of the next tensor; a file has the innermost dimension first."""
        name, dimensions = self._text(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        return name, shape, gguf.GGMLQuantizationType(self._number("I")), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._number(NUMBERS[kind])
        of, count = self._number("I"), self._number("Q")
        if of not in NUMBERS:
            return [self._value(of) for _ in range(count)]
        found = struct.unpack_from(f"<{count}{NUMBERS[of]}", self._data, self.at)
        self.at += struct.calcsize(f"<{count}{NUMBERS[of]}")
        return list(found)

    def _text(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self.at)
        begin, self.at = self.at + 8, self.at + 8 + length
        return str(self._data[begin : self.at], "utf-8")

    def _number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(f"<{kind}", self._data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return number
