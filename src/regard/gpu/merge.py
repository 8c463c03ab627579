# pyright: basic
"""The kernel that merges the spans of decoding (`span.py`), in their order: a row has the same bits in every batch."""

import triton
import triton.language as tl

from regard.gpu.scores import LOG2E


@triton.jit(do_not_specialize=("rows", "heads", "spans"))
def merge(
    parts, tops, totals, out, lse, sink, rows, heads, queries, spans, out_batch, out_head, out_token,
    V_DIM: tl.constexpr, V_DIM_PADDED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """out and lse (natural logarithm) of a row from its spans, in their order; a sink takes its share of out."""
    row = tl.program_id(0).to(tl.int64)
    cv = tl.arange(0, V_DIM_PADDED)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([V_DIM_PADDED], tl.float32)
    for n in range(spans):
        at = tl.cast(n, tl.int64) * rows + row
        one = tl.load(tops + at)
        of_one = tl.load(totals + at)
        if of_one != 0.0:  # also NaN
            above = tl.maximum(top, one)
            shrink = tl.exp2((top - above) * LOG2E)
            weight = of_one * tl.exp2((one - above) * LOG2E)
            total = total * shrink + weight
            values = tl.load(parts + at * V_DIM + cv, mask=cv < V_DIM, other=0.0)
            sums = sums * shrink + weight * values
            top = above
    h = row // queries % heads
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + tl.log2(total) / LOG2E))
    if SINK:
        total += tl.where(empty, 0.0, tl.exp2((tl.load(sink + h).to(tl.float32) - top) * LOG2E))
    into = out + row // queries // heads * out_batch + h * out_head + row % queries * out_token
    tl.store(into + cv, (sums / total).to(out.dtype.element_ty), mask=cv < V_DIM)
