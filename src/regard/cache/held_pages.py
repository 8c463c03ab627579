"""`HeldPages`: which pages each sequence of a pool holds, also when nothing refers to the sequence any more.

The garbage collector may collect a sequence in any thread and before any line, also while this thread changes pages. So
it releases no page and takes no lock: it puts the sequence's weak reference into a queue, in one step that runs no
Python code. The next call of the pool releases the pages.
"""

from collections import deque
from collections.abc import Iterable
from weakref import ref

from regard.cache.pages import BlockTable, OwnPages, Page


class HeldPages:
    """The pages of all sequences that were not freed; those of a collected sequence until they are released.

    >>> from regard.cache.pages import PageAllocator, PrefixNode
    >>> held, allocator, table = HeldPages(), PageAllocator(), BlockTable(4, 0, PrefixNode(), [])
    >>> allocator.grow(2)
    >>> held.add(table)
    >>> table.plain.append(allocator.allocate())
    >>> del table
    >>> held.any_gone, held.tables, held.pages
    (True, [], [Page(0, 1 references)])
    >>> held.release_gone()
    >>> held.any_gone, held.pages, allocator.used
    (False, [], 0)
    """

    def __init__(self, tables: Iterable[BlockTable] = ()) -> None:
        self._own: dict[ref[BlockTable], tuple[OwnPages, int]] = {}
        self._gone: deque[ref[BlockTable]] = deque()
        for table in tables:
            self.add(table)

    def add(self, table: BlockTable) -> None:
        """Note which lists will have the pages of a sequence."""
        self._own[ref(table, self._gone.append)] = table.own, table.sink_pages

    def discard(self, table: BlockTable) -> None:
        """Forget a sequence that is freed."""
        self._own.pop(ref(table), None)

    @property
    def tables(self) -> list[BlockTable]:
        """The sequences that something refers to."""
        return [table for reference in list(self._own) if (table := reference()) is not None]

    @property
    def pages(self) -> list[Page]:
        """All pages, once for each sequence that holds it; also those of sequences that are gone."""
        return [page for own, _ in list(self._own.values()) for pages in own for page in pages]

    @property
    def any_gone(self) -> bool:
        """Whether there are pages to release."""
        return bool(self._gone)

    def release_gone(self) -> None:
        """Release the pages of sequences that are gone, the last first: a prompt is found again from its front.

        After Ctrl-C in the middle of it, pages must be counted by what `pages` says.
        """
        while self._gone:
            found = self._own.pop(self._gone[0], None)
            if found is not None:
                (plain, coded), sinks = found
                for page in reversed([*plain[:sinks], *coded, *plain[sinks:]]):
                    page.allocator.release(page)
            self._gone.popleft()
