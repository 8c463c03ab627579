"""What is evaluated: a model that reads tokens and gives logits, whatever it is made of.

```
model = as_model(anything)       a callable tokens -> logits, a model of transformers, a regard.nn.Decoder
reader = model.start()           an empty text
reader.read([1, 2, 3], last=1)   float32 [1, vocabulary]: the logits after the last token read
other = reader.copy()            both continue by themselves, so a prefix is read once for many texts
```

Tokens are read in pieces that depend on their positions alone (`Model.piece_end`). So a text whose prefix was read for
another text is read in the same pieces, and its logits have the same bits.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.evaluate.model_digest import digest_of_config, digest_of_weights
from regard.evaluate.tokens import Tokenizer
from regard.integers import as_integer, is_integer
from regard.integrate.cache_argument import as_argument
from regard.integrate.position_tables import context_of, has_position_table
from regard.nn import Decoder
from regard.storage.stored import Layout, Rolling

PIECE = 256
"""Tokens that are read at once: enough for large products, few enough that shared prefixes are long."""


EVICT_EVERY = 16
"""Tokens of a stream that are read at once into a cache that evicts."""


class CacheOptions(NamedTuple):
    """A KV cache: layout, codec and eviction policy, as `regard_cache` takes them.

    Attributes:
        step: tokens read at once after the first piece; None: 256, and for `Rolling` its window at most. A query sees
            all tokens of its own piece, so `Rolling` has exactly its window with 1 only.
        with_question: whether the question is read with the context, so that a policy knows it when it evicts.
    """

    layout: Layout | None = None
    codec: Any = None
    evict: Any = None
    step: int | None = None
    with_question: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether every token is kept as it comes, so that pieces do not change what a query sees."""
        return self.codec is None and self.evict is None and not isinstance(self.layout, Rolling)

    def pieces(self, *, is_stream: bool = False) -> tuple[int | None, int]:
        """(tokens of the first piece, those of the others); the first is None where it is the whole context.

        In a stream, a policy evicts when its budget is full, and not after the whole text.
        """
        if self.evict is not None:
            budget = getattr(self.evict, "budget", None)
            return (budget if isinstance(budget, int) else PIECE) if is_stream else None, self.step or EVICT_EVERY
        if isinstance(self.layout, Rolling):
            return self.layout.window, self.step or min(PIECE, self.layout.window)
        return self.step or PIECE, self.step or PIECE


class Reader(ABC):
    """A text that a model has read so far."""

    @abstractmethod
    def read(self, ids: Sequence[int], last: int) -> Tensor:
        """Read more tokens, in one piece; the logits after each of the last ones, float32 [last, vocabulary]."""

    @abstractmethod
    def copy(self) -> "Reader":
        """The same text, to be continued independently."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that is evaluated; made by `as_model`.

    Attributes:
        label: its name in results.
        start: makes a reader of an empty text.
        tokenizer: text to tokens and back.
        positions: tokens that the model was made for; None if unknown.
        needs_positions: whether it has no positions beyond these: a table of them ends there.
        vocabulary: tokens that it knows; None if unknown.
        cache: its KV cache; None for models without.
        digest: of its weights; empty if unknown.
        config: a digest of what else it computes with, such as rotations and masks; empty if unknown.
        whole: what it was made of. `evaluate` puts a module in evaluation mode; readers run it in the mode that it has.
    """

    label: str
    start: Callable[[], Reader]
    tokenizer: Tokenizer
    positions: int | None = None
    needs_positions: bool = False
    vocabulary: int | None = None
    cache: CacheOptions | None = None
    digest: str = ""
    whole: Any = None
    config: str = ""

    @property
    def is_stepwise(self) -> bool:
        """Whether tokens read at once give other logits than one by one, as in a cache that is quantised or evicts."""
        return self.cache is not None and not self.cache.is_dense

    def piece_end(self, start: int, *, is_stream: bool = False) -> int | None:
        """Where the piece that begins at this token ends; None: at the end of what is read.

        >>> model = as_model(lambda tokens: torch.zeros(*tokens.shape, 11))
        >>> model.piece_end(0), model.piece_end(300)
        (256, 512)
        """
        first, step = (PIECE, PIECE) if self.cache is None else self.cache.pieces(is_stream=is_stream)
        if first is None:
            return None
        return first if start < first else start + step - (start - first) % step

    def shared(self, tokens: int) -> int:
        """How many of the first tokens may be read ahead, so that the pieces remain the same."""
        end, shared = self.piece_end(0), 0
        while end is not None and end <= tokens:
            shared, end = end, self.piece_end(end)
        return shared

    def read(self, reader: Reader, start: int, ids: Sequence[int], last: int) -> Tensor:
        """Read tokens that begin at position `start`, piece by piece. See `Reader.read`."""
        found: list[Tensor] = []
        done, end = 0, len(ids)
        while done < end:
            stop = self.piece_end(start + done)
            stop = end if stop is None else min(end, stop - start)
            wanted = max(0, last - (end - stop))
            piece = reader.read(ids[done:stop], min(wanted, stop - done))
            found += [piece] if wanted else []
            done = stop
        return torch.cat(found) if found else torch.empty(0)


