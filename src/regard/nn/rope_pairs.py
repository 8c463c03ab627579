"""`RopePairs`: rotary embedding with a choice of the frequencies, for heads with position in part of their dims."""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.describe.position import Position, Rope, has_constant_table, has_own_rotate
from regard.describe.position_table import check_positions, rows
from regard.describe.rotation import rotate_pairs, rotation_table
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.integers import as_integer
from regard.nn.checks import check_input
from regard.plan.checks import DTYPES
from regard.wide import wide_of


@spec
class RopePairs(Position):
    """A choice of the dimension pairs of a `Rope` for each head, stored interleaved: `(0 1)(2 3)...`.

    Each head rotates only the pairs that its scores depend on most: partial RoPE, Ji et al. 2025, arXiv:2502.14837,
    §3.1.

    Args:
        rope: gives the frequencies.
        pairs: for each key head its pairs, 0 the fastest; the same count for all heads. Query heads use the choice of
            their key head; with one entry, all heads share it.

    >>> pairs = RopePairs(Rope(8), ((0, 3), (1, 2)))
    >>> pairs.dim, pairs.rotate(torch.ones(1, 4, 5, 4)).shape
    (4, torch.Size([1, 4, 5, 4]))
    """

    rope: Rope
    pairs: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rope, Rope):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"RopePairs(rope={self.rope!r}): expected a Rope.")
        if has_own_rotate(self.rope):
            raise ProblemError(
                f"RopePairs(rope={self.rope!r}): pairs are rotated by the frequencies of a Rope, and "
                f"{type(self.rope).__name__} has a rotate of its own."
            )
        if not _is_choice(self.pairs):
            raise ProblemError(
                f"RopePairs(pairs={self.pairs!r}): expected a tuple of whole numbers for each head, as in "
                "((0, 3), (1, 2))."
            )
        counts, available = {len(chosen) for chosen in self.pairs}, self.rope.rotated // 2
        if len(counts) != 1 or 0 in counts:
            raise ProblemError(
                f"RopePairs(pairs={self.pairs}): expected the same number of pairs, 1 or more, for each head."
            )
        if any(len(set(row)) < len(row) or not 0 <= min(row) <= max(row) < available for row in self.pairs):
            raise ProblemError(f"RopePairs(pairs={self.pairs}): expected different pairs from 0 to {available - 1}.")

    @property
    def dim(self) -> int:
        """Rotated dimensions of a head: two for each pair."""
        return 2 * len(self.pairs[0])

    def rotate(
        self,
        x: Float[Tensor, "batch heads tokens dim"],
        positions: int | Int[Tensor, "..."] | None = None,
        tokens: int | None = None,
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Rotate each pair of x by its angle; the arguments are those of `Rope.rotate`.

        Raises:
            ProblemError: the heads or dims of x do not fit `pairs`, or x is no tensor of floats.
        """
        check_input("x", x, f"[batch, heads, tokens, {self.dim}]")
        groups = len(self.pairs)
        if x.dtype not in DTYPES:
            raise ProblemError(f"x is {x.dtype}: expected float64, float32, bfloat16 or float16.")
        if x.ndim != 4 or x.shape[3] != self.dim or x.shape[1] % groups:
            raise ProblemError(
                f"x has shape {list(x.shape)}: expected [batch, heads, tokens, {self.dim}], heads a multiple of "
                f"{groups}."
            )
        positions = check_positions(positions, x, rank=4)
        length, dtype = self.rope.length_of(x, positions, tokens), wide_of(x.dtype)
        key = (self, self.rope.scaling and self.rope.scaling.regime(length), dtype, x.device)
        key = key if has_constant_table(self.rope) else None
        table = rows(key, lambda p: self._turns(p, length, dtype).to(x.device), positions, x)
        group = x.shape[1] // groups
        by_head = table.transpose(-4, -3).repeat_interleave(group, -4)  # [..., heads, tokens, dim / 2, 2]
        return rotate_pairs(x, by_head, interleaved=True)

    def _turns(self, positions: Tensor, length: int | None, dtype: torch.dtype) -> Tensor:
        """[*positions.shape, groups, dim / 2, 2]."""
        frequencies = self.rope.frequencies_at(length, torch.device("cpu"))
        chosen = frequencies[torch.tensor(self.pairs, device="cpu")].to(positions.device)
        angles = positions.double()[..., None, None] * chosen
        return rotation_table(angles, self.rope.attention_factor(), dtype, interleaved=True)


def _is_choice(pairs: object) -> bool:
    """Whether it is a tuple of tuples of integers."""
    rows = cast("tuple[Any, ...]", pairs) if isinstance(pairs, tuple) else (None,)
    return all(isinstance(row, tuple) and None not in map(as_integer, cast("tuple[Any, ...]", row)) for row in rows)
