# pyright: basic
"""What the backward kernels read of each row of queries: delta, and the log-sum-exp in base 2.

torch's own operators would write the output and its gradient in float32 first, four times as many bytes as are read
here. Both results have as many rows as whole tiles have, so the backward kernels need not ask whether a query is there.
"""

import triton
import triton.language as tl

from regard.gpu.scores import LOG2E


@triton.jit(do_not_specialize=("heads", "queries", "rows"))
def prepare_rows(
    out, dout, lse, delta, top, out_batch, out_head, out_token, dout_batch, dout_head, dout_token, heads, queries, rows,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """delta and top [batch, heads, rows], float32; `rows` is `queries` or more. A program takes ROWS rows of one head.

    delta is the sum of the products of out and dout, 0 where no query is; top is lse * LOG2E, and inf where no query is
    or where a query sees nothing, so that its weights, computed again, are 0.
    """
    blocks = rows // ROWS
    row = tl.program_id(0) // blocks
    b64, h64 = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    inside = (i[:, None] < queries) & (c[None, :] < DIM)
    out_at = out + b64 * out_batch + h64 * out_head + i[:, None].to(tl.int64) * out_token + c[None, :]
    dout_at = dout + b64 * dout_batch + h64 * dout_head + i[:, None].to(tl.int64) * dout_token + c[None, :]
    of_out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    of_dout = tl.load(dout_at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(lse + row.to(tl.int64) * queries + i, mask=i < queries, other=float("inf"))
    at = row.to(tl.int64) * rows + i
    tl.store(delta + at, tl.sum(of_out * of_dout, 1))
    tl.store(top + at, tl.where(total == float("-inf"), float("inf"), total * LOG2E))