def as_model(
    model: Any,
    tokenizer: Any = None,
    *,
    cache: CacheOptions | None = None,
    positions: int | None = None,
    label: str | None = None,
) -> Model:
    """A model to evaluate.

    Args:
        model: a callable from int64 [1, tokens] to logits [1, tokens, vocabulary] (or without the batch dimension), a
            causal language model of transformers (`use_regard` is called on it), a `regard.nn.Decoder`, or a `Model`,
            which is returned and may be given another label alone.
        tokenizer: of transformers; anything with `encode(text)` and `decode(ids)`; None: UTF-8 bytes.
        cache: the KV cache; None: one that keeps all tokens. A plain callable has none.
        positions: tokens that the model was made for; None: what its config says.
        label: its name in results. Nothing else tells functions apart there: other functions need other labels.

    Raises:
        ProblemError: it is none of these, a cache for a model without one, or for a `Model`, options of a cache that
            are none, or positions that are no count, or more than the model has in a table.

    >>> as_model(lambda tokens: torch.zeros(*tokens.shape, 256), label="uniform").label
    'uniform'
    """
    if positions is not None:
        if not is_integer(positions, least=1):
            raise ProblemError(f"positions is {positions!r}: expected a whole number from 1 on, or None.")
        positions = as_integer(positions)  # an int of NumPy is not written as JSON
    _check_cache(cache)
    if isinstance(model, Model):
        given = {"tokenizer": tokenizer, "cache": cache, "positions": positions}
        if names := [f"{name}=" for name, value in given.items() if value is not None]:
            raise ProblemError(
                f"{' and '.join(names)} beside the Model {model.label!r}, which has its own: give them to as_model "
                "where the Model is made."
            )
        return model if label is None else replace(model, label=label)
    if isinstance(model, Decoder):
        return _of_decoder(model, Tokenizer.of(tokenizer), cache or CacheOptions(), positions, label)
    if isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        made = Tokenizer.of(tokenizer) if tokenizer is None else _with_ends(Tokenizer.of(tokenizer), model)
        return _of_transformers(model, made, cache or CacheOptions(), positions, label)
    if not callable(model):
        raise ProblemError(
            f"the model is {type(model).__name__}: expected a callable from tokens [1, tokens] to logits [1, tokens, "
            "vocabulary], a model of transformers, or a regard.nn.Decoder."
        )
    if cache is not None and cache != CacheOptions():
        raise ProblemError("a plain callable has no KV cache: give a model of transformers or a regard.nn.Decoder.")
    call = cast(Callable[[Tensor], Tensor], model)
    digest, config = (digest_of_weights(model), digest_of_config(model)) if isinstance(model, nn.Module) else ("", "")
    return Model(
        label or _own_name(call), lambda: _Whole(call), Tokenizer.of(tokenizer), positions, digest=digest, whole=call,
        config=config,
    )  # fmt: skip


def _check_cache(cache: object) -> None:
    if cache is None:
        return
    if not isinstance(cache, CacheOptions):
        raise ProblemError(
            f"cache is {received(cache)}: expected None, or the options of one, such as CacheOptions(codec=Int8())."
        )
    if cache.step is not None and not is_integer(cache.step, least=1):
        raise ProblemError(f"CacheOptions(step={cache.step!r}): expected a whole number from 1 on, or None.")


def check_label(model: Model) -> None:
    """Raise `ProblemError` for a function whose name others may have too: a file would have the results of either.

    >>> check_label(as_model(lambda tokens: torch.zeros(*tokens.shape, 256), label="uniform"))
    """
    is_named = isinstance(model.whole, FunctionType) and "<" not in model.label  # `<lambda>`, `make.<locals>.model`
    if not model.digest and not is_named and model.label == _own_name(model.whole):
        raise ProblemError(
            f"the model is {model.label}, and other models may have this name: give label=, a name of its own in the "
            "results of the file."
        )


def _own_name(model: Any) -> str:
    return getattr(model, "__qualname__", type(model).__name__)


