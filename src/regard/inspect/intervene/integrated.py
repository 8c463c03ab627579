"""Integrated gradients on heads: attribute the joint effect of heads on the loss to the single heads.

Sundararajan, Taly & Yan 2017, *Axiomatic attribution for deep networks*, arXiv:1703.01365, §3, in the gates of heads,
along the straight line from the baseline 0 (all chosen heads removed) to 1 (the model as it is):

    share of h = integral over a from 0 to 1 of dL/d(gate of h) where all chosen gates are a
               = integral of  sum z[h] . dL/dz[h]  at a z,  for heads of one layer

*Completeness*: shares sum to L(1) - L(0); the difference is the residual. No model is trained with its heads removed:
the loss of a real model varies strongly where the gates are small, and a fixed number of nodes leaves a large residual.
So the line is divided into panels, each integrated by Simpson's rule; neighbours share their end points. The losses at
its ends give each panel a residual, and the panel with the largest is halved until the total is small. (Rules of a
higher order need more passes where the loss is rough: 593 instead of 189 for SmolLM2 on 28 tokens.)
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError, RefusalError
from regard.inspect.intervene.ablate import baseline_losses
from regard.inspect.intervene.heads import Site, Sites
from regard.inspect.intervene.importance import slopes
from regard.inspect.intervene.loss import LossOf, Tick, all_of
from regard.inspect.names import HeadName, Heads, read_heads
from regard.integers import is_integer

TOLERANCE = 0.02
"""The residual that is accepted, as a share of the change."""

CANCELLING = 5.0
"""Limit of the root of the summed squares of the panels' residuals, in accepted residuals. Residuals have signs: their
sum can be small by chance while the shares are wrong."""

ROUNDING = 1e-5
"""The residual that is always accepted, as a share of the largest loss on the line: the rounding error of float32."""

NARROWEST = 2.0**-20
"""Panels of this width are not halved: float32 gates cannot differ by much less."""

PANELS = 8
"""Initial panels; they need 17 evaluations."""


@dataclass(frozen=True, eq=False)
class Integrated:
    """The share of each head in the joint effect of all heads on the loss of each example.

    Args:
        heads: by name.
        shares: [examples, heads], float64, in the unit of the loss; a negative share lowers the loss.
        change: [examples], the loss with the heads minus the loss without them.
        evaluations: forward and backward passes, over all batches.

    >>> found = Integrated(((0, 0), (0, 1)), torch.tensor([[0.25, -1.0]]), torch.tensor([-0.76]), evaluations=17)
    >>> found
    Integrated: 2 heads, 1 example, 17 evaluations
      example 0: change -0.76, shares sum to -0.75, residual -0.01 (1.3 % of the change)
      largest mean shares: (0, 1) -1, (0, 0) +0.25
      Shares are averages over models with all heads scaled down, which were never trained; another path or another \
baseline than 0 gives other shares.
    """

    heads: tuple[HeadName, ...]
    shares: Tensor
    change: Tensor
    evaluations: int = 0
    caveat: str = (
        "Shares are averages over models with all heads scaled down, which were never trained; another path or "
        "another baseline than 0 gives other shares."
    )

    @property
    def residual(self) -> Tensor:
        """The change minus the sum of the shares, [examples]."""
        return self.change - self.shares.sum(1)

    def __repr__(self) -> str:
        """A few lines: the examples with the largest residuals, and the heads with the largest shares."""
        examples, heads = self.shares.shape
        many = "example" if examples == 1 else "examples"
        mean = self.shares.mean(0)
        largest = mean.abs().argsort(descending=True)[:6].tolist()
        worst = (self.residual.abs() / self.change.abs()).argsort(descending=True)[:3].tolist()
        return "\n".join([
            f"Integrated: {heads} heads, {examples} {many}, {self.evaluations:,} evaluations",
            *(f"  example {e}: {_missing(self.change[e], self.residual[e])}" for e in worst),
            f"  largest mean shares: {', '.join(f'{self.heads[h]} {mean[h].item():+.3g}' for h in largest)}",
            f"  {self.caveat}",
        ])  # fmt: skip


def integrated(
    model: nn.Module | None,
    batches: Iterable[Any],
    loss_of: LossOf,
    heads: Heads | None = None,
    tolerance: float = TOLERANCE,
    most: int = 1000,
    tick: Tick | None = None,
) -> Integrated:
    """Integrated gradients of the loss in the gates of heads.

    A forward and a backward pass per evaluation: some 20 per batch where the loss is smooth in the gates, hundreds for
    all heads of a trained model.

    Args:
        heads: the heads to attribute to; None: all. The others do not change.
        tolerance: the residual that is accepted, as a share of the change, for each example.
        most: the limit of evaluations of a batch.
        tick: called after each evaluation.

    Raises:
        ProblemError: heads that do not exist, dropout, a tolerance or limit out of range, or an error of `importance`.
        RefusalError: the residual exceeds `tolerance` after `most` evaluations.

    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(19, 32, layers=2, heads=2)
    >>> found = integrated(model, [torch.randint(19, (8, 11))], next_token_loss(model))
    >>> found.shares.shape, bool((found.residual.abs() <= 0.02 * found.change.abs()).all())
    (torch.Size([8, 4]), True)
    """
    is_share = isinstance(tolerance, Real) and float(tolerance) > 0
    if not is_share or not is_integer(most, least=2 * PANELS + 1):
        raise ProblemError(
            f"tolerance is {tolerance} and most {most}: expected a share of the change above 0, and "
            f"{2 * PANELS + 1} evaluations or more."
        )
    if heads is not None and not heads:
        raise ProblemError("no head was named: expected at least one, or None for all.")
    batches = all_of(batches)
    named = () if heads is None else tuple(dict.fromkeys(read_heads(heads)))
    _, all_heads = baseline_losses(model, batches, loss_of, named)
    chosen = all_heads if heads is None else named
    lines = [_Line(model, batch, loss_of, chosen, tick) for batch in batches]
    shares = [line.integral(tolerance, most) for line in lines]
    changes = [line.losses(1.0) - line.losses(0.0) for line in lines]
    return Integrated(chosen, torch.cat(shares), torch.cat(changes), sum(line.evaluations for line in lines))


@dataclass(frozen=True, eq=False)
class _Panel:
    """A part of the line: the integral of the slopes [examples, heads], and its residual [examples]."""

    start: float
    stop: float
    shares: Tensor
    residual: Tensor


@dataclass(eq=False)
class _Line:
    """The losses and slopes of one batch with all chosen gates at a, from 0 to 1; each a is computed once."""

    model: nn.Module | None
    batch: Any
    loss_of: LossOf
    chosen: tuple[HeadName, ...]
    tick: Tick | None
    known: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict[float, tuple[Tensor, Tensor]])

    @property
    def evaluations(self) -> int:
        return len(self.known)

    def losses(self, a: float) -> Tensor:
        """[examples]."""
        return self._at(a)[0]

    def integral(self, tolerance: float, most: int) -> Tensor:
        """The shares, [examples, heads]: the panel with the largest residual is halved until the total is complete."""
        order, finished = count(), list[_Panel]()  # of panels with equal residuals the older one is first
        ends = [n / PANELS for n in range(PANELS + 1)]
        panels = [(-math.inf, next(order), self._panel(*ends)) for ends in pairwise(ends)]
        while True:
            every = [*finished, *(panel for _, _, panel in panels)]
            accepted = self._accepted(tolerance)
            if self._complete(every, accepted):
                return torch.stack([panel.shares for panel in every]).sum(0)
            if not panels or self.evaluations + 2 > most:
                raise RefusalError(self._unfinished(every, tolerance, accepted))
            _, _, worst = heapq.heappop(panels)
            for start, stop in pairwise((worst.start, (worst.start + worst.stop) / 2, worst.stop)):
                half = self._panel(start, stop)
                if stop - start <= NARROWEST:
                    finished.append(half)
                else:
                    heapq.heappush(panels, (-float((half.residual.abs() / accepted).max()), next(order), half))

    def _accepted(self, tolerance: float) -> Tensor:
        largest = torch.stack([losses.abs() for losses, _ in self.known.values()]).amax(0)
        return torch.maximum(tolerance * (self.losses(1.0) - self.losses(0.0)).abs(), ROUNDING * largest)

    def _complete(self, panels: list[_Panel], accepted: Tensor) -> bool:
        residuals = torch.stack([panel.residual for panel in panels])
        together = torch.maximum(residuals.sum(0).abs(), residuals.square().sum(0).sqrt() / CANCELLING)
        return bool((together <= accepted).all())

    def _unfinished(self, panels: list[_Panel], tolerance: float, accepted: Tensor) -> str:
        residuals = torch.stack([panel.residual for panel in panels])
        e = int((residuals.square().sum(0) / accepted.square()).argmax())
        worst = panels[int(residuals[:, e].abs().argmax())]
        change = self.losses(1.0)[e] - self.losses(0.0)[e]
        together = residuals[:, e].square().sum().sqrt().item()
        return (
            f"the integral is not complete after {self.evaluations:,} evaluations; example {e}: "
            f"{_missing(change, residuals[:, e].sum())}, and {together:.2g} as the root of the squares of all panels. "
            f"{100 * tolerance:.3g} % is accepted, and {CANCELLING:.0f} times that of the root. The largest residual "
            f"is at gates of {worst.start:.4g} to {worst.stop:.4g}. Allow more evaluations (most), accept more "
            "(tolerance), or name fewer heads."
        )

    def _panel(self, start: float, stop: float) -> _Panel:
        """Simpson's rule: exact for polynomials of degree 3."""
        middle, half = (start + stop) / 2, (stop - start) / 2
        weighed = ((start, 1 / 3), (middle, 4 / 3), (stop, 1 / 3))
        shares = torch.stack([weight * half * self._at(node)[1] for node, weight in weighed]).sum(0)
        return _Panel(start, stop, shares, self.losses(stop) - self.losses(start) - shares.sum(1))

    def _at(self, a: float) -> tuple[Tensor, Tensor]:
        """The losses [examples], and their slopes [examples, heads]."""
        if a not in self.known:
            sites = Sites(self.chosen)

            def level(site: Site, heads: int) -> Tensor:
                gates = torch.ones(heads, dtype=torch.float64)
                gates[sites.of(site)] = a
                return gates

            found = slopes(self.model, self.batch, self.loss_of, level)
            own = torch.stack([found.of(name) for name in self.chosen], 1)
            if not bool(found.losses.isfinite().all() and own.isfinite().all()):
                raise ProblemError(f"the loss, or its slope, is not finite where the gates are {a:.4g}.")
            self.known[a] = found.losses, own
            if self.tick is not None:
                self.tick()
        return self.known[a]


def _missing(change: Tensor, residual: Tensor) -> str:
    whole, lacking = float(change), float(residual)
    share = f"{100 * abs(lacking / whole):.2g} % of the change" if whole else "of no change"
    return f"change {whole:.3g}, shares sum to {whole - lacking:.3g}, residual {lacking:.2g} ({share})"
