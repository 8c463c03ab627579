"""Layers of a model's cache that forget tokens: `Rolling`, or a policy.

They hand out fewer keys than there were tokens. Those that are left stand as if they were the last ones: of 20 tokens
seen and 7 kept, the kept ones are masked as positions 13 to 19. For `Rolling` that is where the keys are (its sinks are
turned there); under a policy of forgetting it keeps their order, which is all that a causal mask looks at.

A padded batch would keep padding in place of the first tokens of its shorter rows, and a mask over the kept tokens of
all rows does not exist. So each row gets a `KVCache` of its own, and its tokens alone come into it:

    row 0   . . . a b c d e        3 of padding: a cache of 5 tokens
    row 1   a b c d e f g h        a cache of 8

Which tokens are padding is known to the attention function, not to `update`: there the new ones wait (`Pending`).
"""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.cache.kv_cache import KVCache
from regard.describe.mask import And, Mask, Not, Or
from regard.describe.mask_by_rule import Causal, KeyLengths
from regard.describe.mask_by_table import TensorMask
from regard.errors import RefusalError
from regard.integrate.cache_layer import KeptLayer, check_crop, untraced
from regard.integrate.cache_move import move
from regard.integrate.heap import give_back
from regard.integrate.layer_mask import LayerMask
from regard.storage.stored import Rolling

WORTH = 2**20
"""Bytes that a layer must have freed for memory to be given back to the system, which takes milliseconds."""

latest: ContextVar[tuple["ForgettingLayer", int] | None] = ContextVar("latest", default=None)
"""The layer that was updated last, if it forgets, and how many keys it gave: the attention that comes next reads them.
"""


def take_latest(keys: int) -> "ForgettingLayer | None":
    """The layer whose keys, so many, the attention that runs now was given, if it forgets."""
    found = latest.get()
    if found is None:
        return None
    latest.set(None)
    return found[0] if found[1] == keys else None


