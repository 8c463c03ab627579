"""A call of `flex_attention` in regard's words, and its result."""

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.attention import attend_state
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import And, CallSizes, Mask
from regard.describe.score_function import ScoreFunction
from regard.describe.tensors import has_tangent
from regard.describe.term import Term, evaluate
from regard.flex.every_pair import attend_every_pair, max_scores
from regard.flex.mod_mask import as_mask
from regard.flex.recognise import recognised
from regard.flex.score import (
    Parts,
    distance_bias,
    is_by_distance_and_head,
    is_per_query,
    rows_of_bias,
    taken_apart,
    tensor_bias,
)
from regard.flex.trace import Mod, element_by_element, is_traced, trace
from regard.state import State
from regard.torch_internals import current_func_transform
from regard.wide import wide_of

MOST_BIAS = 1 << 24
"""Elements of a bias that are computed at once, 64 MiB; for more, the call runs in pieces of some queries."""


class _Call(NamedTuple):
    """A call in regard's words.

    Attributes:
        bias: of one table or of none.
        computed: terms of the bias that are evaluated for every pair.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    computed: tuple[Term, ...] = ()


class Result(NamedTuple):
    """What a call gives.

    Attributes:
        out: [batch, heads, queries, v_dim], laid out as the query.
        lse: [batch, heads, queries].
        max_scores: [batch, heads, queries], if asked for.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    mask: Mask | bool,
    scale: float | None,
    wants_max: bool,
) -> Result:
    """The result of a call of tensors of one type and number of batch rows; `mask` is True to keep every pair."""
    sizes = CallSizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], 0)
    width = int(query.shape[3])  # int: a graph is for one size of heads
    call = _Call(query, key, value, as_mask(mask), width**-0.5 if scale is None else scale)
    state = _state(call) if score_mod is None else _modified_state(call, score_mod, sizes)
    most = max_scores(query, key, score_mod, call.mask, call.scale) if wants_max else None
    return Result(laid_out_as(query, state.out.to(query.dtype)), state.lse, most)


def laid_out_as(query: Tensor, out: Tensor) -> Tensor:
    """The output with its axes in memory in the order of the query's, as torch returns it."""
    order = sorted(range(4), key=lambda axis: -query.stride(axis))
    if order == [0, 1, 2, 3]:
        return out
    back = [order.index(axis) for axis in range(4)]
    return out.permute(order).contiguous().permute(back)


def _modified_state(call: _Call, score_mod: Mod, sizes: CallSizes) -> State:
    """The state of a call with its `score_mod`."""
    wide, every_pair = wide_of(call.q.dtype), (call.q, call.k, call.v, score_mod, call.mask, call.scale)
    if current_func_transform() is not None:  # it hides from `trace` what the function reads
        return attend_every_pair(*every_pair)
    traced = trace(score_mod, "bhqk", call.q.device, torch.zeros((), dtype=wide, device="cpu"))
    if traced.term is None and is_traced(call.q):  # a function passes through no operator
        return attend_every_pair(*every_pair)
    if any(map(has_tangent, traced.captured)):  # which a term would lose
        return attend_every_pair(*every_pair)
    if traced.term is None:
        bias = ScoreFunction(partial(element_by_element, score_mod), traced.captured)
        return _state(call._replace(bias=bias))
    parts = taken_apart(traced.term, str(wide).removeprefix("torch."))
    if parts is not None:
        with suppress(IndexError):  # of a pair that may be hidden: by tiles, pairs of hidden tiles have no scores
            placed = _placed(call, parts, sizes, wide)
            if placed is not None:
                return _state(placed)
    return _state(call._replace(bias=ScoreFunction(traced.term)))


def _placed(call: _Call, parts: Parts, sizes: CallSizes, wide: torch.dtype) -> _Call | None:
    """The call with the parts of its `score_mod` as scale, softcap, bias and mask; None if one has no place."""
    if parts.factor is not None:
        if parts.softcap is not None or not is_per_query(parts.factor):
            return None
        call = _multiplied(call, parts.factor, sizes, wide)
    mask = call.mask
    for condition in parts.kept:
        own = as_mask(recognised(condition, sizes))
        mask = own if mask is None else (mask if own is None else And(mask, own))
    near = tuple(term for term in parts.bias if is_by_distance_and_head(term))
    other = tuple(term for term in parts.bias if not is_by_distance_and_head(term))
    bias, tables = distance_bias(near, sizes, wide), [tensor_bias(term, sizes) for term in other]
    for table in tables:
        bias = table if bias is None else (bias if table is None else bias + table)
    computed = tuple(term for term, table in zip(other, tables, strict=True) if table is None)
    return call._replace(mask=mask, bias=bias, computed=computed, scale=call.scale * parts.scale, softcap=parts.softcap)


def _multiplied(call: _Call, factor: Term, sizes: CallSizes, wide: torch.dtype) -> _Call:
    """The call with the query multiplied by a factor: in a wide type, as scores are."""
    values = {
        "b": torch.arange(sizes.batch, device="cpu")[:, None, None, None],
        "h": torch.arange(sizes.heads, device="cpu")[:, None, None],
        "q": torch.arange(sizes.queries, device="cpu")[:, None],
    }
    factors = evaluate(factor, values).to(wide)
    q, k, v = (t.to(wide) for t in (call.q, call.k, call.v))
    return call._replace(q=q * factors, k=k, v=v)


def _state(call: _Call) -> State:
    """The state of a call; in pieces of some queries, where a bias that is computed would be too large."""
    if not call.computed:
        return _piece(call, slice(0, call.q.shape[2]))
    uses = frozenset[str]().union(*(term.uses for term in call.computed))
    maps = (call.q.shape[0] if "b" in uses else 1) * (call.q.shape[1] if "h" in uses else 1)
    step = max(1, MOST_BIAS // max(1, maps * call.k.shape[2]))
    queries = call.q.shape[2]
    if queries <= step:
        return _piece(call, slice(0, queries))
    pieces = [_again(call, slice(start, min(start + step, queries))) for start in range(0, queries, step)]
    return State(torch.cat([piece.out for piece in pieces], dim=2), torch.cat([piece.lse for piece in pieces], dim=2))


def _again(call: _Call, rows: slice) -> State:
    """A piece whose bias is computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return _piece(call, rows)

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        state = _piece(call._replace(q=q, k=k, v=v), rows)
        return state.out, state.lse

    read = [t for each in (call.mask, call.bias, *call.computed) if each is not None for t in each.tensors()]
    others = [t for t in read if not t.is_inference()]  # torch raises an error if an argument was written to
    return State(*checkpoint(run, call.q, call.k, call.v, *others, use_reentrant=False, preserve_rng_state=False))


def _piece(call: _Call, rows: slice) -> State:
    """The state of some queries."""
    sizes = CallSizes(call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2], 0)
    bias = call.bias
    if call.computed:
        wide = wide_of(call.q.dtype)
        table = TensorBias(rows_of_bias(call.computed, sizes, rows, wide))
        bias = table if bias is None else bias + table
    return attend_state(
        call.q[:, :, rows], call.k, call.v, mask=call.mask, bias=bias, scale=call.scale, softcap=call.softcap,
        offset=rows.start,
    )  # fmt: skip
