"""Masks: which query may look at which key.

A mask answers two questions about *positions* (query i of a call is at position `offset + i`, key j at j):

- `keep(b, h, q, k)`: is the pair kept? Exact, pointwise, broadcasting.
- `bounds(rectangles)`: is *some* pair of the rectangle kept, are *all*? Sound: an undecided rectangle is some and not
  all. They need not be exact. The schedule splits only what is undecided, so its cost follows the mask's boundary.

`&`, `|` and `~` combine masks; their bounds follow by Kleene's three-valued logic. The masks themselves are in
`mask_by_rule.py` (arithmetic on positions), `mask_by_table.py` (tensors) and `mask_function.py` (a Python function).
"""

import inspect
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from regard.describe.fingerprint import INTERNED, Fingerprint
from regard.describe.interval import Union, as_int64, complement, fault_of, intersection, limited, union
from regard.describe.not_a_spec import instead, received
from regard.describe.spec import Spec, bound_to, spec
from regard.describe.uses import find_uses, method_may_use
from regard.errors import ProblemError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Positions = int | Tensor
"""A position, or an int64 tensor of positions; the four of a `keep` broadcast."""

NONE, ALL = np.iinfo(np.int64).min, np.iinfo(np.int64).min + 1
"""The numbers that say in a signature that the mask keeps nothing, or everything, of the rectangle."""


class Rectangles(NamedTuple):
    """Many rectangles of positions: batch b, head h, queries q0 <= q < q1, keys k0 <= k < k1; arrays of one length."""

    b: Ints
    h: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints


class CallSizes(NamedTuple):
    """The sizes of a call, and the position of its first query."""

    batch: int
    heads: int
    queries: int
    keys: int
    offset: int

    @property
    def positions(self) -> int:
        """One past the position of the last query."""
        return self.offset + self.queries


def broadcasts(size: int, called: int) -> bool:
    """Whether an axis of this size broadcasts to that of a call.

    `size in (1, called)` says no while torch.compile traces, if one of both is a number and the other a dynamic size
    that is equal (torch 2.13).
    """
    return size == 1 or size == called  # noqa: PLR1714


