"""Masks that are arithmetic on positions (and at most one int per batch row), with exact bounds.

In the pictures a row is a query, a column a key; █ is kept.
"""

import reprlib
from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.fingerprint import Fingerprint, constants
from regard.describe.interval import Interval, Union
from regard.describe.mask import Bools, CallSizes, Ints, Mask, Positions, Rectangles, as_tensors
from regard.describe.require_tensor import require_tensor
from regard.describe.spec import spec
from regard.describe.tensors import derived, elements
from regard.describe.traced import refuse_proxy
from regard.describe.whole_number import whole
from regard.errors import ProblemError

FARTHEST = 1 << 62
"""Windows are cut to this size, so that edges that move fit into 64 bits; no sequence is longer."""


@spec
class Causal(Mask):
    """The causal mask: a query attends to its own position and earlier ones, `k <= q`.

    It compares positions, not corners: a query at `offset + i` sees keys 0 to `offset + i`. Vaswani et al. 2017,
    arXiv:1706.03762, §3.2.3.

    >>> from regard import draw
    >>> print(draw(Causal(), 3, 3))
    █ · ·
    █ █ ·
    █ █ █
    """

    def constant(self) -> Fingerprint | None:
        known = constants.get((type(self),))
        return super().constant() if known is None else known[0]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return cast(Tensor, k <= q)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return r.k0 <= r.q1 - 1, r.k1 - 1 <= r.q0

    def intervals(self, sizes: CallSizes) -> Union:
        return [Interval(right=1)]

    def signature(self, r: Rectangles) -> Ints:
        return (r.q0 - r.k0)[:, None]


@spec
class Window(Mask):
    """A query sees keys that are near: `q - k < left` and `k - q < right`.

    The window counts the query itself: `Causal() & Window(4096)` sees 4,096 keys, as transformers' `sliding_window` and
    Keras count. flash-attention, JAX and ONNX count the *other* keys: their `(w, 0)` is `Window(w + 1)` here.
    Beltagy et al. 2020, arXiv:2004.05150, §3.1.

    Args:
        left: tokens to the left, itself included, at least 1; None for no limit.
        right: tokens to the right, itself included, at least 1; None for no limit.

    >>> from regard import draw
    >>> print(draw(Window(2, 1), 3, 3))
    █ · ·
    █ █ ·
    · █ █
    """

    left: int | None
    right: int | None = None

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        if right is None and type(left) is int and 0 < left < FARTHEST:  # at once, as it is often written in a call
            return
        if left is None and right is None:
            raise ProblemError("Window(None, None) limits nothing: give a left or a right size, or leave the mask out.")
        for side in ("left", "right"):
            size = getattr(self, side)
            if size is None or (type(size) is int and 0 < size < FARTHEST):
                continue
            size = whole(size, f"Window({side})")
            if size < 1:
                raise ProblemError(
                    f"Window({side}={size}) would hide a token from itself: a window counts the query, so it is at "
                    "least 1; None means no limit."
                )
            object.__setattr__(self, side, size)

    def constant(self) -> Fingerprint | None:
        left, right = self.left, self.right
        known = constants.get((type(self), left, right)) if type(left) is int and right is None else None
        return super().constant() if known is None else known[0]

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        after = cast(Tensor, self.left is None or (q - k) < self.left)
        before = cast(Tensor, self.right is None or (k - q) < self.right)
        return after & before

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        nearest, farthest = r.q0 - (r.k1 - 1), (r.q1 - 1) - r.k0  # the extremes of q - k
        some, every = np.ones_like(r.q0, dtype=bool), np.ones_like(r.q0, dtype=bool)
        if self.left is not None:
            some, every = some & (nearest < self.left), every & (farthest < self.left)
        if self.right is not None:
            some, every = some & (-farthest < self.right), every & (-nearest < self.right)
        return some, every

    def intervals(self, sizes: CallSizes) -> Union:
        left, right = (None if size is None else min(size, FARTHEST) for size in (self.left, self.right))
        return [Interval(None if left is None else 1 - left, right)]

    def signature(self, r: Rectangles) -> Ints:
        return (r.q0 - r.k0)[:, None]


