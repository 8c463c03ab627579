"""What `regard generate` runs: transformers' own `generate` over regard's cache, told of every token.

A `Listener` stands among the stopping criteria of `generate`, which asks it after each token. There the text of the
token is shown, and there the writing can be stopped, which a streamer of transformers cannot do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.attention import Call, observe_calls
from regard.cli.text_stream import TextStream

CHUNK = 512
"""Tokens of a prompt that are read at a time: enough for large products, few enough to tell how far it is."""

CUT = "interrupted"
"""Why no more came, where Ctrl-C ended it."""

Progress = Callable[[str, int, int], None]


@dataclass(eq=False)
class Listener:
    """Called after each token: shows its text, keeps the time, and says whether a stop has come.

    Args:
        stream: makes text of tokens.
        show: given each piece of text.
        first: called before the first.
    """

    stream: TextStream
    show: Callable[[str], None]
    first: Callable[[], None]
    tokens: list[int] = field(default_factory=list[int])
    times: tuple[float, float] | None = None
    """When the first token came, and when the last; seconds."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """`input_ids` [1, tokens] ends with the new one; whether it is the last, [1]."""
        now = time.perf_counter()
        if self.times is None:
            self.first()
        self.times = (now if self.times is None else self.times[0], now)
        self.tokens.append(int(input_ids[0, -1]))
        self.show(self.stream.put(self.tokens[-1]))
        return torch.full((1,), self.stream.stopped, device=input_ids.device)


@dataclass(frozen=True)
class Written:
    """What was written, and how long it took.

    Attributes:
        ended: why no more came: "end" (the model ended), "stop", "tokens" (as many as were asked for), "interrupted".
        prompt_seconds: from the start to the first token; None where none came.
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
        """Tokens of the prompt a second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else None

    @property
    def rate(self) -> float | None:
        """Tokens a second, after the first."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else None


def write(
    model: Any, ids: Tensor, cache: Any, listener: Listener, settings: dict[str, Any], progress: Progress
) -> Written:
    """Let the model write on, every token told to `listener`. Ctrl-C ends it, and what was written until then counts.

    Args:
        ids: the prompt, [1, tokens].
        settings: of transformers' `generate`.
    """
    count, ended = ids.shape[1], "tokens"

    def read(*_: object) -> None:
        if listener.times is None:
            progress("prompt", min(int(cache.get_seq_length()), count), count)

    progress("prompt", 0, count)
    if not model.config.is_encoder_decoder:
        with torch.no_grad():
            model(ids[:, :8], use_cache=False)  # the first call of anything also loads and plans it
    hook, start = model.register_forward_hook(read), time.perf_counter()
    try:
        model.generate(ids, past_key_values=cache, stopping_criteria=[listener], **settings)
        ended = "stop" if listener.stream.stopped else "end" if listener.tokens[-1] in ends(model) else "tokens"
    except KeyboardInterrupt:
        ended = CUT
    finally:
        hook.remove()
    listener.show(listener.stream.end())
    first, last = listener.times or (None, 0.0)
    return Written(
        prompt_tokens=count,
        tokens=listener.tokens,
        text=listener.stream.text,
        ended=ended,
        prompt_seconds=None if first is None else first - start,
        seconds=0.0 if first is None else last - first,
    )


def ends(model: Any) -> set[int]:
    """The tokens that end a text."""
    tokens = model.generation_config.eos_token_id
    return set() if tokens is None else {tokens} if isinstance(tokens, int) else set(tokens)


def plans(model: Any, ids: Tensor, cache: Any, settings: dict[str, Any]) -> list[tuple[int, str]]:
    """How the attention runs in a step after the prompt: (calls in a row, the plan that they share)."""
    found: list[str] = []
    marks: list[int] = []

    def mark(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        marks.append(len(found))
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

    def tell(call: Call) -> None:
        found.append(str(call.plan))

    two = settings | {"max_new_tokens": 2, "min_new_tokens": 2}
    with observe_calls(tell):
        model.generate(ids, past_key_values=cache, stopping_criteria=[mark], **two)
    step = found[marks[0] : marks[1]]
    starts = [i for i, plan in enumerate(step) if i == 0 or plan != step[i - 1]]
    return [(end - start, step[start]) for start, end in zip(starts, [*starts[1:], len(step)], strict=True)]
