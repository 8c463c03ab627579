"""The page: a report as one HTML file that opens by a double click and asks the network for nothing.

```
report -> scores and tokens as JSON  +  the pictures of each layer, deflated, in base64  +  view/*.{html,css,js}
```

A causal picture stores its lower half only, row by row: 270 heads of 181 tokens take 3.4 MB of base64. The same report
gives the same bytes. A Content-Security-Policy in the file allows its own script and style, by hash, and nothing
else: a token can be any text, is escaped in the JSON, and is only ever shown as text.
"""

import base64
import hashlib
import html
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.inspect.report import DEFINITIONS, Head, Picture, Report

SCRIPTS = ("data", "colour", "state", "map", "matrix", "plot", "pair", "side", "reading", "table", "page")
"""The files of view/ that make up the script, in order; each may use what stands before it."""

COMMENT = re.compile(r"(?:^|\s)// .*")
"""A comment in them, to the end of its line. No text there has two strokes between spaces."""

BLANKS = re.compile(r"\s*([=+\-*<>?:,;(){}\[\]&|!%])\s*")

UNITS = {"entropy": "nats", "effective_tokens": "tokens"}
LABELS = {"previous": "previous token"}


def write_page(report: Report, path: str | os.PathLike[str]) -> int:
    """Write the page to a file, and say how many bytes it has. What was there before is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    content = page(report).encode("utf-8", errors="replace")  # a lone surrogate in a file's name, say
    return write_whole(Path(path), content)


def write_whole(path: Path, content: bytes) -> int:
    """Write a file whole or not at all: beside its place first, and then into it. A device is written to as it is."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        return path.write_bytes(content)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        written = part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return written


def page(report: Report) -> str:
    """The page as text: HTML, style, script, scores and pictures in one."""
    style, script = _style(), _script()
    blocks = list(_blocks(report))
    return Template(_view("page.html")).substitute(
        policy=_policy(style, script),
        title=html.escape(f"{report.run.model} · regard"),
        model=html.escape(report.run.model),
        icon=_icon(),
        style=style,
        script=script,
        report=as_json(_content(report, blocks)),
        pictures="\n".join(f'<script type="text/plain" id="{_id(layer)}">{data}</script>' for layer, _, data in blocks),
    )


