"""From a posed problem to its state: choose an engine, run it, and go on to the next if the data makes it refuse."""

from regard.errors import RefusalError
from regard.plan.choose import ENGINES, Plan, choose
from regard.plan.problem import Operands, Problem
from regard.state import State


def execute(problem: Problem, operands: Operands, named: str | None) -> tuple[Plan, State]:
    """The plan that ran and its state.

    Raises:
        RefusalError: the named engine, or every engine, refuses, for reasons of the problem or of the data.
    """
    without: tuple[tuple[str, str], ...] = ()
    while True:
        plan = choose(problem, operands, named, without)
        try:
            return plan, ENGINES[plan.backend].run(plan.problem, plan.schedule, operands)
        except RefusalError as refusal:
            if named is not None:
                raise
            without = (*without, (plan.backend, str(refusal)))
