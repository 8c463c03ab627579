"""Every name that torch keeps private and regard needs: what it is for, and what happens where it is missing.

No other file uses a private name of torch (`tests/architecture` checks this), so a new torch is checked here. A name
that a torch lacks gets a substitute: results stay right, or torch raises its own error. `MISSING` says which;
`regard doctor` and the warning of a torch that is newer than the tested ones (`torch_versions.py`) repeat it.

What is wrapped in a function is looked up when it is called, as its value changes or its module is heavy.
"""

import itertools
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from regard.errors import RefusalError

__all__ = ["DispatchMode", "FakeTensor", "FunctionalTensor"]

_Function = TypeVar("_Function", bound=Callable[..., object])

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

MISSING: dict[str, str] = {}
"""What happens without each private name that this torch lacks, by the name; empty for the versions that were tried."""


class _Absent:
    """A class without instances, in place of a class that torch no longer has."""


def _find(name: str, substitute: Any, consequence: str) -> Any:
    """The private name, `torch.a.b`; where torch lacks it, the substitute, with the consequence noted in `MISSING`."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(_module(module), attribute)
    except (ImportError, AttributeError):
        MISSING[name] = consequence
        return substitute


def _module(name: str) -> Any:
    """The module, or the attribute of a module: some parts of `torch._C` are no modules to Python."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        if not parent:
            raise
        return getattr(_module(parent), attribute)


if TYPE_CHECKING:
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
else:
    FakeTensor = _find(
        "torch._subclasses.FakeTensor",
        _Absent,
        "a call that torch traces may fail with torch's own error, where a mask has a tensor",
    )
    """A tensor of sizes alone, while torch traces; torch 1.13."""

    FunctionalTensor = _find(
        "torch._subclasses.functional_tensor.FunctionalTensor",
        _Absent,
        "a call that torch.export or aot_autograd traces raises ProblemError where a mask has a tensor",
    )
    """How aot_autograd wraps tensors; torch 2.1."""

    DispatchMode = _find(
        "torch.utils._python_dispatch.TorchDispatchMode",
        _Absent,
        "regard.flex calls each mask_mod and score_mod for every pair",
    )
    """A context that is shown each operator; torch 1.12."""

_Operator: Any = _find(
    "torch._higher_order_ops.BaseHOP",
    _Absent,
    "torch.compile breaks a graph at regard.flex.flex_attention, and raises an error with fullgraph=True",
)


_higher_order: Any = _find(
    "torch._ops.HigherOrderOperator",
    _Absent,
    "in compiled calls of regard.flex, the gradient of a torch.autograd.Function in a score_mod is not used",
)


class HigherOrder(_Operator):
    """A higher-order operator: dynamo calls it with the graph of the function that it is called with; torch 2.7."""

    def __init__(self, name: str) -> None:
        if _Operator is not _Absent:
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


is_any_autocast_enabled: Callable[[], bool] = _find(
    "torch._C._is_any_autocast_enabled",
    lambda: torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    "torch.autocast is seen for the CPU and for CUDA only",
)
"""Whether `torch.autocast` is on for any device, in 50 ns; torch 1.13."""

DisabledTorchFunction: Any = _find(
    "torch._C._disabled_torch_function_impl",
    object(),
    "tensors of a class whose __torch_function__ changes nothing raise ProblemError",
)
"""What a subclass has as its `__torch_function__` where it changes nothing; torch 1.7."""

ignore_torch_function: Callable[[], AbstractContextManager[None]] = _find(
    "torch._C.DisableTorchFunctionSubclass",
    nullcontext,
    "tensors of a class of their own in a mask are read by the functions of that class",
)
"""Inside, the `__torch_function__` of subclasses is not called; torch 2.0."""

ignore_func_transforms: Callable[[], AbstractContextManager[None]] = _find(
    "torch._C._DisableFuncTorch",
    nullcontext,
    "a call inside torch.func may fail with torch's own error",
)
"""Inside, `torch.func` (vmap, grad ...) does not see operators; torch 2.0."""

current_func_transform: Callable[[], object | None] = _find(
    "torch._C._functorch.peek_interpreter_stack",
    lambda: "unknown",
    'every call is computed as inside torch.func, by backend "reference": slowly, and refused by attention over ranks',
)
"""The innermost transform of `torch.func` at work, None outside of all; torch 2.0."""

