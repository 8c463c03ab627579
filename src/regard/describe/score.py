"""Scores: how a query and a key are compared, before scale, softcap, bias and mask.

A score has two steps. `prepare` acts on queries and keys separately, once per token: a norm, a projection. The rest is
per pair: a dot product, which every backend has, or `compare`, which the reference computes tile by tile, so no score
needs memory for all pairs.

    score                s(q, k)                         per token          per pair        scale
    Dot()                q . k                                              dot product     qk_dim ** -0.5
    Cosine()             q . k / (|q| |k|)               q / |q|, k / |k|   dot product     1
    Bilinear(w)          q^T w k                         w^T q              dot product     1
    Additive(w_q, w_k, v)  v . tanh(w_q q + w_k k)       w_q q, w_k k       v . tanh(+)     1
    Gaussian(h)          -|q - k|^2 / (2 h^2)                               distance        1
    Laplacian(h)         -|q - k|_1 / h                                     distance        1
    Epanechnikov(h)      log(1 - |q - k|^2 / h^2)                           distance        1

The last column is the value of `scale=None`, from the source of the score. A scale is an inverse temperature: at scale
1 / T, attention goes to the best key alone as T goes to 0.

The last three are logarithms of kernels: attention with them is Nadaraya-Watson regression.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from regard.describe.fingerprint import Fingerprint
from regard.describe.number import number_field
from regard.describe.require_tensor import require_tensor
from regard.describe.spec import Spec, spec
from regard.describe.traced import refuse_symbol
from regard.errors import ProblemError


class Prepared(NamedTuple):
    """The result of preparing a score once per token.

    Attributes:
        left: the score that remains per pair; None: the dot product.
        did: a description of the preparation, for `explain`.
    """

    left: Fingerprint | None
    did: str


class Score(Spec):
    """How a query and a key are compared; abstract.

    Attributes:
        has_support: whether `compare` gives -inf for pairs beyond the support, which scale and softcap keep.
    """

    has_support: ClassVar[bool] = False

    def dim(self, qk_dim: int, k_dim: int) -> int:
        """How many terms the score of a pair sums, for queries of qk_dim and keys of k_dim elements.

        Raises:
            ProblemError: the score does not take these dimensions.
        """
        if qk_dim != k_dim:
            raise ProblemError(
                f"q has {qk_dim} dimensions and k {k_dim}: {type(self).__name__}() needs the same qk_dim. The scores "
                "Bilinear and Additive take different ones."
            )
        return qk_dim

    def bind(self, heads: int, kv_heads: int) -> "Score":
        """This score in a call with these counts of heads. Raises `ProblemError` if it does not fit."""
        return self

    def default_scale(self, qk_dim: int) -> float:
        """The value of `scale=None`."""
        return 1.0

    @classmethod
    def prepared(cls, fingerprint: Fingerprint) -> "Prepared | None":
        """What `prepare` does to a score of this fingerprint; None if nothing.

        Raises:
            ProblemError: the class has a `prepare`, which would not be called, and no `prepared`.
        """
        if cls.prepare is not Score.prepare:
            raise ProblemError(
                f"{cls.__name__} defines prepare and no classmethod prepared, without which prepare is not called: "
                "change q and k in compare(q, k), or before the call."
            )
        return None

    def prepare(self, q: Tensor, k: Tensor) -> "tuple[Tensor, Tensor, Score | None]":
        """Prepared queries and keys, and the score that remains per pair."""
        return q, k, self

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        """The score of every pair: q [batch, kv_heads, group, queries, dim], k [batch, kv_heads, 1, keys, dim].

        Returns:
            [batch, kv_heads, group, queries, keys].
        """
        raise NotImplementedError(f"{type(self).__name__}.compare")

    def of_head(self, head: int) -> "Score":
        """The score of one query head, for a call of that head alone."""
        return self


def compare_pairs(score: Score, q: Tensor, k: Tensor) -> Tensor:
    """`score.compare` of these queries and keys.

    Raises:
        ProblemError: `compare` returns no tensor of floating-point numbers with one for each pair.
    """
    if score.is_own():
        return score.compare(q, k)
    scores = cast(object, score.compare(q, k))  # may be anything
    shape = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    if not isinstance(scores, Tensor):
        raise ProblemError(f"{score!r}: compare(q, k) returned {type(scores).__name__}; expected a tensor.")
    if scores.shape != shape or not scores.is_floating_point():
        raise ProblemError(
            f"{score!r}: compare(q, k) of q {list(q.shape)} and k {list(k.shape)} returned {list(scores.shape)} of "
            f"{scores.dtype}; expected [batch, kv_heads, group, queries, keys], here {list(shape)}, of {q.dtype}."
        )
    return scores.to(q.dtype)


@spec
class Dot(Score):
    """The dot product `q . k`; the default. Vaswani et al. 2017, arXiv:1706.03762, §3.2.1.

    With the default scale it is the scaled dot product; `scale=1.0` makes it Luong's "dot" (2015, arXiv:1508.04025).

    >>> Dot()
    Dot()
    """

    def default_scale(self, qk_dim: int) -> float:
        return qk_dim**-0.5 if qk_dim else 1.0

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


@spec
class Cosine(Score):
    """The cosine of the angle, `q . k / (|q| |k|)`; 0 where either is 0. Graves et al. 2014, arXiv:1410.5401, §3.3.1.

    Its key strength beta is `scale`, and the temperature of Liu et al. 2022 (arXiv:2111.09883, §3.2) is 1 / scale; 1 if
    none is given.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Cosine
    >>> q, k = torch.tensor([[[[3.0, 0.0]]]]), torch.tensor([[[[5.0, 0.0], [0.0, 0.1]]]])
    >>> attend(q, k, torch.eye(2)[None, None], score=Cosine())  # cosines 1 and 0
    tensor([[[[0.7311, 0.2689]]]])
    """

    @classmethod
    def prepared(cls, fingerprint: Fingerprint) -> Prepared | None:
        return Prepared(None, "Cosine() is the dot product of q and k, each divided by its norm")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Score | None]:
        return _by_row(q, _normalised), _by_row(k, _normalised), None


@spec
class Bilinear(Score):
    """`q^T w k`: Luong's "general". Luong et al. 2015, arXiv:1508.04025, §3.1.

    Args:
        w: [qk_dim, k_dim], or [heads, qk_dim, k_dim] for one per query head; gradients flow to it. Queries and keys may
            have different dimensions.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Bilinear
    >>> q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 7)
    >>> attend(q, k, v, score=Bilinear(torch.randn(4, 6))).shape
    torch.Size([1, 2, 3, 7])
    """

    w: Tensor

    def __post_init__(self) -> None:
        _check_matrix("Bilinear(w)", self.w, "[qk_dim, k_dim] or [heads, qk_dim, k_dim]")

    def dim(self, qk_dim: int, k_dim: int) -> int:
        if self.w.shape[-2:] != (qk_dim, k_dim):
            raise ProblemError(
                f"Bilinear(w) has w {list(self.w.shape)}, and q has {qk_dim} dimensions and k {k_dim}: expected "
                f"[{qk_dim}, {k_dim}], or one such per head."
            )
        return k_dim

    def bind(self, heads: int, kv_heads: int) -> Score:
        _check_heads("Bilinear(w)", self.w, 3, heads, "query heads")
        return self

    @classmethod
    def prepared(cls, fingerprint: Fingerprint) -> Prepared | None:
        return Prepared(None, "Bilinear(w) is the dot product of w^T q and k")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Score | None]:
        return _by_row(q, lambda x: x @ self.w.to(q.dtype)), k, None


@spec
class Additive(Score):
    """`v . tanh(w_q q + w_k k)`: one hidden layer. Bahdanau et al. 2015, arXiv:1409.0473, §A.1.2.

    The paper's W_a, U_a and v_a are w_q, w_k and v. Queries and keys are projected once per token; the hidden layer of
    a pair exists in its tile only, so memory is O(tokens), not O(tokens^2 hidden).

    Args:
        w_q: [hidden, qk_dim], or [heads, hidden, qk_dim] for one per query head.
        w_k: [hidden, k_dim], or [kv_heads, hidden, k_dim] for one per key head.
        v: [hidden], or [heads, hidden] for one per query head. Gradients flow to all three.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Additive
    >>> q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 7)
    >>> attend(q, k, v, score=Additive(torch.randn(8, 4), torch.randn(8, 6), torch.randn(8))).shape
    torch.Size([1, 2, 3, 7])
    """

    w_q: Tensor
    w_k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        _check_matrix("Additive(w_q)", self.w_q, "[hidden, qk_dim] or [heads, hidden, qk_dim]")
        _check_matrix("Additive(w_k)", self.w_k, "[hidden, k_dim] or [kv_heads, hidden, k_dim]")
        _check_vector("Additive(v)", self.v)
        hidden = self.w_q.shape[-2], self.w_k.shape[-2], self.v.shape[-1]
        if not hidden[0] == hidden[1] == hidden[2]:
            raise ProblemError(
                f"Additive has {hidden[0]} hidden units in w_q {list(self.w_q.shape)}, {hidden[1]} in w_k "
                f"{list(self.w_k.shape)} and {hidden[2]} in v {list(self.v.shape)}: they must agree."
            )

    def dim(self, qk_dim: int, k_dim: int) -> int:
        for name, w, own, dim in (("w_q", self.w_q, "q", qk_dim), ("w_k", self.w_k, "k", k_dim)):
            if w.shape[-1] != dim:
                raise ProblemError(
                    f"Additive({name}) is {list(w.shape)} and {own} has {dim} dimensions: expected [hidden, {dim}]."
                )
        return self.v.shape[-1]

    def bind(self, heads: int, kv_heads: int) -> Score:
        _check_heads("Additive(w_q)", self.w_q, 3, heads, "query heads")
        _check_heads("Additive(w_k)", self.w_k, 3, kv_heads, "key heads")
        _check_heads("Additive(v)", self.v, 2, heads, "query heads")
        return self

    @classmethod
    def prepared(cls, fingerprint: Fingerprint) -> Prepared | None:
        _, _, v = fingerprint.parts
        return Prepared(Fingerprint(TanhSum, (v,)), "w_q q and w_k k are computed once per token")

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Score | None]:
        exact = (
            q.dtype if q.dtype == torch.float64 else torch.float32
        )  # in half precision the input of tanh may overflow
        hidden_q = _by_row(q.to(exact), lambda x: x @ self.w_q.to(exact).mT)
        return hidden_q, _by_row(k.to(exact), lambda x: x @ self.w_k.to(exact).mT), TanhSum(self.v)


@spec
class TanhSum(Score):
    """`v . tanh(q + k)`: the part of `Additive` per pair, after the projections; checked by `Additive`.

    Args:
        v: [qk_dim], or [heads, qk_dim] for one per query head.
    """

    v: Tensor

    def of_head(self, head: int) -> Score:
        return self if self.v.ndim == 1 else TanhSum(self.v[head])

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"v . tanh(q + k), v {parts[0]}"

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
        v = self.v.to(q.dtype)
        if v.ndim == 2:
            v = v.reshape(q.shape[1], q.shape[2], 1, -1)  # [kv_heads, group, 1, hidden]
        return (hidden @ v[..., None])[..., 0]


class Distance(Score):
    """A kernel of the distance between query and key, as its logarithm; abstract."""

    bandwidth: float

    def __post_init__(self) -> None:
        h = number_field(self, "bandwidth")
        if isinstance(h, bool) or not isinstance(h, int | float) or not 0 < h < math.inf:  # isfinite cannot be traced
            refuse_symbol(f"{type(self).__name__}(bandwidth)", h, "divide q and k by it and pass 1.0")
            raise ProblemError(
                f"{type(self).__name__}(bandwidth={h!r}): expected a finite number above 0, in the units of q and k."
            )
        object.__setattr__(self, "bandwidth", float(h))


@spec
class Gaussian(Distance):
    """The Gaussian (RBF) kernel `exp(-|q - k|^2 / (2 h^2))`, as its logarithm.

    Since `q . k = (|q|^2 + |k|^2 - |q - k|^2) / 2`, the kernel of dot-product attention is this one with
    h^2 = 1 / scale, times a factor of the query, which cancels, and `exp(scale |k|^2 / 2)`, which does not: long keys
    get more weight.

    Args:
        bandwidth: h, in the units of q and k.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Gaussian
    >>> x = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1)
    >>> attend(x, x, x, score=Gaussian(0.5)).flatten()
    tensor([0.1198, 1.0000, 1.8802])
    """

    bandwidth: float

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return -_squared_distance(q, k, self.bandwidth) / 2


@spec
class Laplacian(Distance):
    """The Laplacian kernel `exp(-|q - k|_1 / h)`, as its logarithm; the distance is the sum of absolute differences.

    Rahimi & Recht 2007, "Random features for large-scale kernel machines", §3.

    Args:
        bandwidth: h, in the units of q and k.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Laplacian
    >>> x = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1)
    >>> attend(x, x, x, score=Laplacian(0.5)).flatten()
    tensor([0.1491, 1.0000, 1.8509])
    """

    bandwidth: float

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        distance = (q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)
        return -(distance.double() / self.bandwidth).to(q.dtype)  # in float32, h itself may be 0


@spec
class Epanechnikov(Distance):
    """The Epanechnikov kernel `max(0, 1 - |q - k|^2 / h^2)`, as its logarithm. Epanechnikov 1969.

    Its support is a ball: a query with no key nearer than h sees none, so it gives 0, and lse -inf.

    Args:
        bandwidth: h, in the units of q and k.

    >>> import torch
    >>> from regard import attend
    >>> from regard.scores import Epanechnikov
    >>> x = torch.tensor([0.0, 1.0, 9.0]).reshape(1, 1, 3, 1)
    >>> attend(x, x[:, :, :2], x[:, :, :2] + 5, score=Epanechnikov(2.0)).flatten()
    tensor([5.4286, 5.5714, 0.0000])
    """

    has_support = True
    bandwidth: float

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        inside = 1 - _squared_distance(q, k, self.bandwidth)
        outside = inside <= 0
        return torch.where(outside, -torch.inf, torch.log(torch.where(outside, 1.0, inside)))


def _squared_distance(q: Tensor, k: Tensor, unit: float) -> Tensor:
    """|q - k|^2 / unit^2 of every pair.

    Norms minus twice a product is fastest, but cancels: in float64 it is exact enough for float32. Float64 inputs are
    subtracted element by element.
    """
    if q.dtype == torch.float64:
        return ((q[..., :, None, :] - k[..., None, :, :]) / unit).square().sum(-1)
    q_wide, k_wide = q.double() / unit, k.double() / unit
    norms = q_wide.square().sum(-1)[..., :, None] + k_wide.square().sum(-1)[..., None, :]
    return (norms - 2 * q_wide @ k_wide.mT).to(q.dtype)


def _by_row(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """change(x); rows that are not finite become NaN and get no gradient.

    A masked key may be NaN. Its gradient is 0, and 0 * NaN would reach the weights of its projection.
    """
    if not x.shape[-1]:
        return change(x)
    fine = torch.isfinite(x.detach().abs().amax(-1, keepdim=True))
    return torch.where(fine, change(torch.where(fine, x, 0.0)), torch.nan)


def _normalised(x: Tensor) -> Tensor:
    """x / |x|; 0 with gradient 0 for the vector 0. In float64, where squares of float32 do not overflow."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return (x / torch.where(norm == 0, torch.inf, norm)).to(x.dtype)


def _check_matrix(name: str, w: object, expected: str) -> None:
    value = require_tensor(w, name, f"floats {expected}")
    if value.ndim not in (2, 3) or not value.is_floating_point():
        raise ProblemError(f"{name} is {value.dtype} {list(value.shape)}: expected floats {expected}.")


def _check_vector(name: str, v: object) -> None:
    expected = "floats [hidden] or [heads, hidden]"
    value = require_tensor(v, name, expected)
    if value.ndim not in (1, 2) or not value.is_floating_point():
        raise ProblemError(f"{name} is {value.dtype} {list(value.shape)}: expected {expected}.")


def _check_heads(name: str, t: Tensor, ndim: int, heads: int, what: str) -> None:
    if t.ndim == ndim and t.shape[0] != heads:
        raise ProblemError(f"{name} is {list(t.shape)}, for {t.shape[0]} heads, and the call has {heads} {what}.")
