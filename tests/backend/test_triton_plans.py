"""The plans of the kernels for GPUs: one for each kind of call, whatever its lengths and masks."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, Documents, Prefix, ProblemError, T5Bias, TensorBias, Window, attend, explain
from regard.cache import Int8, KVCache, Paged
from regard.dispatch import choose
from regard.dispatch.execute import execute
from tests.oracle import Case, dense, worst
from tests.pretended_gpu import pretended_gpu

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

HEADS, KV_HEADS, DIM = 2, 1, 16


@pytest.fixture
def plans(no_plans: None, monkeypatch: pytest.MonkeyPatch) -> list[choose.Plan]:
    """The plans that are made, in a process that has made no call."""
    made: list[choose.Plan] = []
    make = choose._make_plan

    def record(*arguments: Any) -> choose.Plan:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(choose, "_make_plan", record)
    return made


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)
    q, k, v = (torch.randn(1, heads, tokens, DIM) for heads, tokens in sizes)
    return q, k, v


TABLE = torch.linspace(-1, 1, 32 * HEADS).view(32, HEADS)

WORDS: dict[str, Any] = {
    "no mask": lambda keys: {},
    "window, sinks": lambda keys: {"mask": Causal() & (Window(19) | Prefix(2)), "softcap": 3.0},
    "documents": lambda keys: {"mask": Causal() & Documents(torch.arange(keys) // 23)},
    "biases": lambda keys: {"bias": Alibi(HEADS) + T5Bias(TABLE)},
    "a bias as wide as the keys": lambda keys: {"bias": Alibi(HEADS) + TensorBias(torch.randn(1, 1, 1, keys))},
}


@pytest.mark.parametrize(
    ("name", "step"), [*((name, 9) for name in WORDS), pytest.param("window, sinks", 1, marks=pytest.mark.exhaustive)]
)
def test_lengths_of_decoding_have_one_plan(name: str, step: int, plans: list[choose.Plan]):
    for keys in range(30, 94, step):
        case = Case(*tensors(1, keys), WORDS[name](keys))
        out = attend(case.q, case.k, case.v, **case.words, backend="triton")
        assert worst(out, dense(case)[0]) < 2e-6
    assert len(plans) <= (2 if name in ("window, sinks", "documents") else 1)  # a short one may hide nothing


def test_on_a_cpu_lengths_under_a_bias_as_wide_as_the_keys_have_one_plan(plans: list[choose.Plan]):
    for keys in (30, 31, 44):
        for queries in (1, 7):
            case = Case(*tensors(queries, keys), {"bias": TensorBias(torch.randn(HEADS, queries, keys))})
            assert worst(attend(case.q, case.k, case.v, **case.words), dense(case)[0]) < 2e-6
    assert len(plans) == 2  # with one row, and with several
    with pytest.raises(ProblemError, match="does not broadcast"):
        attend(*tensors(7, 44), bias=TensorBias(torch.randn(HEADS, 7, 30)))


def test_lengths_of_training_have_one_plan_and_the_gradients_of_the_definition(plans: list[choose.Plan]):
    for keys in (200, 201, 199, 260):
        case = Case(*(t.requires_grad_() for t in tensors(keys, keys)), {"mask": Causal() & Window(77)})
        leaves, found = (case.q, case.k, case.v), list[tuple[Tensor, ...]]()
        for out in (attend(*leaves, **case.words, backend="triton"), dense(case)[0]):
            found.append(torch.autograd.grad(out.sum(), leaves))
        assert all(worst(a, b) < 1e-5 for a, b in zip(*found, strict=True))
    assert len(plans) == 1


@pytest.mark.parametrize("steps", [20, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_a_cache_of_pages_or_codes_decodes_by_one_plan(steps: int, plans: list[choose.Plan]):
    for cache in (KVCache(Paged(16)), KVCache(Paged(16), Int8(residual=16, sinks=0))):
        q, k, v = tensors(64, 64)
        cache.append(k, v)
        plans.clear()
        for _ in range(steps):
            q, k, v = tensors(1, 1)
            stored = cache.append(k, v)
            out = attend(q, *stored, mask=Causal(), backend="triton")
            case = Case(q, *(t.dense() if not isinstance(t, Tensor) else t for t in stored))
            assert worst(out, dense(case)[0]) < 2e-6
        assert len(plans) <= 2  # the first steps have no codes


def test_a_backend_on_a_gpu_is_the_same_whatever_was_called_before(
    plans: list[choose.Plan], monkeypatch: pytest.MonkeyPatch
):
    calls = [(queries, keys, mask) for queries in (1, 7, 90) for keys in (90, 91, 128) for mask in MASKS]
    expected = [on_meta(*call) for call in calls]
    ran: list[str] = []

    def record(plan: choose.Plan, *rest: Any) -> Any:
        ran.append(plan.backend)
        return execute(plan, *rest)

    monkeypatch.setattr("regard.attention.execute", record)
    plans.clear()
    with pretended_gpu() as gpu:
        for queries, keys, mask in calls:
            q, k, v = (gpu.put(t.bfloat16()) for t in tensors(queries, keys))  # torch shares heads of half types
            attend(q, k, v, mask=mask)
    assert ran == expected
    assert {"sdpa", "triton"} <= set(ran)
    assert len(plans) <= 6


MASKS = (None, Causal(), Causal() & Window(40), Window(500, 500))


def on_meta(queries: int, keys: int, mask: Any) -> str:
    q, k, v = (t.bfloat16().to("meta") for t in tensors(queries, keys))
    plan = explain(q, k, v, mask=mask, device="cuda")
    return plan.backend


def test_steps_of_several_lengths_in_turn_have_the_tiles_of_their_own(plans: list[choose.Plan]):
    cases = [Case(*tensors(1, keys), {"mask": Causal() & Window(21)}) for keys in (50, 80)]
    for _ in range(2):
        for case in cases:
            out = attend(case.q, case.k, case.v, **case.words, backend="triton")
            assert worst(out, dense(case)[0]) < 2e-6
    assert len(plans) == 1


def test_no_size_and_no_seed_makes_another_kernel():
    """Where the kernels are compiled, which the tests of this process do not do."""
    program = """
from regard.gpu.forward import forward
from regard.gpu.gradient_of_keys import gradient_of_keys
from regard.gpu.gradient_of_queries import gradient_of_queries
from regard.gpu.sweep import sweep
for kernel in (forward, gradient_of_queries, gradient_of_keys, sweep):
    print(*(p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert not {"batch", "heads", "group", "queries", "keys", "section", "seed_low", "threshold"} & {*line.split()}
        assert {"q", "k_token", "scale"} <= {*line.split()}
