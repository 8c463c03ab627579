"""Values that are not finite: NaN or infinity in a key or value makes the rows that see it NaN, and no others.

A weight of 0 does not hide such a value in a matrix product, since 0 * NaN is NaN, in results and in gradients. So
these values are replaced by 0, and the rows that see them are set to NaN afterwards.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.linear.call import LinearCall
from regard.linear.segment import Carry
from regard.plan.checks import can_be_read, is_finite


def rule_tensors(call: LinearCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The rule's tensors with a value for each token: log_gate, beta, log_decay."""
    return call.log_gate, call.beta, call.log_decay


def is_all_finite(call: LinearCall, *tensors: Tensor) -> bool:
    """Whether all values are known to be finite; a gate of -inf, which is valid, counts as not finite here."""
    tensors = (*tensors, *(t for t in rule_tensors(call) if t is not None))
    return can_be_read(*tensors) and all(map(is_finite, tensors))


def guarded(
    run: Callable[[LinearCall, Tensor, Tensor, Tensor, Carry], tuple[Tensor, Carry]],
    call: LinearCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carry: Carry,
) -> tuple[Tensor, Carry]:
    """The result of `run` for inputs that may be NaN or infinite."""
    first = _first_bad(call, k, v)
    here = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    spoilt = first[:, :, None, : v.shape[3]] <= (here if call.causal else k.shape[2] - 1)  # [..., queries or 1, v_dim]
    spoilt = spoilt.repeat_interleave(q.shape[1] // max(1, k.shape[1]), dim=1) | ~torch.isfinite(q).all(3, keepdim=True)
    gate, beta, decay = (None if t is None else torch.where(_is_bad(t), 0.0, t) for t in rule_tensors(call))
    call = call._replace(log_gate=gate, beta=beta, log_decay=decay)
    q, k, v = (torch.where(torch.isfinite(t), t, 0.0) for t in (q, k, v))
    out, carry = run(call, q, k, v, carry)
    matrix = torch.where((first < k.shape[2])[:, :, None], torch.nan, carry.matrix)
    return torch.where(spoilt, torch.nan, out), carry._replace(matrix=matrix)


def _first_bad(call: LinearCall, k: Tensor, v: Tensor) -> Tensor:
    """The first token that makes a column of the state NaN, [batch, kv_heads, v_dim (+ 1)]; if none, the key count."""
    bad_key = ~torch.isfinite(k).all(3, keepdim=True)
    for t in rule_tensors(call):
        if t is not None:
            bad_key = bad_key | (_is_bad(t).any(3, keepdim=True) if t.ndim == 4 else _is_bad(t)[..., None])
    bad = ~torch.isfinite(v) | bad_key
    bad = torch.cat([bad, bad_key], dim=3) if call.normalise else bad
    if not k.shape[2]:
        return torch.zeros(bad.shape[0], bad.shape[1], bad.shape[3], dtype=torch.int64, device=k.device)
    index = torch.arange(k.shape[2], device=k.device)[:, None]
    return torch.where(bad, index, k.shape[2]).amin(2)


def _is_bad(t: Tensor) -> Tensor:
    """Which gates, decays and betas are invalid; a gate may be -inf."""
    return t.isnan() | (t == torch.inf)
