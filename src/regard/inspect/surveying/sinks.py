"""Sinks of a whole model: the share of its heads that put more than a threshold of mass on the first token.

By both published thresholds: 0.3 of Gu et al. 2024, arXiv:2410.10781, §3, and 0.8 of Barbero et al. 2025,
arXiv:2504.02732. Like every judgement of a report they can be recomputed from the scores beside them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from regard.inspect.brief import brief
from regard.inspect.measures.sink import THRESHOLDS
from regard.inspect.surveying.kinds import Head

MOST = 0.5
"""The least share of a layer's heads with a sink for the layer to count as having mostly sinks."""


@brief
@dataclass(frozen=True)
class SinkShare:
    """The share of heads with a sink at the first token: those whose score `alpha` exceeds the threshold.

    Args:
        threshold: the mass, 0.3 or 0.8.
        share: the share of all measured heads.
        low, high: the share with every score at that end of its 95 % interval; None if a head has none.
        layers: the share of heads of each layer, by its number.
        value: the mean score `sink_value` of the heads with a sink: the norm of the first token's values relative to
            the mean token. None without such a head, or if it was not measured.
    """

    threshold: float
    share: float
    low: float | None
    high: float | None
    layers: Mapping[int, float]
    value: float | None

    @property
    def most(self) -> tuple[int, ...]:
        """The layers in which half of the heads or more have a sink."""
        return tuple(layer for layer, share in self.layers.items() if share >= MOST)


def sink_shares(heads: Iterable[Head]) -> tuple[SinkShare, ...]:
    """One for each published threshold; none where `alpha` was not measured.

    >>> from regard.inspect.surveying.kinds import Estimate
    >>> heads = [Head(0, 0, 0, {"alpha": Estimate(0.2)}), Head(0, 1, 0, {"alpha": Estimate(0.9)})]
    >>> [(of.threshold, of.share, of.most) for of in sink_shares(heads)]
    [(0.3, 0.5, (0,)), (0.8, 0.5, (0,))]
    """
    measured = sorted((h for h in heads if h.value("alpha") is not None), key=lambda h: (h.layer, h.head))
    return tuple(_share(measured, threshold) for threshold in THRESHOLDS) if measured else ()


def spans(layers: Iterable[int]) -> str:
    """Ascending integers as text, ranges joined.

    >>> spans((3, 4, 5, 9, 12, 13))
    '3-5, 9, 12-13'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _share(heads: list[Head], threshold: float) -> SinkShare:
    of_layers: dict[int, list[bool]] = {}
    for head in heads:
        of_layers.setdefault(head.layer, []).append(_above(head, threshold))
    norms = [h.value("sink_value") for h in heads if _above(h, threshold)]
    known = [norm for norm in norms if norm is not None]
    return SinkShare(
        threshold,
        fmean(_above(head, threshold) for head in heads),
        _at_end([head.score("alpha").low for head in heads], threshold),
        _at_end([head.score("alpha").high for head in heads], threshold),
        {layer: fmean(above) for layer, above in of_layers.items()},
        fmean(known) if known else None,
    )


def _above(head: Head, threshold: float) -> bool:
    return (head.value("alpha") or 0.0) > threshold


def _at_end(ends: list[float | None], threshold: float) -> float | None:
    known = [end for end in ends if end is not None]
    return fmean(end > threshold for end in known) if len(known) == len(ends) else None
