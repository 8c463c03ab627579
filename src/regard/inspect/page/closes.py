"""CloseUp-ups, packed head by head: queries, keys and what each row is divided by.

Queries and keys are stored as 16 bit integers, with a step for each dimension: of the same size as float16, and ten
times as exact, since what makes a score wrong is the rounding of its greatest terms: on SmolLM2-135M over 1,024 tokens
weights above 0.0001 are off by 0.14 % at most, against 1.4 % with float16. A number of several bytes is
stored as planes, all lowest bytes first, which deflate better. Heads that share a key head share its keys.
"""

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.inspect.surveying.closeup import close_up_rows
from regard.inspect.surveying.report import CloseUp

LOOKED_AT = 8
"""Rows at which what is packed is compared with what was given."""

TOLD_FROM = 1e-4
"""Weights from here on have their error told; smaller ones have no colour."""


class Packed(NamedTuple):
    """One close-up: its caption, and the blocks of base64 that it needs, by id; one may serve several close-ups."""

    caption: dict[str, Any]
    blocks: dict[str, str]


class Steps(NamedTuple):
    """Numbers [tokens, dim] as integers, and the step [dim] that each is counted in."""

    counts: NDArray[np.int16]
    step: NDArray[np.float32]

    @property
    def values(self) -> NDArray[np.float32]:
        """The numbers again."""
        return self.counts * self.step


def packed(closes: Iterable[CloseUp], prefix: str = "") -> Iterator[Packed]:
    """The close-ups as the page holds them, in the order given."""
    names: dict[tuple[int, bytes], str] = {}
    data: dict[str, str] = {}
    for close in closes:
        q, k = stepped(close.q), stepped(close.k)
        digest = close.layer, hashlib.sha256(k.counts.tobytes() + k.step.tobytes()).digest()
        if digest not in names:
            names[digest] = f"{prefix}keys-{close.layer}-{sum(layer == close.layer for layer, _ in names)}"
            data[names[digest]] = deflated(*k[::-1])
        own = f"{prefix}close-{close.layer}-{close.head}"
        caption = _caption(close, own, names[digest]) | {"error": error(close, q, k)}
        yield Packed(caption, {own: _rows(close, q), names[digest]: data[names[digest]]})


def stepped(numbers: NDArray[np.floating[Any]]) -> Steps:
    """The numbers in steps of 1 / 32,767 of the greatest of each dimension."""
    exact = np.asarray(numbers, np.float64)
    step = np.abs(exact).max(axis=0, initial=0.0) / np.iinfo(np.int16).max
    step = np.where(step > 0, step, 1.0).astype(np.float32)
    return Steps(np.clip(np.round(exact / step), -32767, 32767).astype(np.int16), step)


def error(close: CloseUp, q: Steps, k: Steps) -> float:
    """The greatest relative error of a weight above 0.0001, at some rows, against the close-up as it was given."""
    ours, greatest = replace(close, q=q.values, k=k.values), 0.0
    for row in np.unique(np.linspace(0, len(close.q) - 1, LOOKED_AT).round().astype(int)).tolist():
        exact, stored = close_up_rows(close, row, row + 1), close_up_rows(ours, row, row + 1)
        told = exact > TOLD_FROM
        greatest = max(greatest, float(np.max(np.abs(stored[told] / exact[told] - 1), initial=0.0)))
    return greatest


def deflated(*arrays: NDArray[Any]) -> str:
    """Arrays one after the other, each as planes of bytes, the lowest first; deflated without a header, in base64."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(b"".join(map(deflate.compress, map(_planes, arrays))) + deflate.flush()).decode("ascii")


def _rows(close: CloseUp, q: Steps) -> str:
    """Queries, totals, and where each row's keys begin and end, as steps from row to row; then the bias if any."""
    runs = [np.diff(np.asarray(ends, np.int32), prepend=np.int32(0)) for ends in (close.first, close.last)]
    bias = [] if close.distance_bias is None else [np.asarray(close.distance_bias, np.float32)]
    return deflated(*q[::-1], np.asarray(close.total, np.float32), *runs, *bias)


def _planes(array: NDArray[Any]) -> bytes:
    small = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return small.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _caption(close: CloseUp, rows: str, keys: str) -> dict[str, Any]:
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
