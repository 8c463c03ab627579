"""The problem: what a call asks for, without its tensors. `plan/pose.py` makes it.

A `Problem` is frozen and hashable, so plans are cached by it; it has sizes, types and the fingerprints of the specs.
What goes to the engine, the tensors and the specs that carry tensors, are the `Operands`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Dot, Score
from regard.describe.spec import Fingerprint
from regard.storage.stored import StoredTensor


class Storage(NamedTuple):
    """How the keys and values of a call are stored.

    Attributes:
        k: the forms of the parts of the keys (`StoredTensor.encodings`).
        v: the same of the values.
        nbytes: bytes of both that must be read, at least.
    """

    k: tuple[str, ...]
    v: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, k: StoredTensor, v: StoredTensor) -> "Storage":
        """How these are stored."""
        return cls(k.encodings, v.encodings, k.nbytes + v.nbytes)

    def __str__(self) -> str:
        k, v = (" + ".join(forms) for forms in (self.k, self.v))
        return k if k == v else f"{k} | {v}"


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call asks for, as sizes, types and fingerprints.

    Attributes:
        batch, heads, kv_heads, queries, keys, v_dim: sizes of q, k and v.
        qk_dim, k_dim: the last sizes of q and k, which are equal unless the score compares unlike ones.
        dtype: of q, k and v.
        device: their kind of device, "cpu" for example.
        mask, bias, score: fingerprints; None for no mask, no bias, the dot product.
        score_dim: products that the score of a pair is the sum of; qk_dim for a dot product.
        scale, softcap, dropout, offset: as `attend` takes them, defaults filled in.
        sink: whether there is one.
        grad: whether gradients will flow back from the output.
        lse: whether the log-sum-exp is wanted as well as the output.
        transformed: whether the call is under `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation.
        non_contiguous: those of "q", "k", "v" whose last dimension is not contiguous.
        opaque: whether some tensor's elements are not at its address: it is lazily negated, or of a class with a
            `__torch_dispatch__` of its own.
        storage: how keys and values are stored; None where they are tensors.
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


class Operands(NamedTuple):
    """The tensors of a call, and its specs bound to the call's sizes.

    Where keys and values are stored, `stored` has them, and `k` and `v` are tensors of their shape without content.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    sink: Tensor | None
    score: Score | None = None  # None: the dot product
    stored: tuple[StoredTensor, StoredTensor] | None = None
