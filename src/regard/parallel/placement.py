"""Attention of sharded DTensors: which part runs where follows from their placements.

| q, k and v in a dimension of the mesh | what runs |
|---|---|
| `Shard(2)`, tokens | a ring over the ranks of this dimension |
| `Shard(1)`, heads | each rank its heads: query heads and key heads are cut at the same places |
| `Shard(0)`, batch | each rank its rows |
| `Replicate()` | the same on each rank |

Everything else is refused by name: regard moves no data that the caller did not ask it to move.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from regard.attention import attend, attend_state
from regard.describe.mask import CallSizes, broadcast_shape_of
from regard.describe.spec import bound_to
from regard.errors import ProblemError, RefusalError
from regard.parallel.layout import Layout
from regard.parallel.ring import ring_attend, ring_attend_state
from regard.parallel.untraced import untraced
from regard.plan.checks import check_specs
from regard.plan.request import Request
from regard.state import State

BATCH, HEADS, TOKENS = 0, 1, 2
"""Dimensions of [batch, heads, tokens, dim]."""


@dataclass(frozen=True)
class _Ring:
    """The dimension of the mesh over which the tokens are sharded."""

    group: ProcessGroup
    layout: Layout
    key_layout: Layout


def attend_placed(request: Request) -> State:
    """The state of a call of DTensors: of DTensors with the placements of q.

    Raises:
        ProblemError: some of q, k and v are no DTensors, or they are on different meshes.
        RefusalError: placements that need data of other ranks, other than the keys of a ring.
    """
    if torch.compiler.is_compiling():  # what is sent is no part of a graph
        untraced: Any = torch.compiler.disable(_attend_untraced)
        return untraced(request)
    return _attend_untraced(request)


def _attend_untraced(request: Request) -> State:
    q, k, v = _placed(request)
    _check_specs(request, q)
    ring = _ring(q, k)
    sink = request.sink
    local = request._replace(q=q.to_local(), k=k.to_local(), v=v.to_local(), sink=_local_sink(sink, q))
    state = _run(local, ring)
    out = _whole(state.out, q, (*q.shape[:3], v.shape[3]))
    return State(out, _whole(state.lse, q, tuple(q.shape[:3])) if request.lse else state.lse)


@untraced
def with_sink_placed(state: State, logits: Tensor) -> Tensor:
    """`State.with_sink` of a state of DTensors and logits that every rank has."""
    out, lse = cast(DTensor, state.out), cast(DTensor, state.lse)
    if out.placements != lse.placements or not all(map(_is_known, out.placements)):
        raise ProblemError(
            f"a State has out {out.placements} and lse {lse.placements}: expected those of attend_state."
        )
    local = State(out.to_local(), lse.to_local()).with_sink(cast(Tensor, _local_sink(logits, out)))
    return _whole(local, out, tuple(out.shape))


def _run(local: Request, ring: _Ring | None) -> State:
    options: dict[str, Any] = {name: getattr(local, name) for name in ("mask", "bias", "score", "scale", "softcap")}
    options |= {"offset": local.offset, "backend": local.backend}
    if ring is not None:
        options |= {"group": ring.group, "layout": ring.layout, "key_layout": ring.key_layout}
    q, k, v = cast("tuple[Tensor, ...]", (local.q, local.k, local.v))
    if local.lse:
        return attend_state(q, k, v, **options) if ring is None else ring_attend_state(q, k, v, **options)
    options |= {"sink": local.sink, "dropout": local.dropout}
    out = attend(q, k, v, **options) if ring is None else ring_attend(q, k, v, **options)
    return State(out, out.new_empty(0))


def _placed(request: Request) -> tuple[DTensor, DTensor, DTensor]:
    operands: dict[str, Any] = {"q": request.q, "k": request.k, "v": request.v}
    plain = [name for name, t in operands.items() if not isinstance(t, DTensor)]
    if plain:
        raise ProblemError(f"{' and '.join(plain)}: expected a DTensor, as the others of q, k and v are.")
    q, k, v = (cast(DTensor, t) for t in operands.values())
    if q.device_mesh != k.device_mesh or k.device_mesh != v.device_mesh:
        raise ProblemError(f"q is on {q.device_mesh}, k on {k.device_mesh}, v on {v.device_mesh}: expected one mesh.")
    for i, each in enumerate(zip(q.placements, k.placements, v.placements, strict=True)):
        if len(set(each)) > 1 or not _is_known(each[0]):
            names = q.device_mesh.mesh_dim_names
            found = ", ".join(f"{name} {placement}" for name, placement in zip("qkv", each, strict=True))
            raise RefusalError(
                f"DTensors in dimension {names[i] if names else i} of the mesh: {found}; expected all three as "
                "Shard(2) (tokens: a ring), Shard(1) (heads), Shard(0) (batch) or Replicate(); call .redistribute."
            )
    return q, k, v


def _is_known(placement: Placement) -> bool:
    return isinstance(placement, Replicate) or (type(placement) is Shard and placement.dim in (BATCH, HEADS, TOKENS))


def _dims(q: DTensor, dim: int) -> list[int]:
    """The dimensions of the mesh that shard this dimension of the tensors."""
    return [i for i, placement in enumerate(q.placements) if placement == Shard(dim)]


def _ring(q: DTensor, k: DTensor) -> _Ring | None:
    found = _dims(q, TOKENS)
    if len(found) > 1:
        raise RefusalError(f"tokens sharded over {len(found)} dimensions of the mesh: flatten these to one.")
    if not found:
        return None
    ranks = q.device_mesh.size(found[0])
    queries, keys = (Layout.of_counts(_counts(t.shape[TOKENS], ranks)) for t in (q, k))
    return _Ring(q.device_mesh.get_group(found[0]), queries, keys)


def _counts(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank, cut as `torch.chunk` and DTensor cut.

    >>> _counts(10, 4), _counts(2, 4)
    ([3, 3, 3, 1], [1, 1, 0, 0])
    """
    size = -(-tokens // ranks)
    return [max(0, min(size, tokens - rank * size)) for rank in range(ranks)]


def _check_specs(request: Request, q: DTensor) -> None:
    """Refuse DTensors, and what differs by row or head where these are sharded: each rank would need its part of it."""
    check_specs(request.mask, request.bias, request.score)
    for spec in (request.mask, request.bias, request.score):
        if spec is not None and any(isinstance(t, DTensor) for t in spec.tensors()):
            raise ProblemError(
                f"{spec!r} has a DTensor: expected a plain tensor of the whole sequence, as .full_tensor() gives. The "
                "gradient of a rank is then that of its own queries, and their sum over the ranks is the gradient."
            )
    by_batch, by_head = bool(_dims(q, BATCH)), bool(_dims(q, HEADS))
    if by_batch and isinstance(request.offset, Tensor) and request.offset.ndim:
        raise RefusalError("an offset for each batch row, which are sharded: call attend on the local tensors.")
    shape = _mask_shape(request) if by_batch or by_head else (1, 1)
    for name, is_sharded, differs in (("batch rows", by_batch, shape[0] > 1), ("heads", by_head, shape[1] > 1)):
        if is_sharded and differs:
            raise RefusalError(
                f"{request.mask!r} differs between {name}, which are sharded: call attend on local tensors."
            )
    if (by_batch or by_head) and not (request.bias is None and request.score is None):
        raise RefusalError(
            f"{request.bias or request.score!r} with DTensors whose batch or heads are sharded: it may have a part for "
            "each row or head. Call attend on the local tensors, with the bias of their heads."
        )
    ranks = 1
    for i in _dims(q, HEADS):
        ranks *= q.device_mesh.size(i)
    for name in ("q", "k"):
        heads = cast(DTensor, getattr(request, name)).shape[HEADS]
        if heads % ranks:
            raise RefusalError(f"{name} has {heads} heads, sharded over {ranks} ranks: expected a whole multiple.")


def _mask_shape(request: Request) -> tuple[int, int]:
    """(batch, heads) of the mask of the whole call; a mask of a user may know them only when it is bound."""
    whole = request.resolved()
    if whole.mask is None:
        return 1, 1
    (batch, heads, queries), keys = whole.q.shape[:3], whole.k.shape[2]
    offset = keys - queries if whole.offset is None else whole.offset
    bound = broadcast_shape_of(bound_to(whole.mask, CallSizes(batch, heads, queries, keys, offset)))
    own = broadcast_shape_of(whole.mask)  # of a table that was expanded, whose sizes must be those of each rank's call
    return max(bound[0], own[0]), max(bound[1], own[1])


def _local_sink(sink: Tensor | None, q: DTensor) -> Tensor | None:
    """The logits of this rank's heads. A DTensor gets its whole gradient: the sum over the tokens and batch rows."""
    if sink is None:
        return None
    if isinstance(sink, DTensor):
        expected = [Shard(0) if placement == Shard(HEADS) else Replicate() for placement in q.placements]
        parts = [
            Partial() if placement in (Shard(TOKENS), Shard(BATCH)) else own
            for placement, own in zip(q.placements, expected, strict=True)
        ]
        return sink.redistribute(q.device_mesh, expected).to_local(grad_placements=parts)
    for i in _dims(q, HEADS):
        sink = sink.chunk(q.device_mesh.size(i))[q.device_mesh.get_local_rank(i)]
    return sink


def _whole(local: Tensor, q: DTensor, shape: tuple[int, ...]) -> Tensor:
    """The DTensor of which this is the local part."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return DTensor.from_local(
        local, q.device_mesh, q.placements, run_check=False, shape=cast(Any, shape), stride=tuple(strides)
    )
