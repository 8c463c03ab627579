"""`SharesTensors`: a module whose parts share tensors, also after it was converted, moved or loaded."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor, nn


class Shared(NamedTuple):
    """Two modules, and the tensors that both have, by name."""

    first: nn.Module
    other: nn.Module
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, first: nn.Module, other: nn.Module) -> "Shared":
        """The tensors that two modules share."""
        theirs = _tensors(other)
        return cls(first, other, {name: own for name, own in _tensors(first).items() if theirs.get(name) is own})

    def share_again(self) -> None:
        """Give the second module the tensors of the first."""
        self._copy(self.first, self.other, self.tensors)

    def share_loaded(self) -> None:
        """Give the first module what was loaded into the second, which is loaded last."""
        theirs = _tensors(self.other)
        loaded = [name for name, before in self.tensors.items() if theirs[name] is not before]
        self._copy(self.other, self.first, loaded)

    def _copy(self, source: Any, into: Any, names: Iterable[str]) -> None:
        for name in names:
            kind = "_parameters" if name in source._parameters else "_buffers"
            getattr(into, kind)[name] = getattr(source, kind)[name]


class SharesTensors(nn.Module):
    """A module whose parts share tensors; a subclass defines `_shared_tensors`."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Shared] = []
        """During `load_state_dict`: what was shared before."""
        self.register_load_state_dict_pre_hook(SharesTensors._before_load)
        self.register_load_state_dict_post_hook(SharesTensors._after_load)

    def _shared_tensors(self) -> list[Shared]:
        """What parts share now, in pairs of modules; the first of a pair precedes the second in `state_dict`."""
        raise NotImplementedError(f"{type(self).__name__}._shared_tensors")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert or move the module; parts that shared tensors before share them afterwards."""
        before = self._shared_tensors()
        super()._apply(fn, recurse)
        for pair in before:
            pair.share_again()
        return self

    def _before_load(self, *_: object) -> None:
        """Note what is shared: loaded with `assign=True`, each part would get a tensor of its own."""
        self._before = self._shared_tensors()

    def _after_load(self, _: object) -> None:
        """Share again, once the parts are loaded: what the later part has, if the state has it."""
        for pair in reversed(self._before):
            pair.share_loaded()
        for pair in self._before:
            pair.share_again()
        self._before = []


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module by name, without those of its children."""
    found = {**module._parameters, **module._buffers}  # pyright: ignore[reportPrivateUsage]
    return {name: tensor for name, tensor in found.items() if tensor is not None}