@spec
class Prefix(Mask):
    """Every query sees the first keys: `k < size`. Attention sinks, and the visible prefix of a prefix-LM.

    Xiao et al. 2023, arXiv:2309.17453, §3.2 (sinks); Raffel et al. 2020, arXiv:1910.10683, §3.2.1 (prefix-LM).

    Args:
        size: keys, at least 0; an int, or an integer tensor [batch].

    >>> from regard import draw
    >>> print(draw(Prefix(1), 2, 3))
    █ · ·
    █ · ·
    """

    size: int | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_sizes(self.size, "Prefix(size)"))

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _before(self.size, b, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return _first_keys(self.size, r)

    def intervals(self, sizes: CallSizes) -> Union:
        return [Interval(stop=_stop(self.size))]

    def signature(self, r: Rectangles) -> Ints:
        return (_sizes(self.size, r.b) - r.k0)[:, None]

    def broadcast_shape(self) -> tuple[int, int]:
        return (self.size.shape[0], 1) if isinstance(self.size, Tensor) else (1, 1)

    def bind(self, sizes: CallSizes) -> Mask:
        return _per_row(self, self.size, sizes)


@spec
class KeyLengths(Mask):
    """Row b of the batch has `lengths[b]` keys, the rest is padding: `k < lengths[b]`.

    Args:
        lengths: keys per batch row, at least 0; an integer tensor [batch]. A length above the call's keys keeps all of
            them. Negative lengths raise `ProblemError` when a call first reads them.

    >>> from regard import draw
    >>> print(draw(KeyLengths(torch.tensor([2, 3])), 1, 3, batch=0))
    █ █ ·
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.lengths), Tensor):
            refuse_proxy("KeyLengths(lengths)", self.lengths)
            value = reprlib.repr(self.lengths)
            hint = f"torch.tensor({value})" if isinstance(self.lengths, list | tuple) else "torch.tensor([3, 5])"
            raise ProblemError(
                f"KeyLengths(lengths) is {value}: expected an integer tensor [batch], such as {hint}; for the same "
                "length in every row, Prefix(size)."
            )
        _checked_sizes(self.lengths, "KeyLengths(lengths)")

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return _before(self.lengths, b, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return _first_keys(self.lengths, r)

    def intervals(self, sizes: CallSizes) -> Union:
        return [Interval(stop=_stop(self.lengths))]

    def signature(self, r: Rectangles) -> Ints:
        return (_sizes(self.lengths, r.b) - r.k0)[:, None]

    def broadcast_shape(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def bind(self, sizes: CallSizes) -> Mask:
        return _per_row(self, self.lengths, sizes)


@spec
class Global(Mask):
    """Global tokens see all and are visible to all: q or k in the set. Beltagy et al. 2020, arXiv:2004.05150, §3.1.

    Args:
        positions: the positions of those tokens, an iterable of ints. Each is a token of the call: for a chunk of a
            prompt, give the positions up to the end of the chunk. They are copied: what is written to a tensor of
            positions later does not change the mask.

    >>> from regard import draw
    >>> print(draw(Global([1]), 3, 3))
    · █ ·
    █ █ █
    · █ ·
    """

    positions: Iterable[int]

    def __post_init__(self) -> None:
        value = cast(object, self.positions)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise ProblemError(f"Global(positions) is {value!r}: expected an iterable of positions, such as [0, 5].")
        if isinstance(value, Tensor):
            one = require_tensor(value, "Global(positions)", "integers [positions]", read=True)
            value = one.tolist() if one.ndim == 1 else [one]
        chosen = {whole(p, "a position of Global(positions)", "positions") for p in cast("Iterable[object]", value)}
        object.__setattr__(self, "positions", tuple(sorted(chosen)))

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        q, k = as_tensors(q, k)
        chosen = torch.tensor(tuple(self.positions), dtype=torch.int64, device=q.device)
        return _is_among(q, chosen) | _is_among(k, chosen)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        queries, keys = self._count(r.q0, r.q1), self._count(r.k0, r.k1)
        return (queries > 0) | (keys > 0), (queries == r.q1 - r.q0) | (keys == r.k1 - r.k0)

    def signature(self, r: Rectangles) -> Ints:
        has_query, has_key = self._count(r.q0, r.q1) > 0, self._count(r.k0, r.k1) > 0  # what the pattern depends on
        edges = np.where(has_query, r.q0, 0), np.where(has_key, r.k0, 0)
        return np.stack([has_query.astype(np.int64), edges[0], has_key.astype(np.int64), edges[1]], axis=1)

    def bind(self, sizes: CallSizes) -> Mask:
        stop = max(sizes.positions, sizes.keys)
        beyond = [p for p in self.positions if not min(sizes.offset, 0) <= p < stop]
        if beyond:
            raise ProblemError(
                f"{self!r} has position {beyond[0]}, and the call has {sizes.keys} keys and queries at {sizes.offset} "
                f"to {sizes.positions - 1}: give positions of tokens that are there."
            )
        return self

    def _count(self, start: Ints, stop: Ints) -> Ints:
        chosen = np.asarray(tuple(self.positions), dtype=np.int64)
        return np.searchsorted(chosen, stop) - np.searchsorted(chosen, start)


@spec
class Dilated(Mask):
    """A query sees every step-th key, counted from itself: `(q - k) % step == 0`.

    The strided pattern of Child et al. 2019, arXiv:1904.10509, §4.3.

    Args:
        step: tokens, at least 1.

    >>> from regard import draw
    >>> print(draw(Dilated(2), 2, 4))
    █ · █ ·
    · █ · █
    """

    step: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", whole(self.step, "Dilated(step)", least=1))

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return cast(Tensor, (q - k) % self.step == 0)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        nearest, farthest = r.q0 - (r.k1 - 1), (r.q1 - 1) - r.k0
        some = farthest // self.step * self.step >= nearest
        return some, some & ((nearest == farthest) | (self.step == 1))

    def signature(self, r: Rectangles) -> Ints:
        return ((r.q0 - r.k0) % self.step)[:, None]


def _checked_sizes(sizes: object, what: str) -> int | Tensor:
    """The sizes, an int of at least 0 or an integer tensor of one axis; `ProblemError` for others."""
    if not isinstance(sizes, Tensor):
        return whole(sizes, what, "keys, or an integer tensor [batch]", least=0)
    require_tensor(sizes, what, "an integer tensor [batch]")
    if sizes.ndim != 1 or sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool:
        raise ProblemError(f"{what} is {sizes.dtype} {list(sizes.shape)}: expected an integer tensor [batch].")
    return sizes


def _is_among(positions: Tensor, chosen: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # `isin` becomes a binary search, which ONNX does not have
        return (positions[..., None] == chosen).any(-1)
    return torch.isin(positions, chosen)


def _before(sizes: int | Tensor, b: Positions, k: Positions) -> Tensor:
    if isinstance(sizes, Tensor):
        sizes = sizes.to(k.device if isinstance(k, Tensor) else sizes.device, torch.int64)[b]  # uint64 has no `<`
    return cast(Tensor, k < sizes)


def _first_keys(sizes: int | Tensor, r: Rectangles) -> tuple[Bools, Bools]:
    limit = _sizes(sizes, r.b)
    return r.k0 < limit, r.k1 <= limit


def _sizes(sizes: int | Tensor, b: Ints) -> Ints:
    return _read(sizes)[b] if isinstance(sizes, Tensor) else np.full(len(b), sizes, dtype=np.int64)


def _stop(sizes: int | Tensor) -> int | Ints:
    """The sizes as the edge of an interval: an int, or [batch, 1]."""
    return _read(sizes)[:, None] if isinstance(sizes, Tensor) else sizes


def _read(sizes: Tensor) -> Ints:
    return derived(sizes, "sizes", _checked_rows)


def _checked_rows(sizes: Tensor) -> Ints:
    rows = elements(sizes).astype(np.int64)
    if len(rows) and rows.min() < 0:
        row = int(rows.argmin())
        raise ProblemError(f"batch row {row} of a mask has length {rows[row]}: expected 0 or more keys in every row.")
    return rows


def _per_row(mask: Mask, rows: int | Tensor, sizes: CallSizes) -> Mask:
    if isinstance(rows, Tensor) and rows.shape[0] != sizes.batch:  # `len` is no size that torch can trace
        raise ProblemError(f"{mask!r} has sizes for {rows.shape[0]} batch rows and the call has {sizes.batch}.")
    return mask
