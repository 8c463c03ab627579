"""What happens before one line of a call: Ctrl-C, or a collection of garbage."""

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class BeforeLine:
    """Calls a function before the n-th line that runs in the files of caches, once; counts these lines.

    Args:
        at: the number of the line, from 1 on; 0 for none.
        act: the function.
        guards: also before `with` and `try`. These lines also come between a context and what it guards, where Python
            handles no signal: Ctrl-C there would leave a lock that is never released.
    """

    def __init__(self, at: int, act: Callable[[], object], *, guards: bool = True) -> None:
        self.at, self.act, self.guards, self.count = at, act, guards, 0
        self._before = sys.gettrace()

    def __enter__(self) -> Self:
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if "/regard/cache/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and (self.guards or not _is_guard(frame)):
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.act()
        return self._line


def _is_guard(frame: FrameType) -> bool:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))


def interrupt(at: int) -> BeforeLine:
    """Ctrl-C before the n-th line."""
    return BeforeLine(at, _raise_interrupt, guards=False)


def _raise_interrupt() -> None:
    raise KeyboardInterrupt
