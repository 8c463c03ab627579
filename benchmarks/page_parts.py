"""Pages of docs/ of which commands write parts: `./bench caches` and `./bench cache-quality` one each of caches.md.

A part is between two marks, which are HTML comments. The rest of the page is written by hand.
"""

from collections.abc import Mapping
from pathlib import Path

from regard.atomic_write import write_whole
from regard.errors import ProblemError


def write_part(page: Path, name: str, text: str, pictures: Mapping[str, str] | None = None) -> Path:
    """Put a part into a page, and write its pictures, each file whole or not at all; the page last, as it shows them.

    Args:
        name: of the part, as its marks say it.
        text: Markdown.
        pictures: SVGs by the names of their files, which go beside the page.

    Raises:
        ProblemError: the page is not there, or lacks the marks; nothing is written then.
    """
    whole = with_part(page, name, text)
    for file, picture in (pictures or {}).items():
        write_whole(page.parent / file, picture.encode())
    write_whole(page, whole.encode())
    return page


def with_part(page: Path, name: str, text: str) -> str:
    """The page with this part in place of what it had.

    Raises:
        ProblemError: it is not there, or lacks the marks.
    """
    if not page.is_file():
        raise ProblemError(f"there is no {page}, into which this part is put: name its folder with --write FOLDER.")
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, begun, rest = page.read_text(encoding="utf-8").partition(first)
    _, ended, after = rest.partition(last)
    if not begun or not ended:
        raise ProblemError(f"{page.name} has no part between {first} and {last}: add these two lines to the page.")
    return f"{before}{first}\n\n{text.strip()}\n\n{last}{after}"
