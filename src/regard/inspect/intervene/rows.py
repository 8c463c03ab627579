"""Attention rows replaced by other weights, for the adversary and the permutation test.

In chosen heads and rows, the head's output becomes the new weights times the current values of the layer. Weights and
predictions are compared with those of the unchanged model. A learned sink counts as a token whose value is zero.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.intervene.heads import Site, Sites, edit_outputs
from regard.inspect.intervene.training import check_no_dropout, without_dropout
from regard.inspect.measures.received import check_function
from regard.inspect.names import HeadName, Heads, read_heads
from regard.inspect.weights.index import counted_rows, listed
from regard.inspect.weights.lazy import Weights

CAVEAT = (
    "Attention weights are not importance. If other weights give the same output, these weights alone do not explain "
    "it (Jain & Wallace 2019); that does not show that the heads do nothing, and perhaps no trained model has such "
    "weights (Wiegreffe & Pinter 2019). Each of several redundant heads can be changed freely: test them together as "
    "well, and compare with permuted weights."
)

Predict = Callable[[], Tensor]
"""Runs the model and returns the logits whose softmax is compared, [batch, ..., classes]."""


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The model's own weights in chosen rows of the chosen heads of a layer.

    Args:
        heads: the chosen heads of the layer, in the order of their names.
        weights: [batch, chosen heads, rows, keys + 1]; the last column is the sink, 0 without one.
        allowed: bool, the same shape: which keys are visible.
    """

    heads: tuple[int, ...]
    weights: Tensor
    allowed: Tensor


@dataclass(frozen=True, eq=False)
class Baseline:
    """The unchanged model: its own rows by layer, and its prediction, log-probabilities [batch, ..., classes]."""

    model: nn.Module | None
    predict: Predict
    heads: tuple[HeadName, ...]
    rows: tuple[int, ...]
    own: Mapping[Site, OwnRows]
    log_probs: Tensor

    @property
    def batch(self) -> int:
        """The number of examples; each is compared by itself."""
        return self.log_probs.shape[0]


def observe_rows(model: nn.Module | None, predict: Predict, heads: Heads, rows: Sequence[int]) -> Baseline:
    """The model's own weights in these rows of these heads, and its prediction.

    Raises:
        ProblemError: no heads or rows, some that do not exist, or a row named twice; a layer that attends more than
            once; dropout; a prediction that is no batch of logits.
    """
    check_function(predict, "predict", "a function that runs the model and returns logits [batch, ..., classes]")
    named, rows = read_heads(heads), listed("row", rows)
    if not named or not rows:
        raise ProblemError(f"heads are {named} and rows {rows}: name at least one of each.")
    sites, own = Sites(named), dict[Site, OwnRows]()

    def look(site: Site, call: Call) -> None:
        if not (chosen := sites.of(site)):
            return
        if site in own:
            raise ProblemError(f"layer {site.layer} attended more than once: predict in one forward pass, no cache.")
        check_no_dropout(site, call)
        own[site] = _own(call, chosen, rows)

    with torch.no_grad(), edit_outputs(model, look, named), without_dropout(model):
        logits = predict()
    if not own:
        raise ProblemError("predict called no attention of regard's.")
    batch = next(iter(own.values())).weights.shape[0]
    if logits.ndim < 2 or logits.shape[0] != batch:
        raise ProblemError(f"predict returned {list(logits.shape)}: expected logits [{batch}, ..., classes].")
    return Baseline(model, predict, named, rows, own, logits.double().log_softmax(-1))


def _own(call: Call, heads: list[int], rows: Sequence[int]) -> OwnRows:
    weights, queries, keys = Weights.of(call), call.out.shape[2], call.k.shape[2]
    chosen = list(counted_rows("row", rows, queries))
    if (twice := next((row for row in chosen if chosen.count(row) > 1), None)) is not None:
        raise ProblemError(f"rows {tuple(rows)} name row {twice} of {queries} twice: name each row once.")
    own = torch.cat([weights.rows(row, row + 1) for row in chosen], 2)
    i, j = torch.tensor(chosen, device=own.device)[:, None], torch.arange(keys, device=own.device)[None, :]
    allowed = weights.keep(i, j).expand_as(own)
    sink = (1 - own.sum(-1, keepdim=True)).clamp(min=0) if call.sink is not None else torch.zeros_like(own[..., :1])
    has_sink = torch.full_like(sink, call.sink is not None, dtype=torch.bool)
    every = torch.cat([own, sink], -1)[:, heads], torch.cat([allowed, has_sink], -1)[:, heads]
    return OwnRows(tuple(heads), *every)


@contextmanager
def with_rows(subject: Baseline, other: Mapping[Site, Tensor]) -> Generator[None]:
    """Within the block, the chosen rows have these weights (layout: `OwnRows.weights`), and gradients reach them."""
    sites = Sites(subject.heads)

    def change(site: Site, call: Call) -> Tensor | None:
        if not sites.of(site):
            return None
        heads = torch.tensor(subject.own[site].heads, device=call.out.device)
        rows = torch.tensor(subject.rows, device=call.out.device)
        v = call.v[:, heads // (call.out.shape[1] // call.v.shape[1])]  # [batch, chosen heads, keys, v_dim]
        new = _weighted(other[site][..., :-1], v, subject.own[site].allowed[..., :-1])
        batch = torch.arange(call.out.shape[0], device=call.out.device)[:, None, None]
        return call.out.index_put((batch, heads[None, :, None], rows[None, None]), new.to(call.out.dtype))

    with edit_outputs(subject.model, change, subject.heads):
        yield


def _weighted(weights: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """`weights @ v`, row by row: a value that a row does not see may be NaN, and then its weight of 0 hides nothing.

    A row that sees such a value has no gradient: the prediction reads no such row, and 0 * NaN would be its gradient.

    Args:
        weights, allowed: [batch, chosen heads, rows, keys].
        v: [batch, chosen heads, keys, v_dim].
    """
    found: list[Tensor] = []
    for own, seen in zip(weights.split(1, 2), allowed.split(1, 2), strict=True):
        values = v.masked_fill(~seen.mT, 0.0).to(own.dtype)
        is_finite = values.isfinite().all(-1).all(-1)[..., None, None]
        found.append(torch.where(is_finite, own, own.detach()) @ values)
    return torch.cat(found, 2)


def prediction_shift(subject: Baseline, other: Mapping[Site, Tensor]) -> Tensor:
    """The change of the prediction under other weights: total variation, 0 to 1; float64 [batch].

    1/2 sum over classes of |p - p'|; if a prediction has several rows, the largest change counts.
    """
    with with_rows(subject, other):
        probs = subject.predict().double().softmax(-1)
    apart = (probs - subject.log_probs.exp()).abs().sum(-1) / 2
    return apart.flatten(1).amax(1) if apart.ndim > 1 else apart


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence along the last axis, nats: 0 if equal, ln 2 = 0.693 if the supports are disjoint.

    >>> divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    tensor(0.6931)
    """
    middle = (p + q) / 2
    return torch.special.entr(middle).sum(-1) - (torch.special.entr(p) + torch.special.entr(q)).sum(-1) / 2


def mean_divergence(subject: Baseline, other: Mapping[Site, Tensor]) -> Tensor:
    """The mean divergence over all chosen heads and rows, [batch]."""
    apart = [divergence(own.weights.double(), other[site].double()).flatten(1) for site, own in subject.own.items()]
    return torch.cat(apart, 1).mean(1)
