"""`StepCache`: a cache in memory of a fixed size, whose position is in a tensor where the keys are.

A step writes one token and reads no element on the host, and all that the host does is the same in every step. So a
CUDA graph can capture it (docs/gpu.md). Each layout is a `StepMemory`: where a token is written, and how the parts of a
handle are found, as functions of the position that run on the device.

```
plain, pages   t t t t t t . . .                  slot = position
rolling        S S S S|t t t t t t                slot = sinks + (position - sinks) % (window - sinks)
codes          S S S S|c c c c ... . .|t t t t .  see `coded_steps.py`
```
"""

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.cache.check import check_inference
from regard.cache.store import CachedTensor, Form, describe_tensor, leading_channels
from regard.errors import ProblemError
from regard.storage.hadamard import hadamard
from regard.storage.stored import Part, StoredTensor


class StepMemory(Protocol):
    """The memory of one layout. `first` is int64 [batch], the position of the new token of each row.

    Attributes:
        is_ring: whether tokens are in another order than their positions.
    """

    is_ring: bool

    def write(self, first: Tensor, new: tuple[Tensor, ...]) -> None:
        """Write a token of each row, keys and values [batch, kv_heads, 1, dim]."""
        ...

    def parts(self, first: Tensor) -> list[tuple[Part, ...]]:
        """The parts of the keys, and of the values if there are any, with the tokens up to `first`."""
        ...

    def tokens(self, first: Tensor) -> Tensor:
        """How many tokens the parts have, int64 [batch]."""
        ...


