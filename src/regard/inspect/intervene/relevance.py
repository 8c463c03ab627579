"""Products of the layers' matrices, row by row: attention rollout, and gradient x attention.

A row of the product is a vector times the matrix of the last layer, times that of the layer before, and so on: m x
tokens elements in memory, while each matrix is computed in tiles of the weights and never stored.

Abnar & Zuidema 2020, *Quantifying attention flow in transformers*, arXiv:2005.00928, §3: with the skip connection as
half of each layer,

    R = B_L ... B_2 B_1,     B_l = 1/2 (mean over heads of A_l + I)

R[i, j] is the share of token j in row i after the last layer. Rows sum to 1, minus the shares of learned sinks.

Chefer, Gur & Wolf 2021, *Generic attention-model explainability*, arXiv:2103.15679, equations 5 and 6: attention
through all layers, weighted by its positive gradient on a prediction,

    R = I;   for each layer from the first on:   R <- R + M R,     M = mean over heads of (dy/dA * A)^+

with y the scalar to explain and ^+ the positive part. dy/dA[i, j] is dO[i] . v[j], with dO the gradient of the head's
output, so M is computed tile by tile from q, k, v, lse and dO, and only the chosen rows of R are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.brief import brief, shown
from regard.inspect.intervene.heads import Site, edit_outputs
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.training import check_gradients, check_no_dropout, gradients_of
from regard.inspect.measures.received import check_function
from regard.inspect.weights.index import counted_rows, listed
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Tile


@brief
@dataclass(frozen=True, eq=False)
class Relevance:
    """How much each token matters to chosen rows.

    Args:
        rows: which rows.
        values: [batch, rows, tokens].
        caveat: a warning to show beside the values.

    >>> print(Relevance((2,), torch.tensor([[[0.1, 0.6, 0.3]]]), "Weights are not importance."))
    sequence 0, row 2: token 1 0.600, token 2 0.300, token 0 0.100
    Weights are not importance.
    """

    rows: tuple[int, ...]
    values: Tensor
    caveat: str

    def __str__(self) -> str:
        best = self.values.topk(min(5, self.values.shape[2]), dim=2)
        lines = [
            f"sequence {b}, row {row}: " + ", ".join(f"token {t} {v:.3f}" for v, t in zip(top, where, strict=True))
            for b, (tops, wheres) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
            for row, top, where in zip(self.rows, tops, wheres, strict=True)
        ]
        return "\n".join([*lines, self.caveat])


def through(rows: Tensor, weights: Weights, matrix: Callable[[Tile], Tensor]) -> Tensor:
    """`rows @ M`, with M one layer's matrix, given tile by tile.

    Args:
        rows: [batch, m, queries].
        matrix: for a tile of weights, the same part of M: [batch, rows of the tile, its keys].

    Returns:
        [batch, m, keys]
    """
    product = rows.new_zeros(*rows.shape[:2], weights.shape[3])
    for tile in weights.tiles():
        own = rows[:, :, tile.rows]
        if own.any():  # below the last layer, rows after the chosen ones have no share
            product[:, :, tile.key : tile.key + tile.weights.shape[3]] += own @ matrix(tile)
    return product


def chosen_rows(rows: Sequence[int], weights: Sequence[Weights]) -> tuple[tuple[int, ...], Tensor]:
    """(the rows counted from 0, unit vectors [batch, m, tokens]): what the product begins with.

    Raises:
        ProblemError: no layers, layers that are not self-attention over the same tokens, or rows that do not exist.
    """
    rows = listed("row", rows)
    if isinstance(weights, Weights):
        raise ProblemError("weights are those of one layer: pass a list, from the first layer to the last.")
    if not isinstance(cast(object, weights), Sequence):
        raise ProblemError(
            f"weights is {shown(weights)}: expected those of each layer, [call.weights for call in calls] of "
            "observe(model)."
        )
    if not weights:
        raise ProblemError("there are no layers: pass the weights of each, from the first to the last.")
    for layer, one in enumerate(cast("Sequence[object]", weights)):
        if not isinstance(one, Weights):
            raise ProblemError(
                f"layer {layer} is a {type(one).__name__}: expected Weights, such as [call.weights for call in calls] "
                "of observe(model)."
            )
    batch, _, queries, tokens = weights[0].shape
    for layer, one in enumerate(weights):
        if (one.shape[0], *one.shape[2:]) != (batch, tokens, tokens) or one.first_positions != (0,):
            raise ProblemError(
                f"layer {layer} has {one.shape[2]} queries at position {max(one.first_positions)} and {one.shape[3]} "
                f"keys, of {one.shape[0]} sequences: products of layers need self-attention over the same {queries} "
                "tokens in every one, a whole text at a time and without a cache."
            )
    if not rows:
        raise ProblemError("no rows were chosen: name at least one token.")
    counted = counted_rows("row", rows, tokens)
    units = torch.zeros(len(rows), tokens, dtype=weights[0].dtype, device=weights[0].q.device)
    units[range(len(rows)), counted] = 1.0
    return counted, units.expand(batch, -1, -1).clone()


ROLLOUT_CAVEAT = (
    "Rollout multiplies attention weights, which are not importance: it ignores values, output projections, MLPs and "
    "the true share of the skip connections."
)


def rollout(weights: Sequence[Weights], rows: Sequence[int], tick: Tick | None = None) -> Relevance:
    """Rows of the rollout through all of these layers. O(tokens^2) time a layer, O(m tokens) memory.

    Args:
        weights: the weights of each layer, from the first, as `observe(model, lambda look: look.weights)` returns
            them; the first layers alone give the rollout up to the last of these.
        rows: the rows to compute; -1 is the last.
        tick: called after each layer.

    >>> import torch
    >>> from regard import Causal, attend
    >>> from regard.inspect.observing.observe import observe
    >>> q = torch.zeros(1, 2, 3, 4)  # uniform attention, twice
    >>> with observe(each=lambda look: look.weights) as seen:
    ...     _ = attend(q, q, q, mask=Causal()), attend(q, q, q, mask=Causal())
    >>> rollout([one.value for one in seen], [-1]).values[0, 0]  # (1/6, 1/6, 2/3) of the first layer
    tensor([0.3194, 0.2361, 0.4444])
    """
    counted, found = chosen_rows(rows, weights)
    for layer in reversed(weights):
        found = found.to(layer.q.device)  # layers may be on several
        found = (found + through(found, layer, lambda tile: tile.weights.mean(1))) / 2
        if tick is not None:
            tick()
    return Relevance(counted, found, ROLLOUT_CAVEAT)


GRADIENT_CAVEAT = (
    "Gradient x attention is a first-order estimate of the effect of attention weights on one scalar; it leaves out "
    "what flows through values and MLPs. Compare with ablation."
)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer's weights, its values [batch, kv_heads, keys, v_dim], and its output, whose gradient is computed."""

    weights: Weights
    v: Tensor
    out: Tensor


