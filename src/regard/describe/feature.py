"""Feature maps phi of linear attention: the weight of a key is `phi(q) . phi(k)` instead of `exp(q . k)`.

Since the weight is a product, the sum over keys can be taken first: `phi(q)^T sum_j phi(k_j) v_j^T`. That sum is a
matrix whose size does not depend on the count of keys (Katharopoulos et al. 2020, arXiv:2006.16236, §3.2).

| map | phi(x) | size | weight |
|---|---|---|---|
| `Elu1` | elu(x) + 1 | d | its own kernel |
| `Relu` | max(x, 0) + epsilon | d | its own kernel |
| `Favor` | exp(w_f . x - x . x / 2) / sqrt(m), w_f random | m | exp(q . k), unbiased |
| `Taylor` | 1, x, the products of two entries | 1 + d + d (d + 1) / 2 | 1 + q . k + (q . k)^2 / 2 |

`Favor` and `Taylor` approximate softmax attention; `.error(q, k)` measures how well, for given queries and keys.
"""

import math
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from regard.describe.number import as_number, number_field
from regard.describe.spec import Spec, spec
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError

SPREAD = {torch.float32: 40.0, torch.float64: 340.0}
"""`Favor` raises features to at least exp(-40) of the greatest of their token (exp(-340) in float64), so products never
underflow."""

PAIRS = 1 << 20
"""Pairs of queries and keys per chunk in which errors are computed."""


class Feature(Spec):
    """A feature map; abstract, see `Elu1`, `Relu`, `Favor`, `Taylor`."""

    def size(self, dim: int) -> int:
        """How many features a vector of `dim` elements has."""
        raise NotImplementedError(f"{type(self).__name__}.size")

    def map(self, x: Tensor, scale: float | None = None) -> Tensor:
        """phi(x): [..., dim] to [..., size(dim)], fp32 (fp64 for fp64).

        Args:
            x: queries or keys; both have the same map.
            scale: factor of q . k, for maps that approximate a function of q . k; None: the default of the map.

        Raises:
            ProblemError: a scale for a map without one, or x does not have the dimension of the map.
        """
        raise NotImplementedError(f"{type(self).__name__}.map")


class OwnKernel(Feature):
    """A map of each element on its own, with its own kernel instead of exp; abstract."""

    def size(self, dim: int) -> int:
        return dim

    def map(self, x: Tensor, scale: float | None = None) -> Tensor:
        if scale is not None:
            raise ProblemError(
                f"scale={scale} with {self!r}: its weights are no function of q . k, so there is nothing to scale; "
                "multiply q and k, or omit scale."
            )
        return self.each(_exact(x))

    def each(self, x: Tensor) -> Tensor:
        """The feature of each element."""
        raise NotImplementedError(f"{type(self).__name__}.each")

    def error(self, q: Tensor, k: Tensor, scale: float | None = None) -> "FeatureError":
        """Raises `ProblemError`: the map is not an approximation of softmax attention."""
        raise ProblemError(
            f"{self!r} is a kernel of its own, no approximation of exp(q . k): Favor and Taylor have an error."
        )


@spec
class Elu1(OwnKernel):
    """elu(x) + 1: `x + 1` above 0 and `exp(x)` below, so always positive. Katharopoulos et al. 2020, §3.2.1.

    >>> Elu1().map(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """

    def each(self, x: Tensor) -> Tensor:
        return F.relu(x) + x.clamp(max=0).exp()  # elu(x) + 1 would round exp(x) to 0 below -17


@spec
class Relu(OwnKernel):
    """max(x, 0) + epsilon: the ReLU kernel of Choromanski et al. 2021, arXiv:2009.14794, §4.

    Args:
        epsilon: at least 0, makes weights positive; with 0, a query of weight 0 for every key gives 0.

    >>> Relu().map(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([1.0000e-03, 1.0000e-03, 2.0010e+00])
    """

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        number_field(self, "epsilon")
        if not _is_number(self.epsilon) or not 0 <= self.epsilon < math.inf:
            raise ProblemError(f"Relu(epsilon={self.epsilon!r}): expected a finite number, at least 0.")

    def each(self, x: Tensor) -> Tensor:
        return F.relu(x) + self.epsilon


# ---- approximations of softmax --------------------------------------------------------------------------------------


class FeatureError(NamedTuple):
    """How far weights by features are from those of softmax attention, over all pairs of queries and keys.

    Attributes:
        kernel: the root of the mean square of `phi(q) . phi(k) / exp(scale q . k) - 1`; 0 is exact.
        weights: the mean over queries of half the sum over keys of |weight - softmax weight|: the share of attention
            that is on the wrong keys, 0 to 1.
    """

    kernel: float
    weights: float


