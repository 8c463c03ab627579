"""Linear attention with `Gated`: every feature has its own gates, so a weight is not one dot product.

    w_ij = sum_f q_if k_jf exp(sum of log_gate_tf over j < t <= i)

The usual matrix form divides by running products of gates, which underflow after a few dozen tokens. This module does
not divide. At any token m with j < m <= i the exponential is the product of the decay from m to i and the decay from j
to m, both at most 1. So a block is split in the middle: the pairs of the right half with the left half are one matrix
product.

    blocks of 1       of 2               of 4              The queries of a half (decay since its start) and its keys
    o . . .           . . . .            . . . .           (decay until its end) become those of the block by a product
    . o . .    then   x . . .    then    . . . .           with the gates of the other half. So a token takes one exp
    . . o .           . . . .            x x . .           for each feature, and nothing above the diagonal is computed.
    . . . o           . . x .            x x . .
"""

import torch
from torch import Tensor

from regard.linear.segment import Carry, Segment, after, before, by_chunks, cut, summed

SMALL = 2
"""Halves of at most this many rows use elementwise products; a matrix product for each costs more."""

ROWS = 16
"""Query tokens of one step of the parallel form, which allocates all pairs of their features."""


def chunked(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """All chunks at once; the length of a chunk is rounded down to a power of two."""
    return by_chunks(_chunks, segment, carry, 1 << (chunk.bit_length() - 1))


def _chunks(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    tokens, group, chunks = segment.tokens, segment.group, segment.tokens // chunk
    if chunk & (chunk - 1):  # the remaining tokens: pad with tokens that change nothing
        segment = _pad(segment, (1 << chunk.bit_length()) - chunk)
    assert segment.log_gate is not None
    gate = segment.log_gate.exp()
    out, q, k, gate = _halves(segment.q, segment.k, segment.v, gate, group, chunks)
    v = cut(segment.v, chunks)
    states, last = before(k.mT @ v, carry.matrix, gate[..., None])
    out = cut(out, chunks) + q @ states
    return out.flatten(2, 3)[:, :, : tokens * group], Carry(last, None)


def _halves(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, group: int, blocks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pairs within each of `blocks` blocks, and each block's queries, keys and gate for tokens outside of it.

    Args:
        q: [batch, kv_heads, tokens * group, features]; k, v and gate [batch, kv_heads, tokens, ...].

    Returns:
        out [batch, kv_heads, tokens * group, v_dim]; q times the decay since the start of its block, [batch, kv_heads,
        blocks, rows, features]; k times the decay until its end, [batch, kv_heads, blocks, tokens, features]; the
        block's gate [batch, kv_heads, blocks, features].
    """
    tokens, width = k.shape[2], v.shape[3]
    each = q.unflatten(2, (tokens, group))
    out = (each * k[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]  # a token with itself: no decay
    out = out.flatten(2, 3)
    q = (each * gate[:, :, :, None]).flatten(2, 3)
    half = 1
    while half * blocks < tokens:
        pairs = tokens // (2 * half)
        (q_left, q_right), (k_left, k_right), (out_left, out_right) = (
            x.unflatten(2, (pairs, 2, x.shape[2] // pairs // 2)).unbind(3) for x in (q, k, out)
        )
        v_left = v.unflatten(2, (pairs, 2, half))[:, :, :, 0]
        gate_left, gate_right = gate.unflatten(2, (pairs, 2)).unbind(3)  # [batch, kv_heads, pairs, features]
        out_right = out_right + _mix(q_right, k_left, v_left)
        out = torch.stack([out_left, out_right], dim=3).reshape(*out.shape[:3], width)
        q = torch.stack([q_left, q_right * gate_left[..., None, :]], dim=3).reshape(q.shape)
        k = torch.stack([k_left * gate_right[..., None, :], k_right], dim=3).reshape(k.shape)
        gate = gate_left * gate_right
        half *= 2
    return out, cut(q, blocks), cut(k, blocks), gate


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q k^T) v."""
    if k.shape[-2] > SMALL:
        return (q @ k.mT) @ v
    parts = [(q * k[..., j : j + 1, :]).sum(-1, keepdim=True) * v[..., j : j + 1, :] for j in range(k.shape[-2])]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _pad(segment: Segment, more: int) -> Segment:
    """Append `more` tokens of zeros with gates of 1."""

    def pad(x: Tensor, rows: int) -> Tensor:
        return torch.cat([x, x.new_zeros(*x.shape[:2], rows, x.shape[3])], dim=2)

    assert segment.log_gate is not None
    q = pad(segment.q, more * segment.group)
    return Segment(q, pad(segment.k, more), pad(segment.v, more), segment.group, log_gate=pad(segment.log_gate, more))


def parallel(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """All pairs, `ROWS` query tokens at a time: the definition."""
    assert segment.log_gate is not None
    group, fade = segment.group, segment.log_gate
    outs: list[Tensor] = []
    for start in range(0, segment.tokens, ROWS):
        rows = segment.part(start, min(start + ROWS, segment.tokens))
        assert rows.log_gate is not None
        q = rows.q.unflatten(2, (rows.tokens, group))  # [batch, kv_heads, rows, group, features]
        pair = summed(rows.log_gate.mT).exp()  # [batch, kv_heads, features, rows i, rows j]
        pair = pair.expand(-1, -1, q.shape[-1], -1, -1)
        weights = torch.einsum("bhigf,bhjf,bhfij->bhigj", q, rows.k, pair)
        index = torch.arange(rows.tokens, device=q.device)
        weights = weights.masked_fill((index[:, None] < index)[:, None], 0.0)
        since = (q * rows.log_gate.cumsum(2).exp()[:, :, :, None]).flatten(2, 3)  # decay since the first row
        out = weights.flatten(2, 3) @ rows.v
        if start:
            until = after(fade[:, :, :start], 2).exp() * segment.k[:, :, :start]
            out = out + (since @ until.mT) @ segment.v[:, :, :start]
        past = fade[:, :, :start].sum(2, keepdim=True).exp()
        outs.append(out + (since * past) @ carry.matrix)
    until = after(fade, 2).exp() * segment.k
    matrix = until.mT @ segment.v + fade.sum(2).exp()[..., None] * carry.matrix
    return torch.cat(outs, dim=2), Carry(matrix, None)