def gradient_attention(
    model: nn.Module | None, target: Callable[[], Tensor], rows: Sequence[int], tick: Tick | None = None
) -> Relevance:
    """Rows of Chefer's relevance. One forward and one backward pass, then O(tokens^2) time a layer; O(tokens) memory.

    Args:
        target: runs the model and returns the scalar to explain of each sequence, [batch]: a logit, as
            `lambda: model(ids).logits[:, -1, token]`. Further runs of a model within `torch.no_grad` count as
            constants.
        rows: the rows of R to compute, usually the token whose logit is the target; -1 is the last.
        tick: called after each layer.

    Returns:
        R, including the initial identity: the token of a row has 1 more.

    Raises:
        ProblemError: a target without gradients, attention that is not regard's or that drops weights (training), or
            layers that are not self-attention over one text, once each.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> gradient_attention(model, lambda: model(ids)[:, -1, 9], rows=[-1]).values.shape
    torch.Size([1, 1, 5])
    """
    check_function(target, "target", "a function that runs the model and returns a scalar of each sequence, [batch]")
    by_site: dict[Site, _Layer] = {}

    def keep(site: Site, call: Call) -> Tensor | None:
        check_no_dropout(site, call)
        if not torch.is_grad_enabled():
            return None
        if site in by_site:
            raise ProblemError(
                f"layer {site.layer} attended more than once: the target must run one forward pass, of a model whose "
                "layers attend once each."
            )
        out = call.out if call.out.requires_grad else call.out.detach().requires_grad_()
        by_site[site] = _Layer(Weights.of(call), call.v.detach(), out)
        return out

    with torch.enable_grad(), edit_outputs(model, keep) as sites:
        y = target()
    check_gradients(sites.heads, by_site)
    layers = list(by_site.values())
    gradients = _gradients(y, layers)
    counted, found = chosen_rows(rows, [layer.weights for layer in layers])
    for layer, gradient in zip(reversed(layers), reversed(gradients), strict=True):
        found = found.to(layer.out.device)  # layers may be on several
        found = found + through(found, layer.weights, _weighted_by_gradient(layer.v, gradient))
        if tick is not None:
            tick()
    return Relevance(counted, found, GRADIENT_CAVEAT)


def _gradients(y: Tensor, layers: list[_Layer]) -> tuple[Tensor, ...]:
    if not layers:
        raise ProblemError("the target called no attention of regard's.")
    batch = layers[0].out.shape[0]
    if y.shape not in {(batch,), () if batch == 1 else (batch,)}:
        raise ProblemError(f"the target is {list(y.shape)}: expected one scalar per sequence, [{batch}].")
    if not y.requires_grad:
        raise ProblemError("the target has no gradients: let it run without torch.no_grad, inference_mode and detach.")
    return gradients_of(y.sum(), [layer.out for layer in layers])


def _weighted_by_gradient(v: Tensor, gradient: Tensor) -> Callable[[Tile], Tensor]:
    """M of a layer, tile by tile."""
    batch, kv_heads, _, v_dim = v.shape
    heads = gradient.shape[1]

    def matrix(tile: Tile) -> Tensor:
        rows, keys = tile.weights.shape[2:]
        own = v[:, :, tile.key : tile.key + keys].to(tile.weights.dtype)
        # the rows of all heads that share a value head are the rows of one product
        d_out = gradient[:, :, tile.rows].to(tile.weights.dtype).reshape(batch, kv_heads, -1, v_dim)
        d_weights = (d_out @ own.mT).view(batch, heads, rows, keys)
        d_weights.masked_fill_(tile.weights == 0, 0.0)  # a hidden value may be NaN
        return d_weights.mul_(tile.weights).clamp_(min=0).mean(1)

    return matrix
