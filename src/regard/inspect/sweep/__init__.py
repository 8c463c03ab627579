"""One pass over all weights of a call, for every measure that needs them all; nothing of size n x n is stored.

Measures that are sums over O(n) pairs need no sweep: `Weights.pairs` has those. Entropy, column masses, profiles by
distance, the largest weight of a row and pictures need every weight, and all get theirs from the same pass: by the
compiled library where it is there (`by_native.py`), on a GPU by a kernel in Triton (`by_triton.py`), else in torch,
tile by tile (`by_torch.py`, the definition).
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.sweep import by_native, by_torch, by_triton
from regard.inspect.sweep.by_torch import BINS, Sweep, bin_of
from regard.inspect.weights.lazy import Weights

__all__ = ["BINS", "Sweep", "bin_of", "sweep"]


def sweep(
    weights: Weights,
    *,
    picture: int | None = None,
    along: Tensor | None = None,
    tick: Callable[[], None] | None = None,
) -> Sweep:
    """One pass over all weights of a call: see `Sweep` for the results.

    Args:
        weights: of a call.
        picture: cells per side of a picture, at most; None for none.
        along: values of each key, [batch or 1, m, keys]: each row gets their means by its weights, such as
            the mean position or the mean rarity of the tokens that it attends to; NaN where it attends to a value that
            is not finite.
        tick: called regularly during the sweep.

    Returns:
        Tensors in float32, or float64 for a call in float64.

    Raises:
        ProblemError: it is no `Weights`, `picture` is below 1, or `along` has another shape.

    >>> import torch
    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each
    >>> found = sweep(Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal()), along=torch.arange(3.0)[None, None])
    >>> found.columns, found.along[..., 0]
    (tensor([[[1.8333, 0.8333, 0.3333]]]), tensor([[[0.0000, 0.5000, 1.0000]]]))
    """
    if not isinstance(cast(object, weights), Weights):
        raise ProblemError(f"sweep takes the Weights of a call, and got {type(weights).__name__}.")
    batch, _, _, keys = weights.shape
    if picture is not None and picture < 1:
        raise ProblemError(f"picture={picture}: expected cells per side, at least 1, or None for no picture.")
    if along is not None and (along.ndim != 3 or along.shape[0] not in (1, batch) or along.shape[2] != keys):
        raise ProblemError(
            f"along is {list(along.shape)}: expected values of each key, [batch or 1, m, keys] = "
            f"[{batch} or 1, m, {keys}]."
        )
    if along is not None and (along.is_cuda or not bool(along.isfinite().all())):  # on a GPU nothing is read
        return _of_seen(weights, picture, along, tick)
    return _swept(weights, picture, along, tick)


def _swept(
    weights: Weights, picture: int | None, along: Tensor | None, tick: Callable[[], None] | None
) -> Sweep:  # fmt: skip
    """The sweep, with values that are finite."""
    implementation = by_native if by_native.takes(weights) else by_triton if by_triton.takes(weights) else by_torch
    parts = weights.by_start()  # the compiled sweeps take one position of the first query
    if len(parts) == 1:
        return implementation.swept(weights, picture, along, tick)
    batch = weights.shape[0]
    vectors = [None] * batch if along is None else along.expand(batch, -1, -1).split(1)
    return _joined([implementation.swept(*one, tick) for one in zip(parts, [picture] * batch, vectors, strict=True)])


def _of_seen(weights: Weights, picture: int | None, along: Tensor, tick: Callable[[], None] | None) -> Sweep:
    """The sweep where some values are not finite, as the norms of padding may be: only rows that see them get NaN."""
    fine = along.isfinite()
    vectors = torch.cat([along.where(fine, 0.0), (~fine).to(along.dtype)], dim=1)
    found = _swept(weights, picture, vectors, tick)
    means, reached = cast(Tensor, found.along).chunk(2, dim=-1)
    return replace(found, along=means.where(reached == 0, torch.nan))


def _joined(each: list[Sweep]) -> Sweep:
    """The sweeps of several sequences as one of all."""
    found = {one.name: [getattr(sweep, one.name) for sweep in each] for one in fields(Sweep)}
    joined: dict[str, Any] = {name: torch.cat(of) if isinstance(of[0], Tensor) else of[0] for name, of in found.items()}
    return Sweep(**joined)
