"""docs/caches.md: one page, of which `./bench caches` and `./bench cache-quality` each write their own part.

A part stands between two marks, which do not show. What stands outside of them is written by hand.
"""

from collections.abc import Mapping
from pathlib import Path

from regard.errors import ProblemError
from regard.inspect.page import write_whole

PAGE = "caches.md"


def write_part(docs: Path, name: str, text: str, pictures: Mapping[str, str]) -> Path:
    """Put a part into the page, and write its pictures, each file whole or not at all; the page last, as it shows them.

    Args:
        docs: the folder.
        name: of the part, as its marks say it.
        text: Markdown.
        pictures: SVGs by the names of their files.

    Raises:
        ProblemError: the page is not there, or lacks the marks; nothing is written then.
    """
    page, whole = docs / PAGE, with_part(read_page(docs), name, text)
    for file, picture in pictures.items():
        write_whole(docs / file, picture.encode())
    write_whole(page, whole.encode())
    return page


def read_page(docs: Path) -> str:
    """The page as it is.

    Raises:
        ProblemError: it is not there.
    """
    page = docs / PAGE
    if not page.is_file():
        raise ProblemError(f"there is no {page}, into which this part is put: name the folder of the page with --docs.")
    return page.read_text(encoding="utf-8")


def with_part(page: str, name: str, text: str) -> str:
    r"""The page with this part in place of what it had.

    Raises:
        ProblemError: it lacks the marks.

    >>> print(with_part("A\n<!-- begin b -->\nold\n<!-- end b -->\nC", "b", "new"))
    A
    <!-- begin b -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end b -->
    C
    """
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, begun, rest = page.partition(first)
    _, ended, after = rest.partition(last)
    if not begun or not ended:
        raise ProblemError(f"{PAGE} has no part between {first} and {last}: put these two lines where it shall stand.")
    return f"{before}{first}\n\n{text.strip()}\n\n{last}{after}"
