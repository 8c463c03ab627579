"""What can be kept of a call, and copies of it, so that nothing that happens afterwards can change it.

Caches write on in the tensors that they handed out, and decoding loops add to the lengths in their masks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from regard.attention import Call
from regard.describe.spec import Fingerprint, Spec, deserialize
from regard.inspect.weights.lazy import Weights

W = TypeVar("W", bound=Spec)


class Parts(NamedTuple):
    """The weights of a call, its values [batch, kv_heads, keys, v_dim] and its output, if they were asked for."""

    weights: Weights
    v: Tensor | None
    out: Tensor | None

    @classmethod
    def of(cls, call: Call, values: bool) -> "Parts":
        """The parts of a call as they are, without gradients; with `values` also its values and its output."""
        weights = Weights.of(call)
        return cls(weights, call.v.detach(), call.out.detach()) if values else cls(weights, None, None)


class Memory:
    """Keeps copies of calls on a device, None for the one that each is on."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._words: dict[Fingerprint, Spec] = {}

    def add(self, layer: int, module: str | None, parts: Parts) -> Callable[[], Parts]:
        """Copy a call; what is returned gives the copy."""
        w = parts.weights
        weights = replace(
            w,
            **{name: self._copy(getattr(w, name)) for name in ("q", "k", "lse", "sink")},
            mask=self._of_word(w.mask),
            bias=self._of_word(w.bias),
        )
        copied = Parts(weights, self._copy(parts.v), self._copy(parts.out))
        return lambda: copied

    def _copy(self, t: Tensor | None) -> Tensor | None:
        """A copy that takes no more than its own memory: q is often a part of what also made k and v."""
        return None if t is None else copy_of(t, self._device or t.device)

    def _of_word(self, word: W | None) -> W | None:
        """A word whose tensors are copies: one for all calls that it is the same in, as it knows its plans by them."""
        if word is None or not is_serializable(word) or not word.tensors():
            return word
        fingerprint = word.fingerprint()
        if fingerprint not in self._words:
            tensors: list[Tensor] = []
            numbers: list[int] = []
            text = word.serialize(tensors, numbers)
            self._words[fingerprint] = deserialize(
                text, [copy_of(t, self._device or t.device) for t in tensors], numbers
            )
        return cast(W, self._words[fingerprint])


def copy_of(t: Tensor, device: torch.device | str) -> Tensor:
    """A copy without gaps and without gradients."""
    return t.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def is_serializable(word: Spec) -> bool:
    """Whether a word is made of words, tensors and numbers alone, so that `Spec.serialize` can take it apart.

    >>> from regard import Causal, MaskFunction
    >>> is_serializable(Causal()), is_serializable(Causal() & MaskFunction(lambda b, h, q, k: q > k))
    (True, False)
    """
    parts = word.parts()
    return word.is_known() and all(is_serializable(p) if isinstance(p, Spec) else not callable(p) for p in parts)
