"""One generation: transformers' `generate` over regard's cache, observed token by token.

A `Listener` is one of the stopping criteria of `generate`, which calls it after each token. There the text of the token
is shown, and there the generation can be stopped, which a streamer of transformers cannot do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.calls import Call, observe_calls
from regard.cli.progress import Progress
from regard.cli.text_stream import TextStream
from regard.integrate.cache_argument import as_argument

CHUNK = 512
"""Tokens of a prompt in one prefill step: enough for large products, few enough to show progress."""

INTERRUPTED = "interrupted"
"""`Generation.ended` after Ctrl-C."""


@dataclass(eq=False)
class Listener:
    """Called after each token: shows its text, records the time, and reports whether a stop text was reached.

    Args:
        stream: decodes tokens to text.
        show: called with each piece of text.
        first: called before the first piece.
    """

    stream: TextStream
    show: Callable[[str], None]
    first: Callable[[], None]
    tokens: list[int] = field(default_factory=list[int])
    times: tuple[float, float] | None = None
    """Times of the first token and of the last, in seconds."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """`input_ids` [1, tokens] ends with the new token; returns whether it is the last one, [1]."""
        now = time.perf_counter()
        if self.times is None:
            self.first()
        self.times = (now if self.times is None else self.times[0], now)
        self.tokens.append(int(input_ids[0, -1]))
        self.show(self.stream.put(self.tokens[-1]))
        return torch.full((1,), self.stream.stopped, device=input_ids.device)


@dataclass(frozen=True)
class Generation:
    """The generated tokens, and how long they took.

    Attributes:
        ended: why it ended: "end" (the model's end token), "stop", "tokens" (--max-new-tokens), "interrupted".
        prompt_seconds: from the start to the first token; None without one.
        seconds: from the first token to the last.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    ended: str
    prompt_seconds: float | None
    seconds: float

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def rate(self) -> float | None:
        """Tokens per second, after the first."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else None


def generate(
    model: Any, ids: Tensor, cache: Any, listener: Listener, settings: dict[str, Any], progress: Progress
) -> Generation:
    """Generate text, calling `listener` after every token. Ctrl-C ends it, and returns the tokens until then.

    Args:
        ids: the prompt, [1, tokens].
        settings: keyword arguments of transformers' `generate`. With 0 new tokens, the first token is computed, as it
            is the result of the prompt, and dropped.
    """
    count, ended, reads_only = ids.shape[1], "tokens", settings["max_new_tokens"] == 0
    if reads_only:
        settings = settings | {"max_new_tokens": 1, "min_new_tokens": 1}
        listener.show = lambda piece: None

    def show_prefill(*_: object) -> None:
        if listener.times is None:
            progress("prompt", min(int(cache.get_seq_length()), count), count)

    progress("prompt", 0, count)
    if not model.config.is_encoder_decoder:
        with torch.no_grad():
            model(ids[:, :8], use_cache=False)  # the first call also loads libraries and makes plans
    hook, start = model.register_forward_hook(show_prefill), time.perf_counter()
    try:
        model.generate(ids, **as_argument(model, cache), stopping_criteria=[listener], **settings)
        if not reads_only:
            ended = (
                "stop" if listener.stream.stopped else "end" if listener.tokens[-1] in end_tokens(model) else "tokens"
            )
    except KeyboardInterrupt:
        ended = INTERRUPTED
    finally:
        hook.remove()
    listener.show(listener.stream.end())
    first, last = listener.times or (None, 0.0)
    return Generation(
        prompt_tokens=count,
        tokens=[] if reads_only else listener.tokens,
        text="" if reads_only else listener.stream.text,
        ended=ended,
        prompt_seconds=None if first is None else first - start,
        seconds=0.0 if first is None else last - first,
    )


def end_tokens(model: Any) -> set[int]:
    """The tokens that end a text."""
    tokens = model.generation_config.eos_token_id
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)


def step_plans(model: Any, ids: Tensor, cache: Any, settings: dict[str, Any]) -> list[tuple[int, str]]:
    """The plans of one step after the prompt: (consecutive calls that share a plan, the plan)."""
    plans: list[str] = []
    ends: list[int] = []  # number of plans at the end of each step

    def mark_end(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        ends.append(len(plans))
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    def record(call: Call) -> None:
        plans.append(str(call.plan))

    two = settings | {"max_new_tokens": 2, "min_new_tokens": 2}
    with observe_calls(record):
        model.generate(ids, **as_argument(model, cache), stopping_criteria=[mark_end], **two)
    step = plans[ends[0] : ends[1]]
    starts = [i for i, plan in enumerate(step) if i == 0 or plan != step[i - 1]]
    return [(end - start, step[start]) for start, end in zip(starts, [*starts[1:], len(step)], strict=True)]
