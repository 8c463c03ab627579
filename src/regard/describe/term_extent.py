"""The least and the greatest value of a term over rectangles of positions, by interval arithmetic (Moore 1966).

What depends on the query alone, or on the key alone, is evaluated at every position once, and its extremes over a range
are looked up: so `ids[q]` or `q - start[ids[q]]` lose nothing. Where queries and keys meet, each operator has its rule,
which is exact as long as the two sides are independent; an operator without a rule is unknown, which is sound.

Truth values are numbers here: the greatest is whether *some* pair is true, the least whether *all* are.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from regard.describe.mask import CallSizes, Ints, Rectangles
from regard.describe.rectangle_tables import BlockCounts, RangeExtremes
from regard.describe.tensors import elements
from regard.describe.term import Captured, Constant, Op, Term, Variable, evaluate

Floats = NDArray[np.float64]

MOST = 1 << 24
"""Values of a term of one side that are kept in a table, over all batch rows and heads; beyond, the term is unknown."""

DENSE = 1 << 20
"""Elements of a bool table up to which every element is counted apart; beyond, blocks of 64 x 64."""

ROUNDING = {"float64": 2.0**-48, "float32": 2.0**-20, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""The share of its magnitude by which an extent of floats is widened, since torch rounds in each step."""


EXACT = 2.0**53
"""float64 has every integer of a smaller magnitude."""

COMPARING = frozenset(
    {"ge", "gt", "le", "lt", "eq", "ne", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "where"}
)
"""Operators whose numbers are rounded to the type of their tensors; others compute with them more exactly."""

JUMPING = frozenset({"floor_divide", "div_trunc", "remainder"})
"""Operators whose result may jump where torch rounds a quotient of floats."""


class Extent(NamedTuple):
    """(least, greatest) of a term in each rectangle; infinite where unknown."""

    low: Floats
    high: Floats


