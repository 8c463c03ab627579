"""Digests of models: a file of results knows by them whether its model is the one at hand.

Elements are digested as those of masks are (`regard.describe.tensors.digest`), some GB a second.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.describe.tensors import digest


def digest_of_weights(model: nn.Module) -> str:
    """A digest of all weights, every element of them: other weights under the same name are another model.

    >>> one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    >>> digest_of_weights(one) == digest_of_weights(one), digest_of_weights(one) == digest_of_weights(other)
    (True, False)
    """
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(f"{name} ".encode())
        _add(found, weight)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    """Add a value of a state_dict to a digest: the bytes of a tensor, the parts of a container, or its text."""
    if isinstance(value, dict | tuple | list):
        is_dict = isinstance(value, dict)
        pairs = cast("dict[Any, Any]", value).items() if is_dict else enumerate(cast("Sequence[Any]", value))
        for key, each in pairs:
            found.update(f"{key} ".encode())
            _add(found, each)
    elif not isinstance(value, Tensor):
        found.update(_text(value).encode())
    else:
        shape = "" if value.is_nested else tuple(value.shape)
        found.update(f"{shape} {value.dtype} {value.layout} ".encode())
        for part in _dense_parts(value):
            found.update(f"{tuple(part.shape)} ".encode())
            found.update(digest(part))


def _dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Dense tensors that have the content of a quantised, sparse or nested one; a dense tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that is made of other tensors
        inner = cast("Sequence[str]", cast(Any, tensor).__tensor_flatten__()[0])
        return [part for name in inner for part in _dense_parts(getattr(tensor, name))]
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


NO_SETTINGS = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
"""What a config of transformers has that changes no results, or that the weights have."""


def digest_of_config(model: nn.Module) -> str:
    """A digest of what a module computes with besides its weights.

    That is the config of transformers, or else what the modules show of themselves, and their plain attributes.

    >>> one, same, other = (digest_of_config(module) for module in (nn.ReLU(), nn.ReLU(), nn.GELU()))
    >>> one == same, one == other
    (True, False)
    """
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is not None:
        text = json.dumps(_without_paths(to_dict()), sort_keys=True, default=_text)
    else:
        text = _text(model) + "".join(f"{name} {_plain_attributes(each)}" for name, each in model.named_modules())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_paths(value: Any) -> Any:
    """The settings of a config, and of those within it, that change results."""
    if isinstance(value, dict):
        pairs = {str(key): each for key, each in cast("dict[Any, Any]", value).items()}
        kept = {key: each for key, each in pairs.items() if key not in NO_SETTINGS and "attn_implementation" not in key}
        return {key: _without_paths(each) for key, each in kept.items()}
    return [_without_paths(each) for each in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else value


def _plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Numbers, flags and texts of a module, such as whether a block has skips."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    return sorted((n, x) for n, x in found.items() if n not in ("training", "backend") and not n.startswith("_"))


def _text(value: Any) -> str:
    """The repr of a value, without addresses, which another process does not have."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
