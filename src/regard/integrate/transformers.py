"""The attention of transformers' models, computed by regard.

```python
model = AutoModelForCausalLM.from_pretrained(...)
use_regard(model)                      # or register(), then from_pretrained(..., attn_implementation="regard")
```

transformers (5.17 to 5.23) lets an attention function and a mask function be registered under a name. Ours describes
the mask in words (`masks.py`), which reach the attention of each layer as one value (`layer_mask.py`), so that a plan
made for the first layer serves them all. `generate` makes the masks outside of the step that it compiles, so they are
in words there, too, and their offset is a tensor: one graph serves all steps. While torch.compile or torch.export
traces where masks are made, the mask is the dense one of transformers: neither can read closures.

What a model's `eager_attention_forward` computes is what regard computes, in float32 or better: grouped heads without
copies, `softcap`, sinks (`s_aux`), T5's `position_bias`, keys that an indexer chose (`indices`, in DeepSeek-V3.2). Two
things differ on purpose: a query that may see no key (padding on the left) gives 0, where eager averages what it should
not see; and dropout draws its own random numbers.
"""

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing

from regard.attention import attend
from regard.cache.store import CachedTensor
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import TensorMask
from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_forgetting import ForgettingLayer, take_latest
from regard.integrate.cache_layer import dense
from regard.integrate.latent import Apart, ForgettingLatentLayer, Latents, absorbed, attend_latents, let_expand
from regard.integrate.layer_mask import LayerMask
from regard.integrate.masks import Asked, Predicate, read
from regard.integrate.touches import attention_classes, passed

NAME = "regard"
"""The name of the attention implementation. transformers looks for "flash" and "sdpa" inside names: not in this one."""

WITHOUT_EFFECT = {
    "position_ids": "positions are in the queries and keys (RoPE) and in the mask already",
    "position_embeddings": "the same",
    "sliding_window": "the mask carries the window; stock eager and sdpa ignore it as well",
    "use_cache": "the keys have been through the cache",
    "past_key_values": "the same",
    "cu_seq_lens_q": "the mask carries packed documents, from position_ids; eager ignores it as well",
    "cu_seq_lens_k": "the same",
    "max_length_q": "the same",
    "max_length_k": "the same",
    "deterministic": "a switch of flash-attention's backward; ours is",
    "num_items_in_batch": "the trainer's, for the loss",
    "return_dict": "a form of the model's result",
    "output_hidden_states": "the same",
    "output_router_logits": "the same, of experts",
}
"""Keywords that models hand on to their attention function and that change nothing in it, and why."""

NOT_KNOWN = {
    "indices": "keys chosen by an indexer (DeepSeek sparse attention)",
    "block_indices": "blocks of keys chosen by an indexer",
    "cache": "a paged cache, of continuous batching",
}
"""Keywords that change the result: refused, never dropped, by an attention function that does not take them by name."""

_COMPUTE_WITH_MASKS = frozenset({"doge", "deepseek_v4"})
"""Models that look at the type of their mask before they compute with it; they get the dense tensor at once."""


def register() -> None:
    """Make `attn_implementation="regard"` known to transformers; again and again is fine.

    >>> register()
    >>> "regard" in AttentionInterface().valid_keys()
    True
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def use_regard(model: Any) -> None:
    """Let regard compute the attention of a transformers model, from now on.

    Latent attention (MLA: DeepSeek-V3 and its kin) decodes without expanding the cached latents, with the caches of
    transformers as with regard's. `regard_cache(model).explain()` says so, or why not.

    ```
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> ids, eager = torch.tensor([[1, 2, 3]]), model(torch.tensor([[1, 2, 3]])).logits
    >>> use_regard(model)
    >>> torch.allclose(model(ids).logits, eager, atol=1e-6)
    True

    ```

    Raises:
        ProblemError: not a model of transformers, or one that computes attention by itself (bloom, falcon, mpt, ...).
        RefusalError: its attention chooses keys in a way that regard does not know (MiniMax-M3).
    """
    check_model(model)
    register()
    for kind in attention_classes(model):
        if hasattr(kind, "expand_kv"):
            let_expand(kind, NAME)
    model.set_attn_implementation(NAME)


def check_model(model: Any) -> None:
    """Raise `ProblemError` unless it is a model of transformers that lets its attention be put in place."""
    if not (isinstance(model, nn.Module) and hasattr(model, "set_attn_implementation")):
        raise ProblemError(
            f"use_regard(model) got {type(model).__name__}: expected a model of transformers (a PreTrainedModel). In a "
            "model of your own, call regard.attend."
        )
    if not any(_asks_the_interface(type(module)) for module in model.modules()):
        raise ProblemError(
            f"{type(model).__name__} computes attention in its own file ({type(model).__module__}) and never asks "
            "transformers' AttentionInterface, so nothing can be put in its place. Leave it as it is, or call "
            "regard.attend in a copy of its attention class (ALiBi is bias=regard.Alibi(heads))."
        )
    for kind in {type(module) for module in model.modules()}:
        for name in sorted(passed(kind) & NOT_KNOWN.keys() - inspect.signature(attention).parameters.keys()):
            raise _not_applied(kind, name)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """The mask of one forward pass, for all layers of a kind: a `LayerMask`; while tracing, a dense bool tensor.

    It takes the arguments of transformers' `sdpa_mask`. `q_offset` may be the cache's own counter, which moves on with
    the first layer: it is read here, once.
    """
    called: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    called |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
    if mask_function is not None:
        called["mask_function"] = mask_function
    if _is_traced(q_offset, attention_mask) or getattr(config, "model_type", "") in _COMPUTE_WITH_MASKS:
        return sdpa_mask(**called, use_vmap=use_vmap, allow_is_causal_skip=False)
    function = mask_function or inspect.signature(sdpa_mask).parameters["mask_function"].default
    first = int(q_offset)
    asked = Asked(function, batch_size, q_length, kv_length, first, kv_offset, attention_mask, use_vmap, device)
    return LayerMask(read(asked), (batch_size, 1, q_length, kv_length), asked.offset, device, attention_mask)


def _is_traced(q_offset: int | Tensor, attention_mask: Tensor | None) -> bool:
    """Whether the numbers of a mask's arguments cannot be read now. `is_tracing` cannot trace a symbolic int."""
    return torch.compiler.is_compiling() or is_tracing(q_offset) or is_tracing(attention_mask)


