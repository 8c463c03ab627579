"""regard's attention in transformers' continuous batching: many requests in one row of tokens, each with its own keys.

```python
with continuous_batching(model):
    out = model.generate_batch(prompts, generation_config=GenerationConfig(max_new_tokens=64, do_sample=False))
```

Continuous batching of transformers accepts few attention implementations, by name. Inside the `with` block, the one
called "paged|eager" is regard's, and the model uses it; after the block everything is as before. transformers keeps the
keys in its own pages and gathers them; each request is then one call of `attend`, on its own queries and keys:

    tokens  a a a b c c        keys  a a a a a a b b b b b c c        3 + 1 + 2 queries, 6 + 5 + 2 keys

where the stock function computes scores of every token with every key and masks those of other requests.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface

from regard.attention import attend
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal, Window
from regard.errors import ProblemError, RefusalError
from regard.integrate.implementation import check_keywords
from regard.integrate.latent import latent_modules
from regard.integrate.mask_function import COMPUTE_WITH_MASKS
from regard.integrate.sinks import sink_of
from regard.integrate.switch_implementation import with_implementation
from regard.integrate.transformers import check_model

NAME = "paged|eager"
"""A name that continuous batching accepts, and that does not require a model to support torch's fused kernel."""

WITHOUT_EFFECT = {
    "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal", "attention_mask",
}  # fmt: skip
"""Keywords of continuous batching about where keys are stored, which its cache has applied, and those that follow from
which tokens belong to which request."""

_users, _lock = [0], threading.Lock()


@contextmanager
def continuous_batching(model: Any) -> Generator[None]:
    """Inside, `model.generate_batch` and the like compute attention by regard; afterwards the model is as before.

    Raises:
        ProblemError: not a model of transformers, or one that computes attention by itself.
        RefusalError: a model whose keys and values are of two sizes, in one layer or in different ones, or are latents:
            transformers cannot store them; or one that computes with its mask (Doge).
    """
    check_model(model)
    _check_stored(model)
    with _registered(), with_implementation(model, NAME):
        yield


def _check_stored(model: Any) -> None:
    """Raise `RefusalError` unless keys and values have one size, as the pages of transformers do, and are all it needs.

    The generation loop of transformers would write an error to the log, and return requests without tokens; for a model
    that computes with its mask it makes none, and the tokens would be others.
    """
    config = model.config.get_text_config(decoder=True)
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    kv_heads, qk_dims = ({getattr(x, name, None) for x in layers} for name in ("num_key_value_heads", "head_dim"))
    qk_dim, v_dim = (getattr(layers[0], name, None) for name in ("head_dim", "v_head_dim"))
    stored = "and the pages of transformers store keys and values of one size, [kv_heads, head_dim]"
    if config.model_type in COMPUTE_WITH_MASKS:
        what = "it computes with its mask before attention does, and transformers makes no mask for it there"
    elif latent_modules(model):
        what = f"its cache keeps latents (MLA), {stored}"
    elif len(kv_heads) > 1 or len(qk_dims) > 1:
        what = f"its layers have keys of different sizes, {stored}"
    elif v_dim not in (None, qk_dim):
        what = f"its keys have {qk_dim} elements and its values {v_dim}, {stored}"
    else:
        return
    raise RefusalError(
        f"{type(model).__name__} in continuous_batching(): {what}. Call generate() in place of generate_batch(), "
        "outside of the block."
    )


@contextmanager
def _registered() -> Generator[None]:
    """Register regard's function under the name, until the last block that needs it ends."""
    with _lock:
        if not _users[0]:
            _stock[0] = AttentionInterface()[NAME]
            AttentionInterface.register(NAME, paged_attention)
        _users[0] += 1
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            if not _users[0]:
                AttentionInterface.register(NAME, _stock[0])


_stock: list[Any] = [None]


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, qk_dim], the requests one after the other
    key: Tensor,  # [1, kv_heads, tokens, qk_dim]
    value: Tensor,  # [1, kv_heads, tokens, v_dim]
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of continuous batching: (out [1, tokens, heads, v_dim], None).

    The mask that transformers made for all tokens and keys is not used: the lengths tell what belongs to each request.

    Raises:
        ProblemError: called outside of continuous batching.
        RefusalError: a keyword, or a kind of layer, that regard does not apply.
    """
    cache = kwargs.pop("cache", None)
    if "cu_seq_lens_q" not in kwargs:
        raise ProblemError(
            f'attention "{NAME}" was called without the cache of continuous batching: inside continuous_batching() '
            "call generate_batch, and generate() outside of it."
        )
    check_keywords(module, {name: value for name, value in kwargs.items() if name not in WITHOUT_EFFECT})
    window = _window(module)
    if cache is not None:  # since transformers 5.24 the model itself updates it
        index = cast(Any, module).layer_idx
        key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
    sink = sink_of(s_aux if s_aux is not None else getattr(module, "sinks", None))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": sink}
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))
    ends = kwargs["cu_seq_lens_k"]
    if isinstance(ends, dict):  # by kind of layer; a layer that writes keys has replaced it by its own entry
        ends = cast("dict[str, Tensor]", ends)[_kind(module)]
    for mine, theirs in _requests(kwargs["cu_seq_lens_q"], ends):
        found = attend(
            query[:, :, mine], key[:, :, theirs], value[:, :, theirs],
            mask=_mask(mine.stop - mine.start, theirs.stop - theirs.start, window), **options,
        )  # fmt: skip
        out[:, mine] = found.transpose(1, 2)
    return out, None


def _requests(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """(tokens, keys) of each request that has any, from where they begin and end: int32 [requests + 1]."""
    q, k = cast("list[int]", queries.tolist()), cast("list[int]", keys.tolist())
    spans = zip(q, q[1:], k, k[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in spans if b > a]


def _mask(queries: int, keys: int, window: int | None) -> Mask | None:
    """Causal, the last query at the last key; a simpler mask where that is the same."""
    reach = None if window is None or window >= keys else Window(window)
    if queries == 1:
        return reach
    return Causal() if reach is None else Causal() & reach


def _kind(module: Any) -> str:
    kinds = getattr(module.config, "layer_types", None)
    if kinds:
        return kinds[module.layer_idx]
    return "full_attention" if getattr(module.config, "sliding_window", None) is None else "sliding_attention"


def _window(module: Any) -> int | None:
    kind = _kind(module)
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return module.config.sliding_window
    raise RefusalError(
        f"{type(module).__name__} has layers of {kind} in continuous batching, which regard does not support there: "
        "leave continuous_batching() out, transformers has an attention of its own."
    )
