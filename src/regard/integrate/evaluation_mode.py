"""Evaluation mode for the time of a block."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: Any) -> Generator[None]:
    """A module in evaluation mode, so without dropout, and afterwards as it was in each part; a function as it is.

    >>> layer = nn.Dropout(0.5)
    >>> with evaluating(layer):
    ...     inside = layer.training
    >>> inside, layer.training
    (False, True)
    """
    modes = [(each, each.training) for each in model.modules()] if isinstance(model, nn.Module) else []
    try:
        if modes:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
