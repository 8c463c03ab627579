# pyright: basic
"""Blocks of tokens as the GPU kernels read them: by the engine for bulk copies where a chip has one, else by address.

Chips of NVIDIA from Hopper on (compute capability 9.0) copy a block of a tensor by its descriptor (TMA), which the host
makes: no thread computes addresses, and tokens beyond the last are zeros.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OLDEST_CHIP = 9
"""Major compute capability from which on blocks are copied by descriptors."""

ALIGNED = 16
"""Alignment, in bytes, of addresses and strides that descriptors and torch's fused kernels need."""


@triton.jit
def block_of(
    described, b, h, first, base, stride, stop,
    COUNT: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """[COUNT, DIM_PADDED]: tokens first to first + COUNT of a head; channels that are not there are zeros.

    Args:
        described: the tensor's descriptor, whose b-th batch row and h-th head are read; None: read by address.
        base, stride: address of the head's first token, and the step from token to token.
        stop: number of tokens; those from there on are zeros.
        WIDE: whether the block is in float32.
        EDGE: whether it may reach beyond the last token.
    """
    if described is not None:
        found = described.load([b, h, first, 0]).reshape([COUNT, DIM_PADDED])
    else:
        t = tl.arange(0, COUNT)
        c = tl.arange(0, DIM_PADDED)
        at = base + tl.cast(first, tl.int64) * stride + (t[:, None].to(tl.int64) * stride + c[None, :])
        if EDGE:
            found = tl.load(at, mask=(first + t < stop)[:, None] & (c[None, :] < DIM), other=0.0)
        elif DIM == DIM_PADDED:
            found = tl.load(at)
        else:
            found = tl.load(at, mask=c[None, :] < DIM, other=0.0)
    if WIDE:
        found = found.to(tl.float32)
    return found


def descriptor(t: Tensor, tokens: int, dim_padded: int) -> Any:
    """The descriptor of blocks of a tensor [batch, heads, tokens, dim]; None where they are read by address."""
    if not is_described(t):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    # the step along an axis of one element is never taken, and may be anything
    steps = [step if size > 1 else dim_padded for step, size in zip(t.stride()[:3], t.shape, strict=False)]
    return TensorDescriptor(t, list(t.shape), [*steps, 1], [1, 1, tokens, dim_padded])


def is_described(t: Tensor) -> bool:
    """Whether the chip copies blocks of this tensor by a descriptor."""
    return _has_descriptors(t.device) and is_aligned(t) and all(step > 0 for step in _steps(t))


def is_aligned(t: Tensor) -> bool:
    """Whether the address and the strides of a tensor [batch, heads, tokens, dim] are multiples of `ALIGNED` bytes."""
    elements = ALIGNED // t.element_size()
    return t.data_ptr() % ALIGNED == 0 and all(step % elements == 0 for step in _steps(t))


def _steps(t: Tensor) -> list[int]:
    """The strides of all axes but the last that have more than one element, in elements."""
    return [step for step, size in zip(t.stride()[:3], t.shape, strict=False) if size > 1]


@cache
def _has_descriptors(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= OLDEST_CHIP
    )
