"""Pictures and close-ups packed for the page: bytes, deflated without a header (RFC 1951), in base64.

Pictures are packed layer by layer, so that the page can show the first ones early. A causal picture stores its lower
half only, row by row: 270 heads of 181 tokens take 3.4 MB of base64.

Close-ups are packed head by head: queries, keys and the log of the softmax denominator of each row. Queries and keys
are quantised to 16 bit integers with a scale for each dimension: the size of float16 and ten times as exact, since the
rounding of the largest terms decides the error of a score. On SmolLM2-135M over 1,024 tokens weights above 0.0001 have
a relative error of 0.14 % at most, with float16 1.4 %. Elements of several bytes are stored as byte planes, all lowest
bytes first, which deflate better. Heads that share a key head share its keys.

A page stays below a number of bytes. Scores and mean pictures are always included. Then, while they fit: the pictures
of greatest weights, the close-ups of this report's heads, most remarkable first, and those of the report that it is
compared with. The page says how many were left out.
"""

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.inspect.names import head_text
from regard.inspect.surveying.closeup import close_up_rows
from regard.inspect.surveying.report import CloseUp, Picture, Report

Cells = NDArray[np.uint8]


class Block(NamedTuple):
    """The pictures of one layer, by mean or by greatest weight, as one base64 text."""

    id: str
    by: str
    pictures: list[dict[str, Any]]
    data: str


def blocks(pictures: Iterable[Picture], causal: bool, by: str, prefix: str = "") -> Iterator[Block]:
    """The pictures by "mean" or "max", a block for each layer; pictures without one are skipped."""
    ordered = sorted(pictures, key=lambda picture: (picture.layer, picture.head))
    for layer, group in groupby(ordered, key=lambda picture: picture.layer):
        cells = [(picture, picture.weights if by == "mean" else picture.largest) for picture in group]
        present = [(picture, squares) for picture, squares in cells if squares is not None]
        if present:
            captions = [{"head": f"{p.layer}.{p.head}", "size": p.size, "pooled": p.pooled} for p, _ in present]
            yield Block(f"{prefix}{by}-{layer}", by, captions, pack((squares for _, squares in present), causal))


def is_causal(pictures: Iterable[Picture]) -> bool:
    """Whether no query of any picture attends to a later key, so that the lower half is enough."""
    both = ((picture.weights, picture.largest) for picture in pictures)
    return not any(np.triu(cells, 1).any() for pair in both for cells in pair if cells is not None)


def pack(pictures: Iterable[Cells], causal: bool) -> str:
    """Pictures one after the other, row by row, deflated, in base64.

    On real attention Z_FILTERED saves 5 % against zlib's default; storing columns or diagonals, or differences between
    neighbours, saves no more than another 1 %, and level 9 saves 0.3 % against level 6 in 1.6 times the time.
    """
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    stored = (cells[np.tri(len(cells), dtype=bool)] if causal else cells for cells in pictures)
    packed = b"".join(deflate.compress(cells.tobytes()) for cells in stored)
    return base64.b64encode(packed + deflate.flush()).decode("ascii")


def unpack(data: str, sizes: Iterable[int], causal: bool) -> list[Cells]:
    """The pictures that `pack` packed, from their sizes, as the script of the page does it."""
    cells = np.frombuffer(zlib.decompress(base64.b64decode(data), -zlib.MAX_WBITS), np.uint8)
    pictures: list[Cells] = []
    for size in sizes:
        picture = np.zeros((size, size), np.uint8)
        stored = np.tri(size, dtype=bool) if causal else np.ones((size, size), bool)
        count = int(stored.sum())
        picture[stored], cells = cells[:count], cells[count:]
        pictures.append(picture)
    return pictures


CHECKED_ROWS = 8
"""Rows at which a packed close-up is compared with the original."""

LEAST_WEIGHT = 1e-4
"""The least weight whose error counts; smaller ones have no colour."""


class PackedCloseUp(NamedTuple):
    """One close-up: its caption, and its base64 blocks by id; several close-ups may share a block."""

    caption: dict[str, Any]
    blocks: dict[str, str]


class Quantised(NamedTuple):
    """Elements [tokens, dim] as integers, and the scale [dim] of each dimension."""

    codes: NDArray[np.int16]
    scale: NDArray[np.float32]

    @property
    def values(self) -> NDArray[np.float32]:
        """The elements, dequantised."""
        return self.codes * self.scale


