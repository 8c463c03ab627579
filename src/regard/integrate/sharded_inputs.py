"""The arguments of a call of a transformers model by their meaning, and which of them a part of a sequence can have.

A model whose layers mix tokens by anything but attention would compute something else from a part of the sequence, and
is refused, as are arguments whose meaning depends on all tokens.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import find_packed_sequence_indices

from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_argument import NAMES
from regard.integrate.implementation import names_in_forward
from regard.integrate.mask_function import COMPUTE_WITH_MASKS
from regard.integrate.packed import ids_of
from regard.integrate.transformers import check_model

IGNORED = -100
"""The label of a token without a loss, in transformers, where a call has no `ignore_index`."""

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that mix tokens by attention alone."""

BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Scalings of RoPE that depend on the length: transformers takes it from the positions that a call gets."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call by their meaning; all are of the whole sequence.

    Attributes:
        rest: arguments that are passed on.
        padding: bool [batch, tokens], where False is padding; None: there is none.
        documents: [batch, tokens] of packed sequences; None: there are none.
        by_lengths: whether the call names them by their lengths; then every layer keeps them apart.
        ignored: the label of a token without a loss.
    """

    tokens: dict[str, Tensor]
    positions: Tensor
    padding: Tensor | None
    documents: Tensor | None
    by_lengths: bool
    labels: Tensor | None
    ignored: int
    items: Any
    returns_tuple: bool
    rest: dict[str, Any]


def read_inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The arguments of a call by their meaning.

    Raises:
        RefusalError: an argument has a meaning that a part of a sequence does not have.
        ProblemError: there are no tokens.
    """
    arguments = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    arguments |= arguments.pop("kwargs", {})
    arguments = {name: value for name, value in arguments.items() if value is not None}
    tokens = {
        name: arguments.pop(name) for name in ("input_ids", "inputs_embeds", "token_type_ids") if name in arguments
    }
    whole = next((tokens[name] for name in ("input_ids", "inputs_embeds") if name in tokens), None)
    if whole is None:
        raise ProblemError(f"{type(model).__name__} in context_parallel: expected input_ids or inputs_embeds.")
    positions = arguments.pop("position_ids", None)
    mask = arguments.pop("attention_mask", None)
    padding = _padding(mask, whole)
    numbers = _positions(model, tokens.get("input_ids"), whole, padding) if positions is None else positions
    if positions is None or positions.ndim in (1, 2):
        numbers = numbers.expand(whole.shape[0], -1)
    parameters = inspect.signature(model.forward).parameters
    ignored = arguments.pop("ignore_index", IGNORED)
    documents = _documents(arguments, whole)
    is_packed = mask is None and positions is not None and not _caches(model, arguments)
    found = Inputs(
        tokens=tokens,
        positions=numbers,
        padding=padding,
        documents=find_packed_sequence_indices(numbers) if documents is None and is_packed else documents,
        by_lengths=documents is not None,
        labels=_next_tokens(arguments.pop("labels", None), arguments.pop("shift_labels", None), ignored),
        ignored=ignored,
        items=arguments.pop("num_items_in_batch", None),
        returns_tuple=arguments.pop("return_dict", True) is False,
        rest=arguments | ({"use_cache": False} if "use_cache" in parameters else {}),
    )
    _check_arguments(model, found, arguments)
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


