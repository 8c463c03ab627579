"""What differs between stores: the one for a layout and a codec, its copies, and its memory for steps.

A new store is a class that fits `Store` and an entry in each of the two tables here, `store_for` and `step_memory`.
"""

import copy
from typing import Any, TypeVar

import torch

from regard.cache.check import check_entries
from regard.cache.dense import DenseStore
from regard.cache.paged import PagedStore
from regard.cache.quantised import QuantisedStore
from regard.cache.rolling import RollingCodes, RollingStore
from regard.cache.steps import PlainSteps, StepMemory
from regard.cache.store import Form, Store
from regard.describe.tensors import has_tangent
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Part, Rolling, StoredTensor
from regard.torch_internals import in_forward_mode

S = TypeVar("S", Store, Store | None)


def store_for(layout: Layout, codec: Codec | torch.dtype | None, form: Form) -> Store:
    """An empty store of this layout."""
    if isinstance(layout, Latent):  # entries are keys of which a part is the value
        check_entries(layout, form)
        layout = Contiguous()
    if isinstance(codec, Codec) and not form.qk_dim:  # latents have values of no channels
        raise ProblemError(
            f"keys have 0 dimensions and values {form.v_dim}, and the cache stores {codec.kind} codes: a codec needs "
            "elements. Use codec=None."
        )
    match layout:
        case Paged():
            return PagedStore(layout, codec, form)
        case Rolling():
            return RollingCodes(layout, codec, form) if isinstance(codec, Codec) else RollingStore(layout, codec, form)
        case Contiguous():
            return QuantisedStore(layout, codec, form) if isinstance(codec, Codec) else DenseStore(layout, codec, form)
        case _:
            raise ProblemError(
                f"layout is {layout!r}: expected Contiguous(), Rolling(window), Paged() or Latent(rank)."
            )


def own_copy(store: S, memo: "dict[int, Any] | None" = None) -> S:
    """A deep copy.

    Raises:
        ProblemError: elements have tangents, which torch leaves out of deep copies of tensors.
    """
    if store is None or isinstance(store, PagedStore):  # whose copies share pages
        return copy.deepcopy(store, memo)
    if in_forward_mode() and any(has_tangent(p.data) for parts in _append_zeros(store, 0) for p in parts):
        raise ProblemError(
            "a cache of keys or values with tangents (forward-mode derivatives) was copied, and the copy would lose "
            "the tangents: append the same tokens to a second cache, or use Paged(), whose copies share pages."
        )
    return copy.deepcopy(store, memo)


def step_memory(store: Store, capacity: int) -> StepMemory:
    """A copy of the stored tokens in memory for `capacity` of them, of which a window of `Rolling` needs none.

    Raises:
        ProblemError: tokens were cropped or evicted before, so that positions are no slots.
    """
    match store:
        case RollingStore() | RollingCodes():
            return store.steps()
        case QuantisedStore():
            return store.steps(capacity)
        case PagedStore() if store.is_coded:
            return store.coded_steps(capacity)
        case _ if store.tokens != store.tokens_seen:
            raise ProblemError("tokens were evicted, so positions are no slots: this cache has no steps.")
        case _:
            return _with_room(store, capacity)


def _with_room(store: Store, capacity: int) -> PlainSteps:
    """The memory of a copy of a plain store that has `capacity` tokens."""
    full = own_copy(store)
    return PlainSteps(tuple(parts[0] for parts in _append_zeros(full, capacity - store.tokens)), full)


def _append_zeros(store: Store, tokens: int) -> list[tuple[Part, ...]]:
    """Append tokens that are zeros; returns the parts of the keys, and of the values if there are any."""
    form = store.form
    shape = form.batch, form.kv_heads, tokens
    k, *v = (torch.zeros(*shape, dim, dtype=form.dtype, device=form.device) for dim in form.dims)
    found = store.append(k, v[0] if v else None)
    return [(t if isinstance(t, StoredTensor) else StoredTensor.of(t)).parts for t in found[: len(form.dims)]]
