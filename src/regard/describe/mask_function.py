"""A mask given as a Python function.

Its bounds are unknown, so its schedule comes from evaluating every tile. Which of batch rows and heads the function
depends on is found by one call with tensors that record their use.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.describe.mask import CallSizes, Mask, Positions, as_tensors, wrong_kept
from regard.describe.spec import spec
from regard.describe.uses import find_uses
from regard.errors import ProblemError


@spec
class MaskFunction(Mask):
    """Any predicate `fn(b, h, q, k)` on int64 tensors of positions, broadcasting, pure.

    The function is identified by its code and by the content of all that its code reads: closure, defaults, module
    globals, attributes of objects, other functions. When any of it changes, the mask is a different mask. Objects are
    read as a whole: a function that uses `self.window` of a model reads all weights of the model in each call, so pass
    the window alone. If the code reads what cannot be followed (a generator, `eval`, an object of a C extension), each
    call makes a new schedule.

    The function has no bounds, so every tile is evaluated: 32,768 x 32,768 take seconds, once. Masks with bounds, such
    as `Causal()`, cost next to nothing. Under `torch.compile` the mask is tabulated as a `TensorMask`.

    >>> from regard import draw
    >>> print(draw(MaskFunction(lambda b, h, q, k: (q + k) % 2 == 0), 2, 2))
    █ ·
    · █
    """

    fn: Callable[[Any, Any, Any, Any], Tensor]
    batch: int = 1
    heads: int = 1

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ProblemError(
                f"MaskFunction(fn) is {type(self.fn).__name__}: expected a function fn(b, h, q, k) -> bool tensor."
            )
        if not torch.compiler.is_compiling():  # torch cannot trace `inspect`
            _check_takes_four(self.fn)

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        positions = as_tensors(b, h, q, k)
        kept = self.fn(*positions)
        if (wrong := wrong_kept(kept, *positions)) is not None:
            raise ProblemError(f"MaskFunction: fn(b, h, q, k) returned {wrong}")
        return kept

    def broadcast_shape(self) -> tuple[int, int]:
        return self.batch, self.heads

    def bind(self, sizes: CallSizes) -> Mask:
        if torch.compiler.is_compiling():  # torch cannot trace the probes; only schedules need what they find
            return self
        if not (sizes.batch and sizes.heads and sizes.queries and sizes.keys):  # no pair to probe the function with
            return self
        fn = self.fn if type(self) is MaskFunction else self.keep
        uses_batch, uses_heads = find_uses(fn, sizes.offset)
        shape = sizes.batch if uses_batch else 1, sizes.heads if uses_heads else 1
        if shape == self.broadcast_shape():  # nearly always, and every call binds its mask
            return self
        return self.with_fields(batch=shape[0], heads=shape[1])

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"MaskFunction({parts[0]})"


def _check_takes_four(fn: Callable[..., Any]) -> None:
    """Raise `ProblemError` if the signature of the function does not take b, h, q and k."""
    if inspect.isfunction(fn) and fn.__code__.co_argcount == 4 and not fn.__code__.co_kwonlyargcount:
        return  # the usual case: inspecting a signature takes as long as a small call of attend
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a compiled function without a signature
        return
    try:
        signature.bind(*"bhqk")
    except TypeError as error:
        raise ProblemError(
            f"MaskFunction(fn) is {getattr(fn, '__name__', type(fn).__name__)}{signature}, called with four arguments: "
            f"{error}. Expected fn(b, h, q, k) -> bool tensor, of batch row, head, and the positions of query and key, "
            "such as MaskFunction(lambda b, h, q, k: q - k < 4)."
        ) from None
