"""Our own C++ for the CPU: every mask, bias and type, forward and backward, in place and with memory for a few tiles.

The library (native/) knows no mask by name. It gets addresses, sizes, strides and the schedule's tiles, 64 x 64 with a
bit for each pair of a PARTIAL one: FULL tiles are computed without a mask, and hidden ones are not computed. A bias
that depends on the distance is a vector per head, a bias tensor is read in place. Gradients are recomputed from
the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, §3.1), so nothing is kept for them but the output.

A row's bits depend on its query, the keys that it sees and their positions: not on the batch, on the number of threads,
or on the chunk of a prompt that it came in.
"""

import threading
from array import array
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, reduce
from itertools import count
from operator import add
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard import native
from regard.backend.contract import Backend, Kernel
from regard.backend.native_parts import Listed, listed
from regard.describe.bias import TensorBias
from regard.describe.mask import CallSizes, Mask
from regard.describe.recent import Recent
from regard.describe.tensors import reads_again
from regard.errors import RefusalError
from regard.plan.distance import by_distance, kept_by_distance
from regard.plan.lower import Lowering, add_biases, gather_where_needed, hides_nothing, pack, prepare_score, turn
from regard.plan.problem import Operands, Problem, Sizes
from regard.plan.schedule import Schedule
from regard.plan.tiling import cached_schedule
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import is_legacy_batched

SECONDS = 0.2
"""After so long the library returns for a moment, so that Python can see to Ctrl-C."""

KEPT_STRUCTS = 1024
"""The most structs that are cached, for all kernels."""

KEPT_BYTES = 64 << 20
"""The most bytes of the cached structs and of the schedules that they refer to."""

KEPT_WORKSPACE = 1 << 20
"""Bytes of workspace that each thread of Python keeps from call to call; a call that needs more makes its own."""


_AT = {name: number for number, name in enumerate(native.GRADIENT)}
SEED, SINK, WORKSPACE, WORKSPACE_BYTES = (_AT[name] for name in ("seed", "sink", "workspace", "workspace_bytes"))
THREADS, QUERIES, KEYS = (_AT[name] for name in ("threads", "queries", "keys"))
LISTED = slice(_AT["maps_batch"], _AT["workspace"])
TENSORS, DISTANCE = slice(_AT["q.data"], _AT["k_parts"]), slice(_AT["distance"], _AT["bias"])
PARTS, LSE = slice(_AT["k_parts"], _AT["lse"]), _AT["lse"]
BIAS, GRADIENTS = slice(_AT["bias"], _AT["maps_batch"]), slice(len(native.CALL), len(native.GRADIENT))
"""Indexes of the struct fields that differ from call to call."""


@dataclass(frozen=True)
class Native(Backend):
    """The compiled library.

    Attributes:
        isa: the instruction set, one of `native.isas()`; "plain" for the loops that all of them are tested by; None for
            what `native.isa()` says when the engine is first used.
    """

    name: str = "native"
    tile: int = 64
    lowerings: tuple[Lowering, ...] = (gather_where_needed, turn, prepare_score, pack, add_biases)
    hides_by_zero: bool = False
    any_length: bool = True
    any_mask: bool = True
    isa: str | None = None

    def refusals(self, problem: Problem) -> list[str]:
        p, absent = problem, native.absence()
        found = {
            f"it computes on cpu, and the tensors are on {p.device}": p.device != "cpu",
            f"the score {p.score} is not known to it": p.score is not None,
            f"the function of the score in {p.bias} is not known to it": p.changes_scores,
            "it has no vmap or forward-mode derivative": p.transformed,
            "a tensor is lazily negated, or of a class with a __torch_dispatch__ of its own": p.opaque,
        }
        return ([absent] if absent else []) + [reason for reason, applies in found.items() if applies]

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return _Kernel(problem, schedule, -1 if self.isa == "plain" else native.isas().index(self.isa or _chosen()))


@cache
def _chosen() -> str:
    return native.isa()


