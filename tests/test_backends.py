"""Backends of users: taken wherever a name is, never replaced by another, shown by `explain`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, MultiHeadAttention, ProblemError, RefusalError, State, attend, attend_state, explain
from regard.dispatch.choose import BACKENDS
from regard.extend import Backend, Kernel, Operands, Problem, Schedule, register_backend

Q, K = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8)


@dataclass(frozen=True)
class Counting(Backend):
    """Computes every small call by the formula, and counts what it compiles."""

    name: str = "counting"
    any_length: bool = False
    compiled: tuple[list[int], ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    def refusals(self, problem: Problem) -> list[str]:
        return ["it has no softcap"] if problem.softcap is not None else []

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        for keys in self.compiled:
            keys.append(problem.keys)

        def kernel(o: Operands) -> State:
            scores = problem.scale * o.q @ o.k.repeat_interleave(2, 1).mT
            if problem.mask is not None:
                scores = scores.masked_fill(~schedule.keep(), -torch.inf)
            return State(scores.softmax(-1) @ o.v.repeat_interleave(2, 1), scores.logsumexp(-1))

        return kernel


def test_an_engine_is_taken_wherever_a_name_is():
    mine = Counting()
    assert torch.allclose(attend(Q, K, K, mask=Causal(), backend=mine), attend(Q, K, K, mask=Causal()), atol=1e-6)
    assert torch.allclose(attend_state(Q, K, K, backend=mine).lse, attend_state(Q, K, K).lse, atol=1e-6)
    assert "runs on counting" in str(explain(Q, K, K, backend=mine))
    module, x = MultiHeadAttention(16, 4, kv_heads=2, backend=mine), torch.randn(1, 5, 16)
    found = module(x)
    module.backend = None
    assert torch.allclose(found, module(x), atol=1e-6)


def test_an_engine_that_refuses_is_not_replaced():
    for call in (attend, explain):
        with pytest.raises(RefusalError, match=r"(?s)The backend 'counting' cannot run this.*it has no softcap"):
            call(Q, K, K, softcap=2.0, backend=Counting())


@dataclass(frozen=True)
class Wrong(Backend):
    """Returns what its result is, or refuses with what its reasons are."""

    name: str = "wrong"
    result: Callable[[Tensor], Any] = lambda q: State(q, q[..., 0])
    reasons: Any = field(default_factory=list)

    def __hash__(self) -> int:
        return hash(self.name)

    def refusals(self, problem: Problem) -> list[str]:
        return self.reasons

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return lambda operands: self.result(operands.q)


def _unchecked(out: Tensor, lse: Tensor) -> State:
    """A state whose shapes do not agree, which the test run would refuse to make."""
    state = State(out, out[..., 0])
    object.__setattr__(state, "lse", lse)
    return state


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda q: q, r"a tensor torch.float32 \[1, 4, 5, 8\]"),
        (lambda q: None, "None"),
        (lambda q: State(q[:, :1], q[:, :1, :, 0]), r"State of out torch.float32 \[1, 1, 5, 8\] and lse .*\[1, 1, 5\]"),
        (lambda q: State(q[..., :3], q[..., 0]), r"State of out torch.float32 \[1, 4, 5, 3\]"),
        (lambda q: State(q.double(), q[..., 0]), "State of out torch.float64"),
        (lambda q: _unchecked(q, q[..., :1, 0]), r"State of .* and lse torch.float32 \[1, 4, 1\]"),
        (lambda q: State(q, q[..., 0].half()), r"State of .* and lse torch.float16 \[1, 4, 5\]"),
    ],
)
def test_a_result_that_is_no_state_of_the_call_is_an_error(result: Any, found: str):
    expected = r"expected a State of out torch.float32 \[1, 4, 5, 8\] and lse torch.float32 \[1, 4, 5\]"
    with pytest.raises(ProblemError, match=rf"^The backend 'wrong' returned {found}.*: {expected}"):
        attend(Q, K, K, backend=Wrong(result=result))


def test_a_result_of_the_right_form_is_taken():
    assert attend(Q, K, K, backend=Wrong()) is Q


@pytest.mark.parametrize("reasons", ["no", None, [3]])
def test_refusals_are_a_list_of_texts(reasons: Any):
    with pytest.raises(
        ProblemError, match=r"^The backend 'wrong' returned .* as its refusals: expected a list of texts"
    ):
        attend(Q, K, K, backend=Wrong(reasons=reasons))


def test_one_kernel_serves_every_length_only_if_the_engine_says_so():
    for any_length, expected in ((False, [9, 8, 7]), (True, [9])):
        compiled: list[int] = []
        mine = Counting(f"counting {any_length}", any_length, (compiled,))
        for keys in (9, 8, 7):
            few = K[:, :, :keys]
            found = attend(Q[:, :, :1], few, few, mask=Causal(), backend=mine)
            assert torch.allclose(found, attend(Q[:, :, :1], few, few), atol=1e-6)
        assert compiled == expected


def test_what_is_no_engine_is_an_error():
    class Mutable(Counting):
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    for wrong, says in ((Counting, "is not known"), (3, "is not known"), (Mutable(), "is not hashable")):
        with pytest.raises(ProblemError, match=says):
            attend(Q, K, K, backend=wrong)


def test_a_traced_call_takes_a_registered_engine():
    mine = Counting()
    compiled = torch.compile(lambda q: attend(q, K, K, backend=mine), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"regard\.extend\.register_backend"):
        compiled(Q)
    register_backend(mine)
    try:
        torch.compiler.reset()
        assert torch.equal(compiled(Q), attend(Q, K, K, backend="counting"))
        register_backend(mine)
        with pytest.raises(ProblemError, match="another backend is named 'counting'"):
            register_backend(Counting(any_length=True))
    finally:
        del BACKENDS["counting"]
