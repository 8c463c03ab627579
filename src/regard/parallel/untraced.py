"""Functions that torch.compile leaves as they are: what is sent to other ranks is no part of a graph."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, at which the graph of a compiled function that calls it ends.

    `torch.compiler.disable` of all calls would import the compiler, which takes seconds.
    """

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disabled: Any = torch.compiler.disable(function)
            return disabled(*args, **keywords)
        return function(*args, **keywords)

    return call
