"""What the tests of measures share: means over rows, uniform attention, heads made by hand."""

import torch
from torch import Tensor

from regard.calls import Call
from regard.inspect.measures import HeadScores, Inputs, compute
from regard.inspect.measures.catalogue import MEASURES
from regard.inspect.measures.means import looks_ahead
from tests.inspect.dense import Dense64

SHARP = 40.0
"""A score so far above the others, at 0, that it takes all of the mass: they are left 4e-18."""


def mean_over(rows: Tensor, values: Tensor) -> Tensor:
    """The mean over rows that count; [batch, heads]."""
    rows = rows.expand(values.shape)
    return torch.where(rows, values, 0.0).sum(-1) / rows.sum(-1)


def equal(found: Tensor, exact: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), exact.double(), atol=atol, rtol=0, equal_nan=True)


def uniform_of(exact: Dense64) -> Tensor:
    """Uniform attention over the same mask."""
    return exact.keep.double() / exact.keep.sum(-1, keepdim=True).clamp(min=1)


def positions(call: Call) -> Tensor:
    return call.offset + torch.arange(call.q.shape[2])


def looking(at: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [heads, tokens, tokens] of heads whose row i looks at token `at[head, i]`, and at nothing else."""
    tokens = at.shape[-1]
    return SHARP * torch.nn.functional.one_hot(at, tokens).double(), torch.eye(tokens).double().expand(len(at), -1, -1)


def pair_measures(weights, tokens=None, rows=None) -> dict[str, HeadScores]:
    """Every measure that is a sum over O(n) pairs, on this text; those of tokens only with tokens."""
    can = {"causal"} if tokens is None else {"causal", "tokens"}
    measures = [m for m in MEASURES if m.needs <= can and m.on != "jittered repeats"]
    return compute(measures, Inputs(weights, tokens, rows))


def sweep_measures(inputs: Inputs) -> dict[str, HeadScores]:
    """Every measure of one sweep that these inputs have what it takes for."""
    can = {"sweep"}
    can |= {"tokens"} if inputs.rarity is not None else set()
    can |= {"projection"} if inputs.norms is not None else set()
    can |= set() if looks_ahead(inputs.weights) else {"causal"}
    return compute([m for m in MEASURES if "sweep" in m.needs and m.needs <= can and not m.on_demand], inputs)


def places(scores) -> dict[str, Tensor]:
    """Of the scores that are the best of several, which they are of."""
    return {f"{key}_at": score.at for key, score in scores.items() if score.at is not None}
