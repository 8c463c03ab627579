"""A `score_mod` in regard's own words, where its term has the form `softcap(scale * score) + bias`, hidden by a mask.

The term is taken apart from the outside: what is added becomes a bias, what multiplies becomes a scale, `where(...,
-inf)` becomes a mask, and `c * tanh(score / c)` is the softcap. What is left must be the score itself; if it is not, a
`ScoreFunction` computes the term as it is.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from regard.describe.bias import Bias, DistanceBias, TensorBias
from regard.describe.mask import CallSizes
from regard.describe.mask_by_term import is_by_distance
from regard.describe.term import Captured, Constant, Op, Term, Variable, evaluate
from regard.flex.trace import is_traced

ONE, MINUS = Constant(1.0), Constant(-1.0)


@dataclass
class Parts:
    """`softcap(scale * factor * score) + bias` where `kept`, -inf elsewhere.

    Attributes:
        scale: a number.
        factor: a term without the score, or None for 1.
        softcap: c of c * tanh(x / c), or None for none.
        bias: terms that are added.
        kept: conditions, all of which a pair must meet.
    """

    scale: float = 1.0
    factor: Term | None = None
    softcap: float | None = None
    bias: tuple[Term, ...] = ()
    kept: tuple[Term, ...] = ()


def taken_apart(term: Term, dtype: str) -> Parts | None:
    """The parts of the term of a `score_mod`; None if it has another form.

    Args:
        dtype: of scores.

    >>> score, q, k = Variable("score"), Variable("q"), Variable("k")
    >>> taken_apart(Op("add", "float32", score, Op("sub", "int64", k, q)), "float32").bias
    ((k - q),)
    """
    parts, factor = Parts(), cast(Term, ONE)
    while isinstance(term, Op):
        inner = [child for child in term.children() if "score" in child.uses]
        if len(inner) != 1 or term.dtype not in (dtype, "float64"):
            return None
        if term.name == "tanh":
            return _capped(term, factor, parts, dtype)
        if term.name == "where":
            condition = _hides(term, inner[0])
            if condition is None or not isinstance(factor, Constant) or factor.value <= 0:
                return None
            parts.kept += (condition,)
        elif term.name in ("add", "sub", "rsub"):
            sign, other, negated = _addend(term, inner[0])
            parts.bias += (_times(_times(factor, sign, dtype), other, dtype),)
            factor = _times(factor, MINUS, dtype) if negated else factor
        else:
            more = _multiplier(term, inner[0], dtype)
            if more is None:
                return None
            factor = _times(factor, more, dtype)
        term = inner[0]
    if isinstance(factor, Constant):
        parts.scale = float(factor.value)
    else:
        parts.factor = factor
    is_score = isinstance(term, Variable) and term.name == "score"
    return _with_conditions(parts) if is_score else None


def _capped(term: Op, cap: Term, parts: Parts, dtype: str) -> Parts | None:
    """The parts where what remains is `cap * tanh(factor * score)`."""
    inside = taken_apart(term.a, dtype)
    if not isinstance(cap, Constant) or cap.value <= 0 or inside is None or inside != Parts(scale=inside.scale):
        return None
    parts.softcap, parts.scale = float(cap.value), inside.scale * cap.value
    return _with_conditions(parts)


def _hides(term: Op, inner: Term) -> Term | None:
    """The condition under which `where` keeps the score, and else gives -inf."""
    _, a, b = term.children()
    if inner is a and _is_minus_infinity(b):
        return term.a
    if inner is b and _is_minus_infinity(a):
        return Op("logical_not", "bool", term.a)
    return None


def _is_minus_infinity(term: Term) -> bool:
    return isinstance(term, Constant) and term.value == -math.inf


def _addend(term: Op, inner: Term) -> tuple[Constant, Term, bool]:
    """(sign, what is added, whether the score is subtracted) of a sum."""
    a, b = term.children()
    other = b if inner is a else a
    subtracted = {"add": None, "sub": b, "rsub": a}[term.name]
    return (MINUS if other is subtracted else ONE), other, inner is subtracted


def _multiplier(term: Op, inner: Term, dtype: str) -> Term | None:
    """What multiplies the score; None where the operator does something else."""
    if term.name == "neg":
        return MINUS
    if term.name == "to":
        return ONE
    if term.name == "mul":
        a, b = term.children()
        return _number(b if inner is a else a)
    if term.name == "div" and inner is term.a and term.b is not None:
        number = _number(term.b)
        if isinstance(number, Constant):
            return Constant(1 / number.value) if number.value else None
        return Op("reciprocal", dtype, _as_dtype(number, dtype))
    return None


def _number(term: Term) -> Term:
    """The term, as a constant where it is a captured number that is known and not learned."""
    if isinstance(term, Captured) and not (term.tensor.requires_grad or is_traced(term.tensor)):
        return Constant(float(term.tensor))
    return Constant(float(term.value)) if isinstance(term, Constant) else term


def _times(a: Term, b: Term, dtype: str) -> Term:
    """The product, made in the type of scores, as each step of the function is: a table may be of a narrower one."""
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(a.value * b.value)
    if isinstance(a, Constant) and a.value == 1:
        return b
    if isinstance(b, Constant) and b.value == 1:
        return a
    return Op("mul", dtype, _as_dtype(a, dtype), _as_dtype(b, dtype))


def _as_dtype(term: Term, dtype: str) -> Term:
    is_already = isinstance(term, Constant) or (isinstance(term, Op) and term.dtype == dtype)
    return term if is_already else Op("to", dtype, term)


def _with_conditions(parts: Parts) -> Parts:
    """The parts with `where(condition, bias, -inf)` as a condition and a bias."""
    bias: list[Term] = []
    for term in parts.bias:
        if isinstance(term, Op) and term.name == "where" and "score" not in term.uses:
            condition, a, b = term.children()
            if _is_minus_infinity(b):
                parts.kept += (condition,)
                bias += [] if _is_zero(a) else [a]
                continue
            if _is_minus_infinity(a):
                parts.kept += (Op("logical_not", "bool", condition),)
                bias += [] if _is_zero(b) else [b]
                continue
        bias += [] if _is_zero(term) else [term]
    parts.bias = tuple(bias)
    return parts


def _is_zero(term: Term) -> bool:
    return isinstance(term, Constant) and term.value == 0


# ---- biases ---------------------------------------------------------------------------------------------------------


def distance_bias(terms: tuple[Term, ...], sizes: CallSizes, wide: torch.dtype) -> Bias | None:
    """Those terms that depend on the distance and the head alone, as one table; None if there are none."""
    if not terms:
        return None
    distance = torch.arange(1 - sizes.keys, sizes.queries, device="cpu")
    head = torch.arange(sizes.heads, device="cpu")[:, None]
    zero = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    values = {"b": zero, "h": head, "q": distance[None], "k": zero}
    total = sum((evaluate(term, values).to(wide) for term in terms), torch.zeros((), dtype=wide, device="cpu"))
    return DistanceBias(total.expand(total.shape[0] if total.ndim == 2 else 1, distance.shape[0]), 1 - sizes.keys)


def is_by_distance_and_head(term: Term) -> bool:
    """Whether a bias is a vector per head."""
    return "b" not in term.uses and is_by_distance(term)


def tensor_bias(term: Term, sizes: CallSizes) -> Bias | None:
    """`table[b, h, q, k]`, with axes left out or in another order, as the table itself; None for other terms."""
    if not isinstance(term, Op) or term.name != "index" or not isinstance(term.a, Captured):
        return None
    table, index = term.a.tensor, term.children()[1:]
    names = [each.name if isinstance(each, Variable) else "" for each in index]
    if "" in names or len(set(names)) != len(names):
        return None
    lengths = dict(zip("bhqk", sizes[:4], strict=True))
    if any(table.shape[axis] < lengths[name] for axis, name in enumerate(names)):
        return None  # evaluated, it raises the error of an index that is out of range
    order = sorted(range(len(names)), key=lambda axis: "bhqk".index(names[axis]))
    table = table.permute(order)
    for axis, at in enumerate(order):
        table = table.narrow(axis, 0, lengths[names[at]])
    for axis, name in enumerate("bhqk"):
        table = table if name in names else table.unsqueeze(axis)
    return TensorBias(table, offset=0) if table.is_floating_point() else None


def rows_of_bias(terms: tuple[Term, ...], sizes: CallSizes, rows: slice, wide: torch.dtype) -> Tensor:
    """The sum of terms for some queries, [batch or 1, heads or 1, queries, keys]."""
    uses = frozenset[str]().union(*(term.uses for term in terms))
    values = {
        "b": torch.arange(sizes.batch if "b" in uses else 1, device="cpu")[:, None, None, None],
        "h": torch.arange(sizes.heads if "h" in uses else 1, device="cpu")[:, None, None],
        "q": torch.arange(rows.start, rows.stop, device="cpu")[:, None],
        "k": torch.arange(sizes.keys, device="cpu"),
    }
    total = sum((evaluate(term, values).to(wide) for term in terms), torch.zeros((), dtype=wide, device="cpu"))
    return total[(None,) * (4 - total.ndim)]


def is_per_query(term: Term) -> bool:
    """Whether a factor of the scores is one of each query, so that it multiplies the query itself."""
    return "k" not in term.uses
