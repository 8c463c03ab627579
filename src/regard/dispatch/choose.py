"""The choice of a backend, and the plan: what will run, why, and what it costs. `str(plan)` is what `explain` prints.

Without `backend=`, the first backend in the device's row of `ORDER` that refuses nothing is chosen; on CUDA each kind
of call has its own order (`cuda_order.toml`). A backend that the caller chose runs, or raises with its reasons; no
other takes its place.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, SupportsIndex, cast

from regard.backend.contract import Backend, Kernel, RepeatableKernel
from regard.backend.flex import Flex
from regard.backend.native import Native
from regard.backend.reference import Reference
from regard.backend.sdpa import Sdpa
from regard.backend.triton import Triton
from regard.cost import attention as cost
from regard.cost.machine import Machine
from regard.describe.mask import CallSizes, Mask
from regard.describe.not_a_spec import received
from regard.describe.whole_number import whole
from regard.dispatch.cuda_order import Kind, Order, order_for
from regard.errors import ProblemError, RefusalError
from regard.lru_cache import LRUCache
from regard.plan.lower import Step, gather, prepare_score, simplify_mask, widen
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.plan.tiling import KEPT_BYTES, cached_schedule, forget_schedules, is_still
from regard.state import State

_EXACT = Reference(name="reference64", lowerings=(gather, widen, prepare_score))

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Native(), Sdpa(), Triton(), Flex(), Reference(), _EXACT)
}
"""Every backend, by the name that `backend=` takes."""

ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("native", "sdpa", "reference"),
    "cuda": ("sdpa", "triton", "flex", "reference"),
}
"""The backends tried on each device, best first; on other devices only the reference.