_func_transforms: Callable[[], list[Any] | None] = _find(
    "torch._C._functorch.get_interpreter_stack",
    lambda: None,
    "torch.func.grad of a call that torch traces fails with torch's own error",
)
_gradient_transform: object = _find(
    "torch._C._functorch.TransformType.Grad",
    None,
    "torch.func.grad of a call that torch traces fails with torch's own error",
)
_tangent_transform: object = _find(
    "torch._C._functorch.TransformType.Jvp",
    None,
    "inside torch.func.jvp an append to a cache fails with torch's own error, and flex_attention misreads masks",
)

_map_transform: object = _find(
    "torch._C._functorch.TransformType.Vmap",
    None,
    "torch.vmap of a compiled flex_attention fails with torch's own error",
)


def in_func_grad() -> bool:
    """Whether `torch.func.grad`, `vjp` or `jacrev` is at work, at any level."""
    return any(each.key() == _gradient_transform for each in _func_transforms() or ())


# as `torch.compiler.assume_constant_result` does, which loads torch's compiler (torch 2.0); dynamo guards on the levels
in_func_grad._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def in_func_vmap() -> bool:
    """Whether `torch.vmap` is at work, at any level."""
    return any(each.key() == _map_transform for each in _func_transforms() or ())


in_func_vmap._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def in_func_derivative() -> bool:
    """Whether `torch.func.grad`, `jvp` or any other derivative of `torch.func` is at work, at any level."""
    return any(each.key() in (_gradient_transform, _tangent_transform) for each in _func_transforms() or ())


is_func_wrapper: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    lambda _: current_func_transform() is not None,
    "inside torch.func, the tensors of masks and biases are not compared, so calls are planned each time",
)
"""Whether a tensor is a wrapper that `torch.func` made around another; torch 2.0."""

is_batched: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_batchedtensor",
    lambda _: False,
    "a mask that torch.vmap maps over fails with torch's own error",
)
"""Whether `torch.vmap` maps over the tensor; torch 2.0."""

_is_gradient_wrapper: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_gradtrackingtensor",
    lambda _: False,
    "a mask that is made inside torch.func.grad fails with torch's own error",
)
"""Whether a tensor is the wrapper of `torch.func.grad`, `jvp` and the like; torch 2.0."""

_unwrapped_once: Callable[[Tensor], Tensor] = _find(
    "torch._C._functorch.get_unwrapped",
    lambda t: t,
    "a mask that is made inside torch.func.grad fails with torch's own error",
)
"""The tensor in a wrapper of `torch.func`; torch 2.0."""


def without_gradient_wrappers(t: Tensor) -> Tensor:
    """The tensor whose derivatives `torch.func.grad`, `jvp` and the like follow, with the same elements.

    Every operator inside such a transform returns a wrapper, also of tensors that have no derivative. While
    `torch.compile` traces, the tensor is returned as it is: its tracer cannot ask for wrappers.
    """
    while not torch.compiler.is_compiling() and _is_gradient_wrapper(t):
        t = _unwrapped_once(t)
    return t


def is_mapped(t: Tensor) -> bool:
    """Whether `torch.vmap` maps over the tensor, also where a derivative of `torch.func` follows it."""
    return is_batched(without_gradient_wrappers(t))


_level_of: Callable[[Tensor], int] = _find(
    "torch._C._functorch.maybe_get_level",
    lambda _: sys.maxsize,
    "a function of a mask that reads what torch.vmap maps over, inside of a derivative, fails with torch's own error, "
    "or ends the process",
)
"""The depth of the transform that made this wrapper of `torch.func`; torch 2.0."""


def transform_depth() -> int:
    """How many transforms of `torch.func` are at work, one inside of the other."""
    return len(_func_transforms() or ())


def is_mapped_at(depth: int, t: Tensor) -> bool:
    """Whether a `torch.vmap` of at most this depth maps over the tensor, also where other transforms follow it."""
    while is_batched(t) or _is_gradient_wrapper(t):
        if is_batched(t) and _level_of(t) <= depth:
            return True
        t = _unwrapped_once(t)
    return False


