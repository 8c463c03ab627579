"""Attention of a rank's queries over one block of keys, forward and backward, by the backends that `attend` has.

Backward needs the gradients of a part of the keys, given the output and the log-sum-exp over all keys. `native`
computes them from those two (`ResumableKernel`). With another backend, and in half precision, the block is computed
again: its own output o and log-sum-exp l have the gradients `w * dout` and `w * (dout . (o - out) + dlse)`, where w is
`exp(l - lse)`. (In half precision `native` corrects the rounding of `out` by the sum of a row's changes, which is 0
only over all keys.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NamedTuple, cast

import torch
from torch import Tensor

from regard.backend.contract import Backend, ResumableKernel
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.dispatch.choose import Plan
from regard.dispatch.execute import drawing, execute
from regard.dispatch.plan_cache import prepare
from regard.errors import RefusalError
from regard.parallel.placed import Pieces, have_one_step, place_bias, place_mask, split_even, step_of
from regard.plan.problem import Operands
from regard.plan.request import Request
from regard.seeds import mixed
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.wide import wide_of


@dataclass(frozen=True, eq=False)
class Formula:
    """What is computed for each pair of a query and a key, in positions of the sequence; the same on every rank.

    Attributes:
        mask, bias: bound to the sequence.
        seed: what dropout draws from, on this rank.
    """

    mask: Mask | None
    bias: Bias | None
    score: Score | None
    scale: float | None
    softcap: float | None
    dropout: float
    backend: str | Backend | None
    seed: int = 0

    def tensors(self) -> list[Tensor]:
        """The tensors of bias and score, to which gradients flow; each once."""
        found = [t for spec in (self.bias, self.score) if spec is not None for t in spec.tensors()]
        return list({id(t): t for t in found}.values())


class Part(NamedTuple):
    """Queries and a block of keys of this process.

    Attributes:
        q: [batch, heads, tokens of `queries`, qk_dim].
        k, v: [batch, kv_heads, tokens of `keys`, ...].
        queries, keys: where they are in the sequence.
    """

    q: Tensor
    k: Tensor | StoredTensor
    v: Tensor | StoredTensor
    queries: Pieces
    keys: Pieces


class Gradients(NamedTuple):
    """Gradients, in float32 or wider, of a part; `more` are those of `Formula.tensors`, None where there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    more: list[Tensor | None]


def state_of(formula: Formula, part: Part) -> State:
    """The state of the queries over the block, its output in float32 or wider."""
    cut = _cut(formula, part)
    if cut is None:
        plan, operands = _prepared(formula, part)
        with drawing(plan, operands, _seed(formula)) as seeded:
            return widened(execute(plan, seeded, formula.backend)[1])
    rows = [
        reduce(or_, [state_of(_with_seed(formula, i, j), _sub(part, row, column)) for j, column in enumerate(cut.keys)])
        for i, row in enumerate(cut.queries)
    ]
    return State(torch.cat([row.out for row in rows], 2), torch.cat([row.lse for row in rows], 2))


def check_can_run(formula: Formula, part: Part) -> None:
    """Raise the error of `state_of` if its backend cannot run the part."""
    _prepared(formula, part)


def gradients_of(formula: Formula, part: Part, total: State, dout: Tensor, dlse: Tensor) -> Gradients:
    """The gradients of a part, from the state of the queries over all keys; all in float32 or wider.

    Args:
        dout: [batch, heads, queries, v_dim], the gradient of `total.out`.
        dlse: [batch, heads, queries], that of `total.lse`.
    """
    cut = _cut(formula, part)
    if cut is None:
        return _gradients(formula, part, total, dout, dlse)
    found = zeros_like(part, len(formula.tensors()))
    for i, row in enumerate(cut.queries):
        at = row[0]
        rows = State(total.out[:, :, at], total.lse[:, :, at].contiguous()), dout[:, :, at], dlse[:, :, at]
        for j, column in enumerate(cut.keys):
            one = gradients_of(_with_seed(formula, i, j), _sub(part, row, column), *rows)
            found.q[:, :, at] += one.q
            found.k[:, :, column[0]] += one.k
            found.v[:, :, column[0]] += one.v
            found = found._replace(more=added(found.more, one.more))
    return found


def zeros_like(part: Part, more: int) -> Gradients:
    """Gradients of 0."""
    q, k, v = (torch.zeros(t.shape, dtype=wide_of(part.q.dtype), device=part.q.device) for t in part[:3])
    return Gradients(q, k, v, [None] * more)


