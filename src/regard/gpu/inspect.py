"""Starts the sweep over the weights of a call (`sweep.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.gpu.call import Call, Inputs
from regard.gpu.launch import (
    LARGE_FLOAT32,
    Blocks,
    biases,
    is_wide,
    launch,
    padded,
    precision,
    run,
    section,
    softcap_form,
)
from regard.gpu.sweep import sweep
from regard.gpu.tables import by_query
from regard.gpu.totals import far_blocks, totals

MOST_VECTORS = 128
"""Vectors whose means one start of the forward kernel computes."""


class Sums(NamedTuple):
    """What the kernel writes, in float32; without the sink."""

    mass: Tensor  # [batch, heads, queries], as the next four
    entropy: Tensor
    squares: Tensor
    top: Tensor
    top_key: Tensor  # int64
    bins: Tensor  # [batch, heads, queries, bins]
    columns: Tensor  # [batch, heads, keys]
    cells: Tensor  # float64 [batch, heads, down, across]: the sum of each cell
    largest: Tensor  # [batch, heads, down, across]


def sweep_blocks(item: int, dim: int) -> Blocks:
    """The blocks for elements of `item` bytes and a head's padded dimensions. 64 keys at once would spill registers."""
    blocks = far_blocks(item, dim)
    return blocks if blocks == LARGE_FLOAT32 else blocks._replace(stages=2)


def sums(
    i: Inputs, lse: Tensor, call: Call, *, offset: int, bins: int, cell: int, cells: tuple[int, int]
) -> Sums:  # fmt: skip
    """The sums over all weights; v of the inputs is not read.

    Args:
        lse: float32 [batch, heads, queries], log-sum-exp of each row without its sink.
        bins: at most 32; the last one has all larger distances.
        cell, cells: pairs per side of a cell of the picture, and cells of its sides; 0 and (1, 1) for no picture.
    """
    tiles, blocks = call.schedule, sweep_blocks(i.q.element_size(), padded(i.q.shape[3]))
    (batch, heads, queries, dim), (_, kv_heads, keys, _), device = i.q.shape, i.k.shape, i.q.device
    mass, entropy, squares, top = torch.empty(4, batch, heads, queries, dtype=torch.float32, device=device)
    top_key = torch.empty(batch, heads, queries, dtype=torch.int64, device=device)
    of_bins = torch.empty(batch, heads, queries, bins, dtype=torch.float32, device=device)
    columns = torch.zeros(batch, heads, keys, dtype=torch.float64, device=device)
    mean = torch.zeros(batch, heads, *cells, dtype=torch.float64, device=device)
    largest = torch.zeros(batch, heads, *cells, dtype=torch.int32, device=device)
    total = totals(call, i, lse)
    total = total if i.sink is None else total.with_sink(i.sink)
    launch(
        sweep, batch * heads * tiles.query_tiles * tiles.tile // blocks.rows, blocks, device,
        i.q, i.k, *total.both, mass, entropy, squares, top, top_key, of_bins, columns, mean, largest,
        *i.q.stride()[:3], *i.k.stride()[:3], *biases(i, mass), *by_query(tiles, device),
        batch, heads, heads // kv_heads, queries, keys, section(i), call.scale, call.softcap or 0.0,
        offset, max(cell, 1), *cells,
        MAPS_BATCH=tiles.maps[0] > 1, MAPS_HEADS=tiles.maps[1] > 1, TILE=tiles.tile, ROWS=blocks.rows,
        KEYS=blocks.tokens, DIM=dim, DIM_PADDED=padded(dim), BINS=bins, SOFTCAP=softcap_form(call.softcap, i.q),
        DISTANCE=i.distance is not None, BIAS=i.bias is not None, PICTURE=cell > 0,
        WIDE=is_wide(i.q), PRECISION=precision(i.q),
    )  # fmt: skip
    return Sums(mass, entropy, squares, top, top_key, of_bins, columns.float(), mean, largest.view(torch.float32))


def means(i: Inputs, call: Call, vectors: Tensor) -> Tensor:
    """The means of vectors [batch or 1, m, keys] by the softmax of each row, [batch, heads, queries, m].

    They are what attention gives for these vectors as values.
    """
    batch, kv_heads = i.k.shape[:2]
    wide = i._replace(q=i.q.float(), k=i.k.float(), sink=None)
    found = list[Tensor]()
    for some in vectors.float().split(MOST_VECTORS, 1):
        values = some.mT.contiguous()[:, None].expand(batch, kv_heads, -1, -1)
        found.append(run(call, wide._replace(v=values))[0])
    return torch.cat(found, 3)
