"""What heads do on repeated random tokens: induction and duplicates, at fixed and at varying distances.

Between repeats at one distance a head that only counts scores as well as one that finds what followed; between repeats
at varying distances it does not. So both texts are read, and the scores of both are told.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.inspect.measures import best, induction_scan
from regard.inspect.measures.stimulus import Jittered, Repeats, plain_tokens
from regard.inspect.observing.observe import Look, Seen
from regard.inspect.surveying.layer import is_causal
from regard.inspect.surveying.scored import Scores
from regard.inspect.surveying.subject import Subject
from regard.inspect.surveying.wanted import Wanted

MEASURES = ("induction", "duplicate", "induction_jittered", "best_shift")

SEQUENCES = 4
"""Sequences of each kind, over which scores are averaged and intervals drawn."""


class Stimulus(NamedTuple):
    """Random tokens that repeat: int64 [sequences, tokens], at one distance or at several."""

    ids: Tensor
    jittered: bool


def stimuli(subject: Subject, tokenizer: Any) -> list[Stimulus] | None:
    """What the model is to read; None where its vocabulary is too small to draw from."""
    vocabulary, first = plain_tokens(tokenizer, subject.embeddings), tokenizer.bos_token_id
    fixed = Repeats().fitting(len(vocabulary), subject.context)
    jittered = Jittered().fitting(len(vocabulary), subject.context)
    if min(fixed.period, fixed.times, jittered.shortest, jittered.times) < 2:
        return None
    drawn = (made.draw(vocabulary, first, SEQUENCES).to(subject.model.device) for made in (fixed, jittered))
    return [Stimulus(ids, jittered=varies) for ids, varies in zip(drawn, (False, True), strict=True)]


def on_repeats(
    texts: Sequence[Stimulus], asked: Wanted, observed: Callable[[Tensor, Callable[[Look], Any]], list[Seen[Any]]]
) -> list[Scores] | None:
    """The scores of each layer, in the order of the forward pass; None for a model that sees what is to come.

    Args:
        observed: runs the model on tokens, and applies a function to each call of attention.
    """
    layers: list[Scores] = []
    for text in texts:
        seen = observed(text.ids, lambda look, text=text: _scored(look, text, asked))
        if any(layer.value is False for layer in seen):
            return None
        layers = [have.joined(layer.value) for have, layer in zip(layers or [Scores()] * len(seen), seen, strict=True)]
    return layers


def _scored(look: Look, text: Stimulus, asked: Wanted) -> Scores | bool:
    """The scores of a layer; False where its attention is not causal."""
    if not is_causal(look.weights):
        return False
    scan, scores = induction_scan(look.weights, text.ids), Scores()
    if not text.jittered:
        scores.add(asked.among({"induction": scan[1], "duplicate": scan[0]}))
        return scores
    found = best({shift: score for shift, score in scan.items() if shift > 0})
    scores.add(asked.among({"induction_jittered": scan[1], "best_shift": found.score}))
    scores.add_numbers("best_shift_at", found.at)
    return scores
