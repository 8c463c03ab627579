"""A survey of a model: run it on a text, check it, and measure every head of every layer.

    tokens -> prompt (timed) -> continuation (timed) -> comparison with eager -> the text, observed -> repeats, observed

All of it with regard's attention; the model is left as it was found. What is kept of a layer is its scores and its
pictures: one layer's weights exist at a time, a tile of them.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.layer import Layer, heads_of, measured_layer, numbered, pictures_of
from regard.inspect.machine import machine, versions
from regard.inspect.measures import Score, induction
from regard.inspect.observe import Look, Seen, observe
from regard.inspect.report import Report, Run, ranked
from regard.inspect.spelling import readable
from regard.inspect.stimulus import Repeats, plain_tokens
from regard.inspect.subject import Subject, prepared, settle

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) as a survey goes on."""

SEQUENCES = 4
"""Repeated random sequences over which induction is averaged."""

EAGER_TOKENS = 1024
"""Tokens of the prompt that are compared with eager attention, which builds [heads, n, n] several times over."""


def survey(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    new_tokens: int = 24,
    compare_eager: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Run a model of transformers on a text with regard's attention, and report what its heads do.

    Args:
        model: any model whose attention goes through transformers' interface. One that generates is run as it is; one
            that does not (BERT) is measured without a continuation, and without induction unless its attention is
            causal; of an encoder-decoder the encoder is measured.
        text: the prompt.
        new_tokens: tokens to continue by, greedily; fewer where the model ends the text before.
        compare_eager: also run transformers' own eager attention, on at most the first 1,024 tokens, and report the
            largest absolute difference of the outputs (logits, or hidden states of a model without).
        progress: called with (stage, done, total).

    Raises:
        ProblemError: the text is empty, a single token, or too long for the model; or the model computes its attention
            by itself, where it cannot be seen.
    """
    with torch.no_grad(), prepared(model) as subject:
        clock = _Clock(progress, subject)
        prompt = _prompt(subject, tokenizer, text, new_tokens)
        written = _written(subject, prompt, new_tokens, clock)
        difference = _eager_difference(subject, prompt[:, :EAGER_TOKENS], clock) if compare_eager else None
        ids = torch.cat([prompt, written], dim=1)
        layers = _layers(subject, ids, clock)
        inductions = _inductions(subject, tokenizer, clock) if all(layer.causal for layer in layers) else None
        run = _run(model, layers, prompt.shape[1], written.shape[1], difference, clock)
    return Report(
        run=run,
        text=text,
        tokens=readable(tokenizer, ids[0].tolist()),
        prompt_tokens=prompt.shape[1],
        continuation=tokenizer.decode(written[0].tolist()),
        heads=ranked(heads_of(layers, inductions)),
        pictures=tuple(pictures_of(layers)),
    )


class _Clock:
    """Times the stages, and tells whoever listens how far each has come."""

    def __init__(self, progress: Progress | None, subject: Subject) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress or (lambda stage, done, total: None)
        self._device = subject.model.device

    @contextmanager
    def stage(self, name: str, total: int) -> Generator[Callable[[], None]]:
        """Time a stage of `total` steps; what it yields is called after each step."""
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            self._progress(name, min(done, total), total)

        self._progress(name, 0, total)
        settle(self._device)
        start = time.perf_counter()
        yield step
        settle(self._device)
        self.seconds[name] = time.perf_counter() - start
        self._progress(name, total, total)


def _prompt(subject: Subject, tokenizer: Any, text: str, new_tokens: int) -> Tensor:
    """The tokens of the text, int64 [1, tokens], if the model can take them."""
    if not text.strip():
        raise ProblemError("the text is empty: give the model something to read, a sentence or more.")
    if new_tokens < 0:
        raise ProblemError(f"new_tokens is {new_tokens}: expected the tokens to write, 0 or more.")
    ids = torch.tensor([tokenizer(text)["input_ids"]], device=subject.model.device)
    tokens, context = ids.shape[1], subject.context
    room = 0 if not subject.generates else new_tokens
    if tokens < 2:
        raise ProblemError(f"the text {text!r} is {tokens} token: there is nothing to choose between; give at least 2.")
    if context is not None and tokens + room > context:
        raise ProblemError(
            f"the text is {tokens:,} tokens and {room} are to be written, and the model was made for {context:,} "
            f"positions: shorten the text to {max(0, context - room):,} tokens" + (", or write fewer." if room else ".")
        )
    return ids


def _written(subject: Subject, prompt: Tensor, new_tokens: int, clock: _Clock) -> Tensor:
    """Run the prompt, and write on: the tokens written, int64 [1, tokens]; none by a model that does not write."""
    subject.outputs(prompt[:, :8])  # the first call of anything also loads and plans it
    with clock.stage("prompt", 1):
        token, cache = subject.step(prompt, None) if subject.generates else (subject.outputs(prompt), None)
    ids: list[int] = []
    with clock.stage("continuation", new_tokens if subject.generates else 0) as step:
        while subject.generates and len(ids) < new_tokens and token not in subject.ends:
            ids.append(int(token))
            step()
            if len(ids) < new_tokens:
                token, cache = subject.step(_unseen(prompt, ids, cache), cache)
    return torch.tensor([ids], dtype=torch.int64, device=prompt.device)


def _unseen(prompt: Tensor, ids: list[int], cache: Any) -> Tensor:
    """The tokens that the cache has not seen: the last, or all for a model that keeps no cache."""
    written = torch.tensor([ids], device=prompt.device)
    return torch.cat([prompt, written], dim=1) if cache is None else written[:, -1:]


def _eager_difference(subject: Subject, ids: Tensor, clock: _Clock) -> float:
    """The largest absolute difference of the outputs, with regard's attention and with transformers' eager one."""
    with clock.stage("comparison", 2) as step:
        ours = subject.outputs(ids)
        step()
        with subject.attention("eager"):
            eager = subject.outputs(ids)
        pieces = zip(ours.split(64, dim=1), eager.split(64, dim=1), strict=True)
        return max(float((a.double() - b.double()).abs().max()) for a, b in pieces)


def _layers(subject: Subject, ids: Tensor, clock: _Clock) -> list[Layer]:
    """Every layer of self-attention over the text, in the order of the forward pass."""
    with clock.stage("layers", subject.layers) as step:
        seen = _observed(subject, ids, measured_layer, step)
    if not seen:
        raise ProblemError(
            f"{type(subject.model).__name__} computes its attention by itself instead of through transformers' "
            "attention interface, so it cannot be observed: survey a model that supports `set_attn_implementation`."
        )
    return numbered([s.value for s in seen])


def _inductions(subject: Subject, tokenizer: Any, clock: _Clock) -> list[Score] | None:
    """The induction score of each layer on repeated random tokens; None where the vocabulary is too small."""
    vocabulary = plain_tokens(tokenizer, subject.embeddings)
    repeats = Repeats().fitting(len(vocabulary), subject.context)
    if repeats.period < 2 or repeats.times < 2:
        return None
    ids = repeats.draw(vocabulary, tokenizer.bos_token_id, SEQUENCES).to(subject.model.device)
    with clock.stage("induction", subject.layers) as step:
        return [s.value for s in _observed(subject, ids, lambda look: induction(look.weights, ids), step)]


def _observed(subject: Subject, ids: Tensor, each: Callable[[Look], Any], step: Callable[[], None]) -> list[Seen[Any]]:
    """`each` of every call over all of the tokens: attention to another sequence (an image, an encoder) is left out."""

    def self_attention(look: Look) -> Any:
        batch, _, queries, keys = look.weights.shape
        if (batch, queries, keys) != (*ids.shape, ids.shape[1]):
            return None
        step()
        return each(look)

    with observe(subject.body, self_attention) as seen:
        subject.body(input_ids=ids)
    return [s for s in seen if s.value is not None]


def _run(model: Any, layers: list[Layer], prompt: int, written: int, difference: float | None, clock: _Clock) -> Run:
    seconds = clock.seconds
    return Run(
        model=model.config.name_or_path or type(model).__name__,
        layers=len(layers),
        heads=max(layer.heads for layer in layers),
        kv_heads=max(layer.kv_heads for layer in layers),
        head_dim=max(layer.head_dim for layer in layers),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        backends=tuple(layer.backend for layer in layers),
        tokens_per_second=prompt / seconds["prompt"],
        decode_tokens_per_second=(written - 1) / seconds["continuation"] if written > 1 else None,
        attention_gflop=sum(layer.flops for layer in layers) / 1e9,
        pairs=sum(layer.pairs for layer in layers),
        eager_difference=difference,
        machine=machine(model.device),
        versions=versions(),
        seconds=seconds,
    )
