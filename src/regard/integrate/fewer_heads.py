"""Which checkpoints can have fewer key heads, and which rows of which of their tensors those are.

```
Llama, Qwen, Gemma ...   self_attn.k_proj, self_attn.v_proj    rows: head after head
Phi-3                    self_attn.qkv_proj                    rows: all queries, all keys, all values
GPT-NeoX                 attention.query_key_value             rows: query, key and value of each head; `gpt_neox.py`
```
"""

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.integrate import gpt_neox
from regard.integrate.weights import Weights, read_json
from regard.nn.share_heads import How, check_sharing, shared_rows

SEPARATE = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral",
    "nemotron", "olmo", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
"""Model types whose layers have `self_attn.k_proj` and `self_attn.v_proj`, heads in their rows."""
FUSED = ("phi3",)
"""Model types whose layers have `self_attn.qkv_proj`: the rows of queries, then of keys, then of values."""
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "youtu")
SUPPORTED = (*SEPARATE, *FUSED, "gpt_neox")

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of stored numbers that can be pooled, as safetensors calls them, and their bytes."""
PROJECTION = re.compile(r"(.*\blayers\.)(\d+)\.self_attn\.(k|v|qkv)_proj\.(weight|bias)")
KINDS = {"k": "key", "v": "value"}

Rewriting = Callable[[str], dict[str, Tensor]]
"""Gives for the name of a tensor those that it becomes, by their names."""


# ---- the checkpoint -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A checkpoint that was read and understood, and what is asked of it.

    Attributes:
        folder: where it lies.
        said: its config.json.
        config: the same as transformers reads it, with what is not said there.
        into: key heads of the result.
        how: a group of heads becomes one.
    """

    folder: Path
    said: dict[str, Any]
    config: Any
    into: int
    how: How

    @property
    def kv_heads(self) -> int:
        """Key heads of the checkpoint."""
        return getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Rows of a head."""
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def kind(self) -> str:
        """Its model type."""
        return self.config.model_type


def subject_of(folder: Path, into: int, how: How) -> Subject:
    """The checkpoint in a folder. Raises `ProblemError` with the reason if its heads cannot become so few."""
    if not (folder / "config.json").is_file():
        raise ProblemError(f"{folder} is no checkpoint: it has no config.json (what save_pretrained writes).")
    said = read_json(folder / "config.json")
    kind = said.get("model_type")
    if kind in LATENT or said.get("kv_lora_rank") is not None:
        raise ProblemError(
            f"{folder} is a {kind} with latent attention (MLA): all heads share one latent per token already, there is "
            "nothing to pool."
        )
    if kind not in SUPPORTED:
        raise ProblemError(f"{folder} is of model_type {kind!r}: expected one of {', '.join(sorted(SUPPORTED))}.")
    if said.get("quantization_config") is not None:
        method = said["quantization_config"].get("quant_method", "quantised")
        raise ProblemError(
            f"{folder} is quantised ({method}): heads of codes have no mean. Convert what it was made of."
        )
    subject = Subject(folder, said, _config(folder), into, how)
    check_sharing(subject.kv_heads, into, how)
    if into == subject.kv_heads and kind != "gpt_neox":
        raise ProblemError(f"{folder} has {into} key heads already: there is nothing to convert.")
    return subject


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # noqa: BLE001  whatever transformers has against it
        raise ProblemError(f"{folder / 'config.json'} cannot be read: {' '.join(str(error).split())[:160]}.") from None


def config_of(subject: Subject, dtype: torch.dtype | None) -> dict[str, Any]:
    """The config.json of the result."""
    if subject.kind == "gpt_neox":
        config = gpt_neox.config_of(subject.config, subject.into)
    else:
        config = subject.said | {"num_key_value_heads": subject.into}
    if dtype is not None:
        config.pop("torch_dtype", None)  # what it was called before transformers 5
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


# ---- the heads ------------------------------------------------------------------------------------------------------


class Sharing:
    """Makes fewer heads of the rows that it is given, and keeps how far they lie from what they were."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self._kv_heads, self._into, self._seed = subject.kv_heads, subject.into, seed
        self._how: How = subject.how
        self._squares: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def __call__(self, layer: int, kind: str, part: str, rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {layer} {kind} {part}".encode()))
        made = shared_rows(rows, self._kv_heads, self._into, self._how, generator)
        before = rows.double().unflatten(0, (self._into, self._kv_heads // self._into, -1))
        gone = before - made.double().unflatten(0, (self._into, 1, -1))
        self._squares[kind, layer].append(torch.stack([gone.square().sum(), before.square().sum()]))
        return made

    def distances(self, kind: str) -> tuple[float, ...]:
        """Per layer, `|W - repeat(W')| / |W|` of "key" or "value"."""
        sums = [torch.stack(found).sum(0).tolist() for (of, _), found in sorted(self._squares.items()) if of == kind]
        return tuple(math.sqrt(gone / all_) if all_ else 0.0 for gone, all_ in sums)


def rewriting_of(subject: Subject, weights: Weights, share: Sharing) -> Rewriting:
    """What rewrites this checkpoint, once it is found that all that it needs is there and of the right shape."""
    if subject.kind == "gpt_neox":
        gpt_neox.check(weights, subject.config.num_hidden_layers)
        _check_rows(subject, weights, {n for n in weights.names if f".{gpt_neox.FUSED}." in n}, 3 * subject.kv_heads)
        return gpt_neox.Rewriting(subject.config, weights, share)
    _check_projections(subject, weights)

    def rewritten(name: str) -> dict[str, Tensor]:
        tensor, found = weights.read(name), PROJECTION.fullmatch(name)
        if not found:
            return {name: tensor}
        layer, letter, part = int(found[2]), found[3], found[4]
        if letter in KINDS:
            return {name: share(layer, KINDS[letter], part, tensor)}
        shared = subject.kv_heads * subject.head_dim
        q, k, v = tensor.split([tensor.shape[0] - 2 * shared, shared, shared])
        return {name: torch.cat([q, share(layer, "key", part, k), share(layer, "value", part, v)])}

    return rewritten


def _check_projections(subject: Subject, weights: Weights) -> None:
    """Raise `ProblemError` unless every layer has keys and values, of the size that config.json says."""
    letters = ("qkv",) if subject.kind in FUSED else ("k", "v")
    found = {name: match for name in weights.names if (match := PROJECTION.fullmatch(name))}
    there = {(int(match[2]), match[3]) for match in found.values() if match[4] == "weight"}
    for layer in range(subject.config.num_hidden_layers):
        for letter in letters:
            if (layer, letter) not in there:
                raise ProblemError(f"{subject.folder} lacks self_attn.{letter}_proj.weight of layer {layer}.")
    heads = subject.config.num_attention_heads + 2 * subject.kv_heads if subject.kind in FUSED else subject.kv_heads
    _check_rows(subject, weights, found.keys(), heads)
    for name in weights.names:
        normed = re.search(r"\.self_attn\.\w*k_(?:layer)?norm\b(\.norms\b)?", name)
        if normed and (normed[1] or weights.shape(name) != (subject.head_dim,)):
            raise ProblemError(
                f"{name} has shape {list(weights.shape(name))}: a norm of keys that is not the same for all heads "
                f"(expected [{subject.head_dim}]) leaves them no common mean."
            )


def _check_rows(subject: Subject, weights: Weights, names: Iterable[str], heads: int) -> None:
    for name in sorted(names):
        shape, kind = weights.shape(name), weights.dtype(name)
        expected = [heads * subject.head_dim, subject.config.hidden_size][: 1 if name.endswith("bias") else 2]
        if list(shape) != expected:
            raise ProblemError(f"{name} has shape {list(shape)}: by config.json expected {expected}.")
        if kind not in FLOATS:
            raise ProblemError(f"{name} holds {kind}: expected floats; heads of codes have no mean.")


def itemsize_of(weights: Weights) -> int:
    """Bytes of a number in the projections of keys and values."""
    names = (name for name in weights.names if PROJECTION.fullmatch(name) or f".{gpt_neox.FUSED}." in name)
    return min(FLOATS[weights.dtype(name)] for name in names)
