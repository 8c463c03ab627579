"""`flex_attention` with torch's signature, on regard's kernels."""

from typing import Any, cast

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from regard.attention import cast_by_autocast
from regard.describe.mask import CallSizes, Mask
from regard.errors import RefusalError
from regard.flex.call import Result, compute
from regard.flex.check import check_call
from regard.flex.compiled import compute_compiled
from regard.flex.outside_derivatives import outside_derivatives
from regard.flex.read_block_mask import mask_of_block_mask
from regard.flex.trace import Mod
from regard.torch_internals import in_func_vmap, skip_frames


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch's `flex_attention`, with gradients and log-sum-exp on a CPU as well.

    `score_mod` and `mask_mod` are traced (`trace.py`): a softcap, a bias by distance (ALiBi, relative tables), a bias
    from a table, a factor per head or per query and any mask run on the native kernels. A `score_mod` of another form
    is computed by the backend `reference`, tile by tile, with gradients for the tensors that it captures. Inside
    `torch.func`, or where it captures tensors with tangents, torch's operators compute it, with all scores in memory.
    Tensors that are not on the CPU go to torch's own function.

    Args:
        query: [batch, heads, queries, qk_dim].
        key: [batch, kv_heads, keys, qk_dim].
        value: [batch, kv_heads, keys, v_dim].
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`, the new score; None for the score itself.
        block_mask: of `create_block_mask`, torch's or regard's; None for all pairs.
        scale: None for `qk_dim ** -0.5`.
        enable_gqa: whether key heads are shared by groups of query heads.
        return_lse: whether the log-sum-exp is returned as well (torch: use `return_aux`).
        kernel_options: they tune torch's GPU kernels and mean nothing here. As in torch, BACKEND is checked.
        return_aux: what else to return.

    Returns:
        out [batch, heads, queries, v_dim]; with `return_lse`, (out, lse [batch, heads, queries]); with `return_aux`,
        (out, AuxOutput).

    >>> import torch
    >>> from regard.flex import create_block_mask, flex_attention
    >>> q, k, v = (torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3))
    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    >>> out = flex_attention(q, k, v, lambda s, b, h, q, k: 20 * torch.tanh(s / 20), mask)
    >>> out.sum().backward(); q.grad.shape
    torch.Size([1, 2, 300, 16])
    """
    if query.device.type != "cpu":
        attend: Any = of_torch.flex_attention
        return attend(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    check_call(query, key, value, block_mask, enable_gqa, return_lse, kernel_options, return_aux)
    query, key, value = cast("tuple[Tensor, Tensor, Tensor]", cast_by_autocast(query, key, value))
    if key.shape[0] != query.shape[0]:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    if key.dtype != query.dtype or value.dtype != query.dtype:  # keys and values of a narrower type
        key, value = key.to(query.dtype), value.to(query.dtype)
    is_traced = is_dynamo_compiling()
    if is_traced and in_func_vmap():  # dynamo breaks the graph here
        raise RefusalError(
            "flex_attention inside of torch.vmap is no part of a graph: call torch.compile without fullgraph=True."
        )
    wants_max = return_aux is not None and return_aux.max_scores
    run = compute_compiled if is_traced else _compute
    out, lse, most = run(query, key, value, score_mod, block_mask, scale, wants_max)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=most)
    return (out, lse) if return_lse else out


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    wants_max: bool,
) -> Result:
    mask: Mask | bool = True
    if block_mask is not None:
        sizes = CallSizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], 0)
        with outside_derivatives():
            mask = mask_of_block_mask(block_mask, sizes, query.device)
    return compute(query, key, value, score_mod, mask, scale, wants_max)


skip_frames(_compute)  # where torch.compile breaks the graph, it would compile what traces the functions
