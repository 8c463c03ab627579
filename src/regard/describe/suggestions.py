"""Suggestions for error messages: keywords and mask names of other libraries, and what to write here instead.

No name of another library is accepted. `MASKS` is for a mask given as text; `NAMES`, `KEYWORDS` and `SPECIAL` are for a
keyword that a function does not have, among them all of torch's `scaled_dot_product_attention` and
`MultiheadAttention`. Advice always fits the function: it names only parameters that the function has.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeVar, cast

from regard.errors import KeywordError

F = TypeVar("F", bound=Callable[..., Any])

MASKS = {
    "Causal()": ("causal", "is_causal", "autoregressive", "tril", "causalbias"),
    "Causal() & Window(n)": ("window", "sliding", "sliding_window", "local", "banded"),
    "Causal() & (Window(n) | Prefix(4))": ("sink", "sinks", "attention_sink", "streaming", "streaming_llm"),
    "Causal() | Prefix(n)": ("prefix", "prefix_lm"),
    "None": ("full", "none", "all", "bidirectional"),
    "KeyLengths(lengths)": ("padding", "padded", "key_padding"),
    "Causal() & Documents(ids)": ("document", "documents", "packed", "packing", "varlen", "block_diagonal"),
    "Window(n) | Global(positions)": ("global", "longformer"),
    "Blocks(layout, size)": ("block", "blocks", "block_sparse", "sparse"),
    "Causal() & Dilated(step)": ("dilated", "strided"),
    "Tree(parents)": ("tree", "speculative"),
}
"""The mask to write here, and its names in other libraries."""

WINDOW = "say mask=Causal() & Window(n), which counts the query itself"
TENSOR = "say mask=TensorMask(t) for a tensor of bools (True keeps), bias=TensorBias(t) for one that is added"
MODULE = "that is of a module, see regard.nn.MultiHeadAttention"
DOCUMENTS = (
    "say mask=Documents(ids), an id per token: torch.repeat_interleave(torch.arange(len(lengths)), lengths), with "
    "lengths = cu_seqlens.diff()"
)
ROLLING = "say layout=Rolling(window, sinks=4), of regard.cache: the window counts the sinks"
PAGES = "give as k and v what a KVCache of regard.cache with layout=Paged(page) returns: pages and lengths are in it"
NO_MASK = "linear attention has no masks, only causal=True or False; for other masks, see regard.attend"
LOOK = "weights are not kept, see regard.inspect for any of them"

NAMES = {
    "q": ("query", "queries", "query_states"),
    "k": ("key", "keys", "key_states"),
    "v": ("value", "values", "value_states"),
    "x": ("hidden_states", "query", "src", "tgt", "inputs", "input"),
    "context": ("encoder_hidden_states", "memory", "key", "value", "kv"),
    "d_model": ("embed_dim", "hidden_size", "hidden_dim", "model_dim", "n_embd", "dim", "width"),
    "heads": ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "head_count"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups", "kv_head_count"),
    "head_dim": ("d_head", "dim_head", "d_k", "key_dim", "size_per_head"),
    "context_dim": ("kdim", "vdim", "kv_dim", "cross_attention_dim", "encoder_hidden_size"),
    "qkv_bias": ("attention_bias", "use_bias"),
    "layers": ("num_layers", "n_layers", "n_layer", "num_hidden_layers", "depth"),
    "position": ("rope", "rotary", "rotary_emb", "pos_emb", "position_embeddings"),
    "positions": ("position_ids", "input_pos", "cache_position"),
    "cache": ("past_key_values", "past_key_value", "kv_cache", "layer_past", "use_cache"),
    "caches": ("past_key_values", "past_key_value", "kv_cache", "use_cache"),
    "offset": ("cache_position", "start_pos", "query_start"),
    "scale": ("softmax_scale", "sm_scale", "scaling", "attn_scale"),
    "softcap": ("soft_cap", "logits_soft_cap", "attn_logit_softcapping"),
    "causal": ("is_causal",),
    "dropout": ("dropout_p", "p", "attn_dropout", "attention_dropout", "attn_pdrop"),
    "sink": ("s_aux", "softmax_sink", "attention_sink"),
    "codec": ("dtype", "kv_cache_dtype", "cache_dtype", "quantization"),
    "layout": ("cache_implementation",),
    "left": ("window_size", "sliding_window", "size", "window"),
    "lengths": ("seq_lens", "seqlens"),
    "ids": ("document_ids", "document_id", "segment_ids", "doc_ids"),
    "fn": ("mask_mod", "function", "mask_fn"),
    "dim": ("head_dim", "rotary_dim"),
    "base": ("theta", "rope_theta"),
    "scaling": ("rope_scaling",),
    "fraction": ("partial_rotary_factor", "rotary_pct", "rotary_percentage"),
    "factor": ("scaling_factor",),
    "original": ("original_max_position_embeddings", "max_position_embeddings"),
    "backend": ("attn_implementation", "implementation", "impl"),
}
"""Our parameters, and their names in other libraries. A parameter is named only for a function that has it."""

KEYWORDS = {
    "is_causal": "say mask=Causal(), which puts the last query at the last key; with offset=0 the first at the first",
    "causal": "say mask=Causal()",
    "attn_mask": TENSOR,
    "attention_mask": "say mask=KeyLengths(attention_mask.sum(1)) for a tokenizer's, padded on the right, or "
    "mask=TensorMask(t[:, None, None]) for a tensor of bools [batch, keys], True keeps",
    "key_padding_mask": "say mask=KeyLengths(lengths), the number of tokens of each batch row",
    "block_mask": "give mask=, such as Causal() & Window(n), Blocks(layout, size) or MaskFunction(fn)",
    "window": WINDOW,
    "window_size": WINDOW,
    "sliding_window": WINDOW,
    "local_window_size": WINDOW,
    "attn_bias": "say bias=TensorBias(t), or mask= for what hides keys",
    "alibi_slopes": "say bias=Alibi(slopes=t), t of shape [heads]; Alibi(heads) has the slopes of the paper",
    "score_mod": "say bias= for what is added to scores, softcap= for a cap",
    "enable_gqa": "leave it out: query heads may be any whole multiple of key heads",
    "sinks": "say sink=, a logit per head; for first tokens that stay visible, mask=Causal() & (Window(n) | Prefix(4))",
    "sink": "fold it in once, at the end: state.with_sink(sink)",
    "dropout": "only attend has it, since a state merges and dropped weights do not",
    "return_lse": "call attend_state, which gives .out and .lse",
    "need_weights": LOOK,
    "output_attentions": LOOK,
    "return_attn_probs": LOOK,
    "embed_dim": MODULE,
    "num_heads": MODULE,
    "heads": MODULE,
    "head_dim": MODULE,
    "average_attn_weights": LOOK,
    "return_weights": LOOK,
    "batch_first": "leave it out: tensors are [batch, tokens, d_model]; regard.nn.from_torch converts torch's modules",
    "add_bias_kv": "regard does not have it; sink=True gives each head a learned logit that takes weight",
    "add_zero_attn": "regard does not have it; sink=True gives each head a learned logit that takes weight",
    "max_cache_len": "leave it out: a cache grows; for a fixed size, layout=Contiguous(capacity=n)",
    "max_seq_len": "leave it out: nothing depends on a largest length",
    "bias_k": "regard does not have it",
    "layer_idx": "leave it out: each module gets a cache of its own, cache=",
    "block_table": PAGES,
    "block_tables": PAGES,
    "cache_seqlens": PAGES,
    "seq_lens": PAGES,
    "seqused_k": PAGES,
    "k_scale": "leave it out: a KVCache with a codec, of regard.cache, stores its scales",
    "v_scale": "leave it out: a KVCache with a codec, of regard.cache, stores its scales",
    "window_left": WINDOW,
    "custom_mask": TENSOR,
    "pos_encoding_mode": "rotate q and k before the call, by regard.Rope; for ALiBi, bias=Alibi(heads)",
    "qo_indptr": DOCUMENTS,
    "kv_indptr": DOCUMENTS,
    "cu_seqlens": DOCUMENTS,
    "cu_seqlens_q": DOCUMENTS,
    "cu_seqlens_k": DOCUMENTS,
    "max_seqlen": "leave it out: packed sequences are mask=Documents(ids)",
    "max_seqlen_q": "leave it out: packed sequences are mask=Documents(ids)",
    "max_seqlen_k": "leave it out: packed sequences are mask=Documents(ids)",
    "deterministic": "leave it out: there is no such option; the guarantees are in docs/guide.md",
    "head_first": "leave it out: tensors are always [batch, heads, tokens, dim]",
}
"""Keywords of torch, transformers, flash-attention, FlashInfer, xFormers and JAX, and what to write here."""

SPECIAL: dict[str, dict[str, str]] = {
    "layout": {
        **dict.fromkeys(("window", "window_size", "sliding_window", "local_window_size", "attention_window"), ROLLING),
        **dict.fromkeys(("sink", "sinks", "num_sink_tokens"), ROLLING),
        **dict.fromkeys(("page", "page_size", "block_size"), "say layout=Paged(page), of regard.cache"),
    },
    "features": dict.fromkeys(("mask", "attn_mask", "attention_mask", "key_padding_mask"), NO_MASK),
    "lengths": {
        "cu_seqlens": "say lengths=cu_seqlens.diff()",
        "key_padding_mask": "say lengths=(~key_padding_mask).sum(1): torch's True is padding",
    },
}
"""The same for functions that have the parameter of the first key; it comes before `NAMES` and `KEYWORDS`."""

TORCHS = {"attn_mask", "dropout_p", "is_causal", "enable_gqa"}


def mask_for(text: str) -> str | None:
    """The mask to write here for that name; None for an unknown name.

    >>> mask_for("causal"), mask_for("sliding-attention"), mask_for("Prefix(4)"), mask_for("blue")
    ('Causal()', 'Causal() & Window(n)', 'Prefix(4)', None)
    >>> mask_for("causal+padding")
    'Causal() & KeyLengths(lengths)'
    """
    if "(" in text:
        return text  # already an expression, but in quotes
    masks = [_mask_by_name(name) for name in mask_names(text)]
    if None in masks:
        return None
    several = len(masks) > 1
    terms = [
        f"({m})" if several and " | " in m and " & " not in m else m
        for m in masks
        if m and not (several and m == "None")
    ]
    return " & ".join(dict.fromkeys(term for each in terms for term in each.split(" & "))) or None


def mask_names(text: str) -> list[str]:
    """The names in a text that names one mask or several.

    >>> mask_names("causal+window"), mask_names("full attention")
    (['causal', 'window'], ['full attention'])
    """
    return [name for name in re.split(r"[+&,;|/]| and | with ", text) if name.strip()]


def _mask_by_name(text: str) -> str | None:
    name = text.strip().lower().replace("-", "_").replace(" ", "_")
    plain = name.removesuffix("_mask").removesuffix("_attention")
    return next((here for here, names in MASKS.items() if name in names or plain in names), None)


def suggest_keywords(function: F) -> F:
    """The function, which raises `KeywordError` with a suggestion for a keyword or a position that it does not have.

    >>> @suggest_keywords
    ... def attend(q, *, mask=None, scale=None): ...
    >>> attend(1, sm_scale=2)
    Traceback (most recent call last):
    regard.errors.KeywordError: attend does not know sm_scale: say scale=.
    """
    parameters = inspect.signature(function).parameters.values()
    known = frozenset(p.name for p in parameters)
    most = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:  # only then: a check before every call would cost more than the call of a small function
            if unknown := [name for name in keywords if name not in known]:
                refuse_keywords(function, unknown)
            if len(args) > most:
                refuse_positions(function, len(args))
            raise

    return cast(F, call)


def refuse_arguments(function: F) -> F:
    """A method in place of one without arguments that does nothing: it raises `KeywordError` for any argument.

    `suggest_keywords` would double the time of `Causal()`; this adds 30 ns.
    """

    @functools.wraps(function)
    def call(self: object, *args: Any, **keywords: Any) -> None:
        if args or keywords:
            if keywords:
                refuse_keywords(function, keywords)
            refuse_positions(function, 1 + len(args))

    return cast(F, call)


def refuse_keywords(function: Callable[..., Any], unknown: Collection[str]) -> NoReturn:
    """Raise `KeywordError` for keywords that the function does not have, with what to write instead."""
    known = _names(function)
    reasons = "; nor ".join(f"{name}: {_suggestion(name, known)}" for name in unknown)
    drop_in = (
        " For torch's argument names, use regard.scaled_dot_product_attention."
        if TORCHS & {*unknown} and {"q", "k", "v", "bias"} <= {*known}
        else ""
    )
    raise KeywordError(f"{_title(function)} does not know {reasons}.{drop_in}")


def refuse_positions(function: Callable[..., Any], received: int) -> NoReturn:
    """Raise `KeywordError` for more positional arguments than the function has, with the names of both kinds."""
    parameters = inspect.signature(function).parameters.values()
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    by_position = [p.name for p in parameters if p.name not in ("self", *by_name)]
    received -= len(parameters) - len(by_position) - len(by_name)
    names = f": say {', '.join(f'{name}=' for name in by_name)} by name" if by_name else ""
    tokens = by_position[:2] == ["x", "context"]
    expected = f"{len(by_position)} arguments by position ({', '.join(by_position)})" if by_position else "no arguments"
    projected = " Queries are computed from x, keys and values from context, or from x without a context."
    raise KeywordError(f"{_title(function)} takes {expected}, and got {received}{names}.{projected if tokens else ''}")


def _names(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _title(function: Callable[..., Any]) -> str:
    """`attend` of a function, `MultiHeadAttention` of its `__init__`, `MultiHeadAttention.forward` of a method."""
    return function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")


def _suggestion(name: str, known: list[str]) -> str:
    special = next((advice[name] for ours, advice in SPECIAL.items() if ours in known and name in advice), None)
    ours = next((ours for ours, names in NAMES.items() if ours in known and name in names), None)
    return special or (f"say {ours}=" if ours else _keyword(name, known) or _nearest(name, known))


def _keyword(name: str, known: list[str]) -> str | None:
    """The advice of `KEYWORDS`, if the function has the parameter that it names first."""
    advice = KEYWORDS.get(name)
    parameter = advice and re.search(r"\b(?:say|give) (\w+)=", advice)
    return None if parameter and parameter[1] not in known else advice


def _nearest(name: str, known: list[str]) -> str:
    if not known:
        return "expected no arguments"
    near = difflib.get_close_matches(name, known, n=1)
    return f"say {near[0]}=, if that is meant" if near else f"expected one of {', '.join(known)}"