def as_json(value: Any) -> str:
    r"""JSON that can stand inside a `<script>`: ASCII, without `<`, `>` and `&`; NaN and infinities are null.

    >>> print(as_json({"token": "</script>", "score": float("nan")}))
    {"token":"\u003c/script\u003e","score":null}
    """
    text = json.dumps(finite(value, digits=6), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


# ---- scores ---------------------------------------------------------------------------------------------------------


def _content(report: Report, blocks: "list[_Block]") -> dict[str, Any]:
    columns = [field.name for field in fields(Head)]
    return {
        "run": asdict(report.run),
        "tokens": report.tokens,
        "prompt_tokens": report.prompt_tokens,
        "measures": list(_measures(columns)),
        "definitions": {name: definition._asdict() for name, definition in DEFINITIONS.items()},
        "heads": {"columns": columns, "rows": [[getattr(head, name) for name in columns] for head in report.heads]},
        "pictures": {
            "causal": is_causal(report.pictures),
            "blocks": [{"id": _id(layer), "pictures": list(map(_caption, pictures))} for layer, pictures, _ in blocks],
        },
    }


def _measures(columns: list[str]) -> Iterator[dict[str, Any]]:
    """Every score of a head, in the order of its fields: what the page can colour, sort and explain."""
    for name in columns:
        if name in DEFINITIONS and name != "kind":
            chance = f"{name}_chance"
            yield {
                "key": name,
                "label": LABELS.get(name, name.replace("_", " ")),
                "unit": UNITS.get(name),
                "chance": chance if chance in columns else None,
            }


def finite(value: Any, digits: int | None = None) -> Any:
    """The value with null for what JSON cannot say, NaN and infinities, and floats to so many digits (None: all).

    >>> finite({"scores": (1 / 3, float("inf"))}, digits=3)
    {'scores': [0.333, None]}
    """
    match value:
        case dict():
            return {str(key): finite(item, digits) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [finite(item, digits) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case float():
            return None if not math.isfinite(value) else value if digits is None else float(f"{value:.{digits}g}")
        case _:
            return value


# ---- pictures -------------------------------------------------------------------------------------------------------

_Block = tuple[int, list[Picture], str]  # layer, its pictures, their bytes in base64


def _blocks(report: Report) -> Iterator[_Block]:
    """The pictures of each layer in one block: little to unpack at a time, so that a page fills as one looks."""
    causal = is_causal(report.pictures)
    ordered = sorted(report.pictures, key=lambda picture: (picture.layer, picture.head))
    for layer, group in groupby(ordered, key=lambda picture: picture.layer):
        pictures = list(group)
        yield layer, pictures, pack(pictures, causal)


def is_causal(pictures: Iterable[Picture]) -> bool:
    """Whether no query of any picture reads a later key, so that the lower half is all there is."""
    return not any(np.triu(picture.weights, 1).any() for picture in pictures)


def pack(pictures: Iterable[Picture], causal: bool) -> str:
    """Pictures one after the other, row by row, deflated without a header (RFC 1951), in base64.

    On real attention Z_FILTERED saves 5 % against zlib's default; storing columns or diagonals, or differences between
    neighbours, saves no more than another 1 %.
    """
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    packed = b"".join(deflate.compress(_cells(picture.weights, causal).tobytes()) for picture in pictures)
    return base64.b64encode(packed + deflate.flush()).decode("ascii")


def unpack(data: str, sizes: Iterable[int], causal: bool) -> list[NDArray[np.uint8]]:
    """The pictures that `pack` packed, from their sizes: what the page's script does, for tests and other readers."""
    cells = np.frombuffer(zlib.decompress(base64.b64decode(data), -zlib.MAX_WBITS), np.uint8)
    pictures: list[NDArray[np.uint8]] = []
    for size in sizes:
        picture = np.zeros((size, size), np.uint8)
        kept = np.tri(size, dtype=bool) if causal else np.ones((size, size), bool)
        count = int(kept.sum())
        picture[kept], cells = cells[:count], cells[count:]
        pictures.append(picture)
    return pictures


def _cells(weights: NDArray[np.uint8], causal: bool) -> NDArray[np.uint8]:
    return weights[np.tri(len(weights), dtype=bool)] if causal else weights.ravel()


def _caption(picture: Picture) -> dict[str, Any]:
    return {"head": f"{picture.layer}.{picture.head}", "size": picture.size, "pooled": picture.pooled}


def _id(layer: int) -> str:
    return f"layer-{layer}"


# ---- the file -------------------------------------------------------------------------------------------------------


@cache
def _view(name: str) -> str:
    return files("regard.inspect").joinpath("view", name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """The style sheet without comments, and without the blanks around its braces, semicolons and commas."""
    bare = re.sub(r"/\*.*?\*/", "", _view("page.css"), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*", r"\1", bare).replace(": ", ":").replace(";}", "}").strip()


@cache
def _script() -> str:
    """The script's files as one, in a scope of their own, without comments, indentation and needless blanks."""
    lines = (_tight(line) for name in SCRIPTS for line in _view(f"{name}.js").splitlines())
    return "\n".join(['"use strict";(() => {', *filter(None, lines), "})();"])


def _tight(line: str) -> str:
    """A line of script without its comment, and without blanks around signs before its first quote and after its last.

    >>> _tight('  const note = pooled > 1 ? "a  b" : 0; // why')
    'const note=pooled>1?"a  b":0;'
    """
    code = COMMENT.sub("", line).strip()
    start, quoted, end = re.fullmatch(r"([^\"'`/]*)(.*[\"'`/])?(.*)", code).groups(default="")  # pyright: ignore[reportOptionalMemberAccess]
    return BLANKS.sub(r"\1", start) + quoted + BLANKS.sub(r"\1", end)


def _policy(style: str, script: str) -> str:
    """What the browser may do with the file: run this script and this style, show the icon. No address is allowed."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


@cache
def _icon() -> str:
    """A causal mask, 8 x 8, as a PNG in base64. It is inside the page, so that browsers ask no server for one."""
    pixels = b"".join(b"\0" + b"".join(b"\x1f\x6f\xc0" + _shade(q, k) for k in range(8)) for q in range(8))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 6, 0, 0, 0)), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return base64.b64encode(png).decode("ascii")


def _shade(query: int, key: int) -> bytes:
    return bytes([0 if key > query else 255 - 30 * (query - key)])
