"""A mask given as an expression of positions (`term.py`): its bounds follow from interval arithmetic."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.describe.mask import Bools, CallSizes, Ints, Mask, Positions, Rectangles, as_tensors
from regard.describe.spec import spec
from regard.describe.term import Captured, Constant, Op, Term, Variable, evaluate
from regard.describe.term_extent import Extents


@spec
class MaskTerm(Mask):
    """Kept where the term is true.

    >>> from regard import draw
    >>> q, k = Variable("q"), Variable("k")
    >>> mask = MaskTerm(Op("le", "bool", Op("abs", "int64", Op("sub", "int64", q, k)), Constant(1)))
    >>> mask
    MaskTerm((abs((q - k)) <= 1))
    >>> print(draw(mask, 3, 3))
    █ █ ·
    █ █ █
    · █ █
    """

    term: Term
    sizes: tuple[int, ...] | None = None

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        with torch.no_grad():  # a plan keeps results: a checkpoint, which computes again, would save fewer tensors
            return evaluate(self.term, dict(zip("bhqk", as_tensors(b, h, q, k), strict=True)))

    def bounds(self, r: Rectangles) -> tuple[Bools, Bools]:
        if self.sizes is None:
            return super().bounds(r)
        every, some = self._extents(r)
        return some > 0, every > 0

    def signature(self, r: Rectangles) -> Ints:
        own = [r.b] * ("b" in self.term.uses) + [r.h] * ("h" in self.term.uses)
        return np.stack([*own, r.q0 - r.k0] if is_by_distance(self.term) else [*own, r.q0, r.k0], axis=1)

    def broadcast_shape(self) -> tuple[int, int]:
        batch, heads = (1, 1) if self.sizes is None else self.sizes[:2]
        return batch if "b" in self.term.uses else 1, heads if "h" in self.term.uses else 1

    def bind(self, sizes: CallSizes) -> Mask:
        return self if self.sizes == tuple(sizes) else MaskTerm(self.term, tuple(sizes))

    @cached_property
    def _extents(self) -> Extents:
        assert self.sizes is not None
        return Extents(self.term, CallSizes(*self.sizes))

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"MaskTerm({parts[0]})"


Affine = dict[str, int]
"""Coefficients of variables, and of 1 under ""."""

WITHOUT_WRAP = {"int32": (8, 1 << 29), "int64": (1 << 24, 1 << 60)}
"""The largest coefficient and the largest number with which a sum of positions up to 2^26 does not wrap."""


def affine(term: Term) -> Affine | None:
    """The term as a sum of integer multiples of variables and a number; None where it is none.

    >>> affine(Op("sub", "int64", Variable("q"), Op("add", "int64", Variable("k"), Constant(3))))
    {'q': 1, 'k': -1, '': -3}
    """
    if isinstance(term, Variable):
        return {term.name: 1}
    if isinstance(term, Constant):
        return {"": term.value} if type(term.value) is int else None
    if not isinstance(term, Op) or term.dtype not in WITHOUT_WRAP:
        return None
    found = _affine_of_operator(term)
    if found is None:
        return None
    largest, number = WITHOUT_WRAP[term.dtype]
    fits = all(abs(value) <= (largest if name else number) for name, value in found.items())
    return found if fits else None


def _affine_of_operator(term: Op) -> Affine | None:
    parts = [affine(child) for child in term.children()]
    if any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    if term.name == "neg":
        return _scaled(found[0], -1)
    if term.name == "to":
        return found[0]
    if len(found) != 2:
        return None
    a, b = found
    if term.name in ("add", "sub", "rsub"):
        signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[term.name]
        return _sum(_scaled(a, signs[0]), _scaled(b, signs[1]))
    if term.name == "mul" and (set(a) <= {""} or set(b) <= {""}):
        number, other = (a, b) if set(a) <= {""} else (b, a)
        return _scaled(other, number.get("", 0))
    return None


def is_by_distance(term: Term) -> bool:
    """Whether the term depends on query and key by their difference alone."""
    sums = affine(term)
    if sums is not None:
        return sums.get("q", 0) == -sums.get("k", 0)
    if isinstance(term, Variable):
        return term.name not in ("q", "k")
    return isinstance(term, Constant | Captured) or all(map(is_by_distance, term.children()))


def _scaled(a: Affine, factor: int) -> Affine:
    return {name: factor * value for name, value in a.items() if factor * value}


def _sum(a: Affine, b: Affine) -> Affine:
    total = {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
    return {name: value for name, value in total.items() if value}
