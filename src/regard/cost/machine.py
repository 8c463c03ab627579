"""A machine as its limits: FLOP/s by type, bytes/s of memory, bytes of memory; and the roofline of both.

The time of a part is the longer of two: its products at the peak, and its bytes at the bandwidth (Williams, Waterman
and Patterson 2009, Roofline: An Insightful Visual Performance Model for Multicore Architectures). A machine needs no
less; real kernels need more.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

from regard.cost.storage_names import float_name
from regard.errors import ProblemError
from regard.integers import is_integer

TYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "fp8", "int8")
"""The types of products by their names."""

WIDER = {"bfloat16": ("float32",), "float16": ("float32",), "fp8": ("bfloat16", "float16", "float32"), "float64": ()}
"""The types whose products are computed where a machine has none of the first: operands are converted."""


@dataclass(frozen=True)
class Efficiency:
    """What regard's kernels, and torch's matrix products, reach of a machine's limits; see `regard.cost.expected`.

    Attributes:
        share: of the peak, on FULL tiles of 64 dims.
        partial_cost: time of a PARTIAL tile, in that of a FULL one.
        few_share: of the peak, for few queries.
        linear_share: of the peak, in matrix products of many rows; None where it was not measured.
        stream_share: of the bandwidth, in matrix products of one row; None where it was not measured.
        wide_share: of the peak, on FULL tiles of 128 dims; None where it was not measured.
        gradient_share: of the peak, in the backward pass on FULL tiles of 64 dims; None where it was not measured.

    Raises:
        ProblemError: one is no number above 0.
    """

    share: float
    partial_cost: float
    few_share: float
    linear_share: float | None = None
    stream_share: float | None = None
    wide_share: float | None = None
    gradient_share: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (_is_above_0(value) or (value is None and each.default is None)):
                raise ProblemError(f"{each.name} of an Efficiency is {value!r}: expected a number above 0.")


@dataclass(frozen=True)
class Machine:
    """The limits of a machine.

    Attributes:
        name, title, source: its short name, its full name, and where the figures are published.
        flops: FLOP/s of dense products, by type: one of `TYPES` or more.
        bandwidth: bytes/s of memory.
        memory: bytes of memory.
        fast_memory: bytes that a tile of one kernel can use.
        count: machines that share the work evenly; communication between them is not counted.
        efficiency: what kernels reach, by type, where it was measured.
        checked: another public page that has the figures, and which of them; "" where none was compared.
        device: its kind of device in PyTorch, such as "cuda" (AMD's GPUs as well), "mps" or "cpu"; "" where not named.

    Raises:
        ProblemError: a type is not known, a limit is no number above 0, count is no whole number from 1 on, or a
            value of efficiency is no `Efficiency`.
    """

    name: str
    title: str
    source: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    fast_memory: int
    count: int = 1
    efficiency: Mapping[str, Efficiency] | None = None
    checked: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.flops), Mapping) or not self.flops:
            raise ProblemError(
                f"machine {self.name}: flops is {self.flops!r}: expected FLOP/s by type, such as {{'float32': 1e12}}."
            )
        self._check_types("flops", self.flops)
        limits = {"bandwidth": self.bandwidth, "memory": self.memory, "fast_memory": self.fast_memory}
        for name, value in {**limits, **self.flops}.items():
            if not _is_above_0(value):
                raise ProblemError(f"machine {self.name}: {name} is {value!r}: expected a number above 0.")
        if not is_integer(self.count, least=1):
            raise ProblemError(f"machine {self.name}: count is {self.count!r}: expected a whole number from 1 on.")
        object.__setattr__(self, "count", operator.index(self.count))
        self._check_efficiency(self.efficiency)

    def _check_efficiency(self, found: object) -> None:
        """Raise `ProblemError` for what is no mapping from types to `Efficiency`, and not None."""
        if found is None:
            return
        values = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else None
        if values is None or not all(isinstance(each, Efficiency) for each in values.values()):
            raise ProblemError(
                f"machine {self.name}: efficiency is {found!r}: expected a regard.cost.machine.Efficiency by type, or "
                "None."
            )
        self._check_types("efficiency", values)

    def _check_types(self, name: str, found: Mapping[str, object]) -> None:
        """Raise `ProblemError` for a type that is not known."""
        if unknown := [each for each in found if each not in TYPES]:
            raise ProblemError(f"machine {self.name}: {name} has {unknown[0]!r}: expected names of {', '.join(TYPES)}.")

    def peak(self, dtype: object) -> float:
        """FLOP/s of products of a type, such as "bfloat16", "bf16" or `torch.bfloat16`.

        Raises:
            ProblemError: no figure for it is published.
        """
        dtype = float_name(str(dtype))
        found = next((self.flops[each] for each in (dtype, *WIDER.get(dtype, ())) if each in self.flops), None)
        if found is None:
            raise ProblemError(
                f"{self.title} has no published FLOP/s of {dtype}: expected one of {', '.join(self.flops)}."
            )
        return found

    def seconds(self, flops: float, moved: float, dtype: object) -> float:
        """The roofline: the least time for this many FLOPs and bytes.

        >>> from regard.cost import find_machine
        >>> h100 = find_machine("h100")
        >>> round(1e3 * h100.seconds(989.4e12, 0, "bfloat16")), round(1e3 * h100.seconds(0, 3352e9, "bfloat16"))
        (1000, 1000)
        """
        return max(flops / self.peak(dtype), moved / self.bandwidth)

    def balance(self, dtype: object) -> float:
        """FLOPs for each byte at which products and memory take equally long."""
        return self.peak(dtype) / self.bandwidth


def _is_above_0(value: object) -> bool:
    return isinstance(value, Real) and value is not True and 0 < cast(float, value) < math.inf
