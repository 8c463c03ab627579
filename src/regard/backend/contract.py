"""What a backend is: a name, what it refuses, and `compile`, which makes a kernel for a problem. Nothing else.

`regard.backends` shows a whole one.
"""

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

from regard.plan.lower import Lowering, gather, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State


class Kernel(Protocol):
    """What runs one problem: it is called with the operands of each call."""

    def __call__(self, operands: Operands, /) -> State:
        """The state over all keys: dropout applied, the sink folded into `out` (before it is rounded), not into `lse`.

        Differentiable in all operands if the problem says that gradients flow (`Problem.grad`).
        """
        ...


@runtime_checkable
class ResumableKernel(Kernel, Protocol):
    """A kernel that can differentiate an earlier call from its state, without computing the call again."""

    def resume(self, operands: Operands, state: State) -> State:
        """The state, as if `__call__` had just computed it: differentiable in the operands."""
        ...


class Backend(ABC):
    """What computes attention; to be subclassed. It must be hashable, as plans are cached by it.

    Attributes:
        name: how errors and `explain` call it, and how users do once it is registered.
        tile: tokens per side of the tiles of the schedule, a multiple of 8.
        lowerings: steps that simplify a problem before the backend sees it, in order. By default stored keys and
            values become tensors, and scores become dot products where they can.
        hides_by_zero: whether it hides a key by a weight of 0, which lets NaN and inf through. regard then passes it
            finite keys and values only.
        any_length: whether its kernels, where a problem has neither mask nor bias, take the numbers of queries and keys
            (1 or more) from the operands: then one plan serves every length.
    """

    name: str
    tile: int = 64
    lowerings: tuple[Lowering, ...] = (gather, prepare_score)
    hides_by_zero: bool = False
    any_length: bool = False

    @abstractmethod
    def refusals(self, problem: Problem) -> list[str]:
        """Why it cannot run this problem, in the user's terms; empty if it can."""

    @abstractmethod
    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        """The kernel for a problem, with all done that does not differ from call to call. It keeps no tensor of a call.

        Args:
            schedule: which tiles of queries and keys are computed; for a problem without a mask, all.
        """
