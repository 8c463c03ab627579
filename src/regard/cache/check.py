"""What a `KVCache` takes: words that go together, and keys and values of one form. Everything else is named."""

import dataclasses

import torch
from torch import Tensor

from regard.cache.expected_attention import ExpectedAttention
from regard.cache.pool import PagePool
from regard.cache.room import check_pages
from regard.cache.store import Form, Policy, Store, describe_tensor, has_store
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Latent, Layout, Paged, Rolling


def formed(layout: Layout, k: object, v: object) -> Form:
    """The form of what is kept from now on; raises where k and v make none."""
    latent = isinstance(layout, Latent)
    if not isinstance(k, Tensor) or not isinstance(v, Tensor if not latent else type(None)):
        expected = "entries and no values, append(entries)" if latent else "append(k, v)"
        raise ProblemError(f"k is {_named(k)} and v {_named(v)}: expected {expected}, tensors.")
    w = k if v is None else v
    if (
        k.ndim != 4 or w.ndim != 4 or k.shape[:3] != w.shape[:3] or k.dtype != w.dtype or k.device != w.device
        or not k.is_floating_point()
    ):  # fmt: skip
        raise ProblemError(
            f"k is {_named(k)} and v {_named(v)}: expected [batch, kv_heads, tokens, dim] with the same batch, "
            "kv_heads and tokens, of one float type and on one device."
        )
    return Form(k.shape[0], k.shape[1], k.shape[3], None if v is None else v.shape[3], k.dtype, k.device)


def refuse(k: object, v: object, store: Store, layout: Layout) -> None:
    """Raise what is wrong with k and v, unless it is nothing."""
    given, form = formed(layout, k, v), store.form
    if given == form:
        return
    for name, t, dim, theirs in (("k", k, form.qk_dim, given.qk_dim), ("v", v, form.v_dim, given.v_dim)):
        if (*given[:2], theirs, *given[4:]) != (*form[:2], dim, *form[4:]):
            shape = [form.batch, form.kv_heads, store.tokens, dim]
            raise ProblemError(
                f"{name} is {_named(t)}, and the cache holds {str(form.dtype).removeprefix('torch.')} {shape} on "
                f"{form.device}: only the number of tokens may differ. A new sequence needs a new cache, or "
                "reset()."
            )


def fits(k: Tensor, v: Tensor | None, form: Form) -> bool:
    """Whether k and v are of the form; quick, for it is asked every step."""
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


def check_words(layout: object, codec: object, evict: object) -> None:
    """Raise `ProblemError` unless they are words, and go together."""
    if not has_store(layout):
        raise ProblemError(f"layout is {layout!r}: expected Contiguous(), Rolling(window), Paged() or Latent(rank).")
    if not (codec is None or isinstance(codec, Codec) or (isinstance(codec, torch.dtype) and codec.is_floating_point)):
        raise ProblemError(
            f"codec is {codec!r}: expected Int8(), Int4(), Fp8(), a float type as torch.bfloat16, or None."
        )
    if evict is not None and (isinstance(evict, type) or not isinstance(evict, Policy)):
        raise ProblemError(f"evict is {evict!r}: expected a policy of regard.cache.evict with a budget, or None.")
    if evict is not None and isinstance(layout, Rolling):
        raise ProblemError(
            f"{layout!r} forgets by itself, so it takes no evict={evict!r}: leave one of the two out, or take "
            "Contiguous() with the policy."
        )
    if isinstance(codec, Codec) and codec.keys == "channel" and evict is not None:
        raise ProblemError(
            f'{codec!r} with evict={evict!r}: tokens that share scales cannot go one by one; with keys="token" (or '
            "None, which chooses) each has a scale of its own."
        )
    if isinstance(layout, Paged):
        _check_paged(layout, resolved(codec, evict))
    if isinstance(codec, Codec) and codec.rotate and isinstance(layout, Latent):
        raise ProblemError(
            f"{codec!r} with {layout!r}: a rotation would mix the latent with the rotated key behind it, and values "
            "are the latent alone: rotate=False."
        )
    if isinstance(evict, ExpectedAttention) and evict.values and isinstance(layout, Latent):
        raise ProblemError(
            f"{evict!r} with {layout!r}: it looks at the norms of values, and latents have none of their own: "
            "values=False."
        )


def resolved(codec: Codec | torch.dtype | None, evict: object) -> Codec | torch.dtype | None:
    """The codec with its `keys` decided."""
    if not isinstance(codec, Codec) or codec.keys is not None:
        return codec
    return dataclasses.replace(codec, keys="channel" if evict is None else "token")


def _check_paged(layout: Paged, codec: Codec | torch.dtype | None) -> None:
    pool = layout.pool
    if pool is None:
        check_pages(layout.page, codec)
        return
    if not isinstance(pool, PagePool):
        raise ProblemError(f"{layout!r}: expected a regard.cache.PagePool, or None for one of its own.")
    room = pool.room
    if room.page != layout.page:
        raise ProblemError(
            f"{layout!r}: its pages are of {room.page} tokens, so say Paged(page={room.page}, pool=...)."
        )
    if room.kept_as != codec:
        raise ProblemError(
            f"the cache has codec={codec!r} and its pool codec={room.kept_as!r}: what lies in one pool is written in "
            "one way; give both the same."
        )


def _named(t: object) -> str:
    return describe_tensor(t) if isinstance(t, Tensor) else repr(t) if t is None else type(t).__name__
