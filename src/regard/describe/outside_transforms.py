"""Masks inside `torch.func`: read as outside of it, for a mask is neither differentiated nor mapped over.

Outside of vmap, a tensor that it maps over has no elements. An operator that reads some raises an error of one of many
kinds, or ends the process. So it is not called.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.errors import RegardError
from regard.torch_internals import ignore_func_transforms, is_mapped_at, transform_depth

OF_SIZES = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point)
"""Functions that read no elements; attributes, such as `shape`, do not either."""


@contextmanager
def outside_transforms(refusal: Callable[[], RegardError]) -> Generator[None]:
    """A context in which functions are called as outside of `torch.func`.

    Raises:
        RegardError: `refusal()`, where a function of torch would read a tensor that a `torch.vmap` around the context
            maps over. What is called inside may use vmap itself.
    """
    depth = transform_depth()
    with ignore_func_transforms(), _Refusing(refusal, depth) if depth else nullcontext():
        yield


class _Refusing(TorchFunctionMode):
    """Functions that would read a tensor that a vmap of at most this depth maps over raise `refusal()`."""

    def __init__(self, refusal: Callable[[], RegardError], depth: int) -> None:
        super().__init__()
        self._refusal, self._depth = refusal, depth

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        reads = getattr(func, "__name__", "") != "__get__" and func not in OF_SIZES
        if reads and self._is_mapped((*args, *options.values())):
            raise self._refusal()
        return func(*args, **options)

    def _is_mapped(self, argument: object) -> bool:
        """Whether it is such a tensor, or a list or tuple with one, as indices are."""
        if isinstance(argument, list | tuple):
            return any(map(self._is_mapped, argument))
        return isinstance(argument, Tensor) and is_mapped_at(self._depth, argument)
