"""The backend `reference`: it computes every call of regard, tile by tile, on any device that torch has.

It computes the formula of `definition.py` without n x n scores. For each tile of queries it takes the key tiles that
the schedule lists, computes their scores at once, and merges chunks of keys as states: memory for one tile of queries
by `SCORES`. All of it is plain, functional torch, so gradients of any order, forward mode and vmap need no code of
their own. Where a large call needs gradients, each tile is computed again in the backward pass (Chen et al. 2016,
arXiv:1604.06174), which keeps memory at that size.

What is masked never reaches a result, also where it is NaN: a FULL tile has nothing masked, and in a PARTIAL one the
products leave out what is not finite (`reference_products.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from operator import add, or_
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.backend.contract import Backend, Kernel
from regard.backend.reference_products import products, weighted_values
from regard.describe.bias import Bias, values_of
from regard.describe.score import Score, compare_pairs
from regard.describe.score_function import ScoreFunction
from regard.plan.checks import is_finite
from regard.plan.lower import Lowering, gather, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.seeds import mixed
from regard.state import State, fold_sink
from regard.wide import wide_of

SCORES = 1 << 22
"""Scores computed at once: 16 MiB in float32, about a core's share of the cache. More is no faster."""

SLAB = 1 << 20
"""Elements computed at once for scores that need several per pair (`Additive`, ...). They are read several times, so
they must fit in the cache: with four times as many the time doubles."""

REMEMBERED = 1 << 22
"""Scores that autograd may keep; for more, tiles are computed again in the backward pass."""


@dataclass(frozen=True)
class Reference(Backend):
    """Computes every problem: in float64 for float64 operands, else in float32."""

    name: str = "reference"
    tile: int = 128
    lowerings: tuple[Lowering, ...] = (gather, prepare_score)
    hides_by_zero: bool = False

    def refusals(self, problem: Problem) -> list[str]:
        return []

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return partial(self._run, problem, schedule)

    def _run(self, problem: Problem, schedule: Schedule, operands: Operands) -> State:
        if not problem.batch * problem.heads * problem.queries:
            return _nothing(problem, operands)
        compute = wide_of(operands.q.dtype)
        if operands.bias is not None and (problem.grad or problem.transformed):  # gradients are summed in this width
            operands = operands._replace(bias=operands.bias.widened(compute))
        guarded = len(schedule.patch_tile) > 0 and (
            problem.transformed or not all(map(is_finite, (operands.q, operands.k, operands.v)))
        )
        states = [
            [_map(_block(problem, schedule, operands, compute, guarded, m, n)) for n in range(schedule.maps[1])]
            for m in range(schedule.maps[0])
        ]
        whole = _joined([_joined(row, dim=1) for row in states], dim=0)
        if problem.grad and not schedule.pairs:
            return _nothing(problem, operands)
        out = whole.out
        if problem.grad or problem.transformed:  # a row that sees nothing drops its gradient, even one that is NaN
            out = torch.where(whole.lse[..., None] == -torch.inf, 0.0, out)
        return State(out.to(problem.dtype), whole.lse.to(wide_of(problem.dtype)))


class _Block(NamedTuple):
    """The batch rows and heads that share a map of the schedule; k and v in the type of the computation."""

    problem: Problem
    schedule: Schedule
    q: Tensor  # [batch, heads, queries, qk_dim]
    k: Tensor  # [batch, kv_heads, keys, qk_dim]
    v: Tensor  # [batch, kv_heads, keys, v_dim]
    operands: Operands
    first: tuple[int, int]  # batch row and head of the block in the call
    row: int  # of its first query tile in the schedule
    guarded: bool  # some key or value may be NaN or infinite
    score: Score | None
    sink: Tensor | None  # [heads], in the type of the computation


class _Piece(NamedTuple):
    """Keys start <= k < stop, and the index of their pattern; None where all pairs are kept."""

    start: int
    stop: int
    pattern: int | None