_is_lazy_zero: Callable[[Tensor], bool] = _find(
    "torch.Tensor._is_zerotensor",
    lambda _: False,
    "a tensor of zeros without memory, such as forward mode makes, is refused as an error in regard",
)
"""Whether all elements are 0 and none has memory; torch 1.11."""


def is_lazy_zero(t: object) -> bool:
    """Whether it is a tensor of zeros without memory, as forward-mode differentiation makes them."""
    return (type(t) is Tensor or type(t) is Parameter) and _is_lazy_zero(t)  # other classes may not know the question


def resolve_lazy(t: Tensor) -> Tensor:
    """The tensor with its elements in memory: without a lazy negation, and no lazy zero."""
    return t.clone() if is_lazy_zero(t) else t.resolve_neg()


is_legacy_batched: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_legacy_batchedtensor",
    lambda _: False,
    "autograd.grad(is_grads_batched=True) fails with torch's own error",
)
"""The same inside `autograd.grad(is_grads_batched=True)`; torch 2.1."""

flash_attention_for_cpu: Any = _find(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    None,
    'the backend "sdpa" refuses every call',
)
"""torch's fused kernel on the CPU, (out, lse); torch 2.2."""

_NO_FUSED = 'on CUDA, the backend "sdpa" refuses causal calls, and calls that return the log-sum-exp'

cudnn_attention: Any = _find("torch.ops.aten._scaled_dot_product_cudnn_attention", None, _NO_FUSED)
"""cuDNN's kernel, (out, lse, ...) with what dropout drew; with an argument for a bias since torch 2.5.

The log-sum-exp is the natural logarithm, float32 [batch, heads, queries, 1], or without the last axis."""

cudnn_attention_backward: Any = _find("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", None, _NO_FUSED)
"""The gradients of q, k and v; torch 2.5."""

flash_attention: Any = _find("torch.ops.aten._scaled_dot_product_flash_attention", None, _NO_FUSED)
"""Flash attention, with results in the order of `cudnn_attention`; lse [batch, heads, queries]; torch 2.1."""

flash_attention_backward: Any = _find("torch.ops.aten._scaled_dot_product_flash_attention_backward", None, _NO_FUSED)
"""The gradients of q, k and v, with arguments in another order than those of cuDNN; torch 2.1."""

_NO_GRADIENTS = "gradients of calls that torch.compile traces, or shows to a dispatch mode, raise RefusalError"

_force_keys: Any = _find("torch._C._ForceDispatchKeyGuard", None, _NO_GRADIENTS)
_included_keys: Any = _find("torch._C._dispatch_tls_local_include_set", None, _NO_GRADIENTS)
_excluded_keys: Any = _find("torch._C._dispatch_tls_local_exclude_set", None, _NO_GRADIENTS)
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")
_LAZY = ("Conjugate", "Negative", "ZeroTensor")
_lazy_keys: tuple[Any, ...] = tuple(_find(f"torch._C.DispatchKey.{name}", None, _NO_GRADIENTS) for name in _LAZY)
_autograd_keys: tuple[Any, ...] = tuple(
    _find(f"torch._C.DispatchKey.{name}", None, _NO_GRADIENTS) for name in _AUTOGRAD
)
_is_excluded: Callable[[Any], bool] = _find(
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    lambda _: False,
    "a user's bias or score that calls conj() is computed without it in a call that is shown to a dispatch mode",
)


def recording_gradients() -> AbstractContextManager[None]:
    """Inside, operators record how they are differentiated, also in an operator, which torch runs below autograd.

    `torch.enable_grad` alone does not do so there: no operator would have a gradient (`_ForceDispatchKeyGuard`,
    `_dispatch_tls_local_include_set`, `_dispatch_tls_local_exclude_set`; torch 2.0). Their gradients may be lazy, as in
    `resolving_lazy_tensors`.
    """
    if lost := [name for name, consequence in MISSING.items() if consequence == _NO_GRADIENTS]:
        raise RefusalError(
            f"the gradients of a call that torch traces need {', '.join(lost)} of torch, and torch {torch.__version__} "
            "has no such name: leave torch.compile or the dispatch mode out, or install a torch that `regard doctor` "
            "lists as tested."
        )
    return _including(_autograd_keys + _lazy_keys)


