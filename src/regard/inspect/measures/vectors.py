"""Numbers of keys that a sweep averages by the weights, all of them in the same pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.sweep import Sweep
from regard.inspect.weights.lazy import Weights


@brief
@dataclass(frozen=True, eq=False)
class Vectors:
    """What to pass to a sweep as `along`, and where to find it again.

    Args:
        rarity: r_j of `rarity`, [batch, keys]; None for no rare-word measure.
        norms: of `output_norms`, [batch, heads, keys]; None for no measure by values. Every head is averaged along the
            vectors of all heads, of which its own is read.

    >>> from regard import Causal
    >>> from regard.inspect.sweep import sweep
    >>> q = torch.zeros(1, 1, 3, 2)
    >>> weights = Weights(q, q, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
    >>> Vectors().positions(sweep(weights, along=Vectors().stacked(weights)))
    tensor([[[0.0000, 0.5000, 1.0000]]])
    """

    rarity: Tensor | None = None
    norms: Tensor | None = None

    def stacked(self, weights: Weights) -> Tensor:
        """The vectors, [batch or 1, m, keys]: positions, then rarities, then norms.

        Raises:
            ProblemError: they are of another batch, or other heads or keys.
        """
        batch, heads, _, keys = weights.shape
        parts = [torch.arange(keys, device=weights.q.device)[None, None].to(weights.dtype)]
        for name, part, shape in (
            ("rarity", None if self.rarity is None else self.rarity[:, None], (batch, 1, keys)),
            ("norms", self.norms, (batch, heads, keys)),
        ):
            if part is None:
                continue
            if tuple(part.shape) != shape:
                raise ProblemError(f"{name} are {list(part.shape)} for the keys of a call: expected {list(shape)}.")
            parts.append(part.to(weights.dtype))
        most = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(most, -1, -1) for part in parts], dim=1)

    def positions(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] j, [batch, heads, queries]."""
        return self._along(swept)[..., 0]

    def rare(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] r_j, [batch, heads, queries]."""
        return self._along(swept)[..., 1]

    def by_norm(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] nu_j, each head by its own norms, [batch, heads, queries]; also of uniform attention."""
        own = self._along(swept)[..., 1 if self.rarity is None else 2 :]  # [batch, heads or 1, queries, heads]
        if own.shape[1] == 1:
            return own[:, 0].movedim(-1, 1)
        return own.diagonal(dim1=1, dim2=3).movedim(-1, 1)

    def _along(self, swept: Sweep) -> Tensor:
        if swept.along is None:
            raise ProblemError("the sweep was made without `along`: pass `along=vectors.stacked(weights)` to it.")
        return swept.along
