"""The inputs of measures from a model: those of each attention call, and the texts that measures are defined on.

A measure is defined on the user's text, or on random tokens that repeat. Between repeats at one distance a head that
only counts back scores as well as one that finds what followed; between repeats at varying distances it does not. So
there are measures on both.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.measures.circuits import Parts, circuit_at, vocabulary_of
from regard.inspect.measures.copying import Vocabulary
from regard.inspect.measures.means import looks_ahead
from regard.inspect.measures.measure import Inputs, Measure, Need, Text
from regard.inspect.measures.rare import rarity
from regard.inspect.measures.stimulus import Jittered, Repeats
from regard.inspect.measures.values import output_norms, split_heads
from regard.inspect.observing.observe import Look, Seen, observe
from regard.inspect.weights.lazy import Weights
from regard.integrate.projections import output_projection

SEQUENCES = 4
"""Sequences of random tokens of each kind, over which scores are averaged and intervals computed."""

REPEATED: tuple[Text, ...] = ("repeats", "jittered repeats")


def no_circuits(reason: ProblemError) -> str:
    """Why copying is not measured."""
    return f"circuits cannot be extracted: {str(reason).rstrip('.')}"


@dataclass(frozen=True, eq=False)
class InputReader:
    """Makes the `Inputs` of some measures from each call of a model.

    Args:
        model: what runs, and whose modules attend.
        measures: the measures to compute; only their inputs are read.
        parts: the parts of the model's circuits; None if not known.
        drawn_from: ids of plain tokens, for `Vocabulary`.
        lacking: called with measures that cannot be computed, and the reason.
    """

    model: nn.Module
    measures: tuple[Measure, ...]
    parts: Parts | None = None
    drawn_from: Sequence[int] | None = None
    lacking: Callable[[list[Measure], str], None] = lambda measures, reason: None

    def inputs(self, look: Look, tokens: Tensor, picture: int | None = None) -> Inputs:
        """The inputs of the measures for a call over these tokens, integer [batch, tokens]."""
        w_o, v = self._projection(look), look.call.v
        circuit = None
        if self._needing("circuit") and self.parts is not None and look.layer < len(self.parts.layers):
            circuit = circuit_at(self.parts, look.layer)
        return Inputs(
            look.weights,
            tokens=tokens,
            rarity=rarity(tokens) if self._needing("tokens", "sweep") else None,
            norms=output_norms(v, w_o) if w_o is not None and self._needing("projection", "sweep") else None,
            v=v if self._needing("values") or w_o is not None else None,
            out=None if w_o is None else look.call.out,
            w_o=w_o,
            circuit=circuit,
            vocabulary=None if circuit is None else self._vocabulary,
            picture=picture,
        )

    def possible(self, inputs: Inputs) -> tuple[Measure, ...]:
        """The measures that can be computed from these inputs."""
        missing = set[Need]()
        if inputs.w_o is None:
            missing.add("projection")
        if inputs.circuit is None:
            missing.add("circuit")
        if self._needing("causal") and looks_ahead(inputs.weights):
            missing.add("causal")
        return tuple(measure for measure in self.measures if not measure.needs & missing)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        assert self.parts is not None
        found = vocabulary_of(self.parts)
        drawn_from = None if self.drawn_from is None else list(self.drawn_from)
        return Vocabulary(found.embedding, found.unembedding, drawn_from)

    def _needing(self, *needs: Need) -> list[Measure]:
        return [measure for measure in self.measures if measure.needs >= set(needs)]

    def _projection(self, look: Look) -> Tensor | None:
        """The output projection of the layer, if a measure needs it."""
        needing = self._needing("projection")
        w_o = projection(self.model, look) if needing else None
        if needing and w_o is None:
            where = "a function" if look.module is None else type(self.model.get_submodule(look.module)).__name__
            self.lacking(needing, f"the output projection of {where} is not known")
        return w_o


def projection(model: nn.Module, look: Look) -> Tensor | None:
    """The output projection of the module that attended, by head: [heads, v_dim, d_model]; None if not known.

    It is the module's own, or, as in BERT, that of its sibling module `output`.
    """
    width = look.call.out.shape[1] * look.call.out.shape[3]
    module = None if look.module is None else model.get_submodule(look.module)
    beside = None if look.module is None else model.get_submodule(look.module.rpartition(".")[0])
    try:
        for owner in (module, getattr(beside, "output", None)):
            if owner is not None and (found := output_projection(owner, width)) is not None:
                return split_heads(found.weight, look.call.out.shape[1])
    except ProblemError:  # weights that are quantised
        return None
    return None


def is_causal(weights: Weights) -> bool:
    """Whether the first token does not see the second."""
    first, second = (torch.tensor([position], device=weights.q.device) for position in (0, 1))
    return not bool(weights.keep(first, second).any())


def repeated_tokens(vocabulary: list[int], first: int | None, context: int | None) -> dict[Text, Tensor] | None:
    """Repeated random tokens of each kind, int64 [sequences, tokens]; None if the vocabulary or context is too small.

    Args:
        vocabulary: the ids to draw from.
        first: the beginning-of-sequence token; None for none.
        context: the positions that the model was trained on; None for no limit.
    """
    fixed = Repeats().fitting(len(vocabulary), context)
    jittered = Jittered().fitting(len(vocabulary), context)
    if min(fixed.period, fixed.times, jittered.shortest, jittered.times) < 2:
        return None
    made = (fixed, jittered)
    return {text: one.draw(vocabulary, first, SEQUENCES) for text, one in zip(REPEATED, made, strict=True)}


def self_attention(
    model: nn.Module,
    ids: Tensor,
    each: Callable[[Look], Any],
    layers: Collection[int] | None = None,
    step: Callable[[], None] = lambda: None,
    *,
    run: Callable[[Tensor], Any],
) -> list[Seen[Any]]:
    """`each` of every call over all tokens while the model runs, except attention to an image or an encoder.

    Args:
        layers: None for all.
        step: called after each call.
    """

    def one(look: Look) -> Any:
        if layers is not None and look.layer not in layers:
            return None
        batch, _, queries, keys = look.weights.shape
        if (batch, queries, keys) != (*ids.shape, ids.shape[1]):
            return None
        found = each(look)
        step()
        return found

    with observe(model, one) as seen:
        run(ids)
    return [s for s in seen if s.value is not None]


def not_observed(model: object) -> ProblemError:
    """The error for a model without any observed attention call."""
    return ProblemError(
        f"{type(model).__name__} computes its attention by itself instead of through transformers' "
        "attention interface, so it cannot be observed: survey a model that supports `set_attn_implementation`."
    )
