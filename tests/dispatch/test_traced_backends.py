"""Traced calls that draw random numbers, and backends of users in them."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import MultiHeadAttention, State, attend
from regard.dispatch.choose import BACKENDS
from regard.extend import Backend, Kernel, Operands, Problem, Schedule, register_backend
from tests.test_native import needs_library


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "reference"])
def test_a_traced_call_with_dropout_leaves_torchs_generators_to_other_threads(
    backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("regard.backend.reference.REMEMBERED", 0)  # so that `reference` computes tiles again
    monkeypatch.setattr(torch.random, "fork_rng", refuse)
    q = torch.randn(1, 2, 300, 16)
    v = torch.randn(1, 2, 300, 16, requires_grad=True)
    with FlopCounterMode(display=False):
        torch.manual_seed(3)
        out, after = attend(q, q, v, dropout=0.5, backend=backend), torch.rand(1)
        torch.rand(1)  # what another thread draws
        (dv,) = torch.autograd.grad(out.sum(), v)
        assert torch.allclose((dv * v).sum(), out.sum(), rtol=1e-4)  # the output is linear in v
        torch.manual_seed(3)
        assert torch.equal(attend(q, q, v, dropout=0.5, backend=backend), out)
        assert torch.equal(torch.rand(1), after)


def refuse(*_: object, enabled: bool = True, **__: object) -> Any:
    assert not enabled, "a generator of torch was taken"
    return nullcontext()


class Drawing(Backend):
    name = "drawing"

    def refusals(self, problem: Problem) -> list[str]:
        return []

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        def kernel(operands: Operands) -> State:
            scores = problem.scale * operands.q @ operands.k.mT
            weights = torch.nn.functional.dropout(scores.softmax(-1), problem.dropout)
            return State(weights @ operands.v, scores.logsumexp(-1))

        return kernel


@dataclass(frozen=True)
class Equal(Drawing):
    name: str = "equal"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda _: Equal()])
def test_a_copy_of_a_registered_backend_and_an_equal_one_are_traced(again: Callable[[Equal], Equal]):
    register_backend(mine := Equal())
    try:
        module, q = MultiHeadAttention(24, 3, backend=mine), torch.randn(1, 5, 24)
        copied = copy.deepcopy(module)
        copied.backend = again(mine)
        compiled = torch.compile(copied, backend="eager", fullgraph=True)
        with FlopCounterMode(display=False):
            assert torch.equal(copied(q), module(q))
        assert torch.equal(compiled(q), module(q))
    finally:
        del BACKENDS["equal"]


def test_a_module_is_copied_with_its_backend():
    module = MultiHeadAttention(24, 3, backend=Drawing())
    assert copy.deepcopy(module).backend is module.backend


def test_a_users_backend_draws_the_same_in_the_backward_pass_of_a_traced_call():
    register_backend(Drawing())
    try:
        q, v = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16, requires_grad=True)
        with FlopCounterMode(display=False):
            out = attend(q, q, v, dropout=0.5, backend="drawing")
            state = torch.get_rng_state()
            (dv,) = torch.autograd.grad(out.sum(), v)
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.allclose((dv * v).sum(), out.sum(), rtol=1e-4)
    finally:
        del BACKENDS["drawing"]
