"""`regard.everywhere`: on and off, for the whole process."""

import atexit
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self
from weakref import ref

import torch
import torch.nn.functional as F

from regard.describe.not_a_spec import received
from regard.errors import ProblemError
from regard.override import report
from regard.override.attention import attention, attention_below_autograd
from regard.override.encoder import encoder_layer, forward_counted, forward_of_torch, packed_attention
from regard.override.small_calls import short_way
from regard.torch_internals import (
    check_replaceable,
    encoder_layer_of_torch,
    kernels_of_attention,
    packed_attention_of_torch,
    replace_in_torch,
)

CACHE_TAG = " regard.everywhere"
"""Sets what torch.compile writes to disk apart: its caches do not know which kernels were registered."""

_lock = Lock()


class _Request(NamedTuple):
    """A call of `everywhere` that holds without an end, unless what it returned is entered as a `with` block."""

    returned: "ref[Everywhere]"
    on: bool


class _Process:
    """What is on in this process.

    Attributes:
        for_good: whether it was turned on without an end, by a call that can no longer become a `with` block.
        requests: later calls, the last one first.
        blocks: the `with` blocks that turn it on or off and are being run, in all threads.
        library: what registers the kernels while it lives; None while torch's own are used.
        printing: those of the reports that are not yet printed.
    """

    for_good = False
    requests: tuple[_Request, ...] = ()
    blocks: "tuple[Everywhere, ...]" = ()
    library: torch.library.Library | None = None
    printing: "frozenset[Everywhere]" = frozenset()

    @contextmanager
    def changing(self, otherwise: Callable[[], object]) -> Generator[None]:
        """Change what is on, inside; after an error, such as Ctrl-C, all is on that was on before.

        Args:
            otherwise: called after an error, once the former state is back.
        """
        with _lock:
            before = self.for_good, self.requests, self.blocks, self.printing
            try:
                yield
                self.settle()
            except BaseException:
                self.for_good, self.requests, self.blocks, self.printing = before
                otherwise()
                self.settle()
                raise

    def request(self, returned: "Everywhere", on: bool) -> None:
        """Turn it on or off without an end, until `withdraw`."""
        later = tuple(takewhile(lambda each: each.returned() is not None, self.requests))
        if len(later) < len(self.requests):
            self.for_good = self.requests[len(later)].on
        self.requests = (_Request(ref(returned), on), *later)

    def withdraw(self, returned: "Everywhere") -> None:
        """Take back this request alone: other threads may have made some since."""
        self.requests = tuple(each for each in self.requests if each.returned() is not returned)

    def leave(self, block: "Everywhere") -> None:
        """End one block of this object, if it has one."""
        if block not in self.blocks:
            return
        at = self.blocks.index(block)
        self.blocks = (*self.blocks[:at], *self.blocks[at + 1 :])
        if block not in self.blocks:
            self.printing -= {block}

    def settle(self) -> None:
        """Install or remove the kernels."""
        for_good = self.requests[0].on if self.requests else self.for_good
        entered = {block.turns_on for block in self.blocks}
        on = (for_good or True in entered) and False not in entered
        if on and self.library is None:
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
            self.library.impl("scaled_dot_product_attention", attention_below_autograd, "CPU")
            kernels_of_attention.clear()
            _replace(on=True)
            torch.compiler.config.cache_key_tag += CACHE_TAG
        elif not on and self.library is not None:
            _replace(on=False)
            torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(CACHE_TAG, "")
            self.library = None  # late: what Ctrl-C interrupts is done again
            kernels_of_attention.clear()
        if F.multi_head_attention_forward in (forward_of_torch, forward_counted):
            F.multi_head_attention_forward = forward_counted if self.printing else forward_of_torch


def _replace(on: bool) -> None:
    """Put the functions of regard in the place of torch's, or torch's back."""
    short_way.turn(on)
    replace_in_torch(encoder_layer_of_torch, encoder_layer, on)
    replace_in_torch(packed_attention_of_torch, packed_attention, on)


_process = _Process()


def is_on() -> bool:
    """Whether torch's attention is run by regard now."""
    return _process.library is not None


class Everywhere:
    """What `regard.everywhere` returns: a context manager, and the counts of the calls since then.

    `print` shows them; `rows` has them as data (`regard.override.report.Row`).
    """

    def __init__(self, on: bool, prints: bool) -> None:
        self.turns_on, self._prints = on, prints
        self._tally = report.Tally(measures=prints)
        if on:
            report.listen(self._tally)
        with _process.changing(otherwise=partial(atexit.unregister, self._show)):
            _process.request(self, on)
            if prints:
                _process.printing |= {self}
                atexit.register(self._show)

    @property
    def rows(self) -> tuple[report.Row, ...]:
        """The calls by form, most frequent forms first."""
        return self._tally.rows()

    def __str__(self) -> str:
        return report.text(self.rows)

    __repr__ = __str__

    def __enter__(self) -> Self:
        with _process.changing(otherwise=partial(_process.withdraw, self)):
            _process.withdraw(self)
            _process.blocks += (self,)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _process.changing(otherwise=partial(_process.leave, self)):
            if self not in _process.blocks:
                raise ProblemError(
                    "regard.everywhere() is left and was not entered: expected `with regard.everywhere():`. To turn "
                    "it off, call regard.everywhere(False)."
                )
            _process.leave(self)
            inside = self in _process.blocks
        if inside:
            return
        report.ignore(self._tally)
        if self._prints:
            atexit.unregister(self._show)
            self._show()

    def _show(self) -> None:
        report.show(self.rows)


def everywhere(on: bool = True, *, report: bool = False) -> Everywhere:
    """Let regard run torch's own attention in this process, in programs that do not know regard.

    Every call of `torch.nn.functional.scaled_dot_product_attention` on the CPU, whoever makes it and in whatever
    thread: your code, `torch.nn.MultiheadAttention`, `torch.nn.TransformerEncoderLayer`, other packages, graphs of
    torch.compile that are traced from now on. Forward and backward; outputs are torch's up to rounding. Calls for which
    torch is faster, or means something that regard does not compute alike (dropout), are passed on to torch.

    ```python
    regard.everywhere()                  # from now on
    regard.everywhere(False)             # no longer
    with regard.everywhere() as caught:  # inside, in all threads
        model(x)
    print(caught)                        # what was caught, and what was passed on and why
    ```

    Args:
        on: False turns it off.
        report: print at the end, of the process or of the `with` block, what was caught, how much faster it was, and
            what was passed on and why, to stderr. A few calls of each form are then run by torch as well, to compare.

    Raises:
        RefusalError: this torch lacks a private name that regard would need.

    >>> import torch, regard
    >>> q = torch.randn(1, 8, 256, 64)
    >>> with regard.everywhere() as caught:
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> caught.rows[0].calls, caught.rows[0].form.why
    (1, None)
    """
    for name, value in (("on", on), ("report", report)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"{name} is {received(value)}: expected True or False.")
    check_replaceable()
    return Everywhere(on, report)
