"""How many positions a model of transformers has, and whether it runs beyond them."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

TABLE = re.compile("position|pos_e|wpe$")
"""What the name of a table of positions has: `position_embeddings`, `embed_positions`, `wpe`, CTRL's `pos_encoding`."""

RESERVED = 2
"""The most rows that such a table has beyond the config's number: OPT and BART do not use their first two."""


def context_of(model: Any) -> int | None:
    """The positions that a model was trained on; None for no known limit.

    Where the table of positions has a row for padding, as RoBERTa's, positions are counted from the row after it: of
    514 rows, whose row 1 is for padding, 512 are positions.
    """
    rows = _rows(model)
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), None)
    return rows if rows is None or padding is None else rows - padding - 1


def has_position_table(model: Any) -> bool:
    """Whether the model has a table of positions that ends where they do, so that it cannot run beyond them."""
    rows = _rows(model)
    return rows is not None and any(0 <= table - rows <= RESERVED for table in _tables(model))


def _rows(model: Any) -> int | None:
    rows = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return rows if isinstance(rows, int) else None


def _tables(model: Any) -> Iterator[int]:
    """The number of rows of each table of positions: an `nn.Embedding`, or a buffer, as in GPT-J.

    M2M100 enlarges its table when a text is longer. That table is a buffer named `weights`, which the pattern does not
    match. Two models are exceptions: FSMT enlarges an `nn.Embedding`, which counts; I-BERT's table has a class of its
    own, and does not count.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and TABLE.search(path):
            yield module.num_embeddings
        for name, buffer in module.named_buffers(recurse=False):
            if TABLE.search(name) and buffer.ndim == 2 and buffer.is_floating_point():
                yield buffer.shape[0]
