"""The pages of ./bench: docs/performance.md, an overview of all kinds of machines, and one page for each kind.

A page is read back from its Markdown: the machine of another kind is seldom at hand.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from benchmarks import command
from benchmarks.machine_kind import title
from benchmarks.report import METHOD, TYPES, table

PAGE = "performance.md"
"""The page of all kinds of machines; those of one kind are in the folder `performance`."""

CASES = (
    "causal, 4,096, d 128",
    "causal, 32/8 heads, 2,048, d 128",
    "causal, window 512, 4,096, d 64",
    "ALiBi, causal, 2,048, d 64",
    "8 packed documents of 512, causal, 4,096, d 64",
    "8 rows padded to 2,048, d 64",
    "decode, 32/8 heads, 8,192 keys, d 128",
    "decode, 32/32 heads, 8,192 keys, d 128",
)
"""The cases of the overview, and of the picture in the README."""

ABOUT = """\
How long torch's `scaled_dot_product_attention` takes, as a multiple of regard's time, by kind of machine. Each kind has
a page with all cases, the machine's limits and the goals; `./bench --write` measures the machine at hand,
`REGARD_ISAS=all ./bench --isa avx2 --write` the same machine with both held to older instructions. `regard bench` does
the same for shapes of your own."""

MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def publish_overview(folder: Path) -> None:
    """Write the page of all kinds into `folder`, from the pages of kinds that are there."""
    pages = folder / "performance"
    found = {stem: (pages / f"{stem}.md").read_text() for stem in sorted(path.stem for path in pages.glob("*.md"))}
    others = {path.stem for path in (pages / "others").glob("*.md")}
    command.publish_page(folder, PAGE, overview(pages_of_kinds(found), others))


def overview(pages: Mapping[str, str], others: Collection[str] = ()) -> str:
    """docs/performance.md, from the text of each page by kind.

    Args:
        others: the kinds of machines that have a page of `./bench others`.
    """
    times = {kind: all_times(page) for kind, page in pages.items()}
    where = [
        f"- [{title(kind)}](performance/{kind}.md)"
        + f" ([beside vLLM and OpenVINO](performance/others/{kind}.md))" * (kind in others)
        + f": {_measured(page)}"
        for kind, page in pages.items()
    ]
    rows = [
        (case, name, *(_ratio(times[kind].get((case, name))) for kind in pages))
        for case in CASES
        for name in TYPES.values()
    ]
    return "\n\n".join([
        "# Performance",
        ABOUT,
        table(("case", "type", *map(title, pages)), rows),
        "\n".join(where),
        METHOD,
    ]) + "\n"  # fmt: skip


def pages_of_kinds(pages: Mapping[str, str]) -> dict[str, str]:
    """The pages that `./bench` wrote for a kind of machine; other pages are beside them.

    >>> list(pages_of_kinds({"zen5": "Measured by `./bench` on 2 cores; backend: native.", "gpu-kernels": "# What"}))
    ['zen5']
    """
    return {kind: page for kind, page in pages.items() if _measured(page)}


def all_times(page: str) -> dict[tuple[str, str], tuple[float, float]]:
    """The milliseconds of regard and torch by (case, type), of the first row of a page that has both."""
    times: dict[tuple[str, str], tuple[float, float]] = {}
    for case, taken in _times(page):
        times.setdefault(case, taken)  # later tables list the same cases beside other libraries
    return times


def _times(page: str) -> Iterator[tuple[tuple[str, str], tuple[float, float]]]:
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [_milliseconds(cell) for cell in cells[2:]]
        taken = [ms for ms in found if ms is not None]
        if len(cells) > 2 and cells[1] in TYPES.values() and len(taken) == 2:
            yield (cells[0], cells[1]), (taken[0], taken[1])


def _milliseconds(cell: str) -> float | None:
    match = re.fullmatch(r"([\d.,]+) (us|ms|s)", cell)
    return None if match is None else float(match[1].replace(",", "")) * MS[match[2]]


def _ratio(times: tuple[float, float] | None) -> str:
    if times is None:
        return ""
    ratio = times[1] / times[0]
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _measured(page: str) -> str:
    found = re.search(r"^Measured by `\./bench[^`]*` on (.*?); backend", page, re.MULTILINE)
    return "" if found is None else found[1]
