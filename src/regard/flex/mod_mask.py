"""A `mask_mod` as a mask: recognised where it can be, else a term, else a function that is called for every pair."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.describe.mask import CallSizes, Mask, Positions
from regard.describe.mask_by_rule import Prefix
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.flex.recognise import recognised
from regard.flex.trace import Mod, element_by_element, trace


@spec
class ModMask(Mask):
    """A `mask_mod` that does more than a term can say. It has no bounds, so every tile is evaluated.

    Attributes:
        batch, heads: of the call where the function uses b or h, else 1.
    """

    fn: Callable[[Any, Any, Any, Any], Tensor]
    batch: int = 1
    heads: int = 1

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _checked(element_by_element(self.fn, b, h, q, k))

    def broadcast_shape(self) -> tuple[int, int]:
        return self.batch, self.heads

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"ModMask({parts[0]})"


def mask_of_mod(mod: Mod, sizes: CallSizes, device: torch.device) -> Mask | bool:
    """The mask of a `mask_mod` in a call; True where it keeps every pair, False where it keeps none.

    Raises:
        ProblemError: it returns something else than a bool tensor.
    """
    traced = trace(mod, "bhqk", device)
    if traced.term is None:
        return ModMask(mod, sizes.batch if "b" in traced.uses else 1, sizes.heads if "h" in traced.uses else 1)
    if traced.dtype != torch.bool:
        raise ProblemError(f"mask_mod returned {traced.dtype}: expected a bool tensor, True where the pair is kept.")
    return recognised(traced.term, sizes)


def is_opaque(mask: Mask | bool) -> bool:
    """Whether the mask is of a function that is called for every pair."""
    if isinstance(mask, bool):
        return False
    return isinstance(mask, ModMask)


def as_mask(mask: Mask | bool) -> Mask | None:
    """The mask as `attend` takes it."""
    if isinstance(mask, Mask):
        return mask
    return None if mask else Prefix(0)


def _checked(kept: object) -> Tensor:
    if isinstance(kept, Tensor) and kept.dtype == torch.bool:
        return kept
    what = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
    raise ProblemError(f"mask_mod returned {what}: expected a bool tensor, True where the pair is kept.")