class _Inputs(NamedTuple):
    """The operands as the library reads them; "wide" is float64 for float64, else float32."""

    q: Tensor  # [batch, heads, queries, qk_dim]
    k: Tensor  # [batch, kv_heads, keys, qk_dim]
    v: Tensor  # [batch, kv_heads, keys, v_dim]
    sink: Tensor | None  # wide [heads]
    distance: Tensor | None  # wide [heads, queries + keys - 1]
    bias: Tensor | None  # [batch or 1, heads or 1, queries or 1, keys or 1], of any type and strides
    stored: tuple[StoredTensor, StoredTensor] | None = None  # keys and values; then k and v hold nothing


class _Wanted(NamedTuple):
    """Which inputs want a gradient."""

    q: bool
    k: bool
    v: bool
    sink: bool
    distance: bool
    bias: bool


class _Schedule(NamedTuple):
    """A schedule as the library reads it.

    Attributes:
        sizes: the fields of `QUERIES` and `KEYS`.
        listed: the fields of `LISTED`.
        memory: the arrays whose addresses are in the fields.
    """

    sizes: tuple[int, int]
    listed: tuple[int, ...]
    memory: tuple[memoryview, ...]


class _Struct(NamedTuple):
    """A struct in which all is written that is the same for equal sizes and masks."""

    threads: int
    packed: bytes
    workspace: int  # bytes
    schedule: _Schedule
    out: Tensor  # of the sizes of the output, of one element
    lse: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the struct and of the schedule."""
        return len(self.packed) + sum(each.nbytes for each in self.schedule.memory)


class _Kernel:
    """The library for one problem, of any sizes, offset, mask and bias: these are taken from the operands."""

    def __init__(self, problem: Problem, schedule: Schedule, isa: int) -> None:
        p = problem
        self.problem, self.schedule = problem, schedule
        self.wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        self.forward = _entry("regard_forward")
        self.fields: dict[str, float] = {
            "batch": p.batch, "heads": p.heads, "kv_heads": p.kv_heads, "qk_dim": p.qk_dim, "v_dim": p.v_dim,
            "isa": isa, "dtype": native.DTYPES[p.dtype], "scale": p.scale, "softcap": p.softcap or 0.0,
            "dropout": p.dropout, "seconds": SECONDS,
        }  # fmt: skip
        self.packed = self.forward.packed(self.fields)
        self.number = next(_numbers)
        self.latest: tuple[Hashable, _Struct] | None = None

    def __call__(self, operands: Operands) -> State:
        if self.problem.grad:
            return self._differentiable(operands, None)
        inputs = self._inputs(operands)
        out, lse = self.compute(inputs, self._struct(operands, inputs), self._seed() if self.problem.dropout else 0)
        return State(out, lse)

    def resume(self, operands: Operands, state: State) -> State:
        return self._differentiable(operands, state)

    def compute(self, inputs: _Inputs, struct: _Struct, seed: int) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        out, lse = _empty_out(struct.out, inputs.q), torch.empty_like(struct.lse)
        if not lse.numel():
            return out, lse
        call = self.forward.opened(struct.packed)
        parts = _write(call, inputs, out, lse, seed)
        memory = _workspaces.take(struct.workspace)
        call[WORKSPACE] = memory.address
        self.forward(call)
        del parts  # they were needed until now
        _workspaces.give(memory)
        return out, lse

    def _struct(self, operands: Operands, inputs: _Inputs) -> _Struct:
        """The struct for the sizes and the mask of a call, from the cache if the call has a key."""
        key, threads, latest = operands.key, torch.get_num_threads(), self.latest
        if latest is not None and latest[0] == key and latest[1].threads == threads:
            return latest[1]
        if key is None:
            return self._make_struct(operands, inputs, threads)
        struct = _structs.get((self.number, threads, key))
        if struct is None:
            struct = self._make_struct(operands, inputs, threads)
            if not _is_of(operands.mask, key):
                return struct
            _structs.put((self.number, threads, key), struct)
        self.latest = key, struct
        return struct

    def _make_struct(self, operands: Operands, inputs: _Inputs, threads: int) -> _Struct:
        """The library tells the workspace of a whole struct only."""
        p, sizes = self.problem, operands.sizes
        # `torch.empty_like` of these, which hold one element, costs 0.4 us less than `torch.empty`
        out = _element(p.dtype).expand(p.batch, p.heads, sizes.queries, p.v_dim)
        lse = _element(self.wide).expand(p.batch, p.heads, sizes.queries)
        schedule = self._schedule(operands)
        call = self._opened(self.forward, threads, schedule)
        packed, needed = bytes(call), 0
        if lse.numel():
            parts = _write(call, inputs, out, lse, 0)
            needed = self.forward.workspace(call)
            del parts
            call = self.forward.opened(packed)
            call[WORKSPACE_BYTES] = needed
            packed = bytes(call)
        return _Struct(threads, packed, needed, schedule, out, lse)

    def _schedule(self, operands: Operands) -> _Schedule:
        mask, sizes, tile = operands.mask, operands.sizes, self.schedule.tile
        if mask is None or hides_nothing(mask, sizes):
            return _all_tiles(sizes, tile)
        return _lists(self.schedule if operands.key is None else cached_schedule(mask, sizes, tile))

    def _opened(self, entry: native.Entry, threads: int, schedule: _Schedule) -> Any:
        """A struct with all that is the same for equal sizes and masks."""
        call = entry.opened(entry.packed(self.fields) if entry is not self.forward else self.packed)
        call[THREADS], call[LISTED] = threads, schedule.listed
        call[QUERIES], call[KEYS] = schedule.sizes
        return call

    def gradients(
        self,
        inputs: _Inputs,
        struct: _Struct,
        wanted: _Wanted,
        state: State,
        seed: int,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> _Inputs:
        """The gradients of the inputs, from what `compute` gave; those of biases and sink if wanted, else None."""
        i = inputs
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in (i.q, i.k, i.v))
        if not state.lse.numel():
            return _Inputs(dq.zero_(), dk.zero_(), dv.zero_(), _zeros(i.sink), _zeros(i.distance), _zeros(i.bias))
        ddistance = _zeros(i.distance) if wanted.distance else None
        dbias = _zeros(i.bias, self.wide) if wanted.bias else None
        delta = torch.empty(i.q.shape[:3], dtype=self.wide, device="cpu")
        backward = _entry("regard_backward")
        call = self._opened(backward, torch.get_num_threads(), struct.schedule)
        _write(call, i, state.out, state.lse, seed)
        call[GRADIENTS] = (
            *_placed(dout), _address(dlse), *_placed(dq), *_placed(dk), *_placed(dv), delta.data_ptr(),
            _address(ddistance), _address(dbias), *((0, 0, 0, 0) if dbias is None else dbias.shape),
        )  # fmt: skip
        call[WORKSPACE_BYTES] = needed = backward.workspace(call)
        memory = _workspaces.take(needed)
        call[WORKSPACE] = memory.address
        backward(call)
        _workspaces.give(memory)
        dsink = _sink_gradient(cast(Tensor, i.sink), state.lse, delta) if wanted.sink else None
        return _Inputs(dq, dk, dv, dsink, ddistance, None if dbias is None else dbias.to(cast(Tensor, i.bias).dtype))

    def _differentiable(self, operands: Operands, state: State | None) -> State:
        inputs = self._inputs(operands)
        computed = _Attention.apply(self, self._struct(operands, inputs), state, self._seed(), *inputs[:6])
        return State(*cast("tuple[Tensor, Tensor]", computed))

    def _inputs(self, o: Operands) -> _Inputs:
        if o.bias is None and o.sink is None:
            return _Inputs(o.q, o.k, o.v, None, None, None, o.stored)
        return _Inputs(o.q, o.k, o.v, self._sink(o), self._distance(o), self._bias(o), o.stored)

    def _seed(self) -> int:
        return int(torch.randint(1 << 62, (), device="cpu")) if self.problem.dropout else 0

    def _sink(self, operands: Operands) -> Tensor | None:
        return None if operands.sink is None else operands.sink.to(self.wide).contiguous()

    def _distance(self, operands: Operands) -> Tensor | None:
        terms = [] if operands.bias is None else [term for term in operands.bias.terms() if term.per_distance()]
        if not terms:
            return None
        p, bias, sizes = self.problem, reduce(add, terms), operands.sizes
        first, most = sizes.offset - (sizes.keys - 1), max(sizes.queries + sizes.keys - 1, 0)
        if p.grad and any(t.requires_grad for t in bias.tensors()):
            return by_distance(bias, p.heads, self.wide, first, most)
        return kept_by_distance(bias, p.heads, self.wide, first, most)

    def _bias(self, operands: Operands) -> Tensor | None:
        """The terms that are no vectors: after lowering, one tensor at most."""
        terms = [] if operands.bias is None else [term for term in operands.bias.terms() if not term.per_distance()]
        if not terms:
            return None
        (whole,) = cast("list[TensorBias]", terms)
        return _in_place(whole.rows(operands.q.shape[2], operands.offset), self.problem.grad, self.wide)


class _Attention(torch.autograd.Function):
    """(out, lse), differentiated by the library; with a state, that state is what comes out."""

    @staticmethod
    def forward(
        ctx: Any, kernel: _Kernel, struct: _Struct, state: State | None, seed: int, *parts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(*cast(Any, parts))
        out, lse = kernel.compute(inputs, struct, seed) if state is None else (state.out.detach(), state.lse.detach())
        ctx.save_for_backward(*parts, out, lse)
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.struct, ctx.seed = kernel, struct, seed
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = _Wanted(*ctx.needs_input_grad[4:])
        found = _Gradient.apply(ctx.kernel, ctx.struct, wanted, ctx.seed, *grads, *ctx.saved_tensors)
        return None, None, None, None, *cast(Any, found)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Attention`, which have no derivatives themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: _Kernel,
        struct: _Struct,
        wanted: _Wanted,
        seed: int,
        dout: Tensor | None,
        dlse: Tensor | None,
        *saved: Any,
    ) -> tuple[Any, ...]:
        *parts, out, lse = saved
        if any(is_legacy_batched(grad) for grad in (dout, dlse) if grad is not None):
            raise RefusalError(
                "The backend 'native' differentiates one gradient at a time, and this asks for several at once "
                '(is_grads_batched, or jacobian with vectorize): name backend="reference", or use torch.func.jacrev.'
            )
        dout = torch.zeros_like(out) if dout is None else dout
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        return kernel.gradients(_Inputs(*cast(Any, parts)), struct, wanted, State(out, lse), seed, dout, dlse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RefusalError(
            "The backend 'native' can be differentiated once, and this asks for a second derivative: name "
            'backend="reference", which can be differentiated any number of times.'
        )


def _empty_out(like: Tensor, q: Tensor) -> Tensor:
    """[batch, heads, queries, v_dim], in memory token by token if q is, else head by head."""
    _, between_heads, between_tokens, _ = q.stride()
    if between_heads < between_tokens:
        return torch.empty_like(like.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(like)


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[heads]: minus the sink's share of the softmax, times delta, summed over the rows that see a key.

    Args:
        delta: [batch, heads, queries], sum(dout * out).
    """
    column = sink[:, None]
    share = torch.exp(column - torch.logaddexp(lse, column))
    return -torch.where(lse == -torch.inf, 0.0, share * delta).sum(dim=(0, 2))


