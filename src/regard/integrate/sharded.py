"""A forward pass of a transformers model over one rank's tokens of a sequence.

`regard.parallel.context_parallel` runs it: the inputs are whole on every rank, and the model gets the tokens of its
rank, with their positions in the whole sequence. The masks that it makes are those of the whole sequence, as regard
masks: causal, windows and padding are small whatever the length. The loss is that of the whole sequence.

A model whose layers mix tokens by anything but attention would compute something else from a part of the sequence, and
is refused, as are arguments whose meaning depends on all tokens.
"""

import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import find_packed_sequence_indices

from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, KeyLengths
from regard.describe.mask_by_table import Documents
from regard.errors import ProblemError, RefusalError
from regard.integrate.implementation import NAME, implementation_of
from regard.integrate.layer_mask import LayerMask
from regard.integrate.mask_function import sharded_masks
from regard.integrate.masks import MaskRequest, Predicate, to_mask
from regard.integrate.transformers import check_model, register

MODELS: type[nn.Module] = PreTrainedModel
"""Whose calls are sharded."""

IGNORED = -100
"""The label of a token without a loss, in transformers."""

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that mix tokens by attention alone."""

BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Scalings of RoPE that depend on the length: transformers takes it from the positions that a call gets."""


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


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a call by their meaning; all are of the whole sequence.

    Attributes:
        rest: arguments that are passed on.
        padding: bool [batch, tokens], where False is padding; None: there is none.
        documents: [batch, tokens] of packed sequences; None: there are none.
    """

    tokens: dict[str, Tensor]
    positions: Tensor
    padding: Tensor | None
    documents: Tensor | None
    labels: Tensor | None
    items: Any
    returns_tuple: bool
    rest: dict[str, Any]


def run_sharded(model: Any, open_shard: OpenShard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a model for this rank's tokens, and the loss of the whole sequence.

    Raises:
        RefusalError: the model, or an argument, has a meaning that a part of a sequence does not have.
        ProblemError: sizes that do not fit.
    """
    _check(model)
    inputs = _read(model, args, kwargs)
    with open_shard(inputs.positions.shape[1], _mask_of(model, inputs)) as shard, _by_regard(model):
        return _run(model, shard, inputs)


def _run(model: Any, shard: Shard, inputs: _Inputs) -> Any:
    given = {name: shard.shard(each, 1) for name, each in inputs.tokens.items()}
    given["position_ids"] = shard.shard(inputs.positions, 1)
    local = given["position_ids"].shape[1]
    # A mask of ones keeps transformers from taking jumps of the positions for packed sequences.
    rows = next(iter(given.values())).shape[0]
    ones = torch.ones(rows, local, dtype=torch.bool, device=inputs.positions.device)
    given["attention_mask"] = ones if inputs.padding is None else shard.shard(inputs.padding, 1)
    with sharded_masks(_masks(shard.tokens, inputs)):
        outputs = nn.Module.__call__(model, **given, **inputs.rest)
    if inputs.labels is not None:
        loss = _loss(model, shard, outputs.logits, inputs)
        outputs = type(outputs)(**{"loss": loss} | {k: v for k, v in outputs.items() if k != "loss"})
    return outputs.to_tuple() if inputs.returns_tuple else outputs


def _loss(model: Any, shard: Shard, logits: Tensor, inputs: _Inputs) -> Tensor:
    """The mean over all tokens that have a label: each rank adds its own, and all get the sum."""
    labels = cast(Tensor, inputs.labels)
    count = (labels != IGNORED).sum() if inputs.items is None else inputs.items
    own = model.loss_function(
        logits=logits,
        labels=None,
        vocab_size=logits.shape[-1],
        num_items_in_batch=count,
        shift_labels=shard.shard(labels, 1).contiguous(),
    )
    return shard.sum(own)


