"""Linear attention by its definitions, one number of a loop at a time, in float64: what the tests compare with."""

import math

import torch
from torch import Tensor


def elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0) + 1e-3


def favor(x: Tensor, vectors: Tensor) -> Tensor:
    """Of x that is already multiplied by the root of the scale."""
    return torch.exp(x @ vectors.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(vectors))


def taylor(x: Tensor) -> Tensor:
    """Of x that is already multiplied by the root of the scale: with all products, also those that come twice."""
    products = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, products], -1)


def by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalise: bool,
    gamma: Tensor | None = None,
    gate: Tensor | None = None,
    beta: Tensor | None = None,
    alpha: Tensor | None = None,
    first: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, S and z of features q [heads, tokens, m], k [kv_heads, tokens, m] and v of one batch row.

    gamma [kv_heads]; gate [kv_heads, tokens, m], beta and alpha [kv_heads, tokens]: gates themselves, not logarithms.
    """
    heads, tokens, size = q.shape
    kv_heads, width = k.shape[0], v.shape[2]
    state, z = first or (torch.zeros(kv_heads, size, width).to(q), torch.zeros(kv_heads, size).to(q))
    state, z = state.clone(), z.clone()
    out = torch.zeros(heads, tokens, width).to(q)
    for t in range(tokens):
        for h in range(kv_heads):
            fade = torch.ones(size).to(q)
            fade = fade if gamma is None else fade * gamma[h]
            fade = fade if gate is None else fade * gate[h, t]
            if beta is None:
                state[h] = fade[:, None] * state[h] + torch.outer(k[h, t], v[h, t])
            else:
                erase = torch.eye(size).to(q) - beta[h, t] * torch.outer(k[h, t], k[h, t])
                state[h] = (1.0 if alpha is None else alpha[h, t]) * erase @ state[h] + beta[h, t] * torch.outer(
                    k[h, t], v[h, t]
                )
            z[h] = fade * z[h] + k[h, t]
        for h in range(heads):
            mine = h // (heads // kv_heads)
            out[h, t] = q[h, t] @ state[mine]
            if normalise:
                out[h, t] = out[h, t] / (q[h, t] @ z[mine])
    return out, state, z
