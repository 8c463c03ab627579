"""The sinks of `Rolling`: the first tokens, whose keys are rotated again as tokens behind them are evicted.

Keys arrive rotated to their absolute positions. In StreamingLLM (Xiao et al. 2023, arXiv:2309.17453, §3.2) positions
count inside the cache: after `evicted` tokens were evicted, sink i is `evicted` positions closer to every query, as if
it had position i + evicted. A rotation by i and then by `evicted` is a rotation by i + evicted, so only the sinks are
re-rotated, each time from their original keys: no error accumulates. The angle, evicted * frequency, is computed in
float64.
"""

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.steps import RotateSinks
from regard.cache.store import Form, allocate, select_rows
from regard.describe.position import Rope, has_own_rotate
from regard.describe.position_table import is_traced
from regard.errors import ProblemError
from regard.storage.hadamard import hadamard
from regard.wide import wide_of


class Sinks:
    """The original keys and values of the first tokens, [batch, kv_heads, count, dim], in float32 or float64.

    Args:
        rope: the rotary embedding of the keys; None: keys are not rotated.
        is_rotated: whether keys and values arrive rotated by `hadamard`.
    """

    def __init__(self, count: int, rope: Rope | None, form: Form, *, is_rotated: bool = False) -> None:
        check_rope(rope, form)
        self.count, self.rope, self.is_rotated = count, rope, is_rotated
        self._wide = wide_of(form.dtype)
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

    def keys(self, evicted: int, length: int) -> Tensor:
        """Their keys, rotated further by `evicted` positions: [batch, kv_heads, count, qk_dim], float32 or float64.

        Args:
            evicted: how many tokens were evicted, at least one.
            length: tokens in the cache, for scalings of `Rope` that depend on it.
        """
        if self.rope is None:
            return hadamard(self._k) if self.is_rotated else self._k
        if self._partners is None:
            self._partners = _partners(self._k, self.rope)
        rotation = _rotation.__wrapped__ if is_traced() else _rotation
        cos, sin = rotation(self.rope, evicted, _scaled_length(self.rope, length), self._wide, self._k.device)
        rotated = torch.addcmul(self._k * cos, self._partners, sin)
        return hadamard(rotated) if self.is_rotated else rotated

    def rotation(self) -> RotateSinks | None:
        """What writes their keys for a number of evicted tokens on the device; None if they are not rotated.

        Raises:
            ProblemError: a scaling of the rope depends on the length, which the host does not know.
        """
        rope = self.rope
        if rope is None:
            return None
        if rope.scaling is not None and rope.scaling.looks_at_length():
            raise ProblemError(
                f"{rope!r}: its angles depend on the length, which is on the device in steps. Use a rope whose scaling "
                "does not."
            )
        frequencies = _frequencies(rope, None).to(self._k.device)
        return SinkRotation(self._k.clone(), _partners(self._k, rope), frequencies, self.is_rotated)

    def write_values(self, out: Tensor) -> None:
        """Write their values, [batch, kv_heads, count, v_dim]."""
        out.copy_(self._v)

    def selected(self, rows: Tensor) -> "Sinks":
        """Those of the batch rows `rows`."""
        selected = copy.copy(self)
        selected._k, selected._v, selected._partners = select_rows(self._k, rows), select_rows(self._v, rows), None
        return selected


class SinkRotation(NamedTuple):
    """The rotation of sinks by a number of positions that is on the device; a `RotateSinks`.

    Attributes:
        k: the original keys, [batch, kv_heads, count, qk_dim].
        partners: see `_partners`.
        frequencies: see `_frequencies`.
        is_rotated: whether `hadamard` rotates the keys that are written.
    """

    k: Tensor
    partners: Tensor
    frequencies: Tensor
    is_rotated: bool

    def __call__(self, out: Tensor, evicted: Tensor) -> None:
        """Write the keys, rotated further by `evicted` positions."""
        moved = evicted[:, None, None, None]
        angles = moved * self.frequencies
        found = torch.addcmul(self.k * angles.cos().to(self.k.dtype), self.partners, angles.sin().to(self.k.dtype))
        found = hadamard(found) if self.is_rotated else found
        out.copy_(torch.where(moved > 0, found.to(out.dtype), out))  # until then they are as they came


def check_rope(rope: Any, form: Form) -> None:
    """Raise `ProblemError` unless it is None or a `Rope` for keys of this form, which rotates by its frequencies."""
    if rope is None:
        return
    if not isinstance(rope, Rope) or rope.dim != form.qk_dim:
        raise ProblemError(f"Rolling(rope={rope!r}): expected the Rope({form.qk_dim}) that rotated the keys, or None.")
    if has_own_rotate(rope):
        raise ProblemError(
            f"Rolling(rope={rope!r}): sinks are rotated on by the frequencies of a Rope, and {type(rope).__name__} has "
            "a rotate of its own: use another layout."
        )


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
    with torch.inference_mode(False):  # by position: torch.compile takes no keyword here
        angles = evicted * (_frequencies.__wrapped__ if is_traced() else _frequencies)(rope, length)
        cos, sin = angles.cos(), angles.sin()
        return cos.to(device, dtype), sin.to(device, dtype)


@functools.lru_cache(maxsize=16)
def _frequencies(rope: Rope, length: int | None) -> Tensor:
    """Radians per position of each channel, float64 [dim]: negative for the first of a pair, 0 if unrotated."""
    f = rope.frequencies(length)
    signed = torch.stack((-f, f), -1).flatten() if rope.interleaved else torch.cat((-f, f))
    return torch.nn.functional.pad(signed, (0, rope.dim - rope.rotated))
