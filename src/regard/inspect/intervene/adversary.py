"""The adversary: weights as unlike the model's as can be, under which it still says the same.

Jain & Wallace 2019, *Attention is not explanation*, arXiv:1902.10186, §4.2.2: over the weights of chosen rows,

    maximise JSD(weights, the model's own)     so that     TVD(what it says, what it said) <= epsilon

relaxed to minimising -JSD + 500 max(0, TVD - epsilon) by Adam (amsgrad, step 0.01), 500 steps from each of several
starts: the first beside the model's own weights, the others at random. What is found is a lower bound. JSD is at most
ln 2 = 0.693 nats and is the mean over the chosen heads and rows; TVD is half the sum of differences of probabilities.
Wiegreffe & Pinter 2019, *Attention is not not explanation*, arXiv:1908.04626, say what this shows and what not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.heads import Site
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.rows import (
    CAVEAT,
    Predict,
    Unchanged,
    mean_divergence,
    moved,
    observed,
)
from regard.inspect.names import HeadName, Heads, group_text

PENALTY, STEP = 500.0, 0.01
LEAST = 1e-4
"""Weights start no lower: in 500 steps of 0.01 a logit moves by 5, and what starts too low never takes part."""


@brief
@dataclass(frozen=True, eq=False)
class Adversary:
    """The most different weights that were found, within epsilon.

    Args:
        heads, rows: of which weights.
        epsilon: how far the prediction was allowed to move, total variation.
        divergence: JSD of the weights found from the model's own, nats, [batch]; 0 where none were found.
        distance: how far the prediction moved under them, total variation, [batch].
        weights: by layer, the weights found, [batch, chosen heads of the layer, rows, keys + 1]; the last is the sink.
        own: the model's, likewise.
    """

    heads: tuple[HeadName, ...]
    rows: tuple[int, ...]
    epsilon: float
    divergence: Tensor
    distance: Tensor
    weights: Mapping[Site, Tensor]
    own: Mapping[Site, Tensor]
    caveat: str = CAVEAT

    def __str__(self) -> str:
        return (
            f"{group_text(self.heads)}: weights at a divergence of {self.divergence.mean():.3f} (of at most 0.693) "
            f"move the prediction by {self.distance.mean():.4f} (allowed {self.epsilon:g}).\n"
            f"{self.caveat}"
        )


def adversary(
    model: nn.Module | None,
    predict: Predict,
    heads: Heads,
    rows: Sequence[int] = (-1,),
    *,
    epsilon: float = 0.01,
    steps: int = 500,
    starts: int = 5,
    seed: int = 0,
    tick: Tick | None = None,
) -> Adversary:
    """The most different weights of some heads in some rows under which the model says the same.

    Heads are changed together: call it for each head alone, and for the group, and compare. `starts * (steps + 1)`
    forward and backward passes; every example of the batch has weights of its own.

    Args:
        predict: runs the model and gives logits [batch, ..., classes], as `lambda: model(ids).logits[:, -1]`.
            Change the row that it is read from: in a causal model, others reach it only through later layers.
        heads: by name, (layer, head).
        rows: whose weights are changed, in each of the heads; -1 is the last.
        epsilon: how far the prediction may move, total variation, 0 to 1.
        tick: called after each step.

    Raises:
        ProblemError: heads or rows that there are not, a prediction that is no batch of logits.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> found = adversary(model, lambda: model(ids)[:, -1], [(1, 0)], epsilon=0.05, steps=10, starts=1)
    >>> bool(found.distance <= 0.05), "not importance" in str(found)
    (True, True)
    """
    if not 0 < epsilon <= 1 or steps < 1 or starts < 1:
        raise ProblemError(f"epsilon={epsilon}, steps={steps}, starts={starts}: expected 0 < epsilon <= 1 and counts.")
    subject = observed(model, predict, heads, rows)
    best = _Best(subject, epsilon)
    for start in range(starts):
        random = torch.Generator().manual_seed(seed + start)
        _search(subject, best, _beside_own(subject, random) if start == 0 else _anywhere(subject, random), steps, tick)
    own = {site: one.weights for site, one in subject.own.items()}
    return Adversary(subject.heads, subject.rows, epsilon, best.divergence, best.distance, best.weights, own)


class _Best:
    """For each example, the most different weights so far that stay within epsilon; the model's own to begin with."""

    def __init__(self, subject: Unchanged, epsilon: float) -> None:
        self.epsilon = epsilon
        self.weights = {site: own.weights.clone() for site, own in subject.own.items()}
        self.divergence = torch.zeros(subject.batch, dtype=torch.float64, device=subject.log_probs.device)
        self.distance = torch.zeros_like(self.divergence)

    def offer(self, weights: Mapping[Site, Tensor], divergence: Tensor, distance: Tensor) -> None:
        better = (distance <= self.epsilon) & (divergence > self.divergence)
        self.divergence = torch.where(better, divergence, self.divergence)
        self.distance = torch.where(better, distance, self.distance)
        for site, own in self.weights.items():
            own[better] = weights[site][better].to(own.dtype)


def _anywhere(subject: Unchanged, random: torch.Generator) -> dict[Site, Tensor]:
    """Logits from N(0, 1)."""
    return {site: torch.randn(own.weights.shape, generator=random).to(own.weights) for site, own in subject.own.items()}


def _beside_own(subject: Unchanged, random: torch.Generator) -> dict[Site, Tensor]:
    """The logs of the model's own weights, those below LEAST raised to it, with noise from N(0, 1)."""
    noise = _anywhere(subject, random)
    return {site: own.weights.clamp(min=LEAST).log() + noise[site] for site, own in subject.own.items()}


def _search(subject: Unchanged, best: _Best, free: dict[Site, Tensor], steps: int, tick: Tick | None) -> None:
    """Descend from these logits, and offer what is met on the way."""
    for logits in free.values():
        logits.requires_grad_()
    optimizer = torch.optim.Adam(free.values(), lr=STEP, amsgrad=True)
    for step in range(steps + 1):
        with torch.enable_grad():
            weights = {site: _distribution(subject, site, logits) for site, logits in free.items()}
            divergence, distance = mean_divergence(subject, weights), moved(subject, weights)
            objective = (PENALTY * (distance - best.epsilon).clamp(min=0) - divergence).sum()  # examples share nothing
        best.offer({site: one.detach() for site, one in weights.items()}, divergence.detach(), distance.detach())
        if step < steps:
            for logits, slope in zip(free.values(), torch.autograd.grad(objective, list(free.values())), strict=True):
                logits.grad = slope
            optimizer.step()
        if tick is not None:
            tick()


def _distribution(subject: Unchanged, site: Site, logits: Tensor) -> Tensor:
    """Logits as weights over what may have weight; a row that sees nothing stays 0."""
    allowed = subject.own[site].allowed
    return logits.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed, 0.0)
