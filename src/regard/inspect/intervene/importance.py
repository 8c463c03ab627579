"""The importance of heads by gradient: what the loss says, to first order, about taking each head out.

Michel, Levy & Neubig 2019, *Are sixteen heads really better than one?*, arXiv:1905.10650, §4.1, equation 2:

    I_h = E_x | sum over tokens t and channels c of  z[h, t, c] dL(x)/dz[h, t, c] |  =  E_x | dL(x)/d(gate of h) |

with z the outputs of the head. The absolute value is taken of each example, then the mean: in one backward pass of a
batch's mean loss, effects of opposite signs cancel, and what remains is smaller by a factor that says nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.gates import slopes
from regard.inspect.intervene.heads import by_layer
from regard.inspect.intervene.loss import LossOf, Tick, all_of
from regard.inspect.names import HeadName


@brief
@dataclass(frozen=True, eq=False)
class Importance:
    """The slope of each example's loss in the gate of each head.

    Args:
        heads: by name.
        slopes: [examples, heads], float64; below 0 the loss falls when the head gets louder.

    >>> found = Importance(((0, 0), (0, 1)), torch.tensor([[3.0, 1.0], [-3.0, 1.0]]))
    >>> found.scores, found.order  # opposite slopes do not cancel
    (tensor([3., 1.]), ((0, 1), (0, 0)))
    """

    heads: tuple[HeadName, ...]
    slopes: Tensor
    caveat: str = (
        "A slope says what a little less of a head would do; taking it out is more than a little, and where heads "
        "stand in for one another it says too little. Compare with ablation, and with random orders."
    )

    @property
    def scores(self) -> Tensor:
        """I_h of each head, [heads]."""
        return self.slopes.abs().mean(0)

    @property
    def scores_within_layers(self) -> Tensor:
        """I_h divided by the l2 norm over the heads of its layer, as Michel et al. do before they compare layers."""
        scores = self.scores.clone()
        for places in by_layer(self.heads).values():
            scores[places] = torch.nn.functional.normalize(scores[places], dim=0)
        return scores

    @property
    def order(self) -> tuple[HeadName, ...]:
        """The heads, least important first."""
        return tuple(self.heads[place] for place in self.scores.argsort(stable=True).tolist())


def importance(
    model: nn.Module | None, batches: Iterable[Any], loss_of: LossOf, tick: Tick | None = None
) -> Importance:
    """The importance of every head: one forward and one backward pass per batch.

    Args:
        batches, loss_of: what to measure on; see `loss.py`.
        tick: called after each batch.

    Raises:
        ProblemError: attention that is not regard's, or losses that are not one per example.

    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=2, heads=2)
    >>> found = importance(model, [torch.randint(19, (8, 11))], next_token_loss(model))
    >>> found.slopes.shape, len(found.order)
    (torch.Size([8, 4]), 4)
    """
    heads: tuple[HeadName, ...] | None = None
    rows: list[Tensor] = []
    for batch in all_of(batches):
        one = slopes(model, batch, loss_of)
        if heads is not None and one.heads != heads:
            raise ProblemError(f"batches met different heads: {len(heads)} and {len(one.heads)}.")
        heads = one.heads
        rows.append(one.values)
        if tick is not None:
            tick()
    assert heads is not None
    return Importance(heads, torch.cat(rows))
