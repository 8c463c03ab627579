"""For error messages: what was received in place of a mask, bias or score, and what to write instead."""

import reprlib
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.spec import Spec
from regard.describe.suggestions import mask_for, mask_names
from regard.errors import ProblemError


def received(value: object) -> str:
    """What was received in place of a spec, for an error message.

    >>> received([True, False]), received(len), received("causal")
    ('[True, False]', 'the function len', "the text 'causal'")
    """
    if isinstance(value, Spec):
        return f"{value!r}, which is a {_kind(value)}"
    if mask_for(type(value).__name__):
        return f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(cast('np.ndarray[Any, Any]', value).shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"the text {value!r}" if mask_for(value) else repr(value)
    if callable(value):  # the text of a module has all its layers
        return f"the function {value.__name__}" if hasattr(value, "__name__") else f"a {type(value).__name__}"
    return reprlib.repr(value)


def instead(value: object, kind: str) -> str:
    """What to write in place of the given value, which is no spec of that kind: "mask", "bias" or "score".

    >>> instead(lambda b, h, q, k: q - k < 4, "mask")
    'wrap a function of b, h, q and k as MaskFunction(f)'
    """
    if isinstance(value, type) and issubclass(value, Spec):
        return f"did you mean {value.__name__}(...)?"
    if isinstance(value, Spec) and _kind(value) in ("mask", "bias", "score"):
        return f"pass it as {_kind(value)}="
    if isinstance(value, list | tuple) and (found := _listed(cast("list[object]", value), kind)):
        return found
    if kind == "mask":
        return _instead_of_mask(value)
    if isinstance(value, Spec) and _kind(value) == "position":
        return "a position rotates q and k or is added to embeddings, see MultiHeadAttention(position=)"
    if kind == "score":
        return "omit it for the dot product, or see regard.scores"
    return _instead_of_mask(value) if kind == "mask" else _instead_of_bias(value)


def unregistered(name: str, given: Spec) -> ProblemError:
    """The error of a spec that is or contains one of a class without `@spec`. `name` says what takes it."""
    kind = cast("type[Spec]", given.unregistered())
    return ProblemError(
        f"{name} is or contains {kind.__name__}, a class that is not registered: decorate it with @spec "
        "(regard.extend.spec)."
    )


def _listed(value: "list[object] | tuple[object, ...]", kind: str) -> str | None:
    """What to write in place of a list of masks, or of biases; None for any other list."""
    for each, operator, verb in (("mask", "&", "combine masks with"), ("bias", "+", "add biases with")):
        specs = [one for one in value if isinstance(one, Spec) and _kind(one) == each]
        if specs and len(specs) == len(value):
            shown = (f"({one!r})" if " | " in repr(one) and len(specs) > 1 else repr(one) for one in specs)
            return f"{verb} {operator}: {'' if each == kind else f'{each}='}{f' {operator} '.join(shown)}"
    return None


def _instead_of_mask(value: object) -> str:
    if name := mask_for(value if isinstance(value, str) else type(value).__name__):
        several = isinstance(value, str) and "(" not in value and len(mask_names(value)) > 1
        return f"{'combine masks with &: ' if several else ''}say {name}"
    if value is None:
        return "leave None out"
    if isinstance(value, bool):
        return "say Causal(), or None for no mask"
    if hasattr(value, "keep"):
        return "subclass regard.extend.Mask, with @spec (docs/extending.md)"
    if callable(value):
        return "wrap a function of b, h, q and k as MaskFunction(f)"
    if not _is_like_tensor(value):
        return "masks are Causal(), Window(n), TensorMask(t) and others, combined with & | ~"
    tensor = "t" if isinstance(value, Tensor) else "torch.tensor(t)"
    return f"wrap a bool tensor as TensorMask({tensor}) (True keeps), a float one as bias=TensorBias({tensor})"


def _instead_of_bias(value: object) -> str:
    if callable(getattr(value, "value", None)):
        return "subclass regard.extend.Bias, with @spec (docs/extending.md)"
    if callable(value):
        return "for a function of b, h, q and k, subclass regard.extend.Bias (docs/extending.md)"
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return "wrap a bool tensor (True keeps) as mask=TensorMask(t)"
    if isinstance(value, str) and (name := mask_for(value)):
        return f"pass a mask as mask={name}"
    if not _is_like_tensor(value):
        return "biases are Alibi(heads), T5Bias(table) and TensorBias(t), added with +"
    tensor = "t" if isinstance(value, Tensor) else "torch.tensor(t)"
    return f"wrap a tensor of numbers that are added to the scores as TensorBias({tensor})"


def _is_like_tensor(value: object) -> bool:
    """Whether `torch.tensor` may make a tensor of it that has axes."""
    return isinstance(value, Tensor | np.ndarray | list | tuple) or hasattr(value, "__array__")


def _kind(value: Spec) -> str:
    """Which of the abstract classes it is of: "mask", "bias", "score", "position"."""
    bases = type(value).__mro__
    return bases[bases.index(Spec) - 1].__name__.lower()
