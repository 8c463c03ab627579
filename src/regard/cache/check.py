"""Checks of what a `KVCache` and a `PagePool` are given: options that work together, and keys and values that fit."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from regard.cache.evict import EvictionState, check_recent
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.store import Form, Policy, PolicyState, Store, describe_tensor
from regard.describe.not_a_spec import received
from regard.describe.traced import refuse_proxy
from regard.errors import ProblemError
from regard.plan.checks import DTYPES
from regard.storage.codec import TILE, Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling
from regard.torch_internals import current_func_transform, in_func_derivative, is_batched


def form_of(k: object, v: object, layout: Layout | None = None) -> Form:
    """The shape and dtype of the tokens in k and v.

    Raises:
        ProblemError: k and v are not keys and values of the same tokens.
    """
    latent = isinstance(layout, Latent)
    if not isinstance(k, Tensor) or not isinstance(v, Tensor if not latent else type(None)):
        for name, given in (("k", k), ("v", v)):
            refuse_proxy(name, given)
        expected = "entries and no values, append(entries)" if latent else "append(k, v)"
        raise ProblemError(f"k is {name_of(k)} and v {name_of(v)}: expected {expected}, tensors.")
    w = k if v is None else v
    if (
        k.ndim != 4 or w.ndim != 4 or k.shape[:3] != w.shape[:3] or k.dtype != w.dtype or k.device != w.device
        or not k.is_floating_point()
    ):  # fmt: skip
        raise ProblemError(
            f"k is {name_of(k)} and v {name_of(v)}: expected [batch, kv_heads, tokens, dim] with the same batch, "
            "kv_heads and tokens, of one float type and on one device."
        )
    return Form(k.shape[0], k.shape[1], k.shape[3], None if v is None else v.shape[3], k.dtype, k.device)


def fits(k: Tensor, v: Tensor | None, form: Form) -> bool:
    """Whether k and v have the form; quick, because every step calls it."""
    if type(k) is not Tensor:
        return False
    batch, heads, qk_dim, v_dim, dtype, device = form
    shape = k.shape
    if len(shape) != 4 or shape[0] != batch or shape[1] != heads or shape[3] != qk_dim or k.dtype != dtype:
        return False
    if k.device != device or (v is None) != (v_dim is None):
        return False
    if v is None:
        return True
    return type(v) is Tensor and v.shape == (batch, heads, shape[2], v_dim) and v.dtype == dtype and v.device == device


def check_entries(layout: Latent, form: Form) -> None:
    """Raise `ProblemError` unless entries of this form have a latent and a rotated key."""
    if form.qk_dim < layout.rank:
        raise ProblemError(
            f"entries have {form.qk_dim} dimensions, and the cache is Latent(rank={layout.rank}): expected the "
            "latent and behind it the rotated key, rank + rope dimensions."
        )


def check_fits(k: object, v: object, store: Store, layout: Layout) -> None:
    """Raise `ProblemError` unless k and v have the form of what is stored; says which of them does not."""
    new, form = form_of(k, v, layout), store.form
    if new == form:
        return
    for name, t, dim, theirs in (("k", k, form.qk_dim, new.qk_dim), ("v", v, form.v_dim, new.v_dim)):
        if (*new[:2], theirs, *new[4:]) != (*form[:2], dim, *form[4:]):
            shape = [form.batch, form.kv_heads, store.tokens, dim]
            raise ProblemError(
                f"{name} is {name_of(t)}, and the cache stores {str(form.dtype).removeprefix('torch.')} {shape} on "
                f"{form.device}: only the number of tokens may differ. A new sequence needs a new cache, or "
                "reset()."
            )


def check_inference(k: Tensor, v: Tensor | None, owner: str) -> None:
    """Raise `ProblemError` if k or v require gradients: in-place writes would break the graph of earlier steps.

    Also inside `torch.func`, which follows no writes to memory from outside of it.
    """
    if current_func_transform() is not None and not torch.compiler.is_compiling():
        if in_func_derivative():
            raise ProblemError(
                f"keys or values were appended to a {owner} inside torch.func.grad, jvp or another derivative, which "
                "allows no writes to its memory: append before the derivative and attend inside it, or compute the "
                "whole sequence without a cache."
            )
        if is_batched(k) or (v is not None and is_batched(v)):
            raise ProblemError(
                f"keys or values that torch.vmap maps over were appended to a {owner}, whose memory is the same for "
                "all: append outside of vmap, with what it would map over as batch rows."
            )
    if torch.is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad)):
        raise ProblemError(
            f"keys or values that require gradients were appended to a {owner}, which is for inference: run under "
            "torch.no_grad() or torch.inference_mode(), or train on the whole sequence without a cache."
        )


def check_options(layout: object, codec: object, evict: object) -> None:
    """Raise `ProblemError` unless they are a layout, a codec and a policy that work together."""
    for name, value, kind in (("layout", layout, Layout), ("codec", codec, Codec)):
        if isinstance(value, type) and issubclass(value, kind):
            raise ProblemError(f"{name} is the class {value.__name__}: did you mean {value.__name__}(...)?")
    if type(layout) not in (Contiguous, Rolling, Paged, Latent):
        raise ProblemError(f"layout is {layout!r}: expected Contiguous(), Rolling(window), Paged() or Latent(rank).")
    check_codec(codec, "codec")
    if evict is not None:
        _check_policy(evict)
    if evict is not None and isinstance(layout, Rolling):
        raise ProblemError(
            f"{layout!r} evicts tokens by itself, so it takes no evict={evict!r}: leave one of the two out, or take "
            "Contiguous() with the policy."
        )
    if isinstance(codec, Codec) and codec.keys == "channel" and evict is not None:
        raise ProblemError(
            f'{codec!r} with evict={evict!r}: tokens that share scales cannot be evicted one by one; with keys="token" '
            "(or None, which chooses) each token has its own scale."
        )
    if isinstance(layout, Paged) and layout.pool is None:
        check_page(layout.page, codec)
    if isinstance(layout, Latent):
        _check_latent(layout, codec, evict)


def _check_policy(evict: object) -> None:
    """Raise `ProblemError` unless it is a policy; says which members are missing."""
    if isinstance(evict, type):
        raise ProblemError(f"evict is the class {evict.__name__}: expected a policy, such as {evict.__name__}(1024).")
    if not isinstance(evict, Policy):
        missing = [name for name in ("budget", "recent", "start") if not hasattr(evict, name)]
        raise ProblemError(
            f"evict is {evict!r}, without {', '.join(missing)}: expected None or a policy (regard.cache.Eviction), "
            "which has `budget` (tokens that stay), `recent` (how many of the last always stay; 0 or None: none) "
            "and `start()`."
        )
    check_recent(evict)


def start_policy(evict: Policy) -> PolicyState:
    """The state of a policy for a new cache.

    Raises:
        ProblemError: its `start` returned something else; with None the cache would evict nothing.
    """
    state = cast(object, evict.start())  # a user's policy may return anything
    if isinstance(state, EvictionState):
        return cast("EvictionState[Any]", state)
    members = ("append", "observe", "choose", "keep", "crop", "select")
    if isinstance(state, type) or not all(callable(getattr(state, name, None)) for name in members):
        raise ProblemError(
            f"start of {type(evict).__name__} returned {received(state)}: expected the EvictionState of a new cache, "
            "see docs/extending.md, An eviction policy."
        )
    return cast(PolicyState, state)


def check_codec(codec: object, name: str) -> None:
    """Raise `ProblemError` unless it is one of the codecs, a float dtype or None."""
    is_float = isinstance(codec, torch.dtype) and codec.is_floating_point
    if codec is None or isinstance(codec, Int8 | Int4 | Fp8) or (is_float and codec in DTYPES):
        return
    if is_float:
        raise ProblemError(
            f"{name} is {codec}, without scales: expected a float type of 16 bits or more. Use codec=Fp8() or Int4(), "
            "which have scales as well."
        )
    raise ProblemError(
        f"{name} is {codec!r}: expected Int8(), Int4(), Fp8(), a float type such as torch.bfloat16, or None."
    )


def check_page(page: int, codec: object) -> None:
    """Raise `ProblemError` unless a page of `page` tokens holds whole groups of the codec."""
    if isinstance(codec, Codec) and page % TILE:
        raise ProblemError(
            f"pages of {page} tokens with {codec!r}: the codes of {TILE} tokens are interleaved, so a page must be "
            f"a multiple of {TILE} tokens: {page + -page % TILE} would do."
        )


def resolve_keys(codec: Codec | torch.dtype | None, evict: object) -> Codec | torch.dtype | None:
    """The codec with `keys` chosen: "token" where a policy evicts single tokens, else "channel"."""
    if not isinstance(codec, Codec) or codec.keys is not None:
        return codec
    return dataclasses.replace(codec, keys="channel" if evict is None else "token")


def name_of(t: object) -> str:
    """A tensor's dtype, shape and device, None, or the type of anything else, for messages."""
    return describe_tensor(t) if isinstance(t, Tensor) else repr(t) if t is None else type(t).__name__


def _check_latent(layout: Latent, codec: object, evict: object) -> None:
    if isinstance(codec, Codec) and codec.rotate:
        raise ProblemError(
            f"{codec!r} with {layout!r}: a rotation would mix the latent with the rotated key behind it, and values "
            "are the latent alone. Use rotate=False."
        )
    if isinstance(evict, ExpectedAttention) and evict.values:
        raise ProblemError(
            f"{evict!r} with {layout!r}: it reads the norms of values, and latents have no values of their own. "
            "Use values=False."
        )
