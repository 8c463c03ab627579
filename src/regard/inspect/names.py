"""Names of heads: `"18.6"` or `(18, 6)` is query head 6 of layer 18, both counted from 0.

Where several modules have one layer number, as encoder, decoder and cross-attention of a translation model do, the
path of the module replaces the number: `("decoder.block.0.layer.1.EncDecAttention", 1)`, or as one string
`"decoder.block.0.layer.1.EncDecAttention.1"`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from regard.errors import ProblemError
from regard.inspect.weights.index import index_of

Layer = int | str
"""The number of a layer, or the path of the module that attends."""

HeadName = tuple[Layer, int]
"""(layer, head)."""

Heads = str | Iterable[HeadName | str]
"""Several heads: a list of names, or one string with commas, `"18.6, 3.1"`."""

EXPECTED = "expected (layer, head), such as (3, 1) or '3.1' for head 1 of layer 3"


def read_heads(heads: Heads) -> tuple[HeadName, ...]:
    """The names as (layer, head), with Python's own integers.

    Raises:
        ProblemError: one is not the name of a head.

    >>> read_heads(["18.6", (3, 1)]), read_heads("18.6, 3.1"), read_heads([("encoder.layer.0", 2)])
    (((18, 6), (3, 1)), ((18, 6), (3, 1)), (('encoder.layer.0', 2),))
    """
    value: Any = heads.split(",") if isinstance(heads, str) else heads
    if not isinstance(value, Iterable):
        raise ProblemError(f"heads is {value!r}: expected a list of names (layer, head), such as [(3, 1)] or '3.1'.")
    return tuple(read_head(name) for name in cast("Iterable[Any]", value))


def read_head(name: HeadName | str) -> HeadName:
    """One name as (layer, head). Raises `ProblemError` for any other value.

    >>> read_head("18.6"), read_head("encoder.layer.0.2")
    ((18, 6), ('encoder.layer.0', 2))
    """
    parts = _split(name) if isinstance(name, str) else name
    if isinstance(parts, tuple) and len(several := cast("tuple[Any, ...]", parts)) == 2:
        layer = several[0] if isinstance(several[0], str) else index_of(several[0])
        head = index_of(several[1])
        if layer is not None and head is not None:
            return layer, head
    raise ProblemError(f"{name!r} names no head: {EXPECTED}.")


def read_layer(layer: Any) -> Layer:
    """A layer by its number, as Python's own, or by the path of its module. Raises `ProblemError` for other values."""
    read = layer if isinstance(layer, str) else index_of(layer)
    if read is None:
        raise ProblemError(f"layer is {layer!r}: expected its number from 0, or the path of the module that attends.")
    return int(read) if isinstance(read, str) and read.isdecimal() else read


def head_text(name: HeadName) -> str:
    """The name as text, which `read_head` reads: 18.6.

    >>> head_text((18, 6))
    '18.6'
    """
    return f"{name[0]}.{name[1]}"


def group_text(names: Sequence[HeadName]) -> str:
    """The names of several heads: 18.6 + 3.1.

    >>> group_text([(18, 6), (3, 1)])
    '18.6 + 3.1'
    """
    return " + ".join(map(head_text, names))


def _split(name: str) -> tuple[Layer, int] | None:
    layer, _, head = name.strip().rpartition(".")
    if not layer or not head.isdecimal():
        return None
    return int(layer) if layer.isdecimal() else layer, int(head)
