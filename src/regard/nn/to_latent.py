"""Trained attention as latent attention: keys and values made of one short vector, by a joint factorisation.

```
[k; v] = W x,   W [kv_heads * (nope + v), d_model]        W ~ U D,  D x the latent, U = [W_uk; W_uv]
```

The best U of rank r are the r first left singular vectors of W, D = U^T W: the truncated SVD (Eckart and Young 1936,
doi:10.1007/BF02288367). With inputs X [tokens, d_model] what is kept small is `|(W - U D) X^T|` instead, whose best U
are those of `W X^T`. RoPE cannot be in the latent; the dims that keep it become keys of their own, chosen per key head
as those pairs on which scores depend most. Ji et al. 2025, arXiv:2502.14837, §3.1 (which dims, by 2-norm) and §3.2
(joint SVD).
"""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.describe.position import Rope
from regard.errors import ProblemError
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.rope_pairs import RopePairs
from regard.plan.checks import is_finite


@dataclass(frozen=True, eq=False)
class Converted:
    """Latent attention made of another module, and what it lost.

    Attributes:
        module: in the type of the weights.
        error: of the weights of keys and values that became latent: `|W - U D| / |W|`, Frobenius norms, in float64 and
            before U and D are rounded to the module's type. Made without inputs it is the least for this rank: the
            discarded singular energy, `sqrt(sum of s_i ** 2, i > r, / all)`.
        input_error: the same of what they give for the inputs, `|(W - U D) X^T| / |W X^T|`; None without inputs.
        output_error: of the module's output for the inputs as one sequence, with what RoPE lost, relative in the
            Frobenius norm; None without inputs.
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
) -> Converted:
    """Latent attention that computes what `module` does, as nearly as a latent of `kv_rank` numbers allows.

    Exact where kv_rank is full, the smaller of d_model and `kv_heads * (2 * head_dim - rope_dim)`, and all dims that
    turn keep turning; those that do not keep turning lose their rotation alone, not their part in the scores.

    Args:
        module: self-attention; neither qk_norm nor gate nor score nor bias.
        kv_rank: numbers in the latent.
        rope_dim: numbers of each key head that keep turning, even; None: all that turn. They are cached besides the
            latent: `kv_rank + kv_heads * rope_dim` numbers per token, where there were `2 * kv_heads * head_dim`.
        inputs: what the module reads in practice, [tokens, d_model]: the factorisation is then the best for these.

    Raises:
        ProblemError: the module has what latent attention has no place for, or sizes that do not fit.

    Biases of keys and values stay exact: one of a key that does not turn adds the same to all scores of a query and
    falls out of the softmax, one of a value passes through it into the bias of the output. With a sink or a softcap
    they do not, and are refused; nor do they under dropout, and where a query sees no key.

    >>> from regard.nn import MultiHeadAttention
    >>> made = to_latent(MultiHeadAttention(64, heads=8, kv_heads=2), kv_rank=16)
    >>> made.module.kv_rank, 0 < made.error < 1
    (16, True)
    """
    if not isinstance(module, MultiHeadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "; from_torch makes one of torch's" if isinstance(module, nn.MultiheadAttention) else ""
        raise ProblemError(f"to_latent takes a regard.nn.MultiHeadAttention, and got {type(module).__name__}{hint}.")
    rope = _checked(module)
    turning = 0 if rope is None else rope.rotated
    kept = turning if rope_dim is None else rope_dim
    if kept % 2 or not 0 <= kept <= turning:
        raise ProblemError(f"rope_dim={rope_dim}: expected an even number from 0 to the {turning} dims that turn.")
    if inputs is not None and (inputs.ndim != 2 or inputs.shape[1] != module.d_model):
        raise ProblemError(f"inputs have shape {list(inputs.shape)}: expected [tokens, {module.d_model}].")
    if inputs is not None and not (is_finite(inputs) and inputs.any()):
        raise ProblemError(
            "inputs are all 0, or not finite: give what the module reads in practice, or leave them out."
        )
    weights = _Weights(module)
    pairs = [] if rope is None or not kept else _chosen(weights, rope, kept // 2, inputs)
    turned, still = _dims(module, rope, pairs)
    k_still = weights.k.take_along_dim(still[:, :, None], 1)  # [kv_heads, nope_dim, d_model]
    stacked = torch.cat([k_still.flatten(0, 1), weights.v.flatten(0, 1)])
    if not 1 <= kv_rank <= min(stacked.shape):
        raise ProblemError(
            f"kv_rank={kv_rank}: expected 1 to {min(stacked.shape)}, the full rank of {list(stacked.shape)}."
        )
    up = _leading(stacked, kv_rank, inputs)
    down = up.T @ stacked
    made = _assembled(module, weights, rope, pairs, (turned, still), down, up)
    gone = stacked - up @ down
    return Converted(
        made,
        _relative(gone, stacked),
        None if inputs is None else _relative(gone @ _wide(inputs).T, stacked @ _wide(inputs).T),
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
    """The bias, in float64; its type does not tell that it may be missing."""
    bias = cast("Tensor | None", projection.bias)
    return None if bias is None else _wide(bias)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _relative(gone: Tensor, whole: Tensor) -> float:
    return (gone.norm() / whole.norm()).item()


def _checked(module: MultiHeadAttention) -> Rope | None:
    """The module's Rope, once it is found to have nothing that latent attention has no place for."""
    lacking = {
        "qk_norm": module.q_norm, "gate": module.gate_proj, "score": module.score, "bias": module.bias,
    }  # fmt: skip
    for name, part in lacking.items():
        if part is not None:
            raise ProblemError(f"the module has {name}=, for which latent attention has no place.")
    if module.context_dim != module.d_model:
        raise ProblemError("the module makes its keys of a context: latent attention is self-attention.")
    if _bias(module.k_proj) is not None:
        reasons = {"a sink": module.sinks, "a softcap": module.softcap}
        for name, part in reasons.items():
            if part is not None:
                raise ProblemError(
                    f"the module has {name} and biases of keys and values, which then neither fall out of the softmax "
                    "nor pass through it."
                )
    return None if module.position is None else cast(Rope, module.position.spec)


