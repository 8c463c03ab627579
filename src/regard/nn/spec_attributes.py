"""`SpecAttributes`: a mask, bias, score or position that is assigned to a module is checked, and becomes a module."""

from typing import Any, ClassVar

from torch import nn

from regard.nn.spec_module import SpecModule, as_module


class SpecAttributes(nn.Module):
    """A module whose specs can be assigned as they are given to the constructor: a spec, a `SpecModule` or None.

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
            self._check_spec(name, value.spec if isinstance(value, SpecModule) else value)
            value = as_module(value)
        super().__setattr__(name, value)
