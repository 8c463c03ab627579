"""What the processes of `workers.py` run."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard.parallel.ring as parallel_ring
from regard import Causal, State
from regard.cache import KVCache
from regard.parallel import (
    Layout,
    RankError,
    ShardedCache,
    attend_on_mesh,
    attend_sharded,
    ring_attend,
    ring_attend_state,
    ulysses_attend,
)
from regard.parallel.ranks import Message, Ranks


def shard(t: Tensor, layout: Layout, rank: int) -> Tensor:
    """The tokens of a rank, of [batch, heads, tokens, dim]."""
    return t[:, :, torch.tensor(layout.indices(rank))]


def ring(rank: int, size: int, **more: Any) -> Any:
    """`sharded` by ring attention."""
    return sharded(ring_attend, rank, **more)


def ulysses(rank: int, size: int, **more: Any) -> Any:
    """`sharded` by Ulysses."""
    return sharded(ulysses_attend, rank, **more)


def on_mesh(rank: int, size: int, *, shape: tuple[int, ...], **more: Any) -> Any:
    """`sharded` on a mesh."""
    return sharded(attend_on_mesh, rank, mesh=init_device_mesh("cpu", shape), **more)


def sharded(
    attend: Callable[..., Tensor],
    rank: int,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    **more: Any,
) -> Any:
    """(out, gradients of q, k, v and of the sink, bias and score tensors) of this rank's shard of the whole tensors."""
    queries: Layout = more["layout"]
    keys: Layout = more.get("key_layout") or queries
    q, k, v = shard(q, queries, rank), shard(k, keys, rank), shard(v, keys, rank)
    learned = learned_tensors(more)
    if dout is None:
        return attend(q, k, v, **more), []
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    for t in learned:
        t.requires_grad_()
        t.grad = None
    out = attend(*leaves, **more)
    out.backward(shard(dout, queries, rank))
    return out.detach(), [t.grad for t in (*leaves, *learned)]


def learned_tensors(more: dict[str, Any]) -> list[Tensor]:
    """The tensors of sink, bias and score, each once."""
    found = [] if more.get("sink") is None else [more["sink"]]
    found += [t for name in ("bias", "score") if more.get(name) is not None for t in more[name].tensors()]
    return list({id(t): t for t in found}.values())


def ring_state(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **more: Any) -> State:
    """The state of this rank's shard."""
    return ring_attend_state(*(shard(t, layout, rank) for t in (q, k, v)), layout=layout, **more)


