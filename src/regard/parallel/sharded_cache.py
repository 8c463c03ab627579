"""A KV cache whose tokens are on several ranks."""

from functools import reduce
from itertools import pairwise
from typing import cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.backend.contract import Backend
from regard.cache.check import form_of
from regard.cache.kv_cache import KVCache
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.parallel.call import Place, check_layout
from regard.parallel.layout import Layout
from regard.parallel.placed import Pieces, pieces_of, positions_of
from regard.parallel.ranks import TIMEOUT, Ranks
from regard.parallel.rectangle import Formula
from regard.parallel.sharded import Keys, attend_keys
from regard.parallel.untraced import untraced
from regard.storage.stored import Contiguous, Latent, Paged


class ShardedCache:
    """A KV cache whose tokens are on several ranks: for contexts that one memory cannot hold.

    Every rank of the group makes one, and calls its methods with the same arguments. New tokens go in blocks to the
    rank that has the fewest; a rank stores its own in a `KVCache`, dense, paged or quantised.

    Args:
        cache: where this rank stores its tokens, empty: `Contiguous`, `Paged` or `Latent`, without eviction. None:
            `KVCache()`.
        block: consecutive tokens that go to one rank.
        group: the ranks; None for all.
        timeout: seconds to wait for another rank.

    >>> import torch, torch.distributed as dist
    >>> from regard import Causal, attend
    >>> from regard.parallel import ShardedCache
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
    >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    >>> cache = ShardedCache()
    >>> cache.append(k[:, :, :4], v[:, :, :4])
    >>> cache.append(k[:, :, 4:], v[:, :, 4:])
    >>> out = cache.attend(q[:, :, 4:], mask=Causal())
    >>> torch.allclose(out, attend(q, k, v, mask=Causal())[:, :, 4:], atol=1e-6)
    True
    >>> cache
    ShardedCache(5 tokens, 5 on rank 0 of 1)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        cache: KVCache | None = None,
        *,
        block: int = 256,
        group: ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if not isinstance(cast(object, cache), KVCache | None):
            raise ProblemError(
                f"cache is {type(cache).__name__}: expected the KVCache that stores this rank's tokens, or None for "
                "KVCache()."
            )
        self._cache = KVCache() if cache is None else cache
        layout, evict = self._cache.layout, self._cache.evict
        if not isinstance(layout, Contiguous | Paged | Latent) or evict is not None or self._cache.tokens_seen:
            raise ProblemError(
                f"cache is {self._cache!r}: expected an empty one that keeps every token, so Contiguous(), Paged() or "
                "Latent(rank) without a policy: positions are those of the whole sequence."
            )
        self._block, self._group, self._timeout = whole(block, "block", "tokens", least=1), group, timeout
        self._ranks = Ranks(group, timeout, "ShardedCache")
        self._runs: list[tuple[range, int]] = []  # each as long as possible
        self._counts = [0] * self._ranks.size
        self._pieces: Pieces = ()
        self._checksum = 0  # of all runs but the last: the same on every rank
        self._none: tuple[Tensor, Tensor | None] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are stored, on all ranks: the position of the next token."""
        return self._runs[-1][0].stop if self._runs else 0

    @property
    def own_tokens(self) -> int:
        """How many tokens this rank stores."""
        return self._cache.tokens

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank stores."""
        return tuple(self._counts)

    @untraced
    def append(self, k: Tensor, v: Tensor | None = None, *, layout: Layout | None = None) -> None:
        """Store new tokens; waits for no rank.

        Args:
            k: [batch, kv_heads, tokens, qk_dim], the same on every rank; with a layout, the tokens of this rank.
            v: [batch, kv_heads, tokens, v_dim]; None only with `Latent`.
            layout: which of the new tokens each rank has, as after a prompt by `ring_attend`; None: every rank has all.

        Raises:
            ProblemError: as `KVCache.append`; or k does not have the tokens that the layout gives this rank.
        """
        form_of(k, v, self._cache.layout)  # raises an error if they are no keys and values
        runs = self._dealt(k.shape[2]) if layout is None else self._placed(layout, k)
        own = [run for run, rank in runs if rank == self._ranks.rank]
        if layout is None:
            at = torch.tensor(positions_of(pieces_of(own)) - self.tokens, device=k.device)
            k, v = k.index_select(2, at), None if v is None else v.index_select(2, at)
        self._cache.append(k, v)
        self._none = k[:, :, :0], None if v is None else v[:, :, :0]
        for run, rank in runs:
            self._add(run, rank)
        self._pieces = reduce(extended, own, self._pieces)

    @untraced
    def attend(
        self,
        q: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        score: Score | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        offset: int | None = None,
        backend: str | Backend | None = None,
    ) -> Tensor:
        """Attention over all stored tokens: `attend_sharded`, whose arguments and errors these are.

        Args:
            q: [batch, heads, queries, qk_dim], the same on every rank.

        Returns:
            [batch, heads, queries, v_dim], the same bits on every rank.
        """
        ranks = Ranks(self._group, self._timeout, "ShardedCache.attend")
        if self._none is None or not self.tokens:
            ranks.refuse(why := "attend over an empty ShardedCache: append tokens first.")
            raise ProblemError(why)
        formula = Formula(mask, bias, score, scale, softcap, 0.0, backend)
        k, v = self._cache.append(*self._none)  # no tokens: to read what is stored
        keys = Keys(self.tokens, self._pieces, f"{extended_checksum(self._checksum, self._runs[-1]):08x}")
        return attend_keys(ranks, formula, sink, q, (k, v), keys, offset)

    @untraced
    def crop(self, tokens: int) -> None:
        """Remove all but the first `tokens` tokens, for example drafts that were not accepted; waits for no rank."""
        if not 0 <= whole(tokens, "the argument of crop") <= self.tokens:
            raise ProblemError(f"crop({tokens}): expected 0 to {self.tokens}, the tokens that are stored.")
        runs = [(range(run.start, min(run.stop, tokens)), rank) for run, rank in self._runs if run.start < tokens]
        own = sum(len(run) for run, rank in runs if rank == self._ranks.rank)
        self._cache.crop(own)
        self._runs, self._counts, self._checksum = [], [0] * self._ranks.size, 0
        for run, rank in runs:
            self._add(run, rank)
        self._pieces = reduce(extended, [run for run, rank in runs if rank == self._ranks.rank], cast(Pieces, ()))

    def _dealt(self, tokens: int) -> list[tuple[range, int]]:
        """New tokens in blocks, each with the rank that has the fewest; the last block is filled before."""
        counts, found = list(self.counts), list[tuple[range, int]]()
        at, stop = self.tokens, self.tokens + tokens
        last, rank = self._runs[-1] if self._runs else (range(0), 0)
        room = -len(last) % self._block
        while at < stop:
            if not room:
                rank, room = min(range(len(counts)), key=counts.__getitem__), self._block
            n = min(room, stop - at)
            found.append((range(at, at + n), rank))
            at, room, counts[rank] = at + n, room - n, counts[rank] + n
        return found

    def _add(self, run: range, rank: int) -> None:
        """Remember the rank of new tokens."""
        self._counts[rank] += len(run)
        if self._runs and self._runs[-1][1] == rank:
            run = range(self._runs.pop()[0].start, run.stop)
        elif self._runs:
            self._checksum = extended_checksum(self._checksum, self._runs[-1])
        self._runs.append((run, rank))

    def _placed(self, layout: Layout, k: Tensor) -> list[tuple[range, int]]:
        check_layout("layout", layout, "k", k, Place(self._ranks.rank, self._ranks.size))
        edges, owners = layout.pieces
        ranges = [range(self.tokens + a, self.tokens + b) for a, b in pairwise(edges.tolist())]
        return list(zip(ranges, owners.tolist(), strict=True))

    def __repr__(self) -> str:
        ranks = self._ranks
        return f"ShardedCache({self.tokens:,} tokens, {self.own_tokens:,} on rank {ranks.rank} of {ranks.size})"


def extended_checksum(checksum: int, run: tuple[range, int]) -> int:
    """The checksum of runs, and the ranks that have them, with one more."""
    positions, rank = run
    return crc32(f"{positions.start} {positions.stop} {rank} ".encode(), checksum)


def extended(pieces: Pieces, run: range) -> Pieces:
    """The pieces with one more run of consecutive tokens, as few as possible.

    >>> reduce(extended, [range(0, 4), range(8, 12), range(16, 18)], ())
    ((0, 10, 4, 8),)
    """
    if not run:
        return pieces
    n = len(run)
    if pieces:
        first, count, block, stride = pieces[-1]
        full, more = divmod(count, block)
        if count == block and run.start == first + count:  # one block that goes on
            return (*pieces[:-1], (first, count + n, count + n, count + n))
        if count == block and n <= block:  # its second block
            return (*pieces[:-1], (first, count + n, block, run.start - first))
        if count > block and run.start == first + full * stride + more and more + n <= block:
            return (*pieces[:-1], (first, count + n, block, stride))
    return (*pieces, (run.start, n, n, n))
