"""`Latent`: one entry per token that is both key and value: the latent, and behind it the rotated key.

The entry is the key. The value is its latent, the first `rank` channels of the same memory, plain or codes: DeepSeek-AI
2024, arXiv:2405.04434, §2.1.2, where after absorption queries attend to latents. So nothing is stored for values.
"""

import torch
from torch import Tensor

from regard.cache.dense import DenseStore
from regard.cache.quantised import QuantisedStore
from regard.cache.store import CachedTensor, Form, WrappedStore
from regard.errors import ProblemError
from regard.storage.codec import Codec, code_bytes
from regard.storage.stored import Contiguous, Latent, Part, StoredTensor


class LatentStore(WrappedStore[DenseStore | QuantisedStore]):
    """Entries [batch, 1, tokens, rank + rope], in a contiguous store."""

    def __init__(self, layout: Latent, codec: Codec | torch.dtype | None, form: Form) -> None:
        if form.qk_dim < layout.rank:
            raise ProblemError(
                f"entries have {form.qk_dim} dimensions, and the cache is Latent(rank={layout.rank}): expected the "
                "latent and behind it the rotated key, rank + rope dimensions."
            )
        self.rank = layout.rank
        is_coded = isinstance(codec, Codec)
        super().__init__(
            QuantisedStore(Contiguous(), codec, form) if is_coded else DenseStore(Contiguous(), codec, form)
        )

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        keys = self._inner.append(k, None)[0]
        return keys, leading_channels(keys, self.rank)


def leading_channels(stored: CachedTensor, dim: int) -> CachedTensor:
    """The first `dim` channels of what a cache returned, in the same memory.

    Raises:
        ProblemError: the channels are rotated, so that each mixes all of them.

    >>> leading_channels(torch.arange(12.0).view(1, 1, 3, 4), 2)[0, 0]
    tensor([[0., 1.],
            [4., 5.],
            [8., 9.]])
    """
    if isinstance(stored, Tensor):
        return stored.narrow(3, 0, dim)
    if stored.rotated:
        raise ProblemError(f"{stored!r} is rotated: its first {dim} channels are made of all. Take rotate=False.")
    parts = tuple(_leading_channels(part, dim) for part in stored.parts)
    batch, heads, tokens = stored.shape[:3]
    return StoredTensor(parts, (batch, heads, tokens, dim), stored.dtype, stored.lengths)


def _leading_channels(part: Part, dim: int) -> Part:
    if part.kind == "plain":
        return part._replace(data=part.data.narrow(3, 0, dim))
    assert part.tiled  # entries are keys
    data = part.data.narrow(3, 0, code_bytes(part.kind, dim, tiled=True))
    if part.per_token:
        return part._replace(data=data)
    scale, zero_point = (None if t is None else t.narrow(3, 0, dim) for t in (part.scale, part.zero_point))
    return part._replace(data=data, scale=scale, zero_point=zero_point)
