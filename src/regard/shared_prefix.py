"""Attention of sequences with a shared prefix: the keys of the prefix are read once for all rows.

The queries of all rows that share a prefix become the queries of one call over it. A second call is over the other keys
of each row, and the two results merge as states (`state.py`). Otherwise each row reads the prefix for itself; this pays
where the prefix does not fit into the caches of the CPU, or where rows have copies of it. Juravsky et al. 2024,
Hydragen, arXiv:2402.05099, §3; for a tree of prefixes: Ye et al. 2024, "Cascade Inference",
flashinfer.ai/2024/02/02/cascade-inference.html.
"""

from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention import attend, attend_state
from regard.backend.contract import Backend
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.score import Score
from regard.describe.suggestions import suggest_keywords
from regard.errors import ProblemError
from regard.plan.checks import check_sink
from regard.state import State
from regard.storage.stored import Part, StoredTensor

LEAST = 64
"""Tokens of the shortest shared prefix that is worth a separate call."""


@suggest_keywords
def attend_shared(
    q: Float[Tensor, "batch heads queries qk_dim"],
    k: Float[Tensor, "batch kv_heads keys qk_dim"] | StoredTensor,
    v: Float[Tensor, "batch kv_heads keys v_dim"] | StoredTensor,
    *,
    prefix: tuple[Tensor | StoredTensor, Tensor | StoredTensor] | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " heads"] | None = None,
    backend: str | Backend | None = None,
) -> Float[Tensor, "batch heads queries v_dim"]:
    """The result of `attend` over the whole sequence of each row, with shared keys computed once for all rows.

    Exact except for the order of sums. The shared tokens are `prefix`, or are found in the block tables of stored
    tensors (of a `PagePool`, or of `KVCache(Paged())`), where groups of rows may share prefixes of different lengths.
    The last query of each row is at its last key.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim]: with `prefix`, the keys of each row after it (of any lengths in a handle);
            without, handles of all keys.
        v: [batch, kv_heads, keys, v_dim], likewise.
        prefix: keys [1, kv_heads, keys, qk_dim] and values [1, kv_heads, keys, v_dim] before those of every
            row; tensors or handles.
        mask: None or `Causal()`: every query sees all shared keys. With several queries, the shared part ends before
            the first of them.
        score: as in `attend`.
        scale: as in `attend`.
        softcap: as in `attend`.
        sink: as in `attend`, [heads].
        backend: as in `attend`.

    Raises:
        ProblemError: another mask; tensors without a prefix; a prefix that does not fit, or a row with fewer keys after
            it than queries before its last; and the errors of `attend`.

    >>> import torch
    >>> from regard import Causal, attend
    >>> q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    >>> prefix = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    >>> out = attend_shared(q, k, v, prefix=prefix, mask=Causal())
    >>> whole = [torch.cat([one.expand(3, -1, -1, -1), t], 2) for one, t in zip(prefix, (k, v))]
    >>> torch.allclose(out, attend(q, *whole, mask=Causal()), atol=1e-6)
    True
    """
    if mask is not None and type(mask) is not Causal:
        raise ProblemError(
            f"mask is {mask!r}: expected None or Causal(), where every query sees all shared keys. For others "
            "use attend, which reads shared keys once for each row."
        )
    options: dict[str, Any] = {"score": score, "scale": scale, "softcap": softcap, "backend": backend}
    before = max(q.shape[2] - 1, 0) if mask is not None and isinstance(q, Tensor) and q.ndim == 4 else 0  # pyright: ignore[reportUnnecessaryIsInstance]
    if prefix is not None:
        _check_prefix(q, k, v, prefix, before)
        shared = [_Shared(None, *prefix)]
    else:
        k, v, shared = _found(k, v, before)
        if not shared:
            return attend(q, cast(Tensor, k), cast(Tensor, v), mask=mask, sink=sink, **options)
    if isinstance(cast(object, q), Tensor) and q.ndim == 4:
        check_sink(sink, q.shape[1], q)
    state = attend_state(q, cast(Tensor, k), cast(Tensor, v), mask=mask, **options)
    for one in shared:
        state |= one.attend(q, options)
    return state.out if sink is None else state.with_sink(sink)


