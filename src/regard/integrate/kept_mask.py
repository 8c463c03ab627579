"""The mask of a forward pass over the tokens that a cache with an eviction policy still keeps.

A mask of transformers is for all tokens by position. The remaining tokens have moved, in order, to just before the new
ones, and each query sees all of them:

    mask for 9 keys, 2 queries       4 of 7 earlier tokens are kept
    x x x x x x x x .                x x x x x .
    x x x x x x x x x                x x x x x x

That is possible where each query sees all earlier tokens but padding, which no row keeps.
"""

from torch.nn import functional as F

from regard.describe.mask import And, Mask, Not, Or
from regard.describe.mask_by_rule import Causal, KeyLengths
from regard.describe.mask_by_table import TensorMask
from regard.errors import RefusalError
from regard.integrate.layer_mask import LayerMask


def mask_over_kept(given: LayerMask, kept: int, rows: slice, skip: int, cache: object) -> Mask | None:
    """The mask of queries over `kept` earlier tokens and the new ones.

    Args:
        given: the mask of the pass.
        kept: earlier tokens that are kept.
        rows: of the batch.
        skip: new tokens at the beginning that are padding, and left out.
        cache: named in the error.

    Raises:
        RefusalError: a mask that may hide earlier tokens.
    """
    if not _shows_all_earlier(given.mask):
        raise RefusalError(
            f"{given.mask!r} for {cache!r}, which drops tokens: it tells by position which keys a query sees, "
            "and the remaining ones have moved. Take a cache that keeps all."
        )
    queries = given.shape[2]
    if given.mask is None or isinstance(given.mask, Causal):
        return given.mask
    if queries == 1 or _is_causal_with_padding(given.mask):
        return Causal()
    new = given.dense()[rows, :, skip:, given.shape[3] - queries + skip :]
    return TensorMask(F.pad(new, (kept, 0), value=True))


def _shows_all_earlier(mask: Mask | None) -> bool:
    """Whether each query sees all tokens before it, except padding."""
    if isinstance(mask, And):
        return _shows_all_earlier(mask.a) and _shows_all_earlier(mask.b)
    if isinstance(mask, Or):
        return _shows_all_earlier(mask.a) or _shows_all_earlier(mask.b)
    return mask is None or isinstance(mask, Causal) or _is_padding(mask)


def _is_causal_with_padding(mask: Mask) -> bool:
    if isinstance(mask, And):
        return _is_causal_with_padding(mask.a) and _is_causal_with_padding(mask.b)
    return isinstance(mask, Causal) or _is_padding(mask)


def _is_padding(mask: Mask) -> bool:
    return isinstance(mask.a if isinstance(mask, Not) else mask, KeyLengths)
