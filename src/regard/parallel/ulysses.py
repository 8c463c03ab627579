"""Ulysses: for the attention, each rank gets all tokens of some of the heads; also within a ring (`attend_on_mesh`).

An all-to-all turns shards of tokens into shards of heads, and another one turns the outputs back. (Jacobs et al. 2023,
arXiv:2309.14509, §3; both combined as in Fang and Zhao 2024, arXiv:2405.07719.) Query heads are split evenly; a rank
gets the key heads that its query heads use, so a key head may be on several ranks. No count of heads is refused.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from regard.backend.contract import Backend
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Score
from regard.describe.some_heads import bias_of_heads, mask_of_heads
from regard.describe.suggestions import suggest_keywords
from regard.errors import ProblemError, RefusalError
from regard.parallel.call import Arguments, Place, ShardedCall, pose, route_of
from regard.parallel.layout import Layout
from regard.parallel.ranks import TIMEOUT, Ranks
from regard.parallel.ring import run_ring
from regard.parallel.share import Exchange, Segment, Share
from regard.seeds import mixed
from regard.state import State
from regard.wide import wide_of


@suggest_keywords
def ulysses_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    offset: int | None = None,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> Tensor:
    """`ring_attend` by another way: each rank computes all tokens of some heads, after an all-to-all.

    The arguments, the result and the errors are those of `ring_attend`. A rank sends and receives its share of q, k, v
    and the output once, where a ring passes on keys and values; it needs memory for all tokens of its heads, and ranks
    beyond the count of query heads have nothing to compute.

    Raises:
        RefusalError: also for a score that has a tensor per head.

    >>> import torch, torch.distributed as dist
    >>> from regard import Causal, attend
    >>> from regard.parallel import ulysses_attend
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> torch.allclose(ulysses_attend(q, k, v, mask=Causal()), attend(q, k, v, mask=Causal()), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    arguments = Arguments(
        q, k, v, mask, bias, score, scale, softcap, sink, dropout, layout, key_layout, offset, backend
    )  # fmt: skip
    ranks = Ranks(group, timeout, "ulysses_attend")
    return _run(Ranks.alone(timeout, "ulysses_attend"), ranks, arguments)


@suggest_keywords
def attend_on_mesh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    offset: int | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> Tensor:
    """Ring and Ulysses combined: on a mesh of r x u ranks, u ranks share the heads, and r such groups are a ring.

    Keys and values travel the slow links, between groups, and heads are exchanged on the fast ones within a group. The
    arguments, the result and the errors are otherwise those of `ring_attend`.

    Args:
        mesh: of two dimensions, the ring and the ranks that share heads; of one, a ring.
        layout: which tokens each rank of the mesh has, its ranks in the order of `mesh.mesh.flatten()`.
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(
            f'mesh is {type(mesh).__name__}: expected a DeviceMesh, such as init_device_mesh("cuda", (2, 4)). With a '
            "process group, call ring_attend or ulysses_attend."
        )
    if mesh.ndim not in (1, 2):
        raise ProblemError(f"mesh has {mesh.ndim} dimensions: expected (ring, heads), or a ring alone.")
    name = "attend_on_mesh"
    arguments = Arguments(
        q, k, v, mask, bias, score, scale, softcap, sink, dropout, layout, key_layout, offset, backend
    )  # fmt: skip
    ring = Ranks(mesh.get_group(0), timeout, name)
    sharing = Ranks.alone(timeout, name) if mesh.ndim == 1 else Ranks(mesh.get_group(1), timeout, name)
    return _run(ring, sharing, arguments)


def _run(ring: Ranks, sharing: Ranks, arguments: Arguments) -> Tensor:
    """The output of this rank's queries.

    Args:
        sharing: the ranks that share the heads.
    """
    if torch.compiler.is_compiling():  # what is sent is no part of a graph
        untraced: Any = torch.compiler.disable(_run_untraced)
        return untraced(ring, sharing, arguments)
    return _run_untraced(ring, sharing, arguments)


def _run_untraced(ring: Ranks, sharing: Ranks, arguments: Arguments) -> Tensor:
    place = Place(ring.rank * sharing.size + sharing.rank, ring.size * sharing.size)
    groups = [ranks for ranks in (sharing, ring) if ranks.size > 1] or [sharing]
    call, a = pose(groups, arguments, place)
    per_head = a.score is not None and any(t.ndim > 2 for t in a.score.tensors())
    if sharing.size > 1 and per_head:
        raise RefusalError(f"{a.score!r} has a tensor per head, and heads are shared between ranks: use ring_attend.")
    share = Share(sharing, ring, call.queries, call.keys, a.q.shape[1], a.k.shape[1])
    q, k, v = cast("tuple[Tensor, ...]", Exchange.apply(share, "qkk", True, a.q, a.k, a.v))
    states = [_state(ring, call, share, s, q, k, v) for s in share.segments]
    states = states or [_no_heads(q, k, v, call.formula.tensors())]
    out, lse = (torch.cat([getattr(s, name) for s in states], 1) for name in ("out", "lse"))
    out, lse = cast("tuple[Tensor, Tensor]", Exchange.apply(share, "qq", False, out, lse[..., None]))
    state = State(out, lse[..., 0])
    return (state.out if a.sink is None else state.with_sink(a.sink)).to(a.q.dtype)


def _state(ring: Ranks, call: ShardedCall, share: Share, s: Segment, q: Tensor, k: Tensor, v: Tensor) -> State:
    """The state of some heads, over all tokens of the ring."""
    f = call.formula
    heads = tuple(s.heads)
    mask, bias = mask_of_heads(f.mask, heads), bias_of_heads(f.bias, heads)
    formula = replace(f, mask=mask, bias=bias, seed=mixed(f.seed, s.heads.start) if f.dropout else 0)
    queries, keys = share.queries.of_ring, share.keys.of_ring
    sizes = CallSizes(q.shape[0], len(s.heads), queries.tokens, keys.tokens, call.offset)
    route = route_of(mask, sizes, queries, keys)
    return run_ring(ring, ShardedCall(formula, queries, keys, call.offset, route), q[:, s.q], k[:, s.k], v[:, s.k])


def _no_heads(q: Tensor, k: Tensor, v: Tensor, learned: list[Tensor]) -> State:
    """The state of no head, which depends on all tensors, as on other ranks.

    So backward comes to the all-to-all on this rank, too, and learned tensors get gradients of 0.
    """
    used = [q, k, v, *(t for t in learned if t.requires_grad)]
    none = torch.stack([t.sum().to(wide_of(q.dtype)) for t in used]).sum()
    return State(none.expand(q.shape[0], 0, q.shape[2], v.shape[3]), none.expand(q.shape[0], 0, q.shape[2]))
