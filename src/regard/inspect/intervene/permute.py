"""The permutation test: does it matter to which tokens a head attends?

Jain & Wallace 2019, arXiv:1902.10186, §4.2.1: shuffle the weights of chosen rows among their visible tokens, and take
the median, over shuffles, of the change of the prediction. Near 0, the head's choice of tokens has no effect on this
prediction, and adversarial weights for it mean little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.inspect.brief import brief
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.rows import CAVEAT, OwnRows, Predict, observe_rows, prediction_shift
from regard.inspect.names import HeadName, Heads, group_text
from regard.inspect.weights.index import count_of


@brief
@dataclass(frozen=True, eq=False)
class Permuted:
    """The change of the prediction when weights are shuffled.

    Args:
        heads, rows: the heads and rows whose weights are shuffled.
        distances: total variation, 0 to 1, [draws, batch].

    >>> Permuted(((0, 1),), (-1,), torch.tensor([[0.1], [0.4], [0.2]])).median
    tensor([0.2000])
    """

    heads: tuple[HeadName, ...]
    rows: tuple[int, ...]
    distances: Tensor
    caveat: str = CAVEAT

    @property
    def median(self) -> Tensor:
        """The median over draws of each example, [batch]."""
        return self.distances.quantile(0.5, dim=0)

    def __str__(self) -> str:
        return (
            f"{group_text(self.heads)}: shuffled weights move the prediction by {self.median.mean():.3f} "
            f"(median of {len(self.distances)} shuffles, mean of {self.distances.shape[1]} examples).\n{self.caveat}"
        )


@torch.no_grad()
def permuted(
    model: nn.Module | None,
    predict: Predict,
    heads: Heads,
    rows: Sequence[int] = (-1,),
    *,
    draws: int = 100,
    seed: int = 0,
    tick: Tick | None = None,
) -> Permuted:
    """The change of the prediction when the weights of some heads are shuffled, each head and row by itself.

    The arguments are those of `adversary`. Costs `draws` forward passes. A learned sink keeps its weight.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> permuted(model, lambda: model(ids)[:, -1], [(0, 1), (1, 0)], draws=7).median.shape
    torch.Size([1])
    """
    draws = count_of("draws", draws, "the number of shuffles")
    subject, random = observe_rows(model, predict, heads, rows), torch.Generator().manual_seed(seed)
    distances: list[Tensor] = []
    for _ in range(draws):
        distances.append(
            prediction_shift(subject, {site: shuffle_weights(own, random) for site, own in subject.own.items()})
        )
        if tick is not None:
            tick()
    return Permuted(subject.heads, subject.rows, torch.stack(distances))


def shuffle_weights(own: OwnRows, random: torch.Generator) -> Tensor:
    """The weights of each row, permuted among its visible tokens."""
    allowed = own.allowed[..., :-1]
    lots = torch.rand(allowed.shape, generator=random).to(allowed.device)
    drawn = lots.masked_fill(~allowed, 2.0).argsort(-1)  # visible tokens in random order, then the others
    places = (~allowed).to(torch.int8).sort(dim=-1, stable=True).indices  # visible tokens in order, then the others
    tokens = own.weights[..., :-1]
    return torch.cat([tokens.scatter(-1, places, tokens.gather(-1, drawn)), own.weights[..., -1:]], -1)
