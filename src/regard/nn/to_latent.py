"""Convert trained attention to latent attention: a joint factorisation of the key and value projections.

```
[k; v] = W x,   W [kv_heads * (nope + v), d_model]        W ~ U D,  D x the latent, U = [W_uk; W_uv]
```

The best U of rank r are the r first left singular vectors of W, D = U^T W: the truncated SVD (Eckart and Young 1936,
doi:10.1007/BF02288367). With inputs X [tokens, d_model] the factorisation minimises `|(W - U D) X^T|` instead; its U
are the left singular vectors of `W X^T`. The latent has no RoPE; dims with RoPE become separate keys. Each key head
keeps RoPE in the pairs on which its scores depend most. Ji et al. 2025, arXiv:2502.14837, §3.1 (which dims, by 2-norm)
and §3.2 (joint SVD).
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.describe.position import Rope, has_own_rotate
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.nn.checks import check_input
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projections import check_linear, compute_tensors, is_trained
from regard.nn.rope_pairs import RopePairs
from regard.nn.spec_module import spec_of
from regard.plan.checks import is_finite

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, eq=False)
class LatentConversion:
    """The result of `to_latent`: the module and its relative errors, in the Frobenius norm.

    Attributes:
        module: the converted module, in the dtype of the weights.
        error: of the key and value weights, `|W - U D| / |W|`, in float64 before U and D are rounded to the module's
            dtype. Without inputs this is the minimum for the rank, `sqrt(sum of s_i ** 2, i > r, / all)`.
        input_error: of their products with the inputs, `|(W - U D) X^T| / |W X^T|`; None without inputs.
        output_error: of the module's output for the inputs as one sequence, including the loss of RoPE; None without
            inputs.
    """

    module: LatentAttention
    error: float
    input_error: float | None
    output_error: float | None


def to_latent(
    module: MultiHeadAttention,
    kv_rank: int,
    rope_dim: int | None = None,
    *,
    inputs: Float[Tensor, "tokens d_model"] | None = None,
) -> LatentConversion:
    """Latent attention that approximates `module` with a latent of `kv_rank` dimensions.

    Exact if kv_rank is full, the smaller of d_model and `kv_heads * (2 * head_dim - rope_dim)`, and all rotated dims
    keep RoPE. The others lose their rotation only and still contribute to the scores.

    Args:
        module: self-attention without qk_norm, gate, score and bias.
        kv_rank: dimensions of the latent.
        rope_dim: dimensions of each key head that keep RoPE, even; None: all rotated ones. They are cached besides the
            latent: `kv_rank + kv_heads * rope_dim` elements per token instead of `2 * kv_heads * head_dim`.
        inputs: typical inputs of the module, [tokens, d_model]: the factorisation is then optimal for these.

    Raises:
        ProblemError: the module has a part that latent attention does not support, or sizes that do not fit.
        RefusalError: a projection has an adapter, a forward hook or a replaced forward.

    Biases of keys and values stay exact: the bias of a key dim without RoPE adds the same to all scores of a query and
    cancels in the softmax; the bias of a value becomes part of the output's bias. With a sink or a softcap this is not
    so, and the call raises. Under dropout, and for a query that sees no key, they are not exact.

    >>> from regard.nn import MultiHeadAttention
    >>> made = to_latent(MultiHeadAttention(64, heads=8, kv_heads=2), kv_rank=16)
    >>> made.module.kv_rank, 0 < made.error < 1
    (16, True)
    """
    if not isinstance(module, MultiHeadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "; from_torch makes one of torch's" if isinstance(module, nn.MultiheadAttention) else ""
        raise ProblemError(f"to_latent takes a regard.nn.MultiHeadAttention, and got {type(module).__name__}{hint}.")
    rope = _check_module(module)
    rotated = 0 if rope is None else rope.rotated
    kept = rotated if rope_dim is None else whole(rope_dim, "rope_dim", "dimensions")
    kv_rank = whole(kv_rank, "kv_rank", "dimensions")
    if kept % 2 or not 0 <= kept <= rotated:
        raise ProblemError(f"rope_dim={rope_dim}: expected an even number from 0 to the {rotated} rotated dims.")
    if inputs is not None:
        check_input("inputs", inputs, f"[tokens, {module.d_model}]")
    if inputs is not None and (inputs.ndim != 2 or inputs.shape[1] != module.d_model):
        raise ProblemError(f"inputs have shape {list(inputs.shape)}: expected [tokens, {module.d_model}].")
    if inputs is not None and not (is_finite(inputs) and inputs.any()):
        raise ProblemError("inputs are all 0, or not finite: pass typical inputs of the module, or leave inputs= out.")
    compute_tensors(module, *(getattr(module, name) for name in PROJECTIONS))
    weights = _Weights(module)
    pairs = [] if rope is None or not kept else _choose_pairs(weights, rope, kept // 2, inputs)
    rope_dims, nope_dims = _dims(module, rope, pairs)
    k_nope = weights.k.take_along_dim(nope_dims[:, :, None], 1)  # [kv_heads, nope_dim, d_model]
    stacked = torch.cat([k_nope.flatten(0, 1), weights.v.flatten(0, 1)])
    if not 1 <= kv_rank <= min(stacked.shape):
        raise ProblemError(
            f"kv_rank={kv_rank}: expected 1 to {min(stacked.shape)}, the full rank of {list(stacked.shape)}."
        )
    up = _leading(stacked, kv_rank, inputs)
    down = up.T @ stacked
    made = _assemble(module, weights, rope, pairs, (rope_dims, nope_dims), down, up)
    difference = stacked - up @ down
    return LatentConversion(
        made,
        _relative(difference, stacked),
        None if inputs is None else _relative(difference @ _wide(inputs).T, stacked @ _wide(inputs).T),
        None if inputs is None else _output_error(module, made, inputs),
    )


class _Weights:
    """The weights of a module by head, in float64: [heads, head_dim, d_model] and [kv_heads, head_dim, d_model]."""

    def __init__(self, module: MultiHeadAttention) -> None:
        self.group = module.heads // module.kv_heads
        self.q, self.k, self.v = (
            _wide(projection.weight).unflatten(0, (-1, module.head_dim))
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        self.q_bias, self.k_bias, self.v_bias = (
            None if bias is None else bias.unflatten(0, (-1, module.head_dim))
            for bias in map(_bias, (module.q_proj, module.k_proj, module.v_proj))
        )


def _bias(projection: nn.Linear) -> Tensor | None:
    """The bias in float64, or None; torch's annotation omits None."""
    bias = cast("Tensor | None", projection.bias)
    return None if bias is None else _wide(bias)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _relative(difference: Tensor, whole: Tensor) -> float:
    """`|difference| / |whole|`; 0 where both are 0."""
    error = difference.norm()
    return (error / whole.norm()).item() if error else 0.0


