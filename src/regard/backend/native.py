"""Our own C++ for the CPU: every mask, bias and type, forward and backward, in place and with memory for a few tiles.

The library (native/) knows no mask by name. It gets addresses, sizes, strides and the schedule's tiles, 64 x 64 with a
bit for each pair of a PARTIAL one: FULL tiles are computed without a mask, and hidden ones are not computed. A bias
that depends on the distance is a vector per head, a bias tensor is read in place.

A row's bits depend on its query, the keys that it sees and their positions: not on the batch, on the number of threads,
or on the chunk of a prompt that it came in.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from regard import native, native_calls
from regard.backend.contract import Backend, Kernel, Repeated, RepeatedWithTensors, RunWithTensors
from regard.backend.native_gradients import Attention, Call, Gradients
from regard.backend.native_inputs import TILES, Inputs, inputs_of, opened_over, write_inputs
from regard.backend.native_repeated import (
    Like,
    TilesOf,
    repeated,
    repeated_stored,
    repeated_stored_with_tensors,
    repeated_with_gradients,
    repeated_with_tensors,
    tiles_of_rows,
)
from regard.backend.native_tiles import (
    ALL,
    QUERIES,
    Tiles,
    TilesByRow,
    fixed_tiles,
    tiles_beside_table,
    tiles_of,
)
from regard.describe.mask import Mask
from regard.huge_pages import allocator_like
from regard.plan.lower import Lowering, add_biases, gather_where_needed, pack, prepare_score, rotate
from regard.plan.problem import MAX_OFFSET, Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State
from regard.wide import wide_of

REPEATED_BYTES = 32 << 10
"""The most bytes of the lists of tiles of a call that is repeated with tensors: it keeps them, and larger calls are no
faster by that."""

SECONDS = 0.2
"""After so long the library returns for a moment, so that Python can see to Ctrl-C."""


@dataclass(frozen=True)
class Native(Backend):
    """The compiled library.

    Attributes:
        isa: the instruction set, one of `native.isas()`; "plain" for the loops that all of them are tested by; None for
            what `native.isa()` says when the backend is first used.
    """

    name: str = "native"
    tile: int = 64
    lowerings: tuple[Lowering, ...] = (gather_where_needed, rotate, prepare_score, pack, add_biases)
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


class _Kernel:
    """The library for one problem, of any sizes, offset, mask and bias: these are taken from the operands."""

    def __init__(self, problem: Problem, schedule: Schedule, isa: int) -> None:
        p = problem
        self.problem, self.schedule = problem, schedule
        self.wide = wide_of(p.dtype)
        self.entry = _entry()
        self.fields: dict[str, float] = {
            "batch": p.batch, "heads": p.heads, "kv_heads": p.kv_heads, "qk_dim": p.qk_dim, "v_dim": p.v_dim,
            "isa": isa, "dtype": native_calls.DTYPES[p.dtype], "scale": p.scale, "softcap": p.softcap or 0.0,
            "dropout": p.dropout, "seconds": SECONDS,
        }  # fmt: skip
        self.attend, self.packed = native_calls.Attend(), self.entry.packed(self.fields)
        self.form = self.entry.opened(self.packed)
        self.gradients = Gradients(p, self.fields)
        self.latest: tuple[Hashable, Tiles] | None = None
        self.like: Like | None = None

    def __call__(self, operands: Operands) -> State:
        if self.problem.grad:
            return self._differentiable(operands, None)
        seed = operands.drawn_seed() if self.problem.dropout else 0
        inputs = inputs_of(self.problem, operands)
        return State(*self.compute(inputs, self._tiles(operands), operands.offset, seed, operands.lse))

    def resume(self, operands: Operands, state: State, *, is_part: bool = False) -> State:
        return self._differentiable(operands, state, is_part=is_part)

    def repeated(self, operands: Operands) -> Repeated | None:
        p, queries = self.problem, operands.q.shape[2]  # not those of the problem, which serves all lengths
        tiles = ALL if operands.mask is None and queries <= QUERIES else fixed_tiles(operands)
        if p.dropout or p.sink or p.bias or not tiles or not tiles.number:
            return None
        if (p.storage is None) != (operands.stored is None) or (p.grad and operands.stored is not None):
            return None
        if p.grad:
            return repeated_with_gradients(self._with_gradients, tiles, queries)
        by_head, by_token = (self._make_like(queries, by_token) for by_token in (False, True))
        if operands.stored is not None:
            return repeated_stored(self.attend, partial(opened_over, self.entry, self.packed), tiles, by_head, by_token)
        return repeated(self.attend, self.form, tiles, by_head, by_token)

    def repeated_with_tensors(self, operands: Operands) -> RepeatedWithTensors | None:
        queries = operands.q.shape[2]
        if not self._repeats_with_tensors(operands):
            return None
        fixed = ALL if operands.mask is None and queries <= QUERIES else fixed_tiles(operands)
        tiles = self._tiles_of_same_sizes(operands) if fixed is None else fixed
        if tiles is None:
            return None
        return RepeatedWithTensors(self._with_tensors(tiles, operands), fixed is not None)

    def repeated_with_table(self, operands: Operands, rest: Mask | None) -> RunWithTensors | None:
        tiles = tiles_beside_table(rest, operands.sizes) if self._repeats_with_tensors(operands) else None
        return None if tiles is None else self._with_tensors(tiles, operands)

    def repeated_over_rows(self, operands: Operands, mask: Mask | None) -> RunWithTensors | None:
        queries = operands.q.shape[2]
        tiles = tiles_beside_table(mask, operands.sizes) if self._repeats_with_tensors(operands) else None
        if tiles is None:
            return None
        return self._over_stored(tiles_of_rows(TilesByRow(tiles, self.problem.batch, queries)), queries)

    def _repeats_with_tensors(self, operands: Operands) -> bool:
        p = self.problem
        return not (p.grad or p.dropout) and (p.storage is None) == (operands.stored is None)

    def _with_tensors(self, tiles: Tiles, operands: Operands) -> RunWithTensors:
        queries = operands.q.shape[2]
        if operands.stored is not None:
            return self._over_stored(lambda k, v, keys: tiles, queries)
        by_head, by_token = (self._make_like(queries, by_token) for by_token in (False, True))
        form = partial(self.entry.opened, self.packed)
        return repeated_with_tensors(self.attend, form, tiles, by_head, by_token)

    def _over_stored(self, tiles_of: TilesOf, queries: int) -> RunWithTensors:
        by_head, by_token = (self._make_like(queries, by_token) for by_token in (False, True))
        form = partial(opened_over, self.entry, self.packed)
        return repeated_stored_with_tensors(self.attend, form, tiles_of, by_head, by_token)

    def _tiles_of_same_sizes(self, operands: Operands) -> Tiles | None:
        """The tiles of all calls of these sizes under the mask, if that is not constant; None if they are not kept."""
        mask = operands.mask
        if mask is None or mask.constant() is not None:
            return None
        tiles, is_kept = tiles_of(operands, self.schedule)
        return tiles if is_kept and tiles.nbytes <= REPEATED_BYTES else None

    def compute(
        self, inputs: Inputs, tiles: Tiles, offset: int, seed: int, wants_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(out, lse); lse is NaN where it is not wanted."""
        q, k, v, *others = inputs
        if tiles.number and not seed and not any(other is not None for other in others):
            return self.run(self.form, q, k, v, tiles, offset, wants_lse)
        form = self.entry.opened(self.packed)
        if not tiles.number:
            form[TILES] = tiles.lists
        kept = write_inputs(form, inputs, seed)
        done = self.run(form, q, k, v, tiles, offset, wants_lse)
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
        _, _, like_out, (ob, oh, ot), like_lse, empty_like = like
        out = empty_like(like_out)
        lse = torch.empty_like(like_lse) if wants_lse else like_lse
        intervals, number, maps, _, _ = tiles
        self.attend(form, (
            q.data_ptr(), qb, qh, qt, k.data_ptr(), kb, kh, kt, v.data_ptr(), vb, vh, vt, out.data_ptr(), ob, oh, ot,
            lse.data_ptr() if wants_lse else 0, torch.get_num_threads(), queries, k.shape[2],
            intervals, number, offset, maps,
        ))  # fmt: skip
        return (out.transpose(1, 2) if by_token else out), lse

    def _make_like(self, queries: int, by_token: bool) -> Like:
        """See `Like`. The output is stored token by token if q is, else head by head."""
        p = self.problem
        heads, dim = p.heads, p.v_dim
        out = _element(p.dtype).expand(p.batch, heads, queries, dim)
        lse = _element(self.wide).expand(p.batch, heads, queries)
        empty_like = allocator_like(out)
        if by_token:
            return Like(queries, True, out.transpose(1, 2), (queries * heads * dim, dim, heads * dim), lse, empty_like)
        return Like(queries, False, out, (heads * queries * dim, queries * dim, dim), lse, empty_like)

    def _tiles(self, operands: Operands) -> Tiles:
        if operands.mask is None and operands.q.shape[2] <= QUERIES and abs(operands.offset) <= MAX_OFFSET:
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

    def _differentiable(self, operands: Operands, state: State | None, *, is_part: bool = False) -> State:
        inputs = inputs_of(self.problem, operands)
        seed = operands.drawn_seed() if self.problem.dropout else 0
        call = Call(self, self._tiles(operands), operands.offset, seed, is_part, state)
        return State(*cast("tuple[Tensor, Tensor]", Attention.apply(call, *inputs[:6])))

    def _with_gradients(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, offset: int) -> Tensor:
        """The output of a call of nothing but these, which learn."""
        call = Call(self, tiles, offset, seed=0, is_part=False, state=None)
        out, _ = cast("tuple[Tensor, Tensor]", Attention.apply(call, q, k, v, None, None, None))
        return out


@cache
def _element(dtype: torch.dtype) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device="cpu")


@cache
def _entry() -> native_calls.Entry:
    return native_calls.Entry("regard_forward", native_calls.CALL)
