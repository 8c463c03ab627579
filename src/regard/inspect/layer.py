"""What a survey keeps of a layer: the scores of its heads, their pictures, and what its plan says."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from regard.inspect.measures import Breadth, Entropies, Score, previous_token, sink
from regard.inspect.observe import Look
from regard.inspect.report import Head, Picture
from regard.inspect.weights import Pooled

PICTURE = 192
"""Cells per side of a picture: one per token up to here, means of several above."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What is kept of a layer: scores [1, heads], pictures, and what its plan says."""

    layer: int
    breadth: Breadth
    sink: Score
    previous: Score
    pictures: NDArray[np.uint8]  # [heads, side, side]
    pooled: int
    causal: bool
    heads: int
    kv_heads: int
    head_dim: int
    backend: str
    pairs: int
    flops: int


def measured_layer(look: Look) -> Layer:
    """Everything about a layer in one sweep over its tiles, and O(n) pairs."""
    weights, plan = look.weights, look.call.plan
    entropies, pooled = Entropies(weights), Pooled(weights, PICTURE)
    for tile in weights.tiles():
        entropies.add(tile)
        pooled.add(tile)
    first, second = (torch.tensor([position], device=weights.q.device) for position in (0, 1))
    return Layer(
        layer=look.layer,
        breadth=entropies.breadth(),
        sink=sink(weights),
        previous=previous_token(weights),
        pictures=(pooled.mean()[0].sqrt() * 255).round().to(torch.uint8).cpu().numpy(),
        pooled=pooled.cell,
        causal=not bool(weights.keep(first, second).any()),
        heads=weights.shape[1],
        kv_heads=weights.k.shape[1],
        head_dim=weights.q.shape[3],
        backend=plan.backend,
        pairs=plan.schedule.pairs,
        flops=plan.flops,
    )


def numbered(layers: list[Layer]) -> list[Layer]:
    """The layers, each with a number of its own: counted in order where two share one (`stages.0.blocks.1`)."""
    if len({layer.layer for layer in layers}) == len(layers):
        return layers
    return [replace(layer, layer=number) for number, layer in enumerate(layers)]


def pictures_of(layers: list[Layer]) -> Iterator[Picture]:
    """A picture of every head, layer by layer."""
    for layer in layers:
        for head, cells in enumerate(layer.pictures):
            yield Picture(layer.layer, head, len(cells), layer.pooled, cells)


def heads_of(layers: list[Layer], inductions: list[Score] | None) -> Iterator[Head]:
    """Every query head with its scores, layer by layer; those of induction are means over sequences."""
    for number, layer in enumerate(layers):
        repeats = None if inductions is None else inductions[number]
        for head in range(layer.heads):
            yield Head(
                layer=layer.layer,
                head=head,
                kv_head=head // (layer.heads // layer.kv_heads),
                entropy=float(layer.breadth.entropy.value[0, head]),
                effective_tokens=float(layer.breadth.effective_tokens.value[0, head]),
                sink=float(layer.sink.value[0, head]),
                previous=float(layer.previous.value[0, head]),
                induction=None if repeats is None else float(repeats.value[:, head].mean()),
                entropy_chance=float(layer.breadth.entropy.chance[0, head]),
                sink_chance=float(layer.sink.chance[0, head]),
                previous_chance=float(layer.previous.chance[0, head]),
                induction_chance=None if repeats is None else float(repeats.chance[:, head].mean()),
            )
