"""The gradients of a call: starts the backward kernels, those of which a gradient is wanted.

Weights are computed again from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, §3.1): p = exp(s - total), where the
total includes the sink's column; biases may need it in two numbers (`far_rows.py`), top and rest. With
delta = out . dout of each row, the gradient of a score is ds = p (dp - delta), dp = dout . v. One program sums each
gradient, those of queries by tile of queries, those of keys and values by tile of keys, in the order of the schedule's
lists, so its bits are the same from run to run.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.gpu.call import Call, Inputs
from regard.gpu.gradient_of_keys import gradient_of_keys
from regard.gpu.gradient_of_queries import gradient_of_queries
from regard.gpu.launch import (
    biases_or,
    blocks_of,
    computed_in,
    constants,
    descriptors,
    keys_blocks,
    padded,
    placed,
    queries_blocks,
    section,
    starts_of,
    steps_of_biases,
)
from regard.gpu.rows import prepare_rows
from regard.gpu.starts import Start, Starts, form, kept
from regard.gpu.tables import by_key, by_query
from regard.gpu.tokens import is_described
from regard.gpu.totals import LOG2E, Totals, totals
from regard.state import State
from regard.torch_internals import resolve_lazy

PREPARED_ROWS = 32
"""Rows of a program of `prepare_rows`."""


class Rows(NamedTuple):
    """What the kernels read of each row besides the inputs; a row of a query that is not there has no weight."""

    dout: Tensor  # [batch, heads, queries, v_dim]
    top: Tensor  # float32 [batch, heads, queries rounded up to whole tiles], as the next two: the log-sum-exp in base 2
    rest: Tensor  # beside biases, top and rest are those of `Totals`; else it is not read
    delta: Tensor  # what is subtracted from the gradient of each weight

    def with_totals(self, total: Totals) -> "Rows":
        """The same with another log-sum-exp."""
        more = 0, self.top.shape[2] - total.top.shape[2]
        top = F.pad(total.top.masked_fill(total.top == -torch.inf, torch.inf), more, value=torch.inf)
        if total.rest is None:
            return self._replace(top=(top * LOG2E).contiguous())
        return self._replace(top=top.contiguous(), rest=F.pad(total.rest, more).contiguous())


def prepared(out: Tensor, dout: Tensor, lse: Tensor, tile: int) -> Rows:
    """The rows of a call without biases and sink: lse is contiguous, and the channels of a row of out and dout are."""
    (batch, heads, queries, dim), rows = out.shape, -(-out.shape[2] // tile) * tile
    delta, top = torch.empty(2, batch, heads, rows, dtype=torch.float32, device=out.device)
    Start(
        prepare_rows, batch * heads * rows // PREPARED_ROWS,
        (*out.stride()[:3], *dout.stride()[:3], heads, queries, rows),
        {"ROWS": PREPARED_ROWS, "DIM": dim, "DIM_PADDED": padded(dim)}, out.device,
    )(out, dout, lse, delta, top)  # fmt: skip
    return Rows(dout, top, top, delta)


def gradients(
    call: Call, i: Inputs, wanted: tuple[bool, ...], state: State, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; None where nobody wants one."""
    q_wanted, k_wanted, v_wanted, sink_wanted, distance_wanted, bias_wanted = wanted
    dout = torch.zeros_like(state.out) if dout is None else resolve_lazy(dout)
    if i.distance is not None or i.bias is not None:  # -inf may hide all keys of a row, which then drops its gradient
        dout = dout.masked_fill((state.lse == -torch.inf)[..., None], 0.0)
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    queries = dout.shape[2]
    rows, dsink = prepared(state.out, dout, state.lse.contiguous(), call.schedule.tile), None
    if i.sink is not None or i.distance is not None or i.bias is not None:
        own = total = totals(call, i, state.lse)
        if i.sink is not None:
            total = total.with_sink(i.sink)
            dlse = None if dlse is None else dlse * torch.exp(total.above(own))
            if sink_wanted:
                share = torch.sigmoid(-own.above(Totals(i.sink[:, None], None)))  # of a sink of +inf 1
                lost = share * rows.delta[:, :, :queries]
                dsink = -lost.masked_fill(state.lse == -torch.inf, 0.0).sum((0, 2))
        rows = rows.with_totals(total)
    if dlse is not None:
        rows.delta[:, :, :queries] -= dlse.masked_fill(state.lse == -torch.inf, 0.0)
    dq = ddistance = dbias = None
    if q_wanted or distance_wanted or bias_wanted:
        dq, ddistance, dbias = of_queries(call, i, rows, distance_wanted, bias_wanted)
    return dq if q_wanted else None, *of_keys(call, i, rows, k_wanted, v_wanted), dsink, ddistance, dbias


