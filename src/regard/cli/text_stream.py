"""Tokens as text, piece by piece as they come.

A token is not a piece of text: the bytes of one character may stand in several, and what a token reads as may depend on
the one before it. So a few tokens are decoded together with some that were shown already, and what is new of that is
given out, but for a character that is not whole yet:

    tokens   " caf" | C3 | A9 | " au"
    decoded  " caf" | " caf\ufffd" | " café" | " café au"
    given    " caf" | ""   | "é" | " au"
"""

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What bytes that are no character decode to; at the end, they may be the first of one. It may stand for each byte of a
run that is not whole yet, so all of them wait, not three at most."""

BEHIND = 6
"""Tokens of the prompt that are decoded with the first new ones: a word at the very start would lose its space."""

FAR = 64
"""Tokens without an end in sight after which the text is given out as it is, so that each costs the same."""


class TextStream:
    """The text that tokens make.

    Args:
        tokenizer: of transformers.
        before: the tokens in front of the first, that is the prompt; their text is not given out.
        stops: texts that end it; what is given out ends before the first of them.

    Attributes:
        text: all that was given out.
        stopped: whether one of `stops` has come.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._context, self._new = self._beginning(list(before)), list[int]()
        self._shown = len(self._decoded(self._context))
        self._held = ""  # may be the beginning of a stop
        self.text, self.stopped = "", False

    def put(self, token: int) -> str:
        """The text that can be given out now that this token has come; none after a stop."""
        if self.stopped:
            return ""
        self._new.append(token)
        text = self._decoded(self._context + self._new)
        ready, far = text.rstrip(BROKEN), len(self._new) >= FAR
        piece = (text if far else ready)[self._shown :]
        self._shown += len(piece)
        if far or (piece and ready == text):
            self._context, self._new = self._new, []
            self._shown = len(self._decoded(self._context))
        return self._given(piece)

    def end(self) -> str:
        """What was held back, when nothing more comes."""
        if self.stopped:
            return ""
        given = self._given(self._decoded(self._context + self._new)[self._shown :])
        self._context, self._new, self._shown = [], [], 0
        rest, self._held = "" if self.stopped else self._held, ""
        self.text += rest
        return given + rest

    def _given(self, piece: str) -> str:
        """What of the text up to here stands before a stop, and cannot be the beginning of one."""
        text = self._held + piece
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held, text = True, "", text[: min(found)]
        else:
            kept = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text

    def _beginning(self, before: list[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character."""
        for count in range(BEHIND, BEHIND + 4):  # a character has four bytes at most
            if not self._decoded(before[-count:]).startswith(BROKEN):
                return before[-count:]
        return before[-BEHIND:]

    def _decoded(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of `stop`.

    >>> _overlap("one, tw", "two"), _overlap("one", "two")
    (2, 0)
    """
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
