"""Text to tokens and back, by a tokenizer of transformers, by any object with `encode` and `decode`, or by bytes."""

import hashlib
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
        vocabulary: tokens that it can make; None if unknown.

    >>> Tokenizer.of(None).encode("é!")
    [195, 169, 33]
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    chat: tuple[str, str] | None = None
    vocabulary: int | None = None

    def digest(self) -> str:
        """A digest of its vocabulary size, its special tokens and its tokens of fixed texts, for results.

        >>> Tokenizer.of(None).digest() == Tokenizer.of(None).digest()
        True
        """
        parts = (self.vocabulary, self.start, self.end, self.chat, [_tokens_of(self, text) for text in SAMPLES])
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @staticmethod
    def of(tokenizer: Any) -> "Tokenizer":
        """Of a tokenizer of transformers, an object with `encode` and `decode`, or UTF-8 bytes for None."""
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if tokenizer is None:
            return Tokenizer(
                lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), vocabulary=256
            )
        if callable(tokenizer) and hasattr(tokenizer, "all_special_ids"):
            return _of_transformers(tokenizer)
        encode, decode = getattr(tokenizer, "encode", None), getattr(tokenizer, "decode", None)
        if callable(encode) and hasattr(tokenizer, "get_vocab_size"):
            return _of_tokenizers(tokenizer)
        if callable(encode) and callable(decode):
            size = getattr(tokenizer, "vocab_size", None)
            vocabulary = cast("int | None", size() if callable(size) else size)  # a method in sentencepiece
            return Tokenizer(lambda text: list(cast(Any, encode)(text)), cast(Any, decode), vocabulary=vocabulary)
        raise ProblemError(f"the tokenizer is {type(tokenizer).__name__}: expected one with encode and decode.")


SAMPLES = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    '4812207 {"key": [0.5, -13]}\n\n\tdef answer(x):\n',
    "\u00e9\u03bb\u0416\u6587",
)
"""Texts whose tokens distinguish two tokenizers."""


def _tokens_of(tokenizer: Tokenizer, text: str) -> list[int] | str:
    try:
        return [int(token) for token in tokenizer.encode(text)]
    except Exception as error:  # noqa: BLE001 - a small tokenizer may refuse a letter that no example has
        return type(error).__name__


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
        len(tokenizer),
    )


def _of_tokenizers(tokenizer: Any) -> Tokenizer:
    """Of the package tokenizers, whose `encode` gives an object with `ids` and adds special tokens if not told."""
    return Tokenizer(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids)),
        vocabulary=tokenizer.get_vocab_size(),
    )


def _chat(tokenizer: Any) -> tuple[str, str] | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": MARK}]
    before, _, after = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).partition(
        MARK
    )
    return before, after