def _block(
    problem: Problem, schedule: Schedule, operands: Operands, compute: torch.dtype, guarded: bool, m: int, n: int
) -> _Block:
    """Block m, n of the schedule's maps: a batch row or all of them, a head or all."""
    b = slice(None) if schedule.maps[0] == 1 else slice(m, m + 1)
    h = slice(None) if schedule.maps[1] == 1 else slice(n, n + 1)
    group = problem.heads // problem.kv_heads
    g = slice(None) if schedule.maps[1] == 1 else slice(n // group, n // group + 1)
    k, v = (t[b, g].to(compute).contiguous() for t in (operands.k, operands.v))  # one layout, so one order of sums
    row = (m * schedule.maps[1] + n) * schedule.query_tiles
    score = operands.score if operands.score is None or schedule.maps[1] == 1 else operands.score.of_head(n)
    sink = None if operands.sink is None else operands.sink[h].to(compute)
    corner = (b.start or 0, h.start or 0)
    return _Block(problem, schedule, operands.q[b, h], k, v, operands, corner, row, guarded, score, sink)


def _map(block: _Block) -> State:
    """The state of a block, its `out` with the sink, query tile by query tile."""
    problem, schedule = block.problem, block.schedule
    again = problem.grad and not problem.transformed and schedule.covered * _per_pair(problem) > REMEMBERED

    def tile(t: int, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        state = _tile(block._replace(k=k, v=v), t)
        return state.out, state.lse

    def remembered(t: int) -> State:
        if not again:
            return State(*tile(t, block.k, block.v))
        others = _unchanged(block.q, block.operands.bias, block.score, block.sink)
        keep_rng = problem.dropout > 0 and block.operands.seed is None
        return State(*checkpoint(tile, t, block.k, block.v, *others, use_reentrant=False, preserve_rng_state=keep_rng))

    return _joined([remembered(t) for t in range(schedule.query_tiles)], dim=2)


def _unchanged(*read: Tensor | Bias | Score | None) -> list[Tensor]:
    """What must be unchanged until the backward pass reads it again: torch raises an error if an argument is not.

    Inference tensors are left out, as they have no version.
    """
    tensors = [t for each in read if each is not None for t in ([each] if isinstance(each, Tensor) else each.tensors())]
    return [t for t in tensors if not t.is_inference()]


def _tile(block: _Block, t: int) -> State:
    """The state of query tile t, its `out` with the sink: its listed keys in chunks, merged."""
    start = t * block.schedule.tile
    q = _aligned(block.q[:, :, start : start + block.schedule.tile].to(block.k.dtype))
    budget = max(block.schedule.tile, _budget(block.problem) // (q.shape[:3].numel() or 1))
    chunks = [_chunk(block, q, start, pieces) for pieces in _chunks(block.schedule, block.row + t, budget)]
    if not chunks:
        rows = q.shape[:3]
        return State(q.new_zeros((*rows, block.v.shape[3])), q.new_full(rows, -torch.inf))
    return _merged(chunks, block.sink)


def _budget(problem: Problem) -> int:
    return SCORES if problem.score is None else SLAB // _per_pair(problem)


def _chunks(schedule: Schedule, row: int, budget: int) -> Iterator[list[_Piece]]:
    """The listed keys of a query tile, in order, in lists of at most `budget` keys; longer runs are cut."""
    runs = [
        _Piece(start, min(start + budget, run.stop), None)
        for run in schedule.runs(row)
        for start in range(run.start, run.stop, budget)
    ]
    chunk: list[_Piece] = []
    for piece in sorted([*runs, *(_Piece(*patch) for patch in schedule.patches(row))]):
        if chunk and sum(p.stop - p.start for p in [*chunk, piece]) > budget:
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


class _Chunk(NamedTuple):
    """A state whose log-sum-exp is in two numbers, as one does not hold the count of keys beside a score of -1e9."""

    out: Tensor  # [batch, heads, queries, v_dim]
    top: Tensor  # [batch, heads, queries]: the largest score, -inf of no key, without gradient
    rest: Tensor  # the log-sum-exp less that


def _merged(chunks: list[_Chunk], sink: Tensor | None) -> State:
    """The state over all chunks, merged by what is left of each log-sum-exp less the largest score of all.

    The share of the sink is that of its logit less the same score.
    """
    top = reduce(torch.maximum, [chunk.top for chunk in chunks])
    top = torch.where(torch.isfinite(top), top, 0.0)  # a row of no key, or of NaN
    whole = reduce(or_, [State(chunk.out, chunk.top - top + chunk.rest) for chunk in chunks])
    out = whole.out if sink is None else fold_sink(whole, sink[:, None] - top)
    return State(out, top + whole.lse)


def _chunk(block: _Block, q: Tensor, first: int, pieces: list[_Piece]) -> _Chunk:
    """One tile of queries, whose first is query `first` of the call, over some pieces of keys."""
    k, v = _taken(block.k, pieces), _taken(block.v, pieces)
    keep = _kept(block.schedule, pieces, q.shape[2], q.device)
    compared = _compared(block, q, k, block.guarded and keep is not None)
    beyond = None if block.score is None or not block.score.has_support else compared == -torch.inf
    scores = block.problem.scale * (compared if beyond is None else torch.where(beyond, 0.0, compared))
    if block.problem.softcap is not None:
        scores = block.problem.softcap * torch.tanh(scores / block.problem.softcap)
    if block.operands.bias is not None:
        if block.guarded and keep is not None:  # NaN of a hidden pair would reach what a `ScoreFunction` captures
            scores = torch.where(keep | torch.isfinite(scores), scores, 0.0)
        scores = _with_bias(block, scores, first, q, pieces)
    if beyond is not None:
        scores = torch.where(beyond, -torch.inf, scores)
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    top = scores.amax(dim=3, keepdim=True).detach()
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))  # [batch, heads, queries, keys]
    total = weights.sum(dim=3)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    weights = weights / total[..., None]
    if keep is not None and (block.guarded or block.problem.grad):  # masked keys weigh 0 in a row that is NaN, too
        weights = torch.where(keep, weights, 0.0)
    weights = _dropped(block, weights, first, pieces)
    out = weighted_values(weights, v, keep if block.guarded else None)
    return _Chunk(out, top[..., 0], torch.where(empty, -torch.inf, torch.log(total)))


def _dropped(block: _Block, weights: Tensor, first: int, pieces: list[_Piece]) -> Tensor:
    """The weights after dropout. With a seed, each chunk draws from one of its own, whatever was drawn before."""
    dropout, seed = block.problem.dropout, block.operands.seed
    if seed is None or not dropout:
        return F.dropout(weights, dropout)
    own = mixed(seed, block.row + first // block.schedule.tile, pieces[0].start)
    random = torch.Generator(weights.device).manual_seed(own)
    kept = torch.empty_like(weights).bernoulli_(1 - dropout, generator=random)
    return weights * (kept / (1 - dropout))


def _compared(block: _Block, q: Tensor, k: Tensor, guarded: bool) -> Tensor:
    """The score of each query head with the key head of its group, [batch, heads, queries, keys].

    Guarded: scores of a query or key that is not finite have no gradient. It would be 0 * NaN for the rows that do
    not see that key; the row that does see it is NaN anyway, and so are its gradients.
    """
    if not guarded:
        return products(q, k) if block.score is None else _by_head(block, block.score, q, k)
    fine_q, fine_k = (torch.isfinite(t).all(dim=3, keepdim=True) for t in (q, k))
    clean = _compared(block, torch.where(fine_q, q, 0.0), torch.where(fine_k, k, 0.0), guarded=False)
    fine = products(fine_q.to(q.dtype), fine_k.to(k.dtype))
    return torch.where(fine > 0, clean, _compared(block, q, k, guarded=False).detach())


def _by_head(block: _Block, score: Score, q: Tensor, k: Tensor) -> Tensor:
    """Scores that are no dot product: all heads at once if they fit in `SLAB`, else head by head."""
    if q.shape[:3].numel() * k.shape[2] * _per_pair(block.problem) <= SLAB:
        return compare_pairs(score, q.unflatten(1, (k.shape[1], -1)), k[:, :, None]).flatten(1, 2)
    again = block.problem.grad and not block.problem.transformed
    compute = partial(checkpoint, _of_head, use_reentrant=False, preserve_rng_state=False) if again else _of_head
    group = q.shape[1] // k.shape[1]
    scores = [score.of_head(h) for h in range(q.shape[1])]
    rows = [
        [compute(own, q[b, h], k[b, h // group], *_unchanged(own)) for h, own in enumerate(scores)]
        for b in range(q.shape[0])
    ]
    return torch.stack([torch.stack(row) for row in rows])


def _of_head(score: Score, q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
    return compare_pairs(score, q[None, None, None], k[None, None, None])[0, 0, 0]


def _per_pair(problem: Problem) -> int:
    """Elements per pair in memory at once."""
    return 1 if problem.score is None else max(problem.score_dim, 1)


def _aligned(x: Tensor) -> Tensor:
    """A contiguous copy, which begins at a multiple of 64 bytes.

    BLAS sums in an order that depends on where in memory a matrix begins; a view begins anywhere.
    """
    return x.clone(memory_format=torch.contiguous_format)


def _taken(x: Tensor, pieces: list[_Piece]) -> Tensor:
    """The keys or values of the pieces."""
    if all(left.stop == right.start for left, right in pairwise(pieces)):
        return _aligned(x[:, :, pieces[0].start : pieces[-1].stop])
    return torch.cat([x[:, :, piece.start : piece.stop] for piece in pieces], dim=2)


def _kept(schedule: Schedule, pieces: list[_Piece], rows: int, device: torch.device) -> Tensor | None:
    """The mask over the pieces, bool [rows, keys]; None where all is kept."""
    if all(piece.pattern is None for piece in pieces):
        return None
    parts = [
        torch.ones(rows, piece.stop - piece.start, dtype=torch.bool, device="cpu")
        if piece.pattern is None
        else schedule.pattern(piece.pattern)[:rows, : piece.stop - piece.start]
        for piece in pieces
    ]
    return torch.cat(parts, dim=1).to(device)


def _with_bias(block: _Block, scores: Tensor, first: int, q: Tensor, pieces: list[_Piece]) -> Tensor:
    """The scores [batch, heads, queries, keys] of a tile of queries and pieces of keys, with the bias."""
    (batch, heads, rows), device = q.shape[:3], q.device
    b = torch.arange(block.first[0], block.first[0] + batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(block.first[1], block.first[1] + heads, device=device).view(-1, 1, 1)
    start = block.problem.offset + first
    query = torch.arange(start, start + rows, device=device).view(-1, 1)
    key = torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])
    bias = block.operands.bias
    assert bias is not None
    if isinstance(bias, ScoreFunction):
        return bias.changed(scores, b, h, query, key)
    return scores + reduce(add, (values_of(term, b, h, query, key).to(q.dtype) for term in bias.terms()))


def _joined(states: list[State], dim: int) -> State:
    if len(states) == 1:
        return states[0]
    return State(torch.cat([s.out for s in states], dim), torch.cat([s.lse for s in states], dim))


def _nothing(problem: Problem, operands: Operands) -> State:
    """The state of a call that keeps no pair: out 0, lse -inf, and gradients of any order 0 rather than none.

    The tie is a square, since autograd has no second derivative of a sum.
    """
    sizes = (problem.batch, problem.heads, problem.queries)
    tied = [operands.q, operands.k, operands.v, *([] if operands.bias is None else operands.bias.tensors())]
    tied += [] if operands.sink is None else [operands.sink]
    tied += [] if operands.score is None else operands.score.tensors()
    zeros = (torch.where(torch.zeros_like(t, dtype=torch.bool), t, 0.0) for t in tied)
    zero = sum(each.square().sum().to(problem.dtype) for each in zeros)
    lse = torch.full(sizes, -torch.inf, dtype=wide_of(problem.dtype), device=operands.q.device)
    out = torch.zeros((*sizes, problem.v_dim), dtype=problem.dtype, device=operands.q.device)
    return State(out + zero, lse + zero)
