"""The choice of an engine, and the plan: what will run, why, and what it costs. `str(plan)` is what `explain` prints.

When no engine is named, the first of the device's row in `ORDER` that refuses nothing is taken. An engine that is
named runs or raises its reasons; it never gives way to another.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from regard.backend.contract import Backend, Ready
from regard.backend.flex import Flex
from regard.backend.native import Native
from regard.backend.sdpa import Sdpa
from regard.backend.tiled import Tiled
from regard.cost import attention as cost
from regard.describe.mask import Mask
from regard.describe.recent import Recent
from regard.describe.tensors import unchanged
from regard.errors import ProblemError, RefusalError
from regard.plan.lower import Step, gather, prepare_score, simplify_mask, widen
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule
from regard.state import State

_EXACT = Tiled(name="reference64", lowerings=(gather, widen, prepare_score))

ENGINES: dict[str, Backend] = {engine.name: engine for engine in (Native(), Sdpa(), Flex(), Tiled(), _EXACT)}
"""Every engine, by the name that `backend=` takes."""

ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "sdpa", "reference"),
    "cuda": ("flex", "reference"),
}
"""The engines tried on each device, best first; elsewhere only the reference."""

ASIDE = {
    ("cpu", "flex"): "on cpu it is used only by name: it compiles for seconds, and has no gradients and no log-sum-exp",
    ("cpu", "reference64"): "it is used only by name: float64 costs twice the time",
    ("cuda", "native"): "it computes on cpu",
    ("cuda", "reference64"): "it is used only by name: float64 costs many times the time",
}
"""Why an engine is not in the row of its device."""

KEPT_BYTES = 256 << 20
"""Of schedules, alone and in plans."""


@dataclass(frozen=True)
class Plan:
    """What will run, why, and what it costs.

    Attributes:
        asked: the problem as it was posed.
        problem: as the engine gets it, after the lowering steps.
        schedule: the tiles.
        steps: what lowering did.
        backend: the engine's name.
        passed_over: the engines that were not taken, with their reasons.
    """

    asked: Problem
    problem: Problem
    schedule: Schedule
    steps: tuple[Step, ...]
    backend: str
    passed_over: dict[str, list[str]] = field(hash=False)

    @property
    def engine(self) -> Backend:
        """The engine itself."""
        return ENGINES[self.backend]

    @cached_property
    def ready(self) -> Ready:
        """The engine, ready for this problem."""
        return self.engine.ready(self.problem, self.schedule)

    def changed(self, operands: Operands) -> Operands:
        """The operands as the engine gets them: what the steps do to those of each call."""
        for change in self._changes:
            operands = change(operands)
        return operands

    @cached_property
    def _changes(self) -> tuple[Callable[[Operands], Operands], ...]:
        return tuple(step.apply for step in self.steps if step.apply is not None)

    def finished(self, state: State) -> State:
        """The state as it is asked for: what the steps do to that which the engine gives."""
        for finish in self._finishes:
            state = finish(state)
        return state

    @cached_property
    def _finishes(self) -> tuple[Callable[[State], State], ...]:
        return tuple(step.finish for step in self.steps if step.finish is not None)

    @cached_property
    def is_careful(self) -> bool:
        """Whether the data must be looked at before the engine runs: it would carry NaN past the mask."""
        return self.problem.mask is not None and self.engine.hides_by_zero

    @property
    def flops(self) -> int:
        """FLOPs over the kept pairs; see `regard.cost.attention.flops`."""
        return cost.flops(self.schedule, qk_dim=self.problem.score_dim, v_dim=self.problem.v_dim)

    @property
    def bytes(self) -> int:
        """The bytes that must be read and written at least; see `regard.cost.attention.bytes_moved`."""
        p, stored = self.problem, self.asked.storage
        if stored is not None:
            return stored.nbytes + p.batch * p.heads * p.queries * (p.qk_dim + p.v_dim) * p.dtype.itemsize
        return cost.bytes_moved(
            self.schedule, kv_heads=p.kv_heads, qk_dim=p.qk_dim, v_dim=p.v_dim, item=p.dtype.itemsize
        )

    def __str__(self) -> str:
        s, p = self.schedule, self.problem
        full, mixed, skipped = s.tiles
        every = p.batch * p.heads * p.queries * p.keys
        share = f"{100 * s.pairs / every:.3g} %" if every else "none"
        kinds = f"{full:,} full, {mixed:,} partial in {len(s.patterns):,} patterns"
        lines = [
            str(self.asked),
            *(f"  {step}" for step in self.steps),
            f"runs on {self.backend}",
            *(f"  passed over {name}: {'; '.join(reasons)}" for name, reasons in self.passed_over.items()),
            f"tiles of {s.tile} x {s.tile}: {full + mixed:,} computed ({kinds}), {skipped:,} skipped",
            f"pairs {s.pairs:,} of {every:,} ({share})",
            f"{self.flops / 1e9:.4g} GFLOP, at least {self.bytes / 2**20:.4g} MiB read and written",
        ]
        return "\n".join(lines)


def choose(problem: Problem, operands: Operands, named: str | None, without: tuple[tuple[str, str], ...] = ()) -> Plan:
    """The plan of a problem.

    Args:
        named: the engine asked for; None takes the first that refuses nothing.
        without: engines that refused at run time, with their reasons.

    Raises:
        ProblemError: no engine has that name.
        RefusalError: the named engine, or every engine, refuses.
    """
    check_engine(named)
    key = (problem, named, without)
    plan = _plans.get(key)
    if plan is None:
        plan = _made(problem, operands.mask, named, dict(without))
        if _can_be_kept(problem):
            _plans.put(key, plan)
    return plan


def check_engine(named: object) -> None:
    """Raise `ProblemError` unless it is the name of an engine, or None."""
    if named is not None and (not isinstance(named, str) or named not in ENGINES):
        raise ProblemError(
            f"backend {named!r} is not known: expected one of {', '.join(ENGINES)}, or None to let regard choose."
        )


def forget_plans() -> None:
    """Forget every plan and schedule."""
    _plans.clear()
    _schedules.clear()


def _made(asked: Problem, mask: Mask | None, named: str | None, without: dict[str, str]) -> Plan:
    passed: dict[str, list[str]] = {}
    for name in (named,) if named else ORDER.get(asked.device, ("reference",)):
        engine = ENGINES[name]
        tiles = _schedule(asked, mask, engine.tile)
        problem, steps = _lowered(asked, tiles, engine)
        reasons = [without[name]] if name in without else engine.refusals(problem)
        if not reasons:
            return Plan(asked, problem, tiles, steps, name, passed | ({} if named else _aside(asked.device)))
        passed[name] = reasons
    raise RefusalError(_refused(asked, passed, named))


def _schedule(asked: Problem, mask: Mask | None, tile: int) -> Schedule:
    sizes = {name: getattr(asked, name) for name in ("batch", "heads", "queries", "keys", "offset")}
    key = (asked.mask, tile, *sizes.values())
    tiles = _schedules.get(key)
    if tiles is None:
        with unchanged():
            tiles = schedule(mask, tile=tile, **sizes)
        if _can_be_kept(asked):
            _schedules.put(key, tiles)
    return tiles


def _can_be_kept(problem: Problem) -> bool:
    """Whether its words tell when they change."""
    return all(word is None or word.can_be_kept for word in (problem.mask, problem.bias, problem.score))


def _lowered(asked: Problem, tiles: Schedule, engine: Backend) -> tuple[Problem, tuple[Step, ...]]:
    problem, steps = asked, list[Step]()
    for lowering in (simplify_mask, *engine.lowerings):
        problem, step = lowering(problem, tiles)
        steps += [step] if step else []
    return problem, tuple(steps)


def _aside(device: str) -> dict[str, list[str]]:
    return {engine: [why] for (place, engine), why in ASIDE.items() if place == device}


def _refused(problem: Problem, passed: dict[str, list[str]], named: str | None) -> str:
    head = f"The backend {named!r} cannot run this." if named else "No backend can run this."
    hint = "\n  Leave backend=None to let regard choose." if named else ""
    reasons = "".join(f"\n  {name}: {reason}" for name, found in passed.items() for reason in found)
    return f"{head}\n  {problem}{reasons}{hint}"


_plans: Recent[object, Plan] = Recent(entries=256, nbytes=KEPT_BYTES, size=lambda plan: plan.schedule.nbytes)
_schedules: Recent[object, Schedule] = Recent(entries=64, nbytes=KEPT_BYTES, size=lambda tiles: tiles.nbytes)
"""Both hold outlines and no tensors, so nothing of the user's is kept alive. A schedule is a fact about the mask alone:
calls of another type or with another bias share it."""
