"""`SpecAttributes`: a mask, bias, score or position that is assigned to a module is checked, and becomes a module."""

from typing import Any, ClassVar, cast

from torch import nn

from regard.describe.spec import Spec
from regard.nn.spec_module import as_module


class SpecAttributes(nn.Module):
    """A module whose specs can be assigned as they are given to the constructor: a spec, a `SpecModule` or None.

    A module that has the `spec` of a `SpecModule`, such as torch's wrappers for activation checkpointing, is one too.
    In a subclass with a `forward` of its own, an attribute may also be any other module, which that `forward` uses;
    the `forward` of this class takes specs alone (`spec_of`).

    >>> from regard import Alibi, Causal
    >>> from regard.nn import MultiHeadAttention
    >>> module = MultiHeadAttention(64, heads=8, mask=Causal())
    >>> module.bias = Alibi(8)
    >>> module.bias
    SpecModule(Alibi(heads=8))
    """

    _spec_names: ClassVar[tuple[str, ...]] = ("position", "mask", "bias", "score")
    """The attributes that are specs."""

    def _check_spec(self, name: str, spec: object) -> None:
        """Raise `ProblemError` unless `spec` may be the attribute `name`; a subclass defines it."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._spec_names:
            is_module = isinstance(value, nn.Module) and isinstance(getattr(value, "spec", None), Spec)
            if is_module or not isinstance(value, nn.Module) or self._uses_specs():
                self._check_spec(name, value.spec if is_module else value)
                value = value if is_module else as_module(cast(Any, value))
        super().__setattr__(name, value)

    def _uses_specs(self) -> bool:
        """Whether `forward` is that of the class that checks the specs."""
        checking: Any = next(kind for kind in type(self).__mro__ if "_check_spec" in vars(kind))
        return type(self).forward is checking.forward
