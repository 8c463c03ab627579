"""Objects that pass through a model's code in place of a tensor, and become that tensor when the code computes.

```python
key_states, value_states = cache.update(key_states, value_states, self.layer_idx)        # LazyTensor, LazyTensor
shape = key_states.shape                                                                 # known without data
key_states = key_states.repeat(1, 2, 1, 1)                                               # a torch.Tensor from here
attn_output, _ = attention_interface(self, query_states, key_states, value_states, ...)  # gets either
```

Most models of transformers pass keys, values and masks on as they are, so a quantised cache is read in place and a mask
is never built. Models that slice, cast or repeat them get the dense tensor at that moment, and the right result.
"""

import linecache
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class DenseOnUse:
    """Whatever a torch function, an operator, an index or a method of tensors is applied to is `dense()`."""

    def dense(self) -> Tensor:
        """The tensor that the object represents."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Methods and attributes of tensors that the object itself does not have: those of the dense tensor."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """In a torch function, such as `torch.cat([x, y])`, it is its dense tensor."""
        return function(*_densify(args), **{name: _densify(value) for name, value in (kwargs or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: DenseOnUse, *args: Any) -> Any:
        return getattr(self.dense(), name)(*_densify(args))

    apply.__name__ = name
    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "contains", "neg", "abs", "invert", "getitem")),
):  # Python looks operators up in the class, never through __getattr__
    setattr(DenseOnUse, _name, _operator(_name))


class LazyTensor(DenseOnUse):
    """Keys or values of a cache on their way to the attention function.

    Args:
        source: how they are stored, for regard's attention to read in place.
        shape: of the tensor.
        like: has the tensor's dtype and device.
        make: makes the tensor; it is called once, at the first use.
        report: is called with the line of code that used it first; None: nothing is called.

    >>> lazy = LazyTensor("int8 codes", (1, 2, 3, 4), torch.empty(0), lambda: torch.ones(1, 2, 3, 4))
    >>> lazy.shape, lazy.source, lazy.is_dense
    (torch.Size([1, 2, 3, 4]), 'int8 codes', False)
    """

    def __init__(
        self,
        source: Any,
        shape: tuple[int, ...],
        like: Any,
        make: Callable[[], Tensor],
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.source, self.shape, self.dtype, self.device = source, torch.Size(shape), like.dtype, like.device
        self.report, self._make = report, make
        self._dense: Tensor | None = None

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def is_dense(self) -> bool:
        """Whether code has computed with it: what it changed is in the dense tensor alone."""
        return self._dense is not None

    def dense(self) -> Tensor:
        """The tensor."""
        if self._dense is None:
            self._dense = self._make()
            if self.report is not None and not torch.compiler.is_compiling():
                self.report(_line_of_caller())
        return self._dense

    def __len__(self) -> int:
        return self.shape[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.dense()[index] = _densify(value)

    def __repr__(self) -> str:
        return f"LazyTensor({self.source!r})"

    __str__ = __repr__


def opened(key: Any, value: Any) -> tuple[Any, Any]:
    """Keys and values as the attention function reads them: as they are stored, or dense where code used either."""
    pair = (key, value)
    if all(isinstance(t, LazyTensor) and not t.is_dense for t in pair):
        return key.source, value.source
    return _densify(key), _densify(value)


def _densify(value: Any) -> Any:
    if isinstance(value, DenseOnUse):
        return value.dense()
    return type(value)(_densify(x) for x in value) if type(value) in (tuple, list) else value


def _line_of_caller() -> str:
    """The line of code outside of regard and torch that is being run, and its class."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("regard", "torch"):
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() or frame.f_code.co_name
    line = line if len(line) <= 100 else f"{line[:97]}..."
    return f"{line} ({type(frame.f_locals['self']).__name__})" if "self" in frame.f_locals else line
