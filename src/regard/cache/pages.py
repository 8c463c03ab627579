"""Pages by number: who holds them, what stands in those that nobody holds, and which goes first when one is needed.

A page that no sequence holds is spare. If the tokens in it are known it can still be found, by the next prompt that
begins alike, until it is taken for something else; those without names go first, then the one that was given up
longest ago. Pages: Kwon et al. 2023, arXiv:2309.06180, §4. They are found in a tree of token ids, where what is equal
is compared and not only hashed: SGLang, Zheng et al. 2024, arXiv:2312.07104, §3.
"""

from collections import OrderedDict


class Page:
    """Room for some tokens of one sequence, or of several that have the same tokens up to there.

    Attributes:
        home: the pages that it is one of.
        number: which of them, from 0: where it lies in memory.
        holders: how many sequences hold it; 0: it is spare.
        prefix: the tokens in it, and all before them, where they are known.
        twin: the page of the other form that holds the same tokens.
    """

    __slots__ = ("holders", "home", "number", "prefix", "twin")

    def __init__(self, home: "Pages", number: int) -> None:
        self.home, self.number, self.holders = home, number, 0
        self.prefix: Prefix | None = None
        self.twin: Page | None = None

    def forget(self) -> None:
        """What stood in it will be written over: nobody may find it any more."""
        if self.twin is not None:
            self.twin.twin = self.twin = None
        if self.prefix is not None:
            self.prefix.remove(self)

    def __repr__(self) -> str:
        return f"Page({self.number}, held by {self.holders})"


class Prefix:
    """A node of the tree of what is known: the ids of one page's tokens, behind those of its parent.

    Attributes:
        later: the nodes behind it, by the ids of their tokens.
        pages: where the tokens are to be found, one page of each form.
    """

    __slots__ = ("ids", "later", "pages", "parent")

    def __init__(self, parent: "Prefix | None" = None, ids: tuple[int, ...] = ()) -> None:
        self.parent, self.ids = parent, ids
        self.later: dict[tuple[int, ...], Prefix] = {}
        self.pages: dict[Pages, Page] = {}

    @property
    def is_linked(self) -> bool:
        """Whether it can be reached from the root: nodes that hold no page and lead to none are cut off."""
        return self.parent is None or self.parent.later.get(self.ids) is self

    def after(self, ids: tuple[int, ...]) -> "Prefix":
        """The node of these ids behind this one, made if it is missing."""
        found = self.later.get(ids)
        if found is None:
            found = self.later[ids] = Prefix(self, ids)
        return found

    def add(self, page: Page) -> None:
        """This page holds the tokens; the first that does is the one to be found."""
        if page.prefix is None and page.home not in self.pages:
            self.pages[page.home], page.prefix = page, self

    def remove(self, page: Page) -> None:
        """This page holds them no longer."""
        del self.pages[page.home]
        page.prefix = None
        self.prune()

    def prune(self) -> None:
        """Cut off the node, and those before it, unless they hold a page or lead to one."""
        node = self
        while (parent := node.parent) is not None and not node.pages and not node.later and node.is_linked:
            del parent.later[node.ids]
            node = parent


class Pages:
    """All pages of one memory.

    >>> pages = Pages()
    >>> pages.grow(2)
    >>> first, second = pages.take(), pages.take()
    >>> pages.hold(second)
    >>> pages.drop(second), pages.drop(first), pages.used, len(pages.spare)
    (None, None, 1, 1)
    """

    def __init__(self) -> None:
        self.all: list[Page] = []
        self.spare: OrderedDict[Page, None] = OrderedDict()  # in the order in which they are taken

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return len(self.all) - len(self.spare)

    def grow(self, count: int) -> None:
        """Have so many, none of them fewer than now."""
        made = [Page(self, number) for number in range(len(self.all), count)]
        self.all += made
        for page in reversed(made):  # before those that still hold something known, the lowest number first
            self.spare[page] = None
            self.spare.move_to_end(page, last=False)

    def shrink(self, count: int) -> list[int]:
        """Have so many, those that are held the first of them; what stood in the others is forgotten.

        Returns:
            The numbers that those that are held had, in the order of what they have now.
        """
        held = [page for page in self.all if page.holders]
        for page in self.spare:
            page.forget()
        numbers = [page.number for page in held]
        for number, page in enumerate(held):
            page.number = number
        self.all = held
        self.spare.clear()
        self.grow(count)
        return numbers

    def take(self) -> Page:
        """A spare page, for one holder; what stood in it is forgotten. The caller made sure that there is one."""
        page, _ = self.spare.popitem(last=False)
        page.forget()
        page.holders = 1
        return page

    def hold(self, page: Page) -> None:
        """One holder more; it may be spare."""
        if not page.holders:
            del self.spare[page]
        page.holders += 1

    def drop(self, page: Page) -> None:
        """One holder less; the last makes it spare."""
        page.holders -= 1
        if not page.holders:
            self.spare[page] = None
            if page.prefix is None and page.twin is None:
                self.spare.move_to_end(page, last=False)
