"""Derivatives of calls that are one operator to torch: in a dispatch mode, in a graph, in an exported program."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.forward_ad import dual_level, make_dual
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, RefusalError, T5Bias, TensorBias, attend
from regard.scores import Bilinear
from tests.dispatch.traced import SINK, Attention, K, Q, V, compiled

SMALL = tuple(torch.randn(1, 2, 5, 8) for _ in range(3))


def strided(t: Tensor) -> Tensor:
    """The same tensor, whose last dimension is not contiguous."""
    return t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)


DIFFERENTIATED: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "nothing": (lambda q, k, v, t: attend(q, k, v), None),
    "strided": (lambda q, k, v, t: attend(strided(q), strided(k), strided(v)), None),
    "T5Bias": (lambda q, k, v, t: attend(q, k, v, bias=T5Bias(t)), (32, 2)),
    "two biases": (lambda q, k, v, t: attend(q, k, v, bias=TensorBias(t) + TensorBias(t[:, :, :1])), (1, 2, 5, 5)),
    "a sink in bfloat16": (
        lambda q, k, v, t: attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), sink=t.bfloat16()).float(),
        (2,),
    ),
    "Bilinear": (lambda q, k, v, t: attend(q, k, v, score=Bilinear(t)), (8, 8)),
    "reference": (lambda q, k, v, t: attend(q, k, v, backend="reference"), None),
    "sdpa": (lambda q, k, v, t: attend(q, k, v, backend="sdpa"), None),
}


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def leaves_of(sizes: tuple[int, ...] | None) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in (*SMALL, *([] if sizes is None else [torch.randn(sizes)]))]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


def called(function: Any, leaves: list[Tensor]) -> Tensor:
    return function(*leaves, *([None] * (4 - len(leaves))))


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("mode", [PassThrough, lambda: FlopCounterMode(display=False)], ids=["a mode", "the counter"])
def test_gradients_in_a_dispatch_mode_are_those_outside(name: str, mode: Any):
    function, sizes = DIFFERENTIATED[name]
    leaves = leaves_of(sizes)
    expected = gradients(called(function, leaves), leaves)
    with mode():
        found = gradients(called(function, leaves), leaves)
    for ours, outside in zip(found, expected, strict=True):
        assert torch.equal(ours, outside)


def test_a_compiled_call_whose_backward_pass_alone_is_in_a_dispatch_mode_has_its_gradients():
    function, sizes = DIFFERENTIATED["T5Bias"]
    leaves = leaves_of(sizes)
    out = compiled(function)(*leaves)
    with FlopCounterMode(display=False):
        found = gradients(out, leaves)
    for ours, outside in zip(found, gradients(function(*leaves), leaves), strict=True):
        assert torch.equal(ours, outside)


def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return attend(q, k, v, backend="reference")


def exported() -> Any:
    return torch.export.export(Attention(), SMALL).module()


OPERATORS = {
    "exported": exported,
    "compiled": lambda: torch.compile(Attention(), backend="eager", fullgraph=True),
    "counted": lambda: counted,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_second_derivative_of_the_operator_is_refused_and_not_a_part_of_it(name: str):
    leaves = leaves_of(None)
    out = OPERATORS[name]()(*leaves)
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RefusalError, match="second derivative: leave torch"):
        torch.autograd.grad(out.sum() + grad.square().sum(), leaves)


def test_an_exported_program_refuses_forward_mode_and_gives_no_tangents_of_zero():
    program, tangents = exported(), tuple(t.cos() for t in SMALL)
    with pytest.raises(RefusalError, match=r"jvp.*exports"):
        torch.func.jvp(program, SMALL, tangents)
    with dual_level(), pytest.raises(RefusalError, match=r"jvp.*exports"):
        program(*map(make_dual, SMALL, tangents))


def test_an_exported_program_runs_where_no_derivative_flows_through_it():
    program, expected = exported(), Attention()(*SMALL)

    def held(x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = program(*SMALL).sum()
        return x.square().sum() * frozen

    x = torch.ones(3)
    torch.testing.assert_close(torch.func.grad(held)(x), 2 * x * expected.sum())
    torch.testing.assert_close(torch.func.jvp(held, (x,), (x,))[1], 6 * expected.sum())
    with dual_level():
        assert torch.equal(program(*SMALL), expected)


@pytest.mark.parametrize("how", ["counted", "graph", "graph with breaks"])
@pytest.mark.parametrize("kind", ["grad", "jvp"])
def test_a_traced_call_that_no_derivative_reaches_is_constant_in_torch_func(kind: str, how: str):
    def scaled(x: Tensor) -> Tensor:
        return x.square().sum() * attend(Q, K, V, mask=Causal(), sink=SINK).sum()

    def derivative(x: Tensor) -> Tensor:
        return torch.func.grad(scaled)(x) if kind == "grad" else torch.func.jvp(scaled, (x,), (x,))[1]

    x = torch.ones(3)
    expected = derivative(x)
    if how == "counted":
        with FlopCounterMode(display=False):
            found = derivative(x)
    else:
        found = torch.compile(derivative, fullgraph=how == "graph", backend="aot_eager")(x)
        torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", ["k", "sink", "bias"])
@pytest.mark.parametrize("kind", ["grad", "jvp"])
def test_a_counted_call_is_refused_where_a_derivative_reaches_any_of_its_tensors(kind: str, changed: str):
    tensors = {"k": K, "sink": SINK, "bias": torch.randn(4, 11, 23)}

    def total(t: Tensor) -> Tensor:
        k, sink, bias = (t if name == changed else given for name, given in tensors.items())
        return attend(Q, k, V, mask=Causal(), sink=sink, bias=TensorBias(bias)).sum()

    t = tensors[changed]
    with FlopCounterMode(display=False), pytest.raises(RefusalError, match=r"FLOP counter.*is not supported"):
        torch.func.grad(total)(t) if kind == "grad" else torch.func.jvp(total, (t,), (t,))


def test_an_exported_program_is_counted_inside_of_forward_mode():
    program, expected = exported(), Attention()(*SMALL)
    with FlopCounterMode(display=False) as counter, dual_level():
        assert torch.equal(program(*SMALL), expected)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("how", ["exported", "counted"])
def test_forward_mode_in_another_thread_leaves_gradients_as_they_are(how: str):
    program = exported() if how == "exported" else counted
    leaves = [t.clone().requires_grad_() for t in SMALL]
    expected = gradients(program(*leaves), leaves)
    with dual_level(), ThreadPoolExecutor(1) as other:  # a level is of all threads
        found = other.submit(lambda: gradients(program(*leaves), leaves)).result()
    for ours, alone in zip(found, expected, strict=True):
        assert torch.equal(ours, alone)


@pytest.mark.parametrize("kind", ["grad", "jacrev", "grad of vmap"])
def test_an_exported_program_refuses_the_gradients_of_torch_func(kind: str):
    program = exported()
    functions: dict[str, Any] = {
        "grad": torch.func.grad(lambda *t: program(*t).sum()),
        "jacrev": torch.func.jacrev(program),
        "grad of vmap": torch.func.grad(lambda q, k, v: torch.vmap(program)(q[None], k[None], v[None]).sum()),
    }
    with pytest.raises(RefusalError, match=r"torch\.func\.grad of a call that torch traces or exports"):
        functions[kind](*SMALL)


def test_an_exported_program_refuses_several_gradients_at_once():
    leaves = leaves_of(None)
    out = exported()(*leaves)
    several = torch.stack([torch.ones_like(out)] * 3)
    with pytest.raises(RefusalError, match="several at once"):
        torch.autograd.grad(out, leaves, several, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RefusalError, match="several at once"):
        torch.vmap(lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True))(several)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it of every tensor that it compiles with
@pytest.mark.parametrize("name", ["nothing", "T5Bias"])
def test_compiled_autograd_leaves_the_gradients_of_a_call_that_was_not_compiled(name: str):
    """It compiled what computes them, and raised an error at another length."""
    function, sizes = DIFFERENTIATED[name]
    for tokens in (5, 3, 2):
        leaves = leaves_of(sizes)
        outs = [called(function, [t[:, :, :tokens] for t in leaves[:3]] + leaves[3:]) for _ in range(2)]
        expected = gradients(outs[0], leaves)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            outs[1].square().sum().backward()
        torch.testing.assert_close([t.grad for t in leaves], list(expected))
