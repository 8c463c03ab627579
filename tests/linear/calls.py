"""Calls of every kind of linear attention: tensors, words, and what the definition gives for them."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.linear import Decay, Delta, Elu1, Favor, Feature, Gated, LinearState, Relu, Rule, Taylor
from tests.linear.oracle import by_token, elu1, favor, relu, taylor

FORMS = ("chunked", "parallel", "recurrent")

FEATURES: dict[str, Feature | None] = {
    "elu": Elu1(),
    "relu": Relu(),
    "favor": Favor(5, features=7),
    "taylor": Taylor(),
    "none": None,
}

KINDS = {
    "elu": ("elu", None),
    "relu": ("relu", None),
    "favor": ("favor", None),
    "taylor": ("taylor", None),
    "dot": ("none", None),
    "elu, decay": ("elu", "decay"),
    "favor, decay": ("favor", "decay"),
    "dot, decay": ("none", "decay"),
    "dot, gated": ("none", "gated"),
    "elu, gated": ("elu", "gated"),
    "dot, one gate": ("none", "one gate"),
    "delta": ("none", "delta"),
    "gated delta": ("none", "gated delta"),
}
"""Features and rule by their names."""

FAST = ("elu", "favor, decay", "dot, gated", "gated delta")
"""One of each way that is computed."""


@dataclass
class Numbers:
    """Tensors of a call: all that any rule may ask for."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    gate: Tensor
    one_gate: Tensor
    beta: Tensor
    log_decay: Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    def cut(self, start: int, stop: int | None) -> "Numbers":
        one = slice(start, stop)
        many = (t[:, :, one] for t in (self.q, self.k, self.v))
        rest = (t[:, :, one] for t in (self.gate, self.one_gate, self.beta, self.log_decay))
        return Numbers(*many, self.gamma, *rest)

    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.gamma, self.gate, self.one_gate, self.beta, self.log_decay]

    def to(self, dtype: torch.dtype) -> "Numbers":
        return Numbers(*(t.to(dtype) for t in self.tensors()))

    def clone(self) -> "Numbers":
        return Numbers(*(t.clone() for t in self.tensors()))


def numbers(
    kind: str, tokens: int, batch: int = 2, kv_heads: int = 2, group: int = 1, dim: int = 5, width: int = 3
) -> Numbers:
    """Random tensors, in float64."""
    features = FEATURES[KINDS[kind][0]]
    size = dim if features is None else features.size(dim)
    q = torch.randn(batch, kv_heads * group, tokens, dim, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, tokens, n, dtype=torch.float64) for n in (dim, width))
    if "delta" in kind:
        k = F.normalize(k, dim=-1)
    some = torch.rand(batch, kv_heads, tokens, size + 3, dtype=torch.float64)
    gate, one_gate = (3 * some[..., :size].log()).clamp(min=-60), some[..., size : size + 1].log()
    gamma = 0.5 + 0.5 * torch.rand(kv_heads, dtype=torch.float64)
    return Numbers(q, k, v, gamma, gate, one_gate, some[..., -2], some[..., -1].log())


def words(kind: str, n: Numbers) -> dict[str, Any]:
    """What the call is given besides q, k and v."""
    features, rule = KINDS[kind]
    rules: dict[str | None, Rule | None] = {
        None: None,
        "decay": Decay(n.gamma),
        "gated": Gated(n.gate),
        "one gate": Gated(n.one_gate),
        "delta": Delta(n.beta),
        "gated delta": Delta(n.beta, n.log_decay),
    }
    return {"features": FEATURES[features], "rule": rules[rule]}


def mapped(kind: str, x: Tensor) -> Tensor:
    """The features by their definition."""
    scaled, word = x * x.shape[-1] ** -0.25, FEATURES[KINDS[kind][0]]
    if isinstance(word, Favor):
        return favor(scaled, word.vectors().to(x.dtype))
    return {"elu": lambda: elu1(x), "relu": lambda: relu(x), "taylor": lambda: taylor(scaled), "none": lambda: x}[
        KINDS[kind][0]
    ]()


def expected(kind: str, n: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, S and z by the definition; Taylor's with all products."""
    features, rule = KINDS[kind]
    q, k = mapped(kind, n.q), mapped(kind, n.k)
    given: dict[str | None, dict[str, Tensor]] = {
        None: {},
        "decay": {},
        "gated": {"gate": n.gate.exp()},
        "one gate": {"gate": n.one_gate.exp().expand(*k.shape)},
        "delta": {"beta": n.beta},
        "gated delta": {"beta": n.beta, "alpha": n.log_decay.exp()},
    }
    gamma = {"gamma": n.gamma} if rule == "decay" else {}
    rows = [
        by_token(
            q[b], k[b], n.v[b], normalise=features != "none", **gamma, **{name: t[b] for name, t in given[rule].items()}
        )
        for b in range(len(q))
    ]
    out, state, z = (torch.stack(column) for column in zip(*rows, strict=True))
    return out, state, z


def whole(state: LinearState) -> tuple[Tensor, Tensor | None]:
    """S and z with their scale in them."""
    if state.log_scale is None:
        return state.S, state.z
    scale = state.log_scale.exp()
    return state.S * scale[..., None, None], None if state.z is None else state.z * scale[..., None]
