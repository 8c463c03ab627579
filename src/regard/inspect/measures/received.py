"""Whether a measure received what it reads: `Weights`, or `Inputs`, which are made of them.

A measure that reads one weight per query, or a few, takes the `Weights` of a call; a measure that reads all weights
takes `Inputs(weights)`, so that several measures share one pass over them. Any other argument raises `ProblemError`
before anything is computed.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.inspect.brief import shown
from regard.inspect.weights.lazy import Weights

F = TypeVar("F", bound=Callable[..., Any])

RUNS = "a function that runs the model, as lambda: model(ids)"
"""What an argument `run` is."""

INPUTS = "Inputs"
"""The name of the other class, whose module imports the measures."""


def checked(measure: F) -> F:
    """A decorator of measures: their first argument must be what its annotation says, `Weights` or `Inputs`.

    >>> @checked
    ... def total(weights: Weights) -> float:
    ...     return float(weights.total.sum())
    >>> total([[1.0]])
    Traceback (most recent call last):
    ...
    regard.errors.ProblemError: weights is [[1.0]]: expected Weights. Give calls[0].weights, of the ... to total.
    """
    name, parameter = next(iter(inspect.signature(measure).parameters.items()))
    expected: type = parameter.annotation

    @wraps(measure)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if args:
            check_received(args[0], expected, measure.__name__, name)
        elif name in kwargs:
            check_received(kwargs[name], expected, measure.__name__, name)
        return measure(*args, **kwargs)

    return cast(F, checking)


def check_received(value: object, expected: type, function: str, argument: str) -> None:
    """Raise `ProblemError` unless an argument of a function is of the expected class, `Weights` or `Inputs`."""
    if isinstance(value, expected):
        return
    if isinstance(value, Weights):
        weights, source = "weights", ""
    elif isinstance(getattr(value, "weights", None), Weights):  # Inputs, or a call with its weights
        weights, source = f"{_variable(value)}.weights", ""
    else:
        weights, source = "calls[0].weights", ", of the calls that `regard.inspect.observe` collects,"
    wanted = f"Inputs({weights})" if expected.__name__ == INPUTS else weights
    raise ProblemError(
        f"{argument} is {_received(value)}: expected {expected.__name__}. Give {wanted}{source} to {function}."
    )


def check_function(value: object, argument: str, expected: str) -> None:
    """Raise `ProblemError` unless an argument is a function.

    >>> check_function([3], "run", "a function that runs the model")
    Traceback (most recent call last):
    regard.errors.ProblemError: run is [3]: expected a function that runs the model.
    """
    if not callable(value):
        raise ProblemError(f"{argument} is {received(value)}: expected {expected}.")


def _variable(value: object) -> str:
    return "inputs" if type(value).__name__ == INPUTS else "call"


def _received(value: object) -> str:
    """`Inputs` and calls by their class, as they hold many tensors; other values as they are."""
    return type(value).__name__ if hasattr(value, "weights") else shown(value)
