"""The pages of a pool, the names of what is in them, and its sequences as lists of numbers: what a pickle has of them.

Pages, names and sequences refer to one another in long chains, which a pickle would follow one call deep per page. So
pages are said by their numbers and names by their places in one list, parents first.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from regard.cache.pages import Page, Pages, Prefix

if TYPE_CHECKING:
    from regard.cache.room import Room
    from regard.cache.sequence import Sequence


def said_by_number(room: "Room") -> dict[str, Any]:
    """Pages, names, and of each sequence in `room.sequences` what it holds, in the order of a list of them."""
    names = _names(room)
    place = {id(name): i for i, name in enumerate(names)}
    return {
        "plain": _pages(room.plain),
        "coded": _pages(room.coded),
        "twins": [(page.number, page.twin.number) for page in room.plain.all if page.twin is not None],
        "names": [
            (
                -1 if name.parent is None else place[id(name.parent)],
                name.ids,
                _number(name.pages.get(room.plain)),
                _number(name.pages.get(room.coded)),
            )
            for name in names
        ],
        "sequences": [_held(cast("Sequence", sequence), place) for sequence in room.sequences],
    }


def read_by_number(room: "Room", sequences: "list[Sequence]", numbers: dict[str, Any]) -> None:
    """Have pages, names and sequences as they were said."""
    room.plain, room.coded = _made(numbers["plain"]), _made(numbers["coded"])
    for plain, coded in numbers["twins"]:
        page, twin = room.plain.all[plain], room.coded.all[coded]
        page.twin, twin.twin = twin, page
    names: list[Prefix] = []
    for parent, ids, plain, coded in numbers["names"]:
        name = Prefix() if parent < 0 else names[parent].after(tuple(ids))
        for home, number in ((room.plain, plain), (room.coded, coded)):
            if number is not None:
                name.add(home.all[number])
        names.append(name)
    room.root = names[0]
    for sequence, held in zip(sequences, numbers["sequences"], strict=True):
        sequence.room, sequence.is_freed, sequence.seat = room, False, None
        sequence.plain = [room.plain.all[number] for number in held["plain"]]
        sequence.coded = [room.coded.all[number] for number in held["coded"]]
        sequence.named, sequence.prefix = held["named"], names[held["prefix"]]
        sequence.tokens, sequence.ids, sequence.exact = held["tokens"], held["ids"], held["exact"]
        sequence.loose = None if held["loose"] is None else tuple(held["loose"])


def _names(room: "Room") -> list[Prefix]:
    """All names that can be found, parents first; the root first of all."""
    found = [room.root]
    for name in found:  # which grows meanwhile
        found.extend(name.later.values())
    return found


def _pages(pages: Pages) -> dict[str, list[int]]:
    return {"holders": [page.holders for page in pages.all], "spare": [page.number for page in pages.spare]}


def _made(said: dict[str, list[int]]) -> Pages:
    pages = Pages()
    pages.all = [Page(pages, number) for number in range(len(said["holders"]))]
    for page, holders in zip(pages.all, said["holders"], strict=True):
        page.holders = holders
    pages.spare = OrderedDict((pages.all[number], None) for number in said["spare"])
    return pages


def _held(sequence: "Sequence", place: dict[int, int]) -> dict[str, Any]:
    is_found = id(sequence.prefix) in place  # else others cut it off, and its pages are named anew from the first
    return {
        "plain": [page.number for page in sequence.plain],
        "coded": [page.number for page in sequence.coded],
        "tokens": sequence.tokens,
        "ids": sequence.ids,
        "exact": sequence.exact,
        "loose": sequence.loose,
        "named": sequence.named if is_found else 0,
        "prefix": place[id(sequence.prefix)] if is_found else 0,
    }


def _number(page: Page | None) -> int | None:
    return None if page is None else page.number