def _check_module(module: MultiHeadAttention) -> Rope | None:
    """The module's Rope; raise `ProblemError` if the module has a part that latent attention does not support."""
    unsupported = {
        "qk_norm": module.q_norm, "gate": module.gate_proj, "score": module.score, "bias": module.bias,
    }  # fmt: skip
    for name, part in unsupported.items():
        if part is not None:
            raise ProblemError(f"the module has {name}=, which latent attention does not support.")
    rope = cast("Rope | None", spec_of("position", module.position))
    if rope is not None and has_own_rotate(rope):
        raise ProblemError(f"position={rope!r} has a rotate of its own: latent attention rotates pairs of a Rope.")
    check_linear(module, *PROJECTIONS)
    if module.context_dim != module.d_model:
        raise ProblemError("the keys of the module come from a context: latent attention is self-attention.")
    of_keys, of_values = (_bias(projection) is not None for projection in (module.k_proj, module.v_proj))
    for name, part, biased in (("a sink", module.sinks, of_keys or of_values), ("a softcap", module.softcap, of_keys)):
        if part is not None and biased:
            raise ProblemError(
                f"the module has {name} and biases of keys and values: latent attention cannot represent such "
                "biases exactly."
            )
    return rope


def _pair_dims(rope: Rope) -> Tensor:
    """The two dims of each rotated pair, [pairs, 2]."""
    dims = torch.arange(rope.rotated, device="cpu")
    return dims.view(-1, 2) if rope.interleaved else dims.view(2, -1).T