class NearSoftmax(Feature):
    """A map with `phi(q) . phi(k)` close to `exp(scale q . k)`; abstract. `scale` is `dim ** -0.5` if None."""

    def log_kernel(self, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        """The logarithm of `phi(q) . phi(k)`: [..., queries, keys], float64."""
        raise NotImplementedError(f"{type(self).__name__}.log_kernel")

    def error(self, q: Tensor, k: Tensor, scale: float | None = None) -> FeatureError:
        """How far the weights of these queries and keys, without a mask, are from softmax attention; in float64.

        Args:
            q: [..., queries, dim].
            k: [..., keys, dim].

        >>> q, k = 0.5 * torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(0))
        >>> few, many = Favor(16, features=16).error(q, k), Favor(16, features=1024).error(q, k)
        >>> few.kernel > many.kernel, few.weights > many.weights
        (True, True)
        """
        _check_pair(q, k)
        parts = [self._errors(part, k, scale) for part in q.split(max(1, PAIRS // (k[..., 0].numel() or 1)), dim=-2)]
        squares, apart = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        return FeatureError(squares.mean().sqrt().item(), apart.mean().item())

    def _errors(self, q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """For each query, [..., queries]: the mean square of the kernel's error, and the weight on the wrong keys."""
        exact = _scale(scale, q.shape[-1]) * (q.double() @ k.double().mT)
        found = self.log_kernel(q, k, scale)
        apart = (torch.softmax(found, -1) - torch.softmax(exact, -1)).abs().sum(-1) / 2
        return torch.expm1(found - exact).square().mean(-1), apart


@spec
class Favor(NearSoftmax):
    """Positive orthogonal random features: `phi_f(x) = exp(w_f . x - |x|^2 / 2) / sqrt(m)`, of `x * sqrt(scale)`.

    The mean of `phi(q) . phi(k)` over draws of w is `exp(scale q . k)` (Choromanski et al. 2021, arXiv:2009.14794,
    Lemma 1). For m independent draws the variance, by the square of that mean, is (Lemma 2)

        (exp(scale |q + k|^2) - 1) / m

    so it falls with m and grows exponentially with the norms: `variance`. Orthogonal draws have less (Theorem 2).

    Nothing overflows: the logarithm of a token's greatest feature is separate (`split`), and features are raised to at
    least exp(-40) of the greatest of their token (exp(-340) in float64), since smaller products would underflow.

    Args:
        dim: the size of q and k.
        features: m.
        seed: of numpy's generator; equal arguments give equal maps, on every device.
        orthogonal: whether the directions of `dim` successive w are orthogonal; their lengths have the
            distribution of Gaussian vectors either way.

    >>> q, k = 0.3 * torch.randn(2, 5, 8)
    >>> favor = Favor(8, features=4096)
    >>> kernel = favor.map(q) @ favor.map(k).T
    >>> torch.allclose(kernel, torch.exp(q @ k.T / 8 ** 0.5), rtol=0.3)
    True
    """

    dim: int
    features: int = 256
    seed: int = 0
    orthogonal: bool = True

    def __post_init__(self) -> None:
        whole_field(self, "dim", "dimensions", least=1)
        whole_field(self, "features", "features", least=1)
        if not isinstance(cast(object, self.orthogonal), bool):
            raise ProblemError(f"Favor(orthogonal={self.orthogonal!r}): expected True or False.")
        self._check_seed()

    def size(self, dim: int) -> int:
        self._check(dim)
        return self.features

    def redraw(self, seed: int) -> "Favor":
        """The same map with other random vectors; Performer redraws while it trains (Choromanski et al. 2021, §4).

        >>> Favor(8, features=16).redraw(1)
        Favor(dim=8, features=16, seed=1)
        """
        other = self.with_fields(seed=seed)
        other._check_seed()
        return other

    def vectors(self) -> Tensor:
        """The w_f, float64 [features, dim] on the CPU. Cached for equal arguments: do not write to them."""
        if torch.compiler.is_compiling():
            return torch.ops.regard.random_features(self.dim, self.features, self.seed, self.orthogonal)
        return torch.from_numpy(_random_vectors(self.dim, self.features, self.seed, self.orthogonal))

    def split(self, x: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """phi(x) as (share, top): `phi = share * exp(top)`, the greatest share of a token being 1, none below e^-40.

        A token's top depends on that token alone.

        Args:
            x: [..., dim].

        Returns:
            share [..., features], top [...].
        """
        self._check(x.shape[-1])
        x = _exact(x) * _positive(scale, self.dim) ** 0.5
        vectors = self.vectors().to(x.device, x.dtype)
        along = x @ vectors.T
        most = along.detach().amax(-1, keepdim=True)
        top = most[..., 0] - x.square().sum(-1) / 2 - math.log(self.features) / 2
        return torch.exp((along - most).clamp(min=-SPREAD[x.dtype])), top.clamp(min=torch.finfo(x.dtype).min)

    def map(self, x: Tensor, scale: float | None = None) -> Tensor:
        share, top = self.split(x, scale)
        return share * torch.exp(top)[..., None]

    def log_kernel(self, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        (q, q_top), (k, k_top) = self.split(q.double(), scale), self.split(k.double(), scale)
        return torch.log(q @ k.mT) + q_top[..., None] + k_top[..., None, :]

    def variance(self, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        """The variance by Lemma 2 for each pair, of `phi(q) . phi(k) / exp(scale q . k)` with independent w.

        Args:
            q: [..., queries, dim].
            k: [..., keys, dim].

        Returns:
            float64 [..., queries, keys].

        >>> Favor(4, features=100).variance(torch.ones(1, 4), -torch.ones(1, 4))
        tensor([[0.]], dtype=torch.float64)
        """
        _check_pair(q, k)
        q, k = q.double(), k.double()
        both = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :] + 2 * q @ k.mT
        return torch.expm1(_positive(scale, self.dim) * both.clamp(min=0)) / self.features

    def _check_seed(self) -> None:
        whole_field(self, "seed", "a generator", least=0)

    def _check(self, dim: int) -> None:
        if dim != self.dim:
            raise ProblemError(f"{self!r} maps vectors of {self.dim} elements, and these have {dim}.")


@spec
class Taylor(NearSoftmax):
    """The second-order Taylor polynomial of exp: `phi(q) . phi(k) = 1 + s + s^2 / 2` with `s = scale q . k`, exactly.

    Features: 1, the d entries, and the d (d + 1) / 2 products of two, those of different entries times sqrt(2). Always
    positive, since it is ((1 + s)^2 + 1) / 2; near exp(s) for |s| < 1. Arora et al. 2024, arXiv:2402.18668
    ("Based"), with all d^2 products.

    >>> q, k = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])  # q . k = 1
    >>> round((Taylor().map(q, scale=1.0) @ Taylor().map(k, scale=1.0)).item(), 5), Taylor().size(16)
    (2.5, 153)
    """

    def size(self, dim: int) -> int:
        return 1 + dim + dim * (dim + 1) // 2

    def map(self, x: Tensor, scale: float | None = None) -> Tensor:
        dim = x.shape[-1]
        x = _exact(x) * _positive(scale, dim) ** 0.5
        first, second = torch.triu_indices(dim, dim, device=x.device)
        weight = torch.where(first == second, 0.5, x.new_ones(len(first))).sqrt()
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., first] * x[..., second] * weight], dim=-1)

    def log_kernel(self, q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
        s = _positive(scale, q.shape[-1]) * (q.double() @ k.double().mT)
        return torch.log(1 + s + s.square() / 2)


# ---- parts ----------------------------------------------------------------------------------------------------------


@lru_cache(64)
def _random_vectors(dim: int, features: int, seed: int, orthogonal: bool) -> NDArray[np.float64]:
    """Random vectors [features, dim] with the lengths of Gaussian ones; orthogonal ones in groups of `dim`.

    Drawn by numpy: a cached tensor would belong to the mode of its first use (inference, fake, vmap).
    """
    draw = np.random.default_rng(seed)
    if not orthogonal:
        return draw.standard_normal((features, dim))
    groups: list[NDArray[np.float64]] = []
    for _ in range(0, features, dim):
        basis, triangle = np.linalg.qr(draw.standard_normal((dim, dim)))
        groups.append((basis * np.sign(np.diagonal(triangle))).T)  # the signs make every rotation equally likely
    lengths = np.linalg.norm(draw.standard_normal((features, dim)), axis=1, keepdims=True)
    return np.concatenate(groups)[:features] * lengths


def _as_tensor(dim: int, features: int, seed: int, orthogonal: bool) -> Tensor:
    return torch.from_numpy(_random_vectors(dim, features, seed, orthogonal)).clone()


def _as_fake(dim: int, features: int, seed: int, orthogonal: bool) -> Tensor:
    return torch.empty(features, dim, dtype=torch.float64, device="cpu")


_library = torch.library.Library("regard", "FRAGMENT")  # torch cannot trace numpy
_library.define("random_features(SymInt dim, SymInt features, SymInt seed, bool orthogonal) -> Tensor")
_library.impl("random_features", _as_tensor, "CompositeExplicitAutograd")
torch.library.register_fake("regard::random_features", _as_fake, lib=_library)


def _exact(x: Tensor) -> Tensor:
    """x in the type of sums: float64 unchanged, all else as float32."""
    return x if x.dtype == torch.float64 else x.float()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else scale


def _positive(scale: float | None, dim: int) -> float:
    """The scale, checked; its root multiplies both q and k."""
    value = cast(float, as_number(_scale(scale, dim)))
    if not _is_number(value) or not 0 < value < math.inf:
        raise ProblemError(f"scale is {value!r}: expected a finite number above 0; its root multiplies q and k.")
    return value


def _check_pair(q: Tensor, k: Tensor) -> None:
    alike = q.ndim == k.ndim >= 2 and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not alike or not q.numel() or not k.numel():
        raise ProblemError(
            f"q is {list(q.shape)} and k {list(k.shape)}: expected [..., queries, dim] and [..., keys, dim] with the "
            "same leading axes and dim, none of them 0; repeat shared key heads: k.repeat_interleave(group, dim=1)."
        )
