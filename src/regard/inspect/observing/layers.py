"""The layer and the module path of an attention call, from hooks on the modules of a model."""

import re
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from regard.describe.not_a_spec import received
from regard.errors import ProblemError


@dataclass(eq=False)
class _Running:
    """A module that runs, and the layer of its attention calls after the first of them."""

    path: str
    caller: FrameType | None = None  # the call of torch that runs the module and its hooks
    layer: int | None = None


class LayerTracker(threading.local):
    """The modules that are running, and the layers that attended; of each thread by itself, as observers are.

    A call belongs to the innermost running module. Its layer is the first path component that is a number
    (`model.layers.3.self_attn` is 3), else the first digits (`layer3.attention`). Without digits in the path, the layer
    is the previous one plus 1, call by call; likewise for a module that runs again in one forward (shared weights).
    """

    def __init__(self, of_model: bool) -> None:
        self._of_model = of_model
        self._running: list[_Running] = []
        self._attended: set[str] = set()
        self._last = -1
        self.forwards = 0  # forward passes that began

    def entering(self, path: str) -> Callable[..., None]:
        """A forward pre-hook for the module of that path."""

        def enter(module: nn.Module, arguments: Any) -> None:
            self._forget_interrupted()
            if not self._running:  # a forward pass begins
                self._attended, self._last = set(), -1
                self.forwards += 1
            self._running.append(_Running(path, sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]

        return enter

    def leaving(self, path: str) -> Callable[..., None]:
        """A forward hook for the module of that path; register it with `always_call`, for failures as well."""

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._running and self._running[-1].path == path:  # it was entered: another hook may have failed before
                self._running.pop()

        return leave

    def _forget_interrupted(self) -> None:
        """Forget the modules whose run was interrupted, as by Ctrl-C: torch calls no hooks then."""
        while self._running and not _is_running(self._running[-1].caller):
            self._running.pop()

    def next(self) -> tuple[int, str | None] | None:
        """The layer and the module path of the call that happens now; None if it is not a call of the model."""
        if self._of_model and not self._running:
            return None
        running = self._running[-1] if self._running else _Running("")
        number = layer_number(running.path)
        if number is None:
            layer = self._last + 1
        elif running.layer is not None:  # one run of a module is one layer, however often it attends
            layer = running.layer
        else:
            layer = self._last + 1 if running.path in self._attended else number
        running.layer, self._last = layer, layer
        self._attended.add(running.path)
        return layer, running.path if self._running else None


def _is_running(frame: FrameType | None) -> bool:
    """Whether a frame is on the call stack; in a model it is one of the last few."""
    here: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def layer_number(path: str) -> int | None:
    """The number of the layer in a module's path.

    >>> [layer_number(path) for path in ("model.layers.3.self_attn", "bert2.layers.5", "layer4.attention", "encoder")]
    [3, 5, 4, None]
    """
    found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", path) or re.search(r"(\d+)", path)
    return None if found is None else int(found.group(1))


def check_module(model: object, hint: str = "") -> None:
    """Raise `ProblemError` unless it is a module or None.

    Args:
        hint: the end of the message: what else to write.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ProblemError(f"model is {received(model)}: expected an nn.Module or None{hint}.")


@contextmanager
def track_layers(model: nn.Module | None) -> Generator[LayerTracker]:
    """Within the block, the tracker knows which module of the model runs; without a model it counts calls.

    Modules that torch.compile compiled before run uncompiled within the block, as a compiled model hides its modules
    and its attention. All hooks are removed when the block ends.

    Raises:
        ProblemError: the model is no module.
    """
    check_module(model)
    tracker = LayerTracker(of_model=model is not None)
    with ExitStack() as hooks:
        hooks.enter_context(_without_compile())
        for name, module in () if model is None else model.named_modules():
            path = ".".join(part for part in name.split(".") if part != "_orig_mod")  # torch.compile inserts it
            hooks.callback(module.register_forward_pre_hook(tracker.entering(path)).remove)
            hooks.callback(module.register_forward_hook(tracker.leaving(path), always_call=True).remove)
        yield tracker


def _without_compile() -> AbstractContextManager[Any]:
    """Nothing is compiled before dynamo is imported, which takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
