"""What a backend is: a name, what it refuses, and `compile`, which makes a kernel for a problem. Nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from torch import Tensor

from regard.describe.mask import Mask
from regard.errors import RefusalError
from regard.plan.lower import Lowering, gather, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.torch_internals import is_legacy_batched

MAX_GRID = 65535
"""Batch rows, and heads, that a grid of programs on CUDA has room for (pytorch/pytorch#142228)."""


class Kernel(Protocol):
    """What runs one problem: it is called with the operands of each call."""

    def __call__(self, operands: Operands, /) -> State:
        """The state over all keys: dropout applied, the sink folded into `out` (before it is rounded), not into `lse`.

        `out` in the type of q, `lse` in float32, or float64 for float64. Differentiable in all operands if the problem
        says that gradients flow (`Problem.grad`).
        """
        ...


@runtime_checkable
class ResumableKernel(Kernel, Protocol):
    """A kernel that can differentiate an earlier call from its state, without computing the call again."""

    def resume(self, operands: Operands, state: State, *, is_part: bool = False) -> State:
        """The state, as if `__call__` had just computed it: differentiable in the operands.

        Args:
            is_part: whether the operands have a part of the state's keys.
        """
        ...


Run: TypeAlias = Callable[[Tensor, Any, Any, int, int | None], Tensor | None]
"""The output of a call, from q, k, v, the number of keys and the offset; None where their strides need another way.

k and v are tensors, or both are stored (`StoredTensor`), as in the call that is repeated."""

Bound: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, int | None], Tensor]
"""The output of a call with known strides, from q, k, v, the number of keys and the offset."""

Bind: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], Bound | None]
"""What runs calls with the strides of these q, k and v; None as for `Run`. The output is that of `Run`, or by token if
the last argument is true: [batch, queries, heads, v_dim] and contiguous."""


class Repeated(NamedTuple):
    """What runs calls that are like an earlier one, and what makes that faster where more is the same."""

    run: Run
    bind: Bind


RunWithTensors: TypeAlias = Callable[
    [Tensor, Any, Any, int, int | None, Tensor | None, Any, Tensor | None], Tensor | None
]
"""As `Run`, with the table of the mask, a bias and a sink after the offset, each of them None where the call that is
repeated has none."""


class RepeatedWithTensors(NamedTuple):
    """What runs calls that have the tensors of an earlier one.

    Attributes:
        run: runs them.
        is_for_all_sizes: whether it does so for any number of keys and any offset.
    """

    run: RunWithTensors
    is_for_all_sizes: bool


@runtime_checkable
class RepeatableKernel(Kernel, Protocol):
    """A kernel that runs calls like an earlier one without their `Operands`: tiny calls take half the time."""

    def repeated(self, operands: Operands, /) -> Repeated | None:
        """What runs calls that differ from this one only in elements, strides, offset and number of keys.

        The number of keys is 1 or more. None where it cannot run such calls.
        """
        ...


class KernelWithTensors(RepeatableKernel, Protocol):
    """A kernel that also repeats calls with a bias or a sink, or under a mask with tensors.

    Biases are a `TensorBias` that has the same axes of one element, or an `Alibi`.
    """

    def repeated_with_tensors(self, operands: Operands, /) -> RepeatedWithTensors | None:
        """What runs calls that differ from this one as in `repeated`, or in the elements of a bias and of a sink.

        The mask is the same, and where it has tensors or functions, so are the number of keys and the offset, unless it
        is for all sizes.
        """
        ...

    def repeated_with_table(self, operands: Operands, rest: Mask | None, /) -> RunWithTensors | None:
        """The same where the mask is `rest`, which is constant, and a table whose elements each call reads.

        The table has the same axes of one element; the number of keys and the offset are those of each call.
        """
        ...

    def repeated_over_rows(self, operands: Operands, mask: Mask | None, /) -> RunWithTensors | None:
        """The same over stored keys of rows of different lengths, under a mask of positions within a row.

        The lengths are read in each call; there is neither a table nor a bias.
        """
        ...


