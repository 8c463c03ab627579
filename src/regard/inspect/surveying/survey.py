"""A survey of a model: run it on a text, check it, and measure every head of every layer.

    tokens -> prompt (timed) -> continuation (timed) -> comparison with eager -> observed: repeats, text, others

All of it with regard's attention; the model is left as it was found. What is kept of a layer is its scores and its
pictures: one layer's weights exist at a time, a tile of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.measures.circuits import Parts, parts_of
from regard.inspect.observing.observe import Look, Seen, observe
from regard.inspect.surveying.ablation import ablations
from regard.inspect.surveying.clock import Clock, Progress
from regard.inspect.surveying.closest import Closest
from regard.inspect.surveying.copied import MEASURES as COPYING
from regard.inspect.surveying.copied import copied
from regard.inspect.surveying.kinds import ranked
from regard.inspect.surveying.layer import PICTURE, Layer, Measuring, heads_of, numbered, pictures_of, profiles_of
from regard.inspect.surveying.machine import machine, versions
from regard.inspect.surveying.others import on_other_texts, others_of
from regard.inspect.surveying.reading import Prompt, eager_difference, prompt_of, written
from regard.inspect.surveying.repeated import MEASURES as ON_REPEATS
from regard.inspect.surveying.repeated import on_repeats, stimuli
from regard.inspect.surveying.report import Ablations, Head, Report, RunInfo
from regard.inspect.surveying.scored import Scores
from regard.inspect.surveying.spelling import readable
from regard.inspect.surveying.subject import Subject, prepared, subject_of
from regard.inspect.surveying.wanted import Wanted, wanted

EAGER_TOKENS = 1024
"""Tokens of the prompt that are compared with eager attention, which builds [heads, n, n] several times over."""


def survey(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    measures: Sequence[str] | str | None = None,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    tokens: int | None = None,
    new_tokens: int = 24,
    compare_eager: bool = True,
    ablate: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a model of transformers on a text with regard's attention, and report what its heads do.

    Args:
        model: any model whose attention goes through transformers' interface. One that generates is run as it is; one
            that does not (BERT) is measured without a continuation, and without induction unless its attention is
            causal; of an encoder-decoder the encoder is measured.
        text: the prompt.
        measures: keys of `DEFINITIONS`; None for all. What names a head is measured too, as far as it costs no sweep;
            where nothing asked for takes a sweep none is made, and there are no pictures.
        layers: numbers from 0, or one; None for all.
        heads: (layer, head), to be kept to the last weight (`Report.close_ups`).
        tokens: read so many of the text at most; None for all of it.
        new_tokens: tokens to continue by, greedily; fewer where the model ends the text before. With 0 the text is read
            once, and no speed is told.
        compare_eager: also run transformers' own eager attention, on at most the first 1,024 tokens, and report the
            largest absolute difference of the outputs (logits, or hidden states of a model without).
        ablate: "zero" or "mean": also take out each head by itself, and say what that does to the loss on the prompt.
        progress: called with (stage, done, total).

    Raises:
        ProblemError: what `check` finds, before anything is computed; a measure asked for by its name that this model
            cannot be put to; or the model computes its attention by itself, where it cannot be seen.
    """
    asked = wanted(measures, layers, heads, ablate)
    with torch.no_grad(), prepared(model) as subject:
        asked.check(subject)
        prompt = prompt_of(subject, tokenizer, text, tokens, new_tokens)
        clock, notes = Clock(progress, subject.model.device), [*prompt.notes, *asked.notes(subject)]
        parts = _parts(subject, asked, notes)
        new = written(subject, prompt.ids, new_tokens, clock)
        difference = eager_difference(subject, prompt.ids[:, :EAGER_TOKENS], clock) if compare_eager else None
        ids = torch.cat([prompt.ids, new], dim=1)
        repeats = _repeats(subject, tokenizer, asked, notes, clock)
        with clock.stage("copying", 1):
            copies = {} if parts is None else copied(parts, subject, tokenizer, asked)
        measuring = Measuring(ids, asked, subject.body, copies, notes)
        passed, closes = _passed(subject, measuring, repeats, clock)
        others = _others(subject, tokenizer, asked, ids.shape[1], clock)
        found = [
            head
            for number, layer in enumerate(passed)
            for head in heads_of(layer, _of(repeats, number), others[number] if others else ())
        ]
        ablated, found = _ablated(subject, prompt.ids, found, ablate, clock)
    found = ranked(found)
    return Report(
        run=_run(model, passed, replace(prompt, notes=tuple(dict.fromkeys(notes))), new.shape[1], difference, clock),
        text=prompt.text,
        tokens=readable(tokenizer, ids[0].tolist()),
        prompt_tokens=prompt.tokens,
        continuation=tokenizer.decode(new[0].tolist()),
        heads=found,
        pictures=tuple(pictures_of(passed)),
        close_ups=closes.of(found),
        profiles=profiles_of(passed),
        ablations=ablated,
    )


