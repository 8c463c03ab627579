"""Blocks of a model: the modules whose outputs are their branches, and runs without skip connections or MLPs.

A block gives x + a + m, where a is the output of its attention and m that of its MLP. The order differs by family:

    sequential     x1 = x + a,  y = x1 + m      m is computed from x1; norms are before the branches, or after as well
    parallel       y = x + a + m                m is computed from x

No family is recognised by name: in one run, the inputs and outputs of the modules of a block are compared with these
sums, where a is the output of the attending module, or of modules that take it, such as a norm. A block that fits none
(norms after the sum, scaled branches, cross-attention, a module that mixes a with other inputs) is refused. The
variants:

    as it is         y = x + a(x) + m(x + a(x))
    without MLPs     y = x + a(x)
    without skips    y = m(a(x))                    in parallel blocks: a(x) + m(x)
    without both     y = a(x)                       attention alone

Norms remain, within the branches a and m; the weights of the model do not change.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.intervene.heads import module_at
from regard.inspect.observing.layers import track_layers

FLAT = (2, 3)
"""Axes of the tokens within a block: some families flatten batch and tokens into one axis."""


@dataclass(frozen=True)
class Branches:
    """The modules of a block, by their paths in the model, whose outputs are its branches.

    Args:
        attention: the module whose output is added first.
        mlp: the module whose output is added last; None for a block without an MLP.
        entrance: the first module of the MLP branch, whose input is x + attention; None in a parallel block, or without
            an MLP.
    """

    attention: str
    mlp: str | None = None
    entrance: str | None = None


class ModuleTensor(NamedTuple):
    """The tokens that a module took or returned: its path, and the tensor, of 3 axes or 2."""

    path: str
    is_input: bool
    tokens: Tensor


def branches(model: nn.Module, run: Callable[[], Any], blocks: Mapping[str, Sequence[str]]) -> dict[str, Branches]:
    """The branches of each block, found in one run. The tensors of one block are in memory at a time.

    Args:
        blocks: paths of blocks, each with the paths of its attending modules.

    Raises:
        ProblemError: a block has another structure, or did not run.

    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=1, heads=4).eval()
    >>> blocks = {"body.blocks.0": ["body.blocks.0.attention"]}
    >>> found = branches(model, lambda: model(torch.tensor([[3, 1, 4]])), blocks)["body.blocks.0"]
    >>> found.attention, found.entrance, found.mlp
    ('body.blocks.0.attention', 'body.blocks.0.mlp_norm', 'body.blocks.0.mlp')
    """
    found: dict[str, Branches] = {}
    with track_layers(model), ExitStack() as hooks:
        for path, attending in blocks.items():
            passed: list[ModuleTensor] = []
            block = module_at(model, path)
            for name, module in block.named_modules(prefix=path):
                if name.endswith("._orig_mod"):  # what torch.compile wraps, and runs uncompiled here
                    continue
                name = name.replace("._orig_mod", "")  # noqa: PLW2901
                hooks.callback(
                    module.register_forward_pre_hook(_record_input(passed, name), with_kwargs=True, prepend=True).remove
                )
                hooks.callback(module.register_forward_hook(_record_output(passed, name)).remove)
            hooks.callback(block.register_forward_hook(_solve_after(found, path, attending, passed)).remove)
        run()
    if wrong := next((path for path in blocks if path not in found), None):
        training = " Call model.eval() first: dropout hides what is added." if model.training else ""
        raise ProblemError(
            f"block {wrong!r} of {type(model).__name__} does not return x + attention, or x + attention + MLP, for the "
            "outputs of any of its modules, so its skips and MLP cannot be removed. Measure the model as it is: "
            f"variants=['as it is'].{training}"
        )
    return found


def tensor_of_tokens(values: Any, ndim: tuple[int, ...] = (3,)) -> Tensor | None:
    """The first value that is tokens: floats [batch, tokens, width]; with 2 axes [batch * tokens, width]."""
    several = (values,) if isinstance(values, Tensor) else values
    floats = (one for one in several if isinstance(one, Tensor) and one.is_floating_point())
    return next((one for one in floats if one.ndim in ndim), None)


def _record_input(passed: list[ModuleTensor], path: str) -> Callable[..., None]:
    def take(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (tokens := tensor_of_tokens((*arguments, *named.values()), FLAT)) is not None:
            passed.append(ModuleTensor(path, True, tokens.clone()))  # models may change their input in place

    return take


def _record_output(passed: list[ModuleTensor], path: str) -> Callable[..., None]:
    def take(module: nn.Module, arguments: Any, output: Any) -> None:
        if (tokens := tensor_of_tokens(output, FLAT)) is not None:
            passed.append(ModuleTensor(path, False, tokens.clone()))

    return take


def _solve_after(
    found: dict[str, Branches], path: str, attending: Sequence[str], passed: list[ModuleTensor]
) -> Callable[..., None]:
    """A hook that finds the branches after a block has run."""

    def solve(module: nn.Module, arguments: Any, output: Any) -> None:
        whole = [one for one in passed if one.path == path]
        if len(attending) == 1 and len(whole) == 2:  # cross-attention is a third branch
            x, y = (one.tokens.flatten(0, -2) for one in whole)
            within = [one._replace(tokens=one.tokens.flatten(0, -2)) for one in passed if one.path != path]
            solved = next(_solutions(x, y, attending[0], [one for one in within if one.tokens.shape == x.shape]), None)
            if solved is not None:
                found[path] = solved
        passed.clear()

    return solve


def _solutions(x: Tensor, y: Tensor, attending: str, passed: list[ModuleTensor]) -> Iterator[Branches]:
    """All fitting branches, the likeliest first: of nested modules with the same output, the outermost."""
    attended = next((at for at, one in enumerate(passed) if one.path == attending and not one.is_input), len(passed))
    later = passed[attended:]
    outputs = _outputs_of_attention(attending, later)
    for at, entrance in enumerate(later):
        for attention in reversed([later[place] for place in outputs if entrance.is_input and place < at]):
            if _is_sum(entrance.tokens, x, attention.tokens):
                for mlp in reversed([one for one in later[at:] if not one.is_input]):
                    if _is_sum(y, entrance.tokens, mlp.tokens):
                        yield Branches(attention.path, mlp.path, entrance.path)
    for attention in (later[place] for place in outputs):
        if _is_sum(y, x, attention.tokens):
            yield Branches(attention.path)
    for attention in (later[place] for place in outputs):
        for mlp in reversed([one for one in passed if not one.is_input and not one.path.startswith(attending)]):
            if mlp is not attention and _is_sum(y, x, attention.tokens, mlp.tokens):
                yield Branches(attention.path, mlp.path)


def _outputs_of_attention(attending: str, later: list[ModuleTensor]) -> list[int]:
    """The places of the outputs of the attending module, of modules around it, and of modules that take one of these.

    Not those of any module that runs later: the blocks of Zamba2 add the output of a Mamba layer, to whose input that
    of attention was added.
    """
    places, taking = list[int](), set[str]()
    for place, one in enumerate(later):
        if one.is_input and any(_are_same(one.tokens, later[output].tokens) for output in places):
            taking.add(one.path)
        elif one.is_input:
            taking.discard(one.path)
        elif one.path in taking or f"{attending}.".startswith(f"{one.path}."):
            places.append(place)
    return places


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b.to(a.device))


def _is_sum(total: Tensor, *terms: Tensor) -> bool:
    """Whether `total` is the sum of the terms: at most two additions, each rounded by at most eps / 2 of its terms.

    The sum that it is compared with is rounded as well, in float64 and perhaps in another order.
    """
    eps = max(torch.finfo(one.dtype).eps for one in (total, *terms)) + torch.finfo(torch.float64).eps
    exact = torch.stack([term.to(total.device).double() for term in terms])  # a block may take tokens of another device
    return bool(((total.double() - exact.sum(0)).abs() <= eps * exact.abs().sum(0)).all())


Variant = Literal["as it is", "without MLPs", "without skips", "without both"]
"""A model, whole or without some of its parts."""

VARIANTS: tuple[Variant, ...] = ("as it is", "without MLPs", "without skips", "without both")
"""All variants of a model."""


@contextmanager
def run_variant(model: nn.Module, blocks: Mapping[str, Branches], variant: Variant) -> Generator[None]:
    """Within the block, the model runs as this variant. Removed MLPs are still computed, and their output is unused."""
    with ExitStack() as hooks:
        for path, parts in () if variant == "as it is" else blocks.items():
            running = _RunningBlock(skips=variant == "without MLPs", mlps=variant == "without skips", parts=parts)
            whole = module_at(model, path)
            hooks.callback(whole.register_forward_pre_hook(running.enter, with_kwargs=True).remove)
            for branch in (parts.attention, parts.mlp):
                if branch is not None:
                    hooks.callback(module_at(model, branch).register_forward_hook(running.record_branch(branch)).remove)
            if parts.entrance is not None and not running.skips:
                entrance = module_at(model, parts.entrance)
                hooks.callback(entrance.register_forward_pre_hook(running.without_skip, with_kwargs=True).remove)
            hooks.callback(whole.register_forward_hook(running.leave).remove)
        yield


class _RunningBlock:
    """A block while it runs: its input, and the outputs of its branches."""

    def __init__(self, *, skips: bool, mlps: bool, parts: Branches) -> None:
        self.skips, self._mlps, self._parts = skips, mlps, parts
        self._x = torch.empty(0)
        self._branch_outputs: dict[str, Tensor] = {}

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = tensor_of_tokens((*arguments, *named.values()))
        assert tokens is not None  # there were some when its branches were found
        self._x, self._branch_outputs = tokens.clone(), {}

    def record_branch(self, branch: str) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            tokens = tensor_of_tokens(output, FLAT)
            assert tokens is not None
            self._branch_outputs[branch] = tokens.clone().view_as(self._x)

        return keep

    def without_skip(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Replace the input of the MLP branch, x + attention, by the attention alone."""
        old = tensor_of_tokens((*arguments, *named.values()), FLAT)
        if old is None or self._parts.attention not in self._branch_outputs:  # a norm that is also before the attention
            return None
        new = self._branch_outputs[self._parts.attention].view_as(old)
        changed = {name: new if value is old else value for name, value in named.items()}
        return tuple(new if value is old else value for value in arguments), changed

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Replace the output of the block by that of this variant."""
        new = self._tokens()
        if isinstance(output, Tensor):
            return new
        old = tensor_of_tokens(output)
        return tuple(new if value is old else value for value in output)

    def _tokens(self) -> Tensor:
        a, mlp = self._branch_outputs[self._parts.attention], self._parts.mlp
        if self.skips:
            return self._x.to(a.device) + a
        if mlp is None or not self._mlps:
            return a
        return self._branch_outputs[mlp] if self._parts.entrance is not None else a + self._branch_outputs[mlp]
