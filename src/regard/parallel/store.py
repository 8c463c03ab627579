"""The key-value store of a process group, and what this process knows of the group.

A group that is made again, after `destroy_process_group`, may have the name and the store of the old one: the keys of
each begin with its members, and with how many groups of these the store had before.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from regard.errors import RankError, RegardError
from regard.lru_cache import LRUCache
from regard.parallel.digest import digest

POLL = 0.02
"""Seconds between two looks into the store."""


@dataclass
class Known:
    """What this process knows of a group.

    Attributes:
        prefix: begins its keys in the store, the same on all ranks; "" before the store is asked.
        texts: the latest forms of calls that all ranks agreed on, and their descriptions. Ranks make the same calls,
            so they drop the same forms.
        calls: how many calls were made.
        lost: the error of an earlier call, after which messages may be under way.
    """

    prefix: str = ""
    texts: LRUCache[object, str] = field(
        default_factory=lambda: LRUCache[object, str](entries=256, nbytes=1 << 20, size=len)
    )
    calls: int = 0
    lost: RegardError | None = None


_known: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()


def known_of(group: dist.ProcessGroup) -> Known:
    """What this process knows of the group."""
    return _known.setdefault(group, Known())


class Store:
    """The group's store, in the process of rank 0, or in that of torchrun. All methods wait for its answer.

    Args:
        group: whose keys are read and written.
        known: of the group.
        function: the function that communicates, for messages.

    Raises:
        RankError: by each method, where the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, known: Known, function: str) -> None:
        self._group, self._known, self._function = group, known, function

    def has(self, key: str) -> bool:
        """Whether the key was written."""
        return self._ask(lambda store: store.check([key]))

    def read(self, key: str) -> str:
        """The text of a key."""
        return self._ask(lambda store: store.get(key)).decode()

    def write(self, key: str, text: str) -> None:
        """Set the text of a key."""
        self._ask(lambda store: store.set(key, text))

    def first(self, key: str, text: str) -> bytes:
        """The text that a rank wrote first for the key: this one, if there is none yet."""
        return self._ask(lambda store: store.compare_set(key, "", text))

    def missing(self, keys: Mapping[int, str | tuple[str, ...]], seconds: float) -> list[int]:
        """The ranks of which no key is in the store when the time is over, or when there is a verdict."""
        deadline = time.monotonic() + seconds
        wanted = {rank: (key,) if isinstance(key, str) else key for rank, key in keys.items()}
        while True:
            wanted = {rank: names for rank, names in wanted.items() if not any(map(self.has, names))}
            if not wanted or self.has("lost") or time.monotonic() > deadline:
                return list(wanted)
            time.sleep(POLL)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(PrefixStore(self._prefix(), self._group.get_group_store()))
        except (RuntimeError, OSError) as error:
            self._known.lost = RankError(
                f"{self._function}: the store of the process group does not answer: the process that has it, "
                "rank 0 or torchrun, ended. Start all ranks again.",
                (0,),
            )
            raise self._known.lost from error

    def _prefix(self) -> str:
        """Begins the group's keys: each of its ranks adds one to a number in the store, before it asks anything."""
        if not self._known.prefix:
            name = f"regard/{digest(repr(dist.get_process_group_ranks(self._group)))}"
            before = (self._group.get_group_store().add(name, 1) - 1) // dist.get_world_size(self._group)
            self._known.prefix = f"{name}/{before}"
        return self._known.prefix
