"""The soft dictionary: attention as a look-up that returns a blend of all values.

A dictionary returns the value of the key that equals the query. A soft dictionary returns a mean of all values,
weighted by how well their keys match: `softmax(score(query, keys) / temperature) @ values`. As the temperature goes to
0, all weight goes to the best key.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import attend
from regard.backend.contract import Backend
from regard.describe.number import number_field
from regard.describe.score import Dot, Score, compare_pairs
from regard.describe.spec import bound_to
from regard.dispatch.choose import check_backend
from regard.errors import ProblemError
from regard.wide import wide_of

COLDEST = 1e-30
"""The lowest temperature above 0: scores / temperature would exceed float32 at lower ones."""

SCORES = 1 << 22
"""Scores per chunk of a look-up at temperature 0: 16 MiB in float32."""


@dataclass(frozen=True, eq=False)
class SoftDict:
    """Keys, values, and how sharply a query chooses among them.

    Attributes:
        keys: floats [keys, dim].
        values: [keys, v_dim], of the type of the keys.
        temperature: divisor of the scores: high blends, low selects, 0 takes the best key (the mean of equally good
            keys, which is the limit). None: the default of the score, sqrt(dim) for the dot product, as in attention,
            else 1.
        score: of a query and a key; None: the dot product.
        backend: of `look_up`, as in `attend`; at temperature 0 none is used.

    >>> import torch
    >>> from regard.scores import SoftDict
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
    backend: str | Backend | None = None

    def __post_init__(self) -> None:
        for name, t in (("keys", self.keys), ("values", self.values)):
            _check_tensor(f"SoftDict({name})", t, self.keys, "[keys, dim]", (2,))
        if len(self.keys) != len(self.values) or not len(self.keys):
            raise ProblemError(
                f"SoftDict has {len(self.keys)} keys and {len(self.values)} values: expected a value for each key, and "
                "at least one."
            )
        if not self.keys.shape[1]:
            raise ProblemError("SoftDict has keys of 0 dimensions, which match no query: expected at least one.")
        if not isinstance(self.score, Score | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"SoftDict(score={self.score!r}): expected a score such as Cosine(), or None.")
        _check_temperature(number_field(self, "temperature"))
        check_backend(self.backend)

    def __repr__(self) -> str:
        shown = [f"keys {list(self.keys.shape)}", f"values {list(self.values.shape)}"]
        shown += [] if self.temperature is None else [f"temperature={self.temperature}"]
        shown += [] if self.score is None else [f"score={self.score!r}"]
        return f"SoftDict({', '.join(shown + ([] if self.backend is None else [f'backend={self.backend!r}']))})"

    def look_up(self, queries: Float[Tensor, "*queries dim"]) -> Float[Tensor, "*queries v_dim"]:
        """The blend of values for each query, [v_dim] for one query [dim], or [queries, v_dim].

        Differentiable in queries, keys, values and the score's tensors; at temperature 0 in the values alone.
        """
        _check_tensor("queries", queries, self.keys, "[dim] or [queries, dim]", (1, 2))
        rows = queries.reshape(-1, queries.shape[-1])
        if self.temperature == 0:
            block = max(1, SCORES // self.keys.numel())
            out = torch.cat(
                [_best(self._scores(part)).to(self.values.dtype) @ self.values for part in rows.split(block)]
            )
        else:
            k, v = self.keys[None, None], self.values[None, None]
            scale = None if self.temperature is None else 1 / self.temperature
            out = attend(rows[None, None], k, v, score=self.score, scale=scale, backend=self.backend)[0, 0]
        return out[0] if queries.ndim == 1 else out

    def weights(self, queries: Float[Tensor, "*queries dim"]) -> Float[Tensor, "*queries keys"]:
        """The weight of each key, [keys] for one query or [queries, keys].

        Weights sum to 1, or are all 0 for a query without a key in the support of the kernel.

        >>> import torch
        >>> SoftDict(torch.eye(2), torch.eye(2), temperature=1.0).weights(torch.tensor([1.0, 0.0]))
        tensor([0.7311, 0.2689])
        """
        _check_tensor("queries", queries, self.keys, "[dim] or [queries, dim]", (1, 2))
        scores = self._scores(queries.reshape(-1, queries.shape[-1]))
        if self.temperature == 0:
            shares = _best(scores)
        else:
            own = (self.score or Dot()).default_scale(queries.shape[-1])
            top = scores.detach().amax(dim=1, keepdim=True)
            apart = scores - torch.where(top == -torch.inf, 0.0, top)
            scaled = apart * own if self.temperature is None else apart / self.temperature
            shares = torch.where(top == -torch.inf, 0.0, torch.softmax(scaled, dim=1))
        shares = shares.to(self.keys.dtype)
        return shares[0] if queries.ndim == 1 else shares

    def _scores(self, queries: Tensor) -> Tensor:
        """[queries, keys], in float32 or float64."""
        score = bound_to(self.score or Dot(), 1, 1)
        score.dim(queries.shape[1], self.keys.shape[1])
        wide = wide_of(self.keys.dtype)
        with torch.autocast(self.keys.device.type, enabled=False):
            q, k, left = score.prepare(queries.to(wide)[None, None], self.keys.to(wide)[None, None])
            if left is None or type(left) is Dot:
                return (q @ k.mT)[0, 0]
            return compare_pairs(left, q[:, :, None], k[:, :, None])[0, 0, 0]


def _best(scores: Tensor) -> Tensor:
    """Equal weights for the best keys, 0 for the others; NaN in rows with a NaN score."""
    scores = scores.detach()
    top = scores.amax(dim=1, keepdim=True)
    best = ((scores == top) & (top > -torch.inf)).to(scores.dtype)
    return torch.where(top.isnan(), top, best / best.sum(dim=1, keepdim=True).clamp(min=1))


def _check_tensor(name: str, t: object, keys: object, expected: str, axes: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or t.ndim not in axes or not t.is_floating_point():
        what = f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise ProblemError(f"{name} is {what}: expected a tensor of floats {expected}.")
    if isinstance(keys, Tensor) and (t.dtype != keys.dtype or t.device != keys.device):
        raise ProblemError(
            f"{name} is {t.dtype} on {t.device}, and the keys {keys.dtype} on {keys.device}: they must agree; "
            "convert with .to(keys)."
        )


def _check_temperature(t: object) -> None:
    if t is None:
        return
    if isinstance(t, bool) or not isinstance(t, int | float) or not (t == 0 or COLDEST <= t < float("inf")):
        raise ProblemError(
            f"SoftDict(temperature={t!r}): expected a number from {COLDEST} up, 0 for the best key alone, or None."
        )