def _choose_pairs(weights: _Weights, rope: Rope, count: int, inputs: Tensor | None) -> list[tuple[int, ...]]:
    """For each key head the pairs with the largest product of the 2-norms of queries and keys, in ascending order."""
    x = None if inputs is None else _wide(inputs)

    def norms(w: Tensor, bias: Tensor | None) -> Tensor:
        """The 2-norm of each pair, [heads, pairs]: of its weights, or of its outputs for the inputs."""
        rows = w if x is None else w @ x.T + (0 if bias is None else bias[:, :, None])
        return rows[:, _pair_dims(rope)].square().sum((-1, -2)).sqrt()

    q, k = norms(weights.q, weights.q_bias), norms(weights.k, weights.k_bias)
    share = q.unflatten(0, (-1, weights.group)).sum(1) * k
    return [tuple(sorted(best)) for best in share.topk(count).indices.tolist()]


def _dims(module: MultiHeadAttention, rope: Rope | None, pairs: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """(dims with RoPE, pair by pair; dims without) of each key head: [kv_heads, *]."""
    if rope is None or not pairs:
        none = torch.empty(module.kv_heads, 0, dtype=torch.int64, device="cpu")
        return none, torch.arange(module.head_dim, device="cpu").expand(module.kv_heads, -1)
    rope_dims = _pair_dims(rope)[torch.tensor(pairs, device="cpu")].flatten(1)
    nope_dims = [[dim for dim in range(module.head_dim) if dim not in set(row)] for row in rope_dims.tolist()]
    return rope_dims, torch.tensor(nope_dims, dtype=torch.int64, device="cpu").view(module.kv_heads, -1)


def _leading(stacked: Tensor, rank: int, inputs: Tensor | None) -> Tensor:
    """The first left singular vectors of W, or of W X^T; if that has too low a rank, then those of the rest of W.

    If W has too low a rank as well, any orthonormal vectors follow.
    """
    if inputs is None:
        return torch.linalg.svd(stacked, full_matrices=False).U[:, :rank]
    _, r = torch.linalg.qr(_wide(inputs), mode="r")  # X = Q R, so W X^T has the left vectors of W R^T
    u, s, _ = torch.linalg.svd(stacked @ r.T, full_matrices=False)
    u = u[:, : min(rank, int((s > s[0] * 1e-12).sum()))]
    rest = torch.linalg.svd(stacked - u @ (u.T @ stacked), full_matrices=False).U
    # Vectors of a rest that is 0 up to rounding are not orthogonal to u.
    return torch.linalg.qr(torch.cat([u, rest[:, : rank - u.shape[1]]], 1)).Q


def _assemble(
    module: MultiHeadAttention,
    weights: _Weights,
    rope: Rope | None,
    pairs: list[tuple[int, ...]],
    dims: tuple[Tensor, Tensor],
    down: Tensor,
    up: Tensor,
) -> LatentAttention:
    rope_dims, nope_dims = dims
    nope, of_values = nope_dims.shape[1], weights.v_bias is not None
    made = LatentAttention(
        module.d_model, module.heads, kv_rank=down.shape[0], nope_dim=nope, rope_dim=rope_dims.shape[1],
        v_dim=module.head_dim, kv_heads=module.kv_heads, rope_heads=module.kv_heads if pairs else 1,
        position=RopePairs(deepcopy(rope), tuple(pairs)) if rope is not None and pairs else None, norm=False,
        qkv_bias=of_values or weights.k_bias is not None, q_bias=weights.q_bias is not None,
        out_bias=of_values or _bias(module.o_proj) is not None, mask=deepcopy(module.mask),
        scale=module.head_dim**-0.5 if module.scale is None else module.scale, softcap=module.softcap,
        sink=module.sinks is not None, dropout=module.dropout, backend=module.backend,
        device=module.q_proj.weight.device, dtype=module.q_proj.weight.dtype,
    )  # fmt: skip
    q, k, v, o = module.q_proj, module.k_proj, module.v_proj, module.o_proj
    order = torch.cat([nope_dims, rope_dims], 1).repeat_interleave(weights.group, 0)[:, :, None]  # of each query head
    gain = _gain(module, rope, nope_dims).repeat_interleave(weights.group, 0)[:, :, None]
    queries = (weights.q.take_along_dim(order, 1) * gain).flatten(0, 1)
    _fill(made.q_proj, queries, _biases(weights.q_bias, order, gain), (q,), (q,))
    _fill(made.kv_down, down, down.new_zeros(len(down)), (k, v), (k, v))
    rotated = weights.k.take_along_dim(rope_dims[:, :, None], 1).flatten(0, 1)
    _fill(made.k_rope, rotated, _biases(weights.k_bias, rope_dims[:, :, None]), (k,), (k,))
    _fill(made.k_up, up[: module.kv_heads * nope], None, (k,))
    _fill(made.v_up, up[module.kv_heads * nope :], None, (v,))
    _fill(made.o_proj, _wide(o.weight), _out_bias(module, weights), (o,), (o, v))
    if module.sinks is not None and made.sinks is not None:
        made.sinks.data.copy_(module.sinks.detach())
        made.sinks.requires_grad_(module.sinks.requires_grad)
    return made.train(module.training)


def _gain(module: MultiHeadAttention, rope: Rope | None, nope_dims: Tensor) -> Tensor:
    """The factor of each query dim, [kv_heads, head_dim]: dims that lose RoPE keep its attention factor."""
    gain = torch.ones(module.kv_heads, module.head_dim, dtype=torch.float64, device="cpu")
    if rope is not None:
        gain[:, : nope_dims.shape[1]][nope_dims < rope.rotated] = rope.attention_factor() ** 2
    return gain


def _biases(bias: Tensor | None, order: Tensor, gain: Tensor | float = 1.0) -> Tensor | None:
    return None if bias is None else (bias[:, :, None].take_along_dim(order, 1) * gain).flatten()


def _out_bias(module: MultiHeadAttention, weights: _Weights) -> Tensor | None:
    """The bias of the output, including the biases of the values."""
    own = _bias(module.o_proj)
    if weights.v_bias is None:
        return own
    passed = _wide(module.o_proj.weight) @ weights.v_bias.repeat_interleave(weights.group, 0).flatten()
    return passed if own is None else passed + own


def _fill(
    projection: nn.Linear | None,
    weight: Tensor,
    bias: Tensor | None,
    sources: tuple[nn.Linear, ...],
    bias_sources: tuple[nn.Linear, ...] = (),
) -> None:
    """Set weight and bias, which is 0 where None is given; each is trained if that of some source is."""
    if projection is None:
        return
    projection.weight.data.copy_(weight)
    projection.weight.requires_grad_(any(is_trained(source, "weight") for source in sources))
    if _bias(projection) is not None:
        projection.bias.data.copy_(torch.zeros_like(projection.bias) if bias is None else bias)
        projection.bias.requires_grad_(any(is_trained(source, "bias") for source in bias_sources))


def _output_error(module: MultiHeadAttention, made: LatentAttention, inputs: Tensor) -> float:
    x = inputs.detach().to(module.q_proj.weight)[None]
    training = module.training
    try:
        with torch.no_grad():
            expected, got = module.eval()(x), made.eval()(x)
    finally:
        module.train(training)
        made.train(training)
    return _relative(_wide(got - expected), _wide(expected))
