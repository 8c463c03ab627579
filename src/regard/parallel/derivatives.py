"""Derivatives that attention over ranks refuses: only `backward` sends what other ranks need."""

from collections.abc import Iterable

from torch import Tensor

from regard.describe.tensors import has_tangent
from regard.errors import RefusalError
from regard.torch_internals import current_func_transform


def check_untransformed(function: str) -> None:
    """Raise `RefusalError` inside of `torch.func`, whose transforms end where tensors are sent to other ranks."""
    if current_func_transform() is not None:
        raise RefusalError(
            f"{function} inside of torch.func (grad, vmap, jvp ...), which does not follow what is sent to other "
            "ranks: differentiate ring_attend or ulysses_attend with backward() or torch.autograd.grad, pass what vmap "
            "would map over as batch rows, or gather q, k and v on one rank and call attend."
        )


def check_tangents(function: str, tensors: Iterable[Tensor]) -> None:
    """Raise `RefusalError` if a tensor has a tangent of forward-mode differentiation."""
    if any(map(has_tangent, tensors)):
        raise no_tangents(function)


def no_tangents(function: str) -> RefusalError:
    """The error for tensors with tangents, whose values alone are sent."""
    return RefusalError(
        f"{function} got a tensor with a tangent (forward-mode differentiation), and tangents are not sent to other "
        "ranks: differentiate ring_attend or ulysses_attend with backward(), or gather q, k and v on one rank and call "
        "attend."
    )
