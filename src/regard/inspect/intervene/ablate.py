"""Ablation: `ablated`, its effect on the loss, and greedy orders in which to remove heads.

A head is replaced at the output of attention, where heads are still separate, in every family of models. The output
projection mixes them: a slice of its output is not a head. A gate between the two, as in Qwen3-Next, still multiplies
what replaces a head: a mean then varies from token to token.

Ablating one head at a time understates what heads do: of four redundant heads the model can lose any one, but not all
four. Ablate groups too.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.brief import shown
from regard.inspect.intervene.heads import Site, Sites, edit_outputs
from regard.inspect.intervene.loss import Effect, LossOf, all_of, losses
from regard.inspect.intervene.replacement import By, ByBatch, as_replacement, check_replacement
from regard.inspect.intervene.training import without_dropout
from regard.inspect.names import HeadName, Heads, read_heads


@contextmanager
def ablated(model: nn.Module | None, heads: Heads, by: By = "zero") -> Generator[None]:
    """Within the block, the output of these heads is zero, their mean, or their output on other inputs.

    Works in training (gradients flow through all other heads), and in generation with a KV cache: zero and overall
    means always, means per position while the text is no longer than the texts of the means (not in the steps of
    transformers' cross-attention, nor under masks of four dimensions: these do not tell the position). Compiled models
    run uncompiled within the block; exported programs (torch.export) are not affected. Switch gradient checkpointing
    off: a layer that runs again in the backward pass is ablated only within the block and in its thread.

    Args:
        model: the model with the layers; other models that run within the block are not ablated. None for a function
            that calls `attend`, whose calls are counted from 0 at the start of the block.
        heads: by name, (layer, head).
        by: "zero"; `mean_outputs(...)`; `Resample(outputs_of(...))`.

    Raises:
        ProblemError: a head that does not exist, at its call; a layer that never attended, or attention that is not
            regard's, when the block ends.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> with torch.no_grad(), ablated(model, [(0, 2), (1, 3)]):
    ...     logits = model(ids)
    >>> torch.equal(logits, model(ids))
    False
    """
    named, replacement = read_heads(heads), as_replacement(by)
    sites = Sites(named)

    def change(site: Site, call: Call) -> Tensor | None:
        if not (own := sites.of(site)):
            return None
        gone = torch.zeros(call.out.shape[1], dtype=torch.bool)
        gone[own] = True
        return torch.where(gone.to(call.out.device)[:, None, None], replacement.outputs(site, call), call.out)

    with edit_outputs(model, change, named):
        yield


def ablation_effects(
    model: nn.Module | None,
    batches: Iterable[Any],
    loss_of: LossOf,
    groups: Iterable[Heads] | None = None,
    by: ByBatch = "zero",
) -> Iterator[Effect]:
    """The effect of ablation on the loss, group by group.

    Costs one run of all batches per group, and one before. An iterator, so that callers can show progress or stop.

    Args:
        batches, loss_of: the data and the loss; see `loss.py`.
        groups: heads that are ablated together; None: every head of the model by itself, layer by layer.
        by: as in `ablated`, or a function that returns one for each batch: a `Resample` belongs to one batch.

    Raises:
        ProblemError: a head that does not exist, or dropout, at the first effect.

    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> model, batch = Decoder(19, 32, layers=2, heads=2), torch.randint(19, (8, 11))
    >>> effects = ablation_effects(model, [batch], next_token_loss(model), [[(0, 1)], [(1, 0), (1, 1)]])
    >>> [(effect.heads, effect.losses.shape) for effect in effects]
    [(((0, 1),), torch.Size([8])), (((1, 0), (1, 1)), torch.Size([8]))]
    """
    batches, by = all_of(batches), check_replacement(by)
    if not isinstance(cast(object, groups), Iterable | None):
        raise ProblemError(f"groups is {shown(groups)}: expected lists of heads, such as [[(0, 1)], [(1, 0), (1, 1)]].")
    named = None if groups is None else [read_heads(group) for group in groups]

    def effects() -> Iterator[Effect]:
        base, all_heads = baseline_losses(model, batches, loss_of)
        for group in [(name,) for name in all_heads] if named is None else named:
            yield Effect(group, base, losses_without(model, batches, loss_of, group, by))

    return effects()


def greedy(
    model: nn.Module | None,
    batches: Iterable[Any],
    loss_of: LossOf,
    heads: Heads | None = None,
    by: ByBatch = "zero",
) -> Iterator[Effect]:
    """Remove heads greedily: at each step the head without which the loss is least.

    For H heads the k-th step runs all batches H - k times: take as many steps as you need (`itertools.islice`). Each
    effect is that of all heads removed so far, the newest last; `effect.heads` is an order for `prune_curve`. The order
    fits these batches, so measure it on others.

    Args:
        heads: to choose from; None: all of the model.

    Raises:
        ProblemError: as in `ablation_effects`.

    >>> from itertools import islice
    >>> from regard.inspect.intervene.loss import next_token_loss
    >>> from regard.nn import Decoder
    >>> model, batch = Decoder(19, 32, layers=2, heads=2), torch.randint(19, (8, 11))
    >>> first, second = islice(greedy(model, [batch], next_token_loss(model)), 2)
    >>> len(first.heads), len(second.heads), second.heads[:1] == first.heads
    (1, 2, True)
    """
    batches, by, chosen = all_of(batches), check_replacement(by), None if heads is None else read_heads(heads)

    def steps() -> Iterator[Effect]:
        base, all_heads = baseline_losses(model, batches, loss_of, chosen or ())
        left, gone = list(all_heads if chosen is None else dict.fromkeys(chosen)), ()
        while left:
            tried = [
                Effect((*gone, name), base, losses_without(model, batches, loss_of, (*gone, name), by)) for name in left
            ]
            best = min(tried, key=_mean_loss)
            gone = best.heads
            left.remove(gone[-1])
            yield best

    return steps()


def effect_order(effects: Iterable[Effect]) -> tuple[HeadName, ...]:
    """Heads by the loss when each is ablated alone, least first.

    Raises:
        ProblemError: an effect is of several heads.

    >>> base = torch.zeros(2)
    >>> effect_order([Effect(((0, 1),), base, base + 0.3), Effect(((1, 0),), base, base + 0.1)])
    ((1, 0), (0, 1))
    """
    single = list(effects)
    if many := next((effect.heads for effect in single if len(effect.heads) != 1), None):
        raise ProblemError(f"an effect is that of {len(many)} heads together: an order needs effects of single heads.")
    return tuple(effect.heads[0] for effect in sorted(single, key=_mean_loss))


def baseline_losses(
    model: nn.Module | None, batches: tuple[Any, ...], loss_of: LossOf, named: Heads = ()
) -> tuple[Tensor, tuple[HeadName, ...]]:
    """The loss of every example, [examples], and the names of all heads. The heads in `named` must exist.

    Raises:
        ProblemError: a head that does not exist, or dropout.
    """
    names: tuple[HeadName, ...] = ()
    found: list[Tensor] = []
    for batch in batches:
        with edit_outputs(model, lambda site, call: None, named) as sites, without_dropout(model):
            found.append(losses([batch], loss_of))
        names = names or sites.names()
    if not names:
        raise ProblemError("loss_of called no attention of regard's: there are no heads to change.")
    return torch.cat(found), names


def losses_without(
    model: nn.Module | None, batches: tuple[Any, ...], loss_of: LossOf, heads: tuple[HeadName, ...], by: ByBatch
) -> Tensor:
    """The loss of every example without these heads, [examples]."""
    found: list[Tensor] = []
    for batch in batches:  # a new block for each, so that calls without a model are counted from 0
        with ablated(model, heads, by(batch) if callable(by) else by):
            found.append(losses([batch], loss_of))
    return torch.cat(found)


def _mean_loss(effect: Effect) -> float:
    return effect.losses.mean().item()
