"""`BlockTable`: which pages store the tokens of one sequence, in order."""

from collections.abc import Iterator

from regard.cache.pages import Page, PrefixNode


class BlockTable:
    """The pages of a sequence: plain sink pages, pages of codes, plain pages at the end (the tail).

    Attributes:
        page: tokens per page.
        sink_pages: pages at the front that stay plain when the sequence is written by a codec.
        plain: the plain pages: first the sink pages, then those of the tail.
        coded: the pages of codes.
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
        self.plain: list[Page] = []
        self.coded: list[Page] = []
        self.tokens = 0
        self.ids = ids
        self.is_exact = True
        self.segments: tuple[int, int] | None = None
        self.indexed = 0
        self.node = root
        self.batch: object | None = None  # a `BatchTable`, which imports this module
        self.row = 0

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
