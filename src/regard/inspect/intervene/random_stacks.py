"""Rank collapse of random stacks: the effect of attention on tokens in an untrained model.

The setting of Dong, Cordonnier & Loukas 2021, arXiv:2103.03404: no norms by default, no mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.intervene.rank_collapse import residual
from regard.nn import MultiHeadAttention
from regard.nn.transformer import Block


@dataclass(frozen=True)
class Stack:
    """A random stack of `regard.nn` blocks: which parts they have besides attention.

    Args:
        skip, mlp: whether blocks have skip connections and MLPs.
        norm: whether an RMSNorm precedes each branch, as in real models; the theorem has no norms.

    >>> str(Stack(skip=True, mlp=True))
    'attention + skips + MLPs'
    """

    skip: bool = False
    mlp: bool = False
    norm: bool = False

    def __str__(self) -> str:
        parts = ["attention"] + ["skips"] * self.skip + ["MLPs"] * self.mlp + ["norms"] * self.norm
        return " + ".join(parts)


STACKS = (Stack(), Stack(mlp=True), Stack(skip=True), Stack(skip=True, mlp=True))


@torch.no_grad()
def random_rank_collapse(
    stack: Stack,
    *,
    tokens: int = 64,
    d_model: int = 64,
    heads: int = 4,
    layers: int = 12,
    draws: int = 8,
    seed: int = 0,
) -> Tensor:
    """The residuals of random stacks: before the first layer and after each, float64 [layers + 1, draws].

    Tokens are drawn from N(0, 1), weights from N(0, 1 / inputs); there is no mask.

    >>> pure = random_rank_collapse(Stack(), layers=3).mean(1)
    >>> with_skips = random_rank_collapse(Stack(skip=True), layers=3).mean(1)
    >>> bool(pure[3] < 1e-6), bool(with_skips[3] > 0.8)
    (True, True)
    """
    if min(tokens, layers, draws) < 1:
        raise ProblemError(f"tokens={tokens}, layers={layers}, draws={draws}: expected each to be 1 or more.")
    found: list[Tensor] = []
    for draw in range(draws):
        random = torch.Generator().manual_seed(seed + draw)
        x = torch.randn(1, tokens, d_model, generator=random, dtype=torch.float64)
        found.append(torch.cat([residual(x), *_through(x, _blocks(stack, d_model, heads, layers, random))]))
    return torch.stack(found, 1)


def _through(x: Tensor, blocks: Iterator[Block]) -> Iterator[Tensor]:
    for block in blocks:
        x = block(x)
        yield residual(x)


def _blocks(stack: Stack, d_model: int, heads: int, layers: int, random: torch.Generator) -> Iterator[Block]:
    for _ in range(layers):
        attention = MultiHeadAttention(d_model, heads, dtype=torch.float64)
        block = Block(attention, skip=stack.skip, mlp=stack.mlp).double()
        for linear in block.modules():
            if isinstance(linear, nn.Linear):
                linear.weight.normal_(std=linear.in_features**-0.5, generator=random)
        if not stack.norm:
            for name in ("attention_norm", "mlp_norm")[: 1 + stack.mlp]:
                block.register_module(name, nn.Identity())
        yield block
