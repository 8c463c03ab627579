"""The gradients of a call: starts the backward kernels."""

import torch
from torch import Tensor

from regard.gpu.backward import gradient_of_keys, gradient_of_queries
from regard.gpu.call import Call, Inputs
from regard.gpu.launch import (
    biases,
    blocks_of,
    constants,
    keys_blocks,
    launch,
    padded,
    placed,
    queries_blocks,
    section,
)
from regard.gpu.tables import by_key, by_query
from regard.gpu.totals import Totals, totals
from regard.state import State

KEYS_PASSES = ({"DK": True, "DV": True},), ({"DK": True, "DV": False}, {"DK": False, "DV": True})
"""The passes for dk and dv: one, or for large heads one each, as two accumulators do not fit in registers."""


def gradients(
    call: Call, i: Inputs, wanted: tuple[bool, ...], state: State, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; None where nobody wants one."""
    s, (batch, heads, queries, dim) = call.schedule, i.q.shape
    kv_heads, keys, v_dim = i.v.shape[1:]
    dout = torch.zeros_like(state.out) if dout is None else dout.resolve_neg()
    if i.distance is not None or i.bias is not None:  # -inf may hide all keys of a row, which then drops its gradient
        dout = dout.masked_fill((state.lse == -torch.inf)[..., None], 0.0)
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    delta = (state.out.float() * dout.float()).sum(3)  # [batch, heads, queries]
    total, dsink = totals(call, i, state.lse), None
    if i.sink is not None:
        own, total = total, total.with_sink(i.sink)
        share = torch.sigmoid(-own.above(Totals(i.sink[:, None], None)))  # of a sink of +inf 1
        dsink = -(share * delta).masked_fill(state.lse == -torch.inf, 0.0).sum((0, 2))
        dlse = None if dlse is None else dlse * torch.exp(total.above(own))
    if dlse is not None:
        delta = delta - dlse.masked_fill(state.lse == -torch.inf, 0.0)
    top, rest = total.both
    wide = torch.float32 if i.q.device.type == "cpu" else i.q.dtype  # as in `empty_output`
    dq, dk, dv = (torch.empty(t.shape, dtype=wide, device=t.device) for t in (i.q, i.k, i.v))
    ddistance = torch.zeros_like(i.distance) if wanted[4] and i.distance is not None else None
    dbias = torch.zeros_like(i.bias, dtype=torch.float32) if wanted[5] and i.bias is not None else None
    blocks, key_blocks = blocks_of(queries_blocks, i), blocks_of(keys_blocks, i)
    sizes = batch, heads, heads // kv_heads, queries, keys
    numbers = call.scale, call.softcap or 0.0, *call.drops
    into = placed(dbias) if dbias is not None else (delta, 0, 0, 0, 0)
    launch(
        gradient_of_queries, batch * heads * s.query_tiles * s.tile // blocks.rows, blocks, i.q.device,
        *(i.q, i.k, i.v, dout, top, rest, delta, dq),
        *(stride for t in (i.q, i.k, i.v, dout, dq) for stride in t.stride()[:3]),
        *biases(i, top), delta if ddistance is None else ddistance, *into,
        *by_query(s, i.q.device), *sizes, section(i), *numbers,
        **constants(call, i, blocks), KEYS=blocks.tokens, DDISTANCE=ddistance is not None, DBIAS=dbias is not None,
    )  # fmt: skip
    for ofs in KEYS_PASSES[padded(max(dim, v_dim)) > 64 or i.q.element_size() == 4]:
        launch(
            gradient_of_keys, batch * kv_heads * -(-keys // s.tile) * s.tile // key_blocks.rows, key_blocks, i.q.device,
            *(i.q, i.k, i.v, dout, top, rest, delta, dk, dv),
            *(stride for t in (i.q, i.k, i.v, dout, dk, dv) for stride in t.stride()[:3]),
            *biases(i, top), *by_key(s, i.q.device), *sizes, max(1, section(i) // (heads // kv_heads)), *numbers,
            **constants(call, i, key_blocks), QUERIES=key_blocks.tokens, **ofs,
        )  # fmt: skip
    if dbias is not None and i.bias is not None:
        dbias = dbias.to(i.bias.dtype)
    dq, dk, dv = (t.to(i.q.dtype) for t in (dq, dk, dv))
    return dq, dk, dv, dsink, ddistance, dbias
