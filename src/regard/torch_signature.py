"""torch's own `scaled_dot_product_attention`, computed by regard: one import to change.

The signature and semantics are torch's: any leading axes that broadcast, causal with its corner at the top left, bool
masks that keep where True, float masks that are added, `enable_gqa`.
"""

import torch
from torch import Tensor

from regard.attend import attend
from regard.describe.bias import TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.mask_by_table import Dense
from regard.errors import ProblemError


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
        attn_mask: bool (True keeps) or float (added), broadcastable to [..., queries, keys].
        dropout_p: applied whenever it is not 0, as torch does.
        is_causal: query i sees keys 0 to i, whatever their numbers (corner at the top left).
        scale: None for `qk_dim ** -0.5`.
        enable_gqa: let heads be a whole multiple of kv_heads.

    Returns:
        [..., heads, queries, v_dim].

    Raises:
        ProblemError: what torch calls an error, among it `attn_mask` together with `is_causal`.

    >>> import torch
    >>> q = torch.randn(2, 4, 5, 8)
    >>> ours = scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-6)
    True
    """
    if attn_mask is not None and not isinstance(attn_mask, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(
            f"attn_mask is {attn_mask!r}: expected a tensor, as torch does; attend takes masks in words."
        )
    if attn_mask is not None and is_causal:
        raise ProblemError(
            "attn_mask and is_causal are both set: torch takes one; say both as one mask, or use attend."
        )
    lead = _leading(query, key, value, enable_gqa)
    shared = enable_gqa and key.shape[-3] == value.shape[-3]
    q, k, v = _four(query, lead), _four(key, lead, shared), _four(value, lead, shared)
    mask: Mask | None = Causal() if is_causal else None
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = Dense(_mask_four(attn_mask, lead))
    elif attn_mask is not None:
        bias = TensorBias(_mask_four(attn_mask, lead))
    out = attend(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout_p, offset=0)
    return out.reshape(*lead, *out.shape[-2:])


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
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.ndim) + tuple(mask.shape))
    batch, own = mask.shape[: len(lead) - 1], mask.shape[len(lead) - 1 :]
    if any(size != 1 for size in batch):
        mask = mask.expand(*lead[:-1], *own)
    return mask.reshape(_product(mask.shape[: len(lead) - 1]), *own)


def _product(sizes: tuple[int, ...] | torch.Size) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
