"""The order in which backends are tried on CUDA: a small table in `cuda_order.toml`, one row for each kind of call.

Calls of one form and one `Kind` have the same backend, so they share a plan, whatever their lengths and masks.

The table decides speed alone. What a backend would compute wrongly it refuses itself, whatever its place.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from regard.backend.triton import TILE, is_decoding
from regard.describe.mask import CallSizes, Mask
from regard.describe.mask_by_rule import Causal
from regard.plan.lower import hides_nothing, simplify_mask
from regard.plan.problem import Problem
from regard.plan.tiling import cached_schedule

TABLE = Path(__file__).parent / "cuda_order.toml"


@dataclass(frozen=True)
class Order:
    """A row of the table.

    Attributes:
        kind: the kind of call.
        backends: their names, best first.
        reason: why in this order, as far as it was not measured.
        measured: the figures that decided, and where they were measured; "" before they were.
    """

    kind: str
    backends: tuple[str, ...]
    reason: str
    measured: str

    def __str__(self) -> str:
        return f"order for {self.kind}: {', '.join(self.backends)} ({self.measured or f'{self.reason}; not measured'})"


@cache
def orders() -> dict[str, Order]:
    """The rows of the table by kind."""
    import tomllib  # noqa: PLC0415 - calls on a CPU need no table

    rows: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {kind: Order(kind, tuple(row["backends"]), row["reason"], row["measured"]) for kind, row in rows.items()}


def order_for(problem: Problem) -> Order:
    """The row of a problem whose mask is simplified (`regard.plan.lower.simplify_mask`)."""
    return orders()[kind_of(problem)]


def kind_of(problem: Problem) -> str:
    """The kind of call.

    - "decode-stored": few query rows, keys and values in pages or codes, any mask;
    - "decode": few query rows, no mask;
    - "no-mask": no mask and no bias;
    - "causal": the causal mask alone, as many queries as keys;
    - "other": all others.
    """
    p = problem
    if is_decoding(p) and p.storage is not None:
        return "decode-stored"
    if p.mask is None and p.bias is None:
        return "decode" if is_decoding(p) else "no-mask"
    if p.mask is not None and p.mask.kind is Causal and p.offset == 0 and p.queries == p.keys and p.bias is None:
        return "causal"
    return "other"


class Kind(NamedTuple):
    """All that the choice of a backend for GPUs and its lowering depend on, besides the form of a call.

    Attributes:
        row: of the table, as `kind_of` names it.
        few: whether it is decoding (`regard.backend.triton.is_decoding`).
        masked: whether the mask hides a pair in this call.
    """

    row: str
    few: bool
    masked: bool

    @classmethod
    def of(cls, problem: Problem) -> "Kind":
        """The kind of a problem whose mask is simplified."""
        return cls(kind_of(problem), is_decoding(problem), problem.mask is not None)


def kind_of_call(posed: Problem, mask: Mask | None, sizes: CallSizes) -> Kind:
    """The kind of a call that has the form of an earlier one.

    Args:
        posed: the problem of the earlier call.
        mask: of this call, bound to its sizes.
    """
    problem = replace(posed, queries=sizes.queries, keys=sizes.keys, offset=sizes.offset, mask=None)
    if mask is None or hides_nothing(mask, sizes):
        return Kind.of(problem)
    problem = replace(problem, mask=mask.fingerprint())
    return Kind.of(simplify_mask(problem, cached_schedule(mask, sizes, TILE))[0])
