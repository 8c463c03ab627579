"""`Paged`: each batch row is a sequence of a pool, which may belong to this cache alone or to several caches.

Selecting rows passes pages on: nothing is copied until two beams that share a page write to it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.cache.batch_table import batch_table
from regard.cache.keep_tokens import keep_tokens
from regard.cache.pool import PagePool
from regard.cache.sequence import crop_sequences
from regard.cache.store import CachedTensor, Form, check_has_data
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Paged


class PagedStore:
    """Rows of a batch as sequences of a pool. Returned handles are valid until the pool is written to again."""

    def __init__(self, layout: Paged, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self._is_shared = form, layout.pool is not None
        self.pool = _checked_pool(layout.pool, form) if self._is_shared else PagePool(None, layout.page, codec)
        if not form.batch:
            raise ProblemError("a paged cache for a batch of 0 rows: expected one row or more.")
        self.sequences = [self.pool.sequence() for _ in range(form.batch)]
        self._seen = 0

    @property
    def tokens(self) -> int:
        return self.sequences[0].tokens

    @property
    def tokens_seen(self) -> int:
        return self._seen

    @property
    def min_crop(self) -> int:
        return self._seen - self.tokens

    @property
    def bytes(self) -> int:
        return self.pool.storage.stored_bytes(self.sequences)

    @property
    def allocated_bytes(self) -> int:
        """All memory of a pool of its own; of a shared pool the pages of its rows."""
        if not self._is_shared:
            return self.pool.allocated_bytes
        plain = {page for s in self.sequences for page in s.plain}
        coded = {page for s in self.sequences for page in s.coded}
        return self.pool.storage.page_bytes(len(plain), len(coded)) if plain or coded else 0

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        assert v is not None
        stored = self.pool.write(self.sequences, k, v)
        self._seen += k.shape[2]
        return stored

    def crop(self, tokens: int) -> None:
        crop_sequences(self.sequences, self.tokens - (self._seen - tokens))
        self._seen = tokens

    def reset(self) -> None:
        for sequence in self.sequences:
            sequence.free()
        self.sequences = [self.pool.sequence() for _ in range(self.form.batch)]
        self._seen = 0

    def select(self, rows: Tensor) -> None:
        check_has_data(rows, "select of pages")
        self.sequences = self.pool.select(self.sequences, rows.tolist())
        self.form = self.form._replace(batch=len(rows))

    def keep(self, index: Tensor) -> None:
        keep_tokens(self.pool.storage, self.sequences, index)
        if not self._is_shared:
            self.pool.storage.shrink()

    def keys(self) -> Tensor:
        return batch_table(self.pool.storage, self.sequences).stored()[0].dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedStore":
        """Forks of its rows, in the same pool; a page is copied when one of the two writes to it."""
        other = object.__new__(PagedStore)
        other.form, other._is_shared, other.pool, other._seen = self.form, self._is_shared, self.pool, self._seen
        other.sequences = [sequence.fork() for sequence in self.sequences]
        return other


def check_paged(layout: Paged, codec: Codec | torch.dtype | None) -> None:
    """Raise `ProblemError` unless the pool of the layout stores what a cache with this codec writes."""
    pool = layout.pool
    if pool is None:
        return
    if not isinstance(pool, PagePool):
        raise ProblemError(f"{layout!r}: expected a regard.cache.PagePool, or None for one of its own.")
    if pool.storage.page != layout.page:
        raise ProblemError(
            f"{layout!r}: the pages of its pool have {pool.storage.page} tokens: expected "
            f"Paged(page={pool.storage.page}, pool=...)."
        )
    if pool.storage.stored_as != codec:
        raise ProblemError(
            f"the cache has codec={codec!r} and its pool codec={pool.storage.stored_as!r}: a pool stores everything in "
            "one way. Give both the same codec."
        )


def _checked_pool(pool: PagePool, form: Form) -> PagePool:
    """The pool of the layout, if keys and values of this form fit into it."""
    other = pool.storage.form
    if other is not None and other[1:] != form[1:]:
        raise ProblemError(
            f"keys and values with {form.kv_heads} heads, {form.qk_dim} and {form.v_dim} dimensions, {form.dtype} on "
            f"{form.device}, for a pool with {other.kv_heads} heads, {other.qk_dim} and {other.v_dim} dimensions, "
            f"{other.dtype} on {other.device}: a pool is for one layer. Give other layers pools of their own."
        )
    return pool
