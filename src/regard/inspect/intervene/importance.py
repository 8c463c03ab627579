"""The importance of heads by gradient: the first-order effect on the loss of removing each head.

Michel, Levy & Neubig 2019, *Are sixteen heads really better than one?*, arXiv:1905.10650, §4.1, equation 2:

    I_h = E_x | sum over tokens t and channels c of  z[h, t, c] dL(x)/dz[h, t, c] |  =  E_x | dL(x)/d(gate of h) |

with z the outputs of the head. The absolute value is taken per example, before the mean: in a backward pass of a
batch's mean loss, effects of opposite signs would cancel.

A gate is a factor on the output of a head: 1 leaves the head as it is, 0 removes it. Every example of a batch has its
own gates, so one backward pass gives the slopes of all heads and examples: the losses of examples are independent, so
the derivative of their sum in a gate is that of one example's loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.heads import Site, Sites, by_layer, edit_outputs
from regard.inspect.intervene.loss import LossOf, Tick, all_of, check_loss_of, of_examples
from regard.inspect.intervene.training import check_gradients, gradients_of
from regard.inspect.names import HeadName

Level = Callable[[Site, int], Tensor]
"""(layer, its heads) -> the gate of each head, [heads]."""


class Slopes(NamedTuple):
    """The losses [examples], and dL/d(gate) of every head, [examples, heads]; float64, on the CPU."""

    losses: Tensor
    sites: Sites
    values: Tensor

    @property
    def heads(self) -> tuple[HeadName, ...]:
        """The names of the heads, in the order of `values`."""
        return self.sites.names()

    def of(self, name: HeadName) -> Tensor:
        """dL/d(gate) of one head, [examples]."""
        return self.values[:, self.sites.columns(name)].sum(1)


def all_open(site: Site, heads: int) -> Tensor:
    """Gates of 1: the model as it is."""
    return torch.ones(heads)


def slopes(model: nn.Module | None, batch: Any, loss_of: LossOf, level: Level = all_open) -> Slopes:
    """The loss of each example of a batch, and its slope in the gate of each head. One forward and one backward pass.

    The gradients of the model's parameters stay as they were.

    Raises:
        ProblemError: the losses are not one per example, or they or a layer have no gradients.
    """
    check_loss_of(loss_of)
    gates: dict[Site, Tensor] = {}
    differentiated: set[Site] = set()

    def gated(site: Site, call: Call) -> Tensor:
        batch_size, heads = call.out.shape[:2]
        if site not in gates:  # one for a layer that attends several times, to one part of the text after the other
            gates[site] = level(site, heads).to(call.out).repeat(batch_size, 1).requires_grad_()
        if len(gates[site]) != batch_size:
            raise ProblemError(
                f"layer {site.layer} attended to {len(gates[site])} and to {batch_size} examples in one run: the loss "
                "of an example cannot be separated from that of another."
            )
        if torch.is_grad_enabled():
            differentiated.add(site)
        return call.out * gates[site][:, :, None, None]

    with torch.enable_grad():
        with edit_outputs(model, gated) as sites:
            losses = of_examples(loss_of(batch))
        _check(losses, gates, differentiated)
        found = gradients_of(losses.sum(), list(gates.values()))
    return Slopes(losses.detach().double().cpu(), sites, torch.cat(found, 1).double().cpu())


def _check(losses: Tensor, gates: dict[Site, Tensor], differentiated: set[Site]) -> None:
    if not gates:
        raise ProblemError("loss_of called no attention of regard's: there are no heads to score.")
    if not losses.requires_grad:
        raise ProblemError(
            "loss_of returned losses without gradients: let it run without torch.no_grad, inference_mode and detach."
        )
    check_gradients(gates, differentiated)
    if other := next((len(gate) for gate in gates.values() if len(gate) != len(losses)), None):
        raise ProblemError(
            f"loss_of returned {len(losses)} losses of {other} examples: expected one for each, not their mean "
            '(reduction="none", then a mean over tokens).'
        )


@brief
@dataclass(frozen=True, eq=False)
class Importance:
    """The slope of each example's loss in the gate of each head.

    Args:
        heads: by name.
        slopes: [examples, heads], float64; negative if a larger output of the head lowers the loss.

    >>> found = Importance(((0, 0), (0, 1)), torch.tensor([[3.0, 1.0], [-3.0, 1.0]]))
    >>> found.scores, found.order  # opposite slopes do not cancel
    (tensor([3., 1.]), ((0, 1), (0, 0)))
    """

    heads: tuple[HeadName, ...]
    slopes: Tensor
    caveat: str = (
        "A slope is the effect of a small change of a head; removal is a large change, and slopes understate heads "
        "that are redundant. Compare with ablation, and with random orders."
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
        batches, loss_of: the data and the loss; see `loss.py`.
        tick: called after each batch.

    Raises:
        ProblemError: attention that is not regard's or runs without gradients, or losses that are not one per example.

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
            raise ProblemError(f"batches ran different heads: {len(heads)} and {len(one.heads)}.")
        heads = one.heads
        rows.append(one.values)
        if tick is not None:
            tick()
    assert heads is not None
    return Importance(heads, torch.cat(rows))
