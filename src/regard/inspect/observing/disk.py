"""Calls in files: a safetensors file per call, one per mask or bias that calls share, mapped into memory when read.

    000000-layer-0.safetensors   q, k, lse, and sink, v and out if there are any; layer, module and scalars
    spec-0.safetensors           the tensors of a mask or bias, and its serialized form (`Spec.serialize`)

A mask or bias is written once: all layers of T5 share one bias of [1, heads, n, n]. One with a function
(`MaskFunction`) cannot be written: it stays in memory, and another process cannot read such a folder.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.calls import Call
from regard.describe.bias import Bias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import Mask
from regard.describe.serialized import deserialize
from regard.describe.spec import Spec
from regard.errors import ProblemError
from regard.inspect.weights.lazy import Weights
from regard.torch_internals import is_mapped

SUFFIX = ".safetensors"


class Parts(NamedTuple):
    """The weights of a call; its values [batch, kv_heads, keys, v_dim] and its output, or None."""

    weights: Weights
    v: Tensor | None
    out: Tensor | None

    @classmethod
    def of(cls, call: Call, values: bool) -> "Parts":
        """The parts of a call as they are, without gradients; with `values` also its values and its output."""
        if any(is_mapped(t) for t in (call.q, call.k, call.v)):
            raise ProblemError(
                "a call inside of torch.vmap cannot be recorded: its tensors exist only while vmap maps over them. "
                "Call attend without vmap, on tensors with a batch axis."
            )
        weights = Weights.of(call)
        return cls(weights, call.v.detach(), call.out.detach()) if values else cls(weights, None, None)


class StoredCall(NamedTuple):
    """A call in a folder: its layer and module, and a function that reads it."""

    layer: int
    module: str | None
    parts: Callable[[], Parts]


class Folder:
    """A folder that calls are written to, one by one.

    Raises:
        ProblemError: safetensors is not installed, or the folder contains such files already.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("safetensors") is None:
            raise ProblemError(
                "calls are written as safetensors files: pip install safetensors, or record them on a device."
            )
        if path.is_dir() and any(path.glob("*" + SUFFIX)):
            raise ProblemError(
                f"{path} contains {SUFFIX} files already: name a new folder, so that no two runs are mixed."
            )
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._calls = path, 0
        self._specs: dict[Fingerprint, tuple[str, Spec]] = {}

    def add(self, layer: int, module: str | None, parts: Parts) -> Callable[[], Parts]:
        """Write a call, and return a function that reads it."""
        w = parts.weights
        (mask_file, mask), (bias_file, bias) = self._spec(w.mask), self._spec(w.bias)
        tensors = {"q": w.q, "k": w.k, "lse": w.lse, "sink": w.sink, "v": parts.v, "out": parts.out}
        metadata = {"layer": layer, "module": module, "scale": w.scale, "softcap": w.softcap, "offset": w.offset}
        path = self._path / f"{self._calls:06}-layer-{layer}{SUFFIX}"
        self._calls += 1
        more = {"mask": mask_file, "bias": bias_file, "starts": w.starts, "dropped": w.dropped, "has_gaps": w.has_gaps}
        _write(path, {name: t for name, t in tensors.items() if t is not None}, metadata | more)
        return partial(_read_parts, path, cast("Mask | None", mask), cast("Bias | None", bias))

    def _spec(self, spec: Spec | None) -> tuple[str | None, Spec | None]:
        """The name of the file of a mask or bias, and the mask or bias with its tensors mapped from there."""
        if spec is None:
            return None, None
        fingerprint = spec.fingerprint()
        if fingerprint not in self._specs:
            name = f"spec-{len(self._specs)}"
            self._specs[fingerprint] = name, self._write_spec(name, spec)
        return self._specs[fingerprint]

    def _write_spec(self, name: str, spec: Spec) -> Spec:
        if not is_serializable(spec):
            return spec
        tensors: list[Tensor] = []
        numbers: list[int] = []
        text = spec.serialize(tensors, numbers)
        path = self._path / (name + SUFFIX)
        _write(path, {str(i): t for i, t in enumerate(tensors)}, {"spec": text, "numbers": numbers})
        return _read_spec(path)


def read_folder(path: Path) -> list[StoredCall]:
    """The calls that were written to a folder, in order.

    Raises:
        ProblemError: there are none, or a mask or bias could not be written.
    """
    files = sorted(path.glob("*-layer-*" + SUFFIX))
    if not files:
        raise ProblemError(f"{path} contains no calls: expected a folder that `observe(..., to=folder)` wrote.")
    specs: dict[str | None, Spec | None] = {None: None}
    calls: list[StoredCall] = []
    for file in files:
        metadata = _read(file)[1]
        names = metadata["mask"], metadata["bias"]
        for name in names:
            if name not in specs:
                specs[name] = _read_spec(path / (name + SUFFIX))
        mask, bias = (specs[name] for name in names)
        read = partial(_read_parts, file, cast("Mask | None", mask), cast("Bias | None", bias))
        calls.append(StoredCall(metadata["layer"], metadata["module"], read))
    return calls


def copy_of(t: Tensor, device: torch.device | str) -> Tensor:
    """A contiguous copy without gradients."""
    return t.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def is_serializable(spec: Spec) -> bool:
    """Whether a mask or bias consists of specs, tensors and scalars alone, so that `Spec.serialize` can write it.

    >>> from regard import Causal, MaskFunction
    >>> is_serializable(Causal()), is_serializable(Causal() & MaskFunction(lambda b, h, q, k: q > k))
    (True, False)
    """
    parts = spec.parts()
    return spec.is_registered() and all(is_serializable(p) if isinstance(p, Spec) else not callable(p) for p in parts)


def _read_parts(path: Path, mask: Mask | None, bias: Bias | None) -> Parts:
    t, metadata = _read(path)
    rest = (mask, bias, metadata["scale"], metadata["softcap"], t.get("sink"), metadata["offset"])
    starts = metadata.get("starts")  # which earlier versions did not write, as what a cache dropped
    more = {"dropped": metadata.get("dropped", 0), "has_gaps": metadata.get("has_gaps", False)}
    starts = None if starts is None else tuple(starts)
    weights = Weights(t["q"], t["k"], t["lse"], *rest, starts=starts, **more)
    return Parts(weights, t.get("v"), t.get("out"))


def _read_spec(path: Path) -> Spec:
    if not path.exists():
        raise ProblemError(
            f"{path} does not exist: the mask or bias of these calls contains a function, which cannot be written. "
            "Read the calls in the process that observed them."
        )
    tensors, metadata = _read(path)
    return deserialize(metadata["spec"], [tensors[str(i)] for i in range(len(tensors))], metadata["numbers"])


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # not a dependency of regard

    # copies, since save_file refuses tensors that share memory, as k and v may
    copies = {name: copy_of(t, "cpu") for name, t in tensors.items()}
    save_file(copies, path, {"regard": json.dumps(metadata)})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, mapped, and its metadata."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["regard"])
    except FileNotFoundError:
        raise ProblemError(
            f"{path} does not exist any more: observe(to='disk') removes its files when its block ends. Read them "
            "within the block, or name a folder: observe(to=folder)."
        ) from None
