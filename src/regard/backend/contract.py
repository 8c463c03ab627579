"""What an engine is: a name, the tile it likes, the lowerings it wants, what it refuses, and `ready`. Nothing else."""

from typing import Protocol, runtime_checkable

from regard.plan.lower import Lowering
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State


class Ready(Protocol):
    """An engine made ready for one problem: it is called with the operands of each call."""

    def __call__(self, operands: Operands) -> State:
        """The state over all keys: dropout applied, the sink folded into `out` (before it is rounded), not into `lse`.

        Differentiable in all operands if the problem says that gradients flow.
        """
        ...


@runtime_checkable
class Resumable(Ready, Protocol):
    """One that differentiates what was computed before from its state, instead of computing it again."""

    def resume(self, operands: Operands, state: State) -> State:
        """The state, as if `__call__` had just computed it: differentiable in the operands."""
        ...


class Backend(Protocol):
    """An engine that computes attention.

    Attributes:
        name: what users call it by.
        tile: tokens per side of the schedule's tiles that it wants.
        lowerings: what is done to a problem before the engine is asked, in order.
        hides_by_zero: whether it hides a key by a weight of 0, which lets NaN through; then it is given finite ones
            only.
    """

    @property
    def name(self) -> str: ...

    @property
    def tile(self) -> int: ...

    @property
    def lowerings(self) -> tuple[Lowering, ...]: ...

    @property
    def hides_by_zero(self) -> bool: ...

    def refusals(self, problem: Problem) -> list[str]:
        """Why it cannot run this problem, in the user's words; empty if it can."""
        ...

    def ready(self, problem: Problem, schedule: Schedule) -> Ready:
        """The engine for this problem, with all done that no call need do again. It keeps no tensor of a caller."""
        ...
