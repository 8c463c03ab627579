"""The files of view/: the modules joined into one script, the style sheet without comments, and the icon."""

import base64
import re
import struct
import zlib
from functools import cache
from importlib.resources import files

from regard.inspect.page.bundle import bundle


@cache
def view(name: str) -> str:
    """The text of a file of view/."""
    return files("regard.inspect.page").joinpath("view", name).read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style sheet without comments, and without blanks around braces, semicolons and commas."""
    bare = re.sub(r"/\*.*?\*/", "", view("page.css"), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*", r"\1", bare).replace(": ", ":").replace(";}", "}").strip()


@cache
def script() -> str:
    """The modules of view/ as one script; see `bundle`."""
    return bundle(lambda name: view(f"{name}.js"), "main")


@cache
def icon() -> str:
    """A causal mask, 8 x 8, as a PNG in base64. It is inside the page, so that browsers ask no server for one."""
    pixels = b"".join(b"\0" + b"".join(b"\x1f\x6f\xc0" + _shade(q, k) for k in range(8)) for q in range(8))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 6, 0, 0, 0)), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return base64.b64encode(png).decode("ascii")


def _shade(query: int, key: int) -> bytes:
    return bytes([0 if key > query else 255 - 30 * (query - key)])
