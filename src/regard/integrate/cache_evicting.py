"""Layers of a model's cache that drop tokens before the end of the text: `Rolling`, or an eviction policy.

They return fewer keys than there were tokens. The kept ones are masked as if they were the last ones: of 20 tokens
appended and 7 kept, the kept ones get positions 13 to 19. For `Rolling` that is where the keys are (it re-rotates its
sinks to there); under a policy it keeps their order, which is all that a causal mask looks at.

A padded batch would keep padding in place of the first tokens of its shorter rows, and no one mask describes what all
rows keep. So each row gets a `KVCache` of its own, for its tokens alone:

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
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.errors import ProblemError, RefusalError
from regard.integrate.cache_layers import StoredLayer, untraced
from regard.integrate.cache_move import move
from regard.integrate.heap import trim_heap
from regard.integrate.layer_mask import LayerMask, mask_over_kept
from regard.integrate.lazy import LazyTensor
from regard.storage.stored import Rolling

TRIM_BYTES = 2**20
"""Bytes that a layer must have freed for memory to be returned to the system, which takes milliseconds."""

latest: ContextVar[tuple["EvictingLayer", Any, Any] | None] = ContextVar("latest", default=None)
"""The layer that was updated last, if it evicts, and the keys and values that it returned: the next attention reads
them."""


def take_latest(key: Any, value: Any) -> "tuple[EvictingLayer, bool] | None":
    """The evicting layer whose keys and values reach an attention function, and whether they are as it returned them.

    None where the keys are of another layer.
    """
    found = latest.get()
    if found is None:
        return None
    latest.set(None)
    layer, *returned = found
    if returned[0].shape[2] != key.shape[2]:
        return None
    pairs = zip((key, value), returned, strict=True)
    return layer, all(_source(one) is not None and _source(one) is _source(own) for one, own in pairs)


def _source(t: Any) -> Any:
    """What identifies keys or values that no code has computed with; None where some has."""
    return t if not isinstance(t, LazyTensor) else None if t.is_dense else t.source


class Pending(NamedTuple):
    """Keys, or values, of new tokens of a padded batch: [batch, kv_heads, tokens, dim], not appended yet."""

    new: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the new tokens."""
        return self.new.shape


