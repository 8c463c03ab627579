"""The checks of a call of `flex_attention`: the errors that torch raises, and kernel options that mean nothing here."""

from typing import Any, cast

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.plan.checks import not_a_tensor

BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: AuxRequest | None,
) -> None:
    """Raise what torch raises for a call that makes no sense."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(cast(object, t), Tensor):
            raise not_a_tensor(name, t, "a tensor [batch, heads, tokens, dim]")
        if t.is_nested:
            raise NotImplementedError(f"{name} is a nested tensor: convert it to a dense one, and give a block_mask.")
        if t.dim() != 4:
            raise NotImplementedError(f"{name} has shape {list(t.shape)}: expected [batch, heads, tokens, dim].")
        if t.device != query.device:
            raise ValueError(f"Expected query, key, and value to have the same device type: {name} is on {t.device}.")
    if key.size(-2) != value.size(-2):
        raise ValueError(f"key has {key.size(-2)} tokens and value {value.size(-2)}: expected as many.")
    if query.size(-1) != key.size(-1):
        raise ValueError(f"query has {query.size(-1)} dimensions and key {key.size(-1)}: expected the same.")
    _check_heads(query.size(1), key.size(1), enable_gqa)
    if query.size(0) != key.size(0) and (block_mask is None or key.size(0) != 1):
        raise ValueError(
            f"query has {query.size(0)} batch rows and key {key.size(0)}: expected as many, or one with a block_mask."
        )
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given: use return_aux=AuxRequest(lse=True) alone.")
    if kernel_options is not None:
        _check_options(dict(kernel_options))


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"query has {heads} heads and key {kv_heads}: expected as many, or enable_gqa=True.")
    if enable_gqa and (not kv_heads or heads % kv_heads):
        raise ValueError(f"query has {heads} heads and key {kv_heads}: expected a whole multiple.")


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    if not isinstance(cast(object, block_mask), BlockMask):
        raise ProblemError(
            f"block_mask is {received(block_mask)}: expected what create_block_mask makes, or None; attend takes masks "
            "of regard."
        )
    if min(block_mask.BLOCK_SIZE) >= 1 << 30:
        return  # torch's mask for no mask
    lengths, called = tuple(block_mask.seq_lengths), (query.size(2), key.size(2))
    if lengths != called:
        raise ValueError(
            f"block_mask was created for {lengths[0]} queries and {lengths[1]} keys, and the call has {called[0]} and "
            f"{called[1]}: create one for these lengths."
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise RuntimeError(
            f"block_mask is on {block_mask.kv_num_blocks.device} and query on {query.device}: use block_mask.to(...)."
        )


def _check_options(options: dict[str, Any]) -> None:
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise RuntimeError("BACKEND and FORCE_USE_FLEX_ATTENTION are both given: BACKEND cannot be combined with it.")
    if options.get("BACKEND", "AUTO") not in BACKENDS:
        raise ValueError(f"Invalid BACKEND value {options['BACKEND']!r}: must be one of {BACKENDS}.")