def _read(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    given = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    given = {name: value for name, value in given.items() if value is not None}
    tokens = {name: given.pop(name) for name in ("input_ids", "inputs_embeds", "token_type_ids") if name in given}
    whole = next((tokens[name] for name in ("input_ids", "inputs_embeds") if name in tokens), None)
    if whole is None:
        raise ProblemError(f"{type(model).__name__} in context_parallel: expected input_ids or inputs_embeds.")
    positions = given.pop("position_ids", None)
    mask = given.pop("attention_mask", None)
    padding = _padding(mask, whole)
    numbers = _positions(model, tokens.get("input_ids"), whole, padding) if positions is None else positions
    if positions is None or positions.ndim in (1, 2):
        numbers = numbers.expand(whole.shape[0], -1)
    parameters = inspect.signature(model.forward).parameters
    is_packed = mask is None and positions is not None and not _caches(model, given)
    found = _Inputs(
        tokens=tokens,
        positions=numbers,
        padding=padding,
        documents=find_packed_sequence_indices(numbers) if is_packed else None,
        labels=_next_tokens(given.pop("labels", None), given.pop("shift_labels", None)),
        items=given.pop("num_items_in_batch", None),
        returns_tuple=given.pop("return_dict", True) is False,
        rest=given | ({"use_cache": False} if "use_cache" in parameters else {}),
    )
    _check_arguments(model, found, given)
    return found


def _positions(model: Any, ids: Tensor | None, whole: Tensor, padding: Tensor | None) -> Tensor:
    """The positions that the model gives to the whole sequence, where a call has none."""
    first = _first_position(model)
    if first and ids is not None:  # tokens of padding are known by their id, and all have the position before
        is_token = ids.ne(first - 1).long()
        return is_token.cumsum(1) * is_token + first - 1
    if padding is not None and model.config.model_type == "opt":
        return padding.long().cumsum(1) * padding - 1
    return torch.arange(first, first + whole.shape[1], device=whole.device)


def _first_position(model: Any) -> int:
    """The position of the first token: 0, or the one after the id of padding (RoBERTa and its relatives)."""
    by_ids, by_sizes = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"
    for module in model.modules():
        counts = hasattr(module, by_ids) or hasattr(sys.modules[type(module).__module__], by_ids)
        if counts and hasattr(module, by_sizes) and hasattr(module, "position_embeddings"):
            return module.padding_idx + 1
    return 0


def _caches(model: Any, given: dict[str, Any]) -> bool:
    """Whether one process would use a cache: transformers looks for packed sequences only where it does not."""
    checkpoints = model.training and getattr(model, "is_gradient_checkpointing", False)
    return bool(given.get("use_cache", getattr(model.config, "use_cache", False))) and not checkpoints


def _padding(given: Any, whole: Tensor) -> Tensor | None:
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.shape != whole.shape[:2]:
        found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise RefusalError(
            f"attention_mask is {found} in context_parallel: expected the padding of the whole sequence, "
            f"{list(whole.shape[:2])}; a dense mask of all pairs is what a sharded sequence avoids."
        )
    return None if bool(given.bool().all()) else given.bool()


def _next_tokens(labels: Tensor | None, shifted: Tensor | None) -> Tensor | None:
    """The label of each token, shifted in the whole sequence: the next token of a rank's last one is on another."""
    if shifted is not None or labels is None:
        return shifted
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _mask_of(model: Any, inputs: _Inputs) -> Mask | None:
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


def _masks(tokens: int, inputs: _Inputs) -> Callable[..., Any]:
    """What makes the masks of the layers: of the whole sequence, at the sizes of the rank's call."""

    def make(
        function: Predicate, batch: int, queries: int, keys: int, device: Any, by_vmap: bool, padding: Tensor | None
    ) -> LayerMask:
        _check_function(function, inputs)
        request = MaskRequest(function, batch, tokens, tokens, 0, 0, inputs.padding, by_vmap, device)
        mask = to_mask(request)
        if inputs.documents is not None and _masks_get_positions():
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


@contextmanager
def _by_regard(model: Any) -> Generator[None]:
    """The model with regard's attention."""
    register()
    before = implementation_of(model.config)
    if before == NAME:
        yield
        return
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check(model: Any) -> None:
    """Raise `RefusalError` unless each output of the model belongs to a token, and only attention mixes tokens."""
    check_model(model)
    name, config = type(model).__name__, model.config
    known: list[Any] = [MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING]
    kinds = [kind for each in known for kind in _kinds(each.get(type(config), ()))]
    if not isinstance(model, tuple(kinds)) or getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is no language model of one sequence, or pools its tokens")
    if getattr(model, "pooler", None) is not None:
        raise _refusal(name, "its pooler reads the first token of a sequence, which is on one rank")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(name, "it takes no position_ids, and numbers the tokens that it gets from 0")
    others = sorted({*(getattr(config, "layer_types", None) or ())} - ATTENTION)
    if others or any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in model.modules()):
        raise _refusal(name, f"layers that mix tokens without attention ({', '.join(others) or 'convolutions'})")
    if scaling := sorted(BY_LENGTH & _scalings(getattr(config, "rope_parameters", None))):
        raise _refusal(name, f"its RoPE ({scaling[0]}) depends on the length of the sequence")


def _kinds(found: Any) -> tuple[type, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _scalings(parameters: Any) -> set[str]:
    """The kinds of RoPE in a config: one for all layers, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return {str(parameters.get("rope_type"))}.union(*map(_scalings, nested))


def _check_arguments(model: Any, inputs: _Inputs, given: dict[str, Any]) -> None:
    name = type(model).__name__
    if model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise _refusal(name, "gradient checkpointing: backward would call the layers again, outside of the ring")
    for keyword, why in (
        ("past_key_values", "decode with `attend_sharded` and a `ShardedCache`"),
        ("output_attentions", "each rank would have other rows"),
        ("logits_to_keep", "the last tokens are on one rank"),
        ("output_router_logits", "the loss of the experts' load is that of all tokens"),
    ):
        value = given.get(keyword, getattr(model.config, keyword, None) if keyword.startswith("output") else None)
        if value is not None and not (isinstance(value, bool | int) and not value):
            raise _refusal(name, f"{keyword}={value if isinstance(value, bool | int) else '...'}: {why}")
    if inputs.labels is not None and getattr(model, "loss_type", None) != "ForCausalLM":
        raise _refusal(name, "labels: the loss of a causal language model is known, and this one's is another")
    if inputs.padding is not None and getattr(model.config, "attention_chunk_size", None) is not None:
        raise _refusal(name, "its chunks begin at the first token that is no padding; leave attention_mask out")
    if inputs.documents is not None and getattr(model.config, "attention_chunk_size", None) is not None:
        raise _refusal(name, "packed sequences: its chunks begin at the first token of each of them")
    if any(getattr(module, "token_dropout", False) for module in model.modules()):
        raise _refusal(name, "token_dropout: its embeddings are scaled by the share of masked tokens in the sequence")
    if inputs.positions.ndim != 2:
        raise _refusal(name, f"position_ids {list(inputs.positions.shape)}: expected [batch, tokens]")


def _check_function(function: Predicate, inputs: _Inputs) -> None:
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


def _refusal(name: str, why: str) -> RefusalError:
    return RefusalError(f"{name} in context_parallel: {why}. Run this call in one process, outside of the context.")