def _caches(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether one process would use a cache: transformers looks for packed sequences only where it does not."""
    checkpoints = model.training and getattr(model, "is_gradient_checkpointing", False)
    return bool(arguments.get("use_cache", getattr(model.config, "use_cache", False))) and not checkpoints


def _documents(arguments: dict[str, Any], whole: Tensor) -> Tensor | None:
    """Packed sequences that the call names by their lengths, which are taken out of the arguments."""
    q_ends, k_ends = arguments.pop("cu_seq_lens_q", None), arguments.pop("cu_seq_lens_k", None)
    if q_ends is None or k_ends is None:
        return None
    batch, tokens = whole.shape[:2]
    return ids_of(q_ends, k_ends, batch, tokens, tokens)


def _padding(mask: Any, whole: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != whole.shape[:2]:
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise RefusalError(
            f"attention_mask is {found} in context_parallel: expected the padding of the whole sequence, "
            f"{list(whole.shape[:2])}; a dense mask of all pairs is what a sharded sequence avoids."
        )
    return None if bool(mask.bool().all()) else mask.bool()


def _next_tokens(labels: Tensor | None, shifted: Tensor | None, ignored: int) -> Tensor | None:
    """The label of each token, shifted in the whole sequence: the next token of a rank's last one is on another."""
    if shifted is not None or labels is None:
        return shifted
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def check_mixing(model: Any) -> None:
    """Raise `RefusalError` unless each output of the model belongs to a token, and only attention mixes tokens."""
    check_model(model)
    name, config = type(model).__name__, model.config
    known: list[Any] = [MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING]
    kinds = [kind for each in known for kind in _kinds(each.get(type(config), ()))]
    if not isinstance(model, tuple(kinds)) or getattr(config, "is_encoder_decoder", False):
        raise refusal(name, "it is no language model of one sequence, or pools its tokens")
    if getattr(model, "pooler", None) is not None:
        raise refusal(name, "its pooler reads the first token of a sequence, which is on one rank")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise refusal(name, "it takes no position_ids, and numbers the tokens that it gets from 0")
    if config.model_type in COMPUTE_WITH_MASKS:
        raise refusal(name, "it computes with its mask, over the keys of all tokens, before attention does")
    others = sorted({*(getattr(config, "layer_types", None) or ())} - ATTENTION)
    if others or any(isinstance(module, nn.Conv1d | nn.RNNBase) for module in model.modules()):
        raise refusal(name, f"layers that mix tokens without attention ({', '.join(others) or 'convolutions'})")
    if getattr(config, "trigram_input", False):
        raise refusal(name, "trigram_input: the embedding of a token is that of its neighbours as well")
    if scaling := sorted(BY_LENGTH & _scalings(getattr(config, "rope_parameters", None))):
        raise refusal(name, f"its RoPE ({scaling[0]}) depends on the length of the sequence")


def _kinds(found: Any) -> tuple[type, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _scalings(parameters: Any) -> set[str]:
    """The kinds of RoPE in a config: one for all layers, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return {str(parameters.get("rope_type"))}.union(*map(_scalings, nested))


def _check_arguments(model: Any, inputs: Inputs, arguments: dict[str, Any]) -> None:
    name = type(model).__name__
    if model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise refusal(name, "gradient checkpointing: backward would call the layers again, outside of the ring")
    for keyword, why in (
        *((each, "decode with `attend_sharded` and a `ShardedCache`") for each in NAMES),
        ("output_attentions", "each rank would have other rows"),
        ("logits_to_keep", "the last tokens are on one rank"),
        ("output_router_logits", "the loss of the experts' load is that of all tokens"),
    ):
        value = arguments.get(keyword, getattr(model.config, keyword, None) if keyword.startswith("output") else None)
        if value is not None and not (isinstance(value, bool | int) and not value):
            raise refusal(name, f"{keyword}={value if isinstance(value, bool | int) else '...'}: {why}")
    if inputs.labels is not None and not has_causal_loss(model):
        raise refusal(name, "labels: the loss of a causal language model is known, and this one's is another")
    if inputs.padding is not None and getattr(model.config, "attention_chunk_size", None) is not None:
        raise refusal(name, "its chunks begin at the first token that is no padding; leave attention_mask out")
    if inputs.documents is not None and getattr(model.config, "attention_chunk_size", None) is not None:
        raise refusal(name, "packed sequences: its chunks begin at the first token of each of them")
    if any(getattr(module, "token_dropout", False) for module in model.modules()):
        raise refusal(name, "token_dropout: its embeddings are scaled by the share of masked tokens in the sequence")
    if inputs.positions.ndim != 2:
        raise refusal(name, f"position_ids {list(inputs.positions.shape)}: expected [batch, tokens]")


def has_causal_loss(model: Any) -> bool:
    """Whether the loss is transformers' own of a causal language model.

    GPT-2 and BERT (`...LMHeadModel`) have no type of loss and take the default. XLNet and XLM compute another one.
    """
    kind = getattr(model, "loss_type", None)
    if kind is not None or "loss_function" not in names_in_forward(type(model))[0]:
        return kind == "ForCausalLM"
    return model.loss_function is ForCausalLMLoss


def refusal(name: str, why: str) -> RefusalError:
    """The error of a model, or of a call of it, that a part of a sequence cannot have."""
    return RefusalError(f"{name} in context_parallel: {why}. Run this call in one process, outside of the context.")