def _pair_dims(rope: Rope) -> Tensor:
    """The two dims of each pair that turns, [pairs, 2]."""
    dims = torch.arange(rope.rotated)
    return dims.view(-1, 2) if rope.interleaved else dims.view(2, -1).T


def _chosen(weights: _Weights, rope: Rope, count: int, inputs: Tensor | None) -> list[tuple[int, ...]]:
    """For each key head the pairs with the largest product of the 2-norms of queries and keys, in their order."""
    x = None if inputs is None else _wide(inputs)

    def norms(w: Tensor, bias: Tensor | None) -> Tensor:
        """The 2-norm of each pair, [heads, pairs]: of its weights, or of what it gives for the inputs."""
        given = w if x is None else w @ x.T + (0 if bias is None else bias[:, :, None])
        return given[:, _pair_dims(rope)].square().sum((-1, -2)).sqrt()

    q, k = norms(weights.q, weights.q_bias), norms(weights.k, weights.k_bias)
    share = q.unflatten(0, (-1, weights.group)).sum(1) * k
    return [tuple(sorted(best)) for best in share.topk(count).indices.tolist()]


def _dims(module: MultiHeadAttention, rope: Rope | None, pairs: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """(dims that keep turning, pair by pair; dims that stand still) of each key head: [kv_heads, *]."""
    if rope is None or not pairs:
        none = torch.empty(module.kv_heads, 0, dtype=torch.int64)
        return none, torch.arange(module.head_dim).expand(module.kv_heads, -1)
    turned = _pair_dims(rope)[torch.tensor(pairs)].flatten(1)
    still = [[dim for dim in range(module.head_dim) if dim not in set(row)] for row in turned.tolist()]
    return turned, torch.tensor(still, dtype=torch.int64).view(module.kv_heads, -1)


def _leading(stacked: Tensor, rank: int, inputs: Tensor | None) -> Tensor:
    """The first left singular vectors of W, or of W X^T and, where X spans too little, of what these leave of W."""
    if inputs is None:
        return torch.linalg.svd(stacked, full_matrices=False).U[:, :rank]
    _, r = torch.linalg.qr(_wide(inputs), mode="r")  # X = Q R, so W X^T has the left vectors of W R^T
    u, s, _ = torch.linalg.svd(stacked @ r.T, full_matrices=False)
    u = u[:, : min(rank, int((s > s[0] * 1e-12).sum()))]
    rest = torch.linalg.svd(stacked - u @ (u.T @ stacked), full_matrices=False).U
    return torch.cat([u, rest[:, : rank - u.shape[1]]], 1)


def _assembled(
    module: MultiHeadAttention,
    weights: _Weights,
    rope: Rope | None,
    pairs: list[tuple[int, ...]],
    dims: tuple[Tensor, Tensor],
    down: Tensor,
    up: Tensor,
) -> LatentAttention:
    turned, still = dims
    nope, biased = still.shape[1], weights.q_bias is not None
    made = LatentAttention(
        module.d_model, module.heads, kv_rank=down.shape[0], nope_dim=nope, rope_dim=turned.shape[1],
        v_dim=module.head_dim, kv_heads=module.kv_heads, rope_heads=module.kv_heads if pairs else 1,
        position=RopePairs(rope, tuple(pairs)) if rope is not None and pairs else None, norm=False,
        qkv_bias=biased, q_bias=biased, out_bias=biased or _bias(module.o_proj) is not None, mask=module.mask,
        scale=module.head_dim**-0.5 if module.scale is None else module.scale, softcap=module.softcap,
        sink=module.sinks is not None, dropout=module.dropout, backend=module.backend,
        device=module.q_proj.weight.device, dtype=module.q_proj.weight.dtype,
    )  # fmt: skip
    order = torch.cat([still, turned], 1).repeat_interleave(weights.group, 0)[:, :, None]  # of each query head
    gain = _gain(module, rope, still).repeat_interleave(weights.group, 0)[:, :, None]
    _fill(made.q_proj, (weights.q.take_along_dim(order, 1) * gain).flatten(0, 1), _biases(weights.q_bias, order, gain))
    _fill(made.kv_down, down, torch.zeros(len(down)))
    _fill(
        made.k_rope,
        weights.k.take_along_dim(turned[:, :, None], 1).flatten(0, 1),
        _biases(weights.k_bias, turned[:, :, None]),
    )
    _fill(made.k_up, up[: module.kv_heads * nope], None)
    _fill(made.v_up, up[module.kv_heads * nope :], None)
    _fill(made.o_proj, _wide(module.o_proj.weight), _out_bias(module, weights))
    if module.sinks is not None and made.sinks is not None:
        made.sinks.data.copy_(module.sinks.detach())
    return made.train(module.training)


def _gain(module: MultiHeadAttention, rope: Rope | None, still: Tensor) -> Tensor:
    """What queries are multiplied with, [kv_heads, head_dim]: dims that stop turning keep RoPE's attention factor."""
    gain = torch.ones(module.kv_heads, module.head_dim, dtype=torch.float64)
    if rope is not None:
        gain[:, : still.shape[1]][still < rope.rotated] = rope.attention_factor() ** 2
    return gain


def _biases(bias: Tensor | None, order: Tensor, gain: Tensor | float = 1.0) -> Tensor | None:
    return None if bias is None else (bias[:, :, None].take_along_dim(order, 1) * gain).flatten()


def _out_bias(module: MultiHeadAttention, weights: _Weights) -> Tensor | None:
    """The bias of the output, with what the biases of values give it."""
    own = _bias(module.o_proj)
    if weights.v_bias is None:
        return own
    passed = _wide(module.o_proj.weight) @ weights.v_bias.repeat_interleave(weights.group, 0).flatten()
    return passed if own is None else passed + own


def _fill(projection: nn.Linear | None, weight: Tensor, bias: Tensor | None) -> None:
    if projection is None:
        return
    projection.weight.data.copy_(weight)
    if bias is not None and _bias(projection) is not None:
        projection.bias.data.copy_(bias)


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
