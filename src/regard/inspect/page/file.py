"""The page put together: HTML, style, script, scores, pictures and close-ups in one file, written whole."""

import base64
import hashlib
import html
import os
from collections.abc import Iterable
from pathlib import Path
from string import Template

from regard.atomic_write import check_writable, write_whole
from regard.errors import ProblemError
from regard.inspect.page.assets import icon, script, style, view
from regard.inspect.page.data import as_json, content
from regard.inspect.page.packing import close_up_blocks, fit_into, fit_size
from regard.inspect.surveying.report import Report

BUDGET = 15e6
"""The default limit of a page in bytes: what a mail or a repository accepts."""

OVERHEAD = 150_000
"""Bytes reserved for everything but scores, pictures and close-ups: HTML, style, script and captions."""


def write_page(report: Report, path: str | os.PathLike[str], budget: float = BUDGET) -> int:
    """Write the page to a file and return its size in bytes. An existing file is replaced.

    Args:
        report: the result of `survey`.
        path: the file.
        budget: bytes to stay below, by leaving out close-ups from the least remarkable head on, then the pictures of
            greatest weights; the page says how many. Scores and mean pictures are never left out, so a model of
            thousands of heads can exceed it.

    Raises:
        ProblemError: no file can be written there, which is checked before the page is made; or `report` is no report.
        OSError: writing failed, on a full disk for example.
    """
    check_writable(path)
    content = page(report, budget).encode("utf-8", errors="replace")  # such as a lone surrogate in a file name
    return write_whole(Path(path), content)


def page(report: Report, budget: float = BUDGET) -> str:
    """The page as text, of at most `budget` bytes if scores and mean pictures fit."""
    if not isinstance(report, Report):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"the report is {type(report).__name__}: expected what `survey` returns.")
    own, other = report, report.other
    room = budget - OVERHEAD - sum(len(as_json(r.to_dict())) for r in (own, other) if r is not None)
    their_means = None if other is None else fit_into(other, 0, "other-")
    fit = fit_into(own, room - (0 if their_means is None else fit_size(their_means)))
    theirs = None if other is None else (other, fit_into(other, room - fit_size(fit), "other-"))
    fits = [fit] if theirs is None else [fit, theirs[1]]
    return Template(view("page.html")).substitute(
        policy=_policy(style(), script()),
        title=html.escape(f"{report.run.model} · regard"),
        model=html.escape(report.run.model),
        icon=icon(),
        style=style(),
        script=script(),
        report=as_json(content(report, fit, theirs)),
        pictures=_blocks((block.id, block.data) for each in fits for block in each.pictures),
        close_ups=_blocks(block for each in fits for block in close_up_blocks(each).items()),
    )


def framed(report: Report, budget: float = BUDGET / 3, height: int = 860) -> str:
    """The page inside a frame of its own, as HTML for a notebook.

    The frame is sandboxed: its script can reach neither the notebook nor a network. `height` is in pixels.
    """
    inside = html.escape(page(report, budget))
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" width="100%" height="{height}" frameborder="0" '
        f'title="Attention heads of {html.escape(report.run.model)}" srcdoc="{inside}"></iframe>'
    )


def _blocks(blocks: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f'<script type="text/plain" id="{name}">{data}</script>' for name, data in blocks)


def _policy(style: str, script: str) -> str:
    """What the browser may do with the file: run this script and this style, show the icon. No address is allowed."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