class Extents:
    """The extents of a term in a call."""

    def __init__(self, term: Term, sizes: CallSizes) -> None:
        self.term, self.sizes = term, sizes
        self.sides: dict[int, RangeExtremes | None] = {}
        self.counts: dict[int, BlockCounts] = {}

    def __call__(self, r: Rectangles) -> Extent:
        """The extents in some rectangles."""
        with np.errstate(all="ignore"):
            return self._of(self.term, r, {})

    def _of(self, term: Term, r: Rectangles, known: dict[int, Extent]) -> Extent:
        if id(term) in known:
            return known[id(term)]
        if isinstance(term, Constant):
            value = np.full(len(r.b), term.value)
            found = _outward(value, value)
        elif isinstance(term, Variable):
            found = _extent_of_variable(term.name, r)
        elif not {"q", "k"} <= term.uses:
            found = self._side(term, r)
        else:
            found = self._joined(cast(Op, term), r, known)
        known[id(term)] = found
        return found

    def _side(self, term: Term, r: Rectangles) -> Extent:
        """The extent of a term that uses the query or the key, not both: from a table of its values."""
        if id(term) not in self.sides:
            self.sides[id(term)] = self._table(term)
        table = self.sides[id(term)]
        if table is None:
            return _unknown(term, len(r.b))
        batch, heads = ("b" in term.uses), ("h" in term.uses)
        row = r.b * batch * (self.sizes.heads if heads else 1) + r.h * heads
        first = self.sizes.offset if "q" in term.uses else 0
        start, stop = (r.k0, r.k1) if "k" in term.uses else (r.q0 - first, r.q1 - first)
        if not {"q", "k"} & term.uses:
            start, stop = np.zeros_like(r.b), np.ones_like(r.b)
        return _outward(*table(row, start, stop))

    def _table(self, term: Term) -> RangeExtremes | None:
        s, uses = self.sizes, term.uses
        first, stop = (s.offset, s.positions) if "q" in uses else (0, s.keys if "k" in uses else 1)
        axis = torch.arange(first, stop, device="cpu")
        rows = (s.batch if "b" in uses else 1), (s.heads if "h" in uses else 1)
        if rows[0] * rows[1] * len(axis) > MOST:
            return None
        at = {
            "b": torch.arange(rows[0], device="cpu")[:, None, None], "h": torch.arange(rows[1], device="cpu")[:, None],
            "q": axis, "k": axis,
        }  # fmt: skip
        with torch.no_grad():  # the table is kept: a checkpoint, which computes again, would save fewer tensors
            values = evaluate(term, at)
        values = values.detach().cpu().expand(*rows, len(axis)).reshape(-1, len(axis))
        if values.is_floating_point():
            return None if values.isnan().any() else RangeExtremes(elements(values.double()))
        return RangeExtremes(elements(values.long()))

    def _joined(self, op: Op, r: Rectangles, known: dict[int, Extent]) -> Extent:
        if op.name == "index":
            return self._looked_up(op, r, [self._of(child, r, known) for child in op.children()[1:]])
        rule = RULES.get(op.name)
        jumps = op.name in JUMPING and op.dtype in ROUNDING
        if rule is None or jumps or (op.name.startswith("bitwise") and op.dtype != "bool"):
            return _unknown(op, len(r.b))
        low, high = rule(*(_converted(child, op, self._of(child, r, known)) for child in op.children()))
        if op.name == "to" and op.dtype not in ROUNDING:  # torch cuts the fraction; a number is true unless it is 0
            low, high = (np.trunc(low), np.trunc(high)) if op.dtype != "bool" else _of_bools(_to)(Extent(low, high))
        spread = ROUNDING.get(op.dtype)
        if spread is not None:
            low, high = low - spread * np.abs(low), high + spread * np.abs(high)
            limits = torch.finfo(getattr(torch, op.dtype))
            low, high = np.where(low < -limits.max, -np.inf, low), np.where(high > limits.max, np.inf, high)
            low, high = _with_zero(low, -limits.tiny), _with_zero(high, limits.tiny)
        unclear = np.isnan(low) | np.isnan(high)
        if spread is None and op.dtype != "bool":  # integers wrap
            least, most = _exact(op.dtype)
            unclear |= (low < least) | (high > most)
        worst = _unknown(op, len(r.b))
        return Extent(np.where(unclear, worst.low, low), np.where(unclear, worst.high, high))

    def _looked_up(self, op: Op, r: Rectangles, index: list[Extent]) -> Extent:
        """The extent of a table at indices of query and key: at one such, or at the last two of a bool table."""
        table = cast(Captured, op.a).tensor
        ends = [_cut(extent, size) for extent, size in zip(index, table.shape, strict=True)]
        bad = np.logical_or.reduce([e.low < 0 for e in index])  # a negative index counts from the end
        single = [bool((start == stop).all()) for start, stop in ends]
        worst = _unknown(op, len(r.b))
        if table.is_floating_point() and bool(table.isnan().any()):
            return worst
        if all(single[:-1]):
            low, high = self._in_row(op, table, ends)
        elif all(single[:-2]) and table.dtype == torch.bool:
            some, every = self._in_layout(op, table, ends)
            low, high = every, some
        else:
            return worst
        low, high = _outward(low, high)
        return Extent(np.where(bad, worst.low, low), np.where(bad, worst.high, high))

    def _in_row(
        self, op: Op, table: torch.Tensor, ends: list[tuple[Ints, Ints]]
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        row = np.zeros_like(ends[0][0])
        for (start, _), size in zip(ends[:-1], table.shape, strict=False):
            row = row * size + start
        if id(op) not in self.sides:
            flat = table.detach().cpu().reshape(-1, table.shape[-1])
            self.sides[id(op)] = RangeExtremes(elements(flat.double() if flat.is_floating_point() else flat.long()))
        return cast(RangeExtremes, self.sides[id(op)])(row, ends[-1][0], ends[-1][1] + 1)

    def _in_layout(
        self, op: Op, table: torch.Tensor, ends: list[tuple[Ints, Ints]]
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        if id(op) not in self.counts:
            whole = elements(table).reshape(-1, 1, *table.shape[-2:])
            self.counts[id(op)] = (
                BlockCounts.of_layout(whole, 1) if whole.size <= DENSE else BlockCounts.of_table(whole)
            )
        map_ = np.zeros_like(ends[0][0])
        for (start, _), size in zip(ends[:-2], table.shape, strict=False):
            map_ = map_ * size + start
        (top, bottom), (left, right) = ends[-2:]
        return self.counts[id(op)].bounds(Rectangles(map_, np.zeros_like(map_), top, bottom + 1, left, right + 1))


def _exact(dtype: str) -> tuple[float, float]:
    """The least and the greatest integer of a dtype that float64 has, too."""
    limits = torch.iinfo(getattr(torch, dtype))
    return max(limits.min, -EXACT), min(limits.max, EXACT)


def _converted(child: Term, op: Op, found: Extent) -> Extent:
    """The extent of an operand in the type to which torch converts all operands."""
    types = [getattr(torch, _dtype(each)) for each in op.children() if _dtype(each)]
    numbers = [each.value for each in op.children() if isinstance(each, Constant) and not each.dtype]
    shared = reduce(torch.promote_types, types)
    if not shared.is_floating_point and any(isinstance(number, float) for number in numbers):
        shared = torch.float32
    own = _dtype(child)
    if shared.is_floating_point:
        rounds = op.name in COMPARING if isinstance(child, Constant) else own not in ROUNDING
        return _as_type(found, shared) if rounds and own != "bool" else found
    if isinstance(child, Constant) and not own and shared != torch.bool:
        limits = torch.iinfo(shared)
        if not limits.min <= child.value <= limits.max:  # it wraps
            return _unknown(child, len(found.low))
    return found


def _as_type(found: Extent, dtype: torch.dtype) -> Extent:
    low, high = (torch.from_numpy(side).to(dtype).double().numpy() for side in found)
    return Extent(low, high)


def _dtype(term: Term) -> str:
    """The type of a term; "" of a number of Python, which takes that of the tensors beside it."""
    if isinstance(term, Captured):
        return str(term.tensor.dtype)[6:]
    return "int64" if isinstance(term, Variable) else getattr(term, "dtype", "")


def _with_zero(bound: Floats, least: float) -> Floats:
    """The bound, moved to `least` where it is closer to 0: torch may compute 0, or a number of few digits."""
    return np.where((bound != 0) & (np.abs(bound) < np.abs(least)), least, bound)


def _outward(low: NDArray[np.generic], high: NDArray[np.generic]) -> Extent:
    """The numbers as float64; integers beyond 2^53, which it rounds, are rounded down and up."""
    down, up = low.astype(np.float64), high.astype(np.float64)
    if low.dtype.kind in "iuO":
        down = np.where(np.abs(down) < EXACT, down, np.nextafter(down, -np.inf))
        up = np.where(np.abs(up) < EXACT, up, np.nextafter(up, np.inf))
    return Extent(down, up)


def _extent_of_variable(name: str, r: Rectangles) -> Extent:
    low, high = {"b": (r.b, r.b), "h": (r.h, r.h), "q": (r.q0, r.q1 - 1), "k": (r.k0, r.k1 - 1)}[name]
    return Extent(low.astype(np.float64), high.astype(np.float64))


def _unknown(term: Term, count: int) -> Extent:
    if isinstance(term, Op) and term.dtype == "bool":
        return Extent(np.zeros(count), np.ones(count))
    return Extent(np.full(count, -np.inf), np.full(count, np.inf))


def _cut(extent: Extent, size: int) -> tuple[Ints, Ints]:
    """The extent of an index, within the axis."""
    start, stop = (np.nan_to_num(np.clip(e, 0, size - 1)).astype(np.int64) for e in extent)
    return start, stop


# ---- a rule for each operator: from the extents of its operands to its own ------------------------------------------


def _add(a: Extent, b: Extent) -> Extent:
    return Extent(a.low + b.low, a.high + b.high)


def _sub(a: Extent, b: Extent) -> Extent:
    return Extent(a.low - b.high, a.high - b.low)


def _rsub(a: Extent, b: Extent) -> Extent:
    return _sub(b, a)


def _neg(a: Extent) -> Extent:
    return Extent(-a.high, -a.low)


def _of_corners(function: Callable[[Floats, Floats], Floats], a: Extent, b: Extent) -> Extent:
    corners = [function(x, y) for x in a for y in b]
    return Extent(np.minimum.reduce(corners), np.maximum.reduce(corners))


def _mul(a: Extent, b: Extent) -> Extent:
    return _of_corners(np.multiply, a, b)


def _quotient(a: Extent, b: Extent, function: Callable[[Floats, Floats], Floats]) -> Extent:
    found = _of_corners(function, a, b)
    crosses = (b.low <= 0) & (b.high >= 0)
    return Extent(np.where(crosses, np.nan, found.low), np.where(crosses, np.nan, found.high))


def _div(a: Extent, b: Extent) -> Extent:
    return _quotient(a, b, np.divide)


def _floor_divide(a: Extent, b: Extent) -> Extent:
    return _quotient(a, b, lambda x, y: np.where(np.abs(x) < EXACT, np.floor(x / y), np.nan))


def _trunc_divide(a: Extent, b: Extent) -> Extent:
    return _quotient(a, b, lambda x, y: np.where(np.abs(x) < EXACT, np.trunc(x / y), np.nan))


def _remainder(a: Extent, b: Extent) -> Extent:
    """The extent of Python's %, of one positive divisor; the whole range unless the quotient is one number."""
    known = (b.low == b.high) & (b.low > 0)
    same = np.floor(a.low / b.low) == np.floor(a.high / b.low)
    same &= np.maximum(np.abs(a.low), np.abs(a.high)) < EXACT
    low = np.where(same, a.low - np.floor(a.low / b.low) * b.low, 0.0)
    high = np.where(same, a.high - np.floor(a.low / b.low) * b.low, b.low)
    return Extent(np.where(known, low, np.nan), np.where(known, high, np.nan))


def _abs(a: Extent) -> Extent:
    crosses = (a.low <= 0) & (a.high >= 0)
    sides = np.abs(a.low), np.abs(a.high)
    return Extent(np.where(crosses, 0.0, np.minimum(*sides)), np.maximum(*sides))


def _minimum(a: Extent, b: Extent) -> Extent:
    return Extent(np.minimum(a.low, b.low), np.minimum(a.high, b.high))


def _maximum(a: Extent, b: Extent) -> Extent:
    return Extent(np.maximum(a.low, b.low), np.maximum(a.high, b.high))


def _where(condition: Extent, a: Extent, b: Extent) -> Extent:
    never, always = condition.high == 0, condition.low == 1
    low = np.where(always, a.low, np.where(never, b.low, np.minimum(a.low, b.low)))
    high = np.where(always, a.high, np.where(never, b.high, np.maximum(a.high, b.high)))
    return Extent(low, high)


def _rising(function: Callable[[Floats], Floats]) -> Callable[[Extent], Extent]:
    return lambda a: Extent(function(a.low), function(a.high))


def _truth(some: NDArray[np.bool_], every: NDArray[np.bool_]) -> Extent:
    return Extent(every.astype(np.float64), some.astype(np.float64))


def _ge(a: Extent, b: Extent) -> Extent:
    return _truth(a.high >= b.low, a.low >= b.high)


def _gt(a: Extent, b: Extent) -> Extent:
    return _truth(a.high > b.low, a.low > b.high)


def _eq(a: Extent, b: Extent) -> Extent:
    one = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth((a.low <= b.high) & (b.low <= a.high), one)


def _not(a: Extent) -> Extent:
    return Extent(1.0 - a.high, 1.0 - a.low)


def _xor(a: Extent, b: Extent) -> Extent:
    known = (a.low == a.high) & (b.low == b.high)
    differs = np.abs(a.low - b.low)
    return Extent(np.where(known, differs, 0.0), np.where(known, differs, 1.0))


def _of_bools(rule: Callable[..., Extent]) -> Callable[..., Extent]:
    """A rule for truth values; of integers, the operator means bits, and is unknown."""

    def guarded(*extents: Extent) -> Extent:
        found = rule(*extents)
        bools = np.logical_and.reduce([(e.low >= 0) & (e.high <= 1) for e in extents])
        return Extent(np.where(bools, found.low, np.nan), np.where(bools, found.high, np.nan))

    return guarded


def _clamp(a: Extent, *limits: Extent) -> Extent:
    low, high = limits
    return _minimum(_maximum(a, low), high)


def _to(a: Extent) -> Extent:
    return a


RULES: dict[str, Callable[..., Extent]] = {
    "add": _add, "sub": _sub, "rsub": _rsub, "neg": _neg, "mul": _mul, "div": _div, "floor_divide": _floor_divide,
    "div_trunc": _trunc_divide, "remainder": _remainder, "abs": _abs, "minimum": _minimum, "maximum": _maximum,
    "clamp": _clamp, "clamp_min": _maximum, "clamp_max": _minimum, "where": _where, "to": _to,
    "exp": _rising(np.exp), "exp2": _rising(np.exp2), "tanh": _rising(np.tanh), "sqrt": _rising(np.sqrt),
    "log": _rising(np.log), "log2": _rising(np.log2), "floor": _rising(np.floor), "ceil": _rising(np.ceil),
    "ge": _ge, "gt": _gt, "le": lambda a, b: _ge(b, a), "lt": lambda a, b: _gt(b, a), "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)), "logical_not": _of_bools(_not), "bitwise_not": _of_bools(_not),
    "logical_and": _of_bools(_minimum), "bitwise_and": _of_bools(_minimum), "logical_or": _of_bools(_maximum),
    "bitwise_or": _of_bools(_maximum), "logical_xor": _of_bools(_xor), "bitwise_xor": _of_bools(_xor),
}  # fmt: skip
