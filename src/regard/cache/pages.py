"""The page allocator and the block table: which pages are in use, which is taken next, and which a sequence has.

Pages are the blocks of PagedAttention: Kwon et al. 2023, arXiv:2309.06180, §4. A page that no sequence refers to is
free. If the tokens in a free page are known, the next prompt that begins with them can still find it, until the page is
allocated for other tokens. Free pages without known tokens are allocated first, then the page that was released longest
ago. Known pages are found in a tree of token ids, which compares ids and not only their hashes: SGLang, Zheng et al.
2024, arXiv:2312.07104, §3.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple


class Page:
    """Memory for the tokens of one sequence, or of several sequences that have the same tokens up to there.

    Attributes:
        allocator: the allocator that it belongs to.
        index: its index in the allocator and in memory, from 0.
        references: how many sequences refer to it; 0: it is free.
        node: its token ids and those of all pages before it, where they are known.
        twin: the page with the same tokens in the other form (plain or codes), if there is one.
        twin_tokens: how many of the first tokens the two have in common: fewer than a page if the plain one was not
            full when its tokens became codes.
    """

    __slots__ = ("allocator", "index", "node", "references", "twin", "twin_tokens")

    def __init__(self, allocator: "PageAllocator", index: int) -> None:
        self.allocator, self.index, self.references = allocator, index, 0
        self.node: PrefixNode | None = None
        self.twin: Page | None = None
        self.twin_tokens = 0

    def invalidate(self) -> None:
        """Make the page impossible to find, because its content will be overwritten."""
        self._unpair()
        if self.node is not None:
            self.node.remove(self)

    def pair(self, twin: "Page", tokens: int) -> None:
        """Make the two twins, which have their first `tokens` tokens in common."""
        for page in (self, twin):
            page._unpair()
        self.twin, twin.twin = twin, self
        self.twin_tokens = twin.twin_tokens = tokens

    def twin_with(self, tokens: int) -> "Page | None":
        """The twin, if it has the first `tokens` tokens of this page."""
        return self.twin if tokens <= self.twin_tokens else None

    def _unpair(self) -> None:
        if self.twin is not None:
            self.twin.twin = self.twin = None

    def __repr__(self) -> str:
        return f"Page({self.index}, {self.references} references)"


class PrefixNode:
    """A node in the tree of known token prefixes: the ids of one page, after the ids of its parent.

    Attributes:
        children: the nodes after this one, by their ids.
        pages: the pages that store these tokens, one per allocator (plain, codes).
    """

    __slots__ = ("children", "ids", "pages", "parent")

    def __init__(self, parent: "PrefixNode | None" = None, ids: tuple[int, ...] = ()) -> None:
        self.parent, self.ids = parent, ids
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.pages: dict[PageAllocator, Page] = {}

    @property
    def is_reachable(self) -> bool:
        """Whether the node can be reached from the root: `prune` cuts off nodes that lead to no page."""
        return self.parent is None or self.parent.children.get(self.ids) is self

    def child(self, ids: tuple[int, ...]) -> "PrefixNode":
        """The child with these ids; it is created if it is missing."""
        child = self.children.get(ids)
        if child is None:
            child = self.children[ids] = PrefixNode(self, ids)
        return child

    def add(self, page: Page) -> None:
        """Record that the page stores these tokens; the first such page of an allocator is the one that is found."""
        if page.node is None and page.allocator not in self.pages:
            self.pages[page.allocator], page.node = page, self

    def remove(self, page: Page) -> None:
        """Record that the page no longer stores these tokens."""
        self.pages.pop(page.allocator, None)  # it is gone where Ctrl-C came before the next line
        page.node = None
        self.prune()

    def prune(self) -> None:
        """Cut off this node and its ancestors as far as they have no page and no child."""
        node = self
        while (parent := node.parent) is not None and not node.pages and not node.children and node.is_reachable:
            del parent.children[node.ids]
            node = parent


class PageAllocator:
    """All pages of one memory, with reference counts and a free list.

    >>> allocator = PageAllocator()
    >>> allocator.grow(2)
    >>> first, second = allocator.allocate(), allocator.allocate()
    >>> allocator.retain(second)
    >>> allocator.release(second), allocator.release(first), allocator.used, len(allocator.free)
    (None, None, 1, 1)
    """

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.free: OrderedDict[Page, None] = OrderedDict()  # in the order of allocation

    @property
    def used(self) -> int:
        """Pages that sequences refer to."""
        return len(self.pages) - len(self.free)

    def grow(self, count: int) -> None:
        """Have `count` pages, at least as many as now."""
        added = [Page(self, index) for index in range(len(self.pages), count)]
        free = OrderedDict((page, None) for page in added)  # before free pages with known tokens, lowest index first
        free.update(self.free)
        self.pages, self.free = [*self.pages, *added], free  # together: Ctrl-C must not come between them

    @property
    def in_use(self) -> list[Page]:
        """The pages that sequences refer to."""
        return [page for page in self.pages if page.references]

    def shrink(self, count: int) -> None:
        """Have `count` pages: those in use come first, the content of the free ones is invalidated.

        Where it was interrupted, a second call does the rest.
        """
        for page in self.free:
            page.invalidate()
        self.pages = self.in_use
        for index, page in enumerate(self.pages):
            page.index = index
        self.free.clear()
        self.grow(count)

    def allocate(self) -> Page:
        """Take a free page, with one reference. The caller has checked that there is one."""
        page, _ = self.free.popitem(last=False)
        page.invalidate()
        page.references = 1
        return page

    def retain(self, page: Page) -> None:
        """Add a reference; the page may be free."""
        if not page.references:
            del self.free[page]
        page.references += 1

    def release(self, page: Page) -> None:
        """Remove a reference; without any, the page is free."""
        page.references -= 1
        if not page.references:
            self.free[page] = None
            if page.node is None and page.twin is None:
                self.free.move_to_end(page, last=False)


class OwnPages(NamedTuple):
    """The pages of one sequence. The lists change and are never replaced: `HeldPages` has them as well."""

    plain: list[Page]
    coded: list[Page]


class BlockTable:
    """The pages of a sequence: plain sink pages, pages of codes, plain pages at the end (the tail).

    Attributes:
        page: tokens per page.
        sink_pages: pages at the front that stay plain when the sequence is written by a codec.
        own: its plain pages and its pages of codes.
        tokens: tokens in the sequence.
        ids: token ids from the first token on, as far as they are known; they may reach beyond `tokens`.
        is_exact: whether no stored element went through a codec and back. Only then other sequences may find the pages.
        node: the tree node of the first `indexed` pages, which other sequences can find.
        segments: after an eviction of single tokens from a sequence with codes, how many tokens the front and the coded
            pages hold; the last page of each may be partly empty, and no further page becomes codes. None: whole pages.
        batch: the `BatchTable` that lists this sequence as row `row`; None: the pages changed since it was made.
    """

    def __init__(self, page: int, sink_pages: int, root: PrefixNode, ids: list[int]) -> None:
        self.page, self.sink_pages = page, sink_pages
        self.own = OwnPages([], [])
        self.tokens = 0
        self.ids = ids
        self.is_exact = True
        self.segments: tuple[int, int] | None = None
        self.indexed = 0
        self.node = root
        self.batch: object | None = None  # a `BatchTable`, which imports this module
        self.row = 0

    @property
    def plain(self) -> list[Page]:
        """The plain pages: first the sink pages, then those of the tail."""
        return self.own.plain

    @property
    def coded(self) -> list[Page]:
        """The pages of codes."""
        return self.own.coded

    @property
    def front_pages(self) -> int:
        """Pages before the codes, once they are written."""
        return self.sink_pages if self.segments is None else -(-self.segments[0] // self.page)

    @property
    def tail_page(self) -> int:
        """Position in the sequence of the first page after the codes."""
        return self.front_pages + len(self.coded)

    @property
    def tail_start(self) -> int:
        """Tokens before that page, once they are written."""
        return self.tail_page * self.page if self.segments is None else sum(self.segments)

    def page_at(self, position: int) -> Page:
        """The page at a position in the sequence."""
        front = self.front_pages
        if position < front:
            return self.plain[position]
        return self.coded[position - front] if position < self.tail_page else self.plain[position - len(self.coded)]

    def pages_from(self, position: int) -> list[Page]:
        """All pages from a position in the sequence on, in order."""
        return [self.page_at(i) for i in range(position, len(self.plain) + len(self.coded))]

    def page_tokens(self) -> Iterator[tuple[Page, int]]:
        """The pages, and how many tokens of the sequence each stores."""
        front, coded = (self.front_pages * self.page, 0) if self.segments is None else self.segments
        front = min(front, self.tokens)
        coded = len(self.coded) * self.page if self.segments is None else coded
        parts = (
            (self.plain[: self.front_pages], front),
            (self.coded, coded),
            (self.plain[self.front_pages :], self.tokens - front - coded),
        )
        for pages, tokens in parts:
            for i, page in enumerate(pages):
                yield page, min(tokens - i * self.page, self.page)

    def page_ids(self, position: int) -> tuple[int, ...]:
        """The token ids of a page."""
        return tuple(self.ids[position * self.page : (position + 1) * self.page])

    def unindex(self, pages: int) -> None:
        """Let at most the first `pages` pages count as indexed."""
        while self.indexed > pages:
            assert self.node.parent is not None
            self.indexed, self.node = self.indexed - 1, self.node.parent
