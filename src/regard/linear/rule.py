"""Rules: how the state of linear attention decays with each token. Without a rule the state is a plain sum.

    S_t = S_{t-1} + k_t v_t^T                                          no rule: linear attention
    S_t = gamma S_{t-1} + k_t v_t^T                                    Decay: RetNet
    S_t = diag(exp(log_gate_t)) S_{t-1} + k_t v_t^T                    Gated: GLA; Mamba-2 with one gate for a head
    S_t = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T    Delta: DeltaNet, Gated DeltaNet

Here k is phi(k), and `out_t = S_t^T phi(q_t)`. Rules are specs: plain values that may contain tensors, to which
gradients flow.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from regard.describe.spec import Spec, spec
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.plan.checks import can_be_read


class Rule(Spec):
    """How a state decays; abstract, see `Decay`, `Gated`, `Delta`."""

    def check(self, batch: int, kv_heads: int, keys: int, features: int) -> None:
        """Raise `ProblemError` unless the rule fits a call of these sizes."""


@spec
class Decay(Rule):
    """Each token multiplies the state by gamma. Sun et al. 2023, arXiv:2307.08621, §2.1.

    Args:
        gamma: 0 < gamma <= 1; one for all heads, or a tensor with one for each key head, [kv_heads].

    >>> Decay(0.9)
    Decay(gamma=0.9)
    """

    gamma: Tensor | float

    def __post_init__(self) -> None:
        value = self.gamma
        if isinstance(value, Tensor):
            if value.ndim != 1 or not value.is_floating_point():
                raise ProblemError(f"Decay(gamma) is {value.dtype} {list(value.shape)}: expected floats [kv_heads].")
            wrong = _has(value, lambda gamma: ~((gamma > 0) & (gamma <= 1)))
        else:
            wrong = isinstance(value, bool) or not isinstance(cast(object, value), int | float) or not 0 < value <= 1
        if wrong:
            raise ProblemError(
                f"Decay(gamma={value!r}): expected 0 < gamma <= 1, or a tensor of such, one per key head."
            )

    def check(self, batch: int, kv_heads: int, keys: int, features: int) -> None:
        if isinstance(self.gamma, Tensor) and self.gamma.shape != (kv_heads,):
            raise ProblemError(f"{self!r} has {self.gamma.shape[0]} decays, and k has {kv_heads} heads.")

    def log(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """log gamma, [kv_heads, 1, 1] or [1, 1, 1]; computed in float64, to keep the precision of 1 - gamma."""
        if isinstance(self.gamma, Tensor):
            return self.gamma.double().log().to(device, dtype)[:, None, None]
        return torch.full((1, 1, 1), math.log(self.gamma), dtype=dtype, device=device)


@spec
class Gated(Rule):
    """Each token multiplies each feature of the state by its own gate. Yang et al. 2024, arXiv:2312.06635, §4.

    Args:
        log_gate: logarithms, at most 0: [batch, kv_heads, keys, features], or [batch, kv_heads, keys, 1] for one gate
            for all features of a head (Mamba-2; Dao and Gu 2024, arXiv:2405.21060, §3). The paper's alpha is
            `exp(log_gate)`; -inf sets the feature to 0.

    >>> Gated(torch.zeros(1, 2, 8, 16))
    Gated(log_gate=float32[1, 2, 8, 16])
    """

    log_gate: Tensor

    def __post_init__(self) -> None:
        _check_floats("Gated(log_gate)", self.log_gate, 4, "[batch, kv_heads, keys, features]")
        if _has(self.log_gate, lambda gate: gate > 0):
            raise ProblemError(
                f"Gated(log_gate) has values up to {self.log_gate.max().item():g}: expected logarithms of gates, at "
                "most 0; use logsigmoid, not sigmoid."
            )

    def check(self, batch: int, kv_heads: int, keys: int, features: int) -> None:
        shape = tuple(self.log_gate.shape)
        if shape not in ((batch, kv_heads, keys, features), (batch, kv_heads, keys, 1)):
            raise ProblemError(
                f"{self!r}: expected [batch, kv_heads, keys, features] = {[batch, kv_heads, keys, features]}, or 1 "
                "in place of the features; gates are per key head."
            )


@spec
class Delta(Rule):
    """A token replaces the value of its key in the state, by the fraction beta, instead of adding to it.

    DeltaNet: Schlag et al. 2021, arXiv:2102.11174, §4.2; in parallel over tokens by Yang et al. 2024, arXiv:2406.06484,
    §3. With `log_decay`, Gated DeltaNet: Yang et al. 2025, arXiv:2412.06464, §3. The state stays bounded where
    `beta |phi(k)|^2 <= 2`: use `features=None` with keys of norm 1, as the papers do.

    Args:
        beta: [batch, kv_heads, keys], 0 to 1 (to 2 with keys of norm 1).
        log_decay: [batch, kv_heads, keys], at most 0; None for no decay.

    >>> Delta(torch.ones(1, 2, 8))
    Delta(beta=float32[1, 2, 8])
    """

    beta: Tensor
    log_decay: Tensor | None = None

    def __post_init__(self) -> None:
        _check_floats("Delta(beta)", self.beta, 3, "[batch, kv_heads, keys]")
        if _has(self.beta, lambda beta: beta < 0):
            raise ProblemError(
                f"Delta(beta) has values down to {self.beta.nan_to_num().min().item():g}: expected fractions from 0 to "
                "1, or to 2 with keys of norm 1; use sigmoid."
            )
        if self.log_decay is None:
            return
        _check_floats("Delta(log_decay)", self.log_decay, 3, "[batch, kv_heads, keys]")
        if self.log_decay.shape != self.beta.shape:
            raise ProblemError(
                f"Delta: beta is {list(self.beta.shape)} and log_decay {list(self.log_decay.shape)}: expected the same."
            )
        if _has(self.log_decay, lambda decay: decay > 0):
            raise ProblemError(
                f"Delta(log_decay) has values up to {self.log_decay.max().item():g}: expected logarithms, at most 0."
            )

    def check(self, batch: int, kv_heads: int, keys: int, features: int) -> None:
        if self.beta.shape != (batch, kv_heads, keys):
            raise ProblemError(f"{self!r}: expected [batch, kv_heads, keys] = {[batch, kv_heads, keys]}.")


def retnet_decay(heads: int) -> Tensor:
    """RetNet's decays, `1 - 2 ** (-5 - head)`, float64 [heads]. Sun et al. 2023, arXiv:2307.08621, §2.2.

    >>> retnet_decay(2).tolist()
    [0.96875, 0.984375]
    """
    heads = whole(heads, "retnet_decay(heads)", "heads", least=1)
    return 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64))


def _check_floats(name: str, value: object, axes: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise ProblemError(f"{name} is {type(value).__name__}: expected a tensor {shape}.")
    if value.ndim != axes or not value.is_floating_point():
        raise ProblemError(f"{name} is {value.dtype} {list(value.shape)}: expected floats {shape}.")


def _has(value: Tensor, wrong: Callable[[Tensor], Tensor]) -> bool:
    """Whether some element is wrong; False where elements cannot be read, as while torch traces."""
    return can_be_read(value) and bool(wrong(value.detach()).any())
