"""`KVCache`: one layer's keys and values, whole and side by side, in memory that grows by doubling.

What `append` returns are views, so a step costs its own tokens and nothing per token before them; joining tensors
anew each step would copy all of them every time.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ProblemError

LEAST = 64
"""Tokens for which room is made at first, and at least."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for tokens: keys [batch, kv_heads, capacity, qk_dim], values [batch, kv_heads, capacity, v_dim]."""

    k: Tensor
    v: Tensor

    @property
    def capacity(self) -> int:
        return self.k.shape[2]


class KVCache:
    """One layer's keys and values, as many as came so far.

    Append what a step adds, and attend to all that comes back; `attend` with `offset=None` puts the queries at the
    last keys, which is where they stand:

    >>> import torch
    >>> from regard import Causal, attend
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> cache, out = KVCache(), []
    >>> for step in (slice(0, 3), slice(3, 4), slice(4, 5)):  # a prompt of three tokens, then one at a time
    ...     keys, values = cache.append(k[:, :, step], v[:, :, step])
    ...     out.append(attend(q[:, :, step], keys, values, mask=Causal()))
    >>> torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal()))
    True
    >>> cache
    KVCache(5 tokens, k [1, 2, 5, 8], v [1, 2, 5, 8], float32: 640 bytes in room for 64 tokens, 8,192 bytes)

    Keys with a position are stored turned to it. What `append` gave stays true, also after `reset`: memory that was
    given out is written again beyond its last token only, and after `crop`.
    """

    def __init__(self) -> None:
        self._room: _Room | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """How many tokens are stored."""
        return self._tokens

    @property
    def bytes(self) -> int:
        """Bytes of what is stored; up to twice as many, or room for 64 tokens, are held in memory."""
        return 0 if self._room is None else self._tokens * _token_bytes(self._room)

    def append(
        self,
        k: Float[Tensor, "batch kv_heads tokens qk_dim"],
        v: Float[Tensor, "batch kv_heads tokens v_dim"],
    ) -> tuple[Float[Tensor, "batch kv_heads keys qk_dim"], Float[Tensor, "batch kv_heads keys v_dim"]]:
        """Store the keys and values of new tokens; all stored so far come back, as views.

        Args:
            k: [batch, kv_heads, tokens, qk_dim]; tokens may be 0, to read what is stored.
            v: [batch, kv_heads, tokens, v_dim].

        Raises:
            ProblemError: shapes, type or device that do not belong together or to what is stored; or tensors that
                gradients would flow to, for a cache serves inference: writing in place would break the graph of the
                steps before.
        """
        self._check(k, v)
        start, end = self._tokens, self._tokens + k.shape[2]
        room = self._room_for(end, k, v)
        if k.shape[2]:
            room.k[:, :, start:end] = k
            room.v[:, :, start:end] = v
        self._room, self._tokens = room, end
        return room.k[:, :, :end], room.v[:, :, :end]

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` tokens: a call that failed, drafts that were not accepted.

        What was given out of the others before is written over by what comes next.

        Raises:
            ProblemError: there are fewer.
        """
        if not 0 <= tokens <= self._tokens:
            raise ProblemError(
                f"crop({tokens}): expected a number from 0 to the {self._tokens} tokens that are stored."
            )
        self._tokens = tokens

    def reset(self) -> None:
        """Forget everything; the next `append` may be of other sizes."""
        self._room, self._tokens = None, 0

    def __repr__(self) -> str:
        if self._room is None:
            return "KVCache(0 tokens)"
        k, v = ([*t.shape[:2], self._tokens, t.shape[3]] for t in (self._room.k, self._room.v))
        kind, held = str(self._room.k.dtype).removeprefix("torch."), self._room.capacity * _token_bytes(self._room)
        return (
            f"KVCache({self._tokens:,} tokens, k {k}, v {v}, {kind}: {self.bytes:,} bytes in room for "
            f"{self._room.capacity:,} tokens, {held:,} bytes)"
        )

    def _room_for(self, tokens: int, k: Tensor, v: Tensor) -> _Room:
        """Memory for so many tokens that holds what is stored: the present, or what takes its place."""
        old = self._room
        if old is not None and tokens <= old.capacity and _is_writable(old.k):
            return old
        capacity = max(tokens, LEAST if old is None else old.capacity if tokens <= old.capacity else 2 * old.capacity)
        new = _Room(*(t.new_empty((*t.shape[:2], capacity, t.shape[3])) for t in (k, v)))
        if old is not None and self._tokens:
            new.k[:, :, : self._tokens] = old.k[:, :, : self._tokens]
            new.v[:, :, : self._tokens] = old.v[:, :, : self._tokens]
        return new

    def _check(self, k: Tensor, v: Tensor) -> None:
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
            raise ProblemError(
                f"k is {_said(k)} and v {_said(v)}: expected [batch, kv_heads, tokens, dim] with the same batch, "
                "kv_heads and tokens, of one type and on one device."
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ProblemError(
                "keys or values that gradients flow to were appended to a cache, which serves inference: run under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache on the whole sequence."
            )
        for name, new, room in [] if self._room is None else [("k", k, self._room.k), ("v", v, self._room.v)]:
            if (*new.shape[:2], new.shape[3], new.dtype, new.device) != (
                *room.shape[:2], room.shape[3], room.dtype, room.device,
            ):  # fmt: skip
                stored = _said(room[:, :, : self._tokens])
                raise ProblemError(
                    f"{name} is {_said(new)}, and the cache holds {stored}: only the number of tokens may differ. "
                    "A new sequence needs a new cache, or reset()."
                )


def _is_writable(t: Tensor) -> bool:
    """Whether it may be written in place: what `torch.inference_mode` made may not be outside of it."""
    return torch.compiler.is_compiling() or not t.is_inference() or torch.is_inference_mode_enabled()


def _token_bytes(room: _Room) -> int:
    """Bytes that one token takes in all batch rows and heads, keys and values."""
    return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (room.k, room.v))


def _said(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