class _Whole(Reader):
    """A plain callable, which reads the whole text whenever logits are needed."""

    def __init__(self, call: Callable[[Tensor], Tensor], ids: Sequence[int] = ()) -> None:
        self.call, self.ids = call, list(ids)

    @torch.no_grad()
    def read(self, ids: Sequence[int], last: int) -> Tensor:
        self.ids += ids
        if not last:
            return torch.empty(0)
        count, device = len(self.ids), _device(self.call)
        logits = cast(Any, self.call(torch.tensor([self.ids], device=device)))
        if not _are_logits(logits, count):
            got = type(logits).__name__
            if isinstance(logits, Tensor):
                got = f"{list(logits.shape)}" + f" of {logits.dtype}" * logits.is_complex()
            raise ProblemError(
                f"the model was called with tokens [1, {count}] and returned {got}: expected logits "
                f"[1, {count}, vocabulary]."
            )
        return logits.reshape(count, -1)[-last:].float().cpu()

    def copy(self) -> "_Whole":
        return _Whole(self.call, self.ids)


def _are_logits(found: Any, tokens: int) -> bool:
    """Whether these are real numbers [1, tokens, vocabulary], or without the batch dimension."""
    if not isinstance(found, Tensor) or found.is_complex() or not found.numel():
        return False
    return found.shape[:-1] in ((1, tokens), (tokens,))


def _device(model: Any) -> torch.device | None:
    """Where the weights of a module are; None for a function, which gets tokens on the CPU."""
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return None if weight is None else weight.device


class _Cached(Reader):
    """A model with a KV cache. `call(tokens, cache, last)` gives logits [1, last, vocabulary]."""

    def __init__(self, call: Callable[[Tensor, Any, int], Tensor], cache: Any, device: Any) -> None:
        self.call, self.cache, self.device = call, cache, device

    @torch.no_grad()
    def read(self, ids: Sequence[int], last: int) -> Tensor:
        return self.call(torch.tensor([list(ids)], device=self.device), self.cache, last)[0].float().cpu()

    def copy(self) -> "_Cached":
        return _Cached(self.call, copy.deepcopy(self.cache), self.device)


def _of_decoder(
    model: Decoder, tokenizer: Tokenizer, cache: CacheOptions, positions: int | None, label: str | None
) -> Model:
    def call(tokens: Tensor, caches: Any, last: int) -> Tensor:
        states = model.body(tokens, caches=caches)
        return model.unembedding(states[:, states.shape[1] - last :])

    device, vocabulary = next(model.parameters()).device, cast(Any, model.unembedding).out_features

    def start() -> Reader:
        return _Cached(call, model.caches(*cache[:3]), device)

    digest, config = digest_of_weights(model), digest_of_config(model)
    return Model(label or "Decoder", start, tokenizer, positions, False, vocabulary, cache, digest, model, config)


def _of_transformers(
    model: Any, tokenizer: Tokenizer, cache: CacheOptions, positions: int | None, label: str | None
) -> Model:
    from regard.integrate.cache import regard_cache
    from regard.integrate.transformers import use_regard

    name = label or model.config.name_or_path or type(model).__name__
    not_causal = ProblemError(f"{name} is a {type(model).__name__}: expected a causal language model.")
    if model.config.is_encoder_decoder or _sees_later_tokens(model):
        raise not_causal
    most, has_table = context_of(model), has_position_table(model)
    if has_table and positions is not None and most is not None and positions > most:
        raise ProblemError(
            f"positions is {positions:,}, and {name} has a table of {most:,} positions: expected {most:,} or fewer."
        )
    try:
        use_regard(model)
    except ProblemError as error:
        raise ProblemError(f"{error} Without a cache, give evaluate: lambda tokens: model(tokens).logits.") from None

    def call(tokens: Tensor, past: Any, last: int) -> Tensor:
        kept = max(1, last)  # 0 would be all
        logits = getattr(model(tokens, **as_argument(model, past), use_cache=True, logits_to_keep=kept), "logits", None)
        if logits is None:  # a model without a head
            raise not_causal
        return logits[:, logits.shape[1] - last :]

    def start() -> Reader:
        return _Cached(
            call, regard_cache(model, layout=cache.layout, codec=cache.codec, evict=cache.evict), model.device
        )

    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    digest, config = digest_of_weights(model), digest_of_config(model)
    return Model(name, start, tokenizer, positions or most, has_table, vocabulary, cache, digest, model, config)


def _sees_later_tokens(model: Any) -> bool:
    """Whether no layer is causal, as in a BERT whose config does not make it a decoder."""
    causal = [bool(each.is_causal) for each in model.modules() if hasattr(each, "is_causal")]
    config = model.config.get_text_config(decoder=True)
    return bool(causal) and not any(causal) and not getattr(config, "is_decoder", True)


def _with_ends(tokenizer: Tokenizer, model: Any) -> Tokenizer:
    """The tokenizer with the end tokens of the model's generation besides its own, such as that of a turn."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else ends or []
    return dataclasses.replace(tokenizer, end=(*tokenizer.end, *(end for end in ends if end not in tokenizer.end)))