def _write(call: Any, i: _Inputs, out: Tensor, lse: Tensor, seed: int) -> "tuple[Listed, Listed] | None":
    """Write into an opened struct what differs from call to call, but for the workspace.

    Returns:
        What must stay in memory until the struct was run.
    """
    q, k, v = i.q, i.k, i.v
    (qb, qh, qt, _), (kb, kh, kt, _), (vb, vh, vt, _), (ob, oh, ot, _) = (
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
    )
    call[TENSORS] = (
        q.data_ptr(), qb, qh, qt, k.data_ptr(), kb, kh, kt, v.data_ptr(), vb, vh, vt, out.data_ptr(), ob, oh, ot,
    )  # fmt: skip
    call[LSE] = lse.data_ptr()
    if seed:
        call[SEED] = seed
    if i.sink is not None:
        call[SINK] = i.sink.data_ptr()
    if i.distance is not None:
        call[DISTANCE] = (i.distance.data_ptr(), _strides(i.distance)[0])
    if i.bias is not None:
        call[BIAS] = (i.bias.data_ptr(), native.DTYPES[i.bias.dtype], *_strides(i.bias))
    if i.stored is None:
        return None
    parts = listed(i.stored[0]), listed(i.stored[1])
    call[PARTS] = (parts[0].address, parts[1].address, parts[0].number, parts[1].number)
    return parts


