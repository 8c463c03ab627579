"""Rank collapse: how near the tokens of each layer are to being all the same.

Dong, Cordonnier & Loukas 2021, *Attention is not all you need*, arXiv:2103.03404: attention averages, so a stack of
nothing but attention makes all tokens alike, and the faster the more alike they are (doubly exponentially with depth).
Skip connections hold against it, MLPs slow it down. Measured is

    ||X - 1 m^T|| / ||X||      m: the mean token; Frobenius norms

0 when all rows of X are equal (rank one), near 1 when tokens have nothing in common. The mean is nearest in this norm;
the paper bounds the root of the product of the norms 1 and infinity instead.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.intervene.heads import altered, module_at, whole_layer
from regard.nn import MultiHeadAttention
from regard.nn.transformer import Block


@dataclass(frozen=True, eq=False)
class RankCollapse:
    """The relative residual to rank one, through a model.

    Args:
        modules: the paths of the layers, in the order in which they ran.
        before: of what went into the first layer, [batch].
        after: of what each layer gave, [layers, batch].
    """

    modules: tuple[str, ...]
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Stack:
    """A random stack of `regard.nn` blocks: what is in them besides attention.

    Args:
        skip, mlp: whether skip connections and MLPs are there.
        norm: whether each is behind an RMSNorm, as in real models; the theorem has none.
    """

    skip: bool = False
    mlp: bool = False
    norm: bool = False

    def __str__(self) -> str:
        parts = ["attention"] + ["skips"] * self.skip + ["MLPs"] * self.mlp + ["norms"] * self.norm
        return " + ".join(parts)


STACKS = (Stack(), Stack(mlp=True), Stack(skip=True), Stack(skip=True, mlp=True))


def residual(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """||X - 1 m^T|| / ||X|| of each matrix of tokens; x [..., tokens, width], the result [...].

    Args:
        rows: bool [..., tokens], which tokens count (padding is none); None: all.

    >>> residual(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), residual(torch.ones(3, 5))
    (tensor(0.7071), tensor(0.))
    """
    counts = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if rows is None else rows.to(x.dtype)
    counts = counts[..., None]
    mean = (x * counts).sum(-2, keepdim=True) / counts.sum(-2, keepdim=True)
    return ((x - mean) * counts).flatten(-2).norm(dim=-1) / (x * counts).flatten(-2).norm(dim=-1)


@torch.no_grad()
def rank_collapse(model: nn.Module, run: Callable[[], Any], rows: Tensor | None = None) -> RankCollapse:
    """The residual of what each layer of a model gives, by two runs of it.

    A layer is the attending module's path up to its first number, as in `value_zeroing`. Models keep their tokens apart
    by skip connections; what their attention alone would do, `random_rank_collapse` shows on random weights.

    Args:
        rows: bool [batch, tokens], which tokens count; None: all.

    Raises:
        ProblemError: attention that is not regard's, or layers that give no tensors.

    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=2, heads=4)
    >>> found = rank_collapse(model, lambda: model(torch.tensor([[3, 1, 4, 1, 5]])))
    >>> found.modules, found.after.shape
    (('body.blocks.0', 'body.blocks.1'), torch.Size([2, 1]))
    """
    with altered(model, lambda site, call: None) as sites:
        run()
    paths = list(dict.fromkeys(whole_layer(site.module) for site in sites.heads if site.module is not None))
    if not paths:
        raise ProblemError("no module of the model attended: there are no layers to look at.")
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for path in paths:
            module = module_at(model, path)
            hooks.callback(module.register_forward_pre_hook(_keeping_input(inputs, path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_keeping_output(outputs, path)).remove)
        run()
    if missing := next((path for path in paths if path not in outputs or path not in inputs), None):
        raise ProblemError(f"module {missing!r} takes or gives no tensor [batch, tokens, width]: is it a whole layer?")
    after = [residual(_wide(outputs[path]), rows) for path in paths]
    return RankCollapse(tuple(paths), residual(_wide(inputs[paths[0]]), rows), torch.stack(after))


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
    """The residual through random stacks, in float64: before the first layer and after each, [layers + 1, draws].

    Tokens are drawn from N(0, 1), weights from N(0, 1 / inputs); every token sees every token.

    >>> pure = random_rank_collapse(Stack(), layers=3).mean(1)
    >>> with_skips = random_rank_collapse(Stack(skip=True), layers=3).mean(1)
    >>> bool(pure[3] < 1e-6), bool(with_skips[3] > 0.8)
    (True, True)
    """
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


def _keeping_input(kept: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = next((one for one in (*arguments, *named.values()) if _is_tokens(one)), None)
        if given is not None:
            kept[path] = given

    return keep


def _keeping_output(kept: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        given = output if isinstance(output, Tensor) else next(iter(output), None)
        if given is not None and _is_tokens(given):
            kept[path] = given

    return keep


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def _wide(x: Tensor) -> Tensor:
    """In float64: residuals may be far below what the type of a model resolves."""
    return x.double()
