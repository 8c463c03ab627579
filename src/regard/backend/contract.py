"""What an engine is: a name, the tile it likes, what it refuses, and `run`. Nothing else is asked of it."""

from typing import Protocol

from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State


class Backend(Protocol):
    """An engine that computes attention.

    Attributes:
        name: what users call it by.
        tile: tokens per side of the schedule's tiles that it wants.
        hides_by_zero: whether it hides a key by a weight of 0, which lets NaN through; then it is given finite ones
            only.
    """

    @property
    def name(self) -> str: ...

    @property
    def tile(self) -> int: ...

    @property
    def hides_by_zero(self) -> bool: ...

    def refusals(self, problem: Problem) -> list[str]:
        """Why it cannot run this problem, in the user's words; empty if it can."""
        ...

    def run(self, problem: Problem, schedule: Schedule, operands: Operands) -> State:
        """The state over all keys: dropout applied, the sink not folded in."""
        ...
