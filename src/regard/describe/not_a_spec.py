"""For error messages: what was received in place of a mask, bias or score, and what to write instead."""

import reprlib
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.spec import Spec
from regard.describe.suggestions import mask_for, mask_names


def received(given: object) -> str:
    """What was received in place of a spec, for an error message.

    >>> received([True, False]), received(len), received("causal")
    ('[True, False]', 'the function len', "the text 'causal'")
    """
    if isinstance(given, Spec):
        return f"{given!r}, which is a {_kind(given)}"
    if mask_for(type(given).__name__):
        return f"a {type(given).__name__}"
    if isinstance(given, Tensor):
        return f"a tensor {given.dtype} {list(given.shape)}"
    if isinstance(given, np.ndarray):
        return f"an array {given.dtype} {list(cast('np.ndarray[Any, Any]', given).shape)}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, str):
        return f"the text {given!r}" if mask_for(given) else repr(given)
    return f"the function {getattr(given, '__name__', given)}" if callable(given) else reprlib.repr(given)


def instead(given: object, kind: str) -> str:
    """What to write in place of the given value, which is no spec of that kind: "mask", "bias" or "score".

    >>> instead(lambda b, h, q, k: q - k < 4, "mask")
    'wrap a function of b, h, q and k as MaskFunction(f)'
    """
    if isinstance(given, type) and issubclass(given, Spec):
        return f"did you mean {given.__name__}(...)?"
    if isinstance(given, Spec) and _kind(given) in ("mask", "bias", "score"):
        return f"pass it as {_kind(given)}="
    if kind == "mask":
        return _instead_of_mask(given)
    if isinstance(given, Spec) and _kind(given) == "position":
        return "a position rotates q and k or is added to embeddings, see MultiHeadAttention(position=)"
    if kind == "score":
        return "omit it for the dot product, or see regard.scores"
    return _instead_of_mask(given) if kind == "mask" else _instead_of_bias(given)


def _instead_of_mask(given: object) -> str:
    if isinstance(given, list | tuple) and (masks := _combined(cast("list[object]", given))):
        return f"combine masks with &: {masks}"
    if name := mask_for(given if isinstance(given, str) else type(given).__name__):
        several = isinstance(given, str) and "(" not in given and len(mask_names(given)) > 1
        return f"{'combine masks with &: ' if several else ''}say {name}"
    if given is None:
        return "leave None out"
    if isinstance(given, bool):
        return "say Causal(), or None for no mask"
    if callable(given):
        return "wrap a function of b, h, q and k as MaskFunction(f)"
    tensor = "t" if isinstance(given, Tensor) else "torch.tensor(t)"
    return f"wrap a bool tensor as TensorMask({tensor}) (True keeps), a float one as bias=TensorBias({tensor})"


def _combined(given: "list[object] | tuple[object, ...]") -> str | None:
    """A list of masks as one expression; None unless each is a mask."""
    masks = [one for one in given if isinstance(one, Spec) and _kind(one) == "mask"]
    if not masks or len(masks) < len(given):
        return None
    return " & ".join(f"({one!r})" if " | " in repr(one) and len(masks) > 1 else repr(one) for one in masks)


def _instead_of_bias(given: object) -> str:
    if callable(given):
        return "for a function of b, h, q and k, subclass regard.extend.Bias (docs/extending.md)"
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        return "wrap a bool tensor (True keeps) as mask=TensorMask(t)"
    tensor = "t" if isinstance(given, Tensor) else "torch.tensor(t)"
    return f"wrap a tensor of numbers that are added to the scores as TensorBias({tensor})"


def _kind(given: Spec) -> str:
    """Which of the abstract classes it is of: "mask", "bias", "score", "position"."""
    bases = type(given).__mro__
    return bases[bases.index(Spec) - 1].__name__.lower()
