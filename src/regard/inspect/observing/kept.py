"""What was kept of calls: in memory, or in files.

A layer of 32 heads of 128 dims has 256 MiB of queries at 32,768 tokens in bfloat16. What memory cannot hold of a whole
model the disk can (`spill.py`), and a file that is mapped into memory is read where it is looked at.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.observing.parts import Memory, Parts
from regard.inspect.observing.spill import Folder, read_folder
from regard.inspect.weights.lazy import Weights

To = str | torch.device | Path | None
"""Where calls are kept: None for the device that each is on, a device, "disk", or a folder."""

DISK = "disk"


@dataclass(frozen=True, eq=False)
class Kept:
    """What was kept of one call.

    Attributes:
        layer, module: which layer it is, and the path of the module that attended; see `observe`.
        parts: gives what was kept, from memory or from a file.

    >>> from regard import attend
    >>> from regard.inspect import observe
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with observe(values=True) as kept:
    ...     _ = attend(q, q, q + 1)
    >>> kept[0].weights.shape, kept[0].v.shape, kept[0].out[0, 0, 0]
    ((1, 1, 2, 2), torch.Size([1, 1, 2, 4]), tensor([1., 1., 1., 1.]))
    """

    layer: int
    module: str | None
    parts: Callable[[], Parts]

    @property
    def weights(self) -> Weights:
        """The weights, lazily: q, k, lse and the words of the call. From a file they are mapped, not read."""
        return self.parts().weights

    @property
    def v(self) -> Tensor:
        """[batch, kv_heads, keys, v_dim]. Raises `ProblemError` where values were not asked for."""
        return self._asked_for(self.parts().v)

    @property
    def out(self) -> Tensor:
        """What the call gave, [batch, heads, queries, v_dim]. Raises `ProblemError` where values were not asked for."""
        return self._asked_for(self.parts().out)

    def _asked_for(self, kept: Tensor | None) -> Tensor:
        if kept is None:
            raise ProblemError(f"{self} has neither values nor output: keep them with observe(values=True).")
        return kept

    def __repr__(self) -> str:
        return f"Kept(layer={self.layer}, module={self.module!r})"


def kept_in(folder: str | Path) -> list[Kept]:
    """The calls that `observe(..., to=folder)` kept, in order, in this process or another.

    Raises:
        ProblemError: there are none, or their mask or bias holds a function, which no file can.

    >>> from regard import Causal, attend
    >>> from regard.inspect import observe
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with TemporaryDirectory() as folder:
    ...     with observe(to=folder):
    ...         _ = attend(q, q, q, mask=Causal())
    ...     kept_in(folder)[0].weights.dense()
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    return [Kept(call.layer, call.module, call.parts) for call in read_folder(Path(folder))]


@contextmanager
def keeper(to: To) -> Generator[Memory | Folder]:
    """What keeps calls; files in a folder of our own are removed when the block ends."""
    device = _device(to)
    _check_there(device)
    if to is None or device is not None:
        yield Memory(device)
    elif to == DISK:
        with TemporaryDirectory(prefix="regard-") as own:
            yield Folder(Path(own))
    else:
        yield Folder(Path(str(to)))


def _device(to: To) -> torch.device | None:
    """The device of that name, if there is one: any other text is a folder."""
    if not isinstance(to, str):
        return to if isinstance(to, torch.device) else None
    try:
        return torch.device(to)
    except RuntimeError:
        return None


def _check_there(device: torch.device | None) -> None:
    """Raise `ProblemError` if this machine, or this torch, has no such device, or one that holds nothing."""
    try:
        there = device is None or torch.empty(1, device=device).device.type != "meta"
    except (RuntimeError, AssertionError, NotImplementedError):  # CUDA's absence is an AssertionError
        there = False
    if not there:
        raise ProblemError(
            f"to={str(device)!r}: torch has no such device here to keep calls on. Name one that there is ('cpu'), "
            f"'disk', or a folder; for a folder of that name pass Path({str(device)!r})."
        )
