"""Prompts that begin alike: pages are named by the ids of their tokens, and found by the next that has the same.

Only whole pages are named, each behind the name of the one before it, for a key depends on all tokens before its own.
"""

from regard.cache.pages import Page, Prefix
from regard.cache.sequence import Sequence


def adopt(s: Sequence) -> None:
    """Begin an empty sequence with the pages that are known for its ids; its last token is always left to compute.

    A page is taken as codes only where it would be codes once the whole prompt is there, so the sequence becomes what
    it would be had it been computed anew.
    """
    room, node = s.room, s.room.root
    coded = room.coded_pages(len(s.ids))
    for number in range((len(s.ids) - 1) // room.page):
        found = node.later.get(_ids_of(s, number))
        page = None if found is None else _page(s, found, number, coded)
        if found is None or page is None or (room.used == room.limit and not page.holders):
            break
        page.home.hold(page)
        (s.coded if page.home is room.coded else s.plain).append(page)
        s.named, s.prefix, node = number + 1, found, found
    s.tokens = s.named * room.page


def name(s: Sequence) -> None:
    """Let the pages of a sequence be found that are full and whose ids are known."""
    full = min(s.tokens, len(s.ids)) // s.room.page
    if s.named >= full or not s.exact:
        return
    if not s.prefix.is_linked:  # others held its pages, and gave them up: begin again with its own
        s.named, s.prefix = 0, s.room.root
    for number in range(s.named, full):
        s.prefix = s.prefix.after(_ids_of(s, number))
        s.prefix.add(s.page_at(number))
    s.named = full


def _ids_of(s: Sequence, number: int) -> tuple[int, ...]:
    page = s.room.page
    return tuple(s.ids[number * page : (number + 1) * page])


def _page(s: Sequence, found: Prefix, number: int, coded: int) -> Page | None:
    """The page to go on with: codes behind the sinks first, then plain ones only."""
    room = s.room
    plain = found.pages.get(room.plain)
    if room.sinks <= number < coded and number == s.tail:
        return found.pages.get(room.coded, plain)
    return plain
