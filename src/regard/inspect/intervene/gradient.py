"""Gradient x attention: attention through all layers, weighted by its positive gradient on a prediction.

Chefer, Gur & Wolf 2021, *Generic attention-model explainability*, arXiv:2103.15679, equations 5 and 6:

    R = I;   for each layer from the first on:   R <- R + M R,     M = mean over heads of (dy/dA * A)^+

with y the scalar to explain and ^+ the positive part. dy/dA[i, j] is dO[i] . v[j], with dO the gradient of the head's
output, so M is computed tile by tile from q, k, v, lse and dO, and only the chosen rows of R are stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.attention import Call
from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site, edit_outputs
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.relevance import Relevance, chosen_rows, through
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.tiles import Tile

CAVEAT = (
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
            `lambda: model(ids).logits[:, -1, token]`.
        rows: the rows of R to compute, usually the token whose logit is the target; -1 is the last.
        tick: called after each layer.

    Returns:
        R, including the initial identity: the token of a row has 1 more.

    Raises:
        ProblemError: a target without gradients, attention that is not regard's or that drops weights (training), or
            layers that are not self-attention over one text.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> gradient_attention(model, lambda: model(ids)[:, -1, 9], rows=[-1]).values.shape
    torch.Size([1, 1, 5])
    """
    layers: list[_Layer] = []

    def keep(site: Site, call: Call) -> Tensor:
        if call.dropout:
            raise ProblemError(f"layer {site.layer} drops weights (dropout {call.dropout}): call model.eval() first.")
        out = call.out if call.out.requires_grad else call.out.detach().requires_grad_()
        layers.append(_Layer(Weights.of(call), call.v.detach(), out))
        return out

    with torch.enable_grad(), edit_outputs(model, keep):
        y = target()
    gradients = _gradients(y, layers)
    counted, found = chosen_rows(rows, [layer.weights for layer in layers])
    for layer, gradient in zip(reversed(layers), reversed(gradients), strict=True):
        found = found + through(found, layer.weights, _rising(layer.v, gradient))
        if tick is not None:
            tick()
    return Relevance(counted, found, CAVEAT)


def _gradients(y: Tensor, layers: list[_Layer]) -> tuple[Tensor, ...]:
    if not layers:
        raise ProblemError("the target called no attention of regard's.")
    batch = layers[0].out.shape[0]
    if y.shape not in {(batch,), () if batch == 1 else (batch,)}:
        raise ProblemError(f"the target is {list(y.shape)}: expected one scalar per sequence, [{batch}].")
    if not y.requires_grad:
        raise ProblemError("the target has no gradients: let it run without torch.no_grad, inference_mode and detach.")
    return torch.autograd.grad(y.sum(), [layer.out for layer in layers], materialize_grads=True)


def _rising(v: Tensor, gradient: Tensor) -> Callable[[Tile], Tensor]:
    """M of a layer, tile by tile."""
    batch, kv_heads, _, v_dim = v.shape
    heads = gradient.shape[1]

    def matrix(tile: Tile) -> Tensor:
        rows, keys = tile.weights.shape[2:]
        own = v[:, :, tile.key : tile.key + keys].to(tile.weights.dtype)
        # the rows of all heads that share a value head are the rows of one product
        d_out = gradient[:, :, tile.rows].to(tile.weights.dtype).reshape(batch, kv_heads, -1, v_dim)
        d_weights = (d_out @ own.mT).view(batch, heads, rows, keys)
        return d_weights.mul_(tile.weights).clamp_(min=0).mean(1)

    return matrix
