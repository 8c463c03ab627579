"""Calls in files: a safetensors file per call, one per word that calls share, mapped into memory when they are read.

    000000-layer-0.safetensors   q, k, lse, and sink, v and out where there are such; layer, module and numbers
    word-0.safetensors           the tensors of a mask or bias, and its spelling (`Spec.serialize`)

A spec is written once: all layers of T5 share one bias of [1, heads, n, n]. A spec with a function (`MaskFunction`)
cannot be written: it stays in memory, and such a folder cannot be read by another process.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.spec import Fingerprint, Spec, deserialize
from regard.errors import ProblemError
from regard.inspect.observing.parts import Parts, copy_of, is_serializable
from regard.inspect.weights.lazy import Weights

ENDING = ".safetensors"


class Folder:
    """A folder that calls are written to, one by one.

    Raises:
        ProblemError: safetensors is not installed, or the folder holds such files already.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("safetensors") is None:
            raise ProblemError(
                "calls are spilled as safetensors files: pip install safetensors, or keep them on a device."
            )
        if path.is_dir() and any(path.glob("*" + ENDING)):
            raise ProblemError(
                f"{path} holds {ENDING} files already: name a new folder, so that no two runs are mixed."
            )
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._calls = path, 0
        self._words: dict[Fingerprint, tuple[str, Spec]] = {}

    def add(self, layer: int, module: str | None, parts: Parts) -> Callable[[], Parts]:
        """Write a call; what is returned reads it."""
        w = parts.weights
        (mask_file, mask), (bias_file, bias) = self._word(w.mask), self._word(w.bias)
        said = {"layer": layer, "module": module, "scale": w.scale, "softcap": w.softcap, "offset": w.offset}
        tensors = {"q": w.q, "k": w.k, "lse": w.lse, "sink": w.sink, "v": parts.v, "out": parts.out}
        path = self._path / f"{self._calls:06}-layer-{layer}{ENDING}"
        self._calls += 1
        _write(
            path,
            {name: t for name, t in tensors.items() if t is not None},
            said | {"mask": mask_file, "bias": bias_file},
        )
        return partial(_read_parts, path, cast("Mask | None", mask), cast("Bias | None", bias))

    def _word(self, word: Spec | None) -> tuple[str | None, Spec | None]:
        """The name of a word's file, and the word with its tensors mapped from there."""
        if word is None:
            return None, None
        fingerprint = word.fingerprint()
        if fingerprint not in self._words:
            name = f"word-{len(self._words)}"
            self._words[fingerprint] = name, self._written(name, word)
        return self._words[fingerprint]

    def _written(self, name: str, word: Spec) -> Spec:
        if not is_serializable(word):
            return word
        tensors: list[Tensor] = []
        numbers: list[int] = []
        text = word.serialize(tensors, numbers)
        path = self._path / (name + ENDING)
        _write(path, {str(i): t for i, t in enumerate(tensors)}, {"word": text, "numbers": numbers})
        return _read_word(path)


@dataclass(frozen=True)
class Filed:
    """A call that a folder holds."""

    layer: int
    module: str | None
    parts: Callable[[], Parts]


def read_folder(path: Path) -> list[Filed]:
    """The calls that were written to a folder, in order.

    Raises:
        ProblemError: there are none, or one's mask or bias could not be written.
    """
    files = sorted(path.glob("*-layer-*" + ENDING))
    if not files:
        raise ProblemError(f"{path} holds no calls: expected a folder that `observe(..., to=folder)` wrote.")
    words: dict[str, Spec] = {}
    calls: list[Filed] = []
    for file in files:
        said = _read(file)[1]
        named = [said[kind] for kind in ("mask", "bias")]
        for name in named:
            if name is not None and name not in words:
                words[name] = _read_word(path / (name + ENDING))
        mask, bias = (None if name is None else words[name] for name in named)
        read = partial(_read_parts, file, cast("Mask | None", mask), cast("Bias | None", bias))
        calls.append(Filed(said["layer"], said["module"], read))
    return calls


def _read_parts(path: Path, mask: Mask | None, bias: Bias | None) -> Parts:
    t, said = _read(path)
    words = (mask, bias, said["scale"], said["softcap"], t.get("sink"), said["offset"])
    return Parts(Weights(t["q"], t["k"], t["lse"], *words), t.get("v"), t.get("out"))


def _read_word(path: Path) -> Spec:
    if not path.exists():
        raise ProblemError(
            f"{path} does not exist: the mask or bias of these calls holds a function, which cannot be written. Read "
            "the calls in the process that observed them."
        )
    tensors, said = _read(path)
    return deserialize(said["word"], [tensors[str(i)] for i in range(len(tensors))], said["numbers"])


def _write(path: Path, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # not among what regard needs

    # copies, as two names of one memory (k and v of an example) could not be written
    whole = {name: copy_of(t, "cpu") for name, t in tensors.items()}
    save_file(whole, path, {"regard": json.dumps(said)})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, mapped, and what was said beside them."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["regard"])
    except FileNotFoundError:
        raise ProblemError(
            f"{path} is gone: what observe(to='disk') spills is there until its block ends. Read it within, or name "
            "a folder: observe(to=folder)."
        ) from None
