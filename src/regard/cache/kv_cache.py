"""`KVCache`: one layer's keys and values, kept in any layout, by any codec, under any policy of forgetting.

It checks what comes in and leaves the keeping to a store (`store.py`), so that every store may trust what it gets, and
whatever is refused changes nothing.
"""

import copy
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.check import check_words, fits, formed, refuse, resolved
from regard.cache.store import CachedTensor, Policy, Store, Watch, check_has_data, describe_tensor, store_for
from regard.describe.mask import Mask
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.hadamard import hadamard
from regard.storage.stored import Contiguous, Layout, Rolling


class KVCache:
    """One layer's keys and values, as many as came so far or as the layout keeps.

    Append what a step adds, and attend to all that comes back; `attend` with `offset=None` puts the queries at the
    last keys, which is where they stand:

    >>> import torch
    >>> from regard import Causal, attend
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> cache, out = KVCache(), []
    >>> for step in (slice(0, 3), slice(3, 4), slice(4, 5)):  # a prompt of three tokens, then one at a time
    ...     keys, values = cache.append(k[:, :, step], v[:, :, step])
    ...     out.append(attend(q[:, :, step], keys, values, mask=Causal()))
    >>> torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal()))
    True
    >>> cache
    KVCache(5 tokens, k [1, 2, 5, 8], v [1, 2, 5, 8], float32: 640 bytes, 8,192 held)

    Keys with a position are stored turned to it.

    Args:
        layout: how tokens lie: `Contiguous`, `Rolling`, `Paged`, `Latent`.
        codec: how numbers are written: `Int8`, `Int4`, `Fp8`, or a float type; None: the type that they come in.
        evict: which tokens are forgotten when there are more than its budget (`regard.cache.evict`); None: none.

    Raises:
        ProblemError: no such word, or words that do not go together.

    >>> from regard.storage.codec import Int8
    >>> from regard.storage.stored import Rolling
    >>> KVCache(Rolling(window=1024, sinks=4), Int8())
    KVCache(Rolling(window=1024, sinks=4, rope=None), Int8(group=32, residual=32, sinks=4, keys=None, rotate=False),
            0 tokens)
    """

    def __init__(
        self, layout: Layout | None = None, codec: Codec | torch.dtype | None = None, evict: Policy | None = None
    ) -> None:
        self.layout, self.codec, self.evict = Contiguous() if layout is None else layout, codec, evict
        check_words(self.layout, codec, evict)
        self._written = resolved(codec, evict)
        self._is_turned = isinstance(codec, Codec) and codec.rotate
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._least = 0

    @property
    def tokens(self) -> int:
        """How many tokens are kept."""
        return 0 if self._store is None else self._store.tokens

    @property
    def tokens_seen(self) -> int:
        """How many tokens were ever appended, and not cropped: the position of the next one."""
        return 0 if self._store is None else self._store.tokens_seen

    @property
    def bytes(self) -> int:
        """Bytes of what is stored, scales included."""
        return 0 if self._store is None else self._store.bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that are held for it, room for tokens to come included."""
        return 0 if self._store is None else self._store.allocated_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of every row as it came, before any codec; 0 before the first."""
        form = None if self._store is None else self._store.form
        return 0 if form is None else form.batch * form.kv_heads * sum(form.dims) * form.dtype.itemsize

    @property
    def min_crop(self) -> int:
        """The fewest tokens that `crop` can leave, but for 0, which is `reset`: `Rolling` and policies forget for good.

        >>> cache = KVCache(Rolling(window=4, sinks=1))
        >>> for count in (7, 1):
        ...     _ = cache.append(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8))
        >>> cache.tokens_seen, cache.min_crop  # a query behind 7 tokens sees 3 of them, and those are there
        (8, 7)
        """
        return 0 if self._store is None else max(self._least, self._store.min_crop)

    def keys_after(self, tokens: int) -> int:
        """How many keys the next `append` of so many tokens hands out, its own included.

        Where a policy forgets, as many as if it forgot nothing.

        >>> cache = KVCache(Rolling(window=4, sinks=1))
        >>> _ = cache.append(torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8))
        >>> cache.tokens, cache.keys_after(1), cache.keys_after(2)
        (7, 4, 5)
        """
        kept = self.tokens
        if tokens and isinstance(self.layout, Rolling):
            kept = min(kept, self.layout.window - 1)
        return kept + tokens

    def append(
        self,
        k: Float[Tensor, "batch kv_heads tokens qk_dim"],
        v: Float[Tensor, "batch kv_heads tokens v_dim"] | None = None,
    ) -> tuple[CachedTensor, CachedTensor]:
        """Store the keys and values of new tokens; all that are kept come back, for `attend`.

        Returns views where a strided tensor can describe the storage, else `StoredTensor` handles. They are valid until
        the next call of a method that changes the cache.

        Args:
            k: [batch, kv_heads, tokens, qk_dim]; tokens may be 0, to read what is stored.
            v: [batch, kv_heads, tokens, v_dim]; None with `Latent` alone, whose values are a part of its keys.

        Raises:
            ProblemError: shapes, type or device that do not belong together or to what is stored; no room; or tensors
                that gradients would flow to, for a cache serves inference: writing in place would break the graph of
                the steps before.
        """
        store = self._store
        if store is None:
            store = store_for(self.layout, self._written, formed(self.layout, k, v))
        elif not fits(k, v, store.form):
            refuse(k, v, store, self.layout)
        if torch.is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad)):
            raise ProblemError(
                "keys or values that gradients flow to were appended to a cache, which serves inference: run under "
                "torch.no_grad() or torch.inference_mode(), or train without a cache on the whole sequence."
            )
        if self._watch is not None and k.shape[2]:
            self._forget(store, self._watch, k.shape[2])
        if self._is_turned:
            k, v = hadamard(k), None if v is None else hadamard(v)
        found = store.append(k, v)
        if self._store is None:
            self._store, self._watch = store, None if self.evict is None else self.evict.start()
        if self._watch is not None:
            self._watch.append(k, v)
        return found

    def observe(
        self,
        q: Float[Tensor, "batch heads queries qk_dim"],
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> None:
        """Show a policy of forgetting the queries of this step, as they went to `attend`; others need none.

        Args:
            q: [batch, heads, queries, qk_dim], those of the tokens that were appended last.
            mask: as `attend` had it; None: `Causal()`.
            scale: of the scores; None for `qk_dim ** -0.5`.

        Raises:
            ProblemError: queries that do not fit what is stored.
        """
        store = self._store
        if self._watch is None or store is None:
            return
        form = store.form
        if not isinstance(cast(object, q), Tensor):
            raise ProblemError(f"q is {type(q).__name__}: expected the tensor of queries that went to attend.")
        if q.ndim != 4 or q.shape[0] != form.batch or q.shape[1] % form.kv_heads or q.shape[3] != form.qk_dim:
            raise ProblemError(
                f"q is {describe_tensor(q)}, and the cache stores keys [{form.batch}, {form.kv_heads}, tokens, "
                f"{form.qk_dim}]: expected queries with the same batch size and dim, and a whole multiple of its heads."
            )
        self._watch.observe(q.detach(), store, mask, scale)

    def forget(self) -> None:
        """Forget at once what the policy would forget before the next token, and give its memory back.

        To be called when `attend` has read what the last `append` gave, and `observe` was told: so of a model's layers
        one at a time holds a prompt whole. Without a policy, or within its budget, nothing happens.

        Raises:
            ProblemError: the policy goes by queries, and did not see those of the last tokens.

        >>> from regard.cache import SinksAndRecent
        >>> cache = KVCache(evict=SinksAndRecent(8))
        >>> _ = cache.append(torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))
        >>> cache.forget()
        >>> cache
        KVCache(SinksAndRecent(budget=8, sinks=4, every=1), 8 tokens of 50, k [1, 2, 8, 8], v [1, 2, 8, 8], float32:
                1,024 bytes, 8,192 held)
        """
        if self._watch is not None and self._store is not None:
            self._forget(self._store, self._watch, 1)

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` of all that were seen: a call that failed, drafts that were not accepted.

        What was given out of the others before is written over by what comes next.

        Raises:
            ProblemError: fewer were seen; or what the next token would look back on is no longer there: `Rolling` and
                policies forget for good (`least`).
        """
        self.check_crop(tokens)
        store = self._store
        if store is None or tokens == self.tokens_seen:
            return
        if tokens == 0:
            self.reset()
            return
        store.crop(tokens)
        if self._watch is not None:
            self._watch.crop(store.tokens)

    def check_crop(self, tokens: int) -> None:
        """Raise what `crop(tokens)` would raise, and change nothing."""
        seen, least = self.tokens_seen, self.min_crop
        if not isinstance(cast(object, tokens), int) or isinstance(tokens, bool) or not 0 <= tokens <= seen:
            raise ProblemError(f"crop({tokens!r}): expected a number from 0 to the {seen} tokens that were seen.")
        if 0 < tokens < least:
            word = "the policy" if self.evict is not None else repr(self.layout)
            raise ProblemError(
                f"crop({tokens}): expected a number from {least} to the {seen} tokens that were seen: of the tokens "
                f"that the next token would look back on, some were forgotten by {word}. Start anew with reset()."
            )

    def reset(self) -> None:
        """Forget everything; the next `append` may be of other sizes."""
        if self._store is not None:
            self._store.reset()
        self._store, self._watch, self._least = None, None, 0

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Make batch row i what row `rows[i]` is now: beams in a new order, or rows repeated or left out.

        Args:
            rows: int64 [batch to be].

        Raises:
            ProblemError: no such rows.
        """
        store = self._store
        batch = None if store is None else store.form.batch
        if not isinstance(cast(object, rows), Tensor) or rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
            what = describe_tensor(rows) if isinstance(cast(object, rows), Tensor) else repr(rows)
            raise ProblemError(f"select({what}): expected the numbers of batch rows, int64 [batch to be].")
        if store is None or batch is None:
            return
        check_has_data(rows, "select")
        if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= batch:
            raise ProblemError(f"select({rows.tolist()}): expected numbers of the batch rows 0 to {batch - 1}.")
        rows = rows.to(store.form.device, torch.int64)
        store.select(rows)
        if self._watch is not None:
            self._watch.select(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own under the same words. A pool in them is shared, and its pages are copied on write."""
        other = KVCache(self.layout, self.codec, self.evict)
        other._store, other._watch = copy.deepcopy((self._store, self._watch), memo)
        other._least = self._least
        return other

    def __repr__(self) -> str:
        words = [] if self.layout == Contiguous() else [repr(self.layout)]
        words += [] if self.codec is None else [str(self.codec).removeprefix("torch.")]
        words += [] if self.evict is None else [repr(self.evict)]
        words.append(
            f"{self.tokens:,} tokens" + (f" of {self.tokens_seen:,}" if self.tokens != self.tokens_seen else "")
        )
        if self._store is None:
            return f"KVCache({', '.join(words)})"
        form = self._store.form
        sides = zip("kv", form.dims, strict=False)
        words += [f"{name} {[form.batch, form.kv_heads, self.tokens, dim]}" for name, dim in sides if dim]
        words.append(str(form.dtype).removeprefix("torch."))
        return f"KVCache({', '.join(words)}: {self.bytes:,} bytes, {self.allocated_bytes:,} held)"

    def _forget(self, store: Store, watch: Watch, coming: int) -> None:
        assert self.evict is not None
        if store.tokens <= self.evict.budget:
            return
        index = watch.choose(store, coming)
        if index is None:
            return
        store.keep(index)
        watch.keep(index)
        self._least = max(self._least, store.tokens_seen - (self.evict.recent or 0))
