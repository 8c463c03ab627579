"""FlexAttention's `BlockMask`, made without evaluating all pairs: from the bounds of the mask (`layout.py`)."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask

from regard.describe.mask import Bools, CallSizes, Mask
from regard.describe.whole_number import whole
from regard.errors import ProblemError, RefusalError
from regard.flex.layout import block_layout
from regard.flex.mod_mask import is_opaque, mask_of_mod
from regard.flex.outside_derivatives import outside_derivatives
from regard.flex.read_block_mask import mark_as_following, remember
from regard.flex.trace import Mod
from regard.torch_internals import in_func_vmap, skip_frames


def create_block_mask(
    mask_mod: Mod,
    B: int | None,  # noqa: N803  # torch's names
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    **options: Any,
) -> BlockMask:
    """torch's `create_block_mask`: the same arguments, and a `BlockMask` of the same lists.

    A `mask_mod` that compares positions, looks tables up by them and combines such conditions, in any way of writing,
    is decided block by block by arithmetic on intervals; only blocks at the edge of the mask are evaluated. One that
    does more (an operator that does not work element by element, a `torch.autograd.Function`) is called for every
    pair, in pieces: that takes seconds for 32,768 x 32,768.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, True where the pair is kept.
        B, H: batch rows and heads; None for 1.
        Q_LEN, KV_LEN: tokens.
        device: of the lists; None for the accelerator, or "cpu" without one, as in torch.
        BLOCK_SIZE: tokens per side of a block, or (queries, keys).
        separate_full_blocks: whether blocks that are kept whole have lists of their own.
        options: further ones of torch's, as `compute_dq_write_order`; torch's own function makes the mask then.

    Raises:
        ProblemError: a size is no whole number, or less than 0 (BLOCK_SIZE: than 1).

    >>> from regard.flex import create_block_mask
    >>> create_block_mask(lambda b, h, q, k: q >= k, None, None, 32768, 32768, device="cpu").sparsity()
    49.8046875
    """
    if _compile:
        warnings.warn(
            "_compile has no effect: the mask is not evaluated pair by pair.", DeprecationWarning, stacklevel=2
        )
    block = _pair_of(BLOCK_SIZE)
    batch = 1 if B is None else whole(B, "B", "batch rows", least=0)
    heads = 1 if H is None else whole(H, "H", "heads", least=0)
    queries, keys = whole(Q_LEN, "Q_LEN", least=0), whole(KV_LEN, "KV_LEN", least=0)
    place = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    if not separate_full_blocks:
        options["separate_full_blocks"] = False  # torch before 2.13 lacks it
    compiling = torch.compiler.is_dynamo_compiling()
    sizes = CallSizes(batch, heads, queries, keys, 0)
    if compiling and in_func_vmap():  # dynamo breaks the graph here
        raise RefusalError(
            "create_block_mask inside of torch.vmap is no part of a graph: call it before, outside of vmap."
        )
    if options.keys() - {"separate_full_blocks"} or compiling:
        make: Any = of_torch.create_block_mask
        made = make(mask_mod, B, H, Q_LEN, KV_LEN, place, block, **options)  # in a graph only if the lists are used
        if compiling:
            mark_as_following(made)
        return made
    with outside_derivatives():
        return _create(mask_mod, sizes, place, block, separate_full_blocks)


def _create(
    mask_mod: Mod, sizes: CallSizes, place: torch.device, block: tuple[int, int], separate_full_blocks: bool
) -> BlockMask:
    mask = mask_of_mod(mask_mod, sizes, place)
    if is_opaque(mask) and place.type != "cpu":
        make: Any = of_torch.create_block_mask
        options = {} if separate_full_blocks else {"separate_full_blocks": False}
        return make(mask_mod, *sizes[:4], place, block, **options)
    some, every = block_layout(mask, sizes, block)
    whole = every & _is_uncut(sizes, block) if separate_full_blocks else np.zeros_like(every)
    lists = [_lists(kept, sizes, place) for kept in (some & ~whole, whole)]
    (kv, q), (full_kv, full_q) = lists if separate_full_blocks else (lists[0], ((None, None), (None, None)))
    lengths = sizes.queries, sizes.keys
    made = BlockMask(lengths, *kv, *full_kv, *q, *full_q, BLOCK_SIZE=block, mask_mod=mask_mod)
    if isinstance(mask, Mask):
        remember(made, mask, sizes, some & ~whole, whole)
    return made


skip_frames(_create)  # where torch.compile breaks the graph, it would compile what traces the function


def _is_uncut(sizes: CallSizes, block: tuple[int, int]) -> Bools:
    """Which blocks the edges of the call do not cut: torch pads these with False, so they are never whole."""
    rows, columns = (
        np.arange(1, -(-tokens // size) + 1) * size <= tokens
        for tokens, size in zip((sizes.queries, sizes.keys), block, strict=True)
    )
    return rows[:, None] & columns


Lists = tuple[Tensor, Tensor]
"""Counts [batch, heads, rows], and the listed columns [batch, heads, rows, columns], these first; int32."""


def _lists(kept: Bools, sizes: CallSizes, device: torch.device) -> tuple[Lists, Lists]:
    """The lists by rows of blocks, and by columns."""
    return _ordered(kept, sizes, device), _ordered(kept.swapaxes(2, 3), sizes, device)


def _ordered(kept: Bools, sizes: CallSizes, device: torch.device) -> Lists:
    counts = torch.from_numpy(kept.sum(axis=3, dtype=np.int32))
    order = torch.from_numpy(np.argsort(~kept, axis=3, kind="stable").astype(np.int32))
    batch, heads = sizes[:2]
    return (
        counts.to(device).expand(batch, heads, *counts.shape[2:]).contiguous(),  # users take views of them
        order.to(device).expand(batch, heads, *order.shape[2:]).contiguous(),
    )


def _pair_of(size: int | tuple[int, int]) -> tuple[int, int]:
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ProblemError(f"BLOCK_SIZE is {size}: expected tokens per side, or (queries, keys).")
    down, across = (whole(side, "BLOCK_SIZE", "tokens per side", least=1) for side in sides)
    return down, across
