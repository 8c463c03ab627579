"""torch's fused encoder layer and multi-head attention, opened up so that their attention is a call like any other.

In inference `torch.nn.TransformerEncoderLayer` and `torch.nn.MultiheadAttention` run as one C++ function each. On the
CPU these compute all scores as one tensor, [batch, heads, queries, keys]. Where the call is not small, the same layer
is computed here from torch's functions, and `scaled_dot_product_attention` decides as ever. Layers that are small,
nested, or asked for weights are left to torch's functions.

One result differs from the fused functions: a row that may see no key gives 0 before the output projection, as it does
in torch's own layer while it trains; the fused functions give NaN.
"""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.override import report
from regard.override.decide import WEIGHTS, is_small
from regard.torch_internals import encoder_layer_of_torch, or_true, packed_attention_of_torch


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, w_in: Tensor, b_in: Tensor, w_out: Tensor,
    b_out: Tensor, mask: Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`torch._native_multi_head_attention`: q, k and v are [batch, tokens, width]."""
    if need_weights or query is not key or key is not value or not _is_opened(query, mask):
        if need_weights and report.is_on() and not query.is_nested:
            report.count((*query.shape[:1], heads, query.shape[1], width // heads), key.shape[1], query, WEIGHTS)
        return packed_attention_of_torch(
            query, key, value, width, heads, w_in, b_in, w_out, b_out, mask, need_weights, average_attn_weights,
            mask_type,
        )  # fmt: skip
    return _attention(query, heads, w_in, b_in, w_out, b_out, _hidden(mask, mask_type)), None


forward_of_torch = F.multi_head_attention_forward
"""What `torch.nn.MultiheadAttention` calls where gradients flow."""


@wraps(forward_of_torch)
def forward_counted(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The same, counting the calls that want weights: these compute all scores, and call no attention of torch."""
    if options.get("need_weights", True) and report.is_on() and not torch.compiler.is_compiling():
        report.count((*query.shape[1:-1], heads, query.shape[0], width // heads), key.shape[0], query, WEIGHTS)
    return forward_of_torch(query, key, value, width, heads, *arguments, **options)


def encoder_layer(
    x: Tensor, width: int, heads: int, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, use_gelu: bool,
    norm_first: bool, eps: float, w_norm1: Tensor, b_norm1: Tensor, w_norm2: Tensor, b_norm2: Tensor, w_up: Tensor,
    b_up: Tensor, w_down: Tensor, b_down: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`torch._transformer_encoder_layer_fwd`: x is [batch, tokens, width]."""
    if not _is_opened(x, mask):
        return encoder_layer_of_torch(
            x, width, heads, w_in, b_in, w_out, b_out, use_gelu, norm_first, eps, w_norm1, b_norm1, w_norm2, b_norm2,
            w_up, b_up, w_down, b_down, mask, mask_type,
        )  # fmt: skip

    hidden = _hidden(mask, mask_type)

    def norm1(t: Tensor) -> Tensor:
        return F.layer_norm(t, (width,), w_norm1, b_norm1, eps)

    def norm2(t: Tensor) -> Tensor:
        return F.layer_norm(t, (width,), w_norm2, b_norm2, eps)

    def attend(t: Tensor) -> Tensor:
        return _attention(t, heads, w_in, b_in, w_out, b_out, hidden)

    def feed_forward(t: Tensor) -> Tensor:
        up = F.linear(t, w_up, b_up)
        return F.linear(F.gelu(up) if use_gelu else F.relu(up), w_down, b_down)

    if norm_first:
        x = x + attend(norm1(x))
        return x + feed_forward(norm2(x))
    x = norm1(x + attend(x))
    return norm2(x + feed_forward(x))


def _attention(
    x: Tensor, heads: int, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, hidden: Tensor | None
) -> Tensor:
    """Self-attention of [batch, tokens, width], with its projections."""
    q, k, v = F.linear(x, w_in, b_in).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else ~hidden)
    return F.linear(out.transpose(1, 2).flatten(2), w_out, b_out)


def _is_opened(x: Tensor, mask: Tensor | None) -> bool:
    """Whether the attention of [batch, tokens, width] is worth a call of its own.

    A program that torch.export makes has torch's functions, and must not have conditions of its sizes.
    """
    if torch.compiler.is_exporting():
        return False
    plain = not x.is_nested and x.device.type == "cpu" and x.ndim == 3 and (mask is None or not mask.is_nested)
    if not plain:
        return False
    small = is_small(x.numel() * x.shape[1], x.shape[1], x.shape[1], x.dtype)
    return not (or_true(small) if torch.compiler.is_compiling() else small)


def _hidden(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Which pairs a mask hides, bool and broadcastable to [batch, heads, queries, keys].

    The fused functions hide a pair wherever the mask is not 0, also where it has floats.

    Args:
        mask: bool or float; [batch, keys] for the type 1, [queries, keys] for 0, else of four axes.
    """
    if mask is None:
        return None
    if mask.ndim == 4 and mask.stride(1) == 0:
        mask = mask[:, :1]
    return mask.bool()[:, None, None] if mask_type == 1 else mask.bool()
