"""`SpecModule`: a spec whose tensors belong to a module, so `.to()`, `state_dict` and optimizers see them.

A spec is frozen and holds its tensors by identity; a module's tensors change identity with `.to()`, deepcopy and
`torch.func.functional_call`. So what is held is the spec's plan with a name in place of each tensor, and `.spec` is
made of the tensors that bear these names now.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.describe.spec import Spec
from regard.errors import ProblemError

W = TypeVar("W", bound=Spec)

_parameters: Any = WeakIdKeyDictionary()
"""The Parameter made of a tensor, so that a spec given to several layers is trained once. It shares the memory
of the tensor; gradients are its own."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for a tensor: the name under which the module has it."""

    name: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """A spec to be made: its class, and its parts, some of which are named or planned."""

    make: Callable[..., Spec]
    parts: tuple[Any, ...]


class SpecModule(nn.Module, Generic[W]):
    """A spec as a module: what in it requires gradients is a Parameter, every other tensor a buffer.

    A tensor is named as its field, through words in words with `_` between: `table`, `b_table`. A tensor that stands
    in the spec twice is held once. Spec modules are themselves taken where modules take words, so that layers can
    share one, as T5's share their table.

    Args:
        spec: any spec; a spec without tensors is returned. Functions (`MaskFunction`) are kept as they are: tensors
            inside them are not seen.

    Raises:
        ProblemError: it is no spec, or a tensor in it was computed from others, so it can be no Parameter.

    >>> import torch
    >>> from regard import Alibi, T5Bias
    >>> bias = SpecModule(T5Bias(torch.zeros(32, 8, requires_grad=True)) + Alibi(8))
    >>> bias
    SpecModule(T5Bias(table=float32[32, 8]) + Alibi(heads=8))
    >>> [name for name, _ in bias.named_parameters()]
    ['a_table']
    >>> bias.to(torch.float64).spec
    T5Bias(table=float64[32, 8]) + Alibi(heads=8)
    """

    def __init__(self, spec: W) -> None:
        super().__init__()
        if not isinstance(spec, Spec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"SpecModule takes a spec, such as a mask or a bias, and got {type(spec).__name__}.")
        self._names: dict[int, str] = {}
        self._plan = self._planned(spec, "") if spec.tensors() else spec
        del self._names  # identities of tensors, of no meaning later

    @property
    def spec(self) -> W:
        """The spec of now."""
        return cast(W, self._made(self._plan) if isinstance(self._plan, _Plan) else self._plan)

    def extra_repr(self) -> str:
        return repr(self.spec)

    def _planned(self, part: Any, name: str) -> Any:
        prefix = f"{name}_" if name else ""
        if isinstance(part, Tensor):
            return self._registered(part, name)
        if isinstance(part, tuple):
            return tuple(self._planned(p, f"{prefix}{i}") for i, p in enumerate(cast("tuple[Any, ...]", part)))
        if not isinstance(part, Spec):
            return part
        fields = zip(part._fields, part.parts(), strict=True)  # pyright: ignore[reportPrivateUsage]
        return _Plan(type(part), tuple(self._planned(p, prefix + field) for field, p in fields))

    def _registered(self, tensor: Tensor, name: str) -> _Named:
        known = self._names.setdefault(id(tensor), name)
        if known != name:
            return _Named(known)
        if not tensor.requires_grad:
            self.register_buffer(name, tensor)
        elif isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        elif tensor.is_leaf:
            self.register_parameter(name, _parameters.setdefault(tensor, nn.Parameter(tensor)))
        else:
            raise ProblemError(
                f"{name} was computed from other tensors, and a module can hold only what it may train itself: pass "
                "tensor.detach() to keep its numbers, or hold what it was computed from."
            )
        return _Named(name)

    def _made(self, plan: Any) -> Any:
        if isinstance(plan, _Named):
            return getattr(self, plan.name)
        if isinstance(plan, tuple):
            return tuple(self._made(part) for part in cast("tuple[Any, ...]", plan))
        return plan.make(*[self._made(part) for part in plan.parts]) if isinstance(plan, _Plan) else plan


def as_module(spec: "W | SpecModule[W] | None") -> "SpecModule[W] | None":
    """The spec as a module; a module, or None, as it is.

    >>> as_module(None) is None
    True
    """
    return spec if spec is None or isinstance(spec, SpecModule) else SpecModule(spec)
