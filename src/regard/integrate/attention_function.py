"""The attention function that models of transformers call, computed by regard.

Regard computes what a model's `eager_attention_forward` computes, in float32 or better: grouped heads without copies,
`softcap`, sinks (`s_aux`, a logit per head; `sinks`, also one per query), T5's `position_bias`, keys that an indexer
chose (`indices`, in DeepSeek-V3.2). Two things differ on purpose: a query that may see no key (padding on the left)
gives 0, where eager averages keys that it should not see; and dropout draws its own random numbers.
"""

import contextvars
import functools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from transformers.utils import output_capturing

from regard.cache.store import CachedTensor
from regard.calls import after_dropped, current_observers, current_route
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import TensorMask
from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_evicting import EvictingLayer, Pending, latest, take_latest
from regard.integrate.cache_latent import EvictingLatentLayer
from regard.integrate.cache_layers import dense
from regard.integrate.implementation import SINK_BESIDE_WEIGHTS, UNMASKED_SEE_ALL, WITHOUT_EFFECT, check_keywords
from regard.integrate.latent import Latents, SplitLatents, absorbed, attend_latents, expanded, sizes_of
from regard.integrate.layer_call import run_layer
from regard.integrate.layer_mask import LayerMask
from regard.integrate.lazy import opened
from regard.integrate.packed import kept_apart
from regard.integrate.sinks import attend_with_sink, sink_of
from regard.torch_internals import in_transform, is_mapped

Stored = CachedTensor | Latents | SplitLatents
"""Keys, or values, as the attention function reads them. Latents are both at once."""

_collector: Any = output_capturing._active_collector  # pyright: ignore[reportPrivateUsage]
"""What transformers records of the pass in this thread."""


def attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, queries, qk_dim]
    key: Any,  # [batch, kv_heads, keys, qk_dim], Tensor | LazyTensor
    value: Any,  # [batch, kv_heads, keys, v_dim]
    attention_mask: LayerMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    indices: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: (out [batch, queries, heads, v_dim], weights or None).

    `indices` [batch, queries, chosen] are the keys that an indexer chose for each query (DeepSeek sparse attention);
    those of them that the mask hides stay hidden. `position_ids`, `use_cache` and `sliding_window` have no effect
    (`WITHOUT_EFFECT`); most models pass them, and names take less time than entries of `kwargs`. `cu_seq_lens_q` and
    `cu_seq_lens_k` [sequences + 1] are where packed sequences begin and end, which see nothing of each other then.

    The weights `[batch, heads, queries, keys]` are computed where `output_attentions` is true, before dropout.

    Raises:
        RefusalError: a keyword that changes the result in a way that regard does not support.
        ProblemError: tensors or masks that do not fit each other.
    """
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:  # flash attention needs both
        sizes, causal = (query.shape[0], query.shape[2], key.shape[2]), _is_causal(module, is_causal)
        attention_mask = kept_apart(attention_mask, cu_seq_lens_q, cu_seq_lens_k, sizes, causal)
    if (
        type(attention_mask) is LayerMask
        and type(query) is type(key) is type(value) is Tensor
        and s_aux is sinks is position_bias is indices is None
        and not (output_attentions or is_dynamo_compiling() or (dropout and module.training))
        and not attention_mask.is_mapped
        and (not kwargs or kwargs.keys() <= WITHOUT_EFFECT.keys())
        and not (latest.get() or current_observers.get() or current_route.get() or _collector.get())
    ):  # most calls
        known = attention_mask.known
        if known is not None:
            is_like, scale, cap, run, keys, offset = known
            if (
                (scaling is scale or (type(scaling) is float and scaling == scale))
                and softcap is cap
                # a nested tensor, also one in torch.func.vmap, would end the process in torch's guard
                and not (query.is_nested or key.is_nested or value.is_nested or in_transform())
                and is_like(query, key, value)
            ):
                return run(query, key, value, keys, offset), None
        (batch, _, queries, _), (k_batch, _, keys, _) = query.shape, key.shape
        if batch == k_batch and (batch, 1, queries, keys) == attention_mask.call:
            return run_layer(query, key, value, attention_mask, scaling, softcap), None
    check_keywords(module, kwargs)
    options = {"scale": scaling, "softcap": softcap, "sink": s_aux if s_aux is not None else sinks}
    wants_weights = output_attentions or _is_recorded()
    more = _More(is_causal, position_bias, indices, dropout if module.training else 0.0, wants_weights)
    return _attention(module, query, key, value, attention_mask, options, more)


class _More(NamedTuple):
    """Arguments of `attention` that are not passed on as they are; no dropout in evaluation."""

    is_causal: bool | None
    position_bias: Tensor | None
    indices: Tensor | None
    dropout: float
    wants_weights: bool


def _attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, given: Any, options: dict[str, Any], more: _More
) -> tuple[Tensor, Tensor | None]:
    """The results of `attention` for any call, also over a cache that drops tokens."""
    found = None if torch.compiler.is_compiling() else take_latest(key, value)
    k, v = opened(key, value)
    if found is None and isinstance(k, Pending):
        raise RefusalError(
            f"a padded batch over a cache that drops tokens: {type(module).__name__} reads the keys of another layer, "
            "whose rows keep different tokens. Generate from prompts of one length, or use a cache that keeps all."
        )
    batch, keys = sizes_of(k)
    if found is not None:
        layer, is_unchanged = found
        _check_bias(layer, more.position_bias)
        if layer.is_padded(given):
            _check_weights(layer, more.wants_weights)
            return _by_row(module, layer, query, given, options | {"dropout": more.dropout}, is_unchanged), None
        given = layer.mask_for(given, query.shape[2], keys)
    keep, bias, offset = _mask_and_bias(module, query.shape[2], keys, given, more)
    if query.shape[0] == 1 < batch:  # one set of learned queries for all rows
        query = query.expand(batch, -1, -1, -1)
    options = options | {"mask": keep, "bias": bias, "offset": offset}
    dropped = given.dropped if isinstance(given, LayerMask) else 0
    with after_dropped(dropped, found is not None and found[0].kv.has_gaps):
        out = _attend(module, query, k, v, dropout=more.dropout, **options)
    if found is not None:
        found[0].observe(_observe_queries(module, found[0], query), keep, options["scale"])
    weights = _weights(module, query, k, options) if more.wants_weights else None
    return out.transpose(1, 2).contiguous(), weights


def _mask_and_bias(
    module: nn.Module, queries: int, keys: int, given: LayerMask | Tensor | None, more: _More
) -> tuple[Mask | None, Bias | None, int | Tensor]:
    """(mask, bias, position of the first query) of all that a call gives."""
    keep, bias, offset = _mask_of(module, queries, keys, given, more.is_causal)
    if more.indices is not None:
        chosen = _mask_of_indices(more.indices, keys)
        keep = chosen if keep is None else keep & chosen
    if more.position_bias is not None:
        bias = TensorBias(more.position_bias) if bias is None else TensorBias(more.position_bias) + bias
    return keep, bias, offset


def _attend(module: nn.Module, query: Tensor, key: Stored, value: Stored, **options: Any) -> Tensor:
    if isinstance(key, Latents | SplitLatents):
        return attend_latents(module, query, key, **options | {"sink": sink_of(options["sink"])})
    return attend_with_sink(query, key, cast(CachedTensor, value), **options)


def _observe_queries(module: nn.Module, layer: EvictingLayer, query: Tensor) -> Tensor:
    """The queries that meet the entries of a layer."""
    return absorbed(module, query) if isinstance(layer, EvictingLatentLayer) else query


def _by_row(
    module: nn.Module, layer: EvictingLayer, query: Tensor, given: Any, options: dict[str, Any], is_unchanged: bool
) -> Tensor:
    """The attention of a padded batch to a layer that evicts, [batch, queries, heads, v_dim]."""
    options = options | {"sink": sink_of(options["sink"])}  # its rows have fewer queries than sinks of one per query

    def run(q: Tensor, found: tuple[Any, Any], keep: Mask | None) -> Tensor:
        with after_dropped(layer.get_seq_length() - sizes_of(found[0])[1], layer.kv.has_gaps):
            return _attend(module, q, *found, mask=keep, **options)

    observed = functools.partial(_observe_queries, module, layer)
    out = layer.attend_by_row(given, query, run, observed, options["scale"], is_unchanged)
    return out.transpose(1, 2).contiguous()


def _check_weights(layer: EvictingLayer, wants_weights: bool) -> None:
    if wants_weights:
        raise RefusalError(
            f"the weights of a padded batch over {layer.kv!r}: its rows keep different tokens, so there is no one "
            "matrix of them. Leave output_attentions out, or compute one row at a time."
        )


def _check_bias(layer: EvictingLayer, bias: Tensor | None) -> None:
    if bias is not None:
        raise RefusalError(
            f"{layer.kv!r} drops tokens, and this model adds a bias by position to the scores of all: which entries "
            "belong to the remaining tokens is not known. Use a cache that keeps all."
        )


def _mask_of(
    module: nn.Module, queries: int, keys: int, given: LayerMask | Tensor | None, is_causal: bool | None
) -> tuple[Mask | None, Bias | None, int | Tensor]:
    """(mask, bias, position of the first query) of what transformers passes as the mask."""
    if isinstance(given, LayerMask):
        rows, columns = given.shape[2:]
        if given.is_mapped and (rows, columns) == (queries, keys):
            return *_of_bools(given.dense()), 0
        if given.mask is None or (rows, columns) == (queries, keys):  # None: of an encoder, however many keys it has
            return given.mask, None, given.offset_tensor if torch.compiler.is_compiling() else given.offset
        if rows in (1, queries) and columns in (1, keys):  # MiniMax's mask of one key broadcasts, as a tensor would
            return *_of_bools(given.dense()), 0
        raise ProblemError(
            f"the mask is for {rows} queries and {columns} keys, and {type(module).__name__} has {queries} and {keys}: "
            "other keys than its cache announced. If a call with this cache failed before, remove its tokens from all "
            'layers by crop(), or call reset(); else use attn_implementation="eager" for this model.'
        )
    if isinstance(given, Tensor):
        if given.dtype == torch.bool:
            return *_of_bools(given), 0
        if not given.is_floating_point():
            raise ProblemError(
                f"attention_mask is {given.dtype} {list(given.shape)}: a mask of four dimensions is bool (True keeps) "
                "or floating point (added to the scores)."
            )
        return None, TensorBias(given), 0
    # Without a mask the first query is at the first key, also where a static cache returns slots of future tokens.
    return (Causal() if _is_causal(module, is_causal) and queries > 1 else None), None, 0


def _of_bools(keep: Tensor) -> tuple[Mask | None, Bias | None]:
    """(mask, bias) of a table: a bias where `torch.vmap` maps over it, as a mask is the same for all rows."""
    if not is_compiling() and is_mapped(keep):
        return None, TensorBias(torch.where(keep, 0.0, -torch.inf))
    return TensorMask(keep), None


def _is_causal(module: nn.Module, said: bool | None) -> bool:
    """Whether a module is causal where it gets no mask, though its eager attention would see all keys.

    A causal model of transformers gets a mask from regard in every call. Code that passes none was written for torch's
    kernel, which is causal then unless the module's `is_causal` is False. The classes of transformers without the
    attribute mean to see all: cross-attention to an image (Mllama). Other code without it relies on the kernel.

    Args:
        said: what the call says of itself.
    """
    if said is not None:
        return said
    causal = getattr(module, "is_causal", not _is_of_transformers(module))
    return causal and _model_type(module) not in UNMASKED_SEE_ALL


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether the class of a module, or one that it extends (FSDP makes such classes), is that of a model there."""
    return any(kind.__module__.startswith("transformers.models.") for kind in type(module).__mro__)


