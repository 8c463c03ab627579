"""Rank collapse: how similar the tokens of each layer are, with and without skip connections and MLPs.

Dong, Cordonnier & Loukas 2021, *Attention is not all you need*, arXiv:2103.03404: attention averages, so in a stack of
attention layers alone all tokens become equal, doubly exponentially with depth. Skip connections prevent it. MLPs can
slow it down if they drive tokens apart (their Lipschitz constant is part of the paper's bound); MLPs with random
weights do not, see the README. With norms and causal masks, as in most models, collapse is slower. The residual is

    ||X - 1 m^T|| / ||X||      m: the mean token; Frobenius norms

0 when all rows of X are equal (rank one), near 1 when tokens have nothing in common. In the Frobenius norm the mean
token is the best rank-one approximation of this form; the paper bounds sqrt(||.||_1 ||.||_inf) instead.

Random stacks have the setting of the paper: no norms by default, no mask.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.blocks import VARIANTS, Variant, branches, run_variant, tensor_of_tokens
from regard.inspect.intervene.heads import edit_outputs, module_at, whole_layer
from regard.inspect.measures.received import RUNS, check_function
from regard.inspect.observing.layers import track_layers
from regard.nn import MultiHeadAttention
from regard.nn.transformer import Block


@brief
@dataclass(frozen=True, eq=False)
class RankCollapse:
    """The relative residual to rank one, layer by layer.

    Args:
        modules: the paths of the layers, in the order in which they ran; a module with shared weights, as in ALBERT,
            is a layer each time that it runs.
        before: the residual of the input of the first layer, [batch].
        after: for each variant, the residual of the output of each layer, [layers, batch]; float64.

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
        rows: [..., tokens], bool or numbers: tokens with True or a nonzero number count (exclude padding); None: all.

    Raises:
        ProblemError: x or rows have another shape.

    >>> residual(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), residual(torch.ones(3, 5))
    (tensor(0.7071), tensor(0.))
    """
    if x.ndim < 2 or (rows is not None and rows.shape != x.shape[:-1]):
        received = "" if rows is None else f" and rows {list(rows.shape)}"
        raise ProblemError(f"x is {list(x.shape)}{received}: expected [..., tokens, width], and rows [..., tokens].")
    counts = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if rows is None else rows.bool().to(x)
    counts = counts[..., None]
    x = x.masked_fill(counts == 0, 0.0)  # padding may be NaN
    mean = (x * counts).sum(-2, keepdim=True) / counts.sum(-2, keepdim=True)
    return ((x - mean) * counts).flatten(-2).norm(dim=-1) / x.flatten(-2).norm(dim=-1)


@torch.no_grad()
def rank_collapse(
    model: nn.Module,
    run: Callable[[], Any],
    rows: Tensor | None = None,
    variants: Collection[Variant] = VARIANTS,
) -> RankCollapse:
    """The residual of the output of each layer: in the model as it is, without MLPs, without skips, without both.

    A layer is the attending module's path up to its first number, as in `value_zeroing`. Costs two runs of the model,
    and one for each variant. Weights and norms do not change. The result shows the effect of the skip connections; it
    does not describe the intact model. Residuals below the precision of the model's dtype are rounding errors.

    Args:
        run: runs the model on a text; its KV cache, if any, must start empty, as transformers' own does.
        rows: bool [batch, tokens], which tokens count; None: all.
        variants: which to run. All but "as it is" need blocks that add attention, and an MLP if there is one, to their
            input, sequentially or in parallel (`blocks.py`), as most decoders do.

    Raises:
        ProblemError: attention that is not regard's, layers that return no tensors, or whose branches are not found.

    >>> from regard.nn import Decoder
    >>> _ = torch.manual_seed(0)
    >>> model, ids = Decoder(19, 32, layers=12, heads=4).eval(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    >>> found = rank_collapse(model, lambda: model(ids))
    >>> {variant: bool(after[-1] < 0.05) for variant, after in found.after.items()}
    {'as it is': False, 'without MLPs': False, 'without skips': True, 'without both': True}
    """
    check_function(run, "run", RUNS)
    if not variants or any(variant not in VARIANTS for variant in variants):
        received = ", ".join(map(repr, variants)) or "empty"
        raise ProblemError(f"variants is {received}: expected some of {', '.join(map(repr, VARIANTS))}.")
    blocks = _attending_layers(model, run)
    found = branches(model, run, blocks) if set(variants) - {"as it is"} else {}
    layers: list[LayerRun] = []
    after: dict[Variant, Tensor] = {}
    for variant in dict.fromkeys(variants):
        with run_variant(model, found, variant):
            layers = _layer_runs(model, run, tuple(blocks))
        residuals = [residual(layer.after.double(), rows) for layer in layers]
        after[variant] = torch.stack([one.to(residuals[0].device) for one in residuals])  # layers may be on several
    return RankCollapse(tuple(layer.path for layer in layers), residual(layers[0].before.double(), rows), after)


def _attending_layers(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[str]]:
    """The paths of the layers that attend, in order, each with the paths of its attending modules."""
    with edit_outputs(model, lambda site, call: None) as sites:
        run()
    blocks: dict[str, list[str]] = {}
    for module in dict.fromkeys(site.module for site in sites.heads):
        if module is not None:
            blocks.setdefault(whole_layer(module), []).append(module)
    if not blocks:
        raise ProblemError("no module of the model attended: there are no layers to measure.")
    return blocks


class LayerRun(NamedTuple):
    """One run of a layer: its path, the number of the forward pass, and the tokens before and after it."""

    path: str
    forward: int
    before: Tensor
    after: Tensor


def _layer_runs(model: nn.Module, run: Callable[[], Any], paths: tuple[str, ...]) -> list[LayerRun]:
    """The runs of the layers in the last forward pass of each, in order."""
    inputs: dict[str, Tensor] = {}
    runs: list[LayerRun] = []
    with track_layers(model) as tracker, ExitStack() as hooks:
        for path in paths:
            module = module_at(model, path)

            def record_input(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], path: str = path) -> None:
                if (tokens := tensor_of_tokens((*args, *named.values()))) is not None:
                    inputs[path] = tokens

            def record_output(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                if path in inputs and (tokens := tensor_of_tokens(output)) is not None:
                    runs.append(LayerRun(path, tracker.forwards, inputs.pop(path), tokens))

            hooks.callback(module.register_forward_pre_hook(record_input, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(record_output).remove)
        run()
    last = {one.path: one.forward for one in runs}
    if missing := next((path for path in paths if path not in last), None):
        raise ProblemError(
            f"module {missing!r} takes or returns no tensor [batch, tokens, width]: is it a whole layer?"
        )
    return [one for one in runs if one.forward == last[one.path]]


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
