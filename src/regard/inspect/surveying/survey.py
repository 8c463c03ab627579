"""A survey of a model: run it on a text, check it, and measure every head of every layer.

    tokens -> prompt (timed) -> continuation (timed) -> comparison with eager -> measured: repeats, text, other texts

All of it with regard's attention; the model is restored afterwards. What is kept of a layer is its scores and its
pictures: one layer's weights exist at a time, a tile of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site
from regard.inspect.measures.circuits import Parts, parts_of
from regard.inspect.measures.measure import Measure, Text
from regard.inspect.measures.stimulus import plain_tokens
from regard.inspect.observing.observe import Look, Seen
from regard.inspect.surveying.ablation import ablations
from regard.inspect.surveying.closeup import CloseUpCollector
from regard.inspect.surveying.inputs import (
    InputReader,
    is_causal,
    no_circuits,
    projected_modules,
    repeated_tokens,
    self_attention,
)
from regard.inspect.surveying.kinds import DEFINITIONS, Head, ranked
from regard.inspect.surveying.layer import (
    PICTURE,
    Layer,
    LayerScores,
    heads_of,
    layer_of,
    pictures_of,
    profiles_of,
)
from regard.inspect.surveying.model import SurveyedModel, prepared, surveyed_model
from regard.inspect.surveying.other_texts import on_other_texts, other_texts
from regard.inspect.surveying.prompt import Prompt, continuation, eager_difference, prompt_of, readable
from regard.inspect.surveying.report import Ablations, Report, RunInfo
from regard.inspect.surveying.run import Clock, Progress, machine, versions
from regard.inspect.surveying.selection import Selection, select

EAGER_TOKENS = 1024
"""Tokens of the prompt that are compared with eager attention, which builds several tensors [heads, n, n]."""


def survey(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    measures: Sequence[str | Measure] | str | Measure | None = None,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[str | tuple[int, int]] | str | None = None,
    tokens: int | None = None,
    new_tokens: int = 24,
    compare_eager: bool = True,
    ablate: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a model of transformers on a text with regard's attention, and report the scores of its heads.

    Args:
        model: any model whose attention goes through transformers' interface. One that generates is run as it is; one
            that does not (BERT) is measured without a continuation, and without induction unless its attention is
            causal; of an encoder-decoder the encoder is measured.
        text: the prompt.
        measures: keys of `MEASURES`, and `Measure` values of your own; None for all. The measures that name heads are
            computed too, unless they need a sweep that nothing else needs. Without a sweep there are no pictures.
        layers: numbers from 0, or one; None for all. Where several calls of attention share the number of a layer in
            the model, each call gets the next number.
        heads: names such as "18.6", or pairs (layer, head): `Report.close_ups` has every weight of these, and a
            note says where it cannot.
        tokens: the most tokens of the text to read; None for all of it.
        new_tokens: tokens to continue by, greedily; fewer where the model ends the text before. With 0 the text is read
            once, and no speed is reported.
        compare_eager: also run transformers' own eager attention, on at most the first 1,024 tokens, and report the
            largest absolute difference of the outputs (logits, or hidden states of a model without).
        ablate: "zero" or "mean": also ablate each head by itself, and report the change of the loss on the prompt.
        progress: called with (stage, done, total).

    Raises:
        ProblemError: what `check` finds, before anything is computed; a measure asked for by its name that this model
            cannot be put to; a layer that does not attend; or the model computes its attention by itself, where it
            cannot be seen.
    """
    selection = select(measures, layers, heads, ablate)
    with torch.no_grad(), prepared(model) as surveyed:
        selection.check(surveyed)
        prompt = prompt_of(surveyed, tokenizer, text, tokens, new_tokens)
        clock, notes = Clock(progress, surveyed.model.device), [*prompt.notes, *selection.notes(surveyed)]
        parts = _parts(surveyed, selection, notes)
        new = continuation(surveyed, prompt.ids, new_tokens, clock)
        difference = eager_difference(surveyed, prompt.ids[:, :EAGER_TOKENS], clock) if compare_eager else None
        ids = torch.cat([prompt.ids, new], dim=1)
        projected = projected_modules(surveyed.model, selection.measures, ids, surveyed.run)
        repeats = _repeats(surveyed, tokenizer, selection, projected, notes, clock)
        reader = _reader(surveyed, tokenizer, selection, projected, parts, notes)
        layers_read, close_ups = _read_layers(surveyed, selection, reader, ids, repeats, clock)
        notes += close_ups.notes
        others = _on_other_texts(surveyed, tokenizer, selection, ids.shape[1], clock)
        found = [
            head
            for number, layer in enumerate(layers_read)
            for head in heads_of(layer, _of(repeats, number), others[number] if others else ())
        ]
        sites = {layer.layer: layer.site for layer in layers_read}
        ablated, found = _ablate(surveyed, prompt.ids, found, sites, ablate, clock)
    found, prompt = ranked(found), replace(prompt, notes=tuple(dict.fromkeys(notes)))
    own = {m.key: m.definition for m in selection.measures if m.key not in DEFINITIONS}
    return Report(
        run=_run(model, layers_read, prompt, new.shape[1], difference, clock),
        text=prompt.text,
        tokens=readable(tokenizer, ids[0].tolist()),
        prompt_tokens=prompt.tokens,
        continuation=tokenizer.decode(new[0].tolist()),
        heads=found,
        pictures=tuple(pictures_of(layers_read)),
        close_ups=close_ups.of(found),
        missing_close_ups=close_ups.missing,
        profiles=profiles_of(layers_read),
        ablations=ablated,
        definitions=DEFINITIONS | own,
    )


