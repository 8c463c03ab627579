"""Where the branches of a block are: what its attention and its MLP add to the tokens, found by looking at a run.

A block gives x + a + m, with a what its attention adds and m its MLP. Where these stand differs from family to family:

    one after the other    x1 = x + a,  y = x1 + m      m is made of x1; norms stand before branches, or behind too
    side by side           y = x + a + m                m is made of x

No family is known by name: of one run, the tensors that go into and come out of the modules of a block are held against
these sums. What fits none (norms after the sum, branches that are scaled, cross-attention) is not guessed at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ProblemError
from regard.inspect.intervene.heads import module_at
from regard.inspect.observing.layers import track_layers

FLAT = (2, 3)
"""Axes of tokens within a block: some families lay the tokens of all sequences side by side."""


@dataclass(frozen=True)
class Branches:
    """The modules of a block, by their paths in the model, whose outputs are its branches.

    Args:
        attention: whose output is added first.
        mlp: whose output is added last; None for a block without an MLP.
        entrance: which is given the tokens with the attention added, on their way to the MLP; None where the MLP stands
            beside the attention, or there is none.
    """

    attention: str
    mlp: str | None = None
    entrance: str | None = None


class Passed(NamedTuple):
    """A module was given tokens, or gave them: its path, and the tensor, of 3 axes or 2."""

    path: str
    given: bool
    tokens: Tensor


def branches(model: nn.Module, run: Callable[[], Any], blocks: Mapping[str, Sequence[str]]) -> dict[str, Branches]:
    """The branches of each block, by one run. One block's tensors are held at a time.

    Args:
        blocks: paths of blocks, each with those of its modules that attend.

    Raises:
        ProblemError: a block is made otherwise, or did not run.

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
            passed: list[Passed] = []
            block = module_at(model, path)
            for name, module in block.named_modules(prefix=path):
                if name.endswith("._orig_mod"):  # what torch.compile wraps, and runs uncompiled here
                    continue
                name = name.replace("._orig_mod", "")  # noqa: PLW2901
                hooks.callback(
                    module.register_forward_pre_hook(_taking_input(passed, name), with_kwargs=True, prepend=True).remove
                )
                hooks.callback(module.register_forward_hook(_taking_output(passed, name)).remove)
            hooks.callback(block.register_forward_hook(_solving(found, path, attending, passed)).remove)
        run()
    if wrong := next((path for path in blocks if path not in found), None):
        training = " Call model.eval() first: dropout hides what is added." if model.training else ""
        raise ProblemError(
            f"block {wrong!r} of {type(model).__name__} does not give x + attention, or x + attention + MLP, with what "
            "any of its modules gave, so its skip connections and MLP cannot be taken out. Measure the model as it is: "
            f"variants=['as it is'].{training}"
        )
    return found


def first_tokens(values: Any, ndim: tuple[int, ...] = (3,)) -> Tensor | None:
    """The first of some values that is tokens: floats [batch, tokens, width]; with 2 axes [batch * tokens, width]."""
    several = (values,) if isinstance(values, Tensor) else values
    floats = (one for one in several if isinstance(one, Tensor) and one.is_floating_point())
    return next((one for one in floats if one.ndim in ndim), None)


def _taking_input(passed: list[Passed], path: str) -> Callable[..., None]:
    def take(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (tokens := first_tokens((*arguments, *named.values()), FLAT)) is not None:
            passed.append(Passed(path, True, tokens.clone()))  # models may write on in what they were given

    return take


def _taking_output(passed: list[Passed], path: str) -> Callable[..., None]:
    def take(module: nn.Module, arguments: Any, output: Any) -> None:
        if (tokens := first_tokens(output, FLAT)) is not None:
            passed.append(Passed(path, False, tokens.clone()))

    return take


def _solving(
    found: dict[str, Branches], path: str, attending: Sequence[str], passed: list[Passed]
) -> Callable[..., None]:
    """A hook for when a block has run."""

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


def _solutions(x: Tensor, y: Tensor, attending: str, passed: list[Passed]) -> Iterator[Branches]:
    """What fits, the likeliest first: of modules within one another that gave the same, the outermost."""
    attended = next((at for at, one in enumerate(passed) if one.path == attending and not one.given), len(passed))
    later = passed[attended:]
    for at, entrance in enumerate(later):
        for attention in reversed([one for one in later[:at] if entrance.given and not one.given]):
            if _is_sum(entrance.tokens, x, attention.tokens):
                for mlp in reversed([one for one in later[at:] if not one.given]):
                    if _is_sum(y, entrance.tokens, mlp.tokens):
                        yield Branches(attention.path, mlp.path, entrance.path)
    outputs = [one for one in later if not one.given]
    for attention in outputs:
        if _is_sum(y, x, attention.tokens):
            yield Branches(attention.path)
    for attention in outputs:
        for mlp in reversed([one for one in passed if not one.given and not one.path.startswith(attending)]):
            if mlp is not attention and _is_sum(y, x, attention.tokens, mlp.tokens):
                yield Branches(attention.path, mlp.path)


def _is_sum(total: Tensor, *terms: Tensor) -> bool:
    """Whether these terms were added up: two additions at most, each rounded by eps / 2 of what is added at most."""
    eps = max(torch.finfo(one.dtype).eps for one in (total, *terms))
    exact = torch.stack([term.double() for term in terms])
    return bool(((total.double() - exact.sum(0)).abs() <= eps * exact.abs().sum(0)).all())