def pack_close_ups(close_ups: Iterable[CloseUp], prefix: str = "") -> Iterator[PackedCloseUp]:
    """The close-ups as the page stores them, in their order."""
    names: dict[tuple[int, bytes], str] = {}
    data: dict[str, str] = {}
    for close in close_ups:
        q, k = quantise(close.q), quantise(close.k)
        digest = close.layer, hashlib.sha256(k.codes.tobytes() + k.scale.tobytes()).digest()
        if digest not in names:
            names[digest] = f"{prefix}keys-{close.layer}-{sum(layer == close.layer for layer, _ in names)}"
            data[names[digest]] = deflate_arrays(*k[::-1])
        own = f"{prefix}close-{close.layer}-{close.head}"
        caption = _close_up_caption(close, own, names[digest]) | {"error": relative_error(close, q, k)}
        yield PackedCloseUp(caption, {own: _rows(close, q), names[digest]: data[names[digest]]})


def quantise(elements: NDArray[np.floating[Any]]) -> Quantised:
    """Symmetric quantisation to 16 bits: the scale of a dimension is its largest magnitude / 32,767."""
    exact = np.asarray(elements, np.float64)
    scale = np.abs(exact).max(axis=0, initial=0.0) / np.iinfo(np.int16).max
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    return Quantised(np.clip(np.round(exact / scale), -32767, 32767).astype(np.int16), scale)


def relative_error(close: CloseUp, q: Quantised, k: Quantised) -> float:
    """The greatest relative error of a weight above 0.0001 that quantisation causes, at some rows."""
    quantised, greatest = replace(close, q=q.values, k=k.values), 0.0
    for row in np.unique(np.linspace(0, len(close.q) - 1, CHECKED_ROWS).round().astype(int)).tolist():
        exact, stored = close_up_rows(close, row, row + 1), close_up_rows(quantised, row, row + 1)
        counted = exact > LEAST_WEIGHT
        greatest = max(greatest, float(np.max(np.abs(stored[counted] / exact[counted] - 1), initial=0.0)))
    return greatest


def deflate_arrays(*arrays: NDArray[Any]) -> str:
    """Arrays one after the other, each as byte planes, the lowest first; deflated, in base64."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(b"".join(map(deflate.compress, map(_planes, arrays))) + deflate.flush()).decode("ascii")


def _rows(close: CloseUp, q: Quantised) -> str:
    """Queries, totals, the first and last key of each row as differences from row to row, and the bias if any."""
    runs = [np.diff(np.asarray(ends, np.int32), prepend=np.int32(0)) for ends in (close.first, close.last)]
    bias = [] if close.distance_bias is None else [np.asarray(close.distance_bias, np.float32)]
    return deflate_arrays(*q[::-1], np.asarray(close.total, np.float32), *runs, *bias)


def _planes(array: NDArray[Any]) -> bytes:
    small = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return small.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _close_up_caption(close: CloseUp, rows: str, keys: str) -> dict[str, Any]:
    return {
        "head": f"{close.layer}.{close.head}",
        "rows": rows,
        "keys": keys,
        "dim": close.q.shape[1],
        "scale": close.scale,
        "softcap": close.softcap,
        "prefix": close.prefix,
        "biased": close.distance_bias is not None,
    }


class Fit(NamedTuple):
    """The pictures and close-ups of one report that a page includes, and those left out."""

    causal: bool
    pictures: list[Block]
    close_ups: list[PackedCloseUp]
    largest_left_out: bool
    close_ups_left_out: list[str]  # the names of the heads


def fit_into(report: Report, room: float, prefix: str = "") -> Fit:
    """The parts of a report that fit into `room` bytes; mean pictures are included in any case."""
    causal = is_causal(report.pictures)
    means = list(blocks(report.pictures, causal, "mean", prefix))
    largest = list(blocks(report.pictures, causal, "max", prefix))
    room -= size(means)
    too_large = size(largest) > room
    included = [] if too_large else largest
    close_ups = _close_ups(report, room - size(included), prefix)
    left_out = [head_text((close.layer, close.head)) for close in report.close_ups[len(close_ups) :]]
    return Fit(causal, means + included, close_ups, too_large, left_out)


def size(parts: Iterable[Block]) -> int:
    """The bytes of packed pictures."""
    return sum(len(part.data) for part in parts)


def fit_size(fit: Fit) -> int:
    """The bytes of all included parts."""
    return size(fit.pictures) + sum(map(len, close_up_blocks(fit).values()))


def close_up_blocks(fit: Fit) -> dict[str, str]:
    """The base64 of all close-ups by its id, each once."""
    return {name: data for close in fit.close_ups for name, data in close.blocks.items()}


def _close_ups(report: Report, room: float, prefix: str) -> list[PackedCloseUp]:
    """Close-ups, most remarkable first, up to the first that does not fit."""
    included: list[PackedCloseUp] = []
    stored: set[str] = set()
    for close in pack_close_ups(report.close_ups, prefix):
        room -= sum(len(data) for name, data in close.blocks.items() if name not in stored)
        if room < 0:
            break
        stored |= close.blocks.keys()
        included.append(close)
    return included
