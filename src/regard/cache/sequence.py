"""A sequence of a pool: its block table, and how pages are shared, cropped, freed and found again."""

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor

from regard.cache.page_storage import PageStorage
from regard.cache.pages import BlockTable, Page, PrefixNode
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.torch_internals import leave_out_of_graphs


class Sequence(BlockTable):
    """The tokens of one text, in pages of a pool. `PagePool.sequence` creates it, `PagePool.append` adds tokens.

    Forks, and other sequences that begin with the same tokens, share its pages until one of them writes to a page.
    When nothing refers to a sequence any more, the next call of its pool frees its pages; `free()` frees them now.
    """

    def __init__(self, storage: PageStorage, ids: list[int] | None = None) -> None:
        super().__init__(storage.page, storage.sink_pages, storage.root, [] if ids is None else ids)
        self.storage = storage
        self.is_freed = False
        storage.held.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """The storage, whose state has the block tables of all sequences that are not freed."""
        return {"storage": self.storage, "is_freed": self.is_freed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["is_freed"]:
            storage: PageStorage = state["storage"]
            super().__init__(storage.page, storage.sink_pages, PrefixNode(), [])
        self.storage, self.is_freed = state["storage"], state["is_freed"]

    def __len__(self) -> int:
        return self.tokens

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if self.is_freed:
            return "Sequence(freed)"
        pages = [*self.plain, *self.coded]
        shared = sum(page.references > 1 for page in pages)
        coded = f", {len(self.coded)} of them codes" if self.coded else ""
        return f"Sequence({self.tokens:,} tokens in {len(pages)} pages{coded}, {shared} shared)"

    def fork(self) -> "Sequence":
        """Another sequence with the same tokens so far, in the same pages.

        Raises:
            ProblemError: the sequence was freed.
        """
        self.check_usable()
        with self.storage.exclusive:
            other = Sequence(self.storage, self.ids.copy())
            other.tokens, other.indexed, other.node = self.tokens, self.indexed, self.node
            other.is_exact, other.segments = self.is_exact, self.segments
            self.batch = None  # a page that both have is copied before one of them writes to it
            try:
                other.plain[:], other.coded[:] = self.plain, self.coded
                for page in (*other.plain, *other.coded):  # each has a reference, so none is free
                    page.references += 1
            except BaseException:  # Ctrl-C: `other` would release pages that it has not retained
                self.storage.count_references()
                raise
        return other

    def __copy__(self) -> "Sequence":
        return self.fork()

    def free(self) -> None:
        """Release its pages; a second call does nothing. Pages with known tokens can be found until they are reused."""
        if self.is_freed:
            return
        with self.storage.exclusive:
            try:
                self.is_freed, self.batch = True, None
                self.storage.held.discard(self)
                self.release_from(0)
                self.tokens = 0
            except BaseException:  # Ctrl-C: a second call would release nothing
                self.is_freed, self.batch, self.tokens = True, None, 0
                self.storage.held.discard(self)
                del self.plain[:], self.coded[:]
                self.storage.count_references()
                raise

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` tokens, for example drafts that were not accepted.

        The ids of later tokens are forgotten, also those of a prompt whose tokens were not yet appended.

        If the crop ends inside a page of codes, the rest of that page becomes a plain page again: with the original
        elements if they are still stored, else with the decoded ones. Whole pages that are codes only because of the
        removed tokens become plain again if their original elements are still stored, and the pool has room for these.

        Raises:
            ProblemError: there are fewer tokens; the sequence was freed; or the pool has no page left for what becomes
                plain again.
        """
        self.check_usable()
        tokens = whole(tokens, "the argument of crop")
        if not 0 <= tokens <= self.tokens:
            raise ProblemError(f"crop({tokens}): expected 0 to {self.tokens}, the tokens that are stored.")
        crop_sequences([self], tokens)

    def release_from(self, position: int) -> None:
        """Release all pages from a position on."""
        self.release_pages(position)
        plain = max(min(position, self.front_pages), position - len(self.coded))
        coded = max(position - self.front_pages, 0)
        del self.plain[plain:], self.coded[coded:]

    def release_pages(self, position: int) -> None:
        """The same, with the pages left in its lists. The last goes first: a prompt is found again from its front."""
        for page in reversed(self.pages_from(position)):
            page.allocator.release(page)

    def adopt_known_pages(self) -> None:
        """Start an empty sequence with the pages that are known for its ids; its last token is always left to compute.

        A page of codes is adopted only where it would be codes once the whole prompt is stored. So the sequence becomes
        what it would be if the whole prompt were computed.
        """
        storage, node = self.storage, self.storage.root
        coded_end = storage.coded_page_end(len(self.ids))
        for position in range((len(self.ids) - 1) // self.page):
            child = node.children.get(self.page_ids(position))
            page = None if child is None else self._known_page(child, position, coded_end)
            if child is None or page is None or (storage.used == storage.limit and not page.references):
                break
            page.allocator.retain(page)
            (self.coded if page.allocator is storage.coded else self.plain).append(page)
            self.indexed, self.node, node = position + 1, child, child
        self.tokens = self.indexed * self.page

    def index_pages(self) -> None:
        """Let other sequences find the pages that are full and whose token ids are known.

        Only full pages are indexed, each after the page before it, because a key depends on all tokens before its own.
        """
        full = min(self.tokens, len(self.ids)) // self.page
        if self.indexed >= full or not self.is_exact:
            return
        if not self.node.is_reachable:  # other sequences freed the pages of the node: index its own from the first
            self.indexed, self.node = 0, self.storage.root
        for position in range(self.indexed, full):
            self.node = self.node.child(self.page_ids(position))
            self.node.add(self.page_at(position))
        self.indexed = full

    def check_usable(self) -> None:
        """Raise `ProblemError` if the sequence was freed."""
        if self.is_freed:
            raise ProblemError("the sequence was freed: its tokens are gone; make another with pool.sequence().")

    def _known_page(self, node: PrefixNode, position: int, coded_end: int) -> Page | None:
        """The page of the node to adopt: codes after the sink pages as long as they follow one another, else plain."""
        storage = self.storage
        plain = node.pages.get(storage.plain)
        if storage.sink_pages <= position < coded_end and position == self.tail_page:
            return node.pages.get(storage.coded, plain)
        return plain


def crop_sequences(sequences: list[Sequence], tokens: int) -> None:
    """Remove all but the first `tokens` tokens of each sequence; each has at least as many.

    Raises:
        ProblemError: the pool has no page left for codes that become plain. Nothing was changed then.
    """
    if all(s.tokens == tokens for s in sequences):
        for s in sequences:
            del s.ids[tokens:]
        return
    with sequences[0].storage.exclusive:
        _crop_shorter(sequences, tokens)


for _change in (Sequence.fork, Sequence.free, crop_sequences):  # pages are no part of a graph
    leave_out_of_graphs(_change)


def _crop_shorter(sequences: list[Sequence], tokens: int) -> None:
    """`crop_sequences` of sequences of which one has more tokens."""
    crop = _affordable(sequences, tokens) if sequences[0].segments is None else None
    try:
        if crop is not None:
            _crop_pages(sequences, tokens, crop)
        else:
            for s in sequences:
                _crop_segments(s, tokens)
    except KeyboardInterrupt:  # what is left of the pages is not what the sequences say
        for s in sequences:
            s.free()
        sequences[0].storage.count_references()
        raise


class _Crop(NamedTuple):
    """What a crop does to the pages of sequences.

    Attributes:
        first: position of the first page that is plain afterwards, behind the sinks.
        sources: of each sequence, the pages of codes that become plain.
        twins: the pages with their original elements; None: they are decoded.
        new: pages to be allocated.
        more: pages in use afterwards, less those in use now.
        new_plain: the same of plain pages.
    """

    first: int
    sources: list[list[Page]]
    twins: dict[Page, Page | None]
    new: int
    more: int
    new_plain: int


def _affordable(sequences: list[Sequence], tokens: int) -> _Crop:
    """The crop for which the pool has pages, with memory for them."""
    storage, cut = sequences[0].storage, max(_first_cut(s, tokens) for s in sequences)
    crop = _planned(sequences, tokens, max(_first_restored(s, tokens) for s in sequences))
    if crop.first < cut and not storage.has_free(crop.more):
        crop = _planned(sequences, tokens, cut)  # whole pages stay codes
    storage.check_free(crop.more, crop.new)
    storage.reserve(storage.plain.used + crop.new_plain, storage.coded.used)
    return crop


def _planned(sequences: list[Sequence], tokens: int, first: int) -> _Crop:
    storage, page = sequences[0].storage, sequences[0].page
    sinks, end = storage.sink_pages, -(-tokens // page)
    sources = [s.coded[first - sinks : max(end - sinks, 0)] for s in sequences]
    twins = {
        source: source.twin_with(min(tokens - position * page, page))
        for own in sources
        for position, source in enumerate(own, first)
    }
    removed = Counter(p for s, own in zip(sequences, sources, strict=True) for p in (*own, *s.pages_from(end)))
    freed = [p for p, n in removed.items() if p.references == n]
    new = sum(twins[source] is None for own in sources for source in own)
    new += sum(twin is not None and not twin.references for twin in twins.values())
    plain = sum(p.allocator is storage.plain for p in freed)
    return _Crop(first, sources, twins, new, new - len(freed), new - plain)


def _crop_pages(sequences: list[Sequence], tokens: int, crop: _Crop) -> None:
    storage, sources, twins = sequences[0].storage, crop.sources, crop.twins
    sinks, memory = storage.sink_pages, storage.coded_memory
    decoded = {source: memory.read(source.index) for source in twins if memory is not None and twins[source] is None}
    for own in sources:
        for twin in (twins[source] for source in own):
            if twin is not None:
                storage.plain.retain(twin)
    for s, own in zip(sequences, sources, strict=True):
        s.release_from(-(-tokens // s.page))
        for source in reversed(own):
            storage.coded.release(source)
        del s.coded[crop.first - sinks :]
    for s, own in zip(sequences, sources, strict=True):
        s.is_exact = s.is_exact and all(twins[source] is not None for source in own)
        s.plain[sinks:sinks] = [twins[source] or _decoded_page(storage, decoded[source]) for source in own]
        s.tokens, s.batch = tokens, None
        del s.ids[tokens:]
        s.unindex(tokens // s.page)


def _first_cut(s: Sequence, tokens: int) -> int:
    """Position of the first plain page behind the sinks, once only the first `tokens` tokens are left."""
    return max(min(s.tail_page, tokens // s.page), s.sink_pages)


def _first_restored(s: Sequence, tokens: int) -> int:
    """The same if whole pages that would be plain without the removed tokens become plain.

    Only those whose original elements are stored do.
    """
    first, coded_end = _first_cut(s, tokens), s.storage.coded_page_end(tokens)
    while first > coded_end and s.page_at(first - 1).twin_with(s.page) is not None:
        first -= 1
    return first


def _decoded_page(storage: PageStorage, elements: tuple[Tensor, Tensor]) -> Page:
    """A new plain page with these keys and values, [kv_heads, page, dim]."""
    page = storage.plain.allocate()
    storage.plain_memory.write_page(page.index, elements)
    return page


def _crop_segments(s: Sequence, tokens: int) -> None:
    """Crop where pages may be partly empty: no page is decoded, because the next tokens begin a page of their own."""
    assert s.segments is not None
    page, (front, coded) = s.page, s.segments
    front, coded = min(front, tokens), max(0, min(coded, tokens - front))
    tail_pages = -(-(tokens - front - coded) // page)
    kept = [*s.plain[: -(-front // page)], *s.plain[s.front_pages : s.front_pages + tail_pages]]
    coded_pages = -(-coded // page)
    for removed in reversed([*(p for p in s.plain if p not in kept), *s.coded[coded_pages:]]):
        removed.allocator.release(removed)
    del s.coded[coded_pages:]
    s.plain[:], s.segments, s.tokens, s.batch = kept, (front, coded), tokens, None
