"""`draw`: a mask as a picture in text."""

import torch

from regard.describe.mask import CallSizes, Mask, as_tensors, broadcast_shape_of, kept_pairs, require_mask
from regard.describe.spec import bound_to
from regard.describe.whole_number import whole
from regard.errors import ProblemError

DRAWN = 1 << 24
"""Pairs that a picture has at most; 4 bytes each, and some hundred MiB while they are evaluated."""


def draw(mask: Mask, queries: int, keys: int, offset: int | None = None, batch: int = 0, head: int = 0) -> str:
    """The mask as a picture, a row per query: █ where the pair is kept, · where not.

    Args:
        offset: position of the first query; None puts the last query at the last key, as `attend` does.
        batch, head: which batch row and head to draw, where the mask differs between them.

    Raises:
        ProblemError: no mask, one that does not fit, a batch row or head that it lacks, or a picture of more than
            16.8 million pairs.

    >>> from regard import Causal, draw
    >>> print(draw(Causal(), 2, 4))
    █ █ █ ·
    █ █ █ █
    """
    mask = require_mask(mask, "draw")
    queries, keys = whole(queries, "queries", least=0), whole(keys, "keys", least=0)
    if queries * keys > DRAWN:
        raise ProblemError(
            f"draw of {queries:,} queries and {keys:,} keys: expected at most {DRAWN:,} pairs, such as 4,096 x 4,096. "
            "Draw a smaller call, or some of the queries with offset=; explain counts tiles and pairs of large ones."
        )
    start = keys - queries if offset is None else whole(offset, "offset")
    mask = bound_to(mask, CallSizes(*broadcast_shape_of(mask), queries, keys, start))
    q, k = torch.arange(start, start + queries, device="cpu")[:, None], torch.arange(keys, device="cpu")
    rows, heads = broadcast_shape_of(mask)
    of = _drawn(batch, "batch", rows), _drawn(head, "head", heads)
    kept = kept_pairs(mask, *as_tensors(*of, q, k)).expand(queries, keys)
    return "\n".join(" ".join("█" if pair else "·" for pair in row) for row in kept.tolist())


def _drawn(value: object, name: str, count: int) -> int:
    """The index of the batch row or head to draw; a mask with a count of 1 is the same for all."""
    number = whole(value, name, "rows" if name == "batch" else "heads", least=0)
    if 1 < count <= number:
        raise ProblemError(f"{name} is {number}, and the mask has {count}: expected at most {count - 1}.")
    return number
