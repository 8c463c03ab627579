# pyright: basic
"""The products of rows: for each row of two tensors [batch, heads, queries, dim], the sum of its elements' products.

The backward kernels subtract it from the gradients of weights: delta = out . dout. torch's own operators would write
both tensors in float32 first, four times as many bytes as are read here.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("heads", "queries"))
def products(
    x, y, sums, x_batch, x_head, x_token, y_batch, y_head, y_token, heads, queries,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """sums [batch, heads, queries], float32. A program takes ROWS rows of one head."""
    blocks = tl.cdiv(queries, ROWS)
    row = tl.program_id(0) // blocks
    b64, h64 = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DIM_PADDED)
    inside = (i[:, None] < queries) & (c[None, :] < DIM)
    at_x = x + b64 * x_batch + h64 * x_head + i[:, None].to(tl.int64) * x_token + c[None, :]
    at_y = y + b64 * y_batch + h64 * y_head + i[:, None].to(tl.int64) * y_token + c[None, :]
    of_x = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
    of_y = tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + row.to(tl.int64) * queries + i, tl.sum(of_x * of_y, 1), mask=i < queries)
