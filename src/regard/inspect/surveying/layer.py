"""The results of a survey for one layer: the scores of its heads as plain floats, their pictures, its call's plan."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.inspect.intervene.heads import Site
from regard.inspect.measures.distance import distance_profile
from regard.inspect.measures.measure import Inputs, Measure, compute
from regard.inspect.measures.score import HeadScores
from regard.inspect.observing.observe import Look
from regard.inspect.surveying.kinds import NAMERS, Estimate, Head, keeping, kind_of, kinds_of
from regard.inspect.surveying.report import Picture

DRAWS = 1000
"""The number of draws for intervals and for the certainty of a kind."""

SHARES = ("mass", "share")
"""Units of scores from 0 to 1."""


@dataclass(frozen=True, eq=False)
class LayerScores:
    """The scores of a layer's heads, and draws of those that name a head.

    Args:
        of: by measure, one for each head.
        drawn: by measure, its draws [draws, heads]; for `NAMERS` only. Scores of one sample share their draws.
    """

    of: dict[str, list[Estimate]] = field(default_factory=dict[str, list[Estimate]])
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])

    def add(self, measure: Measure, score: HeadScores) -> None:
        """Add a score as plain floats; if it is the best of several, also which one, as `positional_at`."""
        draws = score.draws(DRAWS).double().cpu().numpy()
        self.of[measure.key] = list(_estimates(score, draws, bounded=measure.unit in SHARES))
        if measure.key in NAMERS:
            self.drawn[measure.key] = draws
        at = score.most_common_at()
        if at is not None and measure.at is not None:
            self.of[f"{measure.key}_at"] = [Estimate(number) for number in at.double().tolist()]

    def joined(self, other: "LayerScores | None") -> "LayerScores":
        """These scores and others of the same heads."""
        return self if other is None else LayerScores(self.of | other.of, self.drawn | other.drawn)

    def head(self, head: int) -> dict[str, Estimate]:
        """All scores of one head."""
        return {measure: scores[head] for measure, scores in self.of.items()}


def _estimates(score: HeadScores, draws: NDArray[np.float64], *, bounded: bool) -> Iterator[Estimate]:
    """The mean over sequences of each head, with its interval, which is cut to 0 to 1 where scores are bounded."""
    ends = _ends(score, draws)
    columns = (
        score.mean().double().tolist(),
        score.mean_chance().double().tolist(),
        *(ends.clip(0, 1) if bounded else ends),
    )
    for row in zip(*columns, strict=True):
        yield Estimate(*(None if math.isnan(number) else float(number) for number in row))


def _ends(score: HeadScores, draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ends of the 95 % interval of each head [2, heads]."""
    if score.over != "sequences":
        return interval(draws)
    low, high, _ = score.interval()
    return torch.stack([low, high]).double().cpu().numpy()


def interval(draws: NDArray[np.float64], level: float = 0.95) -> NDArray[np.float64]:
    """The ends of the percentile interval of draws [draws, heads], as `HeadScores.interval` has it: [2, heads].

    A survey takes some 700 of them: by partitioning, in a quarter of the time that torch needs to sort them. Columns
    in which a draw has no value go to the function that knows NaN.
    """
    ends, found = ((1 - level) / 2, (1 + level) / 2), np.full((2, draws.shape[1]), np.nan)
    without = np.isnan(draws)
    whole, none = ~without.any(0), without.all(0)
    found[:, whole] = np.quantile(draws[:, whole], ends, axis=0)
    if (some := ~whole & ~none).any():
        found[:, some] = np.nanquantile(draws[:, some], ends, axis=0)
    return found


