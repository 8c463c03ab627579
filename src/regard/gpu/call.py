"""A call as the GPU kernels take it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from regard.plan.schedule import Schedule
from regard.seeds import dropout_threshold

LARGEST_DIM = 256
"""The largest head dimension: the accumulators of a tile of queries must fit in registers."""

LARGEST_DECODED_DIM = 1024
"""The largest head dimension in decoding, where query rows are few: a latent and its rotated key have 576."""


class Inputs(NamedTuple):
    """The operands as the kernels read them."""

    q: Tensor  # [batch, heads, queries, qk_dim]
    k: Tensor  # [batch, kv_heads, keys, qk_dim]
    v: Tensor  # [batch, kv_heads, keys, v_dim]
    sink: Tensor | None  # float32 [heads]
    distance: Tensor | None  # float32 [heads, queries + keys - 1]; of a line [heads, 2], see `Call.is_line`
    bias: Tensor | None  # [batch or 1, heads or 1, queries or 1, keys or 1]


@dataclass(frozen=True)
class Call:
    """What a call has besides its tensors."""

    schedule: Schedule
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    is_part: bool = False
    """Whether the keys are a part of those of the state that is differentiated."""
    is_line: bool = False
    """Whether the bias by distance is `-slope * |distance|`, given by (slope, offset) of each head: `distance.line`."""

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels are passed of it besides the schedule and the seed."""
        return self.scale, self.softcap, self.dropout, self.is_line

    @property
    def drops(self) -> tuple[int, int, int, float]:
        """(low half of the seed, high half, threshold, factor of weights that stay), as native/dropout.h has them."""
        kept = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        halves = _signed(self.seed & 0xFFFFFFFF), _signed(self.seed >> 32)
        return *halves, _signed(dropout_threshold(self.dropout)), kept


def _signed(x: int) -> int:
    """32 bits as the integer that Triton takes for int32."""
    return x - (1 << 32) if x >= 1 << 31 else x
