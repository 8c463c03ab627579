"""Tokens as a reader wants to see them: real text instead of a tokenizer's markers."""

from codecs import getincrementaldecoder
from functools import cache
from itertools import groupby
from typing import Any, cast

PART = "⋯"
"""Shown for a token that has only the first bytes of a character; the token that completes it shows the character."""


def readable(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    r"""The display string of each token.

    Byte-level tokens (`Ġthe`, `Ċ`) become the text that their bytes spell (` the`, a line break). Where several tokens
    spell one character the last one shows it, and those before show `⋯`; bytes that no token completes stay bytes
    (`\xe2\x80`). SentencePiece's `▁` becomes a space and `<0x0A>` its byte; WordPiece's `##` goes. Special tokens stay
    as they are.
    """
    byte_level, special = _is_byte_level(tokenizer), set(tokenizer.all_special_ids)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    spelled = [_special(p) if i in special else _serialized(p, byte_level) for i, p in zip(ids, pieces, strict=True)]
    shown: list[str] = []
    for in_bytes, group in groupby(spelled, lambda piece: isinstance(piece, bytes)):
        run = list(group)
        shown += _decoded(cast("list[bytes]", run)) if in_bytes else cast("list[str]", run)
    return tuple(shown)


def _decoded(run: list[bytes]) -> list[str]:
    """What each of consecutive tokens adds to the text that their bytes spell together."""
    decoder = getincrementaldecoder("utf-8")(errors="backslashreplace")
    shown = [decoder.decode(piece) or PART for piece in run]
    unfinished = decoder.decode(b"", final=True)
    return [*shown[:-1], shown[-1].removesuffix(PART) + unfinished] if unfinished else shown


def _special(piece: str | None) -> str:
    return "" if piece is None else str(piece)


def _serialized(piece: str | None, byte_level: bool) -> bytes | str:
    """A token's text, or its bytes where it is spelled in bytes."""
    if piece is None:  # an id that the model has and the tokenizer has not
        return ""
    if byte_level and piece and all(character in _byte_of() for character in piece):
        return bytes(_byte_of()[character] for character in piece)
    if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
        return bytes([int(piece[3:5], 16)])
    return piece.removeprefix("##").replace("▁", " ")


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return hasattr(tokenizer, "byte_decoder") or "ByteLevel" in repr(getattr(backend, "decoder", None))


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary encodes (Radford et al. 2019, GPT-2's encoder).

    Printable bytes of Latin-1 are themselves; the others are numbered from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
