"""What torch's dispatcher calls for `aten::scaled_dot_product_attention` on the CPU, while regard is on.

The dispatcher is the one place that every caller passes: Python code whatever name it imported, torch's own modules,
C++, every thread, and torch.compile while it traces. Autocast, nested tensors, vmap and other devices are dealt with
before it, by torch as ever.
"""

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.override import report
from regard.override.decide import why_torch
from regard.override.mask_content import readable
from regard.torch_internals import attention_of_torch, skip_frames
from regard.torch_signature import attend_as_torch


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function, by regard where it is faster; torch's own errors where the arguments are wrong."""
    why = why_torch(query, key, value, attn_mask, dropout_p, is_causal)
    if why is not None and not report.is_on():
        return attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def ours() -> Tensor:
        keeps, added = readable(attn_mask, query.numel() * key.shape[-2], query.dtype)
        out = attend_as_torch(query, key, value, added, 0.0, is_causal, scale, enable_gqa, "native", keeps)
        fused = _is_for_fused_kernel(query, key, value, attn_mask, enable_gqa)
        return _in_layout_of(query, out) if fused else out.contiguous()

    def theirs() -> Tensor:
        return attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    out = None
    if why is None:
        try:
            out = ours()
        except RegardError as error:
            why = _reason(error)
    if report.is_on() and query.ndim > 1:
        for row in report.count(query.shape, key.shape[-2], query, why, _kind(attn_mask, is_causal, out)):
            row.time(ours, theirs)
    return theirs() if out is None else out


def _reason(error: RegardError) -> str:
    """Why regard did not run a call, in one line: of a refusal what the backend says of itself."""
    lines = str(error).splitlines()
    of_backend = (line.strip() for line in lines if line.startswith("  native: "))
    return next(of_backend, lines[0])


def _kind(mask: Tensor | None, causal: bool, out: Tensor | None) -> str:
    """The mask, and whether gradients flow, for a report."""
    masked = ", causal" if causal else "" if mask is None else ", bool mask" if mask.dtype == torch.bool else ", bias"
    return masked + (", gradients" if out is not None and out.requires_grad else "")


def _is_for_fused_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether torch would choose its fused kernel.

    torch does not say so of tensors that are traced.
    """
    if mask is not None and (mask.requires_grad or mask.ndim == 3):
        return False
    if not query.ndim == key.ndim == value.ndim == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if key.shape[1] != value.shape[1] or (key.shape[1] != query.shape[1] and not enable_gqa):
        return False
    return value.shape[3] == query.shape[3] and query.stride(3) == key.stride(3) == value.stride(3) == 1


def _in_layout_of(query: Tensor, out: Tensor) -> Tensor:
    """The output with the axes in memory in the order of the query's, as torch's fused kernel gives it.

    Programs call `.transpose(1, 2).view(...)` on it. Only the operator of a traced graph does not do so.
    """
    if out.stride() == query.stride():
        return out
    like = torch.empty_like(query)
    return out if out.stride() == like.stride() else like.copy_(out)


def attention_below_autograd(*arguments: object, **options: object) -> Tensor:
    """The same where autograd is not asked: in inference mode, and inside of an operator with its own derivative."""
    with torch.no_grad():
        return attention(*arguments, **options)  # pyright: ignore[reportArgumentType]


for _kernel in (attention, attention_below_autograd):
    skip_frames(_kernel)
