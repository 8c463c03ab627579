"""The results of a survey for one layer: the scores of its heads, their pictures, and the plan of its call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.inspect.measures.distance import distance_profile
from regard.inspect.measures.measure import Inputs, Measure, compute
from regard.inspect.observing.observe import Look
from regard.inspect.surveying.kinds import keeping, kind_of, kinds_of
from regard.inspect.surveying.layer_scores import LayerScores
from regard.inspect.surveying.report import Head, Picture

PICTURE = 192
"""The most cells per side of a picture; for longer texts a cell is the mean, or the largest, of several tokens."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Layer:
    """The results for a layer.

    Args:
        pictures: the means of cells [heads, side, side], and above one token a cell the largest weights; bytes of a
            root, as `Picture` says. None where no sweep was made.
        profile: the mass of a mean row by distance, [heads, bins], up to the bin of the longest distance.
    """

    layer: int
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


def layer_of(look: Look, inputs: Inputs, measures: Sequence[Measure]) -> Layer:
    """The results for a call: its scores, and its pictures and profile if some measure needs all weights."""
    weights, plan, scores = inputs.weights, look.call.plan, LayerScores()
    for measure, score in zip(measures, compute(measures, inputs).values(), strict=True):
        scores.add(measure, score)
    swept = inputs.swept if any("sweep" in measure.needs for measure in measures) else None
    return Layer(
        layer=look.layer,
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


def numbered(layers: list[Layer]) -> list[Layer]:
    """The layers with unique numbers: counted in order if two share a number (`stages.0.blocks.1`)."""
    if len({layer.layer for layer in layers}) == len(layers):
        return layers
    return [replace(layer, layer=number) for number, layer in enumerate(layers)]


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
