"""`KVCache`: the keys and values of one attention layer, in any layout, with any codec and any eviction policy.

It checks every argument and passes it on to a store (`store.py`), so a store may rely on what it receives, and a call
that is refused changes nothing.
"""

import copy
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cache.check import (
    check_fits,
    check_inference,
    check_options,
    fits,
    form_of,
    resolve_keys,
    start_policy,
)
from regard.cache.evict import EvictionState, check_chosen
from regard.cache.paged import PagedStore, check_paged
from regard.cache.steps import StepCache
from regard.cache.store import (
    CachedTensor,
    Policy,
    PolicyState,
    Store,
    check_has_data,
    describe_tensor,
    leading_channels,
    replacement,
)
from regard.cache.store_kinds import own_copy, step_memory, store_for
from regard.describe.mask import Mask
from regard.describe.suggestions import suggest_keywords
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.storage.codec import Codec
from regard.storage.hadamard import hadamard
from regard.storage.stored import Contiguous, Latent, Layout, Paged, Rolling


class KVCache:
    """The keys and values of one layer.

    Append the keys and values of new tokens, and attend to everything that comes back. With `offset=None`, `attend`
    puts the queries at the last keys, which is their position:

    >>> import torch
    >>> from regard import Causal, attend
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> cache, out = KVCache(), []
    >>> for step in (slice(0, 3), slice(3, 4), slice(4, 5)):  # prefill of three tokens, then decode one at a time
    ...     keys, values = cache.append(k[:, :, step], v[:, :, step])
    ...     out.append(attend(q[:, :, step], keys, values, mask=Causal()))
    >>> torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal()))
    True
    >>> cache
    KVCache(5 tokens, k [1, 2, 5, 8], v [1, 2, 5, 8], float32: 640 bytes, 8,192 allocated)

    Keys with a rotary embedding are stored rotated.

    Args:
        layout: how tokens are arranged in memory: `Contiguous`, `Rolling`, `Paged`, `Latent`; None: `Contiguous()`.
        codec: how elements are stored: `Int8`, `Int4`, `Fp8`, or a float type; None: the type of the first tokens.
        evict: which tokens are evicted when there are more than its budget (`regard.cache.evict`); None: none.

    Raises:
        ProblemError: not a layout, codec or policy, or three that do not work together.

    >>> from regard.storage.codec import Int8
    >>> from regard.storage.stored import Rolling
    >>> KVCache(Rolling(window=1024, sinks=4), Int8())
    KVCache(Rolling(window=1024, sinks=4, rope=None), Int8(group=32, residual=32, sinks=4, keys=None, rotate=False),
            0 tokens)
    """

    @suggest_keywords
    def __init__(
        self, layout: Layout | None = None, codec: Codec | torch.dtype | None = None, evict: Policy | None = None
    ) -> None:
        self.layout, self.codec, self.evict = Contiguous() if layout is None else layout, codec, evict
        check_options(self.layout, codec, evict)
        self._stored_as = resolve_keys(codec, evict)
        if isinstance(self.layout, Paged):
            check_paged(self.layout, self._stored_as)
        self._is_rotated = isinstance(codec, Codec) and codec.rotate
        self._store: Store | None = None
        self._policy_state: PolicyState | None = None
        self._min_crop = 0

    @property
    def tokens(self) -> int:
        """How many tokens are stored."""
        return 0 if self._store is None else self._store.tokens

    @property
    def tokens_seen(self) -> int:
        """How many tokens were appended and not cropped, evicted ones included: the position of the next token."""
        return 0 if self._store is None else self._store.tokens_seen

    @property
    def bytes(self) -> int:
        """Bytes of the stored tokens, scales included."""
        return 0 if self._store is None else self._store.bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated memory, space for later tokens included."""
        return 0 if self._store is None else self._store.allocated_bytes

    @property
    def has_gaps(self) -> bool:
        """Whether tokens between kept ones may be evicted: by a policy, or by `Rolling` behind its sinks."""
        return self.evict is not None or (isinstance(self.layout, Rolling) and self.layout.sinks > 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of every row before any codec; 0 before the first token."""
        form = None if self._store is None else self._store.form
        return 0 if form is None else form.batch * form.kv_heads * sum(form.dims) * form.dtype.itemsize

    @property
    def min_crop(self) -> int:
        """The fewest tokens that `crop` can leave, except 0, which is `reset`: `Rolling` and policies evict for good.

        >>> cache = KVCache(Rolling(window=4, sinks=1))
        >>> for count in (7, 1):
        ...     _ = cache.append(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8))
        >>> cache.tokens_seen, cache.min_crop  # a query after 7 tokens sees 3 of them, and those are stored
        (8, 7)
        """
        return 0 if self._store is None else max(self._min_crop, self._store.min_crop)

    def keys_after(self, tokens: int) -> int:
        """How many keys the next `append` of `tokens` tokens returns, its own included.

        With a policy, as many as if it evicted nothing.

        Raises:
            ProblemError: `tokens` is no whole number, or less than 0.

        >>> cache = KVCache(Rolling(window=4, sinks=1))
        >>> _ = cache.append(torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8))
        >>> cache.tokens, cache.keys_after(1), cache.keys_after(2)
        (7, 4, 5)
        """
        tokens, stored = whole(tokens, "keys_after(tokens)", least=0), self.tokens
        if tokens and isinstance(self.layout, Rolling):
            stored = min(stored, self.layout.window - 1)
        return stored + tokens

    def append(
        self,
        k: Float[Tensor, "batch kv_heads tokens qk_dim"],
        v: Float[Tensor, "batch kv_heads tokens v_dim"] | None = None,
    ) -> tuple[CachedTensor, CachedTensor]:
        """Store the keys and values of new tokens; returns all stored keys and values, for `attend`.

        Returns views where a strided tensor can describe the storage, else `StoredTensor` handles. They are valid until
        the next call of a method that changes the cache.

        Args:
            k: [batch, kv_heads, tokens, qk_dim]; tokens may be 0, to read what is stored.
            v: [batch, kv_heads, tokens, v_dim]; None only with `Latent`, whose values are a part of its keys.

        Raises:
            ProblemError: shapes, dtypes or devices that do not fit one another or what is stored; a fixed capacity or
                a pool that is full; tensors that require gradients, or derivatives of `torch.func`: a cache is for
                inference; or tensors with tangents (forward mode) that a codec would lose.
        """
        store, state = self._store, self._policy_state
        form = form_of(k, v, self.layout) if store is None else store.form
        if store is not None and not fits(k, v, form):
            check_fits(k, v, store, self.layout)
        check_inference(k, v, "cache")
        if store is None:
            store = store_for(self.layout, self._stored_as, form)
            state = None if self.evict is None else start_policy(self.evict)
        if self._policy_state is not None and k.shape[2]:
            self._evict(store, k.shape[2])
            store = cast(Store, self._store)
        stored = (hadamard(k), None if v is None else hadamard(v)) if self._is_rotated else (k, v)
        seen = store.tokens_seen
        try:
            cached = store.append(*stored)
            if isinstance(self.layout, Latent):
                cached = cached[0], leading_channels(cached[0], self.layout.rank)
            if self._store is None:
                self._store, self._policy_state = store, state
            if self._policy_state is not None:
                self._policy_state.append(k, v)
                if not seen and isinstance(self._policy_state, EvictionState):
                    self._policy_state.check_recorded(k)
            return cached  # noqa: TRY300  # inside, so that Ctrl-C cannot come after the tokens are stored
        except BaseException:  # a user's policy failed, or Ctrl-C: remove the tokens again
            if self.tokens_seen > seen:
                self.crop(seen)
            raise

    def observe(
        self,
        q: Float[Tensor, "batch heads queries qk_dim"],
        mask: Mask | None = None,
        scale: float | None = None,
    ) -> None:
        """Show a policy the queries of this step as they went to `attend`. Without a policy it does nothing.

        Raises:
            ProblemError: queries that do not fit what is stored.
        """
        store = self._usable_store()
        if self._policy_state is None or store is None:
            return
        form = store.form
        if not isinstance(cast(object, q), Tensor):
            raise ProblemError(f"q is {type(q).__name__}: expected the tensor of queries that went to attend.")
        if q.ndim != 4 or q.shape[0] != form.batch or q.shape[1] % form.kv_heads or q.shape[3] != form.qk_dim:
            raise ProblemError(
                f"q is {describe_tensor(q)}, and the cache stores keys [{form.batch}, {form.kv_heads}, tokens, "
                f"{form.qk_dim}]: expected queries with the same batch size and dim, and a whole multiple of its heads."
            )
        state = copy.copy(self._policy_state)
        state.observe(q.detach(), store, mask, scale)
        self._policy_state = state

    def forget(self) -> None:
        """Evict now what the policy would evict before the next token, and free its memory.

        Call it after `attend` has read the result of the last `append` and `observe` has its queries: then only one
        layer of a model at a time stores a whole prompt. Without a policy, or within its budget, it does nothing.

        Raises:
            ProblemError: the policy needs queries, and did not see those of the last tokens.

        >>> from regard.cache import SinksAndRecent
        >>> cache = KVCache(evict=SinksAndRecent(8))
        >>> _ = cache.append(torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))
        >>> cache.forget()
        >>> cache
        KVCache(SinksAndRecent(budget=8, sinks=4, every=1), 8 tokens of 50, k [1, 2, 8, 8], v [1, 2, 8, 8], float32:
                1,024 bytes, 8,192 allocated)
        """
        store = self._usable_store()
        if self._policy_state is not None and store is not None:
            self._evict(store, 1)

    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` of all tokens that were seen, for example drafts that were not accepted.

        The next append may overwrite tensors and handles that `append` returned before.

        Raises:
            ProblemError: fewer tokens were seen; or tokens that are visible after the crop were evicted (`min_crop`).
        """
        tokens = whole(tokens, "the argument of crop")
        self.check_crop(tokens)
        store = self._store
        if store is None or tokens == self.tokens_seen:
            return
        if tokens == 0:
            self.reset()
            return
        state = self._policy_state
        if state is not None:
            state = copy.copy(state)
            state.crop(store.tokens - (store.tokens_seen - tokens))
        changed = replacement(store)
        changed.crop(tokens)
        self._store, self._policy_state = changed, state

    def check_crop(self, tokens: int) -> None:
        """Raise what `crop(tokens)` would raise, and change nothing."""
        seen, min_crop = self.tokens_seen, self.min_crop
        tokens = whole(tokens, "the argument of crop")
        if not 0 <= tokens <= seen:
            raise ProblemError(f"crop({tokens!r}): expected 0 to {seen}, the tokens seen so far.")
        if tokens:
            self._usable_store()
        if 0 < tokens < min_crop:
            owner = "the policy" if self.evict is not None else repr(self.layout)
            raise ProblemError(
                f"crop({tokens}): expected {min_crop} to {seen}, the tokens seen so far: some tokens "
                f"visible to the next token were evicted by {owner}. Start again with reset()."
            )

    def reset(self) -> None:
        """Remove everything; the next `append` may have other sizes."""
        if self._store is not None:
            self._store.reset()
        self._store, self._policy_state, self._min_crop = None, None, 0

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Make batch row i a copy of row `rows[i]`: beams in a new order, or rows repeated or left out.

        Args:
            rows: int64 [new batch].

        Raises:
            ProblemError: rows that do not exist.
        """
        store = self._usable_store()
        batch = None if store is None else store.form.batch
        if not isinstance(cast(object, rows), Tensor) or rows.ndim != 1 or rows.dtype not in (torch.int64, torch.int32):
            what = describe_tensor(rows) if isinstance(cast(object, rows), Tensor) else repr(rows)
            raise ProblemError(f"select({what}): expected the indices of batch rows, int64 [new batch].")
        if store is None or batch is None:
            return
        check_has_data(rows, "select")
        if not len(rows) or int(rows.min()) < 0 or int(rows.max()) >= batch:
            raise ProblemError(f"select({rows.tolist()}): expected indices of the batch rows 0 to {batch - 1}.")
        rows = rows.to(store.form.device, torch.int64)
        state = self._policy_state
        if state is not None:
            state = copy.copy(state)
            state.select(rows)
        changed = replacement(store)
        changed.select(rows)
        self._store, self._policy_state = changed, state

    @torch.inference_mode(mode=False)  # its memory is written to in and out of inference mode
    def steps(self, capacity: int | None = None) -> StepCache:
        """A copy of what is stored, for steps of one token whose position is on the device, as CUDA graphs need it.

        Pages are shared until one of the two caches writes to them.

        Args:
            capacity: tokens that there will be at most, those of now included; None only with `Rolling`. For a step
                beyond see `StepCache.append`.

        Raises:
            ProblemError: nothing is stored; a capacity that does not fit; a policy; tokens that were cropped or
                evicted before; codes and values without channels.
        """
        store, layout = self._usable_store(), self.layout
        if store is None or not store.tokens:
            raise ProblemError("steps() of an empty cache: append the prompt first.")
        if self.evict is not None:
            raise ProblemError(
                f"steps() of a cache with {self.evict!r}: it chooses tokens on the host, so such a cache has no steps. "
                "Use Rolling(window, sinks), which evicts by position, or append to this cache in each step."
            )
        if isinstance(self._stored_as, Codec) and not all(store.form.dims):
            raise ProblemError(
                f"steps() of values without channels and {self._stored_as.kind} codes: a codec needs elements. "
                "Use codec=None, or Latent(rank) if the values are channels of the keys."
            )
        if isinstance(layout, Rolling):
            if capacity is not None:
                raise ProblemError(f"steps(capacity={capacity}): {layout!r} has its own capacity, leave it out.")
        elif capacity is None or whole(capacity, "steps(capacity)", "tokens", least=1) <= store.tokens:
            raise ProblemError(
                f"steps(capacity={capacity}): expected more than the {store.tokens} tokens that are stored."
            )
        return StepCache(
            step_memory(store, capacity or 0), store.form, store.tokens_seen, capacity=capacity,
            rank=layout.rank if isinstance(layout, Latent) else None, rotate=self._is_rotated,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if torch.is_inference_mode_enabled():  # the tensors of a pickle are then of inference mode
            with torch.inference_mode(mode=False):
                self._store, self._policy_state = copy.deepcopy((self._store, self._policy_state))

    @torch.inference_mode(mode=False)  # as in `steps`
    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """A cache of its own with the same options. A pool is shared, and its pages are copied when one writes."""
        other = KVCache(self.layout, self.codec, self.evict)
        other._store = own_copy(self._usable_store(), memo)
        other._policy_state = copy.deepcopy(self._policy_state, memo)
        other._min_crop = self._min_crop
        return other

    def __copy__(self) -> "KVCache":
        """A deep copy: two caches in the same memory would overwrite one another's tokens."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        texts = [] if self.layout == Contiguous() else [repr(self.layout)]
        texts += [] if self.codec is None else [str(self.codec).removeprefix("torch.")]
        texts += [] if self.evict is None else [repr(self.evict)]
        seen = f" of {self.tokens_seen:,}" if self.tokens != self.tokens_seen else ""
        texts.append(f"{self.tokens:,} tokens{seen}")
        if self._store is None:
            return f"KVCache({', '.join(texts)})"
        form = self._store.form
        sides = zip("kv", form.dims, strict=False)
        texts += [f"{name} {[form.batch, form.kv_heads, self.tokens, dim]}" for name, dim in sides if dim]
        texts.append(str(form.dtype).removeprefix("torch."))
        return f"KVCache({', '.join(texts)}: {self.bytes:,} bytes, {self.allocated_bytes:,} allocated)"

    def _usable_store(self) -> Store | None:
        """The store, None before the first token.

        Raises:
            ProblemError: its tokens were lost when an eviction or a crop was interrupted.
        """
        if isinstance(self._store, PagedStore):
            self._store.check_usable()
        return self._store

    def _evict(self, store: Store, coming: int) -> None:
        assert self.evict is not None
        assert self._policy_state is not None
        if store.tokens <= self.evict.budget:
            return
        self._usable_store()
        state = copy.copy(self._policy_state)
        index = state.choose(store, coming)
        if index is None:
            self._policy_state = state
            return
        if not type(state).__module__.startswith("regard."):
            check_chosen(state, index, store)
        state.keep(index)
        changed, min_crop = replacement(store), max(self._min_crop, store.tokens_seen - (self.evict.recent or 0))
        changed.keep(index)
        self._store, self._policy_state, self._min_crop = changed, state, min_crop
        if isinstance(changed, PagedStore):
            changed.shrink()