@dataclass(frozen=True, eq=False)
class _Shared:
    """Keys and values, [1, kv_heads, keys, dim], that these batch rows share; None: all rows."""

    rows: list[int] | None
    k: Tensor | StoredTensor
    v: Tensor | StoredTensor

    def attend(self, q: Tensor, options: dict[str, Any]) -> State:
        """The state of all rows over these keys; empty for rows that do not share them."""
        batch, heads, queries, _ = q.shape
        is_all = self.rows is None or len(self.rows) == batch
        rows = None if is_all else torch.tensor(self.rows, device=q.device)
        ours = q if rows is None else q[rows]
        count = ours.shape[0]
        side = ours.transpose(0, 1).reshape(1, heads, count * queries, q.shape[3])
        state = attend_state(side, cast(Tensor, self.k), cast(Tensor, self.v), **options)
        out = state.out.view(heads, count, queries, state.out.shape[3]).transpose(0, 1)
        lse = state.lse.view(heads, count, queries).transpose(0, 1)
        if rows is None:
            return State(out, lse)
        empty = out.new_zeros(batch, *out.shape[1:]), lse.new_full((batch, *lse.shape[1:]), -torch.inf)
        return State(empty[0].index_copy(0, rows, out), empty[1].index_copy(0, rows, lse))


@dataclass(frozen=True, eq=False)
class _Pages:
    """The full pages of every row of a handle, over all its parts in order.

    Attributes:
        stored: the handle.
        begins: int64 [parts, batch], the first token of each part.
        ends: int64 [parts, batch], one past its last.
        counts: int64 [parts, batch], the full pages of each part that may be shared.
        marks: int64 [batch, pages]: equal where two rows have the same page; unique to the row after its last page.
    """

    stored: StoredTensor
    begins: Tensor
    ends: Tensor
    counts: Tensor
    marks: Tensor

    @property
    def page(self) -> int:
        """Tokens per page."""
        return self.stored.parts[0].page

    def pages_of(self, t: StoredTensor, row: int, start: int, stop: int) -> StoredTensor:
        """The pages start .. stop - 1 of a row of t, which has its tokens where `stored` has them."""
        parts: list[Part] = []
        before = 0
        for part, count in zip(t.parts, self.counts[:, row].tolist(), strict=True):
            first, last = max(start - before, 0), min(stop - before, count)
            if last > first:
                assert part.table is not None
                table = part.table[row : row + 1, first:last]
                parts.append(part._replace(tokens=(last - first) * part.page, table=table, row_ends=None))
            before += count
        shape = (1, t.shape[1], (stop - start) * self.page, t.shape[3])
        return StoredTensor(tuple(parts), shape, t.dtype, None, t.rotated)

    def rest(self, t: StoredTensor, starts: Tensor) -> StoredTensor:
        """The tokens of each row from its page `starts` on."""
        parts: list[Part] = []
        left, over = starts, torch.zeros_like(starts)
        for part, begins, ends, counts in zip(t.parts, self.begins, self.ends, self.counts, strict=True):
            gone = torch.minimum(left, counts)
            left = left - gone
            tokens = ends - begins - gone * self.page
            begin, over = over, over + tokens
            most = int(tokens.max())
            if most:
                assert part.table is not None
                alike = _unless_alike(begin) is None and _unless_alike(over) is None
                table = _behind(part.table, gone)
                parts.append(part._replace(tokens=most, table=table, row_ends=None if alike else over))
        lengths = t.shape[2] - starts * self.page if t.lengths is None else t.lengths - starts * self.page
        longest = int(lengths.max())
        parts = parts or [t.parts[-1]._replace(tokens=0, row_ends=None)]
        shape = (t.shape[0], t.shape[1], longest, t.shape[3])
        return StoredTensor(tuple(parts), shape, t.dtype, _unless_alike(lengths), t.rotated)


