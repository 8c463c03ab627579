"""torch.compile: whether it is at work, what it may trace, and operators that it calls with graphs."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.torch_internals.missing import VERSION, Absent, find

_Function = TypeVar("_Function", bound=Callable[..., object])

_tracing_context: Callable[[], object | None] = find(
    "torch._guards.TracingContext.try_get",
    lambda: None,
    "with torch 2.11, torch.compile leaves the calls that regard.everywhere would take to torch",
)


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is at work, also where dynamo calls operators with tensors of sizes alone.

    There `torch.compiler.is_compiling` says no in torch 2.11 (`TracingContext`; torch 2.1).
    """
    return torch.compiler.is_compiling() or _tracing_context() is not None


def has_sizes_of_data(tensors: Sequence[Tensor]) -> bool:
    """Whether a size of tensors that torch.compile traces depends on data, so that comparing it is an error.

    As the size of `x[:, : n.item()]` (`has_free_unbacked_symbols`; torch 2.2).
    """
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # noqa: PLC0415 - loads sympy

    return any(map(has_free_unbacked_symbols, tensors))


def or_true(condition: bool) -> bool:
    """The condition of a traced call; True where it depends on sizes of data (`guard_or_true`; torch 2.7)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415 - loads sympy

    return guard_or_true(condition)


def constant_in_graphs(function: _Function) -> _Function:
    """Let torch.compile call the function while it traces, and take its result as a constant.

    As `torch.compiler.assume_constant_result` does (`_dynamo_marked_constant`; torch 2.0), but without loading the
    compiler, which takes 1.8 s.
    """
    made: Any = function
    made._dynamo_marked_constant = True
    return function


@contextmanager
def compiling_for_any_length(variants: int) -> Generator[None]:
    """Inside, dynamo compiles at most this number of variants of a function, and sizes that are equal may differ later.

    Without it, torch takes equal sizes for one size, and compiles again where they differ; its limit is 8 variants.
    Where a setting is missing, torch keeps its own (`torch._dynamo.config.recompile_limit`, torch 2.6;
    `torch.fx.experimental._config.use_duck_shape`, torch 2.3). Set in place: `config.patch` takes 10 times as long.
    """
    found: list[tuple[Any, str, Any]] = []
    for module, name, value in (
        ("torch._dynamo.config", "recompile_limit", variants),
        ("torch.fx.experimental._config", "use_duck_shape", False),
    ):
        config: Any = import_module(module)
        if hasattr(config, name):
            found.append((config, name, getattr(config, name)))
            setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, value in found:
            setattr(config, name, value)


_dynamo_frames: Any = find(
    "torch._C._dynamo.eval_frame",
    None,
    "torch.compile may compile parts of regard inside regard.everywhere()",
)


def skip_frames(function: Any) -> None:
    """Let dynamo compile neither this function nor what it calls (`eval_frame.set_code_exec_strategy`; torch 2.7).

    torch's dispatcher calls it, also inside of what torch.compile runs: dynamo would take its frame for a program's.
    """
    with suppress(AttributeError):
        skip = _dynamo_frames._FrameAction.SKIP
        strategy = _dynamo_frames._FrameExecStrategy(skip, skip)
        _dynamo_frames.set_code_exec_strategy(function.__code__, strategy)


def leave_out_of_graphs(function: Any) -> None:
    """End the graph of a compiled function at calls of this function, and compile neither it nor what it calls.

    As `torch.compiler.disable` does (`_torchdynamo_disable`; torch 2.1), but without loading the compiler. Compiled
    autograd traces the backward passes of functions that were not compiled.
    """
    function._torchdynamo_disable = True
    skip_frames(function)


_Operator: Any = find(
    "torch._higher_order_ops.BaseHOP",
    Absent,
    "torch.compile breaks a graph at regard.flex.flex_attention, and raises an error with fullgraph=True",
)

_higher_order: Any = find(
    "torch._ops.HigherOrderOperator",
    Absent,
    "in compiled calls of regard.flex, the gradient of a torch.autograd.Function in a score_mod is not used",
)


class HigherOrder(_Operator):
    """A higher-order operator: dynamo calls it with the graph of the function that it is called with; torch 2.7."""

    def __init__(self, name: str) -> None:
        if _Operator is not Absent:
            super().__init__(name)

    @property
    def __name__(self) -> str:
        """The name, which dynamo looks up among the operators that it knows, when it meets this one."""
        _let_operands_share_memory(self._name)
        return self._name

    @__name__.setter  # noqa: A003
    def __name__(self, name: str) -> None:
        self._name = name


def _let_operands_share_memory(name: str) -> None:
    """Tell dynamo that operands of a higher-order operator may be views of one tensor, as q, k and v often are.

    It would break the graph, for operators that write to an operand or return one; this one does neither. Dynamo is
    not imported before it is used (`_hop_name_to_variable_class`, `BaseHOPVariable.supports_aliasing`; torch 2.13).
    """
    operators: Any = sys.modules.get("torch._dynamo.variables.higher_order_ops")
    with suppress(AttributeError):
        known, base = operators._hop_name_to_variable_class, operators.BaseHOPVariable
        if name not in known:
            known[name] = type("SharedMemoryVariable", (base,), {"supports_aliasing": True})


def is_higher_order(target: object) -> bool:
    """Whether the target of a node of a graph is a higher-order operator (torch 2.0)."""
    return isinstance(target, _higher_order)


DYNAMO_LISTS_ATTRIBUTES = VERSION >= (2, 12)
"""Whether traced code can list the attributes of frozen dataclasses; else user-defined masks become tables."""
