"""Plots of results, and the small tables that notebooks show: the only file that uses matplotlib.

matplotlib is an optional extra (`pip install 'regard[plot]'`) and is imported when a plot is drawn.
"""

import html
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import RefusalError

Array = Tensor | NDArray[Any] | Sequence[Sequence[float]]


def heat_map(
    values: Array,
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    x_ticks: Sequence[str] | None = None,
    y_ticks: Sequence[str] | None = None,
    low: float | None = None,
    high: float | None = None,
    ax: Any = None,
) -> Any:
    """Draw a matrix as colours, row 0 at the top, with a colour bar.

    Args:
        values: [rows, columns]; NaN is left blank.
        x, y: the names of the axes.
        x_ticks, y_ticks: labels of the columns and the rows; None for their indices.
        low, high: the values of the first and the last colour; None takes the least and the greatest value.
        ax: the matplotlib `Axes` to draw on; None makes a new figure.

    Returns:
        The `Axes`; `ax.figure.savefig("plot.png")` writes it.

    Raises:
        RefusalError: matplotlib is not installed.
    """
    cells = values.detach().float().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=float)
    ax = new_axes() if ax is None else ax
    image = ax.imshow(cells, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    ax.set(title=title, xlabel=x, ylabel=y)
    for labels, axis in ((x_ticks, ax.xaxis), (y_ticks, ax.yaxis)):
        if labels is None:
            axis.get_major_locator().set_params(integer=True)
        else:
            axis.set_ticks(range(len(labels)), labels=labels)
    ax.figure.colorbar(image, ax=ax)
    return ax


def new_axes() -> Any:
    """The axes of a new matplotlib figure.

    Raises:
        RefusalError: matplotlib is not installed.
    """
    try:
        pyplot: Any = import_module("matplotlib.pyplot")
    except ImportError:
        raise RefusalError("plots need matplotlib, which is not installed: pip install 'regard[plot]'.") from None
    return pyplot.subplots(layout="constrained")[1]


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML, for `_repr_html_`; every text is escaped.

    >>> html_table("one < two", ["head"], [["18.6"]])
    '<table><caption>one &lt; two</caption><tr><th>head</th></tr><tr><td>18.6</td></tr></table>'
    """
    lines = [("th", columns), *(("td", row) for row in rows)]
    body = "".join(f"<tr>{''.join(f'<{tag}>{html.escape(str(c))}</{tag}>' for c in line)}</tr>" for tag, line in lines)
    return f"<table><caption>{html.escape(title)}</caption>{body}</table>"
