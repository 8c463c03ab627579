"""A sequence of a pool: which pages hold its tokens, in order."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from regard.cache.pages import Page, Prefix
from regard.cache.room import Room
from regard.errors import ProblemError


class Sequence:
    """The tokens of one text, in pages of a pool. `PagePool.sequence` makes them, `PagePool.append` lengthens them.

    Pages are shared with forks, and with other sequences that begin with the same tokens, until one is written to.
    What is no longer referred to frees its pages by itself; `free()` does it now.

    Attributes:
        plain: pages of numbers: the first `Room.sinks` of the sequence, then those behind the codes.
        coded: pages of codes, behind the first ones.
        ids: the ids of its tokens, from the first, as far as they are known; perhaps more than are there yet.
        exact: whether all its numbers were written from those that came; others are not named for anybody to find.
        named: so many of its first pages are in the tree of what is known, the last of them at `prefix`.
        loose: where tokens were forgotten one by one from among codes: how many stay at the front as numbers, and how
            many are codes behind them. Their last pages may be part empty; nothing becomes codes by itself any more.
        seat: its place among those that were last appended to together; None: it was changed otherwise since.
    """

    def __init__(self, room: Room, ids: list[int] | None = None) -> None:
        self.room = room
        self.plain: list[Page] = []
        self.coded: list[Page] = []
        self.tokens = 0
        self.ids: list[int] = [] if ids is None else ids
        self.exact = True
        self.loose: tuple[int, int] | None = None
        self.named = 0
        self.prefix: Prefix = room.root
        self.seat: tuple[Any, int] | None = None  # a `Rows`, and the number of the row
        self.is_freed = False
        room.sequences.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Its pool, whose state has the sequences that are not freed, for they refer to one another's pages."""
        return {"room": self.room, "is_freed": self.is_freed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["is_freed"]:
            self.plain, self.coded, self.tokens, self.ids = [], [], 0, []
            self.exact, self.loose, self.named, self.seat = True, None, 0, None
            self.prefix = Prefix()
        self.__dict__.update(state)

    def __len__(self) -> int:
        return self.tokens

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if self.is_freed:
            return "Sequence(freed)"
        pages = [*self.plain, *self.coded]
        shared = sum(page.holders > 1 for page in pages)
        coded = f", {len(self.coded)} of them codes" if self.coded else ""
        return f"Sequence({self.tokens:,} tokens in {len(pages)} pages{coded}, {shared} shared)"

    @property
    def sinks(self) -> int:
        """Pages at its front that stay plain, once they are there."""
        return self.room.sinks if self.loose is None else -(-self.loose[0] // self.room.page)

    @property
    def tail(self) -> int:
        """The number, counted in the sequence, of the first page behind its codes."""
        return self.sinks + len(self.coded)

    @property
    def front(self) -> int:
        """Tokens before that page, once they are there."""
        return self.tail * self.room.page if self.loose is None else sum(self.loose)

    def page_at(self, number: int) -> Page:
        """The page of this number in the sequence."""
        sinks = self.sinks
        if number < sinks:
            return self.plain[number]
        return self.coded[number - sinks] if number < self.tail else self.plain[number - len(self.coded)]

    def fork(self) -> "Sequence":
        """Another sequence with the same tokens so far, in the same pages.

        Raises:
            ProblemError: it was freed.
        """
        self.check()
        other = Sequence(self.room, self.ids.copy())
        other.plain, other.coded, other.tokens = self.plain.copy(), self.coded.copy(), self.tokens
        other.named, other.prefix, other.exact, other.loose = self.named, self.prefix, self.exact, self.loose
        for page in (*other.plain, *other.coded):  # each has a holder, so none is spare
            page.holders += 1
        self.seat = None
        return other

    def free(self) -> None:
        """Give its pages back; freeing twice is no error. Pages whose tokens are known can be found until taken."""
        if self.is_freed:
            return
        self.is_freed, self.seat = True, None
        self.room.sequences.discard(self)
        self.release(0)
        self.tokens = 0

    def __del__(self) -> None:
        if hasattr(self, "is_freed"):
            self.free()

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens: drafts that were not accepted.

        Of a page of codes of which only a part stays the numbers are taken as they came, if they are still there, or
        else as they are read from the codes: what comes next must fit behind them.

        Raises:
            ProblemError: there are fewer; it was freed; or the pool has no page left for what is read back.
        """
        self.check()
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= self.tokens:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(
                f"crop({tokens!r}): expected a number from 0 to the {self.tokens} tokens that are there."
            )
        crop([self], tokens)

    def behind(self, pages: int) -> list[Page]:
        """All its pages but the first ones, in order."""
        return [self.page_at(number) for number in range(pages, len(self.plain) + len(self.coded))]

    def release(self, pages: int) -> None:
        """Give back all but the first pages, the last first: what is found later begins at the front."""
        for page in reversed(self.behind(pages)):
            page.home.drop(page)
        kept, coded = max(min(pages, self.sinks), pages - len(self.coded)), max(pages - self.sinks, 0)
        del self.plain[kept:], self.coded[coded:]

    def filled(self) -> Iterator[tuple[Page, int]]:
        """Its pages, and how many tokens of each are its own."""
        first, coded = (self.sinks * self.room.page, 0) if self.loose is None else self.loose
        first = min(first, self.tokens)
        coded = len(self.coded) * self.room.page if self.loose is None else coded
        stretches = (
            (self.plain[: self.sinks], first),
            (self.coded, coded),
            (self.plain[self.sinks :], self.tokens - first - coded),
        )
        for pages, tokens in stretches:
            for number, page in enumerate(pages):
                yield page, min(tokens - number * self.room.page, self.room.page)

    def unname(self, pages: int) -> None:
        """At most so many of its first pages are known."""
        while self.named > pages:
            assert self.prefix.parent is not None
            self.named, self.prefix = self.named - 1, self.prefix.parent

    def check(self) -> None:
        """Raise `ProblemError` if it was freed."""
        if self.is_freed:
            raise ProblemError("the sequence was freed: its tokens are gone; make another with pool.sequence().")


def crop(sequences: list[Sequence], tokens: int) -> None:
    """Forget all but the first tokens of these sequences, which have as many or more.

    Raises:
        ProblemError: the pool has no page left for codes that are read back. Nothing was changed then.
    """
    if all(s.tokens == tokens for s in sequences):
        return
    if sequences[0].loose is not None:
        for s in sequences:
            _crop_loose(s, tokens)
        return
    room, whole = sequences[0].room, tokens // sequences[0].room.page
    partial = bool(tokens % room.page)
    sources = [s.page_at(whole) if partial and room.sinks <= whole < s.tail else None for s in sequences]
    gone = Counter(
        page
        for s, source in zip(sequences, sources, strict=True)
        for page in s.behind(whole if source is not None else whole + partial)
    )
    freed = {home: sum(p.holders == n and p.home is home for p, n in gone.items()) for home in (room.plain, room.coded)}
    back = [source for source in sources if source is not None]
    fresh = sum(source.twin is None or not source.twin.holders for source in back)
    room.check(fresh - sum(freed.values()), fresh)
    room.make(room.plain.used - freed[room.plain] + fresh, room.coded.used)
    read = {source: room.codes.read(source.number) for source in back if room.codes is not None and not source.twin}
    twins = [None if source is None else source.twin for source in sources]
    for twin in twins:
        if twin is not None:
            room.plain.hold(twin)
    for s, source in zip(sequences, sources, strict=True):
        s.release(whole if source is not None else whole + partial)
    for s, source, twin in zip(sequences, sources, twins, strict=True):
        if source is not None:
            s.plain.append(room.plain.take() if twin is None else twin)
            if twin is None:
                room.numbers.put(s.plain[-1].number, read[source])
                s.exact = False
        s.tokens, s.seat = tokens, None
        del s.ids[tokens:]
        s.unname(whole)


def _crop_loose(s: Sequence, tokens: int) -> None:
    """The same where pages may be part empty: none is read back, for the next tokens begin a page of their own."""
    assert s.loose is not None
    page, (first, coded) = s.room.page, s.loose
    first, coded = min(first, tokens), max(0, min(coded, tokens - first))
    behind = -(-(tokens - first - coded) // page)
    kept = [*s.plain[: -(-first // page)], *s.plain[s.sinks : s.sinks + behind]]
    for gone in reversed([*(p for p in s.plain if p not in kept), *s.coded[-(-coded // page) :]]):
        gone.home.drop(gone)
    del s.coded[-(-coded // page) :]
    s.plain, s.loose, s.tokens, s.seat = kept, (first, coded), tokens, None
