"""`Sinks`: the first tokens of a rolling cache, whose keys are re-rotated as tokens behind them are evicted.

Keys arrive rotated to their absolute positions. In StreamingLLM positions count inside the cache (Xiao et al. 2023,
arXiv:2309.17453, §3.2): after `evicted` tokens were evicted, sink i is `evicted` positions closer to every query, as if
it had position i + evicted. A rotation by i and then by `evicted` is a rotation by i + evicted, so only the sinks are
re-rotated, each time from their original keys: no error accumulates. The angle, evicted * frequency, is computed in
float64.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from regard.cache.store import Form, allocate, select_rows
from regard.describe.position import Rope
from regard.describe.position_table import is_traced
from regard.errors import ProblemError
from regard.storage.hadamard import hadamard


class Sinks:
    """The original keys and values of the first tokens, [batch, kv_heads, count, dim], in float32 or float64.

    Args:
        rope: the rotary embedding of the keys; None: keys are not rotated.
        is_rotated: whether keys and values arrive rotated by `hadamard`.
    """

    def __init__(self, count: int, rope: Rope | None, form: Form, *, is_rotated: bool = False) -> None:
        check_rope(rope, form)
        self.count, self.rope, self.is_rotated = count, rope, is_rotated
        self._wide = torch.float64 if form.dtype == torch.float64 else torch.float32
        shape = (form.batch, form.kv_heads, count)
        self._k, self._v = (allocate((*shape, dim), self._wide, form.device) for dim in (form.qk_dim, form.v_dim or 0))
        self._partners: Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated memory."""
        return sum(t.nbytes for t in (self._k, self._v, self._partners) if t is not None)

    def put(self, first: int, k: Tensor, v: Tensor | None) -> None:
        """Store those of the new tokens that are sinks; `first` tokens, fewer than the sinks, came before."""
        count = min(k.shape[2], self.count - first)
        sinks = k.narrow(2, 0, count)
        self._k.narrow(2, first, count).copy_(hadamard(sinks.to(self._wide)) if self.is_rotated else sinks)
        if v is not None:
            self._v.narrow(2, first, count).copy_(v.narrow(2, 0, count))
        self._partners = None

    def write_keys(self, out: Tensor, evicted: int, length: int) -> None:
        """Write their keys, rotated further by `evicted` positions.

        Args:
            out: [batch, kv_heads, count, qk_dim] of any float type.
            evicted: how many tokens were evicted, at least one.
            length: tokens in the cache, for scalings of `Rope` that depend on it.
        """
        if self.rope is None:
            out.copy_(hadamard(self._k) if self.is_rotated else self._k)
            return
        if self._partners is None:
            self._partners = _partners(self._k, self.rope)
        rotation = _rotation.__wrapped__ if is_traced() else _rotation
        cos, sin = rotation(self.rope, evicted, _scaled_length(self.rope, length), self._wide, out.device)
        rotated = torch.addcmul(self._k * cos, self._partners, sin)
        out.copy_(hadamard(rotated) if self.is_rotated else rotated)

    def write_values(self, out: Tensor) -> None:
        """Write their values, [batch, kv_heads, count, v_dim]."""
        out.copy_(self._v)

    def select(self, rows: Tensor) -> None:
        """Make batch row i what row rows[i] is."""
        self._k, self._v, self._partners = select_rows(self._k, rows), select_rows(self._v, rows), None


def check_rope(rope: Any, form: Form) -> None:
    """Raise `ProblemError` unless it is None or a `Rope` for keys of this form."""
    if rope is None or (isinstance(rope, Rope) and rope.dim == form.qk_dim):
        return
    raise ProblemError(f"Rolling(rope={rope!r}): expected the Rope({form.qk_dim}) that rotated the keys, or None.")


def _scaled_length(rope: Rope, length: int) -> int | None:
    """The length, if the scaling of the rope depends on it."""
    return length if rope.scaling is not None and rope.scaling.looks_at_length() else None


def _partners(x: Tensor, rope: Rope) -> Tensor:
    """What the sine is multiplied with: (b, a) for each rotated pair (a, b), 0 for the other channels."""
    rotated = x[..., : rope.rotated]
    if rope.interleaved:
        partners = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(rope.rotated // 2, -1)
    return torch.nn.functional.pad(partners, (0, rope.dim - rope.rotated))


@functools.lru_cache(maxsize=64)  # the layers of a model rotate by the same angles
def _rotation(
    rope: Rope, evicted: int, length: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of a rotation by `evicted` positions, [dim] each; 1 and 0 for unrotated channels."""
    with torch.inference_mode(mode=False):
        angles = evicted * (_frequencies.__wrapped__ if is_traced() else _frequencies)(rope, length)
        cos, sin = angles.cos(), angles.sin()
        return cos.to(device, dtype), sin.to(device, dtype)


@functools.lru_cache(maxsize=16)
def _frequencies(rope: Rope, length: int | None) -> Tensor:
    """Radians per position of each channel, float64 [dim]: negative for the first of a pair, 0 if unrotated."""
    f = rope.frequencies(length)
    signed = torch.stack((-f, f), -1).flatten() if rope.interleaved else torch.cat((-f, f))
    return torch.nn.functional.pad(signed, (0, rope.dim - rope.rotated))
