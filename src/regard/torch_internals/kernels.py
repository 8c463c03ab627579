"""torch's fused kernels of attention, which return the log-sum-exp, and their gradients."""

from typing import Any

from regard.torch_internals.missing import find

flash_attention_for_cpu: Any = find(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    None,
    'the backend "sdpa" refuses every call',
)
"""torch's fused kernel on the CPU, (out, lse); torch 2.2."""

_NO_FUSED = 'on CUDA, the backend "sdpa" refuses causal calls, and calls that return the log-sum-exp'

cudnn_attention: Any = find("torch.ops.aten._scaled_dot_product_cudnn_attention", None, _NO_FUSED)
"""cuDNN's kernel, (out, lse, ...) with what dropout drew; with an argument for a bias since torch 2.5.

The log-sum-exp is the natural logarithm, float32 [batch, heads, queries, 1], or without the last axis."""

cudnn_attention_backward: Any = find("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", None, _NO_FUSED)
"""The gradients of q, k and v; torch 2.5."""

flash_attention: Any = find("torch.ops.aten._scaled_dot_product_flash_attention", None, _NO_FUSED)
"""Flash attention, with results in the order of `cudnn_attention`; lse [batch, heads, queries]; torch 2.1."""

flash_attention_backward: Any = find("torch.ops.aten._scaled_dot_product_flash_attention_backward", None, _NO_FUSED)
"""The gradients of q, k and v, with arguments in another order than those of cuDNN; torch 2.1."""
