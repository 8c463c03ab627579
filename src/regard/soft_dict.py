"""The soft dictionary: attention as a look-up that returns a blend of all values.

A dictionary returns the value of the key that is equal to the query. This one returns every value, weighed by how well
its key fits: `softmax(score(query, keys) / temperature) @ values`. As the temperature goes to 0, the weight goes to the
best key alone, and it is a dictionary of the nearest key.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attend import attend
from regard.describe.score import Dot, Score
from regard.errors import ProblemError

SCORES = 1 << 22
"""Scores computed at once in a hard look-up: 16 MiB in float32."""


@dataclass(frozen=True, eq=False)
class SoftDict:
    """Keys, values, and how sharply a query chooses among them.

    Attributes:
        keys: [keys, dim].
        values: [keys, v_dim].
        temperature: what scores are divided by, in units of the score: high blends, low chooses, 0 takes the best key
            (the mean of those that are equally good: the limit of low temperatures). None for the score's own:
            sqrt(dim) for the dot product, as in attention, else 1.
        score: how a query is compared with a key; None for the dot product.

    >>> import torch
    >>> from regard import SoftDict
    >>> colours = SoftDict(torch.eye(3), torch.tensor([[10.0], [20.0], [30.0]]), temperature=0.1)
    >>> colours.look_up(torch.tensor([0.0, 1.0, 0.2]))
    tensor([20.0029])
    >>> SoftDict(colours.keys, colours.values, temperature=0).look_up(torch.tensor([0.0, 1.0, 0.2]))
    tensor([20.])
    """

    keys: Float[Tensor, "keys dim"]
    values: Float[Tensor, "keys v_dim"]
    temperature: float | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        for name, t in (("keys", self.keys), ("values", self.values)):
            if not isinstance(t, Tensor) or t.ndim != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
                what = list(t.shape) if isinstance(t, Tensor) else type(t).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ProblemError(f"SoftDict({name}) is {what}: expected a tensor [keys, numbers].")
        if len(self.keys) != len(self.values) or not len(self.keys):
            raise ProblemError(
                f"SoftDict has {len(self.keys)} keys and {len(self.values)} values: expected a value for each key, and "
                "at least one."
            )
        t = self.temperature
        if t is not None and (isinstance(t, bool) or not isinstance(t, int | float) or not 0 <= t < float("inf")):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"SoftDict(temperature={t!r}): expected a number, at least 0, or None.")

    def look_up(self, queries: Float[Tensor, "*queries dim"]) -> Float[Tensor, "*queries v_dim"]:
        """The blend of values for each query, [v_dim] for one query [dim], or [queries, v_dim].

        Differentiable in queries, keys, values and the score's tensors; at temperature 0 in the values alone.
        """
        return self._blend(queries, self.values)

    def weights(self, queries: Float[Tensor, "*queries dim"]) -> Float[Tensor, "*queries keys"]:
        """The share of each key, [keys] for one query or [queries, keys]; they sum to 1.

        >>> import torch
        >>> SoftDict(torch.eye(2), torch.eye(2), temperature=1.0).weights(torch.tensor([1.0, 0.0]))
        tensor([0.7311, 0.2689])
        """
        return self._blend(queries, torch.eye(len(self.keys), dtype=self.keys.dtype, device=self.keys.device))

    def _blend(self, queries: Tensor, values: Tensor) -> Tensor:
        if queries.ndim not in (1, 2):
            raise ProblemError(f"queries are {list(queries.shape)}: expected [dim] or [queries, dim].")
        q = queries.reshape(1, 1, -1, queries.shape[-1])
        k, v = self.keys[None, None], values[None, None]
        if self.temperature == 0:
            out = _best(self.score or Dot(), q, k, v)
        else:
            scale = None if self.temperature is None else 1 / self.temperature
            out = attend(q, k, v, score=self.score, scale=scale)
        return out[0, 0, 0] if queries.ndim == 1 else out[0, 0]


def _best(score: Score, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean of the values whose keys score highest, [1, 1, queries, v_dim]."""
    score.dim(q.shape[3], k.shape[3])
    with torch.no_grad():
        q, k, left = score.prepare(q, k)
    block = max(1, SCORES // (k.shape[2] * k.shape[3]))
    return torch.cat([_mean_of_best(left, part, k, v) for part in q.split(block, dim=2)], dim=2)


def _mean_of_best(score: Score | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scores = (
            q @ k.mT if score is None or isinstance(score, Dot) else score.compare(q[:, :, None], k[:, :, None])[:, 0]
        )
        top = scores.amax(dim=3, keepdim=True)
        share = ((scores == top) & (top > -torch.inf)).to(v.dtype)
        share = share / share.sum(dim=3, keepdim=True).clamp(min=1)
    return share @ v
