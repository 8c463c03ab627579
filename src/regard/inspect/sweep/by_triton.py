"""The sweep on a GPU, by a kernel in Triton (`regard/gpu/sweep.py`); sums are float32, as the weights are."""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from importlib.util import find_spec
from operator import add
from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.describe.bias import Bias, TensorBias
from regard.gpu.call import LARGEST_DIM, Call, Inputs
from regard.inspect.sweep.by_torch import BINS, Sweep
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Cells
from regard.plan.distance import kept_by_distance, split_by_distance
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule

TILE = 128
"""Tokens per side of a tile of the kernels' schedules."""


def takes(weights: Weights) -> bool:
    """Whether the tensors are on a GPU, and the kernel knows all that the call is made of."""
    return weights.q.device.type == "cuda" and find_spec("triton") is not None and knows(weights)


def knows(weights: Weights) -> bool:
    """Whether the kernel knows all that the call is made of, on whichever device."""
    _, others = split_by_distance(weights.bias)
    dtypes = {weights.q.dtype, weights.k.dtype}
    return (
        len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float16, torch.bfloat16}
        and weights.q.shape[3] <= LARGEST_DIM
        and bool(weights.q.numel() and weights.k.numel())
        and all(type(term) is TensorBias for term in others)
    )


def swept(
    weights: Weights, picture: int | None, along: Tensor | None, tick: Callable[[], None] | None = None
) -> Sweep:  # fmt: skip
    """See `regard.inspect.sweep.sweep`, which has checked the arguments."""
    from regard.gpu.inspect import means, sums

    w = weights
    batch, heads, queries, keys = w.shape
    tiles = schedule(
        w.mask, batch=w.sequence + batch, heads=heads, queries=queries, keys=keys, offset=w.offset, tile=TILE
    )
    q, k = (t if t.stride(3) == 1 else t.contiguous() for t in (w.q.resolve_neg(), w.k.resolve_neg()))
    sink = None if w.sink is None else w.sink.float().contiguous()
    of_distance, others = split_by_distance(w.bias)
    inputs = Inputs(q, k, k, sink, _distance(w, of_distance), _table(w, others))
    call = Call(of_rows(tiles, w.sequence), w.scale, w.softcap, 0.0, 0)
    cells = None if picture is None else Cells(queries, keys, picture)
    found = sums(
        inputs, w.lse.float(), call, offset=w.first_position, bins=BINS,
        cell=0 if cells is None else cells.cell, cells=(1, 1) if cells is None else cells.shape,
    )  # fmt: skip
    share = w.sink_share
    weighed = None if along is None else means(inputs, call, along) * found.mass[..., None]
    if tick is not None:
        tick()
    return Sweep(
        entropy=found.entropy + torch.special.entr(share),
        squares=found.squares + share.square(),
        mass=found.mass,
        top=found.top,
        top_key=found.top_key,
        bins=found.bins,
        columns=found.columns,
        along=weighed,
        mean=None if cells is None else (found.cells / cells.pairs(q.device)).float(),
        largest=None if cells is None else found.largest,
        cell=0 if cells is None else cells.cell,
    )


def of_rows(tiles: Schedule, first: int) -> Schedule:
    """The schedule of the batch rows from `first` on."""
    if tiles.maps[0] == 1 or not first:
        return tiles
    row = first * tiles.maps[1] * tiles.query_tiles
    runs, patches = int(tiles.run_start[row]), int(tiles.patch_start[row])
    lists = {name: getattr(tiles, name)[runs:] for name in ("run_tile", "run_length")}
    lists |= {name: getattr(tiles, name)[patches:] for name in ("patch_tile", "patch_pattern")}
    starts: dict[str, np.ndarray] = {
        "run_start": tiles.run_start[row:] - runs,
        "patch_start": tiles.patch_start[row:] - patches,
    }
    rows = tiles.batch - first
    return replace(tiles, batch=rows, maps=(rows, tiles.maps[1]), **lists, **starts)


def _distance(w: Weights, of_distance: Bias | None) -> Tensor | None:
    """Terms of the bias that know the distance alone, as a vector per head."""
    if of_distance is None:
        return None
    (_, heads, queries, keys), first = w.shape, w.offset - (w.shape[3] - 1)
    return kept_by_distance(of_distance, heads, torch.float32, first, queries + keys - 1, w.q.device)


def _table(w: Weights, others: list[Bias]) -> Tensor | None:
    """The other terms of the bias, as one tensor."""
    terms = cast("list[TensorBias]", others)
    tables = [w.own_rows(term.rows(w.shape[2], w.offset)).detach() for term in terms]
    if not tables:
        return None
    return tables[0].float().resolve_neg() if len(tables) == 1 else reduce(add, (table.float() for table in tables))