On CUDA the backends are these, in an order that depends on the kind of call (`cuda_order.toml`)."""

ASIDE = {
    ("cpu", "triton"): "it computes on GPUs",
    (
        "cpu",
        "flex",
    ): 'on CPU only with backend="flex": it compiles for seconds, and has no gradients and no log-sum-exp',
    ("cpu", "reference64"): 'only with backend="reference64": float64 costs twice the time',
    ("cuda", "native"): "it computes on CPU",
    ("cuda", "reference64"): 'only with backend="reference64": float64 costs many times the time',
}
"""Why a backend is not in the row of a device."""

ELSEWHERE = {
    "native": "it computes on CPU",
    "sdpa": "it is used on cpu and cuda",
    "triton": "it computes on cuda",
    "flex": "it compiles for cpu and cuda",
    "reference64": 'only with backend="reference64"',
}
"""Why a backend is not tried on devices without a row, such as mps and xpu."""


@dataclass(frozen=True)
class Plan:
    """What will run, why, and what it costs.

    Attributes:
        posed: the problem before the lowering steps.
        problem: the problem as the backend gets it, after the lowering steps.
        schedule: the tiles.
        steps: what lowering did.
        chosen: the backend.
        passed_over: the backends that were not chosen, by name, with their reasons.
        machine: the one that `explain` names, whose limits give the least time.
        order: the order in which backends were tried, where it depends on the kind of call.
    """

    posed: Problem
    problem: Problem
    schedule: Schedule
    steps: tuple[Step, ...]
    chosen: Backend
    passed_over: dict[str, list[str]] = field(hash=False)
    machine: Machine | None = None
    order: Order | None = None

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.chosen.name

    @cached_property
    def kernel(self) -> Kernel:
        """What the backend compiled for this problem.

        Raises:
            ProblemError: a user's backend returned no function.
        """
        kernel = self.chosen.compile(self.problem, self.schedule)
        if not callable(cast(object, kernel)):
            raise ProblemError(
                f"The backend {self.backend!r} returned {received(kernel)} as its kernel: expected a function of the "
                "operands of a call."
            )
        return kernel

    @cached_property
    def is_for_any_mask(self) -> bool:
        """Whether the same plan serves calls that differ from this one only in sizes, offset and mask."""
        return self.chosen.any_mask and self._has_pairs

    @cached_property
    def is_for_any_length(self) -> bool:
        """Whether the same plan serves calls that differ from this one only in sizes, if their masks hide nothing."""
        p = self.problem
        return self.chosen.any_length and p.mask is None and p.bias is None and self._has_pairs

    @cached_property
    def kind(self) -> Kind | None:
        """What calls that share this plan have in common besides their form; None where they may be of any kind.

        On a GPU another backend may be best for few queries, or without a mask. On a CPU `native` takes all.
        """
        if self.posed.device == "cpu" and not isinstance(self.chosen, Triton):
            return None
        return Kind.of(replace(self.posed, mask=self.problem.mask))

    @property
    def _has_pairs(self) -> bool:
        p = self.problem
        return p.batch * p.heads * p.queries * p.keys > 0

    @cached_property
    def run(self) -> Kernel:
        """The kernel between the lowering steps: from the operands of a call to the state as the caller gets it."""
        if not any(step.apply or step.finish for step in self.steps):
            return self.kernel

        def run(operands: Operands) -> State:
            state = self.kernel(self.changed(operands))
            for step in reversed(self.steps):
                if step.finish is not None:
                    state = step.finish(state)
            return state

        return run

    def changed(self, operands: Operands) -> Operands:
        """The operands as the backend gets them, after the lowering steps."""
        for step in self.steps:
            if step.apply is not None:
                operands = step.apply(operands)
        return operands

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether the kernel can repeat calls; `isinstance` of a protocol takes 15 us."""
        return isinstance(self.kernel, RepeatableKernel)

    @cached_property
    def is_careful(self) -> bool:
        """Whether the data must be read before the backend runs, as it would carry NaN past the mask."""
        return self.chosen.leaks(self.problem)

    @property
    def flops(self) -> int:
        """FLOPs over the kept pairs; see `regard.cost.attention.flops`."""
        return cost.flops(self.schedule, qk_dim=self.problem.score_dim, v_dim=self.problem.v_dim)

    @property
    def bytes(self) -> int:
        """The bytes that must be read and written at least; see `regard.cost.attention.bytes_moved`."""
        p, item = self.posed, self.posed.dtype.itemsize
        channels = p.k_dim if p.values_in_keys else p.k_dim + p.v_dim
        of_key = channels * item if p.storage is None else p.storage.token_bytes / max(1, p.kv_heads)
        return cost.bytes_moved(self.schedule, kv_heads=p.kv_heads, of_query=(p.qk_dim + p.v_dim) * item, of_key=of_key)

    def __copy__(self) -> "Plan":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Plan":
        return self  # nothing in it changes

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        p = self.posed
        if any(spec is not None for spec in (p.mask, p.bias, p.score)):
            raise RefusalError(
                "a Plan with a mask, a bias or a score is not pickled, as it refers to classes of this process: keep "
                "str(plan) or the numbers that you need, or pickle the arguments and call regard.explain again."
            )
        return super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what is made of them, such as the kernel, which has memory of this process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        s, p = self.schedule, self.problem
        full, mixed, skipped = s.tiles
        every = p.batch * p.heads * p.queries * p.keys
        share = f"{100 * s.pairs / every:.3g} %" if every else "none"
        kinds = f"{full:,} full, {mixed:,} partial in {(bits := len(s.patterns)):,} pattern{'s' * (bits != 1)}"
        lines = [
            str(self.posed),
            *(f"  {step}" for step in self.steps),
            f"runs on {self.backend}",
            *([] if self.order is None else [f"  {self.order}"]),
            *(f"  not chosen: {name} ({'; '.join(reasons)})" for name, reasons in self.passed_over.items()),
            f"tiles of {s.tile} x {s.tile}: {full + mixed:,} computed ({kinds}), {skipped:,} skipped",
            f"pairs {s.pairs:,} of {every:,} ({share})",
            f"{_flop(self.flops)}, at least {_memory(self.bytes)} read and written",
            *([] if self.machine is None else [_least_time(self, self.machine)]),
        ]
        return "\n".join(lines)


def _least_time(plan: Plan, machine: Machine) -> str:
    """The roofline: what products and memory need at least."""
    kind = str(plan.problem.dtype).removeprefix("torch.")
    try:
        products = plan.flops / machine.peak(kind)
    except ProblemError:
        return f"on {machine.title} no least time: no figure for {kind}"
    memory = plan.bytes / machine.bandwidth
    bound = "products" if products >= memory else "memory"
    return f"on {machine.title} at least {1000 * max(products, memory):.3g} ms, bound by {bound}"


def _flop(count: int) -> str:
    return f"{count / 1e9:.4g} GFLOP" if count >= 10**6 else f"{count:,} FLOP"


def _memory(nbytes: int) -> str:
    return f"{nbytes / 2**20:.4g} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def choose(
    problem: Problem, operands: Operands, backend: str | Backend | None, without: tuple[tuple[str, str], ...] = ()
) -> Plan:
    """The plan of a problem.

    Args:
        backend: what the caller chose; None takes the first that refuses nothing.
        without: names of backends that refused at run time, with their reasons.

    Raises:
        ProblemError: no backend has that name.
        RefusalError: the backend of the caller, or every backend, refuses.
    """
    check_backend(backend)
    key = (problem, backend, without)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(problem, operands.mask, backend, dict(without))
        if _is_cacheable(problem) and (operands.mask is None or is_still(operands.mask, problem.mask)):
            _plans.put(key, plan)
    return plan


