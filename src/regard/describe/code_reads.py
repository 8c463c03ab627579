"""The names that a code object reads, and tables of the names that cannot be followed or are taken as constant."""

import dis
import sys
import types
from functools import lru_cache
from typing import Any, NamedTuple

from regard.describe.object_state import IS_HEAP

LIBRARIES = sys.stdlib_module_names | {"numpy", "regard", "torch"}
"""Packages that do not change while a program runs."""

CLOCKS = {
    "datetime", "gc", "glob", "importlib", "inspect", "io", "os", "pathlib", "random", "secrets", "socket",
    "subprocess", "tempfile", "time", "uuid",
}  # fmt: skip
"""Modules whose functions may return a different value in each call, or read files, the clock or other code."""

OPAQUE = {"__import__", "dir", "eval", "exec", "getattr", "globals", "input", "locals", "open", "vars"}
"""Built-in functions that read objects which the code does not name."""

OPAQUE_ATTRIBUTES = {
    "__globals__", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
}  # fmt: skip
"""Attributes that read objects which the code does not name, and methods that draw at random."""

OPAQUE_OF_LIBRARIES = {
    "numpy": {"random"},
    "operator": {"attrgetter", "methodcaller"},
    "sys": {"_getframe", "argv", "flags", "getrecursionlimit", "getrefcount", "modules", "path", "stdin"},
    "torch": {
        "bernoulli", "default_generator", "dropout", "get_default_device", "get_default_dtype", "get_num_threads",
        "get_rng_state", "initial_seed", "is_autocast_enabled", "is_grad_enabled", "is_inference_mode_enabled",
        "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "randperm",
    },
}  # fmt: skip
"""Functions and modules of libraries with the same properties."""


class Reads(NamedTuple):
    """The names in a code object and in its inner functions; a relative module begins with dots."""

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]


_NAMED_BY = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_FROM_DICT_OR_GLOBALS": 0,
    "LOAD_ATTR": 1, "LOAD_METHOD": 1, "LOAD_SUPER_ATTR": 1, "IMPORT_FROM": 1,
    "IMPORT_NAME": 2,
}  # fmt: skip
"""The field of `Reads` that the argument of an instruction belongs to."""


@lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> Reads:
    """The names that this code reads."""
    own: tuple[set[str], ...] = set(), set(), set()
    loaded: list[Any] = [
        0,
        0,
    ]  # the last two constants: before an import, the count of dots and the names
    for step in dis.get_instructions(code):
        if step.opname in _NAMED_BY:
            dots = "." * loaded[0] if step.opname == "IMPORT_NAME" else ""
            own[_NAMED_BY[step.opname]].add(dots + step.argval)
        elif step.opname.startswith("LOAD_"):
            loaded = [loaded[1], step.argval]
    inner = [reads_of(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return Reads(*(frozenset().union(*sets) for sets in zip(own, *inner, strict=True)))


def root_package(module: object) -> str:
    """The top package of a module's name: "numpy" of "numpy.linalg"; "" if the name is not a string."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_library_class(kind: type) -> bool:
    """Whether a library has this class under the name of the class.

    The name alone does not tell: classes of `dataclasses.make_dataclass` have the module of a library, too.
    """
    module = vars(kind).get("__module__", "builtins") if kind.__flags__ & IS_HEAP else "builtins"
    if root_package(module) not in LIBRARIES:
        return False
    if not kind.__flags__ & IS_HEAP:
        return True
    found: Any = sys.modules.get(module)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind
