"""Rank collapse: how near the tokens of each layer are to being all the same, with skips and MLPs and without.

Dong, Cordonnier & Loukas 2021, *Attention is not all you need*, arXiv:2103.03404: attention averages, so a stack of
nothing but attention makes all tokens alike, and the faster the more alike they are (doubly exponentially with depth).
Skip connections hold against it. MLPs may, as far as they take tokens apart (the paper's bound has their Lipschitz
constant in it): those of random stacks do not, see the README. Behind norms and causal masks, as in most models, it
still happens, and more slowly. Measured is

    ||X - 1 m^T|| / ||X||      m: the mean token; Frobenius norms

0 when all rows of X are equal (rank one), near 1 when tokens have nothing in common. The mean is nearest in this norm;
the paper bounds the root of the product of the norms 1 and infinity instead.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.blocks import VARIANTS, Variant, branches, first_tokens, running
from regard.inspect.intervene.heads import altered, module_at, whole_layer
from regard.inspect.observing.layers import track_layers


@brief
@dataclass(frozen=True, eq=False)
class RankCollapse:
    """The relative residual to rank one, through a model.

    Args:
        modules: the paths of the layers, in the order in which they ran.
        before: of what went into the first layer, [batch].
        after: for each variant, of what each layer gave, [layers, batch]; float64.

    >>> print(RankCollapse(("blocks.0",), torch.tensor([0.9]), {"without both": torch.tensor([[0.25]])}))
     after layer   without both
               0            0.9
               1           0.25
    """

    modules: tuple[str, ...]
    before: Tensor
    after: Mapping[Variant, Tensor]

    def __str__(self) -> str:
        lines = [f"{'after layer':>12}" + "".join(f"{variant:>15}" for variant in self.after)]
        for layer in range(len(self.modules) + 1):
            row = [self.before if layer == 0 else after[layer - 1] for after in self.after.values()]
            lines.append(f"{layer:12}" + "".join(f"{one.mean():15.2g}" for one in row))
        return "\n".join(lines)


def residual(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """||X - 1 m^T|| / ||X|| of each matrix of tokens; x [..., tokens, width], the result [...].

    Args:
        rows: bool [..., tokens], which tokens count (padding is none); None: all.

    Raises:
        ProblemError: other shapes.

    >>> residual(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), residual(torch.ones(3, 5))
    (tensor(0.7071), tensor(0.))
    """
    if x.ndim < 2 or (rows is not None and rows.shape != x.shape[:-1]):
        came = "" if rows is None else f" and rows {list(rows.shape)}"
        raise ProblemError(f"x is {list(x.shape)}{came}: expected [..., tokens, width], and rows [..., tokens].")
    counts = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if rows is None else rows.to(x.dtype)
    counts = counts[..., None]
    mean = (x * counts).sum(-2, keepdim=True) / counts.sum(-2, keepdim=True)
    return ((x - mean) * counts).flatten(-2).norm(dim=-1) / (x * counts).flatten(-2).norm(dim=-1)


@torch.no_grad()
def rank_collapse(
    model: nn.Module,
    run: Callable[[], Any],
    rows: Tensor | None = None,
    variants: Collection[Variant] = VARIANTS,
) -> RankCollapse:
    """The residual of what each layer of a model gives: as it is, without MLPs, without skip connections, without both.

    A layer is the attending module's path up to its first number, as in `value_zeroing`. Two runs of the model, and one
    for each variant. Weights and norms stay as they are; what a trained model does without its skip connections says
    what these are for, and nothing of the model. Residuals below the precision of the model's type are rounding.

    Args:
        run: runs the model on a text; a cache must start empty in it, as transformers' own does.
        rows: bool [batch, tokens], which tokens count; None: all.
        variants: which to run. Other than "as it is" they need blocks that add attention, and an MLP if there is one,
            to what they are given, one after the other or side by side (`blocks.py`): so most decoders do.

    Raises:
        ProblemError: attention that is not regard's, layers that give no tensors, or whose branches are not found.

    >>> from regard.nn import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model, ids = Decoder(19, 32, layers=12, heads=4).eval(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    >>> found = rank_collapse(model, lambda: model(ids))
    >>> {variant: bool(after[-1] < 0.05) for variant, after in found.after.items()}
    {'as it is': False, 'without MLPs': False, 'without skips': True, 'without both': True}
    """
    if not variants or any(variant not in VARIANTS for variant in variants):
        came = ", ".join(map(repr, variants)) or "empty"
        raise ProblemError(f"variants is {came}: expected some of {', '.join(map(repr, VARIANTS))}.")
    blocks = _blocks(model, run)
    found = branches(model, run, blocks) if set(variants) - {"as it is"} else {}
    before: Tensor | None = None
    after: dict[Variant, Tensor] = {}
    for variant in dict.fromkeys(variants):
        with running(model, found, variant):
            inputs, outputs = _through(model, run, tuple(blocks))
        before = residual(inputs[next(iter(blocks))].double(), rows) if before is None else before
        after[variant] = torch.stack([residual(outputs[path].double(), rows) for path in blocks])
    assert before is not None
    return RankCollapse(tuple(blocks), before, after)


def _blocks(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[str]]:
    """The paths of the layers that attend, in order, each with those of the modules in it that do."""
    with altered(model, lambda site, call: None) as sites:
        run()
    blocks: dict[str, list[str]] = {}
    for site in sites.heads:
        if site.module is not None:
            blocks.setdefault(whole_layer(site.module), []).append(site.module)
    if not blocks:
        raise ProblemError("no module of the model attended: there are no layers to look at.")
    return blocks


def _through(
    model: nn.Module, run: Callable[[], Any], paths: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What goes into each layer and what comes out of it."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    with track_layers(model), ExitStack() as hooks:
        for path in paths:
            module = module_at(model, path)
            hooks.callback(module.register_forward_pre_hook(_keeping_input(inputs, path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(_keeping_output(outputs, path)).remove)
        run()
    if missing := next((path for path in paths if path not in outputs or path not in inputs), None):
        raise ProblemError(f"module {missing!r} takes or gives no tensor [batch, tokens, width]: is it a whole layer?")
    return inputs, outputs


def _keeping_input(kept: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (given := first_tokens((*arguments, *named.values()))) is not None:
            kept[path] = given

    return keep


def _keeping_output(kept: dict[str, Tensor], path: str) -> Callable[..., None]:
    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if (given := first_tokens(output)) is not None:
            kept[path] = given

    return keep
