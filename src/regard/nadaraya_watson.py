"""Attention as kernel regression: the estimate at a query is the mean of the values, weighted by a kernel.

    out(q) = sum_j K(q, k_j) v_j / sum_j K(q, k_j)

Nadaraya 1964, "On estimating regression"; Watson 1964, "Smooth regression analysis". With `K = exp(scale q . k)` it is
dot-product attention (Tsai et al. 2019, arXiv:1908.11775, §3), and with any other kernel it is attention with the
logarithm of the kernel as its score, computed by the same backends.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import attend
from regard.backend.contract import Backend
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.errors import ProblemError


def nadaraya_watson(
    queries: Float[Tensor, "..."],
    keys: Float[Tensor, "..."],
    values: Float[Tensor, "..."],
    *,
    kernel: Score | None = None,
    mask: Mask | None = None,
    backend: str | Backend | None = None,
) -> Float[Tensor, "..."]:
    """Kernel regression: keys are the points of observations and values their results; the estimate at queries.

    Args:
        queries: [..., queries, dim], or [queries] for points on a line.
        keys: [..., keys, dim] or [keys], in the units of the queries; leading axes broadcast.
        values: [..., keys, v_dim] or [keys].
        kernel: `Gaussian(h)`, `Laplacian(h)` or `Epanechnikov(h)`, of bandwidth h; None or `Dot()` for the exponential
            of the scaled dot product, which is attention; any other score has its exponential as the kernel. For a
            learned bandwidth, or one per dimension, divide queries and keys by it.
        mask: which query may see which key; it sees all leading axes as one batch axis.
        backend: a backend by name.

    Returns:
        [..., queries, v_dim], or [queries] if the values are [keys]. A query that sees no key, or is further than h
        from every key of an Epanechnikov kernel, gives 0.

    Raises:
        ProblemError: shapes that do not fit.

    >>> import torch
    >>> from regard.scores import Gaussian, nadaraya_watson
    >>> x = torch.linspace(0, 6, 601, dtype=torch.float64)
    >>> nadaraya_watson(torch.tensor([1.0, 2.0], dtype=torch.float64), x, x.sin(), kernel=Gaussian(0.1))
    tensor([0.8373, 0.9048], dtype=torch.float64)
    """
    q, k, v = (_points(name, t) for name, t in (("queries", queries), ("keys", keys), ("values", values)))
    line = values.ndim == 1
    if kernel is not None and not isinstance(kernel, Score):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"kernel is {kernel!r}: expected a kernel such as Gaussian(1.0), or None.")
    if q.shape[-1] != k.shape[-1] and 1 in (queries.ndim, keys.ndim):
        raise ProblemError(
            f"queries are {list(queries.shape)} and keys {list(keys.shape)}: a tensor of one axis has points on a "
            "line; one point in space is points[None]."
        )
    if k.shape[-2] != v.shape[-2]:
        raise ProblemError(f"keys are {k.shape[-2]} points and values {v.shape[-2]}: expected one value for each key.")
    lead = _lead(q, k, v)
    q, k, v = (t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), 1, *t.shape[-2:]) for t in (q, k, v))
    out = attend(q, k, v, score=kernel, mask=mask, backend=backend)[:, 0]
    out = out.reshape(*lead, *out.shape[-2:])
    return out[..., 0] if line else out


def _points(name: str, t: object) -> Tensor:
    """The tensor as [..., points, dim]; points on a line get the last axis."""
    if not isinstance(t, Tensor) or t.ndim == 0:
        what = f"a tensor {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise ProblemError(f"{name} is {what}: expected a tensor [..., points, dim], or [points] on a line.")
    return t[:, None] if t.ndim == 1 else t


def _lead(*tensors: Tensor) -> tuple[int, ...]:
    sizes = [tuple(t.shape[:-2]) for t in tensors]
    try:
        return tuple(torch.broadcast_shapes(*sizes))
    except RuntimeError:
        raise ProblemError(
            f"queries, keys and values have leading axes {', '.join(map(str, map(list, sizes)))}: they must broadcast."
        ) from None
