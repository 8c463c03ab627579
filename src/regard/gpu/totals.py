"""The log-sum-exp of rows as the kernels take it that compute weights again: in two numbers beside biases."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.gpu.call import Call, Inputs
from regard.gpu.far_rows import far_rows
from regard.gpu.launch import LARGE_FLOAT32, Blocks, biases, constants, launch, padded, section
from regard.gpu.tables import by_query

FAR_CONSTANTS = (
    "MAPS_BATCH", "MAPS_HEADS", "TILE", "ROWS", "PATCH", "DIM", "DIM_PADDED", "SOFTCAP", "DISTANCE", "BIAS", "WIDE",
    "PRECISION",
)  # fmt: skip
"""The names in `constants` that `far_rows` is compiled for."""

LN2, LOG2E = math.log(2), 1 / math.log(2)


class Totals(NamedTuple):
    """The log-sum-exp of rows, natural logarithm: top + rest * ln 2. See `far_rows.py`."""

    top: Tensor  # float32 [batch, heads, queries]
    rest: Tensor | None  # the same; None without biases, where it is 0

    def with_sink(self, sink: Tensor) -> "Totals":
        """The totals with one more column, the sink of each head."""
        column = sink[:, None].expand_as(self.top)
        if self.rest is None:
            return Totals(torch.logaddexp(self.top, column), None)
        above = torch.maximum(self.top, column)
        safe = above.masked_fill(above == -torch.inf, 0.0)
        total = torch.exp((self.top - safe) + self.rest * LN2) + torch.exp(column - safe)
        return Totals(above, torch.log2(total).masked_fill((total == 0) | (above == torch.inf), 0.0))

    def above(self, other: "Totals") -> Tensor:
        """How far it is above another, natural logarithm."""
        rest = sum(sign * t.rest * LN2 for sign, t in ((1, self), (-1, other)) if t.rest is not None)
        return (self.top - other.top) + rest

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """(top, rest) as the kernels take them; those of calls without biases do not read the second one."""
        return self.top, self.top if self.rest is None else self.rest


def far_blocks(item: int, dim: int) -> Blocks:
    """The blocks of `far_rows`, which seldom computes anything, by an element's bytes and a head's padded dimensions.

    64 rows of float32 have four warps, see `launch.float32_blocks`.
    """
    if item == 4 and dim > 128:
        return LARGE_FLOAT32
    tokens, warps = (32 if dim <= 64 else 16, 4) if item == 4 else (32, 8)
    return Blocks(64, tokens, tokens, warps, stages=1)


def totals(call: Call, i: Inputs, lse: Tensor) -> Totals:
    """The log-sum-exp of rows without their sink, from `lse` [batch, heads, queries]."""
    lse = lse.contiguous()
    if i.distance is None and i.bias is None:
        return Totals(lse, None)
    if call.is_part:  # other keys are part of the total, too
        return Totals(lse, torch.zeros_like(lse))
    s, (batch, heads, queries, dim) = call.schedule, i.q.shape
    blocks = far_blocks(i.q.element_size(), padded(dim))
    of_all = constants(call, i, blocks)
    top, rest = torch.empty(2, *lse.shape, dtype=torch.float32, device=lse.device)
    launch(
        far_rows, batch * heads * s.query_tiles * s.tile // blocks.rows, blocks, i.q.device,
        i.q, i.k, lse, top, rest, *i.q.stride()[:3], *i.k.stride()[:3], *biases(i, lse),
        *by_query(s, i.q.device),
        *(batch, heads, heads // i.k.shape[1], queries, i.k.shape[2], section(i), call.scale, call.softcap or 0.0),
        **{name: of_all[name] for name in FAR_CONSTANTS},
    )  # fmt: skip
    return Totals(top, rest)
