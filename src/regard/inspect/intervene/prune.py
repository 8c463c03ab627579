"""Pruning curves: the loss against the share of heads removed, for an order of heads and for random orders.

An order (by importance, by ablation, greedy, or your own) fits the text it is computed on; evaluate it on other text. A
model may tolerate the removal of many heads in any order, so a curve is informative only where it leaves the band of
random orders. Michel et al. 2019, arXiv:1905.10650, §4.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.ablate import baseline_losses, losses_without
from regard.inspect.intervene.loss import LossOf, Tick, all_of
from regard.inspect.intervene.replacement import ByBatch, check_replacement
from regard.inspect.names import HeadName, Heads, read_heads
from regard.inspect.weights.index import count_of

SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


@brief
@dataclass(frozen=True, eq=False)
class PruneCurve:
    """Losses with more and more heads removed; all tensors float64.

    Args:
        order: the heads, the first to remove first.
        counts: the number of removed heads, at each point.
        held_out: [points, examples], on held-out text.
        made_on: the same on the text that the order was computed on; None if that was not passed.
        random: [draws, points, examples], on the held-out text, of random orders of the same heads.

    >>> held_out = torch.tensor([[1.0], [3.0]])  # one text, with none of two heads out and with both
    >>> curve = PruneCurve(((0, 1), (0, 0)), (0, 2), held_out, None, torch.stack([held_out, held_out + 1]))
    >>> curve.shares, curve.losses, curve.band
    ((0.0, 1.0), tensor([1., 3.]), (tensor([1., 3.]), tensor([2., 4.])))
    """

    order: tuple[HeadName, ...]
    counts: tuple[int, ...]
    held_out: Tensor
    made_on: Tensor | None
    random: Tensor
    caveat: str = (
        "Where the curve does not leave the band of random orders, the order is no better than chance. The model was "
        "not trained again after heads were removed."
    )

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the heads that is removed, at each point."""
        return tuple(count / len(self.order) for count in self.counts)

    @property
    def losses(self) -> Tensor:
        """The mean loss on held-out text, [points]."""
        return self.held_out.mean(1)

    @property
    def band(self) -> tuple[Tensor, Tensor]:
        """The least and the largest mean loss of the random orders, both [points]."""
        means = self.random.mean(2)
        return means.amin(0), means.amax(0)

    def __str__(self) -> str:
        low, high = self.band
        lines = [f"{'pruned':>7}{'held out':>10}{'made on':>9}   random orders ({len(self.random)})"]
        for point, share in enumerate(self.shares):
            own = "" if self.made_on is None else f"{self.made_on[point].mean():.3f}"
            lines.append(f"{share:7.0%}{self.losses[point]:10.3f}{own:>9}   {low[point]:.3f} to {high[point]:.3f}")
        return "\n".join([*lines, self.caveat])


def prune_curve(
    model: nn.Module | None,
    held_out: Iterable[Any],
    loss_of: LossOf,
    order: Heads,
    *,
    made_on: Iterable[Any] | None = None,
    at: Sequence[float] = SHARES,
    draws: int = 5,
    seed: int = 0,
    by: ByBatch = "zero",
    tick: Tick | None = None,
) -> PruneCurve:
    """The loss against the share of heads removed, in this order and in random ones.

    Runs the held-out text `points * (1 + draws)` times, less where all orders agree (none or all removed), and the
    other text `points` times.

    Args:
        held_out: batches that the order was not computed on; `loss_of` as in `loss.py`.
        order: heads by name, the first to remove first: `importance(...).order`, `effect_order(effects)`, the heads of
            the last effect of `greedy`, or your own. Shares are shares of these heads.
        made_on: the batches that the order was computed on, to show how much it is overfitted.
        at: the shares, from 0 to 1.
        draws: random orders.
        tick: called after each run of a text with heads removed.

    Raises:
        ProblemError: heads that do not exist or are repeated, shares outside of 0 to 1, or dropout.

    >>> from regard.inspect.intervene.importance import importance
    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=2, heads=2)
    >>> text, other = torch.randint(19, (8, 11)), torch.randint(19, (8, 11))
    >>> order = importance(model, [text], next_token_loss(model)).order
    >>> curve = prune_curve(model, [other], next_token_loss(model), order, at=(0, 0.5, 1), draws=3)
    >>> curve.counts, curve.losses.shape, curve.random.shape
    ((0, 2, 4), torch.Size([3]), torch.Size([3, 3, 8]))
    """
    order = _checked_order(order)
    draws = count_of("draws", draws, "the number of random orders to compare with")
    counts, by = tuple(round(share * len(order)) for share in _checked_shares(at)), check_replacement(by)
    texts = all_of(held_out), None if made_on is None else all_of(made_on)
    known = {(0, frozenset[HeadName]()): baseline_losses(model, texts[0], loss_of, order)[0]}

    def curve(which: int, heads: Sequence[HeadName]) -> Tensor:
        batches = texts[which]
        assert batches is not None
        points: list[Tensor] = []
        for count in counts:
            out = frozenset(heads[:count])
            if (which, out) not in known:
                known[which, out] = losses_without(model, batches, loss_of, tuple(heads[:count]), by)
                if tick is not None:
                    tick()
            points.append(known[which, out])
        return torch.stack(points)

    random = torch.Generator().manual_seed(seed)
    shuffled = [[order[i] for i in torch.randperm(len(order), generator=random).tolist()] for _ in range(draws)]
    own = None if texts[1] is None else curve(1, order)
    return PruneCurve(order, counts, curve(0, order), own, torch.stack([curve(0, one) for one in shuffled]))


def _checked_shares(at: object) -> list[float]:
    """The shares of a list, a tuple, an array or a tensor, as Python's numbers."""
    try:
        shares = torch.as_tensor(at, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        shares = torch.empty(0)
    if shares.ndim != 1 or not len(shares) or not bool(((shares >= 0) & (shares <= 1)).all()):
        raise ProblemError(f"at is {at!r}: expected a list of shares from 0 to 1, such as [0, 0.5, 1].")
    return shares.tolist()


def _checked_order(order: Heads) -> tuple[HeadName, ...]:
    heads = read_heads(order)
    if not heads:
        raise ProblemError("the order is empty: name the heads to remove, the first to remove first.")
    if len(set(heads)) < len(heads):
        twice = next(head for head in heads if heads.count(head) > 1)
        raise ProblemError(f"the order names head {twice} twice.")
    return heads
