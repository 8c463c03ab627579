"""`flex_attention` with torch's signature, on regard's kernels."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.utils.checkpoint import checkpoint

from regard.attention import attend_state
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import And, CallSizes, Mask
from regard.describe.score_function import ScoreFunction
from regard.describe.term import Term, evaluate
from regard.flex.block_mask import mask_of_block_mask
from regard.flex.check import check_call
from regard.flex.max_scores import max_scores
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
from regard.flex.trace import Mod, element_by_element, trace
from regard.state import State
from regard.torch_internals import leave_to_python

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


@leave_to_python("regard.flex traces score_mod and mask_mod itself")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch's `flex_attention`, with gradients and log-sum-exp on a CPU as well.

    `score_mod` and `mask_mod` are traced (`trace.py`): a softcap, a bias by distance (ALiBi, relative tables), a bias
    from a table, a factor per head or per query and any mask run on the native kernels. A `score_mod` of another form
    is computed by the backend `reference`, tile by tile, with gradients for the tensors that it captures. Tensors that
    are not on the CPU go to torch's own function.

    Args:
        query: [batch, heads, queries, qk_dim].
        key: [batch, kv_heads, keys, qk_dim].
        value: [batch, kv_heads, keys, v_dim].
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`, the new score; None for the score itself.
        block_mask: of `create_block_mask`, torch's or regard's; None for all pairs.
        scale: None for `qk_dim ** -0.5`.
        enable_gqa: whether key heads are shared by groups of query heads.
        return_lse: whether the log-sum-exp is returned as well (torch: use `return_aux`).
        kernel_options: checked as in torch. They tune torch's GPU kernels and mean nothing here.
        return_aux: what else to return.

    Returns:
        out [batch, heads, queries, v_dim]; with `return_lse`, (out, lse [batch, heads, queries]); with `return_aux`,
        (out, AuxOutput).

    >>> import torch
    >>> from regard.flex import create_block_mask, flex_attention
    >>> q, k, v = (torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3))
    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    >>> out = flex_attention(q, k, v, lambda s, b, h, q, k: 20 * torch.tanh(s / 20), mask)
    >>> out.sum().backward(); q.grad.shape
    torch.Size([1, 2, 300, 16])
    """
    if query.device.type != "cpu":
        attend: Any = of_torch.flex_attention
        return attend(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    check_call(query, key, value, block_mask, enable_gqa, return_lse, kernel_options, return_aux)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    if key.shape[0] != query.shape[0]:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    if key.dtype != query.dtype or value.dtype != query.dtype:  # keys and values of a narrower type
        key, value = key.to(query.dtype), value.to(query.dtype)
    sizes = CallSizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], 0)
    mask = None if block_mask is None else as_mask(mask_of_block_mask(block_mask, sizes, query.device))
    call = _Call(query, key, value, mask, query.shape[3] ** -0.5 if scale is None else scale)
    state = _state(call if score_mod is None else _modified(call, score_mod, sizes))
    out = _laid_out_as(query, state.out.to(query.dtype))
    if return_aux is not None:
        most = max_scores(query, key, score_mod, mask, call.scale) if return_aux.max_scores else None
        return out, AuxOutput(lse=state.lse if return_aux.lse else None, max_scores=most)
    return (out, state.lse) if return_lse else out


def _laid_out_as(query: Tensor, out: Tensor) -> Tensor:
    """The output with its axes in memory in the order of the query's, as torch returns it."""
    order = sorted(range(4), key=lambda axis: -query.stride(axis))
    if order == [0, 1, 2, 3]:
        return out
    back = [order.index(axis) for axis in range(4)]
    return out.permute(order).contiguous().permute(back)


def _modified(call: _Call, score_mod: Mod, sizes: CallSizes) -> _Call:
    """The call with its `score_mod` in it."""
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    traced = trace(score_mod, "bhqk", call.q.device, torch.zeros((), dtype=wide))
    if traced.term is None:
        return call._replace(bias=ScoreFunction(partial(element_by_element, score_mod), traced.captured))
    parts = taken_apart(traced.term, str(wide).removeprefix("torch."))
    placed = None if parts is None else _placed(call, parts, sizes, wide)
    return call._replace(bias=ScoreFunction(traced.term)) if placed is None else placed


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
        "b": torch.arange(sizes.batch)[:, None, None, None],
        "h": torch.arange(sizes.heads)[:, None, None],
        "q": torch.arange(sizes.queries)[:, None],
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

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state = _piece(call._replace(q=q, k=k, v=v), rows)
        return state.out, state.lse

    return State(*checkpoint(run, call.q, call.k, call.v, use_reentrant=False, preserve_rng_state=False))


def _piece(call: _Call, rows: slice) -> State:
    """The state of some queries."""
    sizes = CallSizes(call.q.shape[0], call.q.shape[1], call.q.shape[2], call.k.shape[2], 0)
    bias = call.bias
    if call.computed:
        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        table = TensorBias(rows_of_bias(call.computed, sizes, rows, wide))
        bias = table if bias is None else bias + table
    return attend_state(
        call.q[:, :, rows], call.k, call.v, mask=call.mask, bias=bias, scale=call.scale, softcap=call.softcap,
        offset=rows.start,
    )  # fmt: skip
