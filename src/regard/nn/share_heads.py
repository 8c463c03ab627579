"""Fewer key and value heads: convert multi-head attention to grouped-query or multi-query attention.

```
4 key heads   k0 k1 k2 k3          queries q0..q3 see k0 k1 k2 k3
2 key heads   (k0+k1)/2 (k2+k3)/2                     m0 m0 m1 m1       the KV cache is half as large
```

A head is a block of rows of a projection, so the mean of heads is the mean of their weights and of their biases. RoPE
rotates every head by the same angles, so pooling commutes with RoPE. Pooling does not commute with a norm of the keys
(Qwen3, Gemma 3): there the mean is taken before the norm, and the norm's weight stays the same.

Pooling is the start of a conversion: Ainslie et al. 2023, arXiv:2305.13245, §2.1, continue training, for 5 % of the
original steps in §3.1.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard.describe.whole_number import whole
from regard.errors import ProblemError, RefusalError
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.projections import check_linear
from regard.nn.spec_module import spec_of

How = Literal["mean", "first", "random"]
"""How a group of heads becomes one: the mean, the first head, or random values with the same mean and deviation."""


def share_heads(
    module: MultiHeadAttention, kv_heads: int, how: How = "mean", generator: torch.Generator | None = None
) -> MultiHeadAttention:
    """A new module with fewer key and value heads, otherwise a copy; `module` is not changed.

    The mean is the single head with the least sum of squared differences to the heads of the group. Ainslie et al.
    2023, arXiv:2305.13245, §2.1.

    Args:
        module: with a whole multiple of `kv_heads` key heads.
        kv_heads: key and value heads of the result; 1 is multi-query attention.
        how: "mean", "first" of each group, or "random".
        generator: the random generator of "random"; None for torch's default.

    Raises:
        ProblemError: the groups are not of one size, the score has a part for each key head, or `how` is none of the
            three.
        RefusalError: the key or value projection is no plain `nn.Linear`: it has an adapter, a forward hook, a
            replaced forward or a parametrization.

    >>> from regard.nn import MultiHeadAttention
    >>> shared = share_heads(MultiHeadAttention(96, heads=6), 2)
    >>> shared.kv_heads, shared.sizes.kind, shared.k_proj.weight.shape
    (2, 'GQA', torch.Size([32, 96]))
    """
    if not isinstance(module, MultiHeadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = "; from_torch makes one of torch's" if isinstance(module, nn.MultiheadAttention) else ""
        raise ProblemError(f"share_heads takes a regard.nn.MultiHeadAttention, and got {type(module).__name__}{hint}.")
    kv_heads = whole(kv_heads, "kv_heads", "heads")
    check_sharing(module.kv_heads, kv_heads, how)
    _check_parts(module, kv_heads)
    shared = _copied(module)
    shared.sizes, shared.kv_heads = replace(module.sizes, kv_heads=kv_heads), kv_heads
    shared.k_proj, shared.v_proj = deepcopy((module.k_proj, module.v_proj))  # q_proj may be the same module
    pool = partial(shared_rows, kv_heads=module.kv_heads, into=kv_heads, how=how, generator=generator)
    _pool_projections([(module.k_proj, shared.k_proj), (module.v_proj, shared.v_proj)], pool)
    return shared


def _copied(module: MultiHeadAttention) -> MultiHeadAttention:
    """A deep copy. What hooks (pruning, norms) computed with gradients, which torch cannot copy, has none in it.

    The hooks compute it again when the copy is called.
    """
    tensors = [t for part in module.modules() for t in vars(part).values() if isinstance(t, Tensor)]
    return deepcopy(module, {id(t): t.detach().clone() for t in tensors if not t.is_leaf})


def _pool_projections(pairs: list[tuple[nn.Linear, nn.Linear]], pool: Callable[[Tensor], Tensor]) -> None:
    """Give the second projection of each pair the pooled rows of the first."""
    pooled: dict[int, nn.Parameter] = {}  # by the id of the Parameter before: what is tied there stays tied
    for before, after in pairs:
        for name, rows in before.named_parameters():
            if id(rows) not in pooled:
                pooled[id(rows)] = nn.Parameter(pool(rows), rows.requires_grad)
            setattr(after, name, pooled[id(rows)])
        after.out_features = after.weight.shape[0]


def _check_parts(module: MultiHeadAttention, kv_heads: int) -> None:
    """Raise unless the rows of the key and value projections are all that belongs to single key heads."""
    check_linear(module, "k_proj", "v_proj")
    for name in ("k_proj", "v_proj"):
        extra = [part for part, _ in getattr(module, name).named_parameters() if part not in ("weight", "bias")]
        if extra:
            raise RefusalError(
                f"{name} has the parameters {', '.join(extra)}, and heads are pooled in a plain weight: remove the "
                "parametrization first, as by torch.nn.utils.parametrize.remove_parametrizations or "
                "torch.nn.utils.prune.remove."
            )
    if (score := spec_of("score", module.score)) is not None:
        try:
            score.bind(module.heads, kv_heads)
        except ProblemError as error:
            raise ProblemError(f"the score has parts of its own for key heads, which are not shared: {error}") from None


def shared_rows(
    rows: Tensor, kv_heads: int, into: int, how: How = "mean", generator: torch.Generator | None = None
) -> Tensor:
    """Rows [kv_heads * dim, ...] of a projection as [into * dim, ...]: one head for each group.

    Computed in float64 and rounded once, so the mean of equal heads is exactly that head.

    >>> shared_rows(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), kv_heads=4, into=2)[:, 0].tolist()
    [1.5, 4.5]
    """
    check_sharing(kv_heads, into, how)
    if rows.shape[0] % kv_heads:
        raise ProblemError(
            f"{rows.shape[0]} rows do not divide into {kv_heads} heads: expected a whole multiple of the heads."
        )
    groups = rows.detach().to("cpu", torch.float64).unflatten(0, (into, kv_heads // into, -1))
    if how == "mean":
        made = groups.mean(1)
    elif how == "first":
        made = groups[:, 0]
    else:
        drawn = torch.randn(groups[:, 0].shape, generator=generator, dtype=torch.float64, device="cpu")
        made = groups.mean() + groups.std(correction=0) * drawn
    return made.flatten(0, 1).to(rows)


def check_sharing(kv_heads: int, into: int, how: str) -> None:
    """Raise `ProblemError` unless `kv_heads` key heads can become `into` heads in the way `how`."""
    if how not in get_args(How):
        raise ProblemError(f"how={how!r}: expected 'mean', 'first' or 'random'.")
    if into < 1:
        raise ProblemError(f"kv_heads={into}: expected 1 or more.")
    if into > kv_heads:
        raise ProblemError(f"kv_heads={into}: the module has {kv_heads} key heads, and sharing makes fewer, not more.")
    if kv_heads % into:
        fit = ", ".join(str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0)
        raise ProblemError(
            f"{kv_heads} key heads do not divide into {into} groups of one size: expected one of {fit} key heads."
        )