def of_queries(
    call: Call, i: Inputs, rows: Rows, distance_wanted: bool, bias_wanted: bool, found: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of the queries, and of the biases where they are wanted.

    Args:
        found: that of the queries by another kernel: rows in which something is not finite are computed in place.
    """
    s, (batch, heads, queries, _), (_, kv_heads, keys, _) = call.schedule, i.q.shape, i.k.shape
    dq = torch.empty(i.q.shape, dtype=computed_in(i.q), device=i.q.device) if found is None else found
    ddistance = torch.zeros_like(i.distance) if distance_wanted and i.distance is not None else None
    dbias = torch.zeros_like(i.bias, dtype=torch.float32) if bias_wanted and i.bias is not None else None
    blocks, nothing = blocks_of(queries_blocks, i, is_line=call.is_line), rows.delta

    def make() -> Starts:
        return starts_of(
            gradient_of_queries, batch * heads * s.query_tiles * s.tile // blocks.rows, blocks, s, found is not None,
            i.q.device,
            (
                *(stride for t in (i.q, i.k, i.v, rows.dout, dq) for stride in t.stride()[:3]),
                *steps_of_biases(i), *((0, 0, 0, 0) if dbias is None else placed(dbias)[1:]),
                *by_query(s, i.q.device),
                *(batch, heads, heads // kv_heads, queries, keys, section(i), call.scale, call.softcap or 0.0),
                *call.drops[2:],
            ),
            constants(call, i, blocks)
            | {"KEYS": blocks.tokens, "DDISTANCE": ddistance is not None, "DBIAS": dbias is not None},
        )  # fmt: skip

    forms = map(form, (*i, rows.dout, dq, ddistance, dbias))
    kept(s, ("queries", found is None, *call.form, *forms), make).run(
        (i.q, i.k, i.v, *rows, dq),
        (*biases_or(i, nothing), nothing if ddistance is None else ddistance, nothing if dbias is None else dbias),
        descriptors(blocks, i.k, i.v), call.drops[:2],
    )  # fmt: skip
    if dbias is not None and i.bias is not None:
        dbias = dbias.to(i.bias.dtype)
    return dq.to(i.q.dtype), ddistance, dbias


def of_keys(
    call: Call,
    i: Inputs,
    rows: Rows,
    k_wanted: bool,
    v_wanted: bool,
    found: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the keys and of the values; None for one that is not wanted.

    Args:
        found: those of another kernel, None for one that is not wanted: rows in which something is not finite are
            computed in place.
    """
    s, (batch, heads, queries, _), (_, kv_heads, keys, _) = call.schedule, i.q.shape, i.k.shape
    group, blocks = heads // kv_heads, blocks_of(keys_blocks, i, is_line=call.is_line)
    dk, dv = found or (
        torch.empty(t.shape, dtype=computed_in(i.q), device=t.device) if is_wanted else None
        for t, is_wanted in ((i.k, k_wanted), (i.v, v_wanted))
    )
    into = (
        i.k if dk is None else dk,
        i.v if dv is None else dv,
    )  # where one is not wanted, the kernel does not write to it
    for which in passes(i, k_wanted, v_wanted):

        def make(which: dict[str, bool] = which) -> Starts:
            return starts_of(
                gradient_of_keys, batch * kv_heads * -(-keys // s.tile) * s.tile // blocks.rows, blocks, s,
                found is not None, i.q.device,
                (
                    *(stride for t in (i.q, i.k, i.v, rows.dout, *into) for stride in t.stride()[:3]),
                    *steps_of_biases(i), *by_key(s, i.q.device), batch, heads, group, queries, keys,
                    *(max(1, section(i) // group), call.scale, call.softcap or 0.0, *call.drops[2:]),
                ),
                constants(call, i, blocks) | {"QUERIES": blocks.tokens} | which,
            )  # fmt: skip

        forms = map(form, (*i, rows.dout, *into))
        kept(s, ("keys", found is None, *which.values(), *call.form, *forms), make).run(
            (i.q, i.k, i.v, *rows, *into), biases_or(i, rows.delta), descriptors(blocks, i.q, rows.dout), call.drops[:2]
        )
    return None if dk is None else dk.to(i.q.dtype), None if dv is None else dv.to(i.q.dtype)


def passes(i: Inputs, k_wanted: bool, v_wanted: bool) -> list[dict[str, bool]]:
    """The passes for dk and dv: one, or one each."""
    dim = padded(max(i.q.shape[3], i.v.shape[3]))
    is_one = has_one_pass(i.q.element_size(), dim, described=all(map(is_described, i[:3])))
    each = [(k_wanted, v_wanted)] if is_one else [(k_wanted, False), (False, v_wanted)]
    return [{"DK": dk, "DV": dv} for dk, dv in each if dk or dv]


def has_one_pass(item: int, dim: int, *, described: bool) -> bool:
    """Whether both gradients have registers for their sums; the arguments are those of `launch.forward_blocks`."""
    return item == 2 and dim <= (128 if described else 64)
