"""Text to tokens and back, by a tokenizer of transformers, by any object with `encode` and `decode`, or by bytes."""

import copy
import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from regard.errors import ProblemError
from regard.evaluate.chat_template import NO_CHAT, texts_around


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer as tasks use it.

    Attributes:
        encode: the tokens of a text, without special ones.
        decode: the text of tokens, without special ones.
        start: special tokens before each text.
        end: tokens that end a text.
        chat: the texts before and after a question in the chat template; None without a template that contains the
            question exactly once.
        vocabulary: tokens that it can make; None if unknown.
        decode_all: the text of tokens with the special ones; None where `decode` gives them, too.
        no_chat: the error of a task that needs `chat` where it is None.

    >>> Tokenizer.of(None).encode("é!")
    [195, 169, 33]
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    chat: tuple[str, str] | None = None
    vocabulary: int | None = None
    decode_all: Callable[[Sequence[int]], str] | None = None
    no_chat: str = NO_CHAT

    def encode_after(self, text: str) -> list[int]:
        """The tokens of a text that follows another one, without special ones.

        >>> Tokenizer.of(None).encode_after(" 48")
        [32, 52, 56]
        """
        for anchor, head in self._anchors:
            whole = list(self.encode(anchor + text))
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self.encode(text)

    def spelled(self, text: str) -> str:
        """The decoded tokens of the text, if they differ in spaces, case and accents alone; else the text itself.

        A WordPiece tokenizer decodes "a-b" as "a - b", so that no model can generate the text itself.

        >>> Tokenizer.of(None).spelled("a-b")
        'a-b'
        """
        decoded = self.decode(self.encode_after(f" {text}")).strip()
        return decoded if _signs(decoded) == _signs(text) else text

    def writes(self, text: str) -> bool:
        """Whether its tokens have all letters and digits of the text, whatever their case and accents.

        A vocabulary of words gives a number that it lacks an unknown token, and one of letters leaves digits out.

        >>> Tokenizer.of(None).writes("4812207")
        True
        """
        decoded = self.decode(self.encode_after(f" {text}"))
        return _letters(text) in _letters(decoded)

    @cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """Texts with their tokens, for texts that follow; none where `encode` gives a text the tokens it has in others.

        Llama 2's tokenizer puts a space before whatever it encodes, and " 48" gets a token of two spaces; with
        `Metaspace` it puts one before what has none, and "48" gets a token of a space.
        """
        pairs = (("a", " x"), ("\n", "x"), ("=", "x"))
        if all(self._after(before, text) in (None, [], _tokens_of(self, text)) for before, text in pairs):
            return []
        known = {text: _tokens_of(self, text) for text in ("\n", "=")}
        return [(text, tokens) for text, tokens in known.items() if tokens and isinstance(tokens, list)]

    def _after(self, before: str, text: str) -> list[int] | None:
        """The tokens of a text after another one; None where they are merged, or one cannot be encoded."""
        head, whole = _tokens_of(self, before), _tokens_of(self, before + text)
        if isinstance(head, str) or isinstance(whole, str) or whole[: len(head)] != head:
            return None
        return whole[len(head) :]

    def digest(self) -> str:
        """A digest of its vocabulary size, its special tokens and its tokens of fixed texts, for results.

        >>> Tokenizer.of(None).digest() == Tokenizer.of(None).digest()
        True
        """
        parts = (self.vocabulary, self.start, self.end, self.chat, [_tokens_of(self, text) for text in SAMPLES])
        parts += (self.encode_after(" x"),) if self._anchors else ()
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @staticmethod
    def of(tokenizer: Any) -> "Tokenizer":
        """A tokenizer made of one of transformers, of an object with `encode` and `decode`, or of UTF-8 for None."""
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if tokenizer is None:
            return Tokenizer(lambda text: list(text.encode()), _text_of_bytes, vocabulary=256)
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


def _text_of_bytes(ids: Sequence[int]) -> str:
    """Bytes as UTF-8, and tokens that are none by their numbers.

    >>> _text_of_bytes([72, 105, 300])
    'Hi<300>'
    """
    parts = [(is_byte, list(part)) for is_byte, part in itertools.groupby(ids, lambda token: token < 256)]
    return "".join(
        bytes(part).decode(errors="replace") if is_byte else "".join(f"<{token}>" for token in part)
        for is_byte, part in parts
    )


def _of_transformers(tokenizer: Any) -> Tokenizer:
    special = set(tokenizer.all_special_ids)
    whole = tokenizer("x", verbose=False)["input_ids"]
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    chat, no_chat = _chat(tokenizer)
    return Tokenizer(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        tuple(whole[: next((i for i, token in enumerate(whole) if token not in special), 0)]),
        end,
        chat,
        len(tokenizer),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        no_chat,
    )


def _chat(tokenizer: Any) -> tuple[tuple[str, str] | None, str]:
    """(`Tokenizer.chat`, `Tokenizer.no_chat`): most tasks need no chat template, so that one may fail."""
    try:
        return texts_around(tokenizer), NO_CHAT
    except ProblemError as error:
        return None, str(error)


def _signs(text: str) -> str:
    """The letters, digits and other signs of a text, without case and accents."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(sign for sign in plain if not sign.isspace() and not unicodedata.combining(sign))


def _letters(text: str) -> str:
    """The letters and digits of a text, without case and accents."""
    return "".join(sign for sign in _signs(text) if sign.isalnum())


def _of_tokenizers(tokenizer: Any) -> Tokenizer:
    """A tokenizer made of one of the package tokenizers, whose `encode` gives `ids`, with special tokens by default.

    Its truncation and padding, which are for batches, would shorten and fill the texts: a copy has neither.
    """
    if getattr(tokenizer, "truncation", None) or getattr(tokenizer, "padding", None):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return Tokenizer(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids)),
        _start(tokenizer),
        vocabulary=tokenizer.get_vocab_size(),
    )


def _start(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens that a tokenizer of the package tokenizers puts before a text."""
    try:
        whole = tokenizer.encode("x")
    except Exception:  # noqa: BLE001 - a small tokenizer may refuse a letter that no example has
        return ()
    mask = list[int](whole.special_tokens_mask)
    return tuple(whole.ids[: mask.index(0) if 0 in mask else 0])
