"""What experiments that train have in common: a text as characters, the steps of the training, and losses.

The models are small `Decoder`s of `regard.nn`, and whatever maps tokens [batch, tokens] to logits [batch, tokens,
vocabulary]. A batch is (tokens, targets); a target of `IGNORE` does not count.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.evaluate.corpus import spread, text_of

IGNORE = -100
"""The target that the loss ignores, as in `torch.nn.functional.cross_entropy`."""

AT_ONCE = 2048
"""Tokens of a text in each step of the training."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64 [batch, tokens] each."""


@dataclass(frozen=True)
class Text:
    """A text as numbers of its characters: the first 90 % for training, the rest for validation.

    Attributes:
        alphabet: the characters, sorted; a token is an index into it.
        training, validation: int64 [characters].
    """

    alphabet: str
    training: Tensor
    validation: Tensor

    def batch(self, count: int, tokens: int, generator: torch.Generator) -> Batch:
        """Passages from random places of the training part; each target is the next character."""
        starts = torch.randint(len(self.training) - tokens, (count, 1), generator=generator)
        passages = self.training[starts + torch.arange(tokens + 1)]
        return passages[:, :-1], passages[:, 1:]

    def passages(self, count: int, tokens: int) -> Tensor:
        """Passages of the validation part, evenly spread: int64 [count, tokens + 1], for `losses`."""
        return spread(self.validation, count, tokens + 1)


@cache
def moby_dick() -> Text:
    """Moby-Dick by Melville 1851, in the public domain; npm brings it once.

    Rare characters, fewer than 100 in the book, become spaces.
    """
    text = text_of(None)
    common = "".join(sorted(c for c in set(text) if text.count(c) >= 100))
    number = {c: i for i, c in enumerate(common)}
    tokens = torch.tensor([number.get(c, number[" "]) for c in text])
    cut = len(tokens) * 9 // 10
    return Text(common, tokens[:cut], tokens[cut:])


def train(
    model: nn.Module, batch: Callable[[int], Batch], steps: int, *, rate: float = 3e-3, label: str = ""
) -> list[float]:
    """Train with AdamW, and return the loss of each step, in nats per target.

    The rate rises over the first tenth of the steps and falls to 0 by a cosine; gradients are cut to norm 1.

    Args:
        model: tokens [batch, tokens] to logits [batch, tokens, vocabulary].
        batch: the batch of a step.
        steps: of the optimizer.
        rate: the greatest learning rate.
        label: shown beside the progress, on a terminal.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 10)
    found: list[float] = []
    model.train()
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / warm, decay)
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        found.append(loss.item())
        _show(f"{label}: step {step + 1} of {steps}, loss {found[-1]:.3f}", last=step + 1 == steps)
    model.eval()
    return found


def train_on_text(
    model: nn.Module, text: Text, tokens: int, steps: int, seed: int, *, rate: float = 3e-3, label: str = ""
) -> None:
    """Train on passages of this many tokens from random places, `AT_ONCE` tokens in a step."""
    generator = seeded(seed)
    train(model, lambda _: text.batch(AT_ONCE // tokens, tokens, generator), steps, rate=rate, label=label)


def seeded(seed: int) -> torch.Generator:
    """A random generator of its own."""
    return torch.Generator().manual_seed(seed)


def parameters(model: nn.Module) -> int:
    """How many weights a model has."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def losses(model: nn.Module, passages: Tensor, at_once: int = 16) -> Tensor:
    """The loss of each next token of passages [count, tokens + 1], in nats: [count, tokens]."""
    parts: list[Tensor] = []
    for part in passages.split(at_once):
        logits: Any = model(part[:, :-1])
        parts.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(parts)


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of targets that have the greatest logit."""
    tokens, targets = batch
    counted = targets != IGNORE
    return (model(tokens).argmax(-1) == targets)[counted].float().mean().item()


def _show(line: str, *, last: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r{line:<70}", end="\n" if last else "", file=sys.stderr, flush=True)
