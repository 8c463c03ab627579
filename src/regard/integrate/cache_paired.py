"""The cache of an encoder-decoder model: a `RegardCache` and one of transformers."""

import os
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from regard.errors import RefusalError
from regard.integrate.cache_explain import bytes_of


class PairedCache(EncoderDecoderCache):
    """The cache of an encoder-decoder model: regard's for self-attention, transformers' own for cross-attention.

    Cross-attention computes its keys once and reads them whole at every step, so they stay as they are.
    """

    def save(self, path: str | os.PathLike[str], tokens: Tensor) -> None:
        """Refused: the keys of the encoder's text belong to the cache as well.

        Raises:
            RefusalError: always.
        """
        raise RefusalError(
            f"{self!r} cannot be saved to a file, for the text of its encoder is no part of the tokens: torch.save, or "
            "pickle, takes both."
        )

    @property
    def bytes(self) -> int:
        """Bytes that both store."""
        return cast(Any, self.self_attention_cache).bytes + sum(
            bytes_of(layer) for layer in self.cross_attention_cache.layers
        )

    def explain(self) -> str:
        """Which layers keep what, how attention reads it, and how many bytes it takes."""
        cross = sum(bytes_of(layer) for layer in self.cross_attention_cache.layers)
        own = cast(Any, self.self_attention_cache).explain()
        return f"{own}\n  cross-attention, as transformers keeps it: {cross:,} bytes"

    def __repr__(self) -> str:
        return f"PairedCache({self.self_attention_cache!r})"

    __str__ = __repr__
