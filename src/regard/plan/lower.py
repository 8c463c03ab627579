"""Lowering: small named steps that rewrite a problem in terms that more backends support.

A lowering takes a problem and its schedule, and returns a problem with the same answer and the `Step` between the two:
a sentence, which the plan keeps and `explain` shows, and a function of the operands of every call. `simplify_mask`
serves all backends; each backend lists the others that it wants, in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, Sum, TensorBias, values_of
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import CallSizes, Mask, Rectangles, bounds_of, broadcast_shape_of, intervals_of
from regard.describe.mask_by_rule import Causal
from regard.describe.score import Score
from regard.describe.tensors import ContentKey
from regard.plan.few_rows import cover
from regard.plan.problem import Operands, Problem, is_pairwise
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule
from regard.state import State
from regard.storage.hadamard import hadamard
from regard.wide import wide_of


@dataclass(frozen=True)
class Step:
    """The record of a lowering.

    Attributes:
        name: the name of the lowering.
        did: a sentence for `explain`.
        apply: maps the operands of each call, differentiably; None for nothing. It keeps no tensor.
        finish: maps the state that the backend returns; None for nothing.
    """

    name: str
    did: str
    apply: Callable[[Operands], Operands] | None = None
    finish: Callable[[State], State] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.did}"


Lowering = Callable[[Problem, Schedule], tuple[Problem, Step | None]]
"""A function that simplifies a problem: it returns the new one, and the step that maps operands and state."""


def simplify_mask(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Replace the mask by none, or by `Causal()`, where the schedule shows that it keeps the same pairs in this call.

    Examples are a window longer than the sequence, lengths that are all full, one decoded token.

    Returns:
        the problem, and the step; None if nothing changed.
    """
    if problem.mask is None:
        return problem, None
    if not len(tiles.patch_tile) and tiles.pairs == problem.batch * problem.heads * problem.queries * problem.keys:
        return replace(problem, mask=None), Step("simplify_mask", f"{problem.mask} hides nothing in this call")
    if problem.offset >= problem.keys - 1:  # `Causal()` would hide nothing
        return problem, None
    if problem.mask != _CAUSAL and tiles.maps == (1, 1) and _is_triangle(tiles):
        return replace(problem, mask=_CAUSAL), Step(
            "simplify_mask", f"{problem.mask} keeps the same pairs as Causal() in this call"
        )
    return problem, None


def hides_nothing(mask: Mask, sizes: CallSizes) -> bool:
    """Whether intervals or bounds of a mask, bound to a call of these sizes, show that it keeps every pair."""
    if broadcast_shape_of(mask) != (1, 1):
        return False
    intervals = intervals_of(mask, sizes)
    if intervals is not None:
        return cover(intervals, sizes)
    q0, keys = sizes.offset, sizes.keys
    whole = Rectangles(*np.array([[0], [0], [q0], [q0 + sizes.queries], [0], [keys]]))
    return bool(bounds_of(mask, whole)[1][0])


