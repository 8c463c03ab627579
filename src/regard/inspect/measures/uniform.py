"""Uniform attention over the mask of a call, from which chance values are computed."""

import numpy as np
import torch

from regard.describe.mask import Bools, Ints, Mask, Rectangles
from regard.inspect.weights.lazy import Weights


def uniform(weights: Weights, *, whole_batch: bool = False) -> Weights:
    """Attention that gives each key that a row may see the same weight, over the same mask.

    No bias, softcap or learned sink; a single head where the mask is the same for all, and a single batch row likewise,
    so that a sweep of it costs a fraction of a sweep of the call. Layers with the same mask share it.

    Args:
        whole_batch: whether to keep all batch rows, to average vectors that differ between them.

    >>> from regard import Causal
    >>> q = k = torch.randn(1, 2, 3, 4)
    >>> uniform(Weights(q, k, torch.zeros(1, 2, 3), Causal())).dense()[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    queries, keys = weights.shape[2:]
    batch, heads = _mask_sizes(weights)
    batch = weights.shape[0] if whole_batch else batch
    seen = weights.visible[:batch, :heads].expand(batch, heads, queries)
    q = torch.zeros((batch, heads, queries, 1), dtype=weights.dtype, device=weights.q.device)
    lse = seen.to(weights.dtype).log()
    return Weights(q, q.new_zeros((batch, heads, keys, 1)), lse, weights.mask, offset=weights.offset,
                   sequence=weights.sequence)  # fmt: skip


def looks_ahead(weights: Weights) -> bool:
    """Whether some row sees a later key.

    Decided from the mask's bounds, a rectangle per row; rows that these leave undecided are checked pair by pair.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)
    >>> looks_ahead(Weights(q, k, q[..., 0], Causal())), looks_ahead(Weights(q, k, q[..., 0]))
    (False, True)
    """
    queries, keys = weights.shape[2:]
    rows = np.arange(queries)[weights.offset + np.arange(queries) < keys - 1]
    if weights.mask is None or not len(rows):
        return bool(len(rows))
    undecided = _some_later(weights, weights.mask, rows)
    device, key = weights.q.device, torch.arange(keys, device=weights.q.device)
    for row in torch.from_numpy(rows[undecided]).to(device).split(max(1, 2**20 // keys)):
        later = key > row[:, None] + weights.offset
        if bool((weights.keep(row[:, None], key[None]) & later).any()):
            return True
    return False


def _some_later(weights: Weights, mask: Mask, rows: Ints) -> Bools:
    """For each row, whether by the bounds some head may see a later key."""
    batch, heads = _mask_sizes(weights)
    b, h, i = (axis.ravel() for axis in np.meshgrid(np.arange(batch), np.arange(heads), rows, indexing="ij"))
    at = i + weights.offset
    keys = np.full_like(i, weights.shape[3])
    some, _ = mask.bounds(Rectangles(b + weights.sequence, h, at, at + 1, at + 1, keys))
    return np.logical_or.reduce(some.reshape(batch * heads, len(rows)), axis=0)


def _mask_sizes(weights: Weights) -> tuple[int, int]:
    """The batch rows and heads over which the mask varies, of those of the call."""
    if weights.mask is None:
        return 1, 1
    (batch, heads), (rows, of_heads) = weights.shape[:2], weights.mask.broadcast_shape()
    return batch if rows > 1 else 1, heads if of_heads > 1 else 1
