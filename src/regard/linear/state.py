"""The state of linear attention, a matrix of constant size, and the result of `linear_attend`."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ProblemError


@dataclass(frozen=True, eq=False)
class LinearState:
    """The state of linear attention after some tokens; in fp32 (fp64 for fp64).

    Attributes:
        S: [batch, kv_heads, features, v_dim], the sum of phi(k) v^T over tokens, with the decay of the rule.
        z: [batch, kv_heads, features], the same sum of phi(k), the divisor of `normalise`; None without it.
        log_scale: [batch, kv_heads]; the true S and z are exp(log_scale) times these. None except for `Favor`, whose
            features would overflow; -inf before the first token.
        adds: whether the state is a sum over tokens, without a rule, so that `|` is valid.
        made_by: the features and the rule, as text; None for a state created by hand, which is not checked.

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
    made_by: str | None = None

    def __or__(self, other: "LinearState") -> "LinearState":
        """The state over the tokens of both, in any order; for sums only."""
        if not isinstance(other, LinearState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(
                f"a LinearState merges with a LinearState, and the right operand is {type(other).__name__}."
            )
        if not (self.adds and other.adds):
            raise ProblemError(
                "these states do not merge: with a rule (Decay, Gated, Delta) later tokens change the contribution of "
                "earlier ones; pass the first state on with state=."
            )
        if (self.S.shape, self.kind) != (other.S.shape, other.kind):
            raise ProblemError(
                f"states merge if they are of one kind: these are {list(self.S.shape)} {self.kind} and "
                f"{list(other.S.shape)} {other.kind}."
            )
        check_parts(self)
        check_parts(other)
        if self.S.device != other.S.device:
            raise ProblemError(
                f"the states are on {self.S.device} and {other.S.device}: they must be on one device to merge."
            )
        check_made_by(self.made_by, other.made_by)
        made_by = self.made_by or other.made_by
        if self.log_scale is None or other.log_scale is None:
            z = None if self.z is None or other.z is None else self.z + other.z
            return LinearState(self.S + other.S, z, made_by=made_by)
        top = torch.maximum(self.log_scale, other.log_scale)
        one, two = self.under(top), other.under(top)
        z = None if one.z is None or two.z is None else one.z + two.z
        return LinearState(one.S + two.S, z, top, made_by=made_by)

    def under(self, log_scale: Tensor) -> "LinearState":
        """The same state with another `log_scale`, [batch, kv_heads], no lower than its own."""
        assert self.log_scale is not None
        lower = torch.where(log_scale == -torch.inf, 0.0, log_scale)
        factor = torch.exp(self.log_scale - lower)[..., None]
        z = None if self.z is None else self.z * factor
        return LinearState(self.S * factor[..., None], z, log_scale, self.adds, self.made_by)

    def __repr__(self) -> str:
        return f"LinearState(S {list(self.S.shape)}, {self.kind}, {self.made_by or 'made by hand'})"

    @property
    def kind(self) -> str:
        """Which optional tensors the state has: `with z, without log_scale`."""
        return (
            f"{'without' if self.z is None else 'with'} z, {'without' if self.log_scale is None else 'with'} log_scale"
        )


torch.export.register_dataclass(LinearState, serialized_type_name="regard.linear.LinearState")


def check_parts(state: LinearState) -> None:
    """Raise `ProblemError` unless S, z and log_scale are floats of sizes that fit, on one device."""
    for name, part, axes in (("S", state.S, 4), ("z", state.z, 3), ("log_scale", state.log_scale, 2)):
        if part is None and name != "S":
            continue
        if not isinstance(part, Tensor) or part.ndim != axes or not part.is_floating_point():
            what = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            expected = ", ".join(("batch", "kv_heads", "features", "v_dim")[:axes])
            raise ProblemError(f"{name} of the state is {what}: expected floats [{expected}].")
        if part.shape != state.S.shape[:axes] or part.device != state.S.device:
            raise ProblemError(
                f"{name} of the state is {list(part.shape)} on {part.device}, and S is {list(state.S.shape)} on "
                f"{state.S.device}: expected {list(state.S.shape[:axes])} on the same device."
            )


def check_made_by(one: str | None, other: str | None) -> None:
    """Raise `ProblemError` unless the features and the rules of two states are equal."""
    if one is not None and other is not None and one != other:
        raise ProblemError(f"a state made by {one} cannot be used with {other}: features and rule must be equal.")


class LinearResult(NamedTuple):
    """The result of `linear_attend`: `out` [batch, heads, queries, v_dim] and the state after the last key."""

    out: Tensor
    state: LinearState
