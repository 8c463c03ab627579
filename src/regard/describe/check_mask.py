"""`check_mask`: whether the methods of a mask agree with each other, for a call of given sizes.

`keep` defines a mask pair by pair. `bounds` and `signature` describe the same mask by rectangles, `intervals` by
queries: they are optional and save work, and where they are wrong, attention is silently wrong.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.interval import step_left
from regard.describe.mask import (
    Bools,
    CallSizes,
    Ints,
    Mask,
    Rectangles,
    bounds_of,
    broadcast_shape_of,
    intervals_of,
    kept_pairs,
    marked,
)
from regard.describe.not_a_spec import unregistered
from regard.describe.serialized import deserialize
from regard.describe.spec import bound_to
from regard.describe.whole_number import whole
from regard.errors import ProblemError

RANDOM = 500
"""Random rectangles in addition to those of a grid."""


class _Checked(NamedTuple):
    """A mask bound to a call, and all its pairs, bool [batch, heads, queries, keys]."""

    mask: Mask
    sizes: CallSizes
    kept: Bools

    def pattern(self, r: Rectangles, i: int) -> Bools:
        """The pairs of rectangle i, [queries, keys]."""
        first = self.sizes.offset
        return self.kept[r.b[i], r.h[i], r.q0[i] - first : r.q1[i] - first, r.k0[i] : r.k1[i]]


def check_mask(
    mask: Mask,
    *,
    queries: int = 200,
    keys: int = 300,
    batch: int = 2,
    heads: int = 2,
    offset: int | None = None,
    seed: int = 0,
) -> None:
    """Check the methods of a mask against its `keep`, on a call of these sizes.

    All pairs are in memory at once, so choose a few hundred queries and keys, and sizes with the mask's edges inside.
    One size proves nothing about others: check several in the tests of your mask.

    A mask without `bounds` is right, and has every tile evaluated; with `bounds`, only the tiles at its edges are.

    Args:
        queries: at least 1.
        keys: at least 1.
        offset: position of the first query; None puts the last query at the last key.
        seed: of the random rectangles.

    Raises:
        ProblemError: the mask is wrong, with the rectangle and the pair; its class lacks `@spec`; or it does not fit
            the call.

    >>> from regard import Causal, Window, check_mask
    >>> check_mask(Causal() & Window(5), queries=40, keys=60)
    """
    if not isinstance(cast(object, mask), Mask):
        raise ProblemError(f"check_mask takes a mask, and got {type(mask).__name__}.")
    if not mask.is_registered():
        raise unregistered("mask", mask)
    queries, keys = whole(queries, "queries", least=1), whole(keys, "keys", least=1)
    batch, heads = whole(batch, "batch", "batch rows", least=1), whole(heads, "heads", "heads", least=1)
    first = keys - queries if offset is None else whole(offset, "offset")
    sizes = CallSizes(batch, heads, queries, keys, first)
    bound = bound_to(mask, sizes)
    checked = _Checked(bound, sizes, _all_pairs(bound, sizes))
    _check_broadcast_shape(checked)
    random = np.random.default_rng(seed)
    _check_pointwise(checked, random)
    for side in (1, 8, 16, 64):
        for r in (_tiles(sizes, side), _random_tiles(sizes, side, random)):
            _check_bounds(checked, r)
            _check_signature(checked, r)
    _check_bounds(checked, _random_rectangles(sizes, random))
    _check_intervals(checked)
    _check_serialization(mask, checked)


def _axes(sizes: CallSizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.arange(sizes.offset, sizes.positions)
    b, h = torch.arange(sizes.batch)[:, None, None, None], torch.arange(sizes.heads)[:, None, None]
    return b, h, q[:, None], torch.arange(sizes.keys)


def _all_pairs(mask: Mask, sizes: CallSizes) -> Bools:
    return _keep(mask, _axes(sizes), (sizes.batch, sizes.heads, sizes.queries, sizes.keys))


def _keep(mask: Mask, positions: tuple[Tensor, ...], shape: tuple[int, ...]) -> Bools:
    before = [p.clone() for p in positions]
    kept = kept_pairs(mask, *positions).expand(shape).numpy()
    for name, old, new in zip("bhqk", before, positions, strict=True):
        if not torch.equal(old, new):
            raise ProblemError(
                f"{mask!r}: keep changes its argument {name} in place, and other masks read the same positions. "
                f"Compute a new tensor, such as {name} + 1 instead of {name} += 1."
            )
    return kept


def _check_broadcast_shape(c: _Checked) -> None:
    """Along an axis of size 1 of `broadcast_shape`, all must be alike."""
    for axis, (size, name) in enumerate(zip(broadcast_shape_of(c.mask), ("batch rows", "heads"), strict=True)):
        if size not in (1, c.kept.shape[axis]):
            raise ProblemError(
                f"{c.mask!r}: broadcast_shape has {size} {name} and the call {c.kept.shape[axis]}: expected 1 or these."
            )
        differs = c.kept != c.kept.take([0], axis=axis)
        if size == 1 and differs.any():
            b, h, q, k = np.argwhere(differs)[0]
            raise ProblemError(
                f"{c.mask!r}: broadcast_shape says that {name} are alike, and keep differs between them at "
                f"{_pair(b, h, q + c.sizes.offset, k)}."
            )


def _check_pointwise(c: _Checked, random: np.random.Generator) -> None:
    """The same pairs must come out in any order and shape, as a schedule asks for tiles and not for all pairs."""
    b, h, q, k = (random.integers(0, size, (64, 3)) for size in c.kept.shape)
    found = _keep(c.mask, tuple(torch.from_numpy(x) for x in (b, h, q + c.sizes.offset, k)), b.shape)
    for i in np.argwhere(found != c.kept[b, h, q, k]).tolist()[:1]:
        pair = _pair(*(x[tuple(i)] for x in (b, h, q + c.sizes.offset, k)))
        raise ProblemError(
            f"{c.mask!r}: keep is not pointwise: it gives {bool(found[tuple(i)])} for {pair} among 64 x 3 other pairs, "
            f"and {not found[tuple(i)]} among all pairs of the call. Compute with b, h, q and k alone."
        )


def _check_bounds(c: _Checked, r: Rectangles) -> None:
    some, every = bounds_of(c.mask, r)
    for i in range(len(r.b)):
        pattern = c.pattern(r, i)
        if not some[i] and pattern.any():
            raise ProblemError(f"{c.mask!r}: bounds say that nothing of {_rectangle(r, i)} is kept, and keep keeps "
                               f"{_first(c, r, i, pattern)}.")  # fmt: skip
        if every[i] and not pattern.all():
            raise ProblemError(f"{c.mask!r}: bounds say that all of {_rectangle(r, i)} is kept, and keep does not keep "
                               f"{_first(c, r, i, ~pattern)}.")  # fmt: skip


def _check_signature(c: _Checked, r: Rectangles) -> None:
    """Rectangles of one size with equal signatures must have equal patterns."""
    seen: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(marked(c.mask, r).tolist()):
        j = seen.setdefault((*row, int(r.q1[i] - r.q0[i]), int(r.k1[i] - r.k0[i])), i)
        differs = c.pattern(r, i) != c.pattern(r, j)
        if differs.any():
            raise ProblemError(
                f"{c.mask!r}: signature is the same for {_rectangle(r, j)} and {_rectangle(r, i)}, and keep differs "
                f"between them at {_first(c, r, i, differs)}: add what the pattern depends on."
            )


def _check_intervals(c: _Checked) -> None:
    union = intervals_of(c.mask, c.sizes)
    if union is None:
        return
    q, k = np.arange(c.sizes.offset, c.sizes.positions)[None, :, None], np.arange(c.sizes.keys)
    found = np.zeros((1, 1, 1), dtype=bool)
    for x in union:
        inside = np.ones((1, 1, 1), dtype=bool)
        for edge, test in (
            (x.left, lambda e: k >= q + e), (x.right, lambda e: k < q + e),
            (x.start, lambda e: k >= e), (x.stop, lambda e: k < e),
        ):  # fmt: skip
            if edge is not None:
                inside = inside & cast("Callable[[Any], Bools]", test)(np.atleast_2d(edge)[..., None])
        found = found | inside
    for b, h, i, j in np.argwhere(c.kept != found[:, None])[:1]:
        verb = "keep" if not c.kept[b, h, i, j] else "leave out"
        raise ProblemError(
            f"{c.mask!r}: intervals {verb} {_pair(b, h, i + c.sizes.offset, j)}, and keep does the opposite."
        )
    for name, b, i in filter(None, map(step_left, union)):
        q = i + c.sizes.offset
        edge = f"q + {name}" if name in ("left", "right") else name
        raise ProblemError(
            f"{c.mask!r}: {edge} of intervals decreases from query position {q} to {q + 1} (batch row {b}), and no "
            "edge may move to the left from a query to the next: return None, and schedules split rectangles."
        )


def _check_serialization(mask: Mask, c: _Checked) -> None:
    if mask != mask or hash(mask) != hash(mask):  # noqa: PLR0124
        raise ProblemError(f"{mask!r} is not equal to itself: a field changes, or cannot be followed.")
    if not mask.can_be_serialized():
        return
    tensors, ints = list[Tensor](), list[int]()
    text = mask.serialize(tensors, ints)
    read = cast(Mask, deserialize(text, tensors, ints))
    if type(read) is not type(mask) or not np.array_equal(_all_pairs(read.bind(c.sizes), c.sizes), c.kept):
        raise ProblemError(f"{mask!r} is another mask after serialize and deserialize: {read!r}.")


def _tiles(sizes: CallSizes, side: int) -> Rectangles:
    """Every tile of a grid of this side; for side 1, a few thousand single pairs."""
    step = side if side > 1 else max(1, round((sizes.queries * sizes.keys / 4096) ** 0.5))
    b, h, q0, k0 = np.meshgrid(
        np.arange(sizes.batch),
        np.arange(sizes.heads),
        np.arange(0, sizes.queries, step),
        np.arange(0, sizes.keys, step),
    )
    b, h, q0, k0 = (x.ravel().astype(np.int64) for x in (b, h, q0, k0))
    return _shifted(sizes, b, h, q0, np.minimum(q0 + side, sizes.queries), k0, np.minimum(k0 + side, sizes.keys))


def _random_tiles(sizes: CallSizes, side: int, random: np.random.Generator) -> Rectangles:
    q0, k0 = (random.integers(0, max(1, size - side + 1), RANDOM) for size in (sizes.queries, sizes.keys))
    b, h = (random.integers(0, size, RANDOM) for size in (sizes.batch, sizes.heads))
    return _shifted(sizes, b, h, q0, np.minimum(q0 + side, sizes.queries), k0, np.minimum(k0 + side, sizes.keys))


def _random_rectangles(sizes: CallSizes, random: np.random.Generator) -> Rectangles:
    q, k = (np.sort(random.integers(0, size, (RANDOM, 2)), axis=1) for size in (sizes.queries, sizes.keys))
    b, h = (random.integers(0, size, RANDOM) for size in (sizes.batch, sizes.heads))
    return _shifted(sizes, b, h, q[:, 0], q[:, 1] + 1, k[:, 0], k[:, 1] + 1)


def _shifted(sizes: CallSizes, b: Ints, h: Ints, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> Rectangles:
    return Rectangles(b, h, q0 + sizes.offset, q1 + sizes.offset, k0, k1)


def _first(c: _Checked, r: Rectangles, i: int, where: Bools) -> str:
    q, k = np.argwhere(where)[0]
    return _pair(r.b[i], r.h[i], q + r.q0[i], k + r.k0[i])


def _pair(b: int, h: int, q: int, k: int) -> str:
    return f"the pair of query position {q} and key position {k} (batch row {b}, head {h})"


def _rectangle(r: Rectangles, i: int) -> str:
    return f"queries {r.q0[i]} to {r.q1[i] - 1} x keys {r.k0[i]} to {r.k1[i] - 1} (batch row {r.b[i]}, head {r.h[i]})"