def check(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    measures: Sequence[str | Measure] | str | Measure | None = None,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[str | tuple[int, int]] | str | None = None,
    tokens: int | None = None,
    new_tokens: int = 24,
    ablate: str | None = None,
) -> None:
    """Check the arguments of `survey` in milliseconds, before the first of several surveys.

    Raises:
        ProblemError: the text is empty, a single token, or too long for a model with a table of positions; a measure,
            layer or head that there is not; a model or an argument of another kind.
    """
    selection, surveyed = select(measures, layers, heads, ablate), surveyed_model(model)
    selection.check(surveyed)
    prompt_of(surveyed, tokenizer, text, tokens, new_tokens)
    _parts(surveyed, selection, [])


def _parts(surveyed: SurveyedModel, selection: Selection, notes: list[str]) -> Parts | None:
    """The weights for the copying measures; None, and a note, for a model whose parts are not known."""
    needing = [measure for measure in selection.measures if "circuit" in measure.needs]
    try:
        return parts_of(surveyed.model) if needing else None
    except ProblemError as error:
        notes.append(selection.lacking(needing, no_circuits(error)))
        return None


def _reader(
    surveyed: SurveyedModel,
    tokenizer: Any,
    selection: Selection,
    projected: frozenset[str],
    parts: Parts | None,
    notes: list[str],
) -> InputReader:
    """The reader of the measures' inputs on the text; it adds a note on each measure whose inputs it cannot read."""
    return InputReader(
        surveyed.model,
        selection.on("text"),
        projected,
        parts,
        plain_tokens(tokenizer, surveyed.embeddings),
        lambda measures, reason: notes.append(selection.lacking(measures, reason)),
    )


def _repeats(
    surveyed: SurveyedModel,
    tokenizer: Any,
    selection: Selection,
    projected: frozenset[str],
    notes: list[str],
    clock: Clock,
) -> list[LayerScores] | None:
    """The scores of the heads of each layer on repeated random tokens; None, and a note, if there are none."""
    vocabulary = plain_tokens(tokenizer, surveyed.embeddings)
    texts, found = repeated_tokens(vocabulary, tokenizer.bos_token_id, surveyed.context), None
    measures = [measure for measure in selection.measures if measure.on != "text"]
    if texts is None:
        notes.append(selection.lacking(measures, "the vocabulary or the context is too small for random tokens"))
        return None
    with clock.stage("induction", surveyed.layers * len(texts)) as step:
        found = _on_repeats(surveyed, selection, projected, texts, step)
    if found is None:
        notes.append(selection.lacking(measures, "attention sees later tokens, so that no token has to be looked up"))
    return found


def _on_repeats(
    surveyed: SurveyedModel,
    selection: Selection,
    projected: frozenset[str],
    texts: Mapping[Text, Tensor],
    step: Callable[[], None],
) -> list[LayerScores] | None:
    """The scores of each layer, in the order of the forward pass; None for a model that sees later tokens."""
    layers: list[LayerScores] = []
    for text, drawn in texts.items():
        ids, reader = drawn.to(surveyed.model.device), InputReader(surveyed.model, selection.on(text), projected)

        def each(number: int, look: Look, reader: InputReader = reader, ids: Tensor = ids) -> LayerScores | bool:
            return _scores(reader, look, ids)

        seen = _observe(surveyed, ids, selection, each, step)
        if any(layer.value is False for layer in seen):
            return None
        before = layers or [LayerScores()] * len(seen)
        layers = [have.joined(layer.value) for have, layer in zip(before, seen, strict=True)]
    return layers


