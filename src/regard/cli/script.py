"""`python -m regard script.py args...`: run a program as Python does, with `regard.everywhere()` on.

```
python -m regard           script.py args...     as python script.py args...
python -m regard           -m module args...     as python -m module args...
python -m regard --report  script.py args...     at the end: what regard ran, how much faster, and what it did not
```
"""

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

from regard.errors import ProblemError

REPORT = "--report"


def is_program(arguments: Sequence[str]) -> bool:
    """Whether the arguments name a program, and no command of regard."""
    first = arguments[1:2] if arguments[:1] == [REPORT] else arguments[:1]
    return first == ["-m"] or any(name.endswith(".py") for name in first)


def run_program(arguments: Sequence[str]) -> int:
    """Run it; the exit code is 1 where it ends with an error. What it raises as `SystemExit` passes through.

    Raises:
        ProblemError: there is no such file or module.
    """
    prints = arguments[0] == REPORT
    first, *rest = arguments[1:] if prints else arguments
    if first == "-m" and not rest:
        raise ProblemError("-m needs the name of a module: python -m regard -m package.module.")
    code, main = _module(*rest) if first == "-m" else _script(first, rest)
    from regard.override.switch import everywhere

    everywhere(report=prints)
    sys.modules["__main__"] = main
    try:
        exec(code, main.__dict__)  # noqa: S102 - it is the user's program
    except Exception as error:  # noqa: BLE001 - shown as Python shows it
        _show(error)
        return 1
    except KeyboardInterrupt as error:  # raised again, so that the process ends by the signal
        _show(error)
        sys.excepthook = lambda *_: None
        raise
    return 0


def _show(error: BaseException) -> None:
    """Show an error of the program without the lines above it."""
    inside = error.__traceback__.tb_next if error.__traceback__ else None
    sys.excepthook(type(error), error.with_traceback(inside), inside)


def _script(path: str, rest: Sequence[str]) -> tuple[CodeType, ModuleType]:
    """The code of a file, and its `__main__`; argv and the path of imports are those of `python path`."""
    full = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - as Python does, nothing is resolved
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        raise ProblemError(f"can't open file {path!r}: {error.strerror}.") from None
    code = _compiled(source, full)
    main = _main(full, SourceFileLoader("__main__", full))
    sys.argv = [path, *rest]
    _search_first(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    return code, main


def _compiled(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        raise SystemExit(1) from None


def _module(name: str, *rest: str) -> tuple[CodeType, ModuleType]:
    """The code of a module, or of `__main__` of a package, and its `__main__`."""
    _search_first(os.getcwd())  # noqa: PTH109
    sys.argv = ["-m", *rest]  # while packages are imported, as Python has it
    spec, found = None, name
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            found = f"{name}.__main__"
            spec = importlib.util.find_spec(found)
    except (ImportError, ValueError) as error:
        raise ProblemError(f"can't run -m {name}: {error}") from error
    loader = None if spec is None else spec.loader
    code = None if loader is None or not hasattr(loader, "get_code") else loader.get_code(found)  # pyright: ignore[reportAttributeAccessIssue]
    if spec is None or code is None:
        raise ProblemError(f"can't run -m {name}: no module named {found}.")
    main = _main(spec.origin, loader)
    main.__spec__, main.__package__ = spec, spec.parent
    sys.argv = [spec.origin or name, *rest]
    return code, main


def _main(file: str | None, loader: object) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins, __file__=file, __loader__=loader, __package__=None, __cached__=None, __spec__=None
    )
    return main


def _search_first(folder: str) -> None:
    """Let imports look into this folder first, in place of that of `python -m regard`; not with `python -P`."""
    if not sys.flags.safe_path:
        sys.path[0] = folder
