"""Linear attention token by token, for every rule: decoding, and the simplest definition of the result."""

import torch
from torch import Tensor

from regard.linear.segment import Carry, Segment


def recurrent(segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """Add each token to the state, then apply the state to its queries; `4 features v_dim` FLOPs each."""
    state, high = carry
    outs: list[Tensor] = []
    for one in segment.each():
        state, value = _decay(one, state), one.v
        if one.beta is not None:
            value = one.beta[..., None] * (value - one.k @ state)
        if one.top is not None and high is not None:
            state, value, high = _align(one, state, high)
        state = torch.addcmul(state, one.k.mT, value)
        outs.append(one.q @ state)
    return torch.cat(outs, dim=2), Carry(state, high)


def _decay(one: Segment, state: Tensor) -> Tensor:
    """The state after the decay of this token."""
    if one.log_gate is not None:
        return one.log_gate.exp().mT * state
    if one.log_decay is not None:
        return one.log_decay.exp()[..., None] * state
    if one.log_gamma is not None and one.top is None:
        return one.log_gamma.exp() * state
    return state


def _align(one: Segment, state: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """State and value rescaled to the greater of their exponents, and that exponent."""
    assert one.top is not None
    age = torch.zeros_like(high[:1, :1]) if one.log_gamma is None else one.log_gamma[None, :, 0, 0]
    top = one.top[..., 0]
    now = torch.maximum(top, high + age).detach()
    return (high + age - now).exp()[..., None, None] * state, (top - now).exp()[..., None, None] * one.v, now
