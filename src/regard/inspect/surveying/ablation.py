"""The ablations of a survey: the loss of a model on a text without each of its heads."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.inspect.intervene.ablate import ablation_effects
from regard.inspect.intervene.heads import Site, heads_of
from regard.inspect.intervene.replacement import By, mean_outputs
from regard.inspect.measures.score import HeadScores
from regard.inspect.names import HeadName
from regard.inspect.surveying.kinds import Estimate
from regard.inspect.surveying.report import Ablations

CAVEAT = (
    "Single heads understate: of several redundant heads a model can lose any one, but not all. A change whose "
    "interval contains 0 is not significant."
)
HOW = ("zero", "mean")

Place = tuple[int, int]


def ablations(
    model: Any, ids: Tensor, heads: Mapping[Place, Site], how: str, step: Callable[[], None]
) -> tuple[Ablations, Mapping[Place, Estimate]]:
    """Ablate one head after the other: the change of the loss for each, with its interval.

    A head of a module that attends twice in a run is ablated in both calls.

    Args:
        model: a causal language model.
        ids: the text, int64 [1, tokens], 2 tokens or more.
        heads: by their names in the report, where their layers are in the model.
        how: "zero", or "mean": the head's mean output over this text.
        step: called after each head.
    """

    def loss_of(batch: Tensor) -> Tensor:
        """The loss of each predicted token, as the interval is a bootstrap over runs of tokens."""
        logits = model(input_ids=batch)[0]
        return F.cross_entropy(logits[0, :-1].float(), batch[0, 1:], reduction="none")

    by: By = "zero" if how == "zero" else mean_outputs(model, [ids], lambda batch: model(input_ids=batch))
    scores: dict[Place, Estimate] = {}
    loss = 0.0
    names = _names(model, ids, heads)
    effects = ablation_effects(model, [ids], loss_of, [[name] for name in names], by)
    for place, effect in zip(heads, effects, strict=True):
        loss = float(effect.base.mean())
        scores[place] = _estimate(effect.losses - effect.base)
        step()
    deltas = {place: score.value or 0.0 for place, score in scores.items()}
    return Ablations(how, loss, ids.shape[1] - 1, deltas, CAVEAT), scores


def _names(model: Any, ids: Tensor, heads: Mapping[Place, Site]) -> list[HeadName]:
    """The names of heads in the model: by the number of the layer, or by its module where several share the number."""
    names = set(heads_of(model, lambda: model(input_ids=ids)))
    both = [((site.layer, head), (site.module or "", head)) for (_, head), site in heads.items()]
    return [by_number if by_number in names else by_module for by_number, by_module in both]


def _estimate(change: Tensor) -> Estimate:
    """The mean change of the loss, and its interval over blocks of tokens; chance is no change."""
    score = HeadScores.of_rows(change[None, None], torch.zeros(()), torch.tensor(True))
    low, high, _ = score.interval()
    return Estimate(float(score.value), 0.0, float(low), float(high))
