"""The operator `Attention` of the ONNX standard, versions 23 to 25, computed by regard.

https://onnx.ai/onnx/operators/onnx__Attention.html; names and order of the arguments are the standard's.
"""

from functools import reduce
from operator import and_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.attention import attend
from regard.describe.bias import TensorBias
from regard.describe.mask import CallSizes, Mask, kept_pairs
from regard.describe.mask_by_rule import Causal, KeyLengths, Window
from regard.describe.mask_by_table import TensorMask
from regard.errors import ProblemError
from regard.plan.request import Request

PRECISIONS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
"""Types by the numbers that the standard gives them."""


class Outputs(NamedTuple):
    """The outputs of the operator.

    Attributes:
        Y: [batch, q_num_heads, queries, v_head_size], or [batch, queries, q_num_heads * v_head_size] for inputs of 3
            axes.
        present_key, present_value: [batch, kv_num_heads, keys, head size], those of the past first.
        qk_matmul_output: [batch, q_num_heads, queries, keys]; None unless `qk_matmul_output_mode` is given.
    """

    Y: Tensor
    present_key: Tensor
    present_value: Tensor
    qk_matmul_output: Tensor | None


def attention(
    Q: Tensor,  # noqa: N803  # the standard's names
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Outputs:
    """The operator `Attention`: of ONNX 1.18 (version 23) to 1.23 (version 25).

    A query has the position that it has after the keys in front of it: the keys of the past, or else
    `nonpad_kv_seqlen` - queries, for each batch row, or else none.

    Args:
        Q: [batch, q_num_heads, queries, head_size], or [batch, queries, q_num_heads * head_size].
        K, V: the same with kv_num_heads and keys; V may have another head size.
        attn_mask: bool (True keeps) or floats (added), broadcastable to [batch, q_num_heads, queries, keys]; keys that
            it lacks at the end are hidden.
        past_key, past_value: [batch, kv_num_heads, past keys, head size], joined in front of K and V.
        nonpad_kv_seqlen: [batch], how many of the keys each batch row has.
        is_causal: 1: a query sees keys up to its own position.
        kv_num_heads, q_num_heads: with inputs of 3 axes only.
        qk_matmul_output_mode: 0 the scores, 1 after the softcap, 2 with masks and bias, 3 the weights; None, which the
            standard does not have: no such output, which would be a matrix of queries x keys.
        scale: None for head_size ** -0.5.
        softcap: 0 for none.
        softmax_precision: the standard's number of a type. regard computes in float32 or better, in float64 for 11.
        left_window_size, right_window_size: how many keys before and after its own position a query sees; -1 for all.

    Raises:
        ProblemError: inputs that the standard does not allow.

    >>> import torch
    >>> from regard.integrate.onnx import attention
    >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8)
    >>> past = torch.randn(2, 2, 2, 5, 8)
    >>> out = attention(q, k, v, past_key=past[0], past_value=past[1], is_causal=1)
    >>> out.Y.shape, out.present_key.shape
    (torch.Size([2, 4, 1, 8]), torch.Size([2, 2, 6, 8]))
    """
    if (past_key is None) != (past_value is None):
        raise ProblemError("past_key and past_value: one is given and the other is None; pass both or neither.")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ProblemError("nonpad_kv_seqlen and past_key are both given: the keys of a past have no padding.")
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ProblemError(f"attn_mask is {attn_mask.dtype}: expected bools (True keeps) or floats (added).")
    if min(left_window_size, right_window_size) < -1:
        raise ProblemError(
            f"left_window_size is {left_window_size} and right_window_size {right_window_size}: expected a number of "
            "keys, or -1 for all."
        )
    q, k, v = _heads(Q, q_num_heads, "q"), _heads(K, kv_num_heads, "kv"), _heads(V, kv_num_heads, "kv")
    offset: int | Tensor = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
    if nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen - q.shape[2]
    mask = _mask(attn_mask, nonpad_kv_seqlen, bool(is_causal), (left_window_size, right_window_size), k.shape[2])
    bias = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = TensorBias(_padded(attn_mask, k.shape[2], hidden=-torch.inf))
    wide = softmax_precision == 11
    if softmax_precision is not None and softmax_precision not in PRECISIONS:
        raise ProblemError(f"softmax_precision is {softmax_precision}: expected 1, 10, 11 or 16.")
    options: dict[str, Any] = {"scale": scale, "softcap": softcap or None, "mask": mask, "bias": bias, "offset": offset}
    out = attend(*(t.double() if wide else t for t in (q, k, v)), **options).to(q.dtype)
    shown = None if qk_matmul_output_mode is None else _shown(q, k, qk_matmul_output_mode, **options)
    return Outputs(out if Q.ndim == 4 else out.transpose(1, 2).flatten(2), k, v, shown)


def _mask(
    attn_mask: Tensor | None, lengths: Tensor | None, is_causal: bool, window: tuple[int, int], keys: int
) -> Mask | None:
    """The mask of the inputs; the window is (left, right), -1 for all."""
    masks: list[Mask] = [] if lengths is None else [KeyLengths(lengths)]
    if is_causal:
        masks.append(Causal())
    if max(window) >= 0:
        masks.append(Window(*(size + 1 if size >= 0 else None for size in window)))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        masks.append(TensorMask(_padded(attn_mask, keys, hidden=False)))
    return reduce(and_, masks) if masks else None


def _heads(t: Tensor, heads: int | None, name: str) -> Tensor:
    """[batch, heads, tokens, dim] of an input of 3 or 4 axes."""
    if t.ndim == 4:
        return t
    if t.ndim != 3 or heads is None or t.shape[2] % heads:
        raise ProblemError(
            f"an input has shape {list(t.shape)} and {name}_num_heads is {heads}: expected "
            f"[batch, heads, tokens, dim], or [batch, tokens, heads * dim] with {name}_num_heads."
        )
    return t.unflatten(2, (heads, -1)).transpose(1, 2)


def _padded(attn_mask: Tensor, keys: int, hidden: float) -> Tensor:
    """The mask with all keys; those that it lacks are hidden."""
    end = attn_mask.new_full((*attn_mask.shape[:-1], max(0, keys - attn_mask.shape[-1])), hidden)
    return torch.cat([attn_mask, end], dim=-1)


def _shown(
    q: Tensor, k: Tensor, mode: int, *, scale: float | None, softcap: float | None, mask: Mask | None,
    bias: TensorBias | None, offset: int | Tensor,
) -> Tensor:  # fmt: skip
    """The matrix of a mode, [batch, heads, queries, keys]."""
    if mode not in range(4):
        raise ProblemError(f"qk_matmul_output_mode is {mode}: expected 0, 1, 2, 3, or None for no such output.")
    group = q.shape[1] // k.shape[1]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    s = q @ k.repeat_interleave(group, dim=1).mT * factor
    if mode >= 1 and softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mode < 2:
        return s
    call = Request(q, k, k, mask, bias, offset=offset).resolved()
    (batch, heads, queries), keys = s.shape[:3], s.shape[3]
    sizes = CallSizes(batch, heads, queries, keys, cast(int, call.offset))
    b, h, i, j = map(torch.arange, (batch, heads, queries, keys))
    if bias is not None:
        s = s + bias.tensor
    if call.mask is not None:
        bound = call.mask.bind(sizes)
        kept = kept_pairs(bound, b[:, None, None, None], h[:, None, None], i[:, None] + sizes.offset, j)
        s = s.masked_fill(~kept, -torch.inf)
    if mode == 2:
        return s
    sees = (s > -torch.inf).any(dim=3, keepdim=True)
    return torch.where(sees, torch.softmax(s.to(torch.promote_types(s.dtype, torch.float32)), dim=3), 0.0).to(q.dtype)