class Pending(NamedTuple):
    """Keys, or values, of new tokens of a padded batch: [batch, kv_heads, tokens, dim], not stored yet."""

    new: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the new tokens."""
        return self.new.shape


class ForgettingLayer(KeptLayer):
    """A layer that forgets tokens. Only regard's attention can read it, for it has to tell what it sees.

    Args:
        make, takes_handles: as for `KeptLayer`.
        is_watched: asked at each update: whether it is regard's attention that reads it.
    """

    is_croppable = False

    def __init__(
        self, make: Callable[[], KVCache], takes_handles: Callable[[], bool], is_watched: Callable[[], bool]
    ) -> None:
        super().__init__(make, takes_handles)
        self._is_watched = is_watched
        self._rows: list[KVCache] = []  # of a padded batch, else none
        self._new: tuple[Tensor, Tensor] | None = None  # tokens whose padding the attention will tell
        self._length, self._is_told = 0, True
        self.is_last = False
        """Whether no layer after it forgets: when this one has, the process gives back what all of them freed."""
        self._is_owed = False  # whether it does so once more with the next tokens, when the whole pass is over

    # ---- what attention reads ---------------------------------------------------------------------------------------

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keep the keys and values of new tokens; what is kept comes back, or of a padded batch the new ones alone.

        Raises:
            RefusalError: an attention reads it that regard cannot see, or that told nothing: a compiled one.
        """
        self._check_watched()
        if self._is_owed:
            self._is_owed = False
            give_back()
        if self._rows:
            found: tuple[Any, Any] = Pending(key_states), Pending(value_states)
        else:
            found = super().update(key_states, value_states)
        self._is_told = False
        self._new = (key_states, value_states) if not self._length or self._rows else None
        self._length += key_states.shape[2]
        latest.set((self, found[0].shape[2]))
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._rows:
            return self._length + query_length, 0
        kept, layout = self.kv.tokens, self.kv.layout
        if isinstance(layout, Rolling):
            kept = min(kept, layout.window - 1)  # which leaves room for a token
        return kept + query_length, self._length - kept

    def get_seq_length(self) -> int:
        return self._length

    @property
    def is_initialized(self) -> bool:
        """Whether anything was kept."""
        return self._length > 0

    # ---- what attention tells it ------------------------------------------------------------------------------------

    def is_padded(self, given: Any) -> bool:
        """Whether a pass has padding, by its mask.

        Raises:
            RefusalError: a mask that does not say.
        """
        if given is not None and not isinstance(given, LayerMask):
            raise RefusalError(
                f"a mask given as a tensor for {self.kv!r}, which forgets tokens: it does not say which keys are left. "
                "Give the padding, [batch, tokens], or take a cache that keeps all."
            )
        self._is_told = True
        return bool(self._rows) or (given is not None and given.padding is not None and not bool(given.padding.all()))

    def fitted(self, given: LayerMask | None, queries: int, keys: int) -> LayerMask | None:
        """The mask of a pass for the keys that this layer came with.

        Layers of one kind share a mask, and may have forgotten differently; what is kept stands before the queries.
        """
        if given is None or given.shape[3] == keys:
            return given
        mask = self._among(given, keys - queries, slice(None), 0)
        return LayerMask(mask, (*given.shape[:3], keys), keys - queries, "cpu")

    def _among(self, given: LayerMask, before: int, rows: slice, skip: int) -> Mask | None:
        """The mask of a pass where `before` tokens are kept, all of which its queries see, without `skip` new ones.

        Raises:
            RefusalError: a mask that may hide some of those.
        """
        if not _shows_all_before(given.mask):
            raise RefusalError(
                f"{given.mask!r} for {self.kv!r}, which forgets tokens: it says by position which keys a query sees, "
                "and the remaining ones have moved. Take a cache that keeps all."
            )
        queries = given.shape[2]
        if given.mask is None or isinstance(given.mask, Causal):
            return given.mask
        if queries == 1 or _is_plain(given.mask):
            return Causal()
        new = given.dense()[rows, :, skip:, given.shape[3] - queries + skip :]
        return TensorMask(F.pad(new, (before, 0), value=True))

    def observe(self, query: Tensor, mask: Mask | None, scale: float | None) -> None:
        """Show a policy the queries of this step, as they went to attention; after a prompt it forgets."""
        self._new = None
        self.kv.observe(query, mask, scale)
        self._forget(query.shape[2])

    def attend_by_row(
        self,
        given: LayerMask | None,
        query: Tensor,
        run: Callable[[Tensor, tuple[Any, Any], Mask | None], Tensor],
        seen_as: Callable[[Tensor], Tensor],
        scale: float | None,
    ) -> Tensor:
        """Attention of a padded batch, row by row: [batch, heads, queries, v_dim], 0 for padding.

        Args:
            given: the mask of the pass, with its padding.
            query: [batch, heads, queries, qk_dim].
            run: attention of a row's queries to what its cache gave, by a mask, the last query at the last key.
            seen_as: the queries as a policy of forgetting is to see them.
            scale: of the scores.

        Raises:
            RefusalError: padding that is not to the left, or that the model computes with.
        """
        queries = query.shape[2]
        skipped = self._skipped(given, query.shape[0], queries)
        assert self._new is not None
        (k, v), self._new = self._new, None
        if not self._rows:
            self.kv.reset()
            self._rows = [self._make() for _ in skipped]
        out: list[Tensor | None] = []
        for row, (kv, skip) in enumerate(zip(self._rows, skipped, strict=True)):
            if skip == queries:
                out.append(None)
                continue
            q, new_k, new_v = (t[row : row + 1, :, skip:] for t in (query, k, v))
            found = self._stored(kv, new_k, new_v)
            before = found[0].shape[2] - q.shape[2]
            mask = Causal() if given is None else self._among(given, before, slice(row, row + 1), skip)
            out.append(F.pad(run(q, self._handles(found), mask), (0, 0, skip, 0)))
            kv.observe(seen_as(q), mask, scale)
        self._forget(queries)
        zero = torch.zeros_like(next(o for o in out if o is not None))
        return torch.cat([zero if o is None else o for o in out])

    def _forget(self, queries: int) -> None:
        """After a prompt, keep what the policy keeps before the next layer gets its own tokens."""
        if queries == 1:
            return
        held = sum(kv.allocated_bytes for kv in self.caches)
        for kv in self.caches:
            kv.forget()
        self._is_owed = self.is_last and held - sum(kv.allocated_bytes for kv in self.caches) >= WORTH
        if self._is_owed:
            give_back()

    def _skipped(self, given: LayerMask | None, batch: int, queries: int) -> list[int]:
        """How many of the new tokens of each row are padding, all before its first own one."""
        if not self._rows and (self._new is None or not self._takes_handles()):
            raise self._refused("its padding came after its first tokens, or the model computes with its keys")
        if given is None or given.padding is None:
            return [0] * batch
        real = given.padding[:, self._length - queries : self._length]
        skipped = queries - real.sum(1)
        at = torch.arange(queries, device=real.device)
        begun = torch.tensor([kv.tokens_seen > 0 for kv in self._rows] or [False] * batch, device=real.device)
        if not torch.equal(real, at >= skipped[:, None]) or bool((begun & (skipped > 0)).any()) or not bool(real.any()):
            raise self._refused("its padding is not to the left of each row")
        return skipped.tolist()

    def _refused(self, why: str) -> RefusalError:
        return RefusalError(
            f"a padded batch for {self.kv!r}, which forgets tokens: {why}. Pad to the left, generate from prompts "
            "of one length, or take a cache that keeps all."
        )

    # ---- what generation does with it -------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        check_crop(tokens_to_remove)
        for kv in self.caches:
            if tokens_to_remove and kv.tokens_seen:
                kv.crop(max(kv.tokens_seen + tokens_to_remove, 0))
        self._length, self._is_told = max(self._length + tokens_to_remove, 0), True

    def activate_past_recording(self) -> None:
        """Be ready to take drafts back, as assisted decoding does.

        Raises:
            RefusalError: always: the cache would forget for the drafts' sake what it should have kept without them.
        """
        raise RefusalError(
            f"{self.kv!r} cannot serve assisted or prompt-lookup decoding: drafts that are taken back would have "
            "cost it tokens for good. Generate without an assistant, or take a cache that keeps all."
        )

    def reset(self) -> None:
        super().reset()
        self._rows, self._new, self._length, self._is_told = [], None, 0, True

    def offload(self) -> None:
        for kv in self.caches:
            move(kv, "cpu")

    def prefetch(self) -> None:
        if self._like is not None:
            for kv in self.caches:
                move(kv, self._like[0].device)

    @property
    def caches(self) -> list[KVCache]:
        """The one for all rows, or one for each."""
        return self._rows or [self.kv]

    def _select(self, rows: Tensor) -> None:
        if not self._rows:
            super()._select(rows)
            return
        chosen, old = rows.tolist(), self._rows
        self._rows = [old[row] if row not in chosen[:i] else copy.deepcopy(old[row]) for i, row in enumerate(chosen)]
        self.batch_size = len(chosen)

    def _read(self, side: int) -> Tensor | None:
        """Of a padded batch, what rows keep less than the longest is 0, to the left."""
        if not self._rows or self._like is None:
            return super()._read(side)
        like = [t[:1] for t in self._like]
        found = [self._tensors(self._stored(kv, *like))[side] if kv.tokens_seen else like[side] for kv in self._rows]
        longest = max(t.shape[2] for t in found)
        return torch.cat([F.pad(t, (0, 0, longest - t.shape[2], 0)) for t in found])

    def _check_watched(self) -> None:
        if not self._is_watched() and (self.kv.evict is not None or isinstance(self.kv.layout, Rolling)):
            word = self.kv.evict if self.kv.evict is not None else self.kv.layout
            raise RefusalError(
                f"{word!r} forgets tokens, and an attention that is not regard's would not know which: a padded batch "
                "would go wrong unseen. Let regard compute the attention, use_regard(model), and make the cache of "
                "the same model, regard_cache(model, ...)."
            )
        if not self._is_told:
            raise RefusalError(
                f"{self.kv!r} was read by an attention that did not tell what it saw, as in a compiled model, "
                "or by none because a call failed. Run the model uncompiled, or take a cache that keeps all; after a "
                "call that failed, crop() or reset()."
            )


def _shows_all_before(mask: Mask | None) -> bool:
    """Whether a query sees all tokens before it, but for padding, which no row keeps: what is causal, and more."""
    if isinstance(mask, And):
        return _shows_all_before(mask.a) and _shows_all_before(mask.b)
    if isinstance(mask, Or):
        return _shows_all_before(mask.a) or _shows_all_before(mask.b)
    return mask is None or isinstance(mask, Causal) or _is_padding(mask)


def _is_plain(mask: Mask) -> bool:
    """Whether it says `Causal()` and what is padding, and no more."""
    return (
        _is_plain(mask.a) and _is_plain(mask.b)
        if isinstance(mask, And)
        else isinstance(mask, Causal) or _is_padding(mask)
    )


def _is_padding(mask: Mask) -> bool:
    return isinstance(mask.a if isinstance(mask, Not) else mask, KeyLengths)
