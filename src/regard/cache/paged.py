"""`Paged`: each batch row a sequence of a pool, its own or one that other caches use as well.

Rows are put in a new order by handing pages around: no number is copied until two beams that share a page write to it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.cache.forget import keep
from regard.cache.pool import PagePool, stored_bytes
from regard.cache.rows import rows_of
from regard.cache.sequence import crop
from regard.cache.store import CachedTensor, Form, check_has_data
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Paged


class PagedStore:
    """Rows of a batch as sequences of a pool. What is handed out is true until the pool is next written to."""

    def __init__(self, layout: Paged, codec: Codec | torch.dtype | None, form: Form) -> None:
        self.form, self._is_shared = form, layout.pool is not None
        self.pool = _checked(layout.pool, form) if self._is_shared else PagePool(None, layout.page, codec)
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
        return stored_bytes(self.pool.room, self.sequences)

    @property
    def allocated_bytes(self) -> int:
        """All memory of a pool of its own; of a shared one the pages that its rows hold."""
        if not self._is_shared:
            return self.pool.allocated_bytes
        room = self.pool.room
        pages = {page for s in self.sequences for page in (*s.plain, *s.coded)}
        coded = 0 if room.codes is None else room.codes.page_bytes
        return sum(room.numbers.page_bytes if page.home is room.plain else coded for page in pages)

    def append(self, k: Tensor, v: Tensor | None) -> tuple[CachedTensor, CachedTensor]:
        assert v is not None
        found = self.pool.write(self.sequences, k, v)
        self._seen += k.shape[2]
        return found

    def crop(self, tokens: int) -> None:
        crop(self.sequences, self.tokens - (self._seen - tokens))
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
        keep(self.pool.room, self.sequences, index)
        if not self._is_shared:
            self.pool.room.shrink()

    def keys(self) -> Tensor:
        return rows_of(self.pool.room, self.sequences).stored()[0].dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedStore":
        """Forks of its rows, in the same pool: they part where one is written to."""
        other = object.__new__(PagedStore)
        other.form, other._is_shared, other.pool, other._seen = self.form, self._is_shared, self.pool, self._seen
        other.sequences = [sequence.fork() for sequence in self.sequences]
        return other


def _checked(pool: PagePool, form: Form) -> PagePool:
    """The pool of the layout, if keys and values of this form fit in it."""
    other = pool.room.form
    if other is not None and other[1:] != form[1:]:
        raise ProblemError(
            f"keys and values of {form.kv_heads} heads, {form.qk_dim} and {form.v_dim} wide, {form.dtype} on "
            f"{form.device} came to a pool of {other.kv_heads} heads, {other.qk_dim} and {other.v_dim} wide, "
            f"{other.dtype} on {other.device}: a pool is for one layer; others need pools of their own."
        )
    return pool
