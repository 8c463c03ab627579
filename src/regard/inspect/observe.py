"""Watch a model's attention, one layer at a time, keeping only what was asked for.

Each call of attention is looked at while it happens and then forgotten: what `each` returns is all that stays, so a
thousand heads at sixteen thousand tokens cost the memory of one layer.
"""

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from regard.attend import Call, watching
from regard.errors import ProblemError
from regard.inspect.measures import Breadth, Score, breadth, previous_token, sink
from regard.inspect.weights import Weights

T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """One call of attention as it passes: hold on to what you compute from it, not to the look itself."""

    layer: int
    module: str | None
    call: Call
    weights: Weights


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was computed from one call: `layer` counts from 0, `module` is the path of the module that attended."""

    layer: int
    module: str | None
    value: T


@dataclass(frozen=True)
class Measured:
    """The measures of a call that need no tokens."""

    breadth: Breadth
    sink: Score
    previous: Score


def measured(look: Look) -> Measured:
    """Breadth, sink mass and previous-token score of every head."""
    return Measured(breadth(look.weights), sink(look.weights), previous_token(look.weights))


@contextmanager
def observe(model: nn.Module | None = None, each: Callable[[Look], Any] = measured) -> Generator[list[Seen[Any]]]:
    """Within the block, apply `each` to every call of attention and collect what it returns.

    Args:
        model: names the layers: a call belongs to the innermost module of the model that is running, its layer is the
            first number in that module's path (`model.layers.3.self_attn` is 3). A path without a number, and a module
            that runs again in one forward (shared weights), count on from the layer before. None numbers the calls as
            they come.
        each: computes what to keep of a call; by default `measured`.

    Raises:
        ProblemError: a model was given and none of its attention was seen; `use_regard(model)` lets regard compute it.

    ```
    >>> import torch
    >>> from regard import Causal, attend
    >>> q = k = v = torch.eye(5)[None, None]
    >>> with observe(each=lambda look: look.weights.shape) as seen:
    ...     out = attend(q, k, v, mask=Causal())
    >>> seen
    [Seen(layer=0, module=None, value=(1, 1, 5, 5))]

    ```
    """
    seen: list[Seen[Any]] = []
    place = _Place()

    def look(call: Call) -> None:
        layer, module = place.next()
        seen.append(Seen(layer, module, each(Look(layer, module, call, Weights.of(call)))))

    with ExitStack() as hooks:
        for name, module in () if model is None else model.named_modules():
            hooks.callback(module.register_forward_pre_hook(place.entering(name)).remove)
            hooks.callback(module.register_forward_hook(place.leaving(name), always_call=True).remove)
        hooks.enter_context(watching(look))
        yield seen
    if model is not None and place.ran and not seen:
        raise ProblemError(
            f"{type(model).__name__} ran and none of its attention was observed: it is not regard's. Call "
            "use_regard(model) of regard.integrate.transformers first; a model that torch.compile traced is not seen."
        )


class _Place:
    """Where in the forward pass a model is: the paths of the modules that are running, and the layers that attended."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._attended: set[str] = set()
        self._last = -1
        self.ran = False

    def entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            if not self._running:  # a forward pass begins
                self._attended, self._last = set(), -1
            self._running.append(name)
            self.ran = True

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._running[-1:] == [name]:  # it did enter: another hook may have failed before ours
                self._running.pop()

        return leave

    def next(self) -> tuple[int, str | None]:
        """The layer and module of the call that happens now."""
        module = self._running[-1] if self._running else None
        number = re.search(r"\d+", module) if module is not None and module not in self._attended else None
        self._last = int(number.group()) if number else self._last + 1
        if module is not None:
            self._attended.add(module)
        return self._last, module
