"""What a survey keeps of a layer: the scores of its heads, their pictures, and what its plan says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.measures import (
    Vectors,
    all_pair_measures,
    all_sweep_measures,
    of_heads,
    output_norms,
    rarest_hits,
    rarity,
    sink_output,
    value_norms,
)
from regard.inspect.measures.score import HeadScores
from regard.inspect.observing.observe import Look
from regard.inspect.surveying.kinds import keeping, kind_of, kinds_of
from regard.inspect.surveying.report import Head, Picture
from regard.inspect.surveying.scored import Scores
from regard.inspect.surveying.wanted import Wanted
from regard.inspect.sweep import Sweep, sweep
from regard.inspect.weights.lazy import Weights
from regard.integrate.projections import output_projection

PICTURE = 192
"""Cells per side of a picture: one per token up to here, the mean and the largest of several above."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Layer:
    """What is kept of a layer.

    Args:
        pictures: the means of cells [heads, side, side], and above one token a cell the largest weights; bytes of a
            root, as `Picture` says. None where no sweep was made.
        profile: the mass of a mean row by distance, [heads, bins], up to the bin of the longest distance.
    """

    layer: int
    scores: Scores
    causal: bool
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


@dataclass(frozen=True, eq=False)
class Measuring:
    """Measures the layers of one model on one text, as they pass.

    Args:
        tokens: the text, int64 [1, tokens].
        copies: what the weights of each layer say of copying, by its number; empty where they cannot be read.
        notes: filled with a note for each measure that some layer could not be put to.
    """

    tokens: Tensor
    wanted: Wanted
    model: nn.Module
    copies: Mapping[int, Mapping[str, HeadScores]] = field(default_factory=dict[int, Mapping[str, HeadScores]])
    notes: list[str] = field(default_factory=list[str])

    def layer(self, look: Look) -> Layer:
        """Everything about a layer: O(n) pairs, and one sweep over its tiles if any measure asks for it."""
        weights, plan, scores = look.weights, look.call.plan, Scores()
        scores.add_best(self.wanted.among(all_pair_measures(weights)))
        scores.add(self.wanted.among(self.copies.get(look.layer, {})))
        w_o = self._projection(look)
        if self.wanted.has("sink_output") and w_o is not None:
            scores.add({"sink_output": sink_output(weights, look.call.v, look.call.out, w_o)})
        if self.wanted.has("sink_value"):
            group = look.call.q.shape[1] // look.call.v.shape[1]
            scores.add_numbers("sink_value", value_norms(look.call.v)[0, :, 0].repeat_interleave(group), chance=1.0)
        swept = self._swept(look, scores, w_o) if self.wanted.sweep else None
        return Layer(
            layer=look.layer,
            scores=scores,
            causal=is_causal(weights),
            heads=weights.shape[1],
            kv_heads=weights.k.shape[1],
            head_dim=weights.q.shape[3],
            backend=plan.backend,
            pairs=plan.schedule.pairs,
            flops=plan.flops,
            pictures=None if swept is None else _bytes(swept.mean),
            largest=None if swept is None or swept.cell == 1 else _bytes(swept.largest),
            pooled=1 if swept is None else swept.cell,
            profile=None if swept is None else _profile(swept),
        )

    def _projection(self, look: Look) -> Tensor | None:
        """The output projection of the layer, if a measure needs it."""
        needing = [measure for measure in ("value_weighted", "sink_output") if self.wanted.has(measure)]
        w_o = projection(self.model, look) if needing else None
        if needing and w_o is None:
            where = "a function" if look.module is None else type(self.model.get_submodule(look.module)).__name__
            self.notes.append(self.wanted.lacking(needing, f"the output projection of {where} is not known"))
        return w_o

    def _swept(self, look: Look, scores: Scores, w_o: Tensor | None) -> Sweep:
        """The sweep of a layer, once its measures are among the scores."""
        weights = look.weights
        vectors = Vectors(
            rarity=rarity(self.tokens) if self.wanted.has("rare_word") else None,
            norms=output_norms(look.call.v, w_o) if w_o is not None and self.wanted.has("value_weighted") else None,
        )
        swept = sweep(weights, picture=PICTURE, along=vectors.stacked(weights))
        scores.add_best(self.wanted.among(all_sweep_measures(swept, weights, vectors)))
        if self.wanted.has("rarest_hits"):
            scores.add({"rarest_hits": rarest_hits(weights, swept, rarity(self.tokens))})
        return swept


def projection(model: nn.Module, look: Look) -> Tensor | None:
    """The output projection of the module that attended, head by head: [heads, v_dim, d_model]; None if not known.

    It is the module's own, or, as in BERT, that of the module `output` beside it.
    """
    width = look.call.out.shape[1] * look.call.out.shape[3]
    module = None if look.module is None else model.get_submodule(look.module)
    beside = None if look.module is None else model.get_submodule(look.module.rpartition(".")[0])
    try:
        for place in (module, getattr(beside, "output", None)):
            if place is not None and (found := output_projection(place, width)) is not None:
                return of_heads(found.weight, look.call.out.shape[1])
    except ProblemError:  # weights that are quantised
        return None
    return None


def is_causal(weights: Weights) -> bool:
    """Whether the first token does not see the second."""
    first, second = (torch.tensor([position], device=weights.q.device) for position in (0, 1))
    return not bool(weights.keep(first, second).any())


def numbered(layers: list[Layer]) -> list[Layer]:
    """The layers, each with a number of its own: counted in order where two share one (`stages.0.blocks.1`)."""
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


def heads_of(layer: Layer, repeats: Scores | None, others: Sequence[Scores] = ()) -> list[Head]:
    """The query heads of a layer with their scores on the text and on repeats, and how surely they keep their kind.

    Args:
        others: what names them on other texts.
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


def sureness(scores: Scores, elsewhere: Sequence[Scores]) -> NDArray[np.float64] | None:
    """The share of draws on other texts in which each head has the kind that it has here, [heads].

    A score that cannot be drawn anew keeps its value. None where there are no other texts, or nothing names heads.
    """
    if not elsewhere or not scores.drawn:
        return None
    kinds = kinds_of(*_arrays(scores))
    shares = list[NDArray[np.float64]]()
    for other in elsewhere:
        values, chances = _arrays(other)
        drawn = {m: np.where(np.isnan(draws), values[m], draws) for m, draws in other.drawn.items()}
        shares.append(keeping(kinds, drawn, chances))
    return np.mean(shares, axis=0)


def _arrays(scores: Scores) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]]]:
    """The values and the chance values of what names heads, [heads] each."""
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


def _profile(swept: Sweep) -> NDArray[np.float64]:
    """The mean over rows that see a key, without the bins that nothing of this length can reach."""
    rows = (swept.mass > 0)[0, :, :, None]
    bins = (swept.bins[0].double() * rows).sum(1) / rows.sum(1)
    used = max(swept.bins.shape[2], swept.columns.shape[2]).bit_length() + 1
    return bins[:, :used].cpu().numpy()
