"""The positions of a module's tokens, where these are a part of a sequence: a rank's shard."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class TokenPositions(NamedTuple):
    """Which tokens of a sequence a module gets.

    Attributes:
        positions: int64 [tokens].
        length: of the whole sequence.
    """

    positions: Tensor
    length: int


_shard: ContextVar[TokenPositions | None] = ContextVar("shard", default=None)


@contextmanager
def tokens_at(positions: Tensor, length: int) -> Generator[None]:
    """Tell the modules that run inside, in this thread, the positions of their tokens."""
    token = _shard.set(TokenPositions(positions, length))
    try:
        yield
    finally:
        _shard.reset(token)


def token_positions() -> TokenPositions | None:
    """The positions of the tokens; None where they are those of a whole sequence, or of a cache's next tokens."""
    return None if torch.compiler.is_compiling() else _shard.get()
