"""What an attn_mask hides, read from its elements, so that hidden tiles are skipped.

Programs give masks as tensors: of bools, or of floats that are 0 for a visible pair and -inf (or the least number of
the dtype) for a hidden one. regard skips what such a mask hides, and needs a schedule for that, which takes 1 to 2 ms
for a mask that it did not see before. A model gives each batch a new mask and uses it in every layer. So a mask that is
seen for the first time, in a call of few milliseconds, is added to the scores, as torch does; from the second call on
its content is known by a digest, and its hidden tiles are skipped.
"""

import torch
from torch import Tensor

from regard.describe.recent import Recent
from regard.describe.tensors import content_key, is_without_data

READ_AT_ONCE = 100_000_000
"""Multiply-adds of `query @ key^T` from which a new mask is read at once: 10 ms of torch's kernel on one thread."""

HIDDEN = -1e30
"""What is added to a score that must get no weight: -inf, or about the least number of float32 and bfloat16."""

_seen: Recent[object, Tensor] = Recent(entries=256, nbytes=64 << 20, size=lambda mask: mask.nbytes)
"""Masks by content: empty for one that was seen once, else what `_read` gave."""


def readable(mask: Tensor | None, products: int, dtype: torch.dtype) -> Tensor | None:
    """The mask as bools where only these say what is hidden, else as floats that are added to the scores.

    Args:
        mask: bool (True keeps) or float (added), or None.
        products: multiply-adds of `query @ key^T`.
        dtype: of the query.
    """
    if mask is None or mask.requires_grad or is_without_data(mask) or torch.compiler.is_compiling():
        return mask
    key = content_key(mask)
    found = _seen.get(key)
    if found is None and products < READ_AT_ONCE:
        _seen.put(key, torch.empty(0))
        return _added(mask, dtype)
    if found is None or not found.numel():
        found = _read(mask)
        _seen.put(key, found)
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers that are added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


@torch.inference_mode(False)
@torch.no_grad()
def _read(mask: Tensor) -> Tensor:
    """The mask as bools, if it has no other numbers than 0 and those that hide; with equal heads only once.

    Made outside of inference mode, as a later call may save it for its backward pass.
    """
    if mask.ndim == 4 and mask.shape[1] > 1 and torch.equal(mask, mask[:, :1].expand_as(mask)):
        mask = mask[:, :1]
    if mask.dtype == torch.bool:
        return mask.clone()
    keeps, hides = mask == 0, mask <= HIDDEN
    if not bool((keeps | hides).all()):
        return mask.clone()
    infinite = bool(torch.isneginf(mask[hides]).all())
    # a row that hides every key by a finite number gives the mean of the values, not 0
    return keeps if infinite or bool(keeps.any(-1).all()) else mask.clone()
