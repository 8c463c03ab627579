"""Suggestions for error messages: keywords and mask names of other libraries, and what to write here instead.

No name of another library is accepted. `MASKS` is for a mask given as text, `KEYWORDS` for a keyword that a function
does not have, among them all of torch's `scaled_dot_product_attention`.
"""

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from regard.errors import KeywordError

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
LOOK = "weights are not kept, see regard.inspect for any of them"

KEYWORDS = {
    "is_causal": "say mask=Causal(), which puts the last query at the last key; with offset=0 the first at the first",
    "causal": "say mask=Causal()",
    "attn_mask": TENSOR,
    "attention_mask": TENSOR,
    "key_padding_mask": "say mask=KeyLengths(lengths), the number of tokens of each batch row",
    "block_mask": "give mask=, such as Causal() & Window(n), Blocks(layout, size) or MaskFunction(fn)",
    "window": WINDOW,
    "window_size": WINDOW,
    "sliding_window": WINDOW,
    "local_window_size": WINDOW,
    "attn_bias": "say bias=TensorBias(t), or mask= for what hides keys",
    "alibi_slopes": "say bias=Alibi(heads)",
    "score_mod": "say bias= for what is added to scores, softcap= for a cap",
    "dropout_p": "say dropout=",
    "enable_gqa": "leave it out: query heads may be any whole multiple of key heads",
    "softmax_scale": "say scale=",
    "sm_scale": "say scale=",
    "scaling": "say scale=",
    "soft_cap": "say softcap=",
    "logits_soft_cap": "say softcap=",
    "sinks": "say sink=, a logit per head; for first tokens that stay visible, mask=Causal() & (Window(n) | Prefix(4))",
    "s_aux": "say sink=",
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
}
"""Keywords of torch, transformers, flash-attention, xFormers and JAX, and what to write here."""

TORCHS = {"attn_mask", "dropout_p", "is_causal", "enable_gqa"}


def mask_for(text: str) -> str | None:
    """The mask to write here for that name; None for an unknown name.

    >>> mask_for("causal"), mask_for("sliding-attention"), mask_for("Prefix(4)"), mask_for("blue")
    ('Causal()', 'Causal() & Window(n)', 'Prefix(4)', None)
    """
    if "(" in text:
        return text  # already an expression, but in quotes
    name = text.strip().lower().replace("-", "_").replace(" ", "_")
    plain = name.removesuffix("_mask").removesuffix("_attention")
    return next((here for here, names in MASKS.items() if name in names or plain in names), None)


def refuse_keywords(function: Callable[..., Any], unknown: Collection[str]) -> NoReturn:
    """Raise `KeywordError` for keywords that the function does not have, with what to write instead.

    >>> def attend(q, *, mask=None, scale=None): ...
    >>> refuse_keywords(attend, ["dropout_p"])
    Traceback (most recent call last):
    regard.errors.KeywordError: attend does not know dropout_p: say dropout=. All of torch's names are those of ...
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    reasons = "; nor ".join(f"{name}: {KEYWORDS.get(name) or _nearest(name, known)}" for name in unknown)
    drop_in = " All of torch's names are those of regard.scaled_dot_product_attention." if TORCHS & {*unknown} else ""
    raise KeywordError(f"{function.__name__} does not know {reasons}.{drop_in}")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"say {near[0]}=, if that is meant" if near else f"expected one of {', '.join(known)}"
