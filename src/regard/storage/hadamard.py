"""`hadamard`: the rotation of channels that spreads large ones over all of them.

Ashkboos et al. 2024, QuaRot, arXiv:2404.00456, §3. The fast Walsh-Hadamard transform is log2(n) stages of sums and
differences:

    a b c d  ->  a+c  a-c  b+d  b-d  ->  (a+c)+(b+d)  (a+c)-(b+d)  (a-c)+(b-d)  (a-c)-(b-d)

Each stage combines the first half of a row with the second and writes each sum next to its difference, so all stages
have the same access pattern (the constant geometry of Pease 1968, "An adaptation of the fast Fourier transform for
parallel processing", §3).
An element is always the same tree of additions, so the bits of a row depend neither on the rows beside it nor on the
count of threads; a matrix product guarantees neither. Half precision is computed in float32 and rounded once.
"""

import numpy as np
import torch
from torch import Tensor

from regard.describe.position_table import is_traced
from regard.describe.rotation import is_watched

PIECE = 1 << 17
"""Elements rotated at a time: 512 KiB of float32 and two buffers of that size, in a core's cache."""

SMALL = 1 << 14
"""Elements up to which numpy rotates, on the CPU: its calls cost a fifth of torch's, and decode has small tensors."""


def hadamard(x: Tensor) -> Tensor:
    """x [..., dim] rotated by the orthonormal Hadamard matrix, its own inverse.

    Where dim is not a power of two, blocks of the largest power of two that divides it are rotated.

    >>> x = torch.randn(3, 48)
    >>> torch.allclose(hadamard(hadamard(x)), x, atol=1e-6), torch.allclose(hadamard(x).norm(), x.norm())
    (True, True)
    """
    dim = x.shape[-1]
    block = dim & -dim
    if block < 2:
        return x
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if is_traced() or is_watched(wide) or (wide.requires_grad and torch.is_grad_enabled()):
        return _by_formula(wide, block).to(x.dtype)
    if wide.device.type == "cpu" and wide.numel() <= SMALL:
        return _rotate_small(wide.detach().resolve_neg(), block).to(x.dtype)  # numpy has no lazy negation
    out = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    if wide.numel():
        _in_pieces(wide.reshape(-1, block), out.view(-1, block))
    return out.to(x.dtype)


def _by_formula(x: Tensor, block: int) -> Tensor:
    """The rotation in plain functional torch, with the same bits."""
    rows = x.unflatten(-1, (x.shape[-1] // block, block))
    for _ in range(block.bit_length() - 1):
        a, b = rows.chunk(2, -1)
        rows = torch.stack((a + b, a - b), -1).flatten(-2)
    return (rows * block**-0.5).flatten(-2)


def _rotate_small(x: Tensor, block: int) -> Tensor:
    """The rotation in numpy, with the same bits."""
    rows, half = x.numpy().reshape(-1, block), block // 2
    buffers = [np.empty(rows.shape, rows.dtype) for _ in range(2)]
    places = [(buffer[:, :half], buffer[:, half:], buffer[:, 0::2], buffer[:, 1::2]) for buffer in buffers]
    a, b = rows[:, :half], rows[:, half:]
    stages = block.bit_length() - 1
    for stage in range(stages):
        first, second, even, odd = places[stage % 2]
        np.add(a, b, out=even)
        np.subtract(a, b, out=odd)
        a, b = first, second
    return torch.from_numpy(buffers[(stages - 1) % 2] * rows.dtype.type(block**-0.5)).view(x.shape)


def _in_pieces(x: Tensor, out: Tensor) -> None:
    """Rotate rows [rows, block] into `out`, in pieces that fit a core's cache."""
    rows, block = x.shape
    step = min(rows, max(PIECE // block, 1))
    between = torch.empty(2, step, block, dtype=x.dtype, device=x.device)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        _rotate(x[start : start + count], between[:, :count], out[start : start + count])


def _rotate(x: Tensor, between: Tensor, out: Tensor) -> None:
    halves = [(*buffer.chunk(2, -1), buffer[:, 0::2], buffer[:, 1::2]) for buffer in between.unbind(0)]
    a, b = x.chunk(2, -1)
    stages = x.shape[-1].bit_length() - 1
    for stage in range(stages):
        first, second, even, odd = halves[stage % 2]
        torch.add(a, b, out=even)
        torch.sub(a, b, out=odd)
        a, b = first, second
    torch.mul(between[(stages - 1) % 2], x.shape[-1] ** -0.5, out=out)