def attention(
    module: nn.Module,
    query: Tensor,  # [batch, heads, queries, qk_dim]
    key: CachedTensor | Latents | Apart,  # [batch, kv_heads, keys, qk_dim]
    value: CachedTensor | Latents | Apart,  # [batch, kv_heads, keys, v_dim]
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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: (out [batch, queries, heads, v_dim], weights or None).

    `indices` [batch, queries, chosen] are the keys that an indexer chose for each query (DeepSeek sparse attention);
    those of them that the mask hides stay hidden.

    The weights `[batch, heads, queries, keys]` are made when `output_attentions` asks for them, before dropout.

    Raises:
        RefusalError: a keyword that changes the result in a way that regard does not know.
        ProblemError: tensors or masks that do not fit each other.
    """
    check_keywords(module, kwargs)
    layer = None if torch.compiler.is_compiling() else take_latest(key.shape[2])
    said: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    said["sink"] = sink_of(s_aux if s_aux is not None else sinks)
    if layer is not None:
        _check_bias(layer, position_bias)
        if layer.is_padded(attention_mask):
            return _by_row(module, layer, query, attention_mask, said, output_attentions), None
        attention_mask = layer.fitted(cast(Any, attention_mask), query.shape[2], key.shape[2])
    words, bias, offset = _said(module, query, key, attention_mask, is_causal)
    if indices is not None:
        words = _chosen(indices, key.shape[2]) if words is None else words & _chosen(indices, key.shape[2])
    if position_bias is not None:
        bias = TensorBias(position_bias) if bias is None else TensorBias(position_bias) + bias
    if query.shape[0] == 1 < key.shape[0]:  # one set of learned queries for all rows
        query = query.expand(key.shape[0], -1, -1, -1)
    said |= {"mask": words, "bias": bias, "offset": offset}
    out = _attend(module, query, key, value, dropout=dropout if module.training else 0.0, **said)
    if layer is not None:
        layer.observe(_seen_as(module, layer, query), words, scaling)
    weights = _weights(module, query, key, said) if output_attentions or _recorded() else None
    return out.transpose(1, 2).contiguous(), weights


def _attend(module: nn.Module, query: Tensor, key: Any, value: Any, **words: Any) -> Tensor:
    if isinstance(key, Latents | Apart):
        return attend_latents(module, query, key, **words)
    return attend(query, key, value, **words)


def _seen_as(module: nn.Module, layer: ForgettingLayer, query: Tensor) -> Tensor:
    """The queries as they go to what the layer keeps."""
    return absorbed(module, query) if isinstance(layer, ForgettingLatentLayer) else query


def _by_row(
    module: nn.Module, layer: ForgettingLayer, query: Tensor, given: Any, said: dict[str, Any], weights: bool
) -> Tensor:
    """The attention of a padded batch to a layer that forgets, [batch, queries, heads, v_dim]."""
    if weights or _recorded():
        raise RefusalError(
            f"the weights of a padded batch over {layer.kv!r}: its rows keep different tokens, so there is no one "
            "matrix of them. Leave output_attentions out, or ask for one row at a time."
        )
    run = functools.partial(_attend, module, **said)
    seen_as = functools.partial(_seen_as, module, layer)
    out = layer.attend_by_row(given, query, lambda q, found, mask: run(q, *found, mask=mask), seen_as, said["scale"])
    return out.transpose(1, 2).contiguous()


def _check_bias(layer: ForgettingLayer, bias: Tensor | None) -> None:
    if bias is not None:
        raise RefusalError(
            f"{layer.kv!r} forgets tokens, and this model adds a bias by position to the scores of all: which "
            "belongs to those that are left is not known. Take a cache that keeps all."
        )


def _said(
    module: nn.Module,
    query: Tensor,
    key: CachedTensor | Latents | Apart,
    given: LayerMask | Tensor | None,
    is_causal: bool | None,
) -> tuple[Mask | None, Bias | None, int | Tensor]:
    """(mask, bias, position of the first query) of what transformers gives as the mask."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(given, LayerMask):
        rows, columns = given.shape[2:]
        if (rows, columns) == (queries, keys):
            return given.mask, None, given.offset_tensor if torch.compiler.is_compiling() else given.offset
        if rows in (1, queries) and columns in (
            1,
            keys,
        ):  # MiniMax's mask for one key stands for all, as a tensor would
            return TensorMask(given.dense()), None, 0
        raise ProblemError(
            f"the mask is for {rows} queries and {columns} keys, and {type(module).__name__} came with {queries} and "
            f'{keys}: its keys are not those that its cache announced. Use attn_implementation="eager" for this model.'
        )
    if isinstance(given, Tensor):
        if given.dtype == torch.bool:
            return TensorMask(given), None, 0
        if not given.is_floating_point():
            raise ProblemError(
                f"attention_mask is {given.dtype} {list(given.shape)}: a mask of four dimensions is bool (True keeps) "
                "or floating point (added to the scores)."
            )
        return None, TensorBias(given), 0
    # Without a mask the first query is at the first key, also where a static cache brings keys that are still to come.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return (Causal() if causal and queries > 1 else None), None, 0


def _chosen(indices: Tensor, keys: int) -> TensorMask:
    """The mask of keys chosen one by one, [batch, queries, chosen]."""
    hidden = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return TensorMask(hidden.scatter(-1, indices.long(), True)[:, None])


def sink_of(logits: Tensor | None) -> Tensor | None:
    """The logits of sinks, one per head. Raises `RefusalError` for others."""
    if logits is not None and logits.ndim != 1:
        raise RefusalError(
            f"the sinks of this model are {list(logits.shape)}: regard takes one logit per head, [heads]. Use "
            'attn_implementation="eager" for it.'
        )
    return logits


def _weights(module: nn.Module, query: Tensor, key: CachedTensor | Latents | Apart, words: dict[str, Any]) -> Tensor:
    """The weights, as the outputs for values that are unit vectors: `softmax(...) @ identity`."""
    key = key.expanded(module)[0] if isinstance(key, Latents | Apart) else dense(key)
    units = torch.eye(key.shape[2], dtype=query.dtype, device=query.device).expand(*key.shape[:2], -1, -1)
    if torch.compiler.is_compiling():
        return attend(query, key, units, **words)
    # In a context of its own, so that whoever watches the model's calls does not see this one.
    return contextvars.Context().run(functools.partial(attend, query, key, units, **words))


def _recorded() -> bool:
    """Whether transformers is recording attention weights: GPT-2 and others keep `output_attentions` to themselves."""
    recorder = sys.modules.get("transformers.utils.output_capturing")
    if torch.compiler.is_compiling() or not hasattr(recorder, "_active_collector"):
        return False
    return any("attentions" in key for key in cast(Any, recorder)._active_collector.get() or ())


def check_keywords(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Models hand on whatever their caller said: refuse what their own eager attention applies and ours does not."""
    for name, given in kwargs.items():
        if given is None or name in WITHOUT_EFFECT:
            continue
        if name in NOT_KNOWN or name in _read_by_eager(type(module).__module__):
            raise _not_applied(type(module), name)


def _not_applied(module: type[nn.Module], name: str) -> RefusalError:
    what = NOT_KNOWN.get(name, "its own eager attention applies it")
    return RefusalError(
        f"{module.__name__} passes {name}= to its attention ({what}), which regard does not apply. Use "
        'model.set_attn_implementation("eager") for this model.'
    )


@torch.compiler.assume_constant_result  # dynamo would trace into `inspect`
def _read_by_eager(file: str) -> tuple[str, ...]:
    """What the `eager_attention_forward` of a model's file, the definition of its attention, takes by name."""
    eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
    parameters = inspect.signature(eager).parameters.values() if eager is not None else ()
    return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


@functools.cache
def _asks_the_interface(module: type[nn.Module]) -> bool:
    """Whether a module's forward looks its attention function up in transformers' `AttentionInterface`."""
    forward: Callable[..., Any] | None = getattr(module, "forward", None)
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(inspect.unwrap(cast(Any, forward)))
    except (OSError, TypeError):  # no source at hand
        return False
