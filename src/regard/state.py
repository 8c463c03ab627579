"""A state: attention over some of the keys, in a form that merges with attention over other keys.

Softmax over a union of keys is a weighted mean of the softmaxes over its parts, with the weights `exp(lse)`. So split
keys, shared prefixes, ring attention and chunks of a prompt are one operation: `a | b`. It is associative and
commutative, and the state over no keys (out 0, lse -inf) is its identity. (Milakov & Gimelshein 2018,
arXiv:1805.02867, §3; the states of FlashInfer, Ye et al. 2025, arXiv:2501.01005, §2.2.)
"""

from dataclasses import dataclass
from importlib import import_module
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.errors import ProblemError


@dataclass(frozen=True, eq=False)
class State:
    """Attention over some keys.

    Attributes:
        out: [batch, heads, queries, v_dim], the output of attention over those keys.
        lse: [batch, heads, queries], fp32 (fp64 for fp64): the natural logarithm of the sum of exp(score) over those
            keys; -inf where a query sees none. Never includes a sink.

    >>> import torch
    >>> from regard import attend, attend_state
    >>> q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    >>> halves = attend_state(q, k[:, :, :2], v[:, :, :2]) | attend_state(q, k[:, :, 2:], v[:, :, 2:])
    >>> torch.allclose(halves.out, attend(q, k, v), atol=1e-6)
    True
    """

    out: Float[Tensor, "batch heads queries v_dim"]
    lse: Float[Tensor, "batch heads queries"]

    def __ror__(self, other: object) -> "State":
        raise ProblemError(
            f"a State merges with a State, and the left side of | is {type(other).__name__}: begin with one."
        )

    def __or__(self, other: "State") -> "State":
        """The state over the keys of both, which must be different keys. Differentiable in all four tensors.

        States of two dtypes merge to the type that both fit in.
        """
        if not isinstance(other, State):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"a State merges with a State, and the right side of | is {type(other).__name__}.")
        self._check()
        other._check()
        if self.out.shape != other.out.shape:
            raise ProblemError(
                f"states merge over the same queries: these are {list(self.out.shape)} and {list(other.out.shape)}."
            )
        if self.out.device != other.out.device:
            raise ProblemError(
                f"the states are on {self.out.device} and {other.out.device}: they must be on one device to merge."
            )
        top = torch.maximum(self.lse, other.lse).detach()
        top = torch.where(top == -torch.inf, 0.0, top)  # both empty: exp(-inf - 0) is 0, exp(-inf + inf) is not
        mine, yours = torch.exp(self.lse - top), torch.exp(other.lse - top)
        total = mine + yours
        empty = total == 0
        safe = torch.where(empty, 1.0, total)
        lse = torch.where(empty, -torch.inf, top + torch.log(safe))
        dtype = torch.promote_types(self.out.dtype, other.out.dtype)
        return State((self._weighed(mine / safe) + other._weighed(yours / safe)).to(dtype), lse)

    def with_sink(self, logits: Float[Tensor, " heads"]) -> Float[Tensor, "batch heads queries v_dim"]:
        """The output when each head also attends to a column of score `logits[head]` without a value.

        A sink takes a share of the softmax and adds nothing: `out * sigmoid(lse - sink)`. The result is an output,
        not a state, since a state merges and a sink must be counted once. Xiao et al. 2023, arXiv:2309.17453,
        §3.3 (SoftMax-off-by-one is a logit of 0); OpenAI 2025, arXiv:2508.10925, §2.2 (learned per head).

        Args:
            logits: [heads].

        Returns:
            [batch, heads, queries, v_dim].

        >>> import torch
        >>> State(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)).with_sink(torch.zeros(1)).tolist()
        [[[[0.5, 0.5]]]]
        """
        self._check()
        heads = self.lse.shape[1]
        if not isinstance(cast(object, logits), Tensor) or logits.shape != (heads,) or not logits.is_floating_point():
            what = f"{logits.dtype} {list(logits.shape)}" if isinstance(cast(object, logits), Tensor) else repr(logits)
            raise ProblemError(f"sink logits are {what}: expected a tensor of floats with one per head, [{heads}].")
        if logits.layout is not torch.strided:
            raise ProblemError(f"sink logits have the layout {logits.layout}: call .to_dense().")
        if logits.device != self.lse.device:
            raise ProblemError(
                f"sink logits are on {logits.device} and the state is on {self.lse.device}: they must be on one device."
            )
        if type(self.lse).__name__ == "DTensor" != type(logits).__name__:  # only who has DTensors needs the module
            return import_module("regard.parallel.placement").with_sink_placed(self, logits)
        return fold_sink(self, logits.to(self.lse.dtype)[:, None])

    def _check(self) -> None:
        """Raise `ProblemError` unless `out` and `lse` are tensors over the same queries, on one device."""
        parts = {"out": cast(object, self.out), "lse": cast(object, self.lse)}
        shapes = {name: list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for name, t in parts.items()}
        if not isinstance(shapes["out"], list) or len(shapes["out"]) != 4 or shapes["lse"] != shapes["out"][:3]:
            raise ProblemError(
                f"a State has out {shapes['out']} and lse {shapes['lse']}: expected tensors [batch, heads, queries, "
                "v_dim] and [batch, heads, queries]."
            )
        if not (self.out.is_floating_point() and self.lse.is_floating_point()):
            raise ProblemError(f"a State has out {self.out.dtype} and lse {self.lse.dtype}: expected floats.")
        if self.out.device != self.lse.device:
            raise ProblemError(
                f"a State has out on {self.out.device} and lse on {self.lse.device}: expected both on one device."
            )

    def _weighed(self, weight: Tensor) -> Tensor:
        """weight * out in the precision of lse; 0 for a query that sees no key, even if its `out` is NaN."""
        empty = (self.lse == -torch.inf)[..., None]
        return weight[..., None] * torch.where(empty, 0.0, self.out.to(self.lse.dtype))


def fold_sink(state: State, logits: Tensor) -> Tensor:
    """`State.with_sink` of logits that broadcast to the rows, [batch, heads, queries], in the precision of lse."""
    seen = state.lse > -torch.inf
    # not sigmoid, whose gradient s * (1 - s) is 0 where s rounds to 1
    share = F.logsigmoid(torch.where(seen, state.lse, 0.0) - logits).exp()
    return state._weighed(share).to(state.out.dtype)  # pyright: ignore[reportPrivateUsage]


torch.export.register_dataclass(State, serialized_type_name="regard.State")