def ring_in_halves(rank: int, size: int, **more: Any) -> Any:
    """`ring` in two groups of half of the ranks, each on its own."""
    groups = [dist.new_group(list(range(start, start + size // 2))) for start in (0, size // 2)]
    half = size // 2
    return ring(rank % half, half, group=groups[rank // half], **more)


def every_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask function."""
    return (q + 2 * k) % 3 != 0


def sent_in_ring(rank: int, size: int, **more: Any) -> int:
    """The bytes that this rank sends in a call of `ring`."""
    start, sent = Ranks.start, 0

    def counting(self: Ranks, messages: Sequence[Message]) -> Any:
        nonlocal sent
        sent += sum(m.tensor.nbytes for m in messages if m.is_sent)
        return start(self, messages)

    with patch.object(Ranks, "start", counting):
        ring(rank, size, **more)
    return sent


def decode(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **more: Any) -> Tensor:
    """The output of queries that every rank has."""
    return attend_sharded(q, shard(k, layout, rank), shard(v, layout, rank), layout=layout, **more)


def decode_compiled(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """`decode` in a function that torch.compile compiles."""
    return cast(Any, torch.compile(decode, backend="eager"))(rank, size, q=q, k=k, v=v, layout=layout, timeout=4.0)


def fill_and_decode_compiled(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The outputs of steps that torch.compile compiles, over an own cache: each token is appended and attends."""
    cache = ShardedCache(block=2, timeout=4.0)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k + 0, v + 0)
        out = cache.attend(q + 0, mask=Causal()) + 0
        cache.append(k, v)
        cache.crop(cache.tokens - 1)
        return out

    compiled: Any = torch.compile(step, backend="eager")
    return [compiled(*(t[:, :, i : i + 1] for t in (q, k, v))) for i in range(q.shape[2])]


def decode_in_three(rank: int, size: int, **more: Any) -> Tensor | None:
    """`decode` on the first three ranks."""
    group = dist.new_group([0, 1, 2])
    return decode(rank, 3, group=group, **more) if rank < 3 else None


def fill_and_decode(
    rank: int,
    size: int,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt: int,
    options: dict[str, Any],
    layout: Layout | None = None,
    timeout: float = 60.0,
    **more: Any,
) -> tuple[list[Tensor], tuple[int, ...]]:
    """(the outputs of each step, tokens per rank): a prompt, then token by token; drafts of two tokens are cropped."""
    cache, outs = ShardedCache(KVCache(**options), block=4, timeout=timeout), list[Tensor]()
    if layout is None:
        cache.append(k[:, :, :prompt], v[:, :, :prompt])
    else:
        cache.append(*(shard(t[:, :, :prompt], layout, rank) for t in (k, v)), layout=layout)
    for at in range(prompt, k.shape[2]):
        cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        outs.append(cache.attend(q[:, :, at : at + 1], mask=Causal(), **more))
        cache.append(k[:, :, :2], v[:, :, :2])
        cache.crop(at + 1)
    return outs, cache.counts


def handshakes_of_decoding(rank: int, size: int, **more: Any) -> int:
    """How many calls of `fill_and_decode` the ranks compared through the store."""
    compare, found = Ranks._compare, 0  # pyright: ignore[reportPrivateUsage]

    def counting(self: Ranks) -> None:
        nonlocal found
        found += 1
        compare(self)

    with patch.object(Ranks, "_compare", counting):
        fill_and_decode(rank, size, **more)
    return found


def decode_from_other_caches(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, timeout: float) -> None:
    """A step over caches that have the same tokens in other blocks on the last rank."""
    cache = ShardedCache(block=4 if rank < size - 1 else 5, timeout=timeout)
    cache.append(k, v)
    cache.attend(q[:, :, -1:])


def ring_after_an_error(rank: int, size: int, *, failing: str, timeout: float, **more: Any) -> Any:
    """`ring`, after calls in which each rank raised an error while messages travelled.

    Args:
        failing: the function of `regard.parallel.ring` that raises it.
    """
    for _ in range(3):
        error = MemoryError("not this time")
        with patch.object(parallel_ring, failing, side_effect=error), suppress(MemoryError):
            ring(rank, size, scale=0.1, timeout=timeout, **more)
    return ring(rank, size, timeout=timeout, **more)


def decode_wrongly(
    rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], timeout: float, **more: Any
) -> None:
    """A step over a cache all of whose tokens are on the first rank."""
    cache = ShardedCache(KVCache(**options), timeout=timeout)
    cache.append(k, v)
    cache.attend(q, **more)


def decode_from_empty_cache(rank: int, size: int, *, q: Tensor, k: Tensor, v: Tensor, timeout: float) -> None:
    """A step over a cache to which the first rank appended nothing."""
    cache = ShardedCache(timeout=timeout)
    if rank:
        cache.append(k, v)
    cache.attend(q)


def end(rank: int, size: int, **more: Any) -> None:
    """End the process, as a kill does."""
    os._exit(1)


def hang(rank: int, size: int, **more: Any) -> None:
    """Do nothing for long."""
    time.sleep(60)


def ring_in_a_loop(rank: int, size: int, **more: Any) -> None:
    """`ring`, many times: a rank is lost between two calls."""
    for _ in range(1000):
        ring(rank, size, **more)


def ring_with(
    rank: int,
    size: int,
    *,
    change: dict[int, dict[str, Any]],
    shards: Layout | None = None,
    run: Callable[..., Any] = ring,
    **more: Any,
) -> None:
    """`ring` with other arguments on some ranks.

    Args:
        shards: the layout of the tensors, where that of the call is changed.
        run: in place of `ring`.
    """
    if shards is not None:
        for name in ("q", "k", "v", "dout"):
            more[name] = shard(more[name], shards, rank)
        del more["dout"]
        ring_attend(**{**more, **change.get(rank, {})})
        return
    run(rank, size, **{**more, **change.get(rank, {})})


def ring_late(rank: int, size: int, *, timeout: float, **more: Any) -> None:
    """`ring_with`, when others have waited for longer than the timeout."""
    time.sleep(1.4 * timeout)
    ring_with(rank, size, timeout=timeout, **more)


def decode_for_ever(rank: int, size: int, *, timeout: float, **more: Any) -> None:
    """`fill_and_decode`, many times."""
    for _ in range(1000):
        fill_and_decode(rank, size, timeout=timeout, **more)


def decode_and_end(rank: int, size: int, **more: Any) -> None:
    """`fill_and_decode`, and end the process."""
    fill_and_decode(rank, size, **more)
    os._exit(1)


def ring_tried_again(rank: int, size: int, *, meet: str, timeout: float, **more: Any) -> Any:
    """`ring` in a process group that is made again: in the first one, rank 1 failed before it called."""
    if rank != 1:
        with suppress(RankError):
            ring(rank, size, timeout=0.2, **more)
    make_again(rank, size, meet)
    return ring(rank, size, timeout=timeout, **more)


def ring_of_other_members(rank: int, size: int, *, meet: str, **more: Any) -> Any:
    """`ring` in two groups of the same name, one after the other: of the first two of three ranks, and the last two."""
    group = dist.new_group([0, 1])
    if rank < 2:
        ring(rank, 2, group=group, **more)
    make_again(rank, size, meet)
    group = dist.new_group([1, 2])
    return ring(rank - 1, 2, group=group, **more) if rank else None


def make_again(rank: int, size: int, meet: str) -> None:
    """Make the process group again, with a new store."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)


def sent_by_ulysses(rank: int, size: int, **more: Any) -> int:
    """The bytes that this rank sends to others in a call of `ulysses`."""
    start, total = Ranks.start_all_to_all, 0

    def counting(ranks: Ranks, received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> Any:
        nonlocal total
        total += (sum(sizes_out) - sizes_out[ranks.rank]) * sent.element_size()
        return start(ranks, received, sent, sizes_in, sizes_out)

    with patch.object(Ranks, "start_all_to_all", counting):
        ulysses(rank, size, **more)
    return total