def _is_of(mask: Mask | None, key: Sizes) -> bool:
    """Whether the tensors of the mask still have the content of the key: another thread may have written to them."""
    if mask is None or key.mask is None or key.mask.is_constant:
        return True
    return reads_again(lambda: mask.fingerprint().contents(), key.mask.contents())


def _lists(s: Schedule) -> _Schedule:
    whole, patterns = s.lists, np.ascontiguousarray(s.turned_patterns, dtype=np.uint8)
    addresses, address = list[int](), int(whole.__array_interface__["data"][0])
    for one in (s.run_start, s.run_tile, s.run_length, s.patch_start, s.patch_tile, s.patch_pattern):
        addresses.append(address)
        address += 8 * len(one)
    listed = (*s.maps, s.query_tiles, *addresses, int(patterns.__array_interface__["data"][0]), len(patterns))
    return _Schedule((s.queries, s.keys), listed, (whole.data, patterns.data))


def _all_tiles(call: CallSizes, tile: int) -> _Schedule:
    """The schedule that lists every tile: in each row of tiles one run of all."""
    rows = -(-call.queries // tile)
    run_start = range(rows + 1) if call.keys else [0] * (rows + 1)
    memory = array("q", [*run_start, *[0] * rows, *[-(-call.keys // tile)] * rows, *[0] * (rows + 1)])
    start = memory.buffer_info()[0]
    run_tile, run_length, patch_start = (start + 8 * (n * rows + 1) for n in (1, 2, 3))
    listed = (1, 1, rows, start, run_tile, run_length, patch_start, start, start, start, 0)
    return _Schedule((call.queries, call.keys), listed, (memoryview(memory),))


@cache
def _element(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="cpu")


@cache
def _entry(name: str) -> native.Entry:
    return native.Entry(name, native.CALL if name == "regard_forward" else native.GRADIENT)


def _placed(t: Tensor) -> tuple[int, int, int, int]:
    """A tensor [.., .., tokens, dim] as fields."""
    batch, head, token, _ = t.stride()
    return t.data_ptr(), batch, head, token


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: Tensor) -> tuple[int, ...]:
    """The strides, 0 along the axes that have one element."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _zeros(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if t is None else torch.zeros(t.shape, dtype=dtype or t.dtype, device="cpu")


def _in_place(t: Tensor, grad: bool, wide: torch.dtype) -> Tensor:
    """A bias tensor of four axes in a type that the library reads, with stride 0 for axes of one element only."""
    if t.dtype not in native.DTYPES:
        t = t.to(wide)
    repeated = [axis for axis in range(4) if t.stride(axis) == 0 and t.shape[axis] > 1]
    if repeated and grad and t.requires_grad:  # each of its elements has a gradient of its own
        return t.contiguous()
    for axis in repeated:
        t = t.narrow(axis, 0, 1)
    return t


class _Workspace(NamedTuple):
    memory: Tensor
    size: int  # bytes
    address: int


class _Workspaces(threading.local):
    """Memory for a call, kept for the thread's next: allocating it would cost a tiny call 1 us of 10."""

    kept: _Workspace | None = None

    def take(self, size: int) -> _Workspace:
        found, self.kept = self.kept, None  # who calls from a signal handler, inside a call, gets other memory
        if found is not None and found.size >= size:
            return found
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return _Workspace(memory, size, memory.data_ptr())

    def give(self, workspace: _Workspace) -> None:
        if workspace.size <= KEPT_WORKSPACE:
            self.kept = workspace


_workspaces = _Workspaces()

_numbers = count()
"""Of kernels: a key of `_structs` that keeps no kernel alive."""

_structs: Recent[Hashable, _Struct] = Recent(entries=KEPT_STRUCTS, nbytes=KEPT_BYTES, size=lambda made: made.nbytes)
"""By kernel, threads and `Operands.key`."""