def resolving_lazy_tensors() -> AbstractContextManager[None]:
    """Inside, operators compute with what `conj()` and `.imag` of it mean, also in an operator below a dispatch mode.

    torch does not conjugate or negate the elements of such a tensor: other operators do when they read it. Below a mode
    they would read the elements as they are stored (`_dispatch_tls_is_dispatch_key_excluded`; torch 1.13).
    """
    if not _is_excluded(_lazy_keys[0]):
        return nullcontext()
    return _including(_lazy_keys)


def _including(keys: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Inside, torch does not leave these dispatch keys out."""
    excluded = _excluded_keys()
    for key in keys:
        excluded = excluded.remove(key)
    return _force_keys(_included_keys(), excluded)


_NO_EVERYWHERE = "regard.everywhere() raises RefusalError"

attention_of_torch: Callable[..., Tensor] = partial(
    _find("torch.ops.aten.scaled_dot_product_attention.default._op_dk", _Absent, _NO_EVERYWHERE),
    _find("torch._C.DispatchKey.CompositeImplicitAutograd", None, _NO_EVERYWHERE),
)
"""torch's own attention, also while another kernel is registered for it (`OpOverload._op_dk`; torch 2.0)."""

kernels_of_attention: dict[Any, Any] = _find(
    "torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache",
    {},
    "torch.compile keeps torch's attention inside regard.everywhere(), in a process that traced attention before",
)
"""Which kernel the tracer of aot_autograd calls for torch's attention, by dispatch key. It is looked up once, and torch
forgets it only for kernels that were registered in Python by `py_impl` (`OpOverload._dispatch_cache`; torch 1.13)."""

fused_attention_of_torch: Callable[..., tuple[Tensor, ...]] = _find(
    "torch._scaled_dot_product_flash_attention_for_cpu",
    lambda q, k, v, dropout, causal, *, scale: (attention_of_torch(q, k, v, None, dropout, causal, scale=scale),),
    "small calls inside regard.everywhere() take some 20 us more",
)
"""The fused kernel by the function that Python code calls, some us faster than by `torch.ops`; torch 2.2."""

choice_of_torch: Callable[..., int] = _find(
    "torch._fused_sdp_choice", lambda *_: -1, "small calls inside regard.everywhere() take some 20 us more"
)
"""Which kernel torch's attention would choose: 1 for the fused one; torch 2.0."""

is_flash_enabled: Callable[[], bool] = _find(
    "torch._C._get_flash_sdp_enabled",
    torch.backends.cuda.flash_sdp_enabled,
    "small calls inside regard.everywhere() take 1 us more",
)
"""`torch.backends.cuda.flash_sdp_enabled` as one function of C++; torch 2.0."""

_tensor_guards: Any = (
    _find("torch._C._dynamo.guards.TensorGuards", None, "small calls take 1 to 3 us more")
    if VERSION <= (2, 15)
    else None
)
"""What torch.compile compares tensors with; torch 2.0. Called otherwise than it expects, it ends the process: so it is
used by versions that were tried."""


def guard_of(*tensors: Tensor, free: Sequence[int | None] = ()) -> Callable[..., bool] | None:
    """A function that says whether tensors are like these, where all that matters to an operator is the same.

    Class, dtype, device, layout, sizes, strides, `requires_grad`, and of the thread: inference mode, autocast of that
    device, `torch.func` and dispatch modes, but not grad mode. None for tensors of which two are one object.

    Args:
        free: for each tensor, the dimension whose size may differ, or None; empty where all sizes are the same.
    """
    if _tensor_guards is None:
        return None
    sizes: list[list[int | None]] = [list(t.shape) for t in tensors]
    for of, axis in zip(sizes, free, strict=False):
        if axis is not None:
            of[axis] = None
    strides = [list(t.stride()) for t in tensors]
    check = _tensor_guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if check(*tensors) else None


attention_of_functional: Callable[..., Tensor] = _find(
    "torch._C._nn.scaled_dot_product_attention", None, _NO_EVERYWHERE
)
"""`torch.nn.functional.scaled_dot_product_attention`, also where a program put another there; torch 2.0."""

encoder_layer_of_torch: Callable[..., Tensor] = _find("torch._transformer_encoder_layer_fwd", None, _NO_EVERYWHERE)
"""`torch.nn.TransformerEncoderLayer` in one C++ function, for inference; torch 1.12."""

packed_attention_of_torch: Callable[..., tuple[Tensor, Tensor | None]] = _find(
    "torch._native_multi_head_attention", None, _NO_EVERYWHERE
)
"""`torch.nn.MultiheadAttention` in one C++ function, for inference; torch 1.12."""

_register_builtin: Any = _find("torch.jit._builtins._register_builtin", None, _NO_EVERYWHERE)
_dynamo_frames: Any = _find(
    "torch._C._dynamo.eval_frame",
    None,
    "torch.compile may compile parts of regard inside regard.everywhere()",
)

dispatch_modes: Callable[[], int] = _find(
    "torch._C._len_torch_dispatch_stack",
    lambda: 1,
    "every call runs as an operator, which costs some 30 us more, and fails inside torch.func with torch's own error; "
    "regard.everywhere() skips nothing that masks of numbers hide, and its report has no times",
)
"""How many dispatch modes are on, as torch's FLOP counter is one; torch 2.0."""

_saving_hooks: Callable[[bool], object | None] = _find(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    lambda _: None,
    "a checkpoint inside regard.everywhere() may raise CheckpointError where attention has a mask",
)

_find(
    "torch.autograd.forward_ad._current_level",
    None,
    "calls that torch.compile traces raise RefusalError",
)
_find(
    "torch.Tensor._version",
    None,
    "calls whose mask or bias has a tensor on a GPU are planned each time",
)
_forward_ad: Any = forward_ad
_counter = itertools.count()


_tracing_context: Callable[[], object | None] = _find(
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


def constant_in_graphs(function: _Function) -> _Function:
    """Let torch.compile call the function while it traces, and take its result as a constant.

    As `torch.compiler.assume_constant_result` does (`_dynamo_marked_constant`; torch 2.0), but without loading the
    compiler, which takes 1.8 s.
    """
    made: Any = function
    made._dynamo_marked_constant = True
    return function


def or_true(condition: bool) -> bool:
    """The condition of a traced call; True where it depends on sizes of data (`guard_or_true`; torch 2.7)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415 - loads sympy

    return guard_or_true(condition)


def in_checkpoint() -> bool:
    """Whether hooks see what is saved for the backward pass, as those of `torch.utils.checkpoint` do.

    It compares the tensors that a function saves with those of its second run (`_top_saved_tensors_default_hooks`).
    """
    return _saving_hooks(False) is not None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is at work (`forward_ad._current_level`; torch 1.10)."""
    return getattr(_forward_ad, "_current_level", 0) >= 0


def in_transform() -> bool:
    """Whether `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation is active."""
    return current_func_transform() is not None or getattr(_forward_ad, "_current_level", 0) >= 0


def is_ordinary() -> bool:
    """Whether nothing changes what operators do: no dispatch mode, autocast, `torch.func` or forward mode.

    One function, as code that a model has driven out of the caches takes 2 us for each function and each name.
    """
    return not (
        dispatch_modes()
        or is_any_autocast_enabled()
        or current_func_transform() is not None
        or getattr(_forward_ad, "_current_level", 0) >= 0
    )


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place (`Tensor._version`; torch 0.4), or a new number each time."""
    found = getattr(tensor, "_version", None)
    return next(_counter) if found is None else found


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


def check_replaceable() -> None:
    """Raise `RefusalError` if this torch lacks a name that `replace_in_torch` or torch's own kernels need."""
    if lost := [name for name, consequence in MISSING.items() if consequence == _NO_EVERYWHERE]:
        raise RefusalError(
            f"regard.everywhere needs {', '.join(lost)} of torch, and torch {torch.__version__} has no such name: "
            "call regard.attend instead, or install a torch that `regard doctor` lists as tested."
        )


def replace_in_torch(function: Any, own: Any, on: bool, module: Any = torch) -> None:
    """Let `module.NAME`, where NAME is that of a builtin function, be `own`, or the builtin again.

    What a program put there stays. TorchScript compiles the builtin still (`torch.jit._builtins._register_builtin`;
    torch 1.6).
    """
    name = function.__name__
    _register_builtin(own, f"aten::{name}")
    present = getattr(module, name)
    if present is function or present is own:
        setattr(module, name, own if on else function)


DYNAMO_LISTS_ATTRIBUTES = VERSION >= (2, 12)
"""Whether traced code can list the attributes of frozen dataclasses; else user-defined masks become tables."""
