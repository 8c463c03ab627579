"""Whether the weights that `torch.nn.MultiheadAttention` returns are read, by the code that called the module.

The module returns weights by default (`need_weights=True`), and most programs drop them: `attention(x, x, x)[0]`, or
`out, _ = attention(x, x, x)` where `_` is never read. Python's bytecode after the call says so. Every other caller
counts as a reader: hooks, subclasses of the module, a wrapper that returns both, code that lists its local variables.
"""

import dis
import sys
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

CALL = ("forward", "_call_impl", "_wrapped_call_impl")
"""The methods from the module's own up to the one that a program calls. With hooks there is another between them."""

LISTS_VARIABLES = {"locals", "vars", "dir", "eval", "exec", "breakpoint", "_getframe", "currentframe", "stack"}


def weights_are_unread() -> bool:
    """Whether nobody reads the weights of the `nn.MultiheadAttention` whose `forward` called the caller."""
    if sys.gettrace() is not None:  # a debugger shows variables
        return False
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # the only way to the caller's code
    for name in CALL:
        if frame is None or frame.f_code is not _code_of(name):
            return False
        frame = frame.f_back
    return frame is not None and _drops_second(frame.f_code, frame.f_lasti)


def _code_of(name: str) -> CodeType | None:
    return getattr(getattr(nn.MultiheadAttention, name, None), "__code__", None)


@lru_cache(maxsize=1024)
def _drops_second(code: CodeType, at: int) -> bool:
    """Whether the code never reads the second of the two values that its call, the instruction at `at`, returns."""
    listed = list(dis.get_instructions(code))
    after = [each for each in listed if each.offset > at]
    names = [each.opname for each in after[:3]]
    if len(names) < 3:
        return False
    if names[0] in ("LOAD_CONST", "LOAD_SMALL_INT") and after[0].argval == 0:
        return names[1] == "BINARY_SUBSCR" or after[1].argrepr == "[]"
    if names[0] != "UNPACK_SEQUENCE" or after[0].argval != 2 or not LISTS_VARIABLES.isdisjoint(code.co_names):
        return False
    if names[1] == "STORE_FAST_STORE_FAST":
        second = after[1].argval[1]
    elif names[1] == "STORE_FAST" and names[2].startswith("STORE_FAST"):
        second = after[2].argval if isinstance(after[2].argval, str) else after[2].argval[0]
    else:
        return False
    return not any(second in _read(each) for each in listed)


def _read(instruction: dis.Instruction) -> tuple[Any, ...]:
    """The variables of a function that an instruction reads."""
    name, value = instruction.opname, instruction.argval
    if "FAST" not in name or name in ("STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_MAYBE_NULL", "DELETE_FAST"):
        return ()
    if name == "STORE_FAST_LOAD_FAST":
        return (value[1],)
    return value if isinstance(value, tuple) else (value,)
