"""The weights of a checkpoint as transformers writes it: one safetensors file, or shards with an index.

```
model.safetensors                                                          one file
model.safetensors.index.json  {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors", ...}}
```
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import ProblemError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """The tensors of a checkpoint, by name. Files are opened one at a time, for what is read of them.

    Attributes:
        files: the names of the tensors in each file, in the order of the files.
        index: what the index says besides where each tensor is; None for a single file.

    Raises:
        ProblemError: there are none in safetensors, a file that the index names is missing, broken, or lacks a tensor.
    """

    def __init__(self, folder: Path) -> None:
        index = _index(folder)
        self.index = None if index is None else {key: said for key, said in index.items() if key != "weight_map"}
        self._folder, self._file_of = folder, {} if index is None else cast("dict[str, str]", index["weight_map"])
        self._heads: dict[str, tuple[tuple[int, ...], str]] = {}
        self._metadata: dict[str, dict[str, str] | None] = {}
        self._open: tuple[str, Any] | None = None
        for file in [SINGLE] if index is None else dict.fromkeys(self._file_of.values()):
            self._look(file)
        self.files: dict[str, list[str]] = {file: [] for file in self._metadata}
        for name, file in self._file_of.items():
            self.files[file].append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        """A tensor."""
        file = self._file_of[name]
        if self._open is None or self._open[0] != file:
            self._open = (file, _handle(self._folder, file))
        return self._open[1].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return self._heads[name][0]

    def dtype(self, name: str) -> str:
        """The type of a tensor as safetensors calls it: "F32", "BF16", "I8" ..."""
        return self._heads[name][1]

    def metadata(self, file: str) -> dict[str, str] | None:
        """What stands in the head of a file besides the tensors."""
        return self._metadata[file]

    def _look(self, file: str) -> None:
        """Read the head of a file: which tensors it has, and how they are."""
        handle = _handle(self._folder, file)
        held = list(handle.keys())
        self._metadata[file] = handle.metadata()
        if self.index is None:
            self._file_of |= dict.fromkeys(held, file)
        wanted = {name for name, place in self._file_of.items() if place == file}
        if lacking := sorted(wanted - set(held)):
            raise ProblemError(f"{self._folder / file} lacks {lacking[0]}, which {INDEX} says is in it.")
        for name in wanted:
            part = handle.get_slice(name)
            self._heads[name] = (tuple(part.get_shape()), part.get_dtype())


def _index(folder: Path) -> dict[str, Any] | None:
    """The index of shards, None where all is in a single file.

    Raises:
        ProblemError: there are no weights in safetensors, or the index is broken.
    """
    if (folder / SINGLE).is_file():  # which transformers reads, whatever else is there
        return None
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = index.get("weight_map")
        fine = isinstance(names, dict) and names and all(Path(str(place)).name == place for place in names.values())
        if not fine:
            raise ProblemError(f"{folder / INDEX} has no weight_map of tensors to files beside it: it is broken.")
        return index
    if others := sorted(path.name for kind in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(kind)):
        raise ProblemError(
            f"{folder} has its weights in {others[0]} and not in safetensors: load it with transformers and write it "
            "with save_pretrained first."
        )
    raise ProblemError(f"{folder} has no weights: expected {SINGLE}, or shards with {INDEX}.")


def _handle(folder: Path, file: str) -> Any:
    try:
        return safe_open(folder / file, framework="pt")
    except FileNotFoundError as error:
        if (folder / file).is_file():  # safetensors says so of a file that it may not read
            raise ProblemError(f"{folder / file} cannot be read: permission denied.") from error
        raise ProblemError(f"{folder} lacks {file}, which {INDEX} names.") from None
    except (SafetensorError, OSError) as error:
        raise ProblemError(f"{folder / file} cannot be read: {' '.join(str(error).split())}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises `ProblemError` where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProblemError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise ProblemError(f"{path} holds no JSON object.")
    return found


class Shards:
    """Writes tensors as safetensors files into a folder, and then the index, if there was one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self.written = 0
        """Bytes of the files so far."""

    def write(self, file: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
        """One file of tensors; none if there are no tensors."""
        if not tensors:
            return
        path = self._folder / file
        path.touch()
        mode = path.stat().st_mode  # as every new file has it here: safetensors would keep others from reading it
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        path.chmod(mode)
        self.written += path.stat().st_size
        self._file_of |= dict.fromkeys(tensors, file)
        self._counts["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        self._counts["total_parameters"] += sum(tensor.numel() for tensor in tensors.values())

    def finish(self, index: dict[str, Any] | None) -> None:
        """The index, with what the old one said and the new sizes; nothing where None."""
        if index is None:
            return
        said = {**(index.get("metadata") or {})}
        said |= {name: count for name, count in self._counts.items() if name in said or name == "total_size"}
        text = json.dumps({**index, "metadata": said, "weight_map": dict(sorted(self._file_of.items()))}, indent=2)
        (self._folder / INDEX).write_text(f"{text}\n", encoding="utf-8")