class Backend(ABC):
    """What computes attention; to be subclassed.

    An object of the subclass goes where the name of a backend goes: it runs or raises `RefusalError` with its reasons,
    and no other backend takes its place. `Problem` has all that it may refuse or depend on, `Operands` all that differs
    from call to call, and `Schedule` lists the tiles that are not hidden. It must be hashable, as plans are cached by
    it: a class without state, or a frozen dataclass. A deep copy of it, as in a copy of a module, is the object itself.
    `torch.compile` needs it by its name: see `register_backend`.

    Attributes:
        name: how errors and `explain` call it, and how users do once it is registered; not empty.
        tile: tokens per side of the tiles of the schedule, a multiple of 8, from 8 on.
        lowerings: steps that simplify a problem before the backend sees it, in order. By default stored keys and
            values become tensors, and scores become dot products where they can.
        hides_by_zero: whether it hides a key by a weight of 0, which lets NaN and inf through. regard then passes it
            finite keys and values only.
        any_length: whether its kernels, where a problem has neither mask nor bias, take the counts of queries and keys
            (1 or more) from the operands: then one plan serves every length.
        any_mask: whether its kernels take mask, bias and offset from the operands as well (`Operands.sizes`), and
            compute the schedule of sizes and masks that differ from those of the problem
            (`regard.plan.tiling.cached_schedule`): then one plan serves every length under every mask, on a GPU each of
            its kind of call (`regard.dispatch.cuda_order.Kind`).

    >>> import torch
    >>> from regard import Causal, State, attend, explain
    >>> from regard.extend import Backend, Kernel, Operands, Problem, Schedule
    >>> class Plain(Backend):
    ...     name, hides_by_zero = "plain", True  # 0 * NaN is NaN: regard passes finite keys and values only
    ...
    ...     def refusals(self, problem: Problem) -> list[str]:
    ...         reasons = {
    ...             "it has dot products only": problem.score is not None,
    ...             "it has no bias": problem.bias is not None,
    ...             "it has no softcap": problem.softcap is not None,
    ...             "it has no sink": problem.sink,
    ...             "it has no dropout": problem.dropout > 0,
    ...             "it shares no key heads": problem.heads != problem.kv_heads,
    ...         }
    ...         return [reason for reason, applies in reasons.items() if applies]
    ...
    ...     def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
    ...         keep = schedule.keep()  # [batch or 1, heads or 1, queries, keys]
    ...
    ...         def kernel(operands: Operands) -> State:
    ...             scores = (problem.scale * operands.q @ operands.k.mT).masked_fill(~keep, -torch.inf)
    ...             lse = scores.logsumexp(-1)
    ...             weights = scores.softmax(-1).masked_fill(lse[..., None] == -torch.inf, 0)  # no key: 0
    ...             return State(weights @ operands.v, lse.to(torch.promote_types(lse.dtype, torch.float32)))
    ...
    ...         return kernel

    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> plain = Plain()
    >>> torch.allclose(attend(q, k, v, mask=Causal(), backend=plain), attend(q, k, v, mask=Causal()), atol=1e-6)
    True
    >>> explain(q, k, v, backend=plain).backend
    'plain'
    >>> attend(q, k, v, softcap=5.0, backend=plain)
    Traceback (most recent call last):
    regard.errors.RefusalError: The backend 'plain' cannot run this.
      q [1, 2, 5, 8] · kv [1, 2, 5, 8|8] float32 on cpu, mask None, bias None, softcap 5.0
      plain: it has no softcap
      Leave backend=None to let regard choose.
    """

    name: str
    tile: int = 64
    lowerings: tuple[Lowering, ...] = (gather, prepare_score)
    hides_by_zero: bool = False
    any_length: bool = False
    any_mask: bool = False

    def leaks(self, problem: Problem) -> bool:
        """Whether it may get finite keys and values only, as it would carry others past the mask of this problem."""
        return self.hides_by_zero and problem.mask is not None

    @abstractmethod
    def refusals(self, problem: Problem) -> list[str]:
        """Why it cannot run this problem, in the user's terms; empty if it can."""

    @abstractmethod
    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        """The kernel for a problem, with all done that does not differ from call to call. It keeps no tensor of a call.

        Args:
            schedule: which tiles of queries and keys are computed; for a problem without a mask, all.
        """

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # plans are cached by it, and one object is registered


def second_derivative(name: str) -> RefusalError:
    """The error of a backend whose gradients have no derivatives themselves."""
    return RefusalError(
        f"The backend {name!r} can be differentiated once, and this asks for a second derivative: name "
        f'backend="reference", which can be differentiated any number of times. {_IN_A_PROGRAM}'
    )


def refuse_batched(name: str, *grads: Tensor | None) -> None:
    """Raise `RefusalError` where several gradients come at once, in one tensor that a kernel cannot read."""
    if any(is_legacy_batched(grad) for grad in grads if grad is not None):
        raise RefusalError(
            f"The backend {name!r} differentiates one gradient at a time, and this asks for several at once "
            '(is_grads_batched, or jacobian with vectorize): name backend="reference", or use torch.func.jacrev. '
            f"{_IN_A_PROGRAM}"
        )


_IN_A_PROGRAM = (
    "regard.scaled_dot_product_attention takes no backend: call regard.attend in its place. "
    "Where regard.everywhere runs torch's attention, call it inside of "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH). A model of transformers needs "
    'model.set_attn_implementation("eager").'
)
"""What to do where nobody can name a backend."""
