"""The inputs of measures from a model: those of each attention call, and the texts that measures are defined on.

A measure is defined on the user's text, or on random tokens that repeat. Between repeats at one distance a head that
only counts back scores as well as one that finds what followed; between repeats at varying distances it does not. So
there are measures on both.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
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
from regard.inspect.surveying.sinks import spans
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
        projected: of `projected_modules`, for the measures that need a projection.
        parts: the parts of the model's circuits; None if not known.
        drawn_from: ids of plain tokens, for `Vocabulary`.
        lacking: called with measures that cannot be computed, and the reason.
    """

    model: nn.Module
    measures: tuple[Measure, ...]
    projected: frozenset[str] = frozenset()
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
        if not (needing := self._needing("projection")):
            return None
        where = "a function" if look.module is None else type(self.model.get_submodule(look.module)).__name__
        if (w_o := projection(self.model, look)) is None:
            self.lacking(needing, f"the output projection of {where} is not known")
        elif look.module not in self.projected:
            self.lacking(needing, f"{where} changes the outputs of its heads before the output projection")
            return None
        return w_o


def projection(model: nn.Module, look: Look) -> Tensor | None:
    """The output projection of the module that attended, by head: [heads, v_dim, d_model]; None if not known.

    It is the module's own, or, as in BERT, that of its sibling module `output`.
    """
    found = _projecting(model, look)
    return None if found is None else split_heads(found[1], look.call.out.shape[1])


def _projecting(model: nn.Module, look: Look) -> tuple[nn.Module, Tensor] | None:
    """The module that projects the output of the call, and its weight, [d_model, heads * v_dim]."""
    width = look.call.out.shape[1] * look.call.out.shape[3]
    module = None if look.module is None else model.get_submodule(look.module)
    beside = None if look.module is None else model.get_submodule(look.module.rpartition(".")[0])
    try:
        for owner in (module, getattr(beside, "output", None)):
            if owner is not None and (found := output_projection(owner, width)) is not None:
                return _child_with(found.weight, owner), found.weight
    except ProblemError:  # weights that are quantised
        return None
    return None


def projected_modules(
    model: nn.Module, measures: Iterable[Measure], ids: Tensor, run: Callable[[Tensor], Any]
) -> frozenset[str]:
    """The modules whose output projection takes the outputs of their heads as they are, by their paths.

    Others apply a gate first (Qwen3-Next), a norm (BitNet), or take the difference of two calls (DiffLlama): what a key
    adds to their output is not its weight times its projected value. Found in a pass over a few tokens, which is made
    if some measure needs a projection.
    """
    if not any("projection" in measure.needs for measure in measures):
        return frozenset()
    projected = set[str]()
    with ExitStack() as hooks:

        def watch(look: Look) -> None:
            if look.module is None or (found := _projecting(model, look)) is None:
                return
            path, out = look.module, look.call.out.transpose(1, 2).flatten(2)

            def compare(module: nn.Module, arguments: tuple[Any, ...]) -> None:
                hook.remove()
                if _are_equal(arguments[0], out):
                    projected.add(path)

            hook = found[0].register_forward_pre_hook(compare)
            hooks.callback(hook.remove)

        with observe(model, watch):
            run(ids[:1, :8])
    return frozenset(projected)


def _child_with(weight: Tensor, owner: nn.Module) -> nn.Module:
    """The child that has this weight, which may be transposed."""
    weights = ((child, getattr(child, "weight", None)) for child in owner.children())
    return next(child for child, own in weights if own is not None and own.data_ptr() == weight.data_ptr())


def _are_equal(given: Tensor, out: Tensor) -> bool:
    """Whether tokens [..., width] are these outputs [batch, tokens, width], in their dtype; NaN equals NaN."""
    return given.numel() == out.numel() and torch.allclose(
        given.reshape(out.shape), out.to(given.dtype), rtol=0, atol=0, equal_nan=True
    )


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
    each: Callable[[int, Look], Any],
    layers: Collection[int] | None = None,
    step: Callable[[], None] = lambda: None,
    *,
    run: Callable[[Tensor], Any],
) -> list[Seen[Any]]:
    """`each` of every call over all tokens while the model runs, except attention to an image or an encoder.

    Calls have unique numbers: that of their layer in the model, or, where several share one, the previous number
    plus 1. With two modules in a layer (LongCat), a module that attends twice (DiffLlama) and stages that count from
    0 each, each call gets the next number:

        layers in the model    1  3  5      0  0  1  1  2  2
        numbers                1  3  5      0  1  2  3  4  5

    Args:
        each: called with the number of the call, and the call.
        layers: the numbers of the calls to look at; None for all.
        step: called after each call.

    Raises:
        ProblemError: there is no such call, or none at all.
    """
    attended, seen = list[int](), list[Seen[Any]]()

    def one(look: Look) -> None:
        out, keys = look.call.out, look.call.k.shape[2]
        if (out.shape[0], out.shape[2], keys) != (*ids.shape, ids.shape[1]):
            return
        number = max(look.layer, attended[-1] + 1) if attended else look.layer
        attended.append(number)
        if layers is None or number in layers:
            seen.append(Seen(number, look.module, each(number, look)))
            step()

    with observe(model, one):
        run(ids)
    if not attended:
        raise not_observed(model)
    if missing := sorted(set(layers or ()) - set(attended)):
        raise ProblemError(f"layers has {spans(missing)}, which did not attend: only {spans(attended)} did.")
    return seen


def not_observed(model: object) -> ProblemError:
    """The error for a model without any observed attention call."""
    return ProblemError(
        f"{type(model).__name__} computes its attention by itself instead of through transformers' "
        "attention interface, so it cannot be observed: survey a model that supports `set_attn_implementation`."
    )
