"""Attention rollout: attention followed back through the layers to the tokens that went in.

Abnar & Zuidema 2020, *Quantifying attention flow in transformers*, arXiv:2005.00928, §3: with the skip connection as
half of each layer,

    R = B_L ... B_2 B_1,     B_l = 1/2 (mean over heads of A_l + I)

R[i, j] is how much of row i after the last layer came from token j. Rows sum to 1, less what learned sinks took.
"""

from collections.abc import Sequence

from torch import Tensor

from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.relevance import Relevance, chosen_rows, through
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Tile

CAVEAT = (
    "Rollout follows attention weights, which are not importance: values, output projections, MLPs and the real share "
    "of the skip connections are left out."
)


def rollout(weights: Sequence[Weights], rows: Sequence[int], tick: Tick | None = None) -> Relevance:
    """Rows of the rollout through all of these layers. O(tokens^2) time a layer, O(m tokens) memory.

    Args:
        weights: of each layer from the first on, as `observe(model, lambda look: look.weights)` keeps them; fewer
            layers give the rollout up to there.
        rows: the tokens asked about; -1 is the last.
        tick: called after each layer.

    >>> import torch
    >>> from regard import Causal, attend
    >>> from regard.inspect.observing.observe import observe
    >>> q = torch.zeros(1, 2, 3, 4)  # even attention, twice
    >>> with observe(each=lambda look: look.weights) as seen:
    ...     _ = attend(q, q, q, mask=Causal()), attend(q, q, q, mask=Causal())
    >>> rollout([one.value for one in seen], [-1]).values[0, 0]  # (1/6, 1/6, 2/3) of the first layer
    tensor([0.3194, 0.2361, 0.4444])
    """
    counted, found = chosen_rows(rows, weights)
    for layer in reversed(weights):
        found = (found + through(found, layer, _mean_of_heads)) / 2
        if tick is not None:
            tick()
    return Relevance(counted, found, CAVEAT)


def _mean_of_heads(tile: Tile) -> Tensor:
    return tile.weights.mean(1)
