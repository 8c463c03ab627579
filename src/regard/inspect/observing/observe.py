"""Observe attention while a model runs: record whole calls, or compute something of each, one layer at a time.

With `each` only its results are stored, so a measure of a thousand heads at sixteen thousand tokens takes the memory of
one layer. Outside the block nothing is observed, and nothing is slower.
"""

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from torch import nn

from regard.calls import Call, observe_calls
from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.names import Heads
from regard.inspect.observing.disk import Parts
from regard.inspect.observing.layers import LayerTracker, check_module, track_layers
from regard.inspect.observing.recorded import RecordedCall, To, heads_of_layer, recorder
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights

T = TypeVar("T")


@brief
@dataclass(frozen=True)
class Look:
    """One attention call while it is made: store results computed from it, not the `Look`.

    Its tensors are those of the model, which may overwrite them (a cache does), and a stored `Look` would keep all
    tensors of the layer in memory.

    >>> import torch
    >>> from regard import attend
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with observe(each=lambda look: (look.layer, look.call.scale, look.weights.shape)) as seen:
    ...     _ = attend(q, q, q)
    >>> seen[0].value
    (0, 0.5, (1, 1, 2, 2))
    """

    layer: int
    module: str | None
    call: Call

    @cached_property
    def weights(self) -> Weights:
        """The weights of the call, lazily. Raises `ProblemError` if its scores are not dot products."""
        return Weights.of(self.call)

    def heads(self, heads: int | Heads) -> Weights:
        """The weights of some heads of this layer, by name or by number; see `RecordedCall.heads`."""
        return heads_of_layer(self.weights, heads, self.layer, self.module)


