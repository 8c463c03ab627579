"""Conversion to and from `torch.nn.MultiheadAttention`, with the same outputs, and of torch's masks.

torch's module stores its three input projections in one weight, hides where a mask is True, and accepts keys and values
of different widths; the rest is the same arithmetic. A module without an equivalent raises `RefusalError`.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from regard.describe.bias import Bias, TensorBias
from regard.describe.mask import Mask
from regard.describe.mask_by_table import TensorMask
from regard.describe.whole_number import whole
from regard.errors import ProblemError, RefusalError
from regard.nn.checks import check_input
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projections import compute_tensors, has_other_forward, is_trained, why_not_linear
from regard.nn.spec_module import spec_of


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A `MultiHeadAttention` with copies of the weights of torch's module, and its outputs.

    | torch | here |
    |---|---|
    | `module(x, x, x)[0]` | `ours(x)` |
    | `module(x, c, c)[0]` | `ours(x, c)` |
    | `in_proj_weight` [3 d, d], rows of q, of k, of v | `q_proj.weight`, `k_proj.weight`, `v_proj.weight` |
    | `q_proj_weight`, `k_proj_weight`, `v_proj_weight`, where keys have a width of their own | the same |
    | `in_proj_bias` [3 d] | `q_proj.bias`, `k_proj.bias`, `v_proj.bias` |
    | `out_proj` | `o_proj` |
    | `add_zero_attn` | `sinks` of 0 that are not trained: a key and a value of zeros are a column of score 0 |
    | `attn_mask`, `key_padding_mask`, where True hides | `mask` and `bias`, see `from_torch_masks` |
    | `batch_first=False`: x [tokens, batch, d] | x is [batch, tokens, d] always: `ours(x.transpose(0, 1))` |

    Its `forward` has other arguments than torch's, so it cannot be used in a `torch.nn.TransformerEncoderLayer`. A
    query that may see no key gives NaN in torch's module, and o_proj's bias here.

    Raises:
        RefusalError: `add_bias_kv` (a learned key with a learned value; a sink has no value), keys and values of
            different widths, or a module with a forward of its own.

    >>> theirs, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    m = module
    if not isinstance(m, nn.MultiheadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"from_torch takes a torch.nn.MultiheadAttention, and got {type(m).__name__}.")
    if type(m).forward is not nn.MultiheadAttention.forward or has_other_forward(m):
        raise RefusalError(
            f"this {type(m).__module__}.{type(m).__name__} has a forward of its own, which may compute other outputs "
            "than torch.nn.MultiheadAttention: convert one of these, with the weights of this module."
        )
    if m.bias_k is not None or m.bias_v is not None:  # pyright: ignore[reportUnnecessaryComparison]
        raise RefusalError(
            "this torch.nn.MultiheadAttention was created with add_bias_kv=True: a learned key and value after the "
            "others, which regard does not have (a sink takes weight and gives no value)."
        )
    if m.kdim != m.vdim:
        raise RefusalError(
            f"this torch.nn.MultiheadAttention has kdim={m.kdim} and vdim={m.vdim}: here keys and values come from one "
            "context, so they must be equal."
        )
    compute_tensors(m)
    packed, packed_bias = cast("list[Tensor | None]", [m.in_proj_weight, m.in_proj_bias])
    weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight) if packed is None else packed.chunk(3)
    biases = (None, None, None) if packed_bias is None else packed_bias.chunk(3)
    ours = MultiHeadAttention(
        m.embed_dim, m.num_heads, context_dim=m.kdim, qkv_bias=packed_bias is not None, out_bias=_has_bias(m.out_proj),
        sink=m.add_zero_attn, dropout=m.dropout, device=weights[0].device, dtype=weights[0].dtype,
    )  # fmt: skip
    with torch.no_grad():
        for linear, weight, bias in zip(_inputs(ours), weights, biases, strict=True):
            _copy(linear, weight, bias)
        _copy(ours.o_proj, m.out_proj.weight, m.out_proj.bias)
    for linear, name in zip(_inputs(ours), _weight_names(m), strict=True):
        _train_as(linear.weight, name, m)
        _train_as(linear.bias, "in_proj_bias", m)
    _train_as(ours.o_proj.weight, "weight", m.out_proj)
    _train_as(ours.o_proj.bias, "bias", m.out_proj)
    if ours.sinks is not None:
        ours.sinks.requires_grad_(False)
    return ours.train(m.training)


def to_torch(module: MultiHeadAttention, batch_first: bool = True) -> nn.MultiheadAttention:
    """A `torch.nn.MultiheadAttention` with copies of these weights, and the same outputs; the inverse of `from_torch`.

    Args:
        batch_first: the layout of the inputs of torch's module: True for [batch, tokens, d_model], False for
            [tokens, batch, d_model].

    Raises:
        RefusalError: torch's module has no equivalent; the message lists all reasons.

    >>> ours, x = MultiHeadAttention(12, heads=3), torch.randn(2, 5, 12)
    >>> torch.allclose(to_torch(ours)(x, x, x)[0], ours(x), atol=1e-6)
    True
    >>> to_torch(MultiHeadAttention(12, heads=3, kv_heads=1))
    Traceback (most recent call last):
    regard.errors.RefusalError: torch.nn.MultiheadAttention cannot do what this module does:
      kv_heads=1: it has a key head for each of the 3 query heads
    """
    if not isinstance(module, MultiHeadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"to_torch takes a regard.nn.MultiHeadAttention, and got {type(module).__name__}.")
    if reasons := list(_beyond_torch(module)):
        raise RefusalError("\n  ".join(["torch.nn.MultiheadAttention cannot do what this module does:", *reasons]))
    compute_tensors(module, *_inputs(module), module.o_proj)
    weight = module.q_proj.weight
    theirs = nn.MultiheadAttention(
        module.d_model, module.heads, module.dropout, bias=any(map(_has_bias, _inputs(module))),
        add_zero_attn=module.sinks is not None, kdim=module.context_dim, vdim=module.context_dim,
        batch_first=batch_first, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        packed, packed_bias = cast("list[Tensor | None]", [theirs.in_proj_weight, theirs.in_proj_bias])
        if packed is None:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(theirs, f"{name}_weight").copy_(getattr(module, name).weight)
        else:
            packed.copy_(torch.cat([linear.weight for linear in _inputs(module)]))
        if packed_bias is not None:
            packed_bias.copy_(torch.cat([_bias_or_zeros(linear) for linear in _inputs(module)]))
        _copy(theirs.out_proj, module.o_proj.weight, module.o_proj.bias)
    inputs = _inputs(module)
    for name, linear in zip(_weight_names(theirs), inputs, strict=True):
        _train_as(getattr(theirs, name), "weight", *([linear] if packed is None else inputs))
    _train_as(packed_bias, "bias", *inputs)
    _train_as(theirs.out_proj.weight, "weight", module.o_proj)
    _train_as(theirs.out_proj.bias, "bias", module.o_proj)
    return theirs.train(module.training)


def _weight_names(m: nn.MultiheadAttention) -> list[str]:
    """The names of the tensors that contain the weights of q, k and v."""
    packed = cast("Tensor | None", m.in_proj_weight)
    return ["q_proj_weight", "k_proj_weight", "v_proj_weight"] if packed is None else ["in_proj_weight"] * 3


def from_torch_masks(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int
) -> tuple[Mask | None, Bias | None]:
    """The masks of `torch.nn.MultiheadAttention` as a mask and a bias.

    In these masks True *hides*, the opposite of `TensorMask` and of torch's own `scaled_dot_product_attention`.

    Args:
        attn_mask: [queries, keys], or [batch * heads, queries, keys]; bool (True hides) or float (added to scores).
        key_padding_mask: [keys] or [batch, keys]; bool (True hides a key from all) or float (added to its scores).
        heads: query heads, to split the first axis of an `attn_mask` of three axes.

    Returns:
        (mask, bias), each None if not needed: `ours(x, mask=mask, bias=bias)`.

    Raises:
        ProblemError: other shapes or types.

    >>> padding = torch.tensor([[False, False, True]])
    >>> mask, bias = from_torch_masks(key_padding_mask=padding, heads=2)
    >>> mask, bias
    (TensorMask(mask=bool[1, 1, 1, 3]), None)
    """
    masks: list[Mask] = []
    biases: list[Bias] = []
    for value in (_attn_mask(attn_mask, heads), _padding(key_padding_mask)):
        if value is not None and value.dtype == torch.bool:
            masks.append(TensorMask(~value))
        elif value is not None:
            biases.append(TensorBias(value))
    mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
    return mask, biases[0] + biases[1] if len(biases) == 2 else biases[0] if biases else None


def _attn_mask(value: Tensor | None, heads: int) -> Tensor | None:
    """Broadcastable to [batch, heads, queries, keys]."""
    if value is None:
        return None
    heads = whole(heads, "heads", "heads", least=1)
    _check_mask("attn_mask", value, (2, 3), "[queries, keys] or [batch * heads, queries, keys]")
    if value.ndim == 3 and value.shape[0] % heads:
        raise ProblemError(
            f"attn_mask has shape {list(value.shape)}: its first axis must be a whole multiple of heads={heads}, "
            "the heads of batch row 0 first."
        )
    return value if value.ndim == 2 else value.unflatten(0, (-1, heads))


def _padding(value: Tensor | None) -> Tensor | None:
    """Broadcastable to [batch, heads, queries, keys]."""
    if value is None:
        return None
    _check_mask("key_padding_mask", value, (1, 2), "[keys] or [batch, keys]")
    return value if value.ndim == 1 else value[:, None, None, :]


def _check_mask(name: str, value: Tensor, axes: tuple[int, ...], expected: str) -> None:
    check_input(name, value, expected)
    if value.ndim not in axes or not (value.dtype == torch.bool or value.is_floating_point()):
        raise ProblemError(f"{name} is {value.dtype} {list(value.shape)}: expected bools or floats {expected}.")


def _beyond_torch(m: MultiHeadAttention) -> Iterator[str]:
    """Why torch's module cannot replace this one."""
    found = {name: why_not_linear(getattr(m, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if any(found.values()):  # whose weights and biases may not even be there
        yield from (f"{name} {reason}" for name, reason in found.items() if reason is not None)
        return
    if m.kv_heads != m.heads:
        yield f"kv_heads={m.kv_heads}: it has a key head for each of the {m.heads} query heads"
    if m.heads * m.head_dim != m.d_model:
        yield f"head_dim={m.head_dim}: its heads are d_model / heads = {m.d_model / m.heads:g} wide"
    if any(map(_has_bias, _inputs(m))) != _has_bias(m.o_proj):
        yield "qkv_bias and out_bias differ: it has both biases or neither"
    for name in ("position", "mask", "bias", "score"):
        if (spec := spec_of(name, getattr(m, name))) is not None:
            more = "; pass a mask to its forward instead" if name == "mask" else ""
            yield f"{name}={spec!r}: it has none{more}"
    if m.scale is not None and m.scale != m.head_dim**-0.5:
        yield f"scale={m.scale}: it scales by head_dim ** -0.5 = {m.head_dim**-0.5:g}"
    if m.softcap is not None:
        yield f"softcap={m.softcap}: it has none"
    for name, part in (("qk_norm", m.q_norm), ("gate", m.gate_proj)):
        if part is not None:
            yield f"{name}=True: it has none"
    if m.sinks is not None and (m.sinks.requires_grad or bool(m.sinks.any())):
        yield "sink=True: it has only add_zero_attn, sinks of 0 that are not trained"


def _inputs(m: MultiHeadAttention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return m.q_proj, m.k_proj, m.v_proj


def _has_bias(linear: nn.Linear) -> bool:
    return cast("Tensor | None", linear.bias) is not None


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    return linear.bias if _has_bias(linear) else linear.weight.new_zeros(linear.out_features)


def _train_as(made: Tensor | None, name: str, *sources: nn.Module) -> None:
    """Let a Parameter be trained if the tensor `name` of some source, from which it was copied, is trained."""
    if made is not None:
        made.requires_grad_(any(is_trained(source, name) for source in sources))


def _copy(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