class Mask(Spec):
    """Which query may look at which key; abstract. A subclass defines `keep`; the other methods save work.

    ```
    >>> from regard import Causal, Window, Prefix, draw
    >>> print(draw(Causal() & (Window(2) | Prefix(1)), 4, 4))
    █ · · ·
    █ █ · ·
    █ █ █ ·
    █ · █ █

    ```
    """

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        """Whether head h of batch row b keeps the pair of query position q and key position k; a bool tensor.

        Other masks read the same tensors of positions, so they must not be changed in place.
        """
        raise ProblemError(f"{type(self).__name__} is a mask without keep: define keep(self, b, h, q, k).")

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        """(some, all) per rectangle: whether some pair may be kept, and whether all pairs are surely kept.

        Optional: the default, (True, False), is right for every mask, and has every tile evaluated. With bounds, a
        schedule evaluates only tiles at the edges of the mask.
        """
        return np.ones(r.b.shape, dtype=bool), np.zeros(r.b.shape, dtype=bool)

    def signature(self, r: Rectangles) -> Ints:
        """Ints [rectangles, n] that determine the pattern in a rectangle: equal rows mean equal patterns.

        So a schedule evaluates one tile of the diagonal of a causal mask, not all. By default, every rectangle has its
        own row.
        """
        return np.stack([r.b, r.h, r.q0, r.k0], axis=1)

    def intervals(self, sizes: CallSizes) -> Union:
        """The kept keys of each query as a union of intervals, for a call of these sizes; None if unknown.

        Optional: with it, short calls are scheduled faster, without splitting rectangles. Rectangles are split
        all the same if an edge decreases from one query to the next (`Interval`), or if there are more than 4.
        """
        return None

    def broadcast_shape(self) -> tuple[int, int]:
        """(batch, heads) of the mask: 1 where it is the same for all batch rows, or for all heads.

        Optional: where it is not defined, `bind` finds by a call of `keep` whether `keep` uses b or h.
        """
        return 1, 1

    def bind(self, sizes: CallSizes) -> "Mask":
        """This mask in a call: masks defined by rows of a call (`TensorMask`, `Tree`) get the positions of the rows.

        A method of your own returns `super().bind(sizes)`, or defines `broadcast_shape`.

        Raises:
            ProblemError: the mask does not fit the call (its data has other sizes).
        """
        return self if self._kind.is_own else _of_used_axes(self, sizes)

    def __and__(self, other: "Mask") -> "Mask":
        return _combined(And, self, require_mask(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return _combined(Or, self, require_mask(other, "|"))

    def __invert__(self) -> "Mask":
        return Not(self)

    def __rand__(self, other: object) -> "Mask":
        return And(require_mask(other, "&"), self)

    def __ror__(self, other: object) -> "Mask":
        return Or(require_mask(other, "|"), self)

    def __add__(self, other: object) -> NoReturn:
        raise ProblemError(f"{self!r} + {received(other)}: masks combine with & | ~, biases with +.")

    def __radd__(self, other: object) -> NoReturn:
        raise ProblemError(f"{received(other)} + {self!r}: masks combine with & | ~, biases with +.")

    def __sub__(self, other: object) -> NoReturn:
        raise ProblemError(f"{self!r} - {received(other)}: to keep what one mask keeps and the other does not, a & ~b.")

    def __rsub__(self, other: object) -> NoReturn:
        raise ProblemError(f"{received(other)} - {self!r}: to keep what a mask does not, ~mask.")

    def __neg__(self) -> NoReturn:
        raise ProblemError(f"-({self!r}): to keep what a mask does not, ~mask.")

    def __mul__(self, other: object) -> NoReturn:
        raise ProblemError(f"{self!r} * {received(other)}: to keep what both masks keep, a & b.")

    def __rmul__(self, other: object) -> NoReturn:
        raise ProblemError(f"{received(other)} * {self!r}: to keep what both masks keep, a & b.")

    def __xor__(self, other: object) -> NoReturn:
        raise ProblemError(f"{self!r} ^ {received(other)}: to keep what one of two masks keeps, (a | b) & ~(a & b).")

    def __rxor__(self, other: object) -> NoReturn:
        raise ProblemError(f"{received(other)} ^ {self!r}: to keep what one of two masks keeps, (a | b) & ~(a & b).")

    def __bool__(self) -> NoReturn:
        raise ProblemError(
            f"{self!r} is a mask, which is neither true nor false: combine masks with & | ~ (not `and`, `or`, `not`), "
            "and test for its absence with `mask is None`."
        )


class Pair(Mask):
    """Two masks combined; abstract, see `And` and `Or`."""

    is_combined = True
    a: Mask
    b: Mask

    def signature(self, r: Rectangles) -> Ints:
        return np.concatenate([marked(self.a, r), marked(self.b, r)], axis=1)

    def broadcast_shape(self) -> tuple[int, int]:
        (batch_a, heads_a), (batch_b, heads_b) = broadcast_shape_of(self.a), broadcast_shape_of(self.b)
        return max(batch_a, batch_b), max(heads_a, heads_b)

    def bind(self, sizes: CallSizes) -> Mask:
        a, b = bound_to(self.a, sizes), bound_to(self.b, sizes)
        if a is self.a and b is self.b:  # so the cached fingerprint stays
            return self
        return self.with_fields(a=a, b=b)


_pairs: dict[tuple[type[Pair], int, int], tuple[Mask, Fingerprint, Fingerprint]] = {}
"""Two constant masks combined, by kind and by the addresses of their fingerprints, which are kept alive beside it.

So `Causal() & Window(32)`, written in a call, is one mask in every call, and takes half the time to be recognised.
"""


def _combined(kind: "type[And | Or]", a: Mask, b: Mask) -> Mask:
    """`kind(a, b)`; the same object where the masks are constant and equal to those of an earlier call."""
    if is_dynamo_compiling() or (first := a.constant()) is None or (second := b.constant()) is None:
        return kind(a, b)
    known = _pairs.get((kind, id(first), id(second)))
    return known[0] if known is not None else _keep_pair(kind(a, b), first, second)


def _keep_pair(made: "And | Or", first: Fingerprint, second: Fingerprint) -> Mask:
    if not (first.is_registered and second.is_registered):  # of a class that may have more attributes
        return made
    if len(_pairs) >= INTERNED:
        _pairs.clear()
    return _pairs.setdefault((type(made), id(first), id(second)), (made, first, second))[0]


@spec
class And(Pair):
    """Kept by both; written `a & b`."""

    a: Mask
    b: Mask

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return kept_pairs(self.a, b, h, q, k) & kept_pairs(self.b, b, h, q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        (some_a, all_a), (some_b, all_b) = bounds_of(self.a, r), bounds_of(self.b, r)
        return some_a & some_b, all_a & all_b

    def intervals(self, sizes: CallSizes) -> Union:
        return intersection(intervals_of(self.a, sizes), intervals_of(self.b, sizes))

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"{_inner(parts[0], Or)} & {_inner(parts[1], Or, And)}"


@spec
class Or(Pair):
    """Kept by either; written `a | b`."""

    a: Mask
    b: Mask

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return kept_pairs(self.a, b, h, q, k) | kept_pairs(self.b, b, h, q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        (some_a, all_a), (some_b, all_b) = bounds_of(self.a, r), bounds_of(self.b, r)
        return some_a | some_b, all_a | all_b

    def intervals(self, sizes: CallSizes) -> Union:
        return union(intervals_of(self.a, sizes), intervals_of(self.b, sizes))

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"{parts[0]} | {_inner(parts[1], Or)}"


@spec
class Not(Mask):
    """Kept where `a` does not keep; written `~a`."""

    is_combined = True
    a: Mask

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return kept_pairs(self.a, b, h, q, k) ^ True  # right for a Python bool as well, where ~ is not

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        some, every = bounds_of(self.a, r)
        return ~every, ~some

    def intervals(self, sizes: CallSizes) -> Union:
        return complement(intervals_of(self.a, sizes))

    def signature(self, r: Rectangles) -> Ints:
        return marked(self.a, r)

    def broadcast_shape(self) -> tuple[int, int]:
        return broadcast_shape_of(self.a)

    def bind(self, sizes: CallSizes) -> Mask:
        return self.with_fields(a=bound_to(self.a, sizes))

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"~{_inner(parts[0], Or, And)}"


@spec
class Varying(Mask):
    """A mask of a user whose `keep` uses the batch row or the head, and that has no `broadcast_shape` of its own."""

    inner: Mask
    batch: int
    heads: int

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        return kept_pairs(self.inner, b, h, q, k)

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        return bounds_of(self.inner, r)

    def intervals(self, sizes: CallSizes) -> Union:
        return intervals_of(self.inner, sizes)

    def signature(self, r: Rectangles) -> Ints:
        return signature_of(self.inner, r)

    def broadcast_shape(self) -> tuple[int, int]:
        return self.batch, self.heads

    def bind(self, sizes: CallSizes) -> Mask:
        return bound_to(self.inner, sizes)

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return str(parts[0])


def _of_used_axes(mask: Mask, sizes: CallSizes) -> Mask:
    """The mask with a pattern for each batch row or head that its `keep` uses, if it has no `broadcast_shape`."""
    if torch.compiler.is_compiling() or not (sizes.batch and sizes.heads and sizes.queries and sizes.keys):
        return mask  # torch cannot trace what follows; only schedules need what it finds
    kind = type(mask)
    if kind.broadcast_shape is not Mask.broadcast_shape or not method_may_use(kind.keep):
        return mask
    try:
        uses_batch, uses_heads = find_uses(mask.keep, sizes.offset)
    except Exception:  # noqa: BLE001 - `keep` of tiles raises it again, unless it needs tensors of several axes
        uses_batch = uses_heads = True
    shape = sizes.batch if uses_batch else 1, sizes.heads if uses_heads else 1
    return mask if shape == (1, 1) else Varying(mask, *shape)


def marked(mask: Mask, r: Rectangles) -> Ints:
    """The mask's signature, replaced by ALL or NONE where its bounds decide."""
    (some, every), own = bounds_of(mask, r), signature_of(mask, r)
    return np.where(every[:, None], ALL, np.where(some[:, None], own, NONE))


def is_made_of(mask: Mask, kinds: tuple[type[Mask], ...]) -> bool:
    """Whether a mask is of one of these classes, and of no subclass, or combined of such masks."""
    if type(mask) is And or type(mask) is Or:
        return is_made_of(mask.a, kinds) and is_made_of(mask.b, kinds)
    return is_made_of(mask.a, kinds) if type(mask) is Not else type(mask) in kinds


def kept_pairs(mask: Mask, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
    """`mask.keep` of these positions.

    Raises:
        ProblemError: `keep` takes other arguments; it uses a tensor of many positions as a single condition, as a
            Python `if` does; or it returns no bool tensor that broadcasts to the positions.
    """
    try:
        kept = mask.keep(b, h, q, k)
    except TypeError as error:
        check_takes_positions(mask, "keep", error)
        raise
    except RuntimeError as error:
        if "Boolean value of Tensor" not in str(error):
            raise
        raise ProblemError(
            f"{mask!r} uses a tensor as a condition of `if`, `and`, `or` or `not`: b, h, q and k are tensors of many "
            "positions at once. Combine conditions with & | ~, and choose between two with torch.where."
        ) from error
    if isinstance(cast(object, kept), bool):  # the same for all positions
        kept = _for_tensors(kept, b, h, q, k)
    if (wrong := wrong_kept(kept, b, h, q, k)) is not None:
        raise ProblemError(f"{mask!r}: keep returned {wrong}")
    return kept


def check_takes_positions(spec: Spec, method: str, error: TypeError) -> None:
    """Raise `ProblemError` if the error is that a method of the spec does not take b, h, q and k."""
    signature = inspect.signature(getattr(spec, method))
    try:
        signature.bind(*"bhqk")
    except TypeError:
        raise ProblemError(
            f"{type(spec).__name__}.{method} takes ({', '.join(signature.parameters)}): expected "
            f"{method}(self, b, h, q, k), of batch row, head, and the positions of query and key."
        ) from error


def _for_tensors(kept: Any, *positions: Positions) -> Any:
    """A bool as a tensor where positions are tensors."""
    device = next((p.device for p in positions if isinstance(p, Tensor)), None)
    return kept if device is None else torch.tensor(kept, device=device)


def wrong_kept(kept: object, *positions: Positions) -> str | None:
    """What is wrong with the result of a predicate for these positions, for an error message; None if it is right."""
    if isinstance(kept, bool) and not any(isinstance(p, Tensor) for p in positions):
        return None
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
        return f"{kept.dtype if isinstance(kept, Tensor) else type(kept).__name__}; expected a bool tensor."
    if (wrong := wrong_shape(kept, *positions)) is None:
        return None
    return (
        f"bool {wrong}. It is called tile by tile: compute with b, h, q and k, and index tables by them, such as "
        "table[q, k]."
    )


def wrong_shape(result: Tensor, *positions: Positions) -> str | None:
    """What is wrong with the shape of a result for these positions, for an error message; None if it broadcasts."""
    shapes = [tuple(p.shape) for p in positions if isinstance(p, Tensor)]
    axes = max([0, *map(len, shapes)])
    columns = zip(*((1,) * (axes - len(shape)) + shape for shape in shapes), strict=True)
    sizes = [next((size for size in column if size != 1), 1) for column in columns]  # broadcast_shapes takes 20 us
    own = (1,) * (axes - result.ndim) + tuple(result.shape)
    if len(own) == axes and all(map(broadcasts, own, sizes)):
        return None
    return (
        f"{list(result.shape)} for positions that broadcast to {sizes}: expected that shape, or one that "
        "broadcasts to it"
    )


def bounds_of(mask: Mask, r: Rectangles) -> tuple[Bools, Bools]:
    """`mask.bounds` of these rectangles.

    Raises:
        ProblemError: `bounds` returns no two bool arrays with an element for each rectangle.
    """
    bounds = cast(object, mask.bounds(r))  # of a user's mask, anything
    if not isinstance(bounds, tuple) or [_form(part) for part in cast("tuple[object, ...]", bounds)] != [len(r.b)] * 2:
        raise ProblemError(
            f"{mask!r}: bounds returned {reprlib.repr(bounds)}; expected a tuple (some, all) of two bool arrays of "
            f"shape [{len(r.b)}], with an element for each rectangle."
        )
    return cast("tuple[Bools, Bools]", bounds)


def signature_of(mask: Mask, r: Rectangles) -> Ints:
    """`mask.signature` of these rectangles, int64 [rectangles, n].

    Raises:
        ProblemError: `signature` returns no array of integers with a row for each rectangle.
    """
    found = cast(object, mask.signature(r))  # of a user's mask, anything
    is_right = isinstance(found, np.ndarray) and found.dtype.kind in "iub" and found.ndim == 2
    if not is_right or len(cast(Ints, found)) != len(r.b):
        form = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else reprlib.repr(found)
        raise ProblemError(
            f"{mask!r}: signature returned {form}; expected an array of integers [rectangles, n] = [{len(r.b)}, n], "
            "with a row for each rectangle."
        )
    return cast(Ints, found).astype(np.int64, copy=False)  # narrow integers have no room for ALL and NONE


def broadcast_shape_of(mask: Mask) -> tuple[int, int]:
    """`mask.broadcast_shape()`.

    Raises:
        ProblemError: of a user's mask, it is no method, or does not return two ints.
    """
    if mask._kind.is_own:  # pyright: ignore[reportPrivateUsage]
        return mask.broadcast_shape()
    method = cast(Any, mask.broadcast_shape)
    shape = method() if callable(method) else None
    found = tuple(cast("Sequence[Any]", shape)) if isinstance(shape, tuple | list) else ()
    if len(found) == 2 and all(hasattr(size, "__index__") for size in found):  # an int, also one of numpy
        return found
    raise ProblemError(
        f"{mask!r}: broadcast_shape {f'returned {shape!r}' if callable(method) else f'is {method!r}'}; expected a "
        "method that returns two ints (batch, heads), each 1 where keep does not depend on it."
    )


def intervals_of(mask: Mask, sizes: CallSizes) -> Union:
    """`mask.intervals` of a call of these sizes.

    Raises:
        ProblemError: `intervals` returns neither None nor a list of intervals whose edges fit the call.
    """
    found = mask.intervals(sizes)
    if mask._kind.is_own or found is None:  # pyright: ignore[reportPrivateUsage]
        return found
    if wrong := fault_of(found, sizes.batch, sizes.queries):
        raise ProblemError(
            f"{mask!r}: intervals returned {wrong}; expected None or a list of Interval, whose edges are None, an int, "
            f"or an int64 array [batch or 1, queries or 1] = [{sizes.batch} or 1, {sizes.queries} or 1]."
        )
    return limited([as_int64(x) for x in found])


def _form(part: object) -> int | None:
    """The elements of a bool array of one axis; None for anything else."""
    is_bools = isinstance(part, np.ndarray) and part.dtype == np.bool_ and part.ndim == 1
    return len(cast(Bools, part)) if is_bools else None


def as_tensors(*positions: Positions) -> tuple[Tensor, ...]:
    """Positions as tensors, ints on the device of the others, whatever the default device."""
    device = next((p.device for p in positions if isinstance(p, Tensor)), "cpu")
    return tuple(p if isinstance(p, Tensor) else torch.tensor(p, device=device) for p in positions)


def require_mask(other: object, place: str) -> Mask:
    """The mask; raises `ProblemError` for anything else. `place` says what takes it: an operator, or a function."""
    if isinstance(other, Mask):
        return other
    hint = instead(other, "mask")
    raise ProblemError(f"{place} takes a mask, and got {received(other)}; {hint}{'' if hint.endswith('?') else '.'}")


def _inner(mask: Fingerprint, *bracketed: type[Mask]) -> str:
    return f"({mask})" if mask.kind in bracketed else str(mask)
