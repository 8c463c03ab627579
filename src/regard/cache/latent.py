"""`Latent`: one entry per token, that is key and value at once: the latent, and behind it the rotated key.

The entry is the key. The value is its latent, the first `rank` channels of the same memory, plain or codes: DeepSeek-AI
2024, arXiv:2405.04434, §2.1.2, where after absorption queries go to latents. So nothing is kept for values.
"""

import torch
from torch import Tensor

from regard.cache.dense import DenseStore
from regard.cache.quantised import QuantisedStore
from regard.cache.store import CachedTensor, Form, Store
from regard.errors import ProblemError
from regard.storage.codec import Codec, code_bytes
from regard.storage.stored import Contiguous, Latent, Part, StoredTensor


class LatentStore:
    """Entries [batch, 1, tokens, rank + rope], which another store keeps side by side."""

    def __init__(self, layout: Latent, codec: Codec | torch.dtype | None, form: Form) -> None:
        if form.qk_dim < layout.rank:
            raise ProblemError(
                f"entries of {form.qk_dim} numbers came to a cache with Latent(rank={layout.rank}): expected the "
                "latent and behind it the rotated key, rank + rope numbers."
            )
        self.rank = layout.rank
        self._entries: Store = (
            QuantisedStore(Contiguous(), codec, form)
            if isinstance(codec, Codec)
            else DenseStore(Contiguous(), codec, form)
        )

    @property
    def form(self) -> Form:
        return self._entries.form

    @form.setter
    def form(self, form: Form) -> None:
        self._entries.form = form

    @property
    def tokens(self) -> int:
        return self._entries.tokens

    @property
    def tokens_seen(self) -> int:
        return self._entries.tokens_seen

    @property
    def min_crop(self) -> int:
        return self._entries.min_crop

    @property
    def bytes(self) -> int:
        return self._entries.bytes

    @property
    def allocated_bytes(self) -> int:
        return self._entries.allocated_bytes

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        keys = self._entries.append(k, None)[0]
        return keys, leading(keys, self.rank)

    def crop(self, tokens: int) -> None:
        self._entries.crop(tokens)

    def reset(self) -> None:
        self._entries.reset()

    def select(self, rows: Tensor) -> None:
        self._entries.select(rows)

    def keep(self, index: Tensor) -> None:
        self._entries.keep(index)

    def keys(self) -> Tensor:
        return self._entries.keys()


def leading(found: CachedTensor, dim: int) -> CachedTensor:
    """The first `dim` channels of what a cache gave, where they lie.

    Raises:
        ProblemError: channels were turned into one another, or stand in chunks (int4 values).

    >>> leading(torch.arange(12.0).view(1, 1, 3, 4), 2)[0, 0]
    tensor([[0., 1.],
            [4., 5.],
            [8., 9.]])
    """
    if isinstance(found, Tensor):
        return found.narrow(3, 0, dim)
    if found.rotated:
        raise ProblemError(f"{found!r} is rotated: its first {dim} channels are made of all. Take rotate=False.")
    parts = tuple(_leading(part, dim) for part in found.parts)
    return StoredTensor(parts, (*found.shape[:3], dim), found.dtype, found.lengths)  # pyright: ignore[reportArgumentType]


def _leading(part: Part, dim: int) -> Part:
    if part.kind == "plain":
        return part._replace(data=part.data.narrow(3, 0, dim))
    assert part.tiled  # entries are keys
    data = part.data.narrow(3, 0, code_bytes(part.kind, dim, tiled=True))
    if part.per_token:
        return part._replace(data=data)
    scale, zero_point = (None if t is None else t.narrow(3, 0, dim) for t in (part.scale, part.zero_point))
    return part._replace(data=data, scale=scale, zero_point=zero_point)
