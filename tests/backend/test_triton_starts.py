"""A kernel is looked up once for calls of the same forms, and started with the arguments of each."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from regard import Causal
from regard.plan.tiling import schedule

pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")


class Kernel:
    """A kernel that records how it is started: by name of its constants, or compiled by places."""

    arg_names = ("x", "y", "count", "SIZE", "FAST")

    def __init__(self) -> None:
        self.seen = list[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> "Compiled":
            self.seen.append(("looked up", grid, arguments, constants))
            return Compiled(self)

        return start


class Compiled:
    """What it was compiled to."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.seen.append(("compiled", grid, arguments))


def test_a_start_looks_its_kernel_up_once(monkeypatch: pytest.MonkeyPatch):
    from regard.gpu import starts

    monkeypatch.setattr(starts, "_is_kept", lambda *_: True)
    monkeypatch.setattr(starts, "started", lambda _: nullcontext())
    kernel = Kernel()
    start = starts.Start(kernel, 7, (5,), {"FAST": True, "SIZE": 16, "num_warps": 4}, torch.device("cuda", 0))
    for n in range(3):
        start(f"x{n}", f"y{n}")
    assert kernel.seen == [
        ("looked up", (7,), ("x0", "y0", 5), {"FAST": True, "SIZE": 16, "num_warps": 4}),
        ("compiled", (7, 1, 1), ("x1", "y1", 5, 16, True)),
        ("compiled", (7, 1, 1), ("x2", "y2", 5, 16, True)),
    ]


def test_starts_are_kept_with_the_schedule_and_the_forms_of_tensors():
    from regard.gpu.starts import Starts, form, kept

    tiles = schedule(Causal(), batch=1, heads=1, queries=40, keys=40, offset=0, tile=128)
    made = list[Starts]()

    def make() -> Starts:
        made.append(Starts((), len(made)))
        return made[-1]

    t = torch.zeros(1, 2, 40, 16)
    one = kept(tiles, ("forward", form(t)), make)
    assert kept(tiles, ("forward", form(t.clone())), make) is one
    others = t.bfloat16(), t.mT.contiguous().mT, t[1:], t.new_zeros(40 * 2 * 16 + 1)[1:].view_as(t), t.to("meta"), None
    assert len({id(kept(tiles, ("forward", form(x)), make)) for x in others}) == len(others)
    assert len(made) == 1 + len(others)
