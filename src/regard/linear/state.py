"""The state of linear attention: a matrix, however many tokens it holds; and the value that is returned with it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ProblemError


@dataclass(frozen=True, eq=False)
class LinearState:
    """What linear attention keeps of the tokens so far; in fp32 (fp64 for fp64).

    Attributes:
        S: [batch, kv_heads, features, v_dim], the sum of phi(k) v^T over tokens, as the rule has let it fade.
        z: [batch, kv_heads, features], the same of phi(k) alone, which normalises; None where nothing is normalised.
        log_scale: [batch, kv_heads]; S and z count times exp(log_scale). None where the features need none: only those
            of `Favor`, whose size would leave the range of floats, do. -inf where no token was taken in.
        adds: whether it is a sum over tokens, without a rule, so that `|` is right.
        words: the features and the rule that made it, as text; None for one made by hand, which is taken as it is.

    >>> import torch
    >>> from regard.linear import linear_attend
    >>> k, v, q = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 3), torch.randn(1, 2, 1, 4)
    >>> a, b = (linear_attend(q, k[:, :, part], v[:, :, part]).state for part in (slice(0, 3), slice(3, 7)))
    >>> torch.allclose((a | b).S, linear_attend(q, k, v).state.S, atol=1e-5)
    True
    """

    S: Float[Tensor, "batch kv_heads features v_dim"]
    z: Float[Tensor, "batch kv_heads features"] | None = None
    log_scale: Float[Tensor, "batch kv_heads"] | None = None
    adds: bool = True
    words: str | None = None

    def __or__(self, other: "LinearState") -> "LinearState":
        """The state over the tokens of both, in any order; of sums only."""
        if not isinstance(other, LinearState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(
                f"a LinearState merges with a LinearState, and the right side is {type(other).__name__}."
            )
        if not (self.adds and other.adds):
            raise ProblemError(
                "these states do not merge: under a rule (Decay, Gated, Delta) what came first has changed with what "
                "came after; hand the first state on with state=."
            )
        if (self.S.shape, self.kind) != (other.S.shape, other.kind):
            raise ProblemError(
                f"states of one kind merge: these are {list(self.S.shape)} {self.kind} and {list(other.S.shape)} "
                f"{other.kind}."
            )
        check_words(self.words, other.words)
        words = self.words or other.words
        if self.log_scale is None or other.log_scale is None:
            z = None if self.z is None or other.z is None else self.z + other.z
            return LinearState(self.S + other.S, z, words=words)
        top = torch.maximum(self.log_scale, other.log_scale)
        one, two = self.under(top), other.under(top)
        z = None if one.z is None or two.z is None else one.z + two.z
        return LinearState(one.S + two.S, z, top, words=words)

    def under(self, log_scale: Tensor) -> "LinearState":
        """The same state with another `log_scale`, [batch, kv_heads], no lower than its own."""
        assert self.log_scale is not None
        lower = torch.where(log_scale == -torch.inf, 0.0, log_scale)
        factor = torch.exp(self.log_scale - lower)[..., None]
        z = None if self.z is None else self.z * factor
        return LinearState(self.S * factor[..., None], z, log_scale, self.adds, self.words)

    def __repr__(self) -> str:
        return f"LinearState(S {list(self.S.shape)}, {self.kind}, {self.words or 'made by hand'})"

    @property
    def kind(self) -> str:
        """What it holds: `with z, without log_scale`."""
        return (
            f"{'without' if self.z is None else 'with'} z, {'without' if self.log_scale is None else 'with'} log_scale"
        )


def check_words(one: str | None, other: str | None) -> None:
    """Raise `ProblemError` unless states of these words can be one."""
    if one is not None and other is not None and one != other:
        raise ProblemError(f"a state made by {one} is not one of {other}: its numbers mean something else.")


class LinearResult(NamedTuple):
    """What `linear_attend` returns: `out` [batch, heads, queries, v_dim] and the state after the last key."""

    out: Tensor
    state: LinearState
