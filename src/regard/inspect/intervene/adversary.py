"""Adversarial weights: weights as different as possible from the model's that leave its prediction unchanged.

Jain & Wallace 2019, *Attention is not explanation*, arXiv:1902.10186, §4.2.2: over the weights of chosen rows,

    maximise JSD(weights, original weights)     subject to     TVD(prediction, original prediction) <= epsilon

relaxed to minimising -JSD + 500 max(0, TVD - epsilon) by Adam (amsgrad, step 0.01), 500 steps from each of several
starts: the first near the model's own weights, the others at random. The result is a lower bound. JSD, the
Jensen-Shannon divergence, is at most ln 2 = 0.693 nats; it is the mean over the chosen heads and rows. TVD, the total
variation distance, is half the sum of absolute differences of probabilities. Wiegreffe & Pinter 2019, *Attention is not
not explanation*, arXiv:1908.04626, discuss what this shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.heads import Site
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.rows import (
    CAVEAT,
    Baseline,
    Predict,
    mean_divergence,
    observe_rows,
    prediction_shift,
)
from regard.inspect.names import HeadName, Heads, group_text
from regard.integers import is_integer

PENALTY, STEP = 500.0, 0.01
LEAST = 1e-4
"""The least initial weight: 500 steps of 0.01 change a logit by at most 5, so a lower weight would never matter."""


@brief
@dataclass(frozen=True, eq=False)
class Adversary:
    """The weights with the largest divergence found within epsilon.

    Args:
        heads, rows: the heads and rows whose weights were changed.
        epsilon: the limit on the change of the prediction, total variation.
        divergence: JSD between these weights and the model's own, nats, [batch]; 0 where the search failed.
        distance: the change of the prediction under these weights, total variation, [batch].
        weights: by layer, the weights, [batch, chosen heads of the layer, rows, keys + 1], the heads in the order of
            `heads`; the last column is the sink.
        own: the model's own weights, in the same layout.
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
    """The most different weights of some heads in some rows that leave the prediction within epsilon.

    All heads are changed together: call it for each head alone, and for the group, and compare. Costs
    `starts * (steps + 1)` forward and backward passes; every example of the batch has its own weights.

    Args:
        predict: runs the model and returns logits [batch, ..., classes], as `lambda: model(ids).logits[:, -1]`.
            Choose the row that the logits are read from: in a causal model, other rows reach it only through later
            layers.
        heads: by name, (layer, head).
        rows: the rows whose weights are changed, in each of the heads; -1 is the last.
        epsilon: the limit on the change of the prediction, total variation, 0 to 1.
        tick: called after each step.

    Raises:
        ProblemError: heads or rows that do not exist, a row named twice, dropout, a prediction that is no batch of
            logits or has no gradients.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> found = adversary(model, lambda: model(ids)[:, -1], [(1, 0)], epsilon=0.05, steps=10, starts=1)
    >>> bool(found.distance <= 0.05), "not importance" in str(found)
    (True, True)
    """
    is_distance = isinstance(epsilon, Real) and 0 < float(epsilon) <= 1
    if not is_distance or not is_integer(steps, least=1) or not is_integer(starts, least=1):
        raise ProblemError(
            f"epsilon={epsilon}, steps={steps}, starts={starts}: expected 0 < epsilon <= 1 and counts of 1 or more."
        )
    subject = observe_rows(model, predict, heads, rows)
    best = _Best(subject, epsilon)
    for start in range(starts):
        random = torch.Generator().manual_seed(seed + start)
        _search(subject, best, _beside_own(subject, random) if start == 0 else _anywhere(subject, random), steps, tick)
    own = {site: one.weights for site, one in subject.own.items()}
    return Adversary(subject.heads, subject.rows, epsilon, best.divergence, best.distance, best.weights, own)


class _Best:
    """For each example, the most different weights so far within epsilon; initially the model's own."""

    def __init__(self, subject: Baseline, epsilon: float) -> None:
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


def _anywhere(subject: Baseline, random: torch.Generator) -> dict[Site, Tensor]:
    """Logits from N(0, 1)."""
    return {site: torch.randn(own.weights.shape, generator=random).to(own.weights) for site, own in subject.own.items()}


def _beside_own(subject: Baseline, random: torch.Generator) -> dict[Site, Tensor]:
    """The logs of the model's own weights, those below LEAST raised to it, with noise from N(0, 1)."""
    noise = _anywhere(subject, random)
    return {site: own.weights.clamp(min=LEAST).log() + noise[site] for site, own in subject.own.items()}


def _search(subject: Baseline, best: _Best, free: dict[Site, Tensor], steps: int, tick: Tick | None) -> None:
    """Minimise the objective from these logits, and offer every iterate to `best`."""
    for logits in free.values():
        logits.requires_grad_()
    optimizer = torch.optim.Adam(free.values(), lr=STEP, amsgrad=True)
    for step in range(steps + 1):
        with torch.enable_grad():
            weights = {site: _distribution(subject, site, logits) for site, logits in free.items()}
            divergence, distance = mean_divergence(subject, weights), prediction_shift(subject, weights)
            if not distance.requires_grad:
                raise ProblemError(
                    "the prediction has no gradients: let it run without torch.no_grad, inference_mode and detach."
                )
            objective = (PENALTY * (distance - best.epsilon).clamp(min=0) - divergence).sum()  # examples share nothing
        best.offer({site: one.detach() for site, one in weights.items()}, divergence.detach(), distance.detach())
        if step < steps:
            for logits, slope in zip(free.values(), torch.autograd.grad(objective, list(free.values())), strict=True):
                logits.grad = slope
            optimizer.step()
        if tick is not None:
            tick()


def _distribution(subject: Baseline, site: Site, logits: Tensor) -> Tensor:
    """The softmax of logits over the visible keys; a fully masked row is 0."""
    allowed = subject.own[site].allowed
    return logits.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed, 0.0)