def gather(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Gather and decode stored keys and values to tensors."""
    if problem.storage is None:
        return problem, None
    did = f"keys and values ({problem.storage}) are copied into tensors of {str(problem.dtype).removeprefix('torch.')}"
    return replace(problem, storage=None), Step("gather", did, gathered)


def gather_where_needed(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """`gather`, only if gradients are needed or the score is no dot product."""
    return gather(problem, tiles) if problem.grad or problem.score is not None else (problem, None)


def rotate(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Rotate the queries by the Hadamard transform of the stored keys, and the outputs back."""
    if problem.storage is None or "rotated" not in problem.storage.k:
        return problem, None
    did = "q is rotated by a Hadamard transform as the stored keys are, and the output is rotated back"
    return problem, Step("rotate", did, _rotated, _rotated_back)


def prepare_score(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Apply the part of a score that is per token; what remains is mostly the dot product, which every backend has."""
    if problem.score is None:
        return problem, None
    prepared = cast("type[Score]", problem.score.kind).prepared(problem.score)
    if prepared is None:
        return problem, None
    after = replace(problem, score=prepared.left, qk_dim=problem.score_dim, k_dim=problem.score_dim)
    return after, Step("prepare_score", prepared.did, _prepared)


def widen(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Convert queries, keys and values to float64."""
    if problem.dtype == torch.float64:
        return problem, None
    return problem, Step("widen", "q, k and v are converted to float64", _widened)


def pack(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Copy q, k or v where the last dimension is not contiguous."""
    if not problem.non_contiguous:
        return problem, None
    did = f"{', '.join(problem.non_contiguous)} copied: last dimension not contiguous"
    return replace(problem, non_contiguous=()), Step("pack", did, partial(_packed, problem.non_contiguous))


def add_biases(problem: Problem, tiles: Schedule) -> tuple[Problem, Step | None]:
    """Make one tensor of all terms of the bias that are no vectors by distance, in the precision of scores.

    A term that is no tensor, of a class outside regard without `per_distance`, is computed for every pair.
    """
    terms = [] if problem.bias is None else _terms(problem.bias)
    computed = [terms[i] for i in problem.pairwise]
    tensors = [term for term in terms if term.kind is TensorBias]
    if len(tensors) < 2 and not computed:
        return problem, None
    added = len(tensors) + len(computed)
    whole = Fingerprint(TensorBias, (ContentKey("added", f"{added} added"), None))
    others = [term for i, term in enumerate(terms) if term.kind is not TensorBias and i not in problem.pairwise]
    did = [f"{term.kind.__name__} is computed for every query and key, as it has no per_distance" for term in computed]
    did += [f"the {added} tensors of the bias are added into one"] if added > 1 else []
    after = replace(problem, bias=reduce(lambda a, b: Fingerprint(Sum, (a, b)), [*others, whole]), pairwise=())
    return after, Step("add_biases", "; ".join(did), partial(_added, problem))


_CAUSAL = Causal().fingerprint()


def gathered(operands: Operands) -> Operands:
    """The operands, with stored keys and values as tensors."""
    if operands.stored is None:
        return operands
    k, v = operands.stored
    return operands._replace(k=k.dense(), v=v.dense(), stored=None)


def _rotated(operands: Operands) -> Operands:
    return operands._replace(q=hadamard(operands.q))


def _rotated_back(state: State) -> State:
    return State(hadamard(state.out), state.lse)


def _widened(operands: Operands) -> Operands:
    return operands._replace(q=operands.q.double(), k=operands.k.double(), v=operands.v.double())


def _prepared(operands: Operands) -> Operands:
    assert operands.score is not None
    q, k, score = operands.score.prepare(operands.q, operands.k)
    return operands._replace(q=q, k=k, score=score)


def _is_triangle(tiles: Schedule) -> bool:
    """Whether the schedule keeps the same pairs as `Causal()`: compares counts first, then tiles."""
    seen = np.clip(np.arange(tiles.queries) + tiles.offset + 1, 0, tiles.keys)
    if int(seen.sum()) * tiles.batch * tiles.heads != tiles.pairs:
        return False
    sizes = {name: getattr(tiles, name) for name in ("batch", "heads", "queries", "keys", "offset", "tile")}
    return _same(tiles, schedule(Causal(), **sizes))


def _same(a: Schedule, b: Schedule) -> bool:
    names = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile")
    if not all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names):
        return False
    return np.array_equal(a.patterns[a.patch_pattern], b.patterns[b.patch_pattern])


def _packed(names: tuple[str, ...], operands: Operands) -> Operands:
    copies: dict[str, Any] = {name: getattr(operands, name).contiguous() for name in names}
    return operands._replace(**copies)


def _terms(bias: Fingerprint) -> list[Fingerprint]:
    return [term for part in bias.parts for term in _terms(part)] if bias.kind is Sum else [bias]


def _added(problem: Problem, operands: Operands) -> Operands:
    """The operands, with all terms of the bias that are no vectors in one, whose rows are the queries of the call."""
    terms, sizes = cast(Bias, operands.bias).terms(), operands.sizes
    vectors = [term for term in terms if not (_is_tensor(term) or is_pairwise(term))]
    wide = wide_of(problem.dtype)
    tensors = [_table(term, sizes, operands.q.device, wide) for term in terms if _is_tensor(term) or is_pairwise(term)]
    whole = TensorBias(reduce(add, (t.to(wide) for t in tensors)), sizes.offset)
    return operands._replace(bias=reduce(add, [*vectors, whole]))


def _table(term: Bias, call: CallSizes, device: torch.device, wide: torch.dtype) -> Tensor:
    """The values of a bias, [batch or 1, heads or 1, queries or 1, keys or 1], computed in at least this type."""
    if type(term) is TensorBias:
        return term.rows(call.queries, call.offset)
    b, h, q, k = (torch.arange(size, device=device) for size in call[:4])
    at = b[:, None, None, None], h[:, None, None], q[:, None] + call.offset, k
    value = values_of(term.widened(wide), *at)
    return value[(None,) * (4 - value.ndim)]


def _is_tensor(term: Bias) -> bool:
    return type(term) is TensorBias
