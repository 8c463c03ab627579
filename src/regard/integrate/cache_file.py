"""A model's cache as a safetensors file: written whole or not at all, and checked when it is loaded.

```
tokens          int64 [batch, tokens]: the ids of the tokens in the cache
00001 ...       keys and values of the layers, codes as codes
metadata        the objects with these tensors (`cache_tree.py`), the model's name and config, digests of its weights
                and of everything
```

Reading the file runs no code in it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.atomic_write import atomic_write
from regard.cache.store import describe_tensor
from regard.errors import ProblemError
from regard.integrate.cache_tree import Reader, Writer

FORMAT, VERSION = "regard cache", "1"
"""Increased when attributes of caches change their names or meaning."""

PASSING = {
    "architectures", "dtype", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Fields of a config that do not affect keys and values."""

HEADER_BYTES = 100_000_000
"""The longest header of a safetensors file."""

SAMPLES = 16
"""Elements of each weight that identify the weights of a model."""


def write_cache(
    path: str | os.PathLike[str], state: object, config: Any, model: nn.Module | None, tokens: Tensor
) -> None:
    """Write the state of a cache to a file.

    Args:
        path: of the file; a saved cache that is there is replaced.
        state: what `read_cache` returns: objects of regard's caches, options and plain values.
        config: of the model.
        model: None: its weights are not known, and not compared.
        tokens: int64 [batch, tokens].

    Raises:
        ProblemError: no such folder, one that cannot be written to, or a file is there that is no saved cache.
        RefusalError: an object in it is not regard's.
    """
    target = Path(path).resolve()  # a link stays, the file that it leads to is replaced
    _check_target(target)
    writer = Writer()
    text = json.dumps(writer.write(state))
    tensors = writer.tensors | {"tokens": tokens.cpu().contiguous()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": _name_of(config),
        "config": json.dumps(_fields(config), sort_keys=True, default=str),
        "weights": "" if model is None else _weights(model),
        "state": text,
    }
    metadata["digest"] = _digest(metadata, tensors)
    _put(target, lambda part: save_file(tensors, part, metadata))


def read_cache(
    path: str | os.PathLike[str], config: Any, model: nn.Module | None, device: torch.device
) -> tuple[Any, Tensor]:
    """The state that `write_cache` wrote, on a device, and the ids of its tokens.

    Raises:
        ProblemError: no such file, one that is damaged or of something else, or that is of another model.
    """
    metadata, tensors = _open(Path(path))
    if metadata.get("digest") != _digest({name: metadata[name] for name in metadata if name != "digest"}, tensors):
        raise ProblemError(f"{path} is damaged: its content is not what was written. Save the cache again.")
    _check_model(path, metadata, config, model)
    tokens = tensors.pop("tokens").clone()
    try:
        return Reader(tensors, device).read(json.loads(metadata["state"])), tokens
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"{path} was not written by this regard ({error}): save the cache again.") from error


def ids_of(tokens: object) -> Tensor:
    """Token ids as int64 [batch, tokens]."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim not in (1, 2):
        what = describe_tensor(tokens) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ProblemError(f"tokens are {what}: expected the ids of the text, a tensor of integers [batch, tokens].")
    return (tokens if tokens.ndim == 2 else tokens[None]).long()


def check_ids(path: str | os.PathLike[str], ids: Tensor, text: Tensor) -> None:
    """Raise `ProblemError` unless a text begins with the tokens of a file."""
    count = ids.shape[1]
    if len(text) != len(ids) or text.shape[1] < count:
        raise ProblemError(
            f"tokens are {list(text.shape)}, and {path} has tokens {list(ids.shape)}: expected a text that begins "
            "with those."
        )
    other = (text[:, :count].cpu() != ids).nonzero()
    if len(other):
        row, at = other[0].tolist()
        raise ProblemError(
            f"tokens are not those of {path}: at {at} of row {row} it has {int(ids[row, at])}, and the text has "
            f"{int(text[row, at])}. Compute the cache again."
        )


def _open(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ProblemError(f"{path} is no file: expected one that cache.save(path, tokens) wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ProblemError(f"{path} is damaged, or no safetensors file: {error}. Save the cache again.") from error
    if metadata.get("format") != FORMAT or "tokens" not in tensors:
        raise ProblemError(f"{path} holds no cache: expected a file that cache.save(path, tokens) wrote.")
    if metadata.get("version") != VERSION:
        raise ProblemError(
            f"{path} is of version {metadata.get('version')} and this regard reads {VERSION}: save the cache again."
        )
    return metadata, tensors


def _check_model(path: str | os.PathLike[str], metadata: dict[str, str], config: Any, model: nn.Module | None) -> None:
    theirs = json.loads(metadata["config"])
    ours = json.loads(json.dumps(_fields(config), default=str))
    other = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    if other:
        what = ", ".join(f"{name} {theirs.get(name)!r} and not {ours.get(name)!r}" for name in other[:3])
        raise ProblemError(
            f"{path} is the cache of {metadata['model']}, and the model is {_name_of(config)}: it has {what}. Load it "
            "with the model that it was made with."
        )
    if metadata["weights"] and model is not None and metadata["weights"] != _weights(model):
        raise ProblemError(
            f"{path} is the cache of {metadata['model']} with other weights: its keys and values are not those of this "
            "model. Compute it again from its tokens."
        )


def _name_of(config: Any) -> str:
    name = getattr(config, "_name_or_path", "")
    return f"{name} ({config.model_type})" if name else str(config.model_type)


def _fields(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()
    return {name: value for name, value in fields.items() if name not in PASSING and not name.startswith("_")}


def _weights(model: nn.Module) -> str:
    """A digest of a few elements of each weight; empty where some are not in memory."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.is_meta:
            return ""
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES]
        found.update(name.encode())
        found.update(_content(some))
    return found.hexdigest()


def _digest(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(_content(tensor))
    return found.hexdigest()


def _content(tensor: Tensor) -> Any:
    return memoryview(cast(Any, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()))


def _check_target(target: Path) -> None:
    if target.is_dir() or not target.parent.is_dir():
        raise ProblemError(f"{target} cannot be written: expected a file in a folder that is there.")
    if target.is_file() and target.stat().st_size and not _is_cache(target):
        raise ProblemError(
            f"{target} is there, and is no cache that regard saved: name another file, or remove that one first."
        )


def _is_cache(path: Path) -> bool:
    """Whether a file's header says that it is a saved cache. The rest may be damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return f'"format":"{FORMAT}"'.encode() in file.read(min(length, HEADER_BYTES))


def _put(target: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside `target`, flush it to the disk, and rename it; an error leaves the old file as it was."""
    try:
        with atomic_write(target) as part:
            write(part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise ProblemError(f"{target} cannot be written: {error}.") from error
