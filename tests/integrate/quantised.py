"""Weights quantised as torchao does it: the module stays an `nn.Linear`, and the class of its weight is another."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Quantised(Tensor):
    """int8 codes and their scale, which say that they are float32, and compute nothing but the product with them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Quantised":  # noqa: PYI034  # not valid in a static method, pyright says
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} has no {func}")


def quantise(layer: nn.Linear) -> None:
    """Put codes in the place of a weight."""
    weight = layer.weight.detach()
    scale = weight.abs().max() / 127
    layer.weight = nn.Parameter(Quantised((weight / scale).round().to(torch.int8), scale), requires_grad=False)
