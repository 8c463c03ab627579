"""`Ragged`: a mask over rows of different lengths, with the last query of each row at its own last key."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.describe.interval import Interval, Union, for_queries_moved, intersection
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Positions,
    Rectangles,
    bounds_of,
    broadcast_shape_of,
    intervals_of,
    is_made_of,
    kept_pairs,
    marked,
)
from regard.describe.mask_by_rule import Causal, Dilated, Global, Prefix, Window
from regard.describe.spec import bound_to, spec
from regard.errors import ProblemError

OF_POSITIONS = (Causal, Window, Prefix, Dilated, Global)
"""Masks that depend on positions alone."""


@spec
class Ragged(Mask):
    """Row b has the first `lengths[b]` keys, and its last query is at the last of them.

    A batch of sequences that began at different times, as in serving: `attend` adds this mask where stored keys have
    lengths (`StoredTensor.lengths`).

    Args:
        inner: the mask within a row; None: every query sees all keys of its row.
        lengths: keys of each row.
        keys: of the call; None until the mask is bound.

    Raises:
        ProblemError: the inner mask is defined by the rows of a call (`TensorMask`, `Tree`, ...), not by positions.

    >>> from regard import Causal, draw
    >>> print(draw(Ragged(Causal(), (2, 4)), 2, 4, batch=0))
    █ · · ·
    █ █ · ·
    """

    inner: Mask | None
    lengths: Sequence[int]
    keys: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(int(length) for length in self.lengths))
        if self.inner is not None and not is_made_of(self.inner, OF_POSITIONS):
            raise ProblemError(
                f"{self.inner!r} with rows of different lengths: expected a mask of positions (Causal, Window, Prefix, "
                "Dilated, Global and combinations of them). For others attend to the stored keys and to the new ones "
                "apart, attend_state(q, *stored) | attend_state(q, k, v, mask=...), or call attend row by row."
            )

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        device = next((x.device for x in (k, q, b, h) if isinstance(x, Tensor)), "cpu")
        lengths = torch.tensor(self.lengths, device=device)[b]
        own = k < lengths
        return own if self.inner is None else own & kept_pairs(self.inner, b, h, q - (self._keys - lengths), k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        lengths = self._of_rows(r)
        some, every = r.k0 < lengths, r.k1 <= lengths
        if self.inner is None:
            return some, every
        some_inner, every_inner = bounds_of(self.inner, self._moved(r))
        return some & some_inner, every & every_inner

    def intervals(self, sizes: CallSizes) -> Union:
        lengths = np.asarray(self.lengths, dtype=np.int64)[:, None]
        own: Union = [Interval(stop=lengths)]
        if self.inner is None:
            return own
        inner = intervals_of(self.inner, sizes)
        back = lengths - self._keys  # from positions of the call to those of a row
        moved = inner and [for_queries_moved(x, back) for x in inner]
        return intersection(own, moved)

    def signature(self, r: Rectangles) -> Ints:
        own = (self._of_rows(r) - r.k0)[:, None]
        return own if self.inner is None else np.concatenate([own, marked(self.inner, self._moved(r))], axis=1)

    def broadcast_shape(self) -> tuple[int, int]:
        return len(self.lengths), 1 if self.inner is None else broadcast_shape_of(self.inner)[1]

    def bind(self, sizes: CallSizes) -> Mask:
        if len(self.lengths) != sizes.batch:
            raise ProblemError(f"{self!r} is for {len(self.lengths)} batch rows and the call has {sizes.batch}.")
        if max(self.lengths, default=0) > sizes.keys:
            raise ProblemError(f"{self!r} is for {max(self.lengths)} keys and the call has {sizes.keys}.")
        return Ragged(None if self.inner is None else bound_to(self.inner, sizes), self.lengths, sizes.keys)

    @property
    def _keys(self) -> int:
        return max(self.lengths, default=0) if self.keys is None else self.keys

    def _of_rows(self, r: Rectangles) -> Ints:
        return np.asarray(self.lengths, dtype=np.int64)[r.b]

    def _moved(self, r: Rectangles) -> Rectangles:
        by = self._keys - self._of_rows(r)
        return r._replace(q0=r.q0 - by, q1=r.q1 - by)