def _model_type(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def _mask_of_indices(indices: Tensor, keys: int) -> TensorMask:
    """The mask of keys chosen one by one, [batch, queries, chosen]."""
    hidden = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return TensorMask(hidden.scatter(-1, indices.long(), True)[:, None])


def _weights(module: nn.Module, query: Tensor, key: Stored, options: dict[str, Any]) -> Tensor:
    """The weights, as the outputs for values that are unit vectors: `softmax(...) @ identity`."""
    k = expanded(module, key)[0] if isinstance(key, Latents | SplitLatents) else dense(key)
    if _model_type(module) in SINK_BESIDE_WEIGHTS:
        options = options | {"sink": None}
    units = torch.eye(k.shape[2], dtype=query.dtype, device=query.device).expand(*k.shape[:2], -1, -1)
    if torch.compiler.is_compiling():
        return attend_with_sink(query, k, units, **options)
    # In a context of its own, so that observers of the model's calls do not see this one.
    return contextvars.Context().run(functools.partial(attend_with_sink, query, k, units, **options))


def _is_recorded() -> bool:
    """Whether transformers is recording attention weights: GPT-2 and others do not pass `output_attentions` on."""
    if is_compiling():
        return False
    found = _collector.get()
    return bool(found) and any("attentions" in key for key in found)
