"""Tokens decoded to text while they are generated.

A token is not a piece of text: the bytes of one character may be spread over several tokens, and the text of a token
may depend on the token before it. So new tokens are decoded together with a few earlier ones, and the new end of that
text is returned, except for an incomplete character:

    tokens   " caf" | C3 | A9 | " au"
    decoded  " caf" | " caf\ufffd" | " café" | " café au"
    returned " caf" | ""   | "é" | " au"
"""

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""The text of bytes that are no character. At the end of a text they may be the first bytes of a character, and each
byte of it may be decoded to one of these, so all of them wait."""

BEHIND = 6
"""Tokens of the prompt that are decoded with the first new ones: a word at the very start would lose its space."""

FAR = 64
"""Tokens of incomplete text after which it is returned as it is, so that the cost per token is bounded."""


class TextStream:
    """The text of a sequence of tokens.

    Args:
        tokenizer: of transformers.
        before: the tokens of the prompt; their text is not returned.
        stops: texts that end the stream; the returned text ends before the first of them.

    Attributes:
        text: all text that was returned.
        stopped: whether one of `stops` was reached.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._context, self._new = self._beginning(list(before)), list[int]()
        self._shown = len(self._decode(self._context))
        self._waiting = ""  # may be the beginning of a stop
        self.text, self.stopped = "", False

    def put(self, token: int) -> str:
        """The text that is complete with this token; none after a stop."""
        if self.stopped:
            return ""
        self._new.append(token)
        text = self._decode(self._context + self._new)
        ready, far = text.rstrip(BROKEN), len(self._new) >= FAR
        piece = (text if far else ready)[self._shown :]
        self._shown += len(piece)
        if far or (piece and ready == text):
            self._context, self._new = self._new, []
            self._shown = len(self._decode(self._context))
        return self._release(piece)

    def end(self) -> str:
        """The text that waited, at the end of the stream."""
        if self.stopped:
            return ""
        text = self._release(self._decode(self._context + self._new)[self._shown :])
        self._context, self._new, self._shown = [], [], 0
        rest, self._waiting = "" if self.stopped else self._waiting, ""
        self.text += rest
        return text + rest

    def _release(self, piece: str) -> str:
        """The text up to here that is before a stop, and cannot be the beginning of one."""
        text = self._waiting + piece
        starts = [start for start in (text.find(stop) for stop in self._stops) if start >= 0]
        if starts:
            self.stopped, self._waiting, text = True, "", text[: min(starts)]
        else:
            kept = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._waiting = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text

    def _beginning(self, before: list[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character."""
        for count in range(BEHIND, BEHIND + 4):  # a character has four bytes at most
            if not self._decode(before[-count:]).startswith(BROKEN):
                return before[-count:]
        return before[-BEHIND:]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of `stop`.

    >>> _overlap("one, tw", "two"), _overlap("one", "two")
    (2, 0)
    """
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
