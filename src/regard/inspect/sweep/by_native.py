"""The sweep by the compiled library (native/sweep.h): the weights pass through registers, and only sums are written."""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard import native, native_calls
from regard.describe.bias import Bias, TensorBias
from regard.inspect.sweep.by_torch import BINS, Sweep
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Cells
from regard.plan.distance import kept_by_distance, split_by_distance
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule

SECONDS = 0.2
"""After so long the library returns for a moment, so that Python can see to Ctrl-C."""

TILE = 64
"""Tokens per side of a tile of the library's schedules."""


def takes(weights: Weights) -> bool:
    """Whether the library is there, and knows all that the call is made of: it has one number for a row's total."""
    dtypes = {weights.q.dtype, weights.k.dtype}
    _, others = split_by_distance(weights.bias)
    return (
        native.available()
        and weights.q.device.type == "cpu"
        and len(dtypes) == 1
        and dtypes <= set(native_calls.DTYPES)
        and all(type(term) is TensorBias for term in others)
        and weights.totals.rest is None
    )


def swept(
    weights: Weights,
    picture: int | None,
    along: Tensor | None,
    tick: Callable[[], None] | None = None,
    isa: int | None = None,
) -> Sweep:
    """See `regard.inspect.sweep.sweep`, which has checked the arguments.

    Args:
        isa: a number in `native.isas()`, -1 for the plain loops; None for the one to use.
    """
    found = _empty(weights, picture, along)
    inputs = _Inputs(weights, along)
    fields = inputs.fields | _outputs(found)
    fields |= {"isa": native.isas().index(native.isa()) if isa is None else isa, "threads": torch.get_num_threads()}
    entry = native_calls.Entry("regard_gather", native_calls.SWEEP)
    needed = entry.workspace(entry.opened(entry.packed(fields)))
    workspace = torch.empty(needed, dtype=torch.uint8, device="cpu")
    fields |= {"workspace": workspace.data_ptr(), "workspace_bytes": needed}
    entry(entry.opened(entry.packed(fields)), tick)
    if tick is not None:
        tick()
    return found


def _empty(weights: Weights, picture: int | None, along: Tensor | None) -> Sweep:
    """What the library will write: all of it, but where the call has no row or no key."""
    batch, heads, queries, keys = weights.shape
    make = torch.empty if weights.q.numel() and weights.k.numel() else torch.zeros

    def wide(*axes: int) -> Tensor:
        return make((batch, heads, *axes), dtype=weights.dtype, device="cpu")

    cells = None if picture is None else Cells(queries, keys, picture)
    return Sweep(
        entropy=wide(queries),
        squares=wide(queries),
        mass=wide(queries),
        top=wide(queries),
        top_key=make((batch, heads, queries), dtype=torch.int64, device="cpu"),
        bins=wide(queries, BINS),
        columns=wide(keys),
        along=None if along is None else wide(queries, along.shape[1]),
        mean=None if cells is None else wide(*cells.shape),
        largest=None if cells is None else wide(*cells.shape),
        cell=0 if cells is None else cells.cell,
    )


def _outputs(found: Sweep) -> dict[str, float]:
    """Where everything is written, by the fields' names, which are those of `Sweep`."""
    names = ("entropy", "squares", "mass", "top", "top_key", "bins", "columns", "along", "mean", "largest")
    written: dict[str, Tensor | None] = {name: getattr(found, name) for name in names}
    places: dict[str, float] = {name: 0 if t is None else t.data_ptr() for name, t in written.items()}
    return places | {"cell": found.cell}


