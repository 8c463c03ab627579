"""How large the largest tensor is that torch makes."""

import sys

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Within the block, note the numbers in the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(made) if is_real(leaf)]
        self.numel = max([self.numel, *sizes])
        return made


def is_real(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


def small_tiles(monkeypatch):
    """Let weights pass in tiles of 1,024, wherever their size is set."""
    for name in [name for name in sys.modules if name.startswith("regard.inspect.")]:
        for size, value in {"TILE": 1024, "CHUNK": 16}.items():
            if isinstance(getattr(sys.modules[name], size, None), int):
                monkeypatch.setattr(sys.modules[name], size, value)