def _found(
    k: Tensor | StoredTensor, v: Tensor | StoredTensor, before: int
) -> tuple[StoredTensor, StoredTensor, list[_Shared]]:
    """The shared keys of rows, by their block tables, and the other keys of each row."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, StoredTensor):
            raise ProblemError(
                f"{name} is {type(t).__name__} and no prefix is given: the shared keys are unknown. Give "
                "prefix=(keys, values), or the handles of a PagePool or of KVCache(Paged())."
            )
    assert isinstance(k, StoredTensor)
    assert isinstance(v, StoredTensor)
    pages = _pages(k, before) if k.shape[0] > 1 else None
    if pages is None or not _has_same_pages(k, v):
        return k, v, []
    ranges: list[tuple[list[int], int, int]] = []
    starts = [0] * k.shape[0]
    _split(pages.marks, [*range(k.shape[0])], (0, 0), -(-LEAST // pages.page), ranges, starts)
    if not ranges:
        return k, v, []
    shared = [_Shared(rows, *(pages.pages_of(t, rows[0], start, stop) for t in (k, v))) for rows, start, stop in ranges]
    own = torch.tensor(starts, device=k.device)
    return pages.rest(k, own), pages.rest(v, own), shared


def _pages(t: StoredTensor, before: int) -> _Pages | None:
    """The pages that rows may share, without the last `before` tokens; None for a handle without block tables."""
    page = t.parts[0].page
    if any(part.table is None or part.first_slot or part.page != page for part in t.parts):
        return None
    batch, device = t.shape[0], t.device
    lengths = torch.full((batch,), t.shape[2], device=device) if t.lengths is None else t.lengths
    begin = torch.zeros_like(lengths)
    begins, ends, counts, last = [], [], [], lengths - before
    for part in t.parts:
        end = begin + part.tokens if part.row_ends is None else part.row_ends
        begins.append(begin)
        ends.append(end)
        counts.append((torch.minimum(end, last) - begin).clamp(min=0) // page)
        last = torch.where(counts[-1] * page == end - begin, last, 0)  # nothing after a page that is not full
        begin = end
    width = int(sum(counts).max())  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    marks = -1 - torch.arange(batch, device=device)[:, None].repeat(1, width + 1)
    first = torch.zeros_like(lengths)
    for number, (part, count) in enumerate(zip(t.parts, counts, strict=True)):
        assert part.table is not None
        column = torch.arange(part.table.shape[1], device=device)
        place = torch.where(column < count[:, None], first[:, None] + column, width)
        marks.scatter_(1, place, part.table * len(t.parts) + number)
        first = first + count
    return _Pages(t, torch.stack(begins), torch.stack(ends), torch.stack(counts), marks[:, :width])


def _split(
    marks: Tensor,
    rows: list[int],
    place: tuple[int, int],
    least: int,
    ranges: list[tuple[list[int], int, int]],
    own: list[int],
) -> None:
    """Find the page ranges that some of these rows share, and the first page of each row that it does not share.

    Args:
        place: the first page of the range, and the page up to which the rows are known to be equal.
    """
    start, here = place
    if here >= marks.shape[1]:
        return
    kinds: dict[int, list[int]] = {}
    for row, mark in zip(rows, marks[rows, here].tolist(), strict=True):
        kinds.setdefault(mark, []).append(row)
    for some in kinds.values():
        if len(some) < 2:
            continue
        same = (marks[some, here:] == marks[some[0], here:]).all(0)
        stop = here + int(same.cumprod(0).sum())
        if stop - start < least:
            _split(marks, some, (start, stop), least, ranges, own)
            continue
        ranges.append((some, start, stop))
        for row in some:
            own[row] = stop
        _split(marks, some, (stop, stop), least, ranges, own)


def _behind(table: Tensor, gone: Tensor) -> Tensor:
    """The columns after the first `gone` of each row."""
    first = int(gone.min())
    if first == int(gone.max()):
        return table[:, first:]
    columns = torch.arange(table.shape[1] - first, device=table.device) + gone[:, None]
    return table.gather(1, columns.clamp(max=table.shape[1] - 1))


def _unless_alike(ends: Tensor) -> Tensor | None:
    return None if bool((ends == ends[0]).all()) else ends


def _has_same_pages(k: StoredTensor, v: StoredTensor) -> bool:
    """Whether the keys and values of a token are on pages of the same index."""
    return len(k.parts) == len(v.parts) and all(
        ours.table is theirs.table
        or (ours.table is not None and theirs.table is not None and torch.equal(ours.table, theirs.table))
        for ours, theirs in zip(k.parts, v.parts, strict=True)
    )


def _check_prefix(q: object, k: object, v: object, prefix: object, before: int) -> None:
    if not isinstance(prefix, tuple) or len(cast(tuple[Any, ...], prefix)) != 2:
        raise ProblemError("prefix: expected (keys, values), tensors or handles of one batch row.")
    named = zip(("keys", "values"), cast(tuple[object, object], prefix), ("k", "v"), (k, v), strict=True)
    for name, t, own_name, own in named:
        if not isinstance(t, Tensor | StoredTensor) or t.ndim != 4 or t.shape[0] != 1:
            what = f"{list(t.shape)}" if isinstance(t, Tensor | StoredTensor) else type(t).__name__
            raise ProblemError(f"the {name} of the prefix are {what}: expected [1, kv_heads, keys, dim].")
        if _has_four_axes(own) and (t.shape[1], t.shape[3]) != (own.shape[1], own.shape[3]):
            raise ProblemError(
                f"the {name} of the prefix are {list(t.shape)} and {own_name} is {list(own.shape)}: expected "
                f"[1, {own.shape[1]}, keys, {own.shape[3]}], with the heads and dimensions of {own_name}."
            )
    if not _has_four_axes(q) or not _has_four_axes(k):
        return  # attend raises
    lengths = k.lengths if isinstance(k, StoredTensor) else None
    least = k.shape[2] if lengths is None else int(lengths.min())
    if least < before:
        raise ProblemError(
            f"{q.shape[2]} queries, and a row with {least} keys after the prefix: with Causal() the first query would "
            f"be inside the prefix, whose last keys it may not see. Give {before} or more keys after it."
        )


def _has_four_axes(t: object) -> TypeGuard[Tensor | StoredTensor]:
    return isinstance(t, Tensor | StoredTensor) and t.ndim == 4
