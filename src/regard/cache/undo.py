"""`Undo`: sequences as they were before an append, for an error or Ctrl-C in the middle of it.

Elements need no undo: an append writes only to free pages, and to slots after the last token of all rows that it gives
the page back to.
"""

from typing import NamedTuple

from regard.cache.page_storage import PageStorage
from regard.cache.pages import Page, PrefixNode
from regard.cache.sequence import Sequence


class _Row(NamedTuple):
    """A sequence before the append. Its first `kept` plain pages stay, and pages of codes are only added."""

    sequence: Sequence
    kept: int
    plain: list[Page]
    coded: int
    tokens: int
    ids: int
    indexed: int
    node: PrefixNode

    @classmethod
    def of(cls, s: Sequence) -> "_Row":
        kept = max(len(s.plain) - 1, 0) if s.storage.codec is None else 0  # with a codec plain pages are few
        return cls(s, kept, s.plain[kept:], len(s.coded), s.tokens, len(s.ids), s.indexed, s.node)

    def restore(self) -> None:
        s = self.sequence
        s.plain[self.kept :] = self.plain
        del s.coded[self.coded :], s.ids[self.ids :]
        s.tokens, s.indexed, s.node, s.batch = self.tokens, self.indexed, self.node, None


class Undo:
    """What restores sequences to what they are when it is made."""

    def __init__(self, storage: PageStorage, sequences: list[Sequence]) -> None:
        self._storage, self._rows = storage, [_Row.of(s) for s in sequences]

    def restore(self) -> None:
        """Give the sequences their pages and tokens back, and free the pages that they were given since."""
        with self._storage.exclusive:
            for row in self._rows:
                row.restore()
            self._storage.count_references()
