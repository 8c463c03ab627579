"""Which calls of torch's attention regard runs, and for which reason the others are passed on to torch.

A call is passed on where torch means something that regard does not compute alike (dropout from torch's generator,
derivatives of forward mode), and where it is small. regard needs some 25 us more than torch before a call computes, and
100 us with gradients: Python in place of C++. So a call must have some work for which regard is faster.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard import native
from regard.dispatch.onnx_form import is_exporting_to_onnx
from regard.torch_internals import (
    FakeTensor,
    FunctionalTensor,
    constant_in_graphs,
    current_func_transform,
    has_sizes_of_data,
    in_forward_mode,
    is_compiling,
)

LEAST = {torch.float32: 1_500_000, torch.float64: 1_500_000, torch.bfloat16: 250_000, torch.float16: 250_000}
"""The fewest multiply-adds of `query @ key^T`, for each thread, that are run by regard, by dtype.

On one core of AMD Zen 5 torch's kernel takes 0.15 ms for those of float32. In half precision regard is 2 to 3 times as
fast for the same work, so less is enough.
"""

LEAST_OF_FEW = {1: 20_000, 2: 80_000}
"""The same in half precision, without gradients, for one and two queries: torch's kernel needs 2 ms for a million then.

Decoding with 8 heads and 128 keys is 3 times as fast here.
"""

_FEWEST = max(LEAST_OF_FEW)

FEW = range(5, 25)
"""Queries for which torch's kernel is the faster one in float32, by 5 to 25 %, where nothing is hidden: with AVX-512.

Not with AVX2 (AMD Zen 4 without AVX-512), where regard is 0.85 to 1.8 times as fast, nearly always 1.05 and more, nor
on an Intel Xeon with AMX, 1.0 to 1.5.
"""

FEW_WITH_GRADIENTS = 3
"""The most queries for which torch is the faster one in float32 with gradients: regard's backward pass computes whole
vectors of rows, so forward and backward are 0.8 to 1.0 times as fast (Intel Xeon with AMX, 2 to 24 MiB of keys)."""

LARGE_KEYS = 32 << 20
"""Bytes of keys from which regard is the faster one there too: 0.97 at 29 MiB, 1.3 at 37."""

WITH_GRADIENTS = 3
"""The factor by which more work is needed where gradients flow: Python also sees to the backward pass."""

SHORT = 32
"""Fewer keys than this are torch's in float32: its matrix products take them whole, and tiles here have 64."""

SMALL = "small: torch is faster"
FEW_QUERIES = f"{FEW[0]} to {FEW[-1]} queries in float32: torch is faster"
FEW_LEARNED = f"up to {FEW_WITH_GRADIENTS} queries in float32 with gradients: torch is faster"
SHAPE = "a tensor of fewer than two axes"
DROPOUT = "dropout: drawn from torch's generator, as without regard"
MASK_AND_CAUSAL = "attn_mask together with is_causal"
MASK_FORM = "an attn_mask of fewer than two axes, or neither bool, float32 nor of the query's dtype"
KIND = "a tensor subclass, or a tensor that torch.jit, make_fx or torch.export trace"
DATA_SIZE = "a size that torch.compile does not know, as it depends on data"
TRANSFORM = "torch.func, vmap or forward-mode derivatives"
CHOSEN = "the program chose torch's kernel (torch.nn.attention.sdpa_kernel)"
WEIGHTS = "weights are returned: pass need_weights=False where nobody reads them"
DTYPE = "a dtype without kernels here, or q, k and v differ in dtype"

_PLAIN = (Tensor, nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)


def is_small(products: int, queries: int, keys: int, dtype: torch.dtype, gradients: bool = False) -> bool:
    """Whether torch is the faster one for so little work.

    Args:
        products: multiply-adds of `query @ key^T`.
    """
    wide = dtype.itemsize >= 4
    if wide and keys < SHORT:
        return True
    least = LEAST.get(dtype, LEAST[torch.float32])
    if gradients:
        least *= WITH_GRADIENTS if wide else 1
    elif not wide and queries <= _FEWEST:
        least = LEAST_OF_FEW.get(int(queries), least)  # a size that torch traces has no hash
    return products < least * _threads()


@constant_in_graphs
def _threads() -> int:
    """The number of threads, in a form that torch.compile can trace."""
    return torch.get_num_threads()


def is_few(queries: int, dtype: torch.dtype) -> bool:
    """Whether torch is the faster one for this number of queries, if nothing is hidden."""
    return dtype == torch.float32 and queries in FEW and not _is_fast_with_few()


@constant_in_graphs
def _is_fast_with_few() -> bool:
    """Whether this machine's kernels are ahead of torch's there."""
    return native.isas()[-1:] in (("avx2",), ("amx",))


def _is_few_learned(query: Tensor, key: Tensor) -> bool:
    return query.dtype == torch.float32 and query.shape[-2] <= FEW_WITH_GRADIENTS and key.nbytes < LARGE_KEYS


def why_torch(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool) -> str | None:
    """The reason for which a call is passed on to torch; None if regard runs it."""
    if query.ndim < 2 or key.ndim < 2:
        return SHAPE
    if type(query) not in _PLAIN:  # before sizes are compared
        if not _is_known(query):
            return KIND  # torch.export makes conditions of the program of a comparison
        if has_sizes_of_data((query, key)):
            return DATA_SIZE  # it cannot be compared
    gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    queries, keys = query.shape[-2], key.shape[-2]
    if is_small(query.numel() * keys, queries, keys, query.dtype, gradients):
        return SMALL
    if is_few(queries, query.dtype) and mask is None:
        return FEW_QUERIES
    if gradients and _is_few_learned(query, key) and mask is None:
        return FEW_LEARNED
    if dropout:
        return DROPOUT
    if not query.dtype == key.dtype == value.dtype or query.dtype not in LEAST:
        return DTYPE
    if causal and mask is not None:
        return MASK_AND_CAUSAL
    if mask is not None and (mask.ndim < 2 or mask.dtype not in (torch.bool, torch.float32, query.dtype)):
        return MASK_FORM  # torch raises an error, or computes it for other numbers of axes
    if not all(_is_known(t) for t in (query, key, value, mask)):
        return KIND
    if current_func_transform() is not None or in_forward_mode():
        return TRANSFORM
    return None if torch.backends.cuda.flash_sdp_enabled() else CHOSEN


def _is_known(t: Any) -> bool:
    """Whether it is an ordinary tensor, or one that torch.compile traces."""
    kind = type(t)
    return kind in _PLAIN or t is None or (kind in _TRACED and is_compiling() and not _is_exporting())


def _is_exporting() -> bool:
    """Whether torch.export is at work, or torch's export to ONNX, which has no other operators than torch's."""
    return torch.compiler.is_exporting() or is_exporting_to_onnx()