class EvictingLayer(StoredLayer):
    """A layer that drops tokens. Only regard's attention can read it, for that tells it the padding and the queries.

    Args:
        make, is_read_by_regard: as for `StoredLayer`.
    """

    is_croppable = False

    def __init__(self, make: Callable[[], KVCache], is_read_by_regard: Callable[[], bool]) -> None:
        super().__init__(make, is_read_by_regard)
        self._rows: list[KVCache] = []  # of a padded batch, else none
        self._new: tuple[Tensor, Tensor] | None = None  # new tokens, until the attention function tells their padding
        self._length, self._was_read = 0, True
        self.is_last = False
        """Whether no layer after it evicts: after its own eviction the process returns what all layers freed."""
        self.is_shared = False
        """Whether later layers of a pass read its keys as well (Gemma 3n): then it evicts before the next pass."""
        self._trims_again = False  # with the next tokens, when the whole pass is over

    # ---- what attention reads ---------------------------------------------------------------------------------------

    @untraced
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append the keys and values of new tokens, and return what is kept; of a padded batch the new ones alone.

        Raises:
            RefusalError: another attention than regard's is to read it, or the last one did not report what it read,
                as in a compiled model, or where the model computes attention by itself.
        """
        self._check_reader()
        if self._trims_again:
            self._trims_again = False
            trim_heap()
        if self._rows:
            found: tuple[Any, Any] = self._pending(key_states), self._pending(value_states)
        else:
            found = super().update(key_states, value_states)
        self._was_read = False
        self._new = (key_states, value_states) if not self._length or self._rows else None
        self._length += key_states.shape[2]
        latest.set((self, *found))
        return found

    def _pending(self, new: Tensor) -> LazyTensor:
        def refuse() -> Tensor:
            raise self._refused_padding("the model computes with its keys or values before attention does")

        return LazyTensor(Pending(new), new.shape, new, refuse)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._rows:
            return self._length + query_length, 0
        kept, layout = self.kv.tokens, self.kv.layout
        if isinstance(layout, Rolling):
            kept = min(kept, layout.window - 1)  # which leaves room for a token
        return kept + query_length, self._length - kept

    def prepare_pass(self) -> None:
        """Evict what later layers of the last pass read, before masks are made for the keys that are left."""
        if self.is_shared:
            for kv in self.caches:
                kv.forget()

    def get_seq_length(self) -> int:
        return self._length

    @property
    def is_initialized(self) -> bool:
        """Whether there are any tokens."""
        return self._length > 0

    # ---- what the attention function calls --------------------------------------------------------------------------

    def is_padded(self, layer_mask: Any) -> bool:
        """Whether a pass has padding, by its mask.

        Raises:
            RefusalError: the mask does not tell.
        """
        if layer_mask is not None and not isinstance(layer_mask, LayerMask):
            raise RefusalError(
                f"a mask given as a tensor for {self.kv!r}, which drops tokens: it does not tell which keys are left. "
                "Give the padding, [batch, tokens], or use a cache that keeps all."
            )
        return bool(self._rows) or (
            layer_mask is not None and layer_mask.padding is not None and not bool(layer_mask.padding.all())
        )

    def mask_for(self, layer_mask: LayerMask | None, queries: int, keys: int) -> LayerMask | None:
        """The mask of a pass over the keys of this layer.

        Layers of one kind share a mask, and may have dropped different numbers of tokens.
        """
        if layer_mask is None or layer_mask.shape[3] == keys:
            return layer_mask
        mask = mask_over_kept(layer_mask, keys - queries, slice(None), 0, self.kv)
        return LayerMask(mask, (*layer_mask.shape[:3], keys), keys - queries, "cpu", dropped=self._length - keys)

    def observe(self, query: Tensor, mask: Mask | None, scale: float | None) -> None:
        """Show the policy the queries of this step, as attention used them; after a prompt, evict."""
        self._new = None
        self.kv.observe(query, mask, scale)
        self._was_read = True
        self._evict(query.shape[2])

    def attend_by_row(
        self,
        layer_mask: LayerMask | None,
        query: Tensor,
        run: Callable[[Tensor, tuple[Any, Any], Mask | None], Tensor],
        observed: Callable[[Tensor], Tensor],
        scale: float | None,
        is_unchanged: bool,
    ) -> Tensor:
        """Attention of a padded batch, row by row: [batch, heads, queries, v_dim], 0 for padding.

        Args:
            layer_mask: the mask of the pass, with its padding.
            query: [batch, heads, queries, qk_dim].
            run: attention of a row's queries to what its cache returned, under a mask, the last query at the last key.
            observed: makes the queries that a policy observes.
            scale: of the scores.
            is_unchanged: whether the keys and values are those that `update` returned.

        Raises:
            RefusalError: padding that is not to the left, or the model computed with the keys or values.
        """
        if self._new is None or not is_unchanged:
            raise self._refused_padding("its padding came after its first tokens, or the model computes with its keys")
        queries = query.shape[2]
        skipped = self._padding_of_rows(layer_mask, query.shape[0], queries)
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
            found = self._append_to(kv, new_k, new_v)
            kept = found[0].shape[2] - q.shape[2]
            mask = (
                Causal() if layer_mask is None else mask_over_kept(layer_mask, kept, slice(row, row + 1), skip, self.kv)
            )
            out.append(F.pad(run(q, self._sources(found), mask), (0, 0, skip, 0)))
            kv.observe(observed(q), mask, scale)
        self._was_read = True
        self._evict(queries)
        zero = torch.zeros_like(next(o for o in out if o is not None))
        return torch.cat([zero if o is None else o for o in out])

    def _evict(self, queries: int) -> None:
        """After a prompt, evict before the next layer gets its own tokens."""
        if queries == 1 or self.is_shared:
            return
        before = sum(kv.allocated_bytes for kv in self.caches)
        for kv in self.caches:
            kv.forget()
        self._trims_again = self.is_last and before - sum(kv.allocated_bytes for kv in self.caches) >= TRIM_BYTES
        if self._trims_again:
            trim_heap()

    def _padding_of_rows(self, layer_mask: LayerMask | None, batch: int, queries: int) -> list[int]:
        """How many of the new tokens of each row are padding, all before its first own one."""
        if layer_mask is None or layer_mask.padding is None:
            return [0] * batch
        real = layer_mask.padding[:, self._length - queries : self._length]
        skipped = queries - real.sum(1)
        at = torch.arange(queries, device=real.device)
        begun = torch.tensor([kv.tokens_seen > 0 for kv in self._rows] or [False] * batch, device=real.device)
        if not torch.equal(real, at >= skipped[:, None]) or bool((begun & (skipped > 0)).any()) or not bool(real.any()):
            raise self._refused_padding("its padding is not to the left of each row")
        return skipped.tolist()

    def _refused_padding(self, why: str) -> RefusalError:
        return RefusalError(
            f"a padded batch for {self.kv!r}, which drops tokens: {why}. Pad to the left, generate from prompts "
            "of one length, or use a cache that keeps all."
        )

    # ---- what generation does with it -------------------------------------------------------------------------------

    def check_crop(self, tokens_to_remove: int) -> None:
        if self._rows and not self._was_read and -self._length < tokens_to_remove < 0:
            raise ProblemError(
                f"crop({tokens_to_remove}): the last call failed in the attention to a padded batch, when only some "
                "rows had its tokens. Start anew, with reset()."
            )
        super().check_crop(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        for kv in self.caches:
            if tokens_to_remove and kv.tokens_seen:
                kv.crop(max(kv.tokens_seen + tokens_to_remove, 0))
        self._length, self._was_read = max(self._length + tokens_to_remove, 0), True

    def activate_past_recording(self) -> None:
        """Prepare for drafts that may be rejected, as assisted decoding does.

        Raises:
            RefusalError: always: for rejected drafts the cache would drop tokens that it keeps without them.
        """
        raise RefusalError(
            f"{self.kv!r} cannot serve assisted or prompt-lookup decoding: rejected drafts would have cost it tokens "
            "for good. Generate without an assistant, or use a cache that keeps all."
        )

    def reset(self) -> None:
        super().reset()
        self._rows, self._new, self._length, self._was_read = [], None, 0, True

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
        """Rows of a padded batch are padded with 0, to the left."""
        if not self._rows or self._like is None:
            return super()._read(side)
        like = [t[:1] for t in self._like]
        found = [self._dense(self._append_to(kv, *like))[side] if kv.tokens_seen else like[side] for kv in self._rows]
        longest = max(t.shape[2] for t in found)
        return torch.cat([F.pad(t, (0, 0, longest - t.shape[2], 0)) for t in found])

    def _check_reader(self) -> None:
        if not self._is_read_by_regard() and (self.kv.evict is not None or isinstance(self.kv.layout, Rolling)):
            policy = self.kv.evict if self.kv.evict is not None else self.kv.layout
            raise RefusalError(
                f"{policy!r} drops tokens, and an attention that is not regard's would not know which: a padded batch "
                "would be wrong without an error. Let regard compute the attention, use_regard(model), and make the "
                "cache of the same model, regard_cache(model, ...)."
            )
        if not self._was_read:
            raise RefusalError(
                f"{self.kv!r} was read by an attention that did not report what it read: that of a compiled model, or "
                "one that the model computes without asking transformers' AttentionInterface; or by none because a "
                "call failed. Run the model uncompiled, or use a cache that keeps all; after a call that failed, "
                "crop() or reset()."
            )