class StepCache:
    """A cache for steps of one token, whose position is on the device; `KVCache.steps` makes it after a prompt.

    Attributes:
        capacity: tokens that there may be at most; None with `Rolling`, which never fills up.
        position: int64 [batch], of the next token of each row; the tensor stays the same. A step may be repeated: write
            the position of its token into the tensor, for example after the step that compiles the kernels. With
            `Rolling` no earlier step can be.

    >>> from regard import Causal, attend
    >>> from regard.cache import KVCache, Rolling
    >>> cache = KVCache(Rolling(window=16, sinks=2))
    >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    >>> _ = cache.append(k[:, :, :19], v[:, :, :19])
    >>> steps = cache.steps()
    >>> keys, values = steps.append(k[:, :, 19:], v[:, :, 19:])
    >>> out = attend(q[:, :, 19:], keys, values, mask=Causal())
    >>> torch.allclose(out, attend(q[:, :, 19:], *cache.append(k[:, :, 19:], v[:, :, 19:]), mask=Causal()), atol=1e-6)
    True
    """

    def __init__(
        self, memory: StepMemory, form: Form, seen: int, *, capacity: int | None = None, rank: int | None = None,
        rotate: bool = False,
    ) -> None:  # fmt: skip
        self.form, self.capacity, self._memory, self._rank, self._is_rotated = form, capacity, memory, rank, rotate
        self.position = torch.full((form.batch,), seen, dtype=torch.int64, device=form.device)
        self._is_finite = torch.ones((), dtype=torch.bool, device=form.device)

    def append(self, k: Tensor, v: Tensor | None = None) -> tuple[CachedTensor, CachedTensor]:
        """Store the keys and values of one token of each row; returns handles of all that the token sees.

        The handles are for `attend` with one query, under `Causal()` or no mask, without an offset. After an error or
        Ctrl-C the position is that of before, and the step can be made again.

        Args:
            k: [batch, kv_heads, 1, qk_dim].
            v: [batch, kv_heads, 1, v_dim]; None only for latents.

        Raises:
            ProblemError: shapes, types or devices other than those of the prompt; on a CPU, a token beyond the
                capacity, which on a GPU is an error of the device for plain tokens, and found by `check` for codes.
        """
        form = self.form
        new = (k,) if v is None else (k, v)
        check_inference(k, v, "cache")
        for name, x, dim in zip("kv", new, form.dims, strict=False):
            if (*x.shape, x.dtype, x.device) != (form.batch, form.kv_heads, 1, dim, form.dtype, form.device):
                raise ProblemError(
                    f"{name} is {describe_tensor(x)}: expected one token of each row, {form.dtype} "
                    f"[{form.batch}, {form.kv_heads}, 1, {dim}] on {form.device}."
                )
        if len(new) != len(form.dims):
            raise ProblemError(f"{len(new)} of k and v: expected {'k alone' if len(form.dims) == 1 else 'both'}.")
        if form.device.type == "cpu":  # elsewhere the host would wait for the position
            self._check_room(below=1)
        if self._is_rotated:
            new = tuple(hadamard(x) for x in new)
        first = self.position.clone()
        try:
            self._memory.write(first, new)
            stored = self._stored(first)
            self.position.add_(1)
            self._is_finite.logical_and_(torch.stack([torch.isfinite(x).all() for x in new]).all())
            return stored  # noqa: TRY300 - Ctrl-C may come here as well
        except BaseException:  # the step can be made again, and writes to the same slots
            self.position.copy_(first)
            raise

    def check(self) -> None:
        """Raise `ProblemError` for tokens beyond the capacity, or with elements that are NaN or infinite. It waits.

        Codes cannot store such elements.
        """
        self._check_room(below=0)
        if not bool(self._is_finite):
            raise ProblemError("a token of a step had NaN or infinite elements: find where they come from.")

    def _check_room(self, *, below: int) -> None:
        """Raise `ProblemError` unless all positions are this far below the capacity."""
        if self.capacity is not None and (most := int(self.position.max())) > self.capacity - below:
            raise ProblemError(
                f"steps(capacity={self.capacity}) is full: token {most + below:,} of a row does not fit. Use a larger "
                "capacity."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if torch.is_inference_mode_enabled():  # the tensors of a pickle are then of inference mode
            with torch.inference_mode(mode=False):
                self.__dict__.update(copy.deepcopy(state))

    @torch.inference_mode(mode=False)  # its memory is written to in and out of inference mode
    def __deepcopy__(self, memo: dict[int, Any]) -> "StepCache":
        other = object.__new__(StepCache)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __copy__(self) -> "StepCache":
        """A deep copy: two caches in the same memory would overwrite one another's tokens."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        form = self.form
        return f"StepCache({type(self._memory).__name__}, k {[form.batch, form.kv_heads, 1, form.qk_dim]} each step)"

    def _stored(self, first: Tensor) -> tuple[CachedTensor, CachedTensor]:
        """Handles of the tokens up to `first`."""
        lengths = self._memory.tokens(first)
        both = zip(self._memory.parts(first), self.form.dims, strict=True)
        handles = [self._handle(parts, lengths, dim) for parts, dim in both]
        if self._rank is not None:
            return handles[0], leading_channels(handles[0], self._rank)
        return handles[0], handles[1]

    def _handle(self, parts: tuple[Part, ...], lengths: Tensor, dim: int) -> StoredTensor:
        form, tokens = self.form, sum(part.tokens for part in parts)
        shape = (form.batch, form.kv_heads, tokens, dim)
        return StoredTensor(parts, shape, form.dtype, lengths, self._is_rotated, self._memory.is_ring)


class PlainSteps:
    """Plain tokens in parts with memory for all that may come, in one range or in pages.

    Args:
        parts: of the keys, and of the values if there are any.
        owner: what frees the memory once nothing refers to it.
    """

    is_ring = False

    def __init__(self, parts: tuple[Part, ...], owner: object) -> None:
        self._parts, self._owner = parts, owner

    def write(self, first: Tensor, new: tuple[Tensor, ...]) -> None:
        for part, x in zip(self._parts, new, strict=True):
            slot = first + part.first_slot
            put_token(part, slot, x)

    def parts(self, first: Tensor) -> list[tuple[Part, ...]]:
        return [(part._replace(row_ends=first + 1),) for part in self._parts]

    def tokens(self, first: Tensor) -> Tensor:
        return first + 1


class RotateSinks(Protocol):
    """What writes the keys of the sinks, rotated by as many positions as tokens were evicted."""

    def __call__(self, out: Tensor, evicted: Tensor) -> None:
        """Write into `out` [batch, kv_heads, sinks, qk_dim]; `evicted` is int64 [batch]."""
        ...


class RollingSteps:
    """Sinks, and the latest tokens in a ring, [batch, kv_heads, window, dim] of keys and of values."""

    is_ring = True

    def __init__(self, memory: tuple[Tensor, ...], sinks: int, rotate: RotateSinks | None) -> None:
        self._memory, self._sinks, self._rotate = memory, sinks, rotate
        self._window = memory[0].shape[2]

    def write(self, first: Tensor, new: tuple[Tensor, ...]) -> None:
        slot = ring_slot(first, self._sinks, self._window)
        for t, x in zip(self._memory, new, strict=True):
            put_token(Part(self._window, t), slot, x)
        if self._rotate is not None and self._sinks:
            evicted = (first + 1 - self._window).clamp(min=0)
            self._rotate(self._memory[0].narrow(2, 0, self._sinks), evicted)

    def parts(self, first: Tensor) -> list[tuple[Part, ...]]:
        return [(Part(self._window, t, row_ends=self.tokens(first)),) for t in self._memory]

    def tokens(self, first: Tensor) -> Tensor:
        return (first + 1).clamp(max=self._window)


def ring_slot(position: Tensor, sinks: int, window: int) -> Tensor:
    """The slots of tokens at some positions: sinks at the front, the others in turn."""
    return torch.where(position < sinks, position, sinks + (position - sinks) % (window - sinks))


def put_token(part: Part, slot: Tensor, x: Tensor) -> None:
    """Write one token of each row, x [batch, kv_heads, 1, dim], into the slots [batch] of its pages."""
    if part.table is None:
        page, place = torch.arange(len(slot), device=slot.device), slot
    else:
        page, place = part.table.gather(1, (slot // part.page)[:, None])[:, 0], slot % part.page
    part.data[page, :, place] = x[:, :, 0].to(part.data.dtype)
