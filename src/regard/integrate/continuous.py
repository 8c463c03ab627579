"""regard's attention in transformers' continuous batching: many requests in one row of tokens, each with its own keys.

```python
with continuous_batching(model):
    out = model.generate_batch(prompts, generation_config=GenerationConfig(max_new_tokens=64, do_sample=False))
```

transformers lets few implementations in there, by name. Inside the `with`, the one called "paged|eager" is ours, and
the model uses it; after it everything is as before. transformers keeps the keys in its own pages and gathers them; each
request is then one call of `attend`, on its own queries and keys:

    tokens  a a a b c c        keys  a a a a a a b b b b b c c        3 + 1 + 2 queries, 6 + 5 + 2 keys

where the stock function builds scores for every token with every key and masks those of the others away.
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
from regard.integrate.transformers import check_keywords, check_model, sink_of

NAME = "paged|eager"
"""The name that continuous batching knows, and that asks no model whether it supports torch's fused kernel."""

WITHOUT_EFFECT = {
    "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal", "attention_mask",
}  # fmt: skip
"""Keywords of continuous batching that say where keys are kept, which its cache has applied, and what follows from
which tokens are whose."""

_using, _lock = [0], threading.Lock()


@contextmanager
def continuous_batching(model: Any) -> Generator[None]:
    """Inside, `model.generate_batch` and its kin compute attention by regard; the model goes back to what it had.

    Raises:
        ProblemError: not a model of transformers, or one that computes attention by itself.
    """
    check_model(model)
    before = model.config._attn_implementation
    with _in_its_place():
        model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def _in_its_place() -> Generator[None]:
    """Have our function go by the name, until the last who asked for it is done."""
    mapping: dict[str, Any] = cast(Any, AttentionInterface)._global_mapping
    with _lock:
        if not _using[0]:
            _stock[0] = mapping[NAME]
            AttentionInterface.register(NAME, paged_attention)
        _using[0] += 1
    try:
        yield
    finally:
        with _lock:
            _using[0] -= 1
            if not _using[0]:
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

    The mask that transformers made for all tokens and keys is left alone: which request has which is in the lengths.

    Raises:
        ProblemError: called outside of continuous batching.
        RefusalError: a keyword, or a kind of layer, that regard does not apply.
    """
    cache = kwargs.pop("cache", None)
    if cache is None:
        raise ProblemError(
            f'attention "{NAME}" was called without the cache of continuous batching: inside of continuous_batching() '
            "call generate_batch, and for generate() leave it."
        )
    check_keywords(module, {name: given for name, given in kwargs.items() if name not in WITHOUT_EFFECT})
    index = cast(Any, module).layer_idx
    window = _window(cache.layer_to_allocator[index].layer_type, module)
    key, value = cache.update(key_states=key, value_states=value, layer_idx=index, kwargs=kwargs)
    sink = sink_of(s_aux if s_aux is not None else getattr(module, "sinks", None))
    said: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": sink}
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))
    for mine, theirs in _requests(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]):
        found = attend(
            query[:, :, mine], key[:, :, theirs], value[:, :, theirs],
            mask=_mask(mine.stop - mine.start, theirs.stop - theirs.start, window), **said,
        )  # fmt: skip
        out[:, mine] = found.transpose(1, 2)
    return out, None


def _requests(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """(tokens, keys) of each request that has any, from where they begin and end: int32 [requests + 1]."""
    q, k = cast("list[int]", queries.tolist()), cast("list[int]", keys.tolist())
    spans = zip(q, q[1:], k, k[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in spans if b > a]


def _mask(queries: int, keys: int, window: int | None) -> Mask | None:
    """Causal, the last query at the last key; plainer where that says the same."""
    reach = None if window is None or window >= keys else Window(window)
    if queries == 1:
        return reach
    return Causal() if reach is None else Causal() & reach


def _window(kind: str, module: Any) -> int | None:
    if kind == "full_attention":
        return None
    if kind == "sliding_attention":
        return module.config.sliding_window
    raise RefusalError(
        f"{type(module).__name__} has layers of {kind} in continuous batching, which regard does not know there: leave "
        "continuous_batching() out, transformers has an attention of its own."
    )
