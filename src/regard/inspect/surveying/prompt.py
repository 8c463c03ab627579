"""The text of a survey: tokenised, continued by the model, and compared with transformers' own attention.

Tokens are displayed as text, without the markers of a tokenizer.
"""

from codecs import getincrementaldecoder
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.surveying.model import SurveyedModel
from regard.inspect.surveying.run import Clock
from regard.integers import is_integer


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a survey: its tokens, int64 [1, tokens], their text, and notes for the report."""

    ids: Tensor
    text: str
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def prompt_of(model: SurveyedModel, tokenizer: Any, text: str, tokens: int | None, new_tokens: int) -> Prompt:
    """The first `tokens` tokens of the text, if the model supports that length.

    Raises:
        ProblemError: the text is empty or a single token, or too long for a model with a table of positions.
    """
    _check(tokenizer, text, tokens, new_tokens)
    every: list[int] = tokenizer(text, verbose=False)["input_ids"]
    read, notes = every[:tokens], list[str]()
    if len(read) < 2:
        raise ProblemError(f"the text {text!r} is {len(read)} token: attention needs at least 2.")
    if tokens is not None and len(every) < tokens:
        notes.append(f"The text has only {len(every):,} of the requested {tokens:,} tokens: all of it was read.")
    room = new_tokens if model.generates else 0
    notes += _beyond(model, len(read), room)
    ids = torch.tensor([read], device=model.model.device)
    cut = len(read) < len(every)
    return Prompt(ids, tokenizer.decode(read, skip_special_tokens=True) if cut else text, tuple(notes))


def _check(tokenizer: Any, text: Any, tokens: Any, new_tokens: Any) -> None:
    if not callable(tokenizer):
        raise ProblemError(f"tokenizer is {type(tokenizer).__name__}: expected the model's tokenizer of transformers.")
    if not isinstance(text, str):
        raise ProblemError(f"text is {type(text).__name__}: expected the text to read, a str.")
    if not text.strip():
        raise ProblemError("the text is empty: expected a sentence or more.")
    _check_characters(text)
    if not is_integer(new_tokens, 0):
        raise ProblemError(f"new_tokens is {new_tokens!r}: expected the number of tokens to generate, 0 or more.")
    if tokens is not None and not is_integer(tokens, 2):
        raise ProblemError(f"tokens is {tokens!r}: expected the number of tokens of the text to read, 2 or more.")


def _check_characters(text: str) -> None:
    """Raise `ProblemError` for a surrogate, which UTF-8 does not have, and tokenizers do not read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ProblemError(
            f"the text has the surrogate {text[error.start]!r} at {error.start:,}: expected characters of UTF-8; "
            'replace it, as text.encode(errors="replace").decode() does.'
        ) from None


def _beyond(model: SurveyedModel, tokens: int, room: int) -> list[str]:
    """A note if the text is longer than the model's context; an error if the model cannot run there."""
    context = model.context
    if context is None or tokens + room <= context:
        return []
    if not model.extrapolates:
        shorter = f"shorten the text to {max(0, context - room):,} tokens" + (", or generate fewer." if room else ".")
        raise ProblemError(
            f"the text has {tokens:,} tokens, {room} are to be generated, and the model has a table of {context:,} "
            f"positions: {shorter}"
        )
    note = (
        f"The text and its continuation have {tokens + room:,} tokens, and the model was trained on {context:,} "
        "positions: its heads were not trained beyond them."
    )
    return [note]


def continuation(model: SurveyedModel, prompt: Tensor, new_tokens: int, clock: Clock) -> Tensor:
    """Run the prompt and generate: the new tokens, int64 [1, tokens]; none by a model that does not generate.

    With `new_tokens` of 0 nothing runs: a pass over a long text takes minutes, and the survey makes another one.
    """
    if not new_tokens:
        return prompt[:, :0]
    model.outputs(prompt[:, :8])  # a warm-up: first calls also load kernels and make plans
    with clock.stage("prompt", 1):
        token, cache = model.step(prompt, None) if model.generates else (model.outputs(prompt), None)
    ids: list[int] = []
    with clock.stage("continuation", new_tokens if model.generates else 0) as step:
        while model.generates and len(ids) < new_tokens and token not in model.ends:
            ids.append(int(token))
            step()
            if len(ids) < new_tokens:
                token, cache = model.step(_unseen(prompt, ids, cache), cache)
    return torch.tensor([ids], dtype=torch.int64, device=prompt.device)