def check_backend(backend: object) -> None:
    """Raise `ProblemError` unless it is a `Backend` with a name and tiles, the name of one, or None."""
    if backend is None or (isinstance(backend, str) and backend in BACKENDS):
        return
    if not isinstance(backend, Backend):
        raise ProblemError(
            f"backend {backend!r} is not known: expected one of {', '.join(BACKENDS)}, an object of a class that "
            "subclasses regard.extend.Backend, or None to let regard choose."
        )
    name = cast(object, getattr(backend, "name", None))
    if not isinstance(name, str) or not name:
        raise ProblemError(f"the name of the backend {type(backend).__name__} is {name!r}: expected a text.")
    if whole(backend.tile, f"the tile of the backend {name!r}", "tokens per side", least=8) % 8:
        raise ProblemError(
            f"the tile of the backend {name!r} is {backend.tile}: expected a multiple of 8 tokens per side."
        )
    if type(backend).__hash__ is None:
        raise ProblemError(
            f"backend {backend.name!r} is not hashable, and plans are cached by it: make its class a frozen dataclass."
        )


def register_backend(backend: Backend) -> None:
    """Let `backend=` take this backend by its name, in this process; `torch.compile` needs that.

    Raises:
        ProblemError: another backend has its name.
    """
    check_backend(backend)
    if BACKENDS.setdefault(backend.name, backend) != backend:
        raise ProblemError(f"another backend is named {backend.name!r}: give yours another name.")


def forget_plans() -> None:
    """Forget every plan and schedule."""
    _plans.clear()
    forget_schedules()


def _make_plan(posed: Problem, mask: Mask | None, backend: str | Backend | None, without: dict[str, str]) -> Plan:
    chosen = BACKENDS[backend] if isinstance(backend, str) else backend
    sizes = CallSizes(posed.batch, posed.heads, posed.queries, posed.keys, posed.offset)
    order = _cuda_order(posed, mask, sizes) if chosen is None and posed.device == "cuda" else None
    names = ORDER.get(posed.device, ("reference",)) if order is None else order.backends
    passed: dict[str, list[str]] = {}
    for candidate in [chosen] if chosen else [BACKENDS[name] for name in names]:
        tiles = cached_schedule(mask, sizes, candidate.tile)
        problem, steps = _lower(posed, tiles, candidate)
        reasons = [without[candidate.name]] if candidate.name in without else _refusals(candidate, problem)
        if not reasons:
            aside = {} if chosen else _aside(posed.device)
            return Plan(posed, problem, tiles, steps, candidate, passed | aside, order=order)
        passed[candidate.name] = reasons
    raise RefusalError(refusal_message(posed, passed, chosen))


def _refusals(backend: Backend, problem: Problem) -> list[str]:
    reasons = cast(object, backend.refusals(problem))  # a user's backend may return anything
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in cast("list[object]", reasons)):
        raise ProblemError(
            f"The backend {backend.name!r} returned {reasons!r} as its refusals: expected a list of texts, empty if it "
            "can run the problem."
        )
    return cast("list[str]", reasons)


def _cuda_order(posed: Problem, mask: Mask | None, sizes: CallSizes) -> Order:
    tiles = cached_schedule(mask, sizes, BACKENDS["triton"].tile)
    return order_for(simplify_mask(posed, tiles)[0])


def _is_cacheable(problem: Problem) -> bool:
    """Whether the fingerprints of its specs tell when the specs change."""
    return all(spec is None or spec.is_cacheable for spec in (problem.mask, problem.bias, problem.score))


def _lower(posed: Problem, tiles: Schedule, backend: Backend) -> tuple[Problem, tuple[Step, ...]]:
    problem, steps = posed, list[Step]()
    for lowering in (simplify_mask, *backend.lowerings):
        problem, step = lowering(problem, tiles)
        steps += [step] if step else []
    return problem, tuple(steps)


def _aside(device: str) -> dict[str, list[str]]:
    if device not in ORDER:
        return {backend: [why] for backend, why in ELSEWHERE.items()}
    return {backend: [why] for (place, backend), why in ASIDE.items() if place == device}


def refusal_message(problem: Problem, passed: dict[str, list[str]], chosen: Backend | None) -> str:
    """The message of a `RefusalError`: the problem, and each backend's reasons."""
    head = f"The backend {chosen.name!r} cannot run this." if chosen else "No backend can run this."
    hint = "\n  Leave backend=None to let regard choose." if chosen else ""
    reasons = "".join(f"\n  {name}: {reason}" for name, found in passed.items() for reason in found)
    return f"{head}\n  {problem}{reasons}{hint}"


_plans: LRUCache[object, Plan] = LRUCache(entries=256, nbytes=KEPT_BYTES, size=lambda plan: plan.schedule.nbytes)
"""Plans hold fingerprints and no tensors, so no tensor of a caller is kept alive."""
