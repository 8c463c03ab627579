"""Text to tokens and back, by a tokenizer of transformers, by any object with `encode` and `decode`, or by bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import ProblemError


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer as tasks use it.

    Attributes:
        encode: the tokens of a text, without special ones.
        decode: the text of tokens, without special ones.
        start: special tokens before each text.
        end: tokens that end a text.
        chat: the texts before and after a question in the chat template; None without a template.

    >>> Tokenizer.of(None).encode("é!")
    [195, 169, 33]
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    chat: tuple[str, str] | None = None

    @staticmethod
    def of(tokenizer: Any) -> "Tokenizer":
        """Of a tokenizer of transformers, an object with `encode` and `decode`, or UTF-8 bytes for None."""
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if tokenizer is None:
            return Tokenizer(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))
        if callable(tokenizer) and hasattr(tokenizer, "all_special_ids"):
            return _of_transformers(tokenizer)
        encode, decode = getattr(tokenizer, "encode", None), getattr(tokenizer, "decode", None)
        if callable(encode) and callable(decode):
            return Tokenizer(lambda text: list(cast(Any, encode)(text)), cast(Any, decode))
        raise ProblemError(f"the tokenizer is {type(tokenizer).__name__}: expected one with encode and decode.")


MARK = "\N{SYMBOL FOR SUBSTITUTE}"


def _of_transformers(tokenizer: Any) -> Tokenizer:
    special = set(tokenizer.all_special_ids)
    whole = tokenizer("x", verbose=False)["input_ids"]
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Tokenizer(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        tuple(whole[: next((i for i, token in enumerate(whole) if token not in special), 0)]),
        end,
        _chat(tokenizer),
    )


def _chat(tokenizer: Any) -> tuple[str, str] | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": MARK}]
    before, _, after = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).partition(
        MARK
    )
    return before, after
