"""Terms as masks: `q >= k` is `Causal()`, `ids[q] == ids[k]` is `Documents(ids)`; others are a `MaskTerm`."""

from typing import cast

import torch

from regard.describe.mask import And, CallSizes, Mask, Not, Or
from regard.describe.mask_by_rule import Causal, KeyLengths, Prefix, Window
from regard.describe.mask_by_table import Documents
from regard.describe.mask_by_term import Affine, MaskTerm, affine
from regard.describe.term import Captured, Constant, Op, Term, Variable

FLIPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}


def recognised(term: Term, sizes: CallSizes) -> Mask | bool:
    """The mask of a term; True where it keeps every pair of every call, False where it keeps none."""
    if isinstance(term, Constant):
        return bool(term.value)
    if not isinstance(term, Op):
        return MaskTerm(term)
    bools = term.dtype == "bool" and all(_is_bool(child) for child in term.children())
    if bools and term.name in ("bitwise_and", "logical_and", "bitwise_or", "logical_or"):
        a, b = (recognised(child, sizes) for child in term.children())
        return _both(a, b) if term.name.endswith("and") else _either(a, b)
    if bools and term.name in ("bitwise_not", "logical_not"):
        return _opposite(recognised(term.a, sizes))
    if term.name in FLIPPED:
        return _comparison(term, sizes)
    return MaskTerm(term)


def _is_bool(term: Term) -> bool:
    if isinstance(term, Constant):
        return type(term.value) is bool
    return isinstance(term, Op) and term.dtype == "bool"


def _both(a: Mask | bool, b: Mask | bool) -> Mask | bool:
    if isinstance(a, bool) or isinstance(b, bool):
        known, other = (a, b) if isinstance(a, bool) else (b, a)
        return other if known is True else False
    return And(a, b)


def _either(a: Mask | bool, b: Mask | bool) -> Mask | bool:
    if isinstance(a, bool) or isinstance(b, bool):
        known, other = (a, b) if isinstance(a, bool) else (b, a)
        return True if known is True else other
    return Or(a, b)


def _opposite(a: Mask | bool) -> Mask | bool:
    if isinstance(a, bool):
        return not a
    return a.a if isinstance(a, Not) else Not(a)


def _comparison(op: Op, sizes: CallSizes) -> Mask | bool:
    a, b = op.a, cast(Term, op.b)
    if op.name == "ne":
        return _opposite(_comparison(Op("eq", "bool", a, b), sizes))
    if op.name == "eq":
        found = _same_document(a, b, sizes)
        return MaskTerm(op) if found is None else found
    sums = affine(Op("sub", "int64", a, b))
    if sums is not None:
        if op.name in ("le", "lt"):
            sums = {name: -value for name, value in sums.items()}
        if op.name in ("gt", "lt"):  # a > b is a >= b + 1
            sums[""] = sums.get("", 0) - 1
        if set(sums) <= {""}:
            return sums.get("", 0) >= 0
        found = _half_plane(sums)
        return MaskTerm(op) if found is None else found
    tried = (_near(op.name, a, b), _near(FLIPPED[op.name], b, a), _lengths(op, sizes))
    return next((mask for mask in tried if mask is not None), MaskTerm(op))


def _half_plane(sums: Affine) -> Mask | None:
    """The mask `sums >= 0` of the distance, or of the key alone."""
    q, k, c = (sums.get(name, 0) for name in ("q", "k", ""))
    if set(sums) - {"q", "k", ""}:
        return None
    if (q, k) == (1, -1):  # k - q < c + 1
        if c == 0:
            return Causal()
        return Window(None, c + 1) if c > 0 else Not(Window(-c))
    if (q, k) == (-1, 1):  # q - k < c + 1
        return Window(c + 1) if c >= 0 else Not(Window(None, -c))
    if (q, k) == (0, -1):  # k < c + 1
        return Prefix(max(c + 1, 0))
    if (q, k) == (0, 1):  # k >= -c
        return Not(Prefix(max(-c, 0)))
    return None


def _near(name: str, a: Term, b: Term) -> Mask | None:
    """`abs(q - k) <= w`."""
    if name not in ("le", "lt") or not isinstance(a, Op) or a.name != "abs":
        return None
    sums, width = affine(a.a), affine(b)
    if sums is None or width is None or set(width) - {""}:
        return None
    if set(sums) == {"q", "k"} and abs(sums["q"]) == 1 and sums["q"] == -sums["k"]:
        size = width.get("", 0) + (name == "le")
        return Window(size, size) if size > 0 else None
    return None


def _same_document(a: Term, b: Term, sizes: CallSizes) -> Mask | None:
    """`ids[q] == ids[k]`, also with batch rows."""
    ids = _looked_up(a)
    if ids is None or _looked_up(b) is None or not isinstance(a, Op) or not isinstance(b, Op):
        return None
    other = _looked_up(b)
    if other is not ids or ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        return None
    axes = [[_name(child) for child in op.children()[1:]] for op in (a, b)]
    if sorted(axes) not in ([["k"], ["q"]], [["b", "k"], ["b", "q"]]):
        return None
    enough = ids.shape[-1] >= max(sizes.positions, sizes.keys) and (ids.ndim == 1 or ids.shape[0] == sizes.batch)
    return Documents(ids) if enough else None


def _lengths(op: Op, sizes: CallSizes) -> Mask | None:
    """`k < lengths[b]`."""
    if op.name != "lt" or _name(op.a) != "k" or not isinstance(op.b, Op):
        return None
    lengths = _looked_up(op.b)
    if lengths is None or [_name(child) for child in op.b.children()[1:]] != ["b"] or lengths.shape[0] != sizes.batch:
        return None
    if lengths.dtype not in (torch.int64, torch.int32):
        return None
    return KeyLengths(lengths.clamp(min=0))  # no look at its elements: a compiled call has none yet


def _looked_up(term: Term) -> torch.Tensor | None:
    if isinstance(term, Op) and term.name == "index" and isinstance(term.a, Captured):
        return term.a.tensor
    return None


def _name(term: Term) -> str:
    return term.name if isinstance(term, Variable) else ""
