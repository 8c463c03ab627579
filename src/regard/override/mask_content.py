"""What an attn_mask hides, read from its elements, so that hidden tiles are skipped.

Programs give masks as tensors: of bools, or of floats that are added, with -inf (or about the least number of the
dtype) for a hidden pair and 0, or a bias such as ALiBi, for a visible one. regard skips what such a mask hides, and
needs a schedule for that, which takes 1 to 2 ms for a mask that it did not see before. A model gives each batch a new
mask and uses it in every layer. So a mask, known by a digest of its content, is at first added to the scores, as torch
does; once calls with it have had the work of 10 ms, it is read, and its hidden tiles are skipped from then on.

A checkpoint runs a call twice and compares what both save for the backward pass. There the call alone decides, not the
calls before it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.describe.tensors import content_key, is_without_data
from regard.lru_cache import LRUCache
from regard.torch_internals import dispatch_modes, in_checkpoint

READ_AFTER = 100_000_000
"""Multiply-adds of `query @ key^T` of all calls with a mask, from which it is read: 10 ms of torch's kernel, 1 thread.

To read it takes as long as 10 to 20 million of these. Where an encoder has padded batches of 8 x 48 tokens, 4 heads and
2 to 12 layers, a new mask for each batch made a call 1.8 to 4.8 times as long when it was read at its second call.
"""

READ_AT_ONCE = 20_000_000
"""The same of one call in a checkpoint, from which its mask is read: as long as reading takes."""

HIDDEN = -1e30
"""What is added to a score that must get no weight: -inf, or about the least number of float32 and bfloat16."""

LARGE = 1 << 20
"""Elements of a float mask from which a sample decides whether it is read: reading them takes 0.2 ms and more."""

WORTH = 16
"""A bias is read where it hides at least 1 of this number of pairs."""


class Content(NamedTuple):
    """What an attn_mask says.

    Attributes:
        keeps: bool, True for a visible pair; None if all are.
        is_added: whether the mask is added to the scores as well.
    """

    keeps: Tensor | None
    is_added: bool


_ADDED = Content(None, True)

_seen: LRUCache[object, Content | int] = LRUCache(
    entries=256, nbytes=64 << 20, size=lambda x: 0 if isinstance(x, int) or x.keeps is None else x.keeps.nbytes
)
"""Masks by content: what `_read` gave; before that, the multiply-adds of the calls with it."""


def readable(mask: Tensor | None, products: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What the mask hides, as bools, and what is added to the scores; None for nothing.

    Args:
        mask: bool (True keeps) or float (added), or None.
        products: multiply-adds of `query @ key^T`.
        dtype: of the query.
    """
    if mask is None:
        return None, None
    if is_without_data(mask) or torch.compiler.is_compiling() or dispatch_modes():
        # a mode of a selective checkpoint keeps the results of operators: there are as many in its second run
        return (mask, None) if mask.dtype == torch.bool else (None, mask)
    if not _may_hide(mask):
        return None, mask
    found = _found(mask, products)
    if found is None:
        return None, _added(mask, dtype)
    return found.keeps, mask if found.is_added or mask.requires_grad else None


def _found(mask: Tensor, products: int) -> Content | None:
    """The content of the mask; None before it is read."""
    at_once = in_checkpoint()
    if at_once and products < READ_AT_ONCE:
        return None
    key = content_key(mask)
    found = _seen.get(key) or 0
    if isinstance(found, int):
        products += found
        found = _read(mask) if at_once or products >= READ_AFTER else products
        _seen.put(key, found)
    return None if isinstance(found, int) else found


def _may_hide(mask: Tensor) -> bool:
    """Whether a sample of the mask hides enough; a bias that hides nothing then costs no digest in each call."""
    if mask.dtype == torch.bool or mask.numel() < LARGE or mask.ndim < 2:
        return True
    with torch.no_grad():
        sample = mask[..., :: max(1, mask.shape[-2] // 64), :: max(1, mask.shape[-1] // 64)] <= HIDDEN
        return int(sample.sum()) * WORTH >= sample.numel()


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers that are added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), -torch.inf)


@torch.inference_mode(False)
@torch.no_grad()
def _read(mask: Tensor) -> Content:
    """The pairs that the mask keeps, and whether it has other numbers than 0 and those that hide.

    Made outside of inference mode, as a later call may save it for its backward pass.
    """
    if mask.dtype == torch.bool:
        return Content(_of_one_head(mask).clone(), is_added=False)
    hides = mask <= HIDDEN
    is_added = not bool((hides | (mask == 0)).all())
    infinite = torch.equal(hides, torch.isneginf(mask))
    if is_added and int(hides.sum()) * WORTH < hides.numel():
        return _ADDED
    keeps = _of_one_head(~hides).clone()
    # a row that hides every key by a finite number gives the mean of the values, not 0
    return Content(keeps, is_added) if infinite or bool(keeps.any(-1).all()) else _ADDED


def _of_one_head(mask: Tensor) -> Tensor:
    """The mask with one head where all heads are equal."""
    if mask.ndim == 4 and mask.shape[1] > 1 and torch.equal(mask, mask[:, :1].expand_as(mask)):
        return mask[:, :1]
    return mask
