"""Calls of `native` that are repeated: addresses and strides go from the tensors straight into the struct."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.backend.contract import Bind, Bound, Repeated, Run, RunWithTensors
from regard.backend.native_inputs import TILES, write_bias_and_sink
from regard.backend.native_tiles import Tiles, TilesByRow
from regard.describe.bias import Bias
from regard.native_calls import Attend, pack_packed, packed_operands
from regard.storage.stored import StoredTensor


class Like(NamedTuple):
    """What outputs are made like; `torch.empty_like` of such costs 0.4 us less than `torch.empty` with a type.

    Attributes:
        by_token: whether outputs are [batch, queries, heads, v_dim] in memory, else [batch, heads, queries, v_dim].
        out: a tensor of one expanded element with the sizes of the output in memory.
        strides: the strides of the output: batch, head, token.
        lse: a tensor of one expanded element, NaN, with the sizes of the log-sum-exp.
        empty_like: makes the output from `out`.
    """

    queries: int
    by_token: bool
    out: Tensor
    strides: tuple[int, int, int]
    lse: Tensor
    empty_like: Callable[[Tensor], Tensor]


def repeated(attend: Attend, form: Any, tiles: Tiles, by_head: Like, by_token: Like) -> Repeated:
    """What runs calls of one struct and one number of queries, without a log-sum-exp."""
    return Repeated(_run(attend, form, tiles, by_head, by_token), _bind(attend, form, tiles, by_head, by_token))


WithGradients: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tiles, int], Tensor]
"""The output of q, k and v under tiles and at an offset, which autograd knows."""


def repeated_with_gradients(with_gradients: WithGradients, tiles: Tiles, queries: int) -> Repeated:
    """The same where q, k or v learn."""

    def again(q: Tensor, k: Tensor, v: Tensor, keys: int, offset: int | None) -> Tensor | None:
        try:
            is_in_place = q.stride(3) == k.stride(3) == v.stride(3) == 1
            has_memory = q.data_ptr() and k.data_ptr() and v.data_ptr()
        except RuntimeError:  # a layout without strides
            return None
        if not (is_in_place and has_memory):
            return None
        return with_gradients(q, k, v, tiles, keys - queries if offset is None else offset)

    return Repeated(again, _bind_nothing)


OpenedOver: TypeAlias = Callable[[StoredTensor, StoredTensor], tuple[Any, object]]
"""A struct of one call over stored keys and values, and what must stay in memory until it was run."""


def repeated_stored(attend: Attend, opened: OpenedOver, tiles: Tiles, by_head: Like, by_token: Like) -> Repeated:
    """The same over stored keys and values, whose parts are written into a struct for each call."""
    return Repeated(_run_stored(attend, opened, tiles, by_head, by_token), _bind_nothing)


def _run(run: Attend, form: Any, tiles: Tiles, by_head: Like, by_token: Like) -> Run:
    """What reads the strides of each call.

    Each name is a local one and each size is read once: of a call of 14 us, 5 are Python. A method takes less time than
    an object that is called.
    """
    intervals, number, maps, _, memory = tiles
    queries, _, like_head, (hb, hh, ht), _, empty_like = by_head
    _, _, like_token, (tb, th, tt), _, _ = by_token
    threads, attend = torch.get_num_threads, run.__call__

    def again(q: Tensor, k: Tensor, v: Tensor, keys: int, offset: int | None, kept: object = memory) -> Tensor | None:
        try:
            (qb, qh, qt, qd), (kb, kh, kt, kd), (vb, vh, vt, vd) = q.stride(), k.stride(), v.stride()
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        except RuntimeError:  # a layout without strides
            return None
        if not (qd == kd == vd == 1 and at_q and at_k and at_v):  # without memory: no tokens, or a lazy zero
            return None
        offset = keys - queries if offset is None else offset
        if qh < qt and queries > 1:
            out = empty_like(like_token)
            attend(form, (
                at_q, qb, qh, qt, at_k, kb, kh, kt, at_v, vb, vh, vt, out.data_ptr(), tb, th, tt, 0, threads(),
                queries, keys, intervals, number, offset, maps,
            ))  # fmt: skip
            return out.transpose(1, 2)
        out = empty_like(like_head)
        attend(form, (
            at_q, qb, qh, qt, at_k, kb, kh, kt, at_v, vb, vh, vt, out.data_ptr(), hb, hh, ht, 0, threads(),
            queries, keys, intervals, number, offset, maps,
        ))  # fmt: skip
        return out

    return again


def _bind(run: Attend, form: Any, tiles: Tiles, by_head: Like, by_token: Like) -> Bind:
    """What packs the strides of a call for all calls like it, of which only addresses are then read."""
    intervals, number, maps, _, memory = tiles
    queries, threads, pack, attend = by_head.queries, torch.get_num_threads, pack_packed, run.__call__
    of_intervals = packed_operands(intervals, number)

    def bind(q: Tensor, k: Tensor, v: Tensor, is_by_token: bool) -> Bound | None:
        by_q, by_k, by_v = q.stride(), k.stride(), v.stride()
        if not by_q[3] == by_k[3] == by_v[3] == 1:
            return None
        is_transposed = not is_by_token and by_q[1] < by_q[2] and queries > 1
        _, _, like, strides, _, empty_like = by_token if is_by_token or is_transposed else by_head
        of_q, of_k, of_v = (packed_operands(*by[:3]) for by in (by_q, by_k, by_v))
        of_out = packed_operands(*strides, 0)

        def bound(q: Tensor, k: Tensor, v: Tensor, keys: int, offset: int | None, kept: object = memory) -> Tensor:
            out = empty_like(like)
            attend(form, (
                q.data_ptr(), of_q, k.data_ptr(), of_k, v.data_ptr(), of_v, out.data_ptr(), of_out, threads(),
                queries, keys, of_intervals, keys - queries if offset is None else offset, maps,
            ), pack)  # fmt: skip
            return out.transpose(1, 2) if is_transposed else out

        return bound

    return bind


def _run_stored(run: Attend, opened: OpenedOver, tiles: Tiles, by_head: Like, by_token: Like) -> Run:
    """What reads the strides of the queries and the parts of keys and values in each call.

    Nothing reads k and v as tensors where there are parts: they are one element, as in other calls.
    """
    intervals, number, maps, _, memory = tiles
    queries, threads, attend = by_head.queries, torch.get_num_threads, run.__call__
    element = by_head.out.data_ptr()

    def again(
        q: Tensor, k: StoredTensor, v: StoredTensor, keys: int, offset: int | None, kept: object = memory
    ) -> Tensor | None:
        try:
            (qb, qh, qt, qd), at_q = q.stride(), q.data_ptr()
        except RuntimeError:  # a layout without strides
            return None
        if qd != 1 or not at_q:
            return None
        is_by_token = qh < qt and queries > 1
        _, _, like, (ob, oh, ot), _, empty_like = by_token if is_by_token else by_head
        form, parts = opened(k, v)
        out = empty_like(like)
        attend(form, (
            at_q, qb, qh, qt, element, 0, 0, 0, element, 0, 0, 0, out.data_ptr(), ob, oh, ot, 0, threads(),
            queries, keys, intervals, number, keys - queries if offset is None else offset, maps,
        ))  # fmt: skip
        del parts  # they were needed until now
        return out.transpose(1, 2) if is_by_token else out

    return again


def repeated_with_tensors(
    run: Attend, opened: Callable[[], Any], tiles: Tiles, by_head: Like, by_token: Like
) -> RunWithTensors:
    """What runs calls with a table, a bias and a sink, which are written into a struct for each, and with any tiles.

    It reads strides and addresses as `_run` does, in place: a function of their own would cost each call 0.2 us.
    """
    intervals, number, maps, _, memory = tiles
    queries, threads, attend = by_head.queries, torch.get_num_threads, run.__call__

    def again(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: int,
        offset: int | None,
        table: Tensor | None,
        bias: Bias | None,
        sink: Tensor | None,
        kept: object = memory,
    ) -> Tensor | None:
        try:
            (qb, qh, qt, qd), (kb, kh, kt, kd), (vb, vh, vt, vd) = q.stride(), k.stride(), v.stride()
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        except RuntimeError:  # a layout without strides
            return None
        if not (qd == kd == vd == 1 and at_q and at_k and at_v):  # without memory: no tokens, or a lazy zero
            return None
        offset = keys - queries if offset is None else offset
        form = opened()
        used = _write_tensors(form, tiles, table, bias, sink, by_head.lse, keys, offset)
        if used is None:
            return None
        is_by_token = qh < qt and queries > 1
        _, _, like, (ob, oh, ot), _, empty_like = by_token if is_by_token else by_head
        out = empty_like(like)
        attend(form, (
            at_q, qb, qh, qt, at_k, kb, kh, kt, at_v, vb, vh, vt, out.data_ptr(), ob, oh, ot, 0, threads(),
            queries, keys, intervals, number if table is None else 0, offset, maps,
        ))  # fmt: skip
        del used  # it was needed until now
        return out.transpose(1, 2) if is_by_token else out

    return again


TilesOf: TypeAlias = Callable[[StoredTensor, StoredTensor, int], Tiles | None]
"""The tiles of a call, from its stored keys, values and number of keys; None where the call is not repeatable."""


def tiles_of_rows(tiles: TilesByRow) -> TilesOf:
    """Those of rows of different lengths."""

    def of_call(k: StoredTensor, v: StoredTensor, keys: int) -> Tiles | None:
        lengths = k.row_lengths
        return None if lengths is None or lengths != v.row_lengths else tiles(lengths, keys)

    return of_call


def repeated_stored_with_tensors(
    run: Attend, opened: OpenedOver, tiles_of: TilesOf, by_head: Like, by_token: Like
) -> RunWithTensors:
    """The same over stored keys and values, whose parts are written into the struct as well."""
    queries, threads, attend = by_head.queries, torch.get_num_threads, run.__call__
    element = by_head.out.data_ptr()

    def again(
        q: Tensor,
        k: StoredTensor,
        v: StoredTensor,
        keys: int,
        offset: int | None,
        table: Tensor | None,
        bias: Bias | None,
        sink: Tensor | None,
    ) -> Tensor | None:
        try:
            (qb, qh, qt, qd), at_q = q.stride(), q.data_ptr()
        except RuntimeError:  # a layout without strides
            return None
        if qd != 1 or not at_q or (tiles := tiles_of(k, v, keys)) is None:
            return None
        offset = keys - queries if offset is None else offset
        form, parts = opened(k, v)
        used = _write_tensors(form, tiles, table, bias, sink, by_head.lse, keys, offset)
        if used is None:
            return None
        is_by_token = qh < qt and queries > 1
        _, _, like, (ob, oh, ot), _, empty_like = by_token if is_by_token else by_head
        out = empty_like(like)
        attend(form, (
            at_q, qb, qh, qt, element, 0, 0, 0, element, 0, 0, 0, out.data_ptr(), ob, oh, ot, 0, threads(),
            queries, keys, tiles.intervals, tiles.number if table is None else 0, offset, tiles.maps_batch,
        ))  # fmt: skip
        del tiles, parts, used  # they were needed until now
        return out.transpose(1, 2) if is_by_token else out

    return again


def _write_tensors(
    form: Any,
    tiles: Tiles,
    table: Tensor | None,
    bias: Bias | None,
    sink: Tensor | None,
    lse: Tensor,
    keys: int,
    offset: int,
) -> object | None:
    """Write what a call has besides queries, keys and values into a struct, and lists of tiles.

    Args:
        lse: a tensor like the log-sum-exp.

    Returns:
        What must stay in memory until the struct was run; None where something has no memory.
    """
    _, heads, queries = lse.shape
    if table is not None:
        if (fields := tiles.fields_with_table(table, queries, offset)) is None:
            return None
        form[TILES] = fields
    elif not tiles.number:
        form[TILES] = tiles.lists
    return write_bias_and_sink(form, bias, sink, heads, lse.dtype, offset - (keys - 1), queries + keys - 1)


def _bind_nothing(q: Tensor, k: Any, v: Any, is_by_token: bool) -> None:
    """Each call has parts of its own, or autograd looks at each."""