def _unseen(prompt: Tensor, ids: list[int], cache: Any) -> Tensor:
    """The tokens that the KV cache does not have yet: the last, or all for a model without a cache."""
    new = torch.tensor([ids], device=prompt.device)
    return torch.cat([prompt, new], dim=1) if cache is None else new[:, -1:]


def eager_difference(model: SurveyedModel, ids: Tensor, clock: Clock) -> float:
    """The largest absolute difference of the outputs, with regard's attention and with transformers' eager one."""
    with clock.stage("comparison", 2) as step:
        ours = model.outputs(ids)
        step()
        with model.attention("eager"):
            eager = model.outputs(ids)
        pieces = zip(ours.split(64, dim=1), eager.split(64, dim=1), strict=True)
        return max(float((a.double() - b.double()).abs().max()) for a, b in pieces)


PART = "⋯"
"""Shown for a token that has only the first bytes of a character; the token that completes it shows the character."""


def readable(tokenizer: Any, ids: list[int]) -> tuple[str, ...]:
    r"""The display string of each token.

    Byte-level tokens (`Ġthe`, `Ċ`) become the text that their bytes spell (` the`, a line break). Where several tokens
    spell one character the last one shows it, and those before show `⋯`; bytes that no token completes stay bytes
    (`\xe2\x80`). SentencePiece's `▁` becomes a space and `<0x0A>` its byte; the `##` of a WordPiece tokenizer goes.
    Special tokens stay as they are, and so do tokens that were added to a byte-level vocabulary, which are text.
    """
    byte_level, as_is = _is_byte_level(tokenizer), set(tokenizer.all_special_ids)
    as_is |= set(tokenizer.get_added_vocab().values()) if byte_level else set()
    prefix = "##" if _is_word_piece(tokenizer) else ""
    spelled = [
        _as_it_is(piece) if i in as_is else _bytes_or_text(piece, byte_level, prefix)
        for i, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
    ]
    shown: list[str] = []
    for in_bytes, group in groupby(spelled, lambda piece: isinstance(piece, bytes)):
        run = list(group)
        shown += _decode(cast("list[bytes]", run)) if in_bytes else cast("list[str]", run)
    return tuple(shown)


def _decode(run: list[bytes]) -> list[str]:
    """What each of consecutive tokens adds to the text that their bytes spell together."""
    decoder = getincrementaldecoder("utf-8")(errors="backslashreplace")
    shown = [decoder.decode(piece) or PART for piece in run]
    unfinished = decoder.decode(b"", final=True)
    return [*shown[:-1], shown[-1].removesuffix(PART) + unfinished] if unfinished else shown


def _as_it_is(piece: str | None) -> str:
    return "" if piece is None else str(piece)


def _bytes_or_text(piece: str | None, byte_level: bool, prefix: str) -> bytes | str:
    """A token's text without the prefix of tokens within a word, or its bytes where it is spelled in bytes."""
    if piece is None:  # an id that the model has and the tokenizer has not
        return ""
    if byte_level and piece and all(character in _byte_of() for character in piece):
        return bytes(_byte_of()[character] for character in piece)
    if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
        return bytes([int(piece[3:5], 16)])
    return piece.removeprefix(prefix).replace("▁", " ")


def _is_byte_level(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "byte_decoder") or "ByteLevel" in _decoder(tokenizer)


def _is_word_piece(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "wordpiece_tokenizer") or "WordPiece" in _decoder(tokenizer)


def _decoder(tokenizer: Any) -> str:
    """The description of the decoder of a tokenizer of the `tokenizers` library."""
    return repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary encodes (Radford et al. 2019, GPT-2's encoder).

    Printable bytes of Latin-1 are themselves; the others are numbered from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
