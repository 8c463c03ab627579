"""Linear attention without a rule, and with `Decay`: a weight is a dot product times a factor for the pair of tokens.

    w_ij = phi(q_i) . phi(k_j) * exp(top_j + (i - j) log gamma - high_i)        j <= i

`top_j` is the exponent of a key that `Favor` returns separately, 0 for other features; `high_i` is the maximum exponent
over the keys up to i, so every factor is at most 1, and one factor of row i is 1. It does not depend on later keys: the
common choice, the maximum over all keys, makes every row depend on the future.

A chunk of C tokens takes `2 C (features + v_dim)` FLOPs a token for the pairs within it and `4 features v_dim` for the
state, all in matrix products (Hua et al. 2022, arXiv:2202.10447; Sun et al. 2023, arXiv:2307.08621, §2.1).
"""

import torch
from torch import Tensor

from regard.linear.segment import Carry, Segment, before, by_chunks, cut, rows

ROWS = 128
"""Query tokens of one step of the parallel form, which allocates their weights."""


def chunked(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """All chunks at once: pairs within a chunk, and the state before the chunk for earlier tokens."""
    return by_chunks(_chunks, segment, carry, chunk)


def _chunks(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    chunks, group = segment.tokens // chunk, segment.group
    q, k, v = (cut(x, chunks) for x in (segment.q, segment.k, segment.v))
    pair, read, write, fade, high = _factors(segment, carry, chunk)
    weights = q @ k.mT  # [batch, kv_heads, chunks, chunk * group, chunk]
    if pair is not None:
        weights = weights * rows(pair, group)
    out = _lower(weights, group) @ v
    steps = k.mT @ (v if write is None else v * write[..., None])
    states, last = before(steps, carry.matrix, fade)
    seen = q @ states
    out = out + (seen if read is None else seen * rows(read[..., None], group))
    return out.flatten(2, 3), Carry(last, high)


def _factors(
    segment: Segment, carry: Carry, chunk: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The factors of pairs, reads, writes and states, and the exponent of the state after the last chunk.

    pair [..., chunk, chunk], read [..., chunk], write [..., chunk], fade [..., chunks or 1, 1, 1], high [batch,
    kv_heads]; None is 1.
    """
    if segment.top is None and segment.log_gamma is None:
        return None, None, None, None, None
    chunks, device = segment.tokens // chunk, segment.k.device
    index = torch.arange(chunk, device=device)
    apart = (index[:, None] - index).clamp(min=0).to(segment.k.dtype)
    fade = (
        torch.zeros(1, 1, 1, dtype=segment.k.dtype, device=device) if segment.log_gamma is None else segment.log_gamma
    )
    ages = [fade[:, :, None] * apart, fade * (index + 1), fade * (chunk - 1 - index), fade * chunk]
    ages = [age[None] for age in ages]  # [1, kv_heads or 1, 1, chunk (, chunk)]
    if segment.top is None or carry.top is None:
        pair, read, write, whole = (age.exp() for age in ages)
        return pair, read, write, whole[..., None].expand(-1, -1, chunks, 1, 1), None
    top, high = cut(segment.top, chunks), cut(_highest(segment.top, carry.top, fade), chunks)
    start = torch.cat([carry.top[..., None], high[:, :, :-1, -1]], dim=2)[..., None]  # before each chunk
    end = high[..., -1:]
    pair = ages[0] + top[..., None, :] - high[..., None]
    # the exponents of later keys may be far greater: mask before exp, or 0 * inf makes gradients NaN
    pair = torch.where(index[:, None] >= index, pair, -torch.inf).exp()
    read, write = (ages[1] + start - high).exp(), (ages[2] + top - end).exp()
    return pair, read, write, (ages[3] + start - end).exp()[..., None], end[:, :, -1, 0]


def _highest(top: Tensor, first: Tensor, fade: Tensor) -> Tensor:
    """The maximum of `top_j + (i - j) log gamma` over j <= i, and of `first`, the one before the segment.

    Any other value would give the same result up to rounding and range, so it needs no gradient.
    """
    age, top = fade.detach()[None, ..., 0] * torch.arange(1, top.shape[2] + 1, device=top.device), top.detach()
    return torch.maximum((top - age).cummax(dim=2).values, first[..., None]) + age


def parallel(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """All pairs, `ROWS` query tokens at a time: the definition."""
    group, tokens = segment.group, segment.tokens
    fade = torch.zeros(1, 1, 1, dtype=segment.k.dtype, device=segment.k.device)
    fade = fade if segment.log_gamma is None else segment.log_gamma
    top, first, high = segment.k.new_zeros(segment.k.shape[:3]), segment.k.new_zeros(segment.k.shape[:2]), None
    if segment.top is not None and carry.top is not None:
        top, first, high = segment.top, carry.top, _highest(segment.top, carry.top, fade)
    shift = torch.zeros_like(top) if high is None else high
    index = torch.arange(tokens, device=segment.k.device)
    outs: list[Tensor] = []
    for start in range(0, tokens, ROWS):
        stop = min(start + ROWS, tokens)
        here, q = index[start:stop], segment.q[:, :, start * group : stop * group]
        exponent = fade * (here[:, None] - index[:stop]) + top[:, :, None, :stop] - shift[:, :, start:stop, None]
        exponent = torch.where(here[:, None] >= index[:stop], exponent, -torch.inf)
        weights = _visible(q @ segment.k[:, :, :stop].mT, here, index[:stop], group) * rows(exponent.exp(), group)
        past = (fade[..., 0] * (here + 1) + first[..., None] - shift[:, :, start:stop]).exp()
        outs.append(weights @ segment.v[:, :, :stop] + rows(past[..., None], group) * (q @ carry.matrix))
    end = shift[:, :, -1:]
    write = (fade[..., 0] * (tokens - 1 - index) + top - end).exp()
    kept = (fade[..., 0] * tokens + first[..., None] - end).exp()[..., None]
    matrix = segment.k.mT @ (segment.v * write[..., None]) + kept * carry.matrix
    return torch.cat(outs, dim=2), Carry(matrix, None if high is None else high[:, :, -1])


def _visible(weights: Tensor, here: Tensor, keys: Tensor, group: int) -> Tensor:
    hidden = rows(here[:, None] < keys, group)
    return weights.masked_fill(hidden, 0.0)


def _lower(weights: Tensor, group: int) -> Tensor:
    """The weights with later keys set to 0, even where they are NaN."""
    if group == 1:
        return weights.tril()
    index = torch.arange(weights.shape[-1], device=weights.device)
    return weights.masked_fill(rows(index[:, None] < index, group), 0.0)
