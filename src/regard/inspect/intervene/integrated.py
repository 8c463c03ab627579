"""Integrated gradients on heads: the loss shared out among heads, so that the shares sum to what they do together.

Sundararajan, Taly & Yan 2017, *Axiomatic attribution for deep networks*, arXiv:1703.01365, §3, in the gates of heads
from the baseline 0 (all chosen heads out) to 1 (the model as it is), along the straight line:

    share of h = integral over a from 0 to 1 of dL/d(gate of h) where all chosen gates are a
               = integral of  sum z[h] . dL/dz[h]  at a z,  for heads of one layer

The integral is taken by Gauss and Legendre's rule. *Completeness*: shares sum to L(1) - L(0); what is missing is the
error of the rule, the residual, and is reported for each example.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.ablate import losses_without, measured
from regard.inspect.intervene.gates import slopes
from regard.inspect.intervene.heads import HeadName, Site, Sites, checked
from regard.inspect.intervene.loss import LossOf, Tick, all_of


@brief
@dataclass(frozen=True, eq=False)
class Integrated:
    """The share of each head in what all of them do to the loss of each example.

    Args:
        heads: by name.
        shares: [examples, heads], float64, in the unit of the loss; below 0 the head makes the loss smaller.
        change: [examples], L with the heads less L without them.

    >>> found = Integrated(((0, 0), (0, 1)), torch.tensor([[0.25, -1.0]]), change=torch.tensor([-0.5]))
    >>> found.residual
    tensor([0.2500])
    """

    heads: tuple[HeadName, ...]
    shares: Tensor
    change: Tensor
    caveat: str = (
        "Shares are averages over models in which all heads are quieter, which nobody trained; another path, or "
        "another baseline than 0, shares out differently."
    )

    @property
    def residual(self) -> Tensor:
        """What the shares lack of the change, [examples]: take more steps until it is small."""
        return self.change - self.shares.sum(1)


def integrated(
    model: nn.Module | None,
    batches: Iterable[Any],
    loss_of: LossOf,
    heads: Iterable[HeadName] | None = None,
    steps: int = 16,
    tick: Tick | None = None,
) -> Integrated:
    """Integrated gradients of the loss in the gates of heads: `steps` forward and backward passes per batch.

    Args:
        heads: which to share out among; None: all. The others stay as they are.
        steps: nodes of the rule.
        tick: called after each pass.

    Raises:
        ProblemError: heads that do not exist, no steps, or what `importance` raises.

    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(19, 32, layers=2, heads=2)
    >>> found = integrated(model, [torch.randint(19, (8, 11))], next_token_loss(model))
    >>> found.shares.shape, bool(found.residual.abs().max() < 1e-3)
    (torch.Size([8, 4]), True)
    """
    if steps < 1:
        raise ProblemError(f"steps is {steps}: the integral needs at least 1.")
    if heads is not None and not heads:
        raise ProblemError("no head was named: expected at least one, or None for all.")
    batches = all_of(batches)
    named = () if heads is None else tuple(dict.fromkeys(checked(heads)))
    base, all_heads = measured(model, batches, loss_of, named)
    chosen = all_heads if heads is None else named
    without = losses_without(model, batches, loss_of, chosen, "zero")
    shares = [_shares(model, batch, loss_of, chosen, steps, tick) for batch in batches]
    return Integrated(chosen, torch.cat(shares), base - without)


def _shares(
    model: nn.Module | None,
    batch: Any,
    loss_of: LossOf,
    chosen: tuple[HeadName, ...],
    steps: int,
    tick: Tick | None,
) -> Tensor:
    """[examples, chosen heads]."""
    sites = Sites(chosen)
    nodes, weights = np.polynomial.legendre.leggauss(steps)  # on [-1, 1]
    total = torch.zeros(())
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):

        def level(site: Site, heads: int, node: float = node) -> Tensor:
            gates = torch.ones(heads, dtype=torch.float64)
            gates[sites.of(site)] = node
            return gates

        found = slopes(model, batch, loss_of, level)
        total = total + weight * torch.stack([found.of(name) for name in chosen], 1)
        if tick is not None:
            tick()
    return total