class _Inputs:
    """The fields of a call, and what their addresses point to."""

    def __init__(self, weights: Weights, along: Tensor | None) -> None:
        w = weights
        batch, heads, queries, keys = w.shape
        self._kept: list[Any] = []
        self.fields: dict[str, float] = {
            "batch": batch,
            "heads": heads,
            "kv_heads": w.k.shape[1],
            "queries": queries,
            "keys": keys,
            "qk_dim": w.q.shape[3],
            "dtype": native_calls.DTYPES[w.q.dtype],
            "scale": w.scale,
            "softcap": w.softcap or 0.0,
            "lse": self._address(w.lse.to(w.dtype)),
            "sink": 0 if w.sink is None else self._address(w.sink.to(w.dtype)),
            "offset": w.first_position,  # for distances alone: the lists of tiles and the bias have rows of the call
            "seconds": SECONDS,
        }
        self._place("q", w.q)
        self._place("k", w.k)
        self._list(schedule(w.mask, batch=w.sequence + batch, heads=heads, queries=queries, keys=keys,
                            offset=w.offset, tile=TILE), w.sequence)  # fmt: skip
        if w.bias is not None:
            self._bias(w, w.bias)
        if along is not None:
            vectors = along.to(w.dtype).mT.contiguous()  # [batch or 1, keys, m]
            shared = vectors.shape[0] == 1
            self.fields |= {"vectors": self._address(vectors), "vector_count": vectors.shape[2]}
            self.fields |= {"vector_batch": 0 if shared else vectors.stride(0)}

    def _address(self, t: Tensor) -> int:
        self._kept.append(t.resolve_neg().contiguous())
        return self._kept[-1].data_ptr()

    def _place(self, name: str, t: Tensor) -> None:
        """A tensor [.., .., tokens, dim], read in place if its last dimension is contiguous."""
        t = t.resolve_neg()
        t = t if t.stride(3) == 1 else t.contiguous()
        self._kept.append(t)
        self.fields |= zip(
            (f"{name}.{field}" for field in ("data", "batch", "head", "token")),
            (t.data_ptr(), *t.stride()[:3]),
            strict=True,
        )

    def _list(self, tiles: Schedule, first: int) -> None:
        """The tiles of the batch rows from `first` on."""
        maps = tiles.maps
        row = first * maps[1] * tiles.query_tiles if maps[0] > 1 else 0
        run_start, patch_start = (np.ascontiguousarray(x[row:], np.int64) for x in (tiles.run_start, tiles.patch_start))
        runs, patches = slice(run_start[0], None), slice(patch_start[0], None)
        arrays = {
            "run_start": run_start - run_start[0], "run_tile": tiles.run_tile[runs],
            "run_length": tiles.run_length[runs], "patch_start": patch_start - patch_start[0],
            "patch_tile": tiles.patch_tile[patches], "patch_pattern": tiles.patch_pattern[patches],
        }  # fmt: skip
        lists: dict[str, np.ndarray] = {name: np.ascontiguousarray(x, np.int64) for name, x in arrays.items()}
        lists["patterns"] = np.ascontiguousarray(tiles.transposed_patterns, np.uint8)
        self._kept.append(lists)
        self.fields |= {f"by_query.{name}": x.ctypes.data for name, x in lists.items()}
        self.fields |= {"by_query.rows": tiles.query_tiles, "by_query.pattern_count": len(lists["patterns"])}
        self.fields |= {"maps_batch": self.fields["batch"] if maps[0] > 1 else 1, "maps_head": maps[1]}

    def _bias(self, w: Weights, bias: Bias) -> None:
        """Terms that know the distance alone as a vector per head, the others as one tensor."""
        of_distance, others = split_by_distance(bias)
        if of_distance is not None:
            first, count = w.offset - (w.shape[3] - 1), max(w.shape[2] + w.shape[3] - 1, 0)
            vectors = kept_by_distance(of_distance, w.shape[1], w.dtype, first, count)
            self._kept.append(vectors)
            self.fields |= {"distance": vectors.data_ptr(), "distance_head": vectors.stride(0)}
        tables = [w.own_rows(term.rows(w.shape[2], w.offset)) for term in cast("list[TensorBias]", others)]
        if tables:
            table = tables[0] if len(tables) == 1 else reduce(add, (table.to(w.dtype) for table in tables))
            table = table.detach().resolve_neg() if table.dtype in native_calls.DTYPES else table.detach().to(w.dtype)
            self._kept.append(table)
            axes = ("bias_batch", "bias_head", "bias_row", "bias_key")
            strides = (0 if n == 1 else stride for n, stride in zip(table.shape, table.stride(), strict=True))
            self.fields |= dict(zip(axes, strides, strict=True))
            self.fields |= {"bias": table.data_ptr(), "bias_dtype": native_calls.DTYPES[table.dtype]}