@brief
@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was computed from one call: `layer` counts from 0, `module` is the path of the module that attended."""

    layer: int
    module: str | None
    value: T


@overload
def observe(
    model: nn.Module | None = None,
    each: None = None,
    *,
    layers: int | Collection[int] | None = None,
    values: bool = False,
    to: To = None,
) -> AbstractContextManager[list[RecordedCall]]: ...


@overload
def observe(
    model: nn.Module | None, each: Callable[[Look], T], *, layers: int | Collection[int] | None = None
) -> AbstractContextManager[list[Seen[T]]]: ...


@overload
def observe(
    *, each: Callable[[Look], T], layers: int | Collection[int] | None = None
) -> AbstractContextManager[list[Seen[T]]]: ...


def observe(
    model: nn.Module | None = None,
    each: Callable[[Look], Any] | None = None,
    *,
    layers: int | Collection[int] | None = None,
    values: bool = False,
    to: To = None,
) -> AbstractContextManager[list[Any]]:
    """Within the block, record every attention call, or what `each` returns for it, in the order of the calls.

    All callers are observed: `attend` itself, the modules of `regard.nn`, and models of transformers after
    `use_regard(model)`, also while they generate (each decode step is a forward pass, whose layers count from the first
    again). Keys and values that a KV cache stores in pages or quantised are observed as plain tensors.

    `regard.observe_calls` is the lower level: it calls a function with each `Call` and knows no layers.

    Args:
        model: names the layers: a call belongs to the innermost running module of the model; its layer is the number
            in that module's path (`model.layers.3.self_attn` is 3). For a path without a number, and for a module that
            runs again in one forward (shared weights), it is the previous layer plus 1. Calls outside of its modules,
            as those of another model, are not observed. None observes all calls, and counts them.
        each: a function of a `Look`; the list then has a `Seen` with its result for each call, and one layer's tensors
            are in memory at a time. Calls of attention that it makes itself are not observed. None records a
            `RecordedCall` for each call: copies of q, k, lse, mask and bias, which determine all weights.
        layers: the layers to observe; None for all. Encoder and decoder layers can share numbers.
        values: whether a `RecordedCall` also has the values and the output of its call.
        to: where calls are recorded. None: on the device of each call. A device ("cpu"): there. "disk": in temporary
            files, which are removed when the block ends. Any other text or a path: in files in that new folder, which
            stay (`read_calls` reads them).

    Raises:
        ProblemError: `model` is no module, or `each` no function; none of the model's attention was observed; a named
            layer did not attend; `values` or `to` together with `each`, which records no calls; `to` is a device that
            does not exist, or empty; or a call inside of torch.vmap would be recorded.

    Modules that torch.compile compiled before the block run uncompiled within it, as compiled attention cannot be
    observed.

    ```
    >>> import torch
    >>> from regard import Causal, attend
    >>> q = k = v = torch.eye(5)[None, None]
    >>> with observe() as seen:
    ...     out = attend(q, k, v, mask=Causal())
    >>> seen
    [RecordedCall(layer=0, module=None)]
    >>> seen[0].weights.rows(1, 2)
    tensor([[[[0.3900, 0.6100, 0.0000, 0.0000, 0.0000]]]])
    >>> with observe(each=lambda look: look.weights.shape) as seen:
    ...     out = attend(q, k, v, mask=Causal())
    >>> seen
    [Seen(layer=0, module=None, value=(1, 1, 5, 5))]

    ```
    """
    _check_model(model)
    wanted = None if layers is None else _layer_numbers(layers)
    if each is None:
        return _record(model, wanted, values, to)
    if not callable(each):
        raise ProblemError(f"each is {received(each)}: expected a function of a Look, as lambda look: look.weights.")
    if values or to is not None:
        raise ProblemError(
            f"values={values} and to={to!r} say how calls are recorded, and with each=... only its results are: omit "
            "them, or omit `each`."
        )
    return _compute(model, wanted, each)


def _check_model(model: object) -> None:
    """Raise `ProblemError` unless it is a module or None; names the argument that the value may be meant for."""
    is_layers = index_of(model) is not None or isinstance(model, list | tuple | set | range)
    check_module(model, "; say layers=" if is_layers else "; say each=" if callable(model) else "")


def _layer_numbers(layers: int | Collection[int]) -> set[int]:
    """The layers as a set. Raises `ProblemError` for a value that is not an integer."""
    value: Any = layers
    is_one = isinstance(value, str) or not isinstance(value, Iterable) or index_of(value) is not None
    indices = [index_of(layer) for layer in ([value] if is_one else value)]
    if None in indices:
        raise ProblemError(f"layers is {layers!r}: expected the number of a layer or of several, counted from 0.")
    return {index for index in indices if index is not None}


@contextmanager
def _record(model: nn.Module | None, layers: set[int] | None, values: bool, to: To) -> Generator[list[RecordedCall]]:
    calls: list[RecordedCall] = []
    with recorder(to) as store:

        def record(layer: int, module: str | None, call: Call) -> None:
            calls.append(RecordedCall(layer, module, store.add(layer, module, Parts.of(call, values))))

        with _calls_of(model, layers, record):
            yield calls


@contextmanager
def _compute(model: nn.Module | None, layers: set[int] | None, each: Callable[[Look], T]) -> Generator[list[Seen[T]]]:
    seen: list[Seen[T]] = []

    def look(layer: int, module: str | None, call: Call) -> None:
        seen.append(Seen(layer, module, each(Look(layer, module, call))))

    with _calls_of(model, layers, look):
        yield seen


@contextmanager
def _calls_of(
    model: nn.Module | None, layers: set[int] | None, handle: Callable[[int, str | None, Call], None]
) -> Generator[None]:
    """Call `handle` with each call of these layers; raise at the end if the model or a named layer did not attend."""
    attended: set[int] = set()

    def observed(tracker: LayerTracker, call: Call) -> None:
        if (place := tracker.next()) is None:
            return
        layer, module = place
        attended.add(layer)
        if layers is None or layer in layers:
            handle(layer, module, call)

    with track_layers(model) as tracker, observe_calls(lambda call: observed(tracker, call)):
        yield
    if model is not None and tracker.forwards and not attended:
        raise ProblemError(
            f"{type(model).__name__} ran and none of its attention was observed: it is not regard's. Call "
            "use_regard(model) of regard.integrate first. Modules that torch.compile compiles within the "
            "block are not observed: compile them before, then they run uncompiled within it. Nor are calls outside of "
            "the forward of a module: observe() without a model has them."
        )
    if attended and layers is not None and not layers <= attended:
        raise ProblemError(f"layers {sorted(layers - attended)} did not attend: layers {sorted(attended)} did.")
