"""`SpecModule`: a spec whose tensors belong to a module, so `.to()`, `state_dict` and optimizers see them.

A spec is frozen and refers to its tensors by identity; a module's tensors change identity with `.to()`, deepcopy and
`torch.func.functional_call`. So the module stores a template of the spec with a name in place of each tensor, and
`.spec` builds the spec from the tensors that the module has under these names.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.describe.spec import Spec, map_tuple
from regard.describe.tensors import is_without_data
from regard.errors import ProblemError
from regard.nn.projections import compute_tensors

W = TypeVar("W", bound=Spec)

_parameters: Any = WeakIdKeyDictionary()
"""The Parameter of each tensor, so that layers which share a spec train one Parameter. It shares the memory of the
tensor, but has its own gradient."""


@dataclass(frozen=True, slots=True)
class _TensorName:
    """A reference to a tensor: its name in the module."""

    name: str


@dataclass(frozen=True, slots=True)
class _Template:
    """A spec without its tensors: its class and its parts, where tensors are names and specs are templates."""

    kind: type[Spec]
    parts: tuple[Any, ...]
    has_attributes: bool  # besides the fields; a constructor derives them


class SpecModule(nn.Module, Generic[W]):
    """A spec as a module: a tensor that requires gradients becomes a Parameter, every other tensor a buffer.

    The name of a tensor is the path of its fields, joined by `_`: `table`, `b_table`, or `tables_0` for the first of a
    tuple. Where another tensor or an attribute of modules has that name, `_` is added: `half_` for a field `half`. A
    tensor that occurs twice in the spec is registered once. Modules accept a `SpecModule` in place of a spec, so that
    layers can share one, as T5's layers share their table.

    Args:
        spec: any spec. Functions (`MaskFunction`) are stored unchanged: tensors inside them are not registered.

    Raises:
        ProblemError: `spec` is no spec, or one of its tensors was computed from others, so it can be no Parameter.

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
        self._template = self._template_of(spec, "") if spec.tensors() else spec
        del self._names  # the ids of the tensors are valid during the construction only

    @property
    def spec(self) -> W:
        """The spec, with the module's tensors."""
        compute_tensors(self)
        return cast(W, self._build(self._template) if isinstance(self._template, _Template) else self._template)

    def extra_repr(self) -> str:
        return repr(self.spec)

    def _template_of(self, part: Any, name: str) -> Any:
        prefix = f"{name}_" if name else ""
        if isinstance(part, Tensor):
            return self._register(part, name)
        if isinstance(part, tuple):
            places = itertools.count()
            return map_tuple(lambda p: self._template_of(p, f"{prefix}{next(places)}"), cast("tuple[Any, ...]", part))
        if not isinstance(part, Spec):
            return part
        fields = zip(part._fields, part.parts(), strict=True)  # pyright: ignore[reportPrivateUsage]
        parts = tuple(self._template_of(p, prefix + field) for field, p in fields)
        return _Template(type(part), parts, part.has_attributes())

    def _register(self, tensor: Tensor, path: str) -> _TensorName:
        if (known := self._names.get(id(tensor))) is not None:
            return _TensorName(known)
        name = self._names[id(tensor)] = self._free_name(path)
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        elif not tensor.requires_grad:
            self.register_buffer(name, tensor)
        elif tensor.is_leaf:
            self.register_parameter(name, _parameter_of(tensor))
        else:
            raise ProblemError(
                f"{path} was computed from other tensors, and a module trains only leaf tensors: pass tensor.detach() "
                "to keep its values, or the tensor that it was computed from."
            )
        return _TensorName(name)

    def _free_name(self, path: str) -> str:
        """The path, with `_` added until neither a registered tensor nor an attribute of the module has that name."""
        name, taken = path, {*dir(type(self)), *vars(self), *self._parameters, *self._buffers}
        while name in taken:
            name += "_"
        return name

    def _build(self, part: Any) -> Any:
        if isinstance(part, _TensorName):
            return getattr(self, part.name)
        if isinstance(part, tuple):
            return map_tuple(self._build, cast("tuple[Any, ...]", part))
        if not isinstance(part, _Template):
            return part
        return part.kind.of_parts([self._build(p) for p in part.parts], has_attributes=part.has_attributes)


def _parameter_of(tensor: Tensor) -> nn.Parameter:
    """The Parameter of a tensor, as other modules have it; a new one if theirs was converted, moved or frozen."""
    known = _parameters.get(tensor)
    if known is None or not _is_unchanged(known, tensor):
        known = _parameters[tensor] = nn.Parameter(tensor)
    return known


def _is_unchanged(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Whether the Parameter of a tensor that requires gradients still has its type, its memory, and gradients."""
    if not parameter.requires_grad or parameter.dtype != tensor.dtype or parameter.device != tensor.device:
        return False
    return is_without_data(tensor) or parameter.data_ptr() == tensor.data_ptr()


def spec_of(name: str, part: "SpecModule[W] | None") -> W | None:
    """The spec of the attribute `name` of a module, which is `part`; None without one.

    Raises:
        ProblemError: a module of another kind, which a subclass with a `forward` of its own may have there.
    """
    if part is None:
        return None
    given = cast(nn.Module, part)
    found = given.spec if isinstance(given, SpecModule) else getattr(given, "spec", None)  # a wrapper forwards it
    if not isinstance(found, Spec):
        raise ProblemError(
            f"{name} is the module {type(part).__name__}, which only a forward that calls it can use, and here a spec "
            f"is expected: assign a spec or None to {name}, and keep the module under another name."
        )
    return cast(W, found)


def as_module(spec: "W | SpecModule[W] | None") -> "SpecModule[W] | None":
    """The spec as a module; a module or None unchanged.

    >>> as_module(None) is None
    True
    """
    return spec if spec is None or isinstance(spec, SpecModule) else SpecModule(spec)
