"""The prompt of `regard generate`: its tokens, and how many more the model may write."""

from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError

USUAL = 256
"""Tokens that are written where nobody said how many; fewer where the model was not made for so many."""


def prompt_ids(tokenizer: Any, text: str, *, chat: bool) -> Tensor:
    """The tokens of a prompt, int64 [1, tokens]: as a question in the model's chat template, or as it is.

    Raises:
        ProblemError: the template fails, or there are no tokens.
    """
    if chat:
        try:
            said = [{"role": "user", "content": text.strip()}]
            ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # noqa: BLE001  a template is a program, which raises what it likes
            why = " ".join(str(error).split())[:160]
            raise ProblemError(
                f"the model's chat template fails: {why}. Give the prompt as it is, with --raw."
            ) from None
    else:
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise ProblemError(f"the prompt {text[:40]!r} makes no token in this model: give a word or more.")
    return torch.tensor([ids])


def room(model: Any, prompt: int, asked: int | None, window: int | None) -> int:
    """The tokens to write: those asked for, else as many as usual and as the model was made for.

    Args:
        prompt: its tokens.
        window: tokens that the cache keeps near one another; None for all, however far.

    Raises:
        ProblemError: the model was not made for so many positions.
    """
    context = positions(model)
    if context is None:
        return USUAL if asked is None else asked
    if window is not None:
        if window > context:
            raise ProblemError(f"--window {window:,} is more than the {context:,} positions the model was made for.")
        return USUAL if asked is None else asked
    left = context if model.config.is_encoder_decoder else context - prompt
    if prompt > context or left < (asked or 1):
        raise ProblemError(
            f"the prompt is {prompt:,} tokens and {asked or USUAL:,} are to be written, and the model was made for "
            f"{context:,} positions: shorten it, write fewer (--tokens), or keep a window of them (--window)."
        )
    return min(USUAL, left) if asked is None else asked


def positions(model: Any) -> int | None:
    """The positions that the model was made for; None for no limit known."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
