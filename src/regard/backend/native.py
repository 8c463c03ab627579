"""Our own C++ for the CPU: every mask, bias and type, forward and backward, in place and with memory for a few tiles.

The library (native/) knows no mask by name. It gets addresses, sizes, strides and the schedule's tiles, 64 x 64 with a
bit for each pair of a PARTIAL one: FULL tiles are computed without a mask, and hidden ones are not computed. A bias
that depends on the distance is a vector per head, a bias tensor is read in place. Gradients are recomputed from
the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, §3.1), so nothing is kept for them but the output.

A row's bits depend on its query, the keys that it sees and their positions: not on the batch, on the number of threads,
or on the chunk of a prompt that it came in.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard import native
from regard.backend.contract import Backend, Kernel, Repeated
from regard.backend.native_parts import listed
from regard.backend.native_repeated import Like, repeated
from regard.backend.native_tiles import ALL, FARTHEST, QUERIES, Tiles, fixed_tiles, tiles_of
from regard.describe.bias import TensorBias
from regard.errors import RefusalError
from regard.plan.distance import by_distance, kept_by_distance
from regard.plan.lower import Lowering, add_biases, gather_where_needed, pack, prepare_score, turn
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.storage.stored import StoredTensor
from regard.torch_internals import is_legacy_batched

UNTRACEABLE = (
    "torch.jit.trace records operators of torch, and the kernels of the backend 'native' are none: its graph would "
    "give memory that nobody wrote. Use torch.compile or torch.export, or backend='reference'."
)

SECONDS = 0.2
"""After so long the library returns for a moment, so that Python can see to Ctrl-C."""

_AT = {name: number for number, name in enumerate(native.GRADIENT)}
SEED, SINK, LSE, THREADS = _AT["seed"], _AT["sink"], _AT["lse"], _AT["threads"]
WORKSPACE = slice(_AT["workspace"], _AT["workspace_bytes"] + 1)
SIZES = slice(_AT["queries"], _AT["keys"] + 1)
TENSORS, PARTS = slice(_AT["q.data"], _AT["k_parts"]), slice(_AT["k_parts"], LSE)
DISTANCE, BIAS = slice(_AT["distance"], _AT["bias"]), slice(_AT["bias"], _AT["maps_batch"])
TILES, GRADIENTS = slice(_AT["maps_batch"], _AT["workspace"]), slice(len(native.CALL), len(native.GRADIENT))
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


class _Kernel:
    """The library for one problem, of any sizes, offset, mask and bias: these are taken from the operands."""

    def __init__(self, problem: Problem, schedule: Schedule, isa: int) -> None:
        p = problem
        self.problem, self.schedule = problem, schedule
        self.wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        self.entry = _entry("regard_forward")
        self.fields: dict[str, float] = {
            "batch": p.batch, "heads": p.heads, "kv_heads": p.kv_heads, "qk_dim": p.qk_dim, "v_dim": p.v_dim,
            "isa": isa, "dtype": native.DTYPES[p.dtype], "scale": p.scale, "softcap": p.softcap or 0.0,
            "dropout": p.dropout, "seconds": SECONDS,
        }  # fmt: skip
        self.attend, self.packed = native.Attend(), self.entry.packed(self.fields)
        self.form = self.entry.opened(self.packed)
        self.latest: tuple[Hashable, Tiles] | None = None
        self.like: Like | None = None

    def __call__(self, operands: Operands) -> State:
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is documented
            raise RefusalError(UNTRACEABLE)
        if self.problem.grad:
            return self._differentiable(operands, None)
        q, k, v, _, bias, sink, _, stored, offset, _, wants_lse = operands
        tiles, seed = self._tiles(operands), self._seed() if self.problem.dropout else 0
        if bias is None and sink is None and not seed and stored is None and tiles.number:
            return State(*self.run(self.form, q, k, v, tiles, offset, wants_lse))
        return State(*self.compute(self._inputs(operands), tiles, offset, seed, wants_lse))

    def resume(self, operands: Operands, state: State) -> State:
        return self._differentiable(operands, state)

    def repeated(self, operands: Operands) -> Repeated | None:
        p, queries = self.problem, operands.q.shape[2]  # not those of the problem, which serves all lengths
        tiles = ALL if operands.mask is None and queries <= QUERIES else fixed_tiles(operands)
        if p.grad or p.dropout or p.sink or p.bias or p.storage or not tiles or not tiles.number:
            return None
        by_head, by_token = (self._make_like(queries, by_token) for by_token in (False, True))
        return repeated(self.attend, self.form, tiles, by_head, by_token)

    def compute(
        self, inputs: _Inputs, tiles: Tiles, offset: int, seed: int, wants_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(out, lse); lse is NaN where it is not wanted."""
        form = self.entry.opened(self.packed)
        if not tiles.number:
            form[TILES] = tiles.lists
        kept = _write(form, inputs, seed)
        done = self.run(form, inputs.q, inputs.k, inputs.v, tiles, offset, wants_lse)
        del kept  # it was needed until now
        return done

    def run(
        self, form: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, offset: int, wants_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of a struct that has all but these."""
        (qb, qh, qt, _), (kb, kh, kt, _), (vb, vh, vt, _) = q.stride(), k.stride(), v.stride()
        queries, like = q.shape[2], self.like
        by_token = qh < qt and queries > 1  # a single token is the same either way
        if like is None or like[0] != queries or like[1] != by_token:
            self.like = like = self._make_like(queries, by_token)
        _, _, like_out, (ob, oh, ot), like_lse = like
        out = torch.empty_like(like_out)
        lse = torch.empty_like(like_lse) if wants_lse else like_lse
        intervals, number, maps, _, _ = tiles
        self.attend(form, (
            q.data_ptr(), qb, qh, qt, k.data_ptr(), kb, kh, kt, v.data_ptr(), vb, vh, vt, out.data_ptr(), ob, oh, ot,
            lse.data_ptr() if wants_lse else 0, torch.get_num_threads(), queries, k.shape[2],
            intervals, number, offset, maps,
        ))  # fmt: skip
        return (out.transpose(1, 2) if by_token else out), lse

    def _make_like(self, queries: int, by_token: bool) -> Like:
        """See `Like`. The output lies in memory token by token if q does, else head by head."""
        p = self.problem
        heads, dim = p.heads, p.v_dim
        out = _element(p.dtype).expand(p.batch, heads, queries, dim)
        lse = _element(self.wide).expand(p.batch, heads, queries)
        if by_token:
            return Like(queries, True, out.transpose(1, 2), (queries * heads * dim, dim, heads * dim), lse)
        return Like(queries, False, out, (heads * queries * dim, queries * dim, dim), lse)

    def _tiles(self, operands: Operands) -> Tiles:
        if operands.mask is None and operands.q.shape[2] <= QUERIES and abs(operands.offset) <= FARTHEST:
            return ALL
        if (fixed := fixed_tiles(operands)) is not None:
            return fixed
        key, latest = operands.key, self.latest
        if latest is not None and latest[0] == key:
            return latest[1]
        tiles, is_kept = tiles_of(operands, self.schedule)
        if is_kept:
            self.latest = key, tiles
        return tiles

    def gradients(
        self,
        inputs: _Inputs,
        tiles: Tiles,
        offset: int,
        seed: int,
        wanted: _Wanted,
        state: State,
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
        struct = backward.opened(backward.packed(self.fields))
        queries, keys = i.q.shape[2], i.k.shape[2]
        struct[TENSORS] = (*_placed(i.q), *_placed(i.k), *_placed(i.v), *_placed(state.out))
        struct[LSE], struct[THREADS], struct[SIZES] = state.lse.data_ptr(), torch.get_num_threads(), (queries, keys)
        struct[TILES] = tiles.fields(queries, offset)
        _write(struct, i, seed)
        struct[GRADIENTS] = (
            *_placed(dout), _address(dlse), *_placed(dq), *_placed(dk), *_placed(dv), delta.data_ptr(),
            _address(ddistance), _address(dbias), *((0, 0, 0, 0) if dbias is None else dbias.shape),
        )  # fmt: skip
        memory = native.memory_of(backward.workspace(struct))
        struct[WORKSPACE] = memory.address, memory.size
        backward(struct)
        dsink = _sink_gradient(cast(Tensor, i.sink), state.lse, delta) if wanted.sink else None
        return _Inputs(dq, dk, dv, dsink, ddistance, None if dbias is None else dbias.to(cast(Tensor, i.bias).dtype))

    def _differentiable(self, operands: Operands, state: State | None) -> State:
        inputs = self._inputs(operands)
        call = self._tiles(operands), operands.offset, self._seed()
        computed = _Attention.apply(self, *call, state, *inputs[:6])
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
    """(out, lse), differentiated by the library; with a state, it returns that state."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: _Kernel,
        tiles: Tiles,
        offset: int,
        seed: int,
        state: State | None,
        *parts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(*cast(Any, parts))
        if state is None:
            out, lse = kernel.compute(inputs, tiles, offset, seed)
        else:
            out, lse = state.out.detach(), state.lse.detach()
        ctx.save_for_backward(*parts, out, lse)
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.call = kernel, (tiles, offset, seed)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = _Wanted(*ctx.needs_input_grad[5:])
        found = _Gradient.apply(ctx.kernel, *ctx.call, wanted, *grads, *ctx.saved_tensors)
        return None, None, None, None, None, *cast(Any, found)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Attention`, which have no derivatives themselves."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: _Kernel,
        tiles: Tiles,
        offset: int,
        seed: int,
        wanted: _Wanted,
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
        inputs = _Inputs(*cast(Any, parts))
        return kernel.gradients(inputs, tiles, offset, seed, wanted, State(out, lse), dout, dlse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RefusalError(
            "The backend 'native' can be differentiated once, and this asks for a second derivative: name "
            'backend="reference", which can be differentiated any number of times.'
        )


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[heads]: minus the sink's share of the softmax, times delta, summed over the rows that see a key.

    Args:
        delta: [batch, heads, queries], sum(dout * out).
    """
    column = sink[:, None]
    share = torch.exp(column - torch.logaddexp(lse, column))
    return -torch.where(lse == -torch.inf, 0.0, share * delta).sum(dim=(0, 2))


def _write(struct: Any, i: _Inputs, seed: int) -> object:
    """Write into an opened struct what differs from call to call and is in few calls.

    Returns:
        What must stay in memory until the struct was run.
    """
    if seed:
        struct[SEED] = seed
    if i.sink is not None:
        struct[SINK] = i.sink.data_ptr()
    if i.distance is not None:
        struct[DISTANCE] = (i.distance.data_ptr(), _strides(i.distance)[0])
    if i.bias is not None:
        struct[BIAS] = (i.bias.data_ptr(), native.DTYPES[i.bias.dtype], *_strides(i.bias))
    if i.stored is None:
        return None
    k, v = listed(i.stored[0]), listed(i.stored[1])
    struct[PARTS] = (k.address, v.address, k.number, v.number)
    return k, v


@cache
def _element(dtype: torch.dtype) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device="cpu")


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
