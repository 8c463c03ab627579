"""`Sinks`: the first tokens of a rolling cache, and their keys turned on as tokens behind them are forgotten.

Keys come rotated to their absolute positions. In StreamingLLM positions count inside the cache (Xiao et al. 2023,
arXiv:2309.17453, §3.2): after `gone` tokens were forgotten, sink i stands `gone` closer to every query, which is the
same as at position i + gone. A rotation by i and then by `gone` is one by i + gone, so only the sinks are turned, each
time from what they were at first: no error adds up. The angle, gone * frequency, is formed in float64.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from regard.cache.store import Form, memory, picked
from regard.describe.position import Rope
from regard.describe.position_table import is_traced
from regard.errors import ProblemError
from regard.storage.hadamard import hadamard


class Sinks:
    """Keys and values of the first tokens, [batch, kv_heads, count, dim], as they came, in float32 or float64.

    Args:
        rope: what keys were turned by; None: nothing.
        is_turned: whether what comes was turned by `hadamard`.
    """

    def __init__(self, count: int, rope: Rope | None, form: Form, *, is_turned: bool = False) -> None:
        check_rope(rope, form)
        self.count, self.rope, self.is_turned = count, rope, is_turned
        self._wide = torch.float64 if form.dtype == torch.float64 else torch.float32
        shape = (form.batch, form.kv_heads, count)
        self._k, self._v = (memory((*shape, dim), self._wide, form.device) for dim in (form.qk_dim, form.v_dim or 0))
        self._partners: Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory."""
        return sum(t.nbytes for t in (self._k, self._v, self._partners) if t is not None)

    def put(self, first: int, k: Tensor, v: Tensor | None) -> None:
        """Tokens that came when there were `first`, fewer than the sinks; those that are sinks are kept."""
        count = min(k.shape[2], self.count - first)
        sinks = k.narrow(2, 0, count)
        self._k.narrow(2, first, count).copy_(hadamard(sinks.to(self._wide)) if self.is_turned else sinks)
        if v is not None:
            self._v.narrow(2, first, count).copy_(v.narrow(2, 0, count))
        self._partners = None

    def keys(self, out: Tensor, gone: int, length: int) -> None:
        """Write their keys, turned on by `gone` tokens.

        Args:
            out: [batch, kv_heads, count, qk_dim] of any float type.
            gone: how many tokens were forgotten, at least one.
            length: tokens that are kept, for scalings of `Rope` that look at it.
        """
        if self.rope is None:
            out.copy_(hadamard(self._k) if self.is_turned else self._k)
            return
        if self._partners is None:
            self._partners = _partners(self._k, self.rope)
        turn = _turn.__wrapped__ if is_traced() else _turn
        cos, sin = turn(self.rope, gone, _looked_at(self.rope, length), self._wide, out.device)
        turned = torch.addcmul(self._k * cos, self._partners, sin)
        out.copy_(hadamard(turned) if self.is_turned else turned)

    def values(self, out: Tensor) -> None:
        """Write their values, [batch, kv_heads, count, v_dim]."""
        out.copy_(self._v)

    def select(self, rows: Tensor) -> None:
        """Make batch row i what row rows[i] is."""
        self._k, self._v, self._partners = picked(self._k, rows), picked(self._v, rows), None


def check_rope(rope: Any, form: Form) -> None:
    """Raise `ProblemError` unless it is None or a `Rope` for keys of this form."""
    if rope is None or (isinstance(rope, Rope) and rope.dim == form.qk_dim):
        return
    raise ProblemError(f"Rolling(rope={rope!r}): expected Rope({form.qk_dim}), which the keys were turned by, or None.")


def _looked_at(rope: Rope, length: int) -> int | None:
    return length if rope.scaling is not None and rope.scaling.looks_at_length() else None


def _partners(x: Tensor, rope: Rope) -> Tensor:
    """What the sine is multiplied with: of each pair (a, b) that turns, (b, a); 0 for the rest."""
    turning = x[..., : rope.rotated]
    if rope.interleaved:
        partners = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = turning.roll(rope.rotated // 2, -1)
    return torch.nn.functional.pad(partners, (0, rope.dim - rope.rotated))


@functools.lru_cache(maxsize=64)  # the layers of a model turn theirs by the same angles
def _turn(rope: Rope, gone: int, length: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of a turn by `gone` tokens, [dim] each; 1 and 0 where nothing turns."""
    with torch.inference_mode(mode=False):
        angles = gone * (_frequencies.__wrapped__ if is_traced() else _frequencies)(rope, length)
        cos, sin = angles.cos(), angles.sin()
        return cos.to(device, dtype), sin.to(device, dtype)


@functools.lru_cache(maxsize=16)
def _frequencies(rope: Rope, length: int | None) -> Tensor:
    """Radians per token of each dimension, float64 [dim]: negative for the first of a pair, 0 where nothing turns."""
    f = rope.frequencies(length)
    signed = torch.stack((-f, f), -1).flatten() if rope.interleaved else torch.cat((-f, f))
    return torch.nn.functional.pad(signed, (0, rope.dim - rope.rotated))
