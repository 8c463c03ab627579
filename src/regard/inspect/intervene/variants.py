"""A model as it runs without its skip connections, without its MLPs, or without both; its weights stay as they are.

    as it is         y = x + a(x) + m(x + a(x))
    without MLPs     y = x + a(x)
    without skips    y = m(a(x))                    where the MLP stands beside the attention: a(x) + m(x)
    without both     y = a(x)                       nothing but attention

Norms stay where they are, within the branches a and m.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.inspect.intervene.branches import FLAT, Branches, first_tokens
from regard.inspect.intervene.heads import module_at

Variant = Literal["as it is", "without MLPs", "without skips", "without both"]

VARIANTS: tuple[Variant, ...] = ("as it is", "without MLPs", "without skips", "without both")


@contextmanager
def running(model: nn.Module, blocks: Mapping[str, Branches], variant: Variant) -> Generator[None]:
    """Within the block, the model runs as this variant. MLPs that are left out are still computed, for nothing."""
    with ExitStack() as hooks:
        for path, parts in () if variant == "as it is" else blocks.items():
            running = _Running(skips=variant == "without MLPs", mlps=variant == "without skips", parts=parts)
            whole = module_at(model, path)
            hooks.callback(whole.register_forward_pre_hook(running.enter, with_kwargs=True).remove)
            for branch in (parts.attention, parts.mlp):
                if branch is not None:
                    hooks.callback(module_at(model, branch).register_forward_hook(running.keeping(branch)).remove)
            if parts.entrance is not None and not running.skips:
                entrance = module_at(model, parts.entrance)
                hooks.callback(entrance.register_forward_pre_hook(running.without_skip, with_kwargs=True).remove)
            hooks.callback(whole.register_forward_hook(running.leave).remove)
        yield


class _Running:
    """A block while it runs: what went in, and what its branches gave."""

    def __init__(self, *, skips: bool, mlps: bool, parts: Branches) -> None:
        self.skips, self._mlps, self._parts = skips, mlps, parts
        self._x = torch.empty(0)
        self._gave: dict[str, Tensor] = {}

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = first_tokens((*arguments, *named.values()))
        assert given is not None  # it had some when its branches were found
        self._x, self._gave = given.clone(), {}

    def keeping(self, branch: str) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            given = first_tokens(output, FLAT)
            assert given is not None
            self._gave[branch] = given.clone().view_as(self._x)

        return keep

    def without_skip(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The MLP gets what the attention gave, and not the tokens with that added."""
        old = first_tokens((*arguments, *named.values()), FLAT)
        if old is None or self._parts.attention not in self._gave:  # a norm that also stands before the attention
            return None
        new = self._gave[self._parts.attention].view_as(old)
        changed = {name: new if value is old else value for name, value in named.items()}
        return tuple(new if value is old else value for value in arguments), changed

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        """What the block gives in this variant, in place of what it gave."""
        new = self._tokens()
        if isinstance(output, Tensor):
            return new
        old = first_tokens(output)
        return tuple(new if value is old else value for value in output)

    def _tokens(self) -> Tensor:
        a, mlp = self._gave[self._parts.attention], self._parts.mlp
        if self.skips:
            return self._x + a
        if mlp is None or not self._mlps:
            return a
        return self._gave[mlp] if self._parts.entrance is not None else a + self._gave[mlp]