def added(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sums, where None is 0."""
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def widened(state: State) -> State:
    """The state with its output in the type of its lse, so that merging rounds nothing."""
    return State(state.out.to(state.lse.dtype), state.lse)


def empty_state(q: Tensor, v_dim: int) -> State:
    """The state of queries that see no key."""
    kind = wide_of(q.dtype)
    return State(
        torch.zeros((*q.shape[:3], v_dim), dtype=kind, device=q.device),
        torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device),
    )


def _prepared(formula: Formula, part: Part) -> tuple[Plan, Operands]:
    f, (q, k, v, queries, keys) = formula, part
    mask, bias = place_mask(f.mask, queries, keys), place_bias(f.bias, queries, keys)
    request = Request(q, k, v, mask, bias, f.score, f.scale, f.softcap, None, f.dropout, 0, f.backend, lse=True)
    prepared = prepare(request)
    if prepared is None:
        raise RefusalError("tensors without data (meta, or traced by torch): attention over ranks sends data.")
    return prepared[0], prepared[1]._replace(lse=True)


def _gradients(formula: Formula, part: Part, total: State, dout: Tensor, dlse: Tensor) -> Gradients:
    q, k, v = leaves = [cast(Tensor, t).detach().requires_grad_() for t in part[:3]]
    more = formula.tensors()
    with torch.enable_grad():
        plan, operands = _prepared(formula, Part(q, k, v, part.queries, part.keys))
        kind = part.q.dtype
        with drawing(plan, operands, _seed(formula)) as seeded:
            if kind == wide_of(kind) and isinstance(plan.kernel, ResumableKernel):
                state = plan.kernel.resume(plan.changed(seeded), total, is_part=True)
                grads = [dout, dlse]
            else:
                state = execute(plan, seeded, formula.backend)[1]
                grads = _of_part(widened(State(state.out.detach(), state.lse.detach())), total, dout, dlse)
        wanted = [t for t in (*leaves, *more) if t.requires_grad]
        flowing = [(t, g.to(t.dtype)) for t, g in zip((state.out, state.lse), grads, strict=True) if t.requires_grad]
        found = torch.autograd.grad([t for t, _ in flowing], wanted, [g for _, g in flowing], allow_unused=True)
    each = {id(t): grad for t, grad in zip(wanted, cast("tuple[Tensor | None, ...]", found), strict=True)}
    dq, dk, dv = (torch.zeros_like(t) if (grad := each[id(t)]) is None else grad for t in leaves)
    to = wide_of(kind)
    return Gradients(dq.to(to), dk.to(to), dv.to(to), [each.get(id(t)) for t in more])


def _of_part(own: State, total: State, dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """The gradients of the output and the log-sum-exp of a block."""
    weight = torch.where(own.lse == -torch.inf, 0.0, torch.exp(own.lse - total.lse))
    change = (dout * (own.out - total.out)).sum(-1) + dlse
    return [weight[..., None] * dout, torch.where(weight == 0, 0.0, weight * change)]


class _Cuts(NamedTuple):
    queries: list[tuple[slice, Pieces]]
    keys: list[tuple[slice, Pieces]]


TABLE = 1 << 22
"""The largest table of a bias by distance, in elements; beyond it, queries and keys are cut instead."""


def _cut(formula: Formula, part: Part) -> _Cuts | None:
    """The even pieces of queries and keys, if a bias by distance is then a vector and no large table."""
    by_distance = formula.bias is not None and any(term.per_distance() for term in formula.bias.terms())
    if not by_distance or isinstance(part.k, StoredTensor) or have_one_step(part.queries, part.keys):
        return None
    if part.q.shape[1] * part.q.shape[2] * part.k.shape[2] <= TABLE:
        return None
    cuts = _Cuts(split_even(part.queries), split_even(part.keys))
    steps = {step_of(place) for _, place in (*cuts.queries, *cuts.keys)}
    return cuts if len(steps) == 1 and len(cuts.queries) * len(cuts.keys) > 1 else None


def _sub(part: Part, row: tuple[slice, Pieces], column: tuple[slice, Pieces]) -> Part:
    k, v = (cast(Tensor, t)[:, :, column[0]] for t in (part.k, part.v))
    return Part(part.q[:, :, row[0]], k, v, row[1], column[1])


def _seed(formula: Formula) -> int | None:
    return formula.seed if formula.dropout else None


def _with_seed(formula: Formula, *indices: int) -> Formula:
    return replace(formula, seed=mixed(formula.seed, *indices)) if formula.dropout else formula
