"""torch's own `scaled_dot_product_attention`, computed by regard: one import to change.

The signature and semantics are torch's: any leading axes that broadcast, causal with its corner at the top left, bool
masks that keep where True, float masks that are added, torch's own `CausalBias`, `enable_gqa`.
"""

import sys
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.attention import attend
from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import Mask, broadcasts
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import TensorMask
from regard.errors import ProblemError, TorchError
from regard.plan.checks import check_readable


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: [..., heads, queries, qk_dim], 2 axes or more.
        key: [..., kv_heads, keys, qk_dim].
        value: [..., kv_heads, keys, v_dim].
        attn_mask: bool (True keeps) or float (added), broadcastable to [..., queries, keys]; or what torch's
            `causal_upper_left` and `causal_lower_right` (`torch.nn.attention.bias`) give.
        dropout_p: applied whenever it is not 0, as torch does; 1 drops every weight, so the output is 0.
        is_causal: query i sees keys 0 to i, also where there are more keys than queries (corner at the top left).
        scale: None for `qk_dim ** -0.5`; a tensor of no axes is taken for its number.
        enable_gqa: let heads be a whole multiple of kv_heads.

    Returns:
        [..., heads, queries, v_dim].

    Raises:
        TorchError: what torch calls an error, among it `attn_mask` together with `is_causal`; nested tensors. It is a
            `ProblemError`, and a `RuntimeError` as torch's are.

    >>> import torch
    >>> q = torch.randn(2, 4, 5, 8)
    >>> ours = scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-6)
    True
    """
    try:
        return attend_as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except ProblemError as error:
        raise TorchError(str(error)) from None


def attend_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None = None,
    keeps: Tensor | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` with the errors of `attend`, and with its choice of a backend.

    Args:
        keeps: hides pairs besides `attn_mask`: bool, True keeps.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_readable(name, t, "a tensor [..., heads, tokens, dim]")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(cast(object, flag), bool):
            raise ProblemError(f"{name} is {flag!r}: expected True or False, as torch does.")
    if attn_mask is not None and is_causal:
        raise ProblemError(
            "attn_mask and is_causal are both set: torch takes one; say both as one mask, or use attend."
        )
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        lead, q, k, v = tuple(query.shape[:2]), query, key, value
    else:
        lead = _leading(query, key, value, enable_gqa)
        shared = enable_gqa and key.shape[-3] == value.shape[-3]
        q, k, v = _four(query, lead), _four(key, lead, shared), _four(value, lead, shared)
    mask, bias, offset = (Causal() if is_causal else None), None, 0
    if is_causal_bias(attn_mask):
        mask, offset = Causal(), _causal_offset(attn_mask, q.shape[2], k.shape[2])
    elif attn_mask is not None:
        mask, bias = _mask_or_bias(attn_mask, lead)
    if keeps is not None:
        mask = TensorMask(_mask_four(keeps, lead))
    dropout = _number(dropout_p)
    if isinstance(dropout, float | int) and not 0 <= dropout <= 1:
        raise ProblemError(f"dropout_p is {dropout}: expected a probability, 0 <= dropout_p <= 1.")
    dropped = dropout == 1
    out = attend(
        q, k, v, mask=mask, bias=bias, scale=_number(scale), dropout=0.0 if dropped else dropout, offset=offset,
        backend=backend,
    )  # fmt: skip
    if dropped:
        out = out * 0.0  # torch's zeros, and zeros for gradients of all that it was computed from
    return out if q is query else out.reshape(*lead, *out.shape[-2:])


def _mask_or_bias(attn_mask: Tensor, lead: tuple[int, ...]) -> tuple[Mask | None, Bias | None]:
    check_readable("attn_mask", attn_mask, "a tensor, as torch does (`attend` takes regard masks)")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ProblemError(
            f"attn_mask is {attn_mask.dtype} {list(attn_mask.shape)}: expected bools (True keeps), such as "
            "attn_mask.bool(), or floats that are added to the scores."
        )
    four = _mask_four(attn_mask, lead)
    return (TensorMask(four), None) if attn_mask.dtype == torch.bool else (None, TensorBias(four))


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether it is torch's own causal mask, of a module that is then imported already."""
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def _causal_offset(bias: Any, queries: int, keys: int) -> int:
    """The position of the first query under torch's own causal mask, whose tensor nothing was ever written to."""
    size = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name == "UPPER_LEFT" or size[0] == size[1]:  # then torch says is_causal, whatever the sizes are
        return 0
    if size != (queries, keys):
        raise ProblemError(
            f"attn_mask is causal_lower_right{size}, and the call has {queries} queries and {keys} keys: make it for "
            "these sizes."
        )
    return keys - queries


def _number(value: Any) -> Any:
    """What torch takes for a number, as one of Python: tensors of no axes, unless they are learned, and numpy's."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad:
        return value.item()
    return float(value) if isinstance(value, bool | np.floating | np.integer) else value


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The axes before [queries, dim] that the three broadcast to, the query's heads last."""
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    for name, shape in shapes.items():
        if len(shape) < (3 if enable_gqa else 2):
            raise ProblemError(f"{name} has shape {list(shape)}: expected [..., heads, tokens, dim].")
    heads = query.shape[-3:-2]
    if enable_gqa and any(shape[-3] == 0 or heads[0] % shape[-3] for shape in (key.shape, value.shape)):
        raise ProblemError(
            f"query has {heads[0]} heads, key {key.shape[-3]} and value {value.shape[-3]}: with "
            "enable_gqa the query's must be a whole multiple of both."
        )
    try:
        if enable_gqa:
            return (*torch.broadcast_shapes(*(shape[:-3] for shape in shapes.values())), *heads)
        return tuple(torch.broadcast_shapes(*(shape[:-2] for shape in shapes.values())))
    except RuntimeError:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        hint = "" if enable_gqa else " (fewer key than query heads: enable_gqa=True)"
        raise ProblemError(f"{found}: the axes before the last two do not broadcast{hint}.") from None


def _four(t: Tensor, lead: tuple[int, ...], shared: bool = False) -> Tensor:
    """[..., tokens, dim] as [batch, heads, tokens, dim], with the query's heads unless these are `shared`."""
    heads = lead[-1:]
    own = t.shape[-3:-2]
    if shared:
        heads = own
    elif own not in ((), (1,), heads):
        t = t.repeat_interleave(
            heads[0] // own[0], dim=-3
        )  # key and value share differently: only torch's math path does that
    t = t.expand(*lead[:-1], *heads, *t.shape[-2:])
    return t.reshape(-1 if t.numel() else _product(lead[:-1]), *(heads or (1,)), *t.shape[-2:])


def _mask_four(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to [batch, heads, queries, keys], expanded only where it must be."""
    if mask.ndim <= 2 or (mask.ndim == 4 and len(lead) == 2):
        return mask  # as it is: a mask that is known again has its plan already
    if not _broadcasts(mask.shape[:-2], lead):
        raise ProblemError(
            f"attn_mask has shape {list(mask.shape)}: the axes before the last two do not broadcast to those of query, "
            f"key and value, the leading axes {list(lead)}."
        )
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.ndim) + tuple(mask.shape))
    batch, own = mask.shape[: len(lead) - 1], mask.shape[len(lead) - 1 :]
    if any(size != 1 for size in batch):
        mask = mask.expand(*lead[:-1], *own)
    return mask.reshape(_product(mask.shape[: len(lead) - 1]), *own)


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(map(broadcasts, reversed(shape), reversed(to)))


def _product(sizes: tuple[int, ...] | torch.Size) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