def check(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    measures: Sequence[str] | str | None = None,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    tokens: int | None = None,
    new_tokens: int = 24,
    ablate: str | None = None,
) -> None:
    """Whether `survey` can do this, in milliseconds; the arguments are its own. Before the first of several surveys.

    Raises:
        ProblemError: the text is empty, a single token, or too long for a model that has learned its positions; a
            measure, layer or head that there is not; a model or an argument of another kind.
    """
    asked, subject = wanted(measures, layers, heads, ablate), subject_of(model)
    asked.check(subject)
    prompt_of(subject, tokenizer, text, tokens, new_tokens)
    _parts(subject, asked, [])


def _parts(subject: Subject, asked: Wanted, notes: list[str]) -> Parts | None:
    """Where the weights are that copying is measured on; None, and a note, where that is not known."""
    if not any(asked.has(measure) for measure in COPYING):
        return None
    try:
        return parts_of(subject.model)
    except ProblemError as error:
        notes.append(asked.lacking(COPYING, f"circuits cannot be taken out: {str(error).rstrip('.')}"))
        return None


def _repeats(subject: Subject, tokenizer: Any, asked: Wanted, notes: list[str], clock: Clock) -> list[Scores] | None:
    """What the heads of each layer score on repeated random tokens; None, and a note, where there is no such thing."""
    texts, found = stimuli(subject, tokenizer), None
    if texts is None:
        notes.append(asked.lacking(ON_REPEATS, "the vocabulary or the context is too small for random tokens"))
        return None
    with clock.stage("induction", subject.layers * len(texts)) as step:
        found = on_repeats(texts, asked, lambda ids, each: _observed(subject, ids, asked, each, step))
    if found is None:
        notes.append(asked.lacking(ON_REPEATS, "attention sees what is to come, so that nothing has to be looked up"))
    return found


def _others(subject: Subject, tokenizer: Any, asked: Wanted, tokens: int, clock: Clock) -> list[list[Scores]]:
    """What names the heads of each layer on each of some other texts; of all of them in one pass."""
    with clock.stage("other texts", subject.layers) as step:
        ids = others_of(tokenizer, tokens)
        if ids is None:
            return []
        ids = ids.to(subject.model.device)
        seen = _observed(subject, ids, asked, lambda look: on_other_texts(look, asked), step)
    return [layer.value for layer in seen]


def _of(repeats: list[Scores] | None, number: int) -> Scores | None:
    return None if repeats is None else repeats[number]


def _passed(
    subject: Subject, measuring: Measuring, repeats: list[Scores] | None, clock: Clock
) -> tuple[list[Layer], Closest]:
    """Every layer of self-attention over the text, in the order of the forward pass."""
    asked, ids = measuring.wanted, measuring.tokens
    closes, layers = Closest(asked.heads, others=ids.shape[1] > PICTURE and asked.sweep), list[Layer]()

    def each(look: Look) -> bool:
        layer = measuring.layer(look)
        closes.offer(look.weights, heads_of(layer, _of(repeats, len(layers))))
        layers.append(layer)
        return True

    with clock.stage("layers", len(asked.layers or range(subject.layers))) as step:
        _observed(subject, ids, asked, each, step)
    if not layers:
        raise ProblemError(
            f"{type(subject.model).__name__} computes its attention by itself instead of through transformers' "
            "attention interface, so it cannot be observed: survey a model that supports `set_attn_implementation`."
        )
    asked.check_found({layer.layer: layer.heads for layer in layers})
    return numbered(layers), closes


def _observed(
    subject: Subject, ids: Tensor, asked: Wanted, each: Callable[[Look], Any], step: Callable[[], None]
) -> list[Seen[Any]]:
    """`each` of every call over all of the tokens: attention to another sequence (an image, an encoder) is left out."""

    def self_attention(look: Look) -> Any:
        if not asked.layer(look.layer):
            return None
        batch, _, queries, keys = look.weights.shape
        if (batch, queries, keys) != (*ids.shape, ids.shape[1]):
            return None
        found = each(look)
        step()
        return found

    with observe(subject.body, self_attention) as seen:
        subject.body(input_ids=ids)
    return [s for s in seen if s.value is not None]


def _ablated(
    subject: Subject, ids: Tensor, heads: list[Head], how: str | None, clock: Clock
) -> tuple[Ablations | None, list[Head]]:
    """The heads with what their absence costs among their scores, if that was asked for."""
    if how is None:
        return None, heads
    places = [(head.layer, head.head) for head in heads]
    with clock.stage("ablation", len(places)) as step:
        made, scores = ablations(subject.model, ids, places, how, step)
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
        machine=machine(model.device),
        versions=versions(),
        seconds=seconds,
        notes=prompt.notes,
    )
