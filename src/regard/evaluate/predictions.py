"""The predictions of a model with a cache that is fed piece by piece, compared with those of the plain cache.

Every sample is a row of one batch, so weights are read once for all. Three values are stored for each predicted token:
its log-likelihood, the KL divergence of the distribution from that of the plain cache, and whether both have the same
most probable token.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.evaluate.intervals import Floats, Interval, drawn
from regard.integrate.cache_argument import as_argument

ROWS = 640
"""Predictions whose distributions over all tokens are in memory at once: 126 MB for a vocabulary of 49,152."""


class Feed(NamedTuple):
    """How a sample is fed: `first` tokens at once, then `step` by `step`."""

    first: int
    step: int

    def pieces(self, tokens: int) -> Iterator[slice]:
        """The pieces of a sample of this length."""
        start = 0
        while start < tokens:
            end = min(tokens, start + (self.first if start == 0 else self.step))
            yield slice(start, end)
            start = end


@dataclass(frozen=True)
class Predicted:
    """Means over each sample's scored tokens, [samples].

    Attributes:
        nll: negative log-likelihood in nats; its exponential is the perplexity.
        kl: KL divergence of the distributions from those of the plain cache, in nats.
        agree: share of tokens with the same most probable token in both.
        kept: tokens in the cache at the end; the maximum over the layers.
        nbytes: bytes of all layers at the end, per sample.
        seconds: total time.
    """

    nll: Floats
    kl: Floats
    agree: Floats
    kept: int
    nbytes: float
    seconds: float


@torch.no_grad()
def last_states(
    model: Any, ids: Tensor, scored: int, make: Callable[[], Any], feed: Feed, tell: Callable[[int, int], None]
) -> tuple[Tensor, Any]:
    """The last hidden states of the last `scored` tokens, [samples, scored, width], and the cache.

    Args:
        ids: int64 [samples, tokens].
        make: creates an empty cache of the model.
        tell: called with the tokens that were fed, and their total.
    """
    cache, tokens = make(), ids.shape[1]
    given = as_argument(model.model, cache)
    found: list[Tensor] = []
    for piece in feed.pieces(tokens):
        states = model.model(ids[:, piece], **given, use_cache=True).last_hidden_state
        found.append(states[:, max(0, tokens - scored - piece.start) :])
        tell(piece.stop, tokens)
    return torch.cat(found, dim=1), cache


@torch.no_grad()
def compared(model: Any, states: Tensor, plain: Tensor, targets: Tensor) -> tuple[Floats, Floats, Floats]:
    """(nll, kl, agree), each [samples], of states [samples, scored, width] against those of the plain cache.

    Args:
        targets: int64 [samples, scored], the true next tokens.
    """
    found = torch.zeros(3, *targets.shape, dtype=torch.float64)
    each = max(1, ROWS // targets.shape[0])
    for start in range(0, targets.shape[1], each):
        piece = slice(start, start + each)
        ours, theirs = (model.lm_head(t[:, piece]).float().log_softmax(-1) for t in (states, plain))
        found[0, :, piece] = -ours.gather(-1, targets[:, piece, None])[..., 0]
        found[1, :, piece] = (theirs.exp() * (theirs - ours)).sum(-1)
        found[2, :, piece] = ours.argmax(-1) == theirs.argmax(-1)
    nll, kl, agree = found.mean(-1).numpy()
    return nll, kl, agree


def predicted(
    model: Any, ids: Tensor, scored: int, make: Callable[[], Any], feed: Feed, plain: Tensor | None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Predicted, Tensor]:  # fmt: skip
    """The scores of the predictions with this cache, and its hidden states.

    Args:
        ids: int64 [samples, tokens + 1]: the last one is predicted and not fed.
        plain: the states of the plain cache; None if this is the plain cache.
    """
    start = time.perf_counter()
    states, cache = last_states(model, ids[:, :-1], scored, make, feed, tell)
    taken = time.perf_counter() - start
    scores = compared(model, states, states if plain is None else plain, ids[:, -scored:])
    kept = max(layer.kv.tokens for layer in cache.layers)
    return Predicted(*scores, kept, cache.bytes / len(ids), taken), states


# ---- intervals ------------------------------------------------------------------------------------------------------


def perplexity(found: Predicted) -> Interval:
    """The perplexity over all samples."""
    return drawn(found.nll, of=np.exp)


def beyond(found: Predicted, plain: Predicted) -> Interval:
    """The increase of the perplexity over the plain cache."""
    return drawn(found.nll, plain.nll, of=lambda ours, theirs: np.exp(ours) - np.exp(theirs))
