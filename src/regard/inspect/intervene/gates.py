"""Gates on heads: the output of each head times a number of its own for every example, and the loss's slope in it.

A gate of 1 leaves a head as it is, 0 takes it out. Every example of a batch has gates of its own, so one backward pass
gives the slopes of all heads and all examples: the losses of examples share nothing, so in the gate of an example their
sum has the slope of that example's loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention import Call
from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site, Sites, altered
from regard.inspect.intervene.loss import LossOf, of_examples
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
        """The heads by name, as they lie in `values`."""
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
        ProblemError: the losses are not one per example, or came without gradients.
    """
    gates: dict[Site, Tensor] = {}

    def gated(site: Site, call: Call) -> Tensor:
        batch_size, heads = call.out.shape[:2]
        if site not in gates:  # a layer that attends several times, to one part of the text after the other, has one
            gates[site] = level(site, heads).to(call.out).repeat(batch_size, 1).requires_grad_()
        if len(gates[site]) != batch_size:
            raise ProblemError(
                f"layer {site.layer} attended to {len(gates[site])} and to {batch_size} examples in one run: the loss "
                "of an example cannot be told from that of another."
            )
        return call.out * gates[site][:, :, None, None]

    with torch.enable_grad():
        with altered(model, gated) as sites:
            losses = of_examples(loss_of(batch))
        _check(losses, gates)
        found = torch.autograd.grad(losses.sum(), list(gates.values()), materialize_grads=True)
    return Slopes(losses.detach().double().cpu(), sites, torch.cat(found, 1).double().cpu())


def _check(losses: Tensor, gates: dict[Site, Tensor]) -> None:
    if not gates:
        raise ProblemError("loss_of called no attention of regard's: there are no heads to weigh.")
    if not losses.requires_grad:
        raise ProblemError(
            "loss_of gave losses without gradients: let it run without torch.no_grad, inference_mode and detach."
        )
    if other := next((len(gate) for gate in gates.values() if len(gate) != len(losses)), None):
        raise ProblemError(
            f"loss_of gave {len(losses)} losses of {other} examples: expected one for each, not their mean "
            '(reduction="none", then a mean over tokens).'
        )
