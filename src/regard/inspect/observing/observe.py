"""Watch attention as it happens: keep calls whole, or only what is asked of each, one layer at a time.

Nothing is kept that was not asked for, so what is asked of a thousand heads at sixteen thousand tokens can cost the
memory of one layer. Outside the block nothing is watched, and nothing is slower for it.
"""

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from torch import nn

from regard.attention import Call, observe_calls
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.observing.kept import Kept, To, keeper
from regard.inspect.observing.parts import Parts
from regard.inspect.observing.place import Place, following
from regard.inspect.weights.index import index_of
from regard.inspect.weights.lazy import Weights

T = TypeVar("T")


@brief
@dataclass(frozen=True)
class Look:
    """One call of attention as it passes: hold on to what you compute from it, not to the look itself.

    Its tensors are those of the model, which may write on in them (a cache does), and the whole of the layer lives as
    long as they do.

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
        """The weights of the call, lazily. Raises `ProblemError` where the call compares by what is no dot product."""
        return Weights.of(self.call)


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
) -> AbstractContextManager[list[Kept]]: ...


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
    """Within the block, keep every call of attention, or what `each` returns for it, in the order of the calls.

    Calls are seen whoever makes them: `attend` itself, the modules of `regard.nn`, and models of transformers after
    `use_regard(model)`, also while they generate (each step is a forward pass, whose layers begin anew). Keys and
    values that a cache stores in pages or codes are seen as the tensors that they stand for.

    Args:
        model: names the layers: a call belongs to the innermost module of the model that is running, its layer is the
            number in that module's path (`model.layers.3.self_attn` is 3). A path without a number, and a module that
            runs again in one forward (shared weights), count on from the layer before. None numbers the calls as they
            come.
        each: computes what to keep of a call from a `Look`, while it passes: the list then holds a `Seen` per call,
            and one layer's tensors live at a time. None keeps a `Kept` per call: copies of q, k, lse and the words,
            which are all of the weights.
        layers: the layers to look at; None for all. An encoder and a decoder have layers of the same numbers.
        values: whether a `Kept` also has the values and the output of its call.
        to: where calls are kept. None: on the device that each is on. A device ("cpu"): there. "disk": in files of our
            own, in the folder for temporary files, which are removed when the block ends. Any other text or a path:
            in files in that new folder, which stay (`kept_in` reads them).

    Raises:
        ProblemError: a model was given and none of its attention was seen; a layer was named that did not attend; or
            `values` and `to`, which say how calls are kept, go with `each`, which keeps none; or `to` is a device
            that is not there.

    What torch.compile compiled before the block runs uncompiled within it, as compiled attention cannot be seen.

    ```
    >>> import torch
    >>> from regard import Causal, attend
    >>> q = k = v = torch.eye(5)[None, None]
    >>> with observe() as seen:
    ...     out = attend(q, k, v, mask=Causal())
    >>> seen
    [Kept(layer=0, module=None)]
    >>> seen[0].weights.rows(1, 2)
    tensor([[[[0.3900, 0.6100, 0.0000, 0.0000, 0.0000]]]])
    >>> with observe(each=lambda look: look.weights.shape) as seen:
    ...     out = attend(q, k, v, mask=Causal())
    >>> seen
    [Seen(layer=0, module=None, value=(1, 1, 5, 5))]

    ```
    """
    wanted = None if layers is None else _numbers(layers)
    if each is None:
        return _kept(model, wanted, values, to)
    if values or to is not None:
        raise ProblemError(
            f"values={values} and to={to!r} say how calls are kept, and with each=... only what it returns is: leave "
            "them out, or leave `each` out."
        )
    return _seen(model, wanted, each)


def _numbers(layers: int | Collection[int]) -> set[int]:
    """The layers that are meant. Raises `ProblemError` for what is no whole number."""
    several: list[Any] = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else [layers]
    numbers = {number for number in map(index_of, several) if number is not None}
    if len(numbers) < len(set(several)):
        raise ProblemError(f"layers is {layers!r}: expected the number of a layer or of several, counted from 0.")
    return numbers


@contextmanager
def _kept(model: nn.Module | None, layers: set[int] | None, values: bool, to: To) -> Generator[list[Kept]]:
    kept: list[Kept] = []
    with keeper(to) as shelf:

        def keep(layer: int, module: str | None, call: Call) -> None:
            kept.append(Kept(layer, module, shelf.add(layer, module, Parts.of(call, values))))

        with _told(model, layers, keep):
            yield kept


@contextmanager
def _seen(model: nn.Module | None, layers: set[int] | None, each: Callable[[Look], T]) -> Generator[list[Seen[T]]]:
    seen: list[Seen[T]] = []

    def look(layer: int, module: str | None, call: Call) -> None:
        seen.append(Seen(layer, module, each(Look(layer, module, call))))

    with _told(model, layers, look):
        yield seen


@contextmanager
def _told(
    model: nn.Module | None, layers: set[int] | None, tell: Callable[[int, str | None, Call], None]
) -> Generator[None]:
    """Tell of the calls of these layers, with their places; raise at the end if what was asked for was not there."""
    attended: set[int] = set()

    def told(place: Place, call: Call) -> None:
        layer, module = place.next()
        attended.add(layer)
        if layers is None or layer in layers:
            tell(layer, module, call)

    with following(model) as place, observe_calls(lambda call: told(place, call)):
        yield
    if model is not None and place.ran and not attended:
        raise ProblemError(
            f"{type(model).__name__} ran and none of its attention was observed: it is not regard's. Call "
            "use_regard(model) of regard.integrate.transformers first; what torch.compile compiles within the block is "
            "not seen: compile it before, then it is run uncompiled within."
        )
    if attended and layers is not None and not layers <= attended:
        raise ProblemError(
            f"layers {sorted(layers - attended)} were asked for and did not attend: those that did are "
            f"{sorted(attended)}."
        )
