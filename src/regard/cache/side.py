"""`Side`: the memory of keys, or of values, of a coded cache: plain sinks, codes, a plain tail."""

from typing import Any

import torch
from torch import Tensor

from regard.cache.coded import Coded
from regard.cache.store import Form, memory
from regard.storage.codec import Codec
from regard.storage.stored import Part


class Side:
    """The memory of keys, or of values: sinks and tail [batch, kv_heads, slots, dim], and codes."""

    def __init__(self, codec: Codec, form: Form, dim: int, slots: tuple[int, int], *, tiled: bool) -> None:
        self.dim = dim
        self.sinks, self.tail = (
            memory((form.batch, form.kv_heads, n, dim), form.dtype, form.device) for n in slots
        )  # fmt: skip
        self.coded = Coded(codec, form, dim, tiled=tiled)
        self.still: tuple[Part, ...] = ()
        """The parts before the tail."""

    def __getstate__(self) -> dict[str, Any]:
        """All but the parts, which look into the same memory: whoever says how it lies says it again."""
        return self.__dict__ | {"still": ()}

    def source(self, begin: int, end: int, x: Tensor, skip: int, tokens: int) -> Tensor:
        """The first tokens of the tail from slot `begin` to `end` with x from `skip` on behind it."""
        left = end - begin
        if tokens <= left:
            return self.tail.narrow(2, begin, tokens)
        new = x.narrow(2, skip, tokens - left)
        return torch.cat((self.tail.narrow(2, begin, left), new), 2) if left else new


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Of x [batch, kv_heads, tokens, ...] those tokens, each head its own."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
