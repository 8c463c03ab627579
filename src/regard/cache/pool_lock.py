"""The lock of a pool of pages: inside of it no other thread reads or changes the pool's pages.

A process that forks holds the locks of all pools meanwhile. So its child has no pages that another thread had changed
by half, and no lock of a thread that the child does not have.
"""

import os
import threading
from collections import deque
from typing import Any
from weakref import ref

_locks: dict[ref[Any], None] = {}
_gone: deque[ref[Any]] = deque()
_listed = threading.RLock()  # no pool is made while a process forks
_held: list[Any] = []  # by the thread that forks


def pool_lock() -> Any:
    """A new lock, which a thread may take again."""
    with _listed:
        while _gone:
            _locks.pop(_gone.popleft(), None)
        lock = threading.RLock()
        _locks[ref(lock, _gone.append)] = None
    return lock


def pool_locks() -> list[Any]:
    """The locks of all pools in this process."""
    return [lock for reference in list(_locks) if (lock := reference()) is not None]


def _hold() -> None:
    _listed.acquire()
    _held.append(_listed)
    for lock in pool_locks():
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    held = _held.copy()
    _held.clear()  # another thread may fork as soon as the last is released
    for lock in reversed(held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
