"""The error of measures without a matrix of weights, against the formulas on the dense matrix in float64."""

import torch
from torch import Tensor

from benchmarks.inspect_cost import DIM, HEADS, KV_HEADS
from benchmarks.report import table
from regard import Causal, attend
from regard.calls import Call, observe_calls
from regard.inspect import Inputs, Weights
from regard.inspect.measures import entropy as entropy_of
from regard.inspect.measures import induction, previous_token, sink

GOAL_MASS, GOAL_ENTROPY = 1e-6, 1e-5


def agreement(tokens: int) -> str:
    """The table: the largest difference of any head, by measure. Half of the tokens are repeated, for induction."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, tokens, DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    calls: list[Call] = []
    with observe_calls(calls.append):
        attend(2 * q, k, v, mask=Causal())
    weights = Weights.of(calls[0])
    dense = _dense(2 * q, k)
    ids = torch.arange(tokens // 2).repeat(2)[None]
    entropy = -torch.special.xlogy(dense, dense).sum(dim=3).mean(dim=2)
    copies = torch.arange(tokens // 2, tokens)
    found = {
        "mass on token 0": (sink(weights).value, dense[..., 1:, 0].mean(dim=2), GOAL_MASS),
        "mass on the previous token": (
            previous_token(weights).value, dense.diagonal(-1, dim1=2, dim2=3).mean(dim=2), GOAL_MASS,
        ),
        "mass on the token after an earlier occurrence": (
            induction(weights, ids).value, dense[:, :, copies, copies - tokens // 2 + 1].mean(dim=2), GOAL_MASS,
        ),
        "entropy, nats": (entropy_of(Inputs(weights)).value, entropy, GOAL_ENTROPY),
    }  # fmt: skip
    rows = [_row(name, *one) for name, one in found.items()]
    return table(("measure", "largest difference", "goal", "reached"), rows)


def _dense(q: Tensor, k: Tensor) -> Tensor:
    """The weights, float64 [1, heads, tokens, tokens], by the formula."""
    scores = q.double() @ k.double().repeat_interleave(HEADS // KV_HEADS, dim=1).mT / DIM**0.5
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(dim=3)


def _row(name: str, ours: Tensor, theirs: Tensor, goal: float) -> tuple[str, ...]:
    largest = float((ours.double() - theirs).abs().max())
    return name, f"{largest:.1e}", f"≤ {goal:.0e}", "yes" if largest <= goal else "**no**"