def _scores(reader: InputReader, look: Look, ids: Tensor) -> LayerScores | bool:
    """The scores of a layer; False where its attention is not causal."""
    if not is_causal(look.weights):
        return False
    scores, inputs = LayerScores(), reader.inputs(look, ids)
    for measure in reader.measures:
        scores.add(measure, measure.compute(inputs))
    return scores


def _on_other_texts(
    surveyed: SurveyedModel, tokenizer: Any, selection: Selection, tokens: int, clock: Clock
) -> list[list[LayerScores]]:
    """The scores that name the heads of each layer on each of some other texts; all texts in one pass."""
    with clock.stage("other texts", surveyed.layers) as step:
        ids = other_texts(tokenizer, tokens)
        if ids is None:
            return []
        ids = ids.to(surveyed.model.device)
        seen = _observe(surveyed, ids, selection, lambda _, look: on_other_texts(look, sweep=selection.sweep), step)
    return [layer.value for layer in seen]


def _of(repeats: list[LayerScores] | None, number: int) -> LayerScores | None:
    return None if repeats is None else repeats[number]


def _read_layers(
    surveyed: SurveyedModel,
    selection: Selection,
    reader: InputReader,
    ids: Tensor,
    repeats: list[LayerScores] | None,
    clock: Clock,
) -> tuple[list[Layer], CloseUpCollector]:
    """Every layer of self-attention over the text, in the order of the forward pass, and the close-ups of heads."""
    close_ups, layers = (
        CloseUpCollector(selection.heads, others=ids.shape[1] > PICTURE and selection.sweep),
        list[Layer](),
    )

    def each(number: int, look: Look) -> None:
        inputs = reader.inputs(look, ids, PICTURE)
        layer = layer_of(number, look, inputs, reader.possible(inputs))
        close_ups.offer(look.weights, heads_of(layer, _of(repeats, len(layers))))
        layers.append(layer)

    with clock.stage("layers", len(selection.layers or range(surveyed.layers))) as step:
        _observe(surveyed, ids, selection, each, step)
    selection.check_found({layer.layer: layer.heads for layer in layers})
    return layers, close_ups


def _observe(
    surveyed: SurveyedModel,
    ids: Tensor,
    selection: Selection,
    each: Callable[[int, Look], Any],
    step: Callable[[], None],
) -> list[Seen[Any]]:
    """`each` of every call of self-attention in the selected layers while the model runs."""
    return self_attention(surveyed.model, ids, each, selection.layers, step, run=surveyed.run)


def _ablate(
    surveyed: SurveyedModel,
    ids: Tensor,
    heads: list[Head],
    sites: Mapping[int, Site],
    how: str | None,
    clock: Clock,
) -> tuple[Ablations | None, list[Head]]:
    """The heads with `delta_loss` among their scores, if ablations were selected.

    Args:
        sites: where the layers of the report are in the model, by their numbers.
    """
    if how is None:
        return None, heads
    places = {(head.layer, head.head): sites[head.layer] for head in heads}
    with clock.stage("ablation", len(places)) as step:
        made, scores = ablations(surveyed.model, ids, places, how, step)
    return made, [replace(h, scores={**h.scores, "delta_loss": scores[h.layer, h.head]}) for h in heads]


def _run(
    model: Any, layers: list[Layer], prompt: Prompt, new_tokens: int, difference: float | None, clock: Clock
) -> RunInfo:
    seconds = clock.seconds
    return RunInfo(
        model=model.config.name_or_path or type(model).__name__,
        layers=len(layers),
        heads=max(layer.heads for layer in layers),
        kv_heads=max(layer.kv_heads for layer in layers),
        head_dim=max(layer.head_dim for layer in layers),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        backends=tuple(layer.backend for layer in layers),
        tokens_per_second=prompt.tokens / seconds["prompt"] if "prompt" in seconds else None,
        decode_tokens_per_second=(new_tokens - 1) / seconds["continuation"] if new_tokens > 1 else None,
        attention_gflop=sum(layer.flops for layer in layers) / 1e9,
        pairs=sum(layer.pairs for layer in layers),
        eager_difference=difference,
        eager_output=surveyed_model(model).output_name,
        machine=machine(model.device),
        versions=versions(),
        seconds=seconds,
        notes=prompt.notes,
    )
