"""A forward pass of a transformers model over one rank's tokens of a sequence.

`regard.parallel.context_parallel` runs it: the inputs are whole on every rank, and the model gets the tokens of its
rank, with their positions in the whole sequence. The masks that it makes are those of the whole sequence, as regard
masks: causal, windows and padding are small whatever the length. The loss is that of the whole sequence.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from regard.calls import Route, current_route, route_calls
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, KeyLengths
from regard.describe.mask_by_table import Documents, TensorMask
from regard.errors import RefusalError
from regard.integrate.implementation import NAME, is_regard
from regard.integrate.layer_mask import LayerMask
from regard.integrate.mask_function import sharded_masks
from regard.integrate.masks import MaskRequest, Predicate, to_mask
from regard.integrate.sharded_inputs import Inputs, check_mixing, read_inputs, refusal
from regard.integrate.switch_implementation import with_implementation
from regard.integrate.transformers import register
from regard.plan.request import Request
from regard.state import State

MODELS: type[nn.Module] = PreTrainedModel
"""Whose calls are sharded."""


class Shard(Protocol):
    """One rank's part of a sequence, as `regard.parallel` makes it."""

    tokens: int

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """The rank's tokens of a tensor of the whole sequence."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks; its gradient is that of the rank's own part."""
        ...


OpenShard = Callable[[int, Mask | None], AbstractContextManager[Shard]]
"""Shards a sequence while a context is open; called with its number of tokens and its mask."""


def run_sharded(model: Any, open_shard: OpenShard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a model for this rank's tokens, and the loss of the whole sequence.

    Raises:
        RefusalError: the model, or an argument, has a meaning that a part of a sequence does not have.
        ProblemError: sizes that do not fit.
    """
    check_mixing(model)
    inputs = read_inputs(model, args, kwargs)
    with open_shard(inputs.positions.shape[1], _mask_of(model, inputs)) as shard, _by_regard(model):
        return _run(model, shard, inputs)


def _run(model: Any, shard: Shard, inputs: Inputs) -> Any:
    inputs_of_rank = {name: shard.shard(each, 1) for name, each in inputs.tokens.items()}
    inputs_of_rank["position_ids"] = shard.shard(inputs.positions, 1)
    local = inputs_of_rank["position_ids"].shape[1]
    # A mask of ones keeps transformers from taking jumps of the positions for packed sequences.
    rows = next(iter(inputs_of_rank.values())).shape[0]
    ones = torch.ones(rows, local, dtype=torch.bool, device=inputs.positions.device)
    inputs_of_rank["attention_mask"] = ones if inputs.padding is None else shard.shard(inputs.padding, 1)
    with sharded_masks(_masks(shard.tokens, inputs)), route_calls(_ring_without_dense(model, shard.tokens)):
        outputs = nn.Module.__call__(model, **inputs_of_rank, **inputs.rest)
    if inputs.labels is not None:
        loss = _loss(model, shard, outputs.logits, inputs)
        outputs = type(outputs)(**{"loss": loss} | {k: v for k, v in outputs.items() if k != "loss"})
    return outputs.to_tuple() if inputs.returns_tuple else outputs


def _loss(model: Any, shard: Shard, logits: Tensor, inputs: Inputs) -> Tensor:
    """The mean over all tokens that have a label: each rank adds its own, and all get the sum."""
    labels = cast(Tensor, inputs.labels)
    count = (labels != inputs.ignored).sum() if inputs.items is None else inputs.items
    own = model.loss_function(
        logits=logits,
        labels=None,
        vocab_size=logits.shape[-1],
        num_items_in_batch=count,
        ignore_index=inputs.ignored,
        shift_labels=shard.shard(labels, 1).contiguous(),
    )
    return shard.sum(own)


def _mask_of(model: Any, inputs: Inputs) -> Mask | None:
    """The mask by which work is balanced: of a layer that sees everything that the sequence allows."""
    is_causal = next((each.is_causal for each in model.modules() if hasattr(each, "is_causal")), True)
    mask: Mask | None = Causal() if is_causal else None
    if inputs.documents is not None:
        documents = Documents(inputs.documents)
        mask = documents if mask is None else mask & documents
    if inputs.padding is not None:
        last = inputs.padding.flip(1).long().argmax(1)
        lengths = KeyLengths(inputs.padding.shape[1] - last)
        mask = lengths if mask is None else mask & lengths
    return mask


def _masks(tokens: int, inputs: Inputs) -> Callable[..., Any]:
    """What makes the masks of the layers: of the whole sequence, at the sizes of the rank's call."""

    def make(
        function: Predicate, batch: int, queries: int, keys: int, device: Any, by_vmap: bool, padding: Tensor | None
    ) -> LayerMask:
        _check_function(function)
        request = MaskRequest(function, batch, tokens, tokens, 0, 0, inputs.padding, by_vmap, device)
        mask = to_mask(request)
        if inputs.documents is not None and (inputs.by_lengths or _masks_get_positions()):
            mask = Documents(inputs.documents) if mask is None else mask & Documents(inputs.documents)
        return LayerMask(mask, (batch, 1, queries, keys), 0, device, padding)

    return make


def _masks_get_positions() -> bool:
    """Whether the model passes positions to transformers' function of masks, which then looks for packed sequences.

    Some models do not (OPT, GPT-OSS, ModernBERT): in one process their tokens see those of the other sequences.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == masking_utils.__name__ and frame.f_code.co_name.startswith("create_"):
            return frame.f_locals.get("position_ids") is not None
        frame = frame.f_back
    return False


def _by_regard(model: Any) -> AbstractContextManager[None]:
    """The model with regard's attention."""
    register()
    return nullcontext() if is_regard(model.config) else with_implementation(model, NAME)


def _ring_without_dense(model: Any, tokens: int) -> Route:
    """The ring, which refuses a dense mask or bias of the rank's tokens: LayoutLM makes one in its own code."""
    ring = cast(Route, current_route.get())

    def route(request: Request) -> State:
        dense = _dense_tensors(request.mask, request.bias)
        found = next((t for t in dense if t.ndim and t.shape[-1] not in (1, tokens)), None)
        if found is not None:
            raise refusal(
                type(model).__name__,
                f"it makes a dense mask or bias {list(found.shape)} of the tokens of one rank, and their keys are all "
                f"{tokens}",
            )
        return ring(request)

    return route


def _dense_tensors(mask: Mask | None, bias: Bias | None) -> list[Tensor]:
    """The tensors [..., queries, keys] in what a layer attends with."""
    terms = [] if bias is None else bias.terms()
    biases = [term.tensor for term in terms if type(term) is TensorBias]
    return [mask.mask, *biases] if type(mask) is TensorMask else biases


def _check_function(function: Predicate) -> None:
    """Refuse functions that read tensors of the rank's tokens, as the mask is that of all tokens."""
    found = [function]
    for each in found:
        for value in inspect.getclosurevars(each).nonlocals.values() if hasattr(each, "__closure__") else ():
            values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
            found += [one for one in values if inspect.isfunction(one)]
            # Without padding the left padding of `chunked_overlay` is 0 everywhere.
            if any(isinstance(one, Tensor) and bool(one.any()) for one in values):
                raise RefusalError(
                    f"the mask {getattr(each, '__qualname__', each)} in context_parallel: it looks tokens up by their "
                    "place in the tensors of one rank. Pass packed sequences by position_ids."
                )