PICTURE = 192
"""The most cells per side of a picture; for longer texts a cell is the mean, or the largest, of several tokens."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Layer:
    """The results for a layer.

    Args:
        layer: its number in the report; see `self_attention`.
        site: its number in the model, and the module that attended.
        pictures: the means of cells [heads, side, side], and above one token a cell the largest weights; bytes of a
            root, as `Picture` says. None where no sweep was made.
        profile: the mass of a mean row by distance, [heads, bins], up to the bin of the longest distance.
    """

    layer: int
    site: Site
    scores: LayerScores
    heads: int
    kv_heads: int
    head_dim: int
    backend: str
    pairs: int
    flops: int
    pictures: Bytes | None = None
    largest: Bytes | None = None
    pooled: int = 1
    profile: NDArray[np.float64] | None = None


def layer_of(number: int, look: Look, inputs: Inputs, measures: Sequence[Measure]) -> Layer:
    """The results for a call: its scores, and its pictures and profile if some measure needs all weights."""
    weights, plan, scores = inputs.weights, look.call.plan, LayerScores()
    for measure, score in zip(measures, compute(measures, inputs).values(), strict=True):
        scores.add(measure, score)
    swept = inputs.swept if any("sweep" in measure.needs for measure in measures) else None
    return Layer(
        layer=number,
        site=Site(look.layer, look.module),
        scores=scores,
        heads=weights.shape[1],
        kv_heads=weights.k.shape[1],
        head_dim=weights.q.shape[3],
        backend=plan.backend,
        pairs=plan.schedule.pairs,
        flops=plan.flops,
        pictures=None if swept is None else _bytes(swept.mean),
        largest=None if swept is None or swept.cell == 1 else _bytes(swept.largest),
        pooled=1 if swept is None else swept.cell,
        profile=None if swept is None else distance_profile(inputs).value[0].cpu().numpy(),
    )


def pictures_of(layers: list[Layer]) -> Iterator[Picture]:
    """A picture of every head, layer by layer."""
    for layer in layers:
        for head, cells in enumerate(() if layer.pictures is None else layer.pictures):
            largest = None if layer.largest is None else layer.largest[head]
            yield Picture(layer.layer, head, len(cells), layer.pooled, cells, largest)


def profiles_of(layers: list[Layer]) -> dict[tuple[int, int], tuple[float, ...]]:
    """The mass by distance of every head."""
    return {
        (layer.layer, head): tuple(bins)
        for layer in layers
        if layer.profile is not None
        for head, bins in enumerate(layer.profile.tolist())
    }


def heads_of(layer: Layer, repeats: LayerScores | None, others: Sequence[LayerScores] = ()) -> list[Head]:
    """The query heads of a layer with their scores on the text and on repeats, and how certain their kind is.

    Args:
        others: the scores that name them on other texts.
    """
    every, group = layer.scores.joined(repeats), layer.heads // layer.kv_heads
    sure = sureness(every, [every.joined(other) for other in others])
    return [
        Head(
            layer.layer,
            head,
            head // group,
            scores := every.head(head),
            kind_of(scores),
            sure=None if sure is None else float(sure[head]),
        )
        for head in range(layer.heads)
    ]


def sureness(scores: LayerScores, others: Sequence[LayerScores]) -> NDArray[np.float64] | None:
    """The share of draws on other texts in which each head has the same kind as here, [heads].

    A score that has no draws keeps its value. None if there are no other texts, or no scores that name heads.
    """
    if not others or not scores.drawn:
        return None
    kinds = kinds_of(*_arrays(scores))
    shares = list[NDArray[np.float64]]()
    for other in others:
        values, chances = _arrays(other)
        drawn = {m: np.where(np.isnan(draws), values[m], draws) for m, draws in other.drawn.items()}
        shares.append(keeping(kinds, drawn, chances))
    return np.mean(shares, axis=0)


def _arrays(scores: LayerScores) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """The values and the chance values of the scores that name heads, [heads] each."""
    values, chances = (
        {measure: np.array([_nan(score[at]) for score in scores.of[measure]]) for measure in scores.drawn}
        for at in (0, 1)
    )
    return values, chances


def _nan(number: float | None) -> float:
    return np.nan if number is None else number


def _bytes(cells: Tensor | None) -> Bytes | None:
    """Weights [1, heads, side, side] as the bytes of a picture."""
    return None if cells is None else (cells[0].clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu().numpy()
