"""The problem: a call without its tensors. `plan/pose.py` makes it.

A `Problem` is frozen and hashable, so plans are cached by it; it has sizes, types and the fingerprints of the specs.
The `Operands` are the tensors, and the specs with their tensors; the backend gets both.
"""

import math
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.describe.bias import Bias, TensorBias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Dot, Score
from regard.describe.score_function import ScoreFunction
from regard.seeds import draw
from regard.storage.stored import StoredTensor

MAX_OFFSET = 1 << 40
"""The largest offset, and length of an axis, that the compiled library takes: `LONGEST` of native/check.cpp."""


class Storage(NamedTuple):
    """How the keys and values of a call are stored.

    Attributes:
        k: the encodings of the parts of the keys (`StoredTensor.encodings`).
        v: those of the values.
        token_bytes: bytes of both, of a token of one batch row, on average; values that lie in the keys count once.
    """

    k: tuple[str, ...]
    v: tuple[str, ...]
    token_bytes: float

    @classmethod
    def of(cls, k: StoredTensor, v: StoredTensor) -> "Storage":
        """The storage of these keys and values."""
        return cls(k.encodings, v.encodings, k.token_bytes + (0 if _is_inside(v, k) else v.token_bytes))

    def __str__(self) -> str:
        k, v = (" + ".join(forms) for forms in (self.k, self.v))
        return k if k == v else f"{k} | {v}"


def is_first_of(values: Tensor, keys: Tensor) -> bool:
    """Whether values are fewer channels than the keys, the first of them in memory, as those of latents are."""
    return (
        values.shape[3] < keys.shape[3]
        and keys.untyped_storage() is values.untyped_storage()
        and keys.storage_offset() == values.storage_offset()
        and keys.stride() == values.stride()
    )


def _is_inside(values: StoredTensor, keys: StoredTensor) -> bool:
    """Whether values are a part of the keys in memory, as in a latent cache."""
    of_values, of_keys = ([part.data.untyped_storage() for part in t.parts] for t in (values, keys))
    return len(of_values) == len(of_keys) and all(map(operator.is_, of_values, of_keys))


@dataclass(frozen=True, slots=True)
class Problem:
    """A call as sizes, types and fingerprints.

    Attributes:
        batch, heads, kv_heads, queries, keys, v_dim: sizes of q, k and v.
        qk_dim, k_dim: the last sizes of q and k, equal unless the score takes different ones.
        dtype: of q, k and v.
        device: their kind of device, "cpu" for example.
        mask, bias, score: fingerprints; None for no mask, no bias, the dot product.
        score_dim: terms of the sum for one score; qk_dim for a dot product.
        scale, softcap, dropout, offset: as in `attend`, with defaults filled in.
        sink: whether there is one.
        grad: whether gradients may flow back from the output.
        lse: whether the call returns the log-sum-exp as well.
        transformed: whether the call is under `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation.
        non_contiguous: those of "q", "k", "v" whose last dimension is not contiguous.
        opaque: whether the elements of some tensor are not at its address: the tensor is lazily negated, or its class
            has its own `__torch_dispatch__`.
        storage: of stored keys and values; None for tensors.
        pairwise: the indices of those terms of the bias that are no tensors, and depend on more than head and distance.
        capability: the compute capability of the GPU; None where it is not known, as for a plan of another machine.
        values_in_keys: whether values are the first channels of the keys in memory; `explain` alone looks.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    qk_dim: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: str
    mask: Fingerprint | None
    bias: Fingerprint | None
    score: Fingerprint | None
    score_dim: int
    scale: float
    softcap: float | None
    sink: bool
    dropout: float
    offset: int
    grad: bool
    lse: bool
    transformed: bool
    non_contiguous: tuple[str, ...]
    opaque: bool
    storage: Storage | None = None
    pairwise: tuple[int, ...] = ()
    capability: tuple[int, int] | None = None
    values_in_keys: bool = False

    @property
    def changes_scores(self) -> bool:
        """Whether the bias is a function of the score, and not a value that is added to it."""
        return self.bias is not None and self.bias.kind is ScoreFunction

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        q = f"q [{self.batch}, {self.heads}, {self.queries}, {self.qk_dim}]"
        kv = f"kv [{self.batch}, {self.kv_heads}, {self.keys}, {self.k_dim}|{self.v_dim}] {kind} on {self.device}"
        extra = {
            "score": self.score,
            "scale": None if self._has_default_scale() else self.scale,
            "softcap": self.softcap,
            "sink": self.sink or None,
            "dropout": self.dropout or None,
            "offset": self.offset if self.offset != self.keys - self.queries else None,
            "gradients": self.grad or None,
            "under torch.func": self.transformed or None,
            "stored as": self.storage,
        }
        more = [name if value is True else f"{name} {value}" for name, value in extra.items() if value is not None]
        return ", ".join([f"{q} · {kv}", f"mask {self.mask}", f"bias {self.bias}", *more])

    def _has_default_scale(self) -> bool:
        return math.isclose(self.scale, 1.0 if self.score else Dot().default_scale(self.qk_dim))


class Sizes(NamedTuple):
    """What differs between the calls of one form; a backend may serve all of them by one plan.

    Attributes:
        queries, keys, values: tokens of q, k and v.
        nbytes: of stored keys and values.
        offset: of the call, None by default.
        mask: the fingerprint of the mask, not bound to the call.
    """

    queries: int
    keys: int
    values: int
    nbytes: int
    offset: int | None
    mask: Fingerprint | None


class Operands(NamedTuple):
    """The tensors of a call, its specs bound to the call's sizes, and the position of its first query.

    Stored keys and values are in `stored`; `k` and `v` are then tensors of their shape without data.

    Attributes:
        key: equal for calls of one form that have the same sizes, offset and mask; None if the plan was made for this
            call alone.
        lse: whether somebody reads the log-sum-exp; if not, that of the state may be NaN.
        seed: what dropout draws from; None: from torch's generator.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    sink: Tensor | None
    score: Score | None = None  # None: the dot product
    stored: tuple[StoredTensor, StoredTensor] | None = None
    offset: int = 0
    key: Sizes | None = None
    lse: bool = True
    seed: int | None = None

    def drawn_seed(self) -> int:
        """The seed, or one that is drawn now."""
        return draw() if self.seed is None else self.seed

    @property
    def sizes(self) -> CallSizes:
        """The sizes of the call."""
        return CallSizes(self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2], self.offset)


def is_pairwise(term: Bias) -> bool:
    """Whether a term of a bias is a value that is no tensor, and depends on more than the head and the distance."""
    return type(term) not in (TensorBias, ScoreFunction) and not term.per_distance()
