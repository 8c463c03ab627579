"""Linear attention with `Delta`: a token adds the difference between its value and the value that the state has for it.

    u_t = beta_t (v_t - alpha_t S_{t-1}^T k_t),    S_t = alpha_t S_{t-1} + k_t u_t^T,    alpha_t = exp(log_decay_t)

Within a chunk that starts from S the u_t depend linearly on earlier ones, so one triangular solve gives all of them
(the WY form; Yang et al. 2024, arXiv:2406.06484, §3, and 2025, arXiv:2412.06464, §3):

    (I + L) u = beta v - beta faded k S,      L_ij = beta_i (k_i . k_j) exp(sum of log_decay over j < t <= i),   j < i

Solved for both terms at once, `u = write - erase S`; the solves of all chunks run together. Only two products per chunk
remain sequential.
"""

import torch
from torch import Tensor

from regard.linear.segment import Carry, Segment, after, by_chunks, cut, rows, summed


def chunked(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """Chunk by chunk; the loop over chunks has two products."""
    return by_chunks(_chunks, segment, carry, chunk)


def parallel(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """All tokens as one chunk: one triangular system of tokens x tokens."""
    return _chunks(segment, carry, segment.tokens)


def _chunks(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    assert segment.beta is not None
    chunks, group, width = segment.tokens // chunk, segment.group, segment.v.shape[3]
    q, k, v, beta = (cut(x, chunks) for x in (segment.q, segment.k, segment.v, segment.beta))
    pair, since, until, whole = _fades(None if segment.log_decay is None else cut(segment.log_decay, chunks), beta)
    scaled = beta[..., None] * k
    triangle = ((scaled @ k.mT) * pair).tril(-1)
    right = torch.cat([beta[..., None] * v, scaled * since], dim=-1)
    solved = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    write, erase = solved.split([width, k.shape[-1]], dim=-1)
    kept = (k * until).mT.contiguous()
    state = carry.matrix
    states: list[Tensor] = []
    news: list[Tensor] = []
    for written, erased, factor, key in zip(*(x.unbind(2) for x in (write, erase, whole, kept)), strict=True):
        states.append(state)
        news.append(written - erased @ state)
        state = factor * state + key @ news[-1]
    weights = (q @ k.mT) * rows(pair, group)
    index = torch.arange(chunk, device=q.device)
    weights = weights.masked_fill(rows(index[:, None] < index, group), 0.0)
    out = _mix(weights, torch.stack(news, dim=2), group) + rows(since, group) * (q @ torch.stack(states, dim=2))
    return out.flatten(2, 3), Carry(state, None)


def _mix(weights: Tensor, news: Tensor, group: int) -> Tensor:
    """weights @ news. If keys have large norms, `news` may overflow: the overflow reaches no earlier row."""
    lost = ~torch.isfinite(news)
    out = weights @ torch.where(lost, 0.0, news)
    return torch.where(rows(lost.cummax(dim=-2).values, group), torch.nan, out)


def _fades(fade: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The decay factors of pairs, of the state at a query, of a key at the end of the chunk, and of the state.

    pair [..., chunk, chunk], since [..., chunk, 1], until [..., chunk, 1], whole [..., 1, 1].
    """
    if fade is None:
        one = torch.ones_like(like[:1, :1, :, :1, None])  # [1, 1, chunks, 1, 1]
        return one, one, one, one
    since, until, whole = fade.cumsum(-1), after(fade, -1), fade.sum(-1, keepdim=True)
    return summed(fade).exp(), since.exp()[..., None], until.exp()[..., None], whole.exp()[..., None]
