"""Whether a function of positions, `fn(b, h, q, k)`, uses the batch row, and whether it uses the head."""

import dis
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, cast

import torch

from regard.torch_internals import ignore_torch_function

READ_LOCALS = {"eval", "exec", "f_locals", "locals", "vars"}
"""Names by which code reads variables that it does not name."""


class _Probe(torch.Tensor):
    """A tensor that records whether anything was computed from it."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        probes: list[_Probe] = []

        def plain(x: Any) -> Any:
            if isinstance(x, _Probe):
                probes.append(x)
                return x.as_subclass(torch.Tensor)
            return type(x)(plain(y) for y in cast("Sequence[Any]", x)) if isinstance(x, tuple | list) else x

        with ignore_torch_function():
            result = func(*plain(args), **{name: plain(x) for name, x in (kwargs or {}).items()})
        if func.__name__ != "__get__" or isinstance(result, torch.Tensor):  # not for its device or shape
            for probe in probes:
                probe.used = True
        return result


def find_uses(fn: Callable[[Any, Any, Any, Any], Any], query: int) -> tuple[bool, bool]:
    """Whether fn uses b, and whether it uses h: one call with tensors that record their use.

    >>> find_uses(lambda b, h, q, k: (q - k < h).to(b.device), query=0)
    (False, True)
    """
    b, h = (torch.zeros((), dtype=torch.int64, device="cpu").as_subclass(_Probe) for _ in range(2))
    q, k = torch.tensor(query, device="cpu"), torch.tensor(0, device="cpu")
    fn(b, h, q, k)
    return b.used, h.used


def method_may_use(method: Any) -> bool:
    """Whether a method `(self, b, h, q, k)` may use b or h: False if its code can read neither. 0.2 us, a call 40.

    >>> method_may_use(lambda self, b, h, q, k: q >= k), method_may_use(lambda self, b, h, q, k: q - k < h)
    (False, True)
    """
    code = getattr(method, "__code__", None)
    return code is None or _may_use(code)


@lru_cache(maxsize=256)
def _may_use(code: CodeType) -> bool:
    if code.co_argcount != 5:
        return True
    names = READ_LOCALS.union(code.co_varnames[1:3])
    read = [step.argval if isinstance(step.argval, tuple) else (step.argval,) for step in dis.get_instructions(code)]
    return any(name in names for argument in read for name in argument)
