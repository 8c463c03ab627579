"""A cache of the most recently used values, limited by entries and bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A least-recently-used cache, safe for several threads; the latest entry stays even above the limits.

    Args:
        entries: the most entries.
        nbytes: the most bytes of all entries.
        size: the bytes of an entry.

    >>> cache = LRUCache(entries=2, nbytes=100, size=len)
    >>> for key, value in (("a", b"1"), ("b", b"2")):
    ...     cache.put(key, value)
    >>> cache.get("a")
    b'1'
    >>> cache.put("c", b"3")
    >>> cache.get("b") is None, cache.nbytes
    (True, 2)
    """

    def __init__(self, *, entries: int, nbytes: int, size: Callable[[V], int]) -> None:
        self._entries, self._most, self._size = entries, nbytes, size
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, key: K) -> V | None:
        """The entry, now the most recent, or None."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: K, value: V) -> None:
        """Add an entry, or replace the one with the same key; drop the least recently used."""
        with self._lock:
            if key in self._kept:
                self.nbytes -= self._size(self._kept.pop(key))
            self._kept[key] = value
            self.nbytes += self._size(value)
            while len(self._kept) > 1 and (len(self._kept) > self._entries or self.nbytes > self._most):
                self.nbytes -= self._size(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)
