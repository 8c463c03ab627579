"""A GPU that is pretended: tensors that say they are on `cuda`, and a record of what would wait for a GPU.

The elements are in the memory of the host, where Triton's interpreter and torch compute. Every function of torch that
Python calls passes through `PretendedGpu`: where torch would raise an error because tensors are on two devices, it
raises one, and it records what reads a tensor of the GPU on the host, or copies one to the GPU.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

READS = {
    "cpu", "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__",
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Functions whose result on the host depends on elements: the host waits for the GPU."""

ANYWHERE = {"copy_", "to", "type_as", "__set__", "__get__", "set_data", "_set_grad", "backward", "register_hook"}
"""Functions that take tensors of two devices."""

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]

_device_of = WeakIdKeyDictionary()
"""Where each tensor of a GPU pretends to be, also after the GPU is gone: caches keep some."""

HERE = Path(__file__).parents[1] / "src" / "regard"


class Event(NamedTuple):
    """What would make the host wait: "read" or "upload", the function of torch, and the line that calls it."""

    kind: str
    function: str
    where: str


class PretendedGpu(TorchFunctionMode):
    """See above; `events` has what happened."""

    def __init__(self, device: torch.device = CUDA) -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.is_backward = False

    def put(self, t: Tensor) -> Tensor:
        """The same tensor, from now on on the GPU."""
        _device_of[t] = self.device
        return t

    def put_module(self, module: nn.Module) -> Any:
        """The module with all parameters and buffers on the GPU."""
        for t in (*module.parameters(), *module.buffers()):
            self.put(t)
        return module

    def is_on_gpu(self, t: object) -> bool:
        # what the autograd engine makes itself, no function of Python returned
        unknown = self.device if self.is_backward else CPU
        return isinstance(t, Tensor) and _device_of.get(t, unknown) == self.device

    def backward(self, total: Tensor) -> None:
        """The backward pass of a sum on the GPU; `Tensor.backward` would leave its functions out of this mode."""
        self._run_backward((total,), (self.put(torch.ones_like(total)),), (), accumulate_grad=True)

    def _grad(
        self, outputs: Any, inputs: Any, *, grad_outputs: Any, allow_unused: bool, create_graph: bool, **others: Any
    ) -> list[Any]:
        """`torch.autograd.grad` of one graph, whose functions this mode sees as well."""
        assert not any(value for name, value in others.items() if name != "only_inputs"), others
        outputs, inputs = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (outputs, inputs))
        grads = [torch.ones_like(t) for t in outputs] if grad_outputs is None else grad_outputs
        grads = (grads,) if isinstance(grads, Tensor) else tuple(grads)
        with self:
            found = self._run_backward(
                outputs, tuple(map(self.put, grads)), inputs, create_graph=create_graph, accumulate_grad=False
            )
        assert allow_unused or all(grad is not None for grad in found)
        return [grad if grad is None else self.put(grad) for grad in found]

    def _run_backward(
        self,
        outputs: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        create_graph: bool = False,
        **accumulate: bool,
    ) -> Any:
        self.is_backward = True
        try:
            return _engine.run_backward(
                outputs, grads, create_graph, create_graph, inputs, allow_unreachable=True, **accumulate
            )
        finally:
            self.is_backward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (known := _PROPERTIES.get(func)) is not None:
            return known(self.device if self.is_on_gpu(args[0]) else CPU)
        kwargs = dict(kwargs or {})
        if func in _OF_THE_HOST:
            return func(*args, **kwargs)
        if func is torch.autograd.grad and any(map(self.is_on_gpu, tree_leaves(args[0]))):
            return self._grad(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [self.is_on_gpu(t) for t in tensors]
        args, kwargs, target = _without_device(name, args, kwargs)
        if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
            target, there = (self.device if self.is_on_gpu(args[1]) else CPU), there[:1]
        if any(there):
            self._check(func, name, tensors, there, args)
        if (name in READS and any(there)) or (target is not None and target.type == "cpu" and any(there)):
            self._record("read", name)
        on_gpu = any(there) if target is None else target.type == self.device.type
        if on_gpu and (name in ("tensor", "as_tensor") or (target is not None and there and not any(there))):
            self._record("upload", name)
        if name == "to" and target is not None and tensors and there[0] != on_gpu:
            kwargs["copy"] = True
        out = func(*args, **kwargs)
        if name == "cpu":
            return out.clone()
        if on_gpu and name not in READS - {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select"}:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    if self.device.type == "mps" and t.dtype == torch.float64:
                        raise TypeError(f"the MPS framework doesn't support float64: {name} at {_line()}")
                    self.put(t)
        elif self.is_backward and name not in READS:
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    _device_of[t] = CPU
        return out

    def _check(self, func: Any, name: str, tensors: list[Tensor], there: list[bool], args: tuple[Any, ...]) -> None:
        """Raise torch's error where tensors are on two devices; record masks and indices that wait."""
        if name in ("__getitem__", "__setitem__"):
            index = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
            if any(t.dtype == torch.bool for t in index) and name == "__getitem__":
                self._record("read", "__getitem__ by a mask")
            if any(t.ndim and not self.is_on_gpu(t) for t in index):
                self._record("upload", "__getitem__ by an index of the host")
            return
        others = [t for t, on_gpu in zip(tensors, there, strict=False) if not on_gpu and t.ndim]
        if others and name == "copy_":
            self._record("upload" if there[0] else "read", name)
        if others and name not in ANYWHERE:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {name} at {_line()}"
            )

    def _record(self, kind: str, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and "/triton/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:  # else Triton's interpreter copies
            self.events.append(Event(kind, name, _line()))


def _line() -> str:
    """The innermost line of regard, or of a model."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(HERE):
            return f"{path.relative_to(HERE)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "transformers" in path.parts and path.name != "generic.py":
            return f"transformers/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_PROPERTIES: dict[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda device: device,
    _getter("is_cpu"): lambda device: device.type == "cpu",
    _getter("is_cuda"): lambda device: device.type == "cuda",
    _getter("is_mps"): lambda device: device.type == "mps",
    _getter("is_xpu"): lambda device: device.type == "xpu",
}


_OF_THE_HOST: set[Any] = {
    *map(_getter, ("dtype", "is_leaf", "is_meta", "is_nested", "is_quantized", "is_sparse", "layout", "ndim",
                   "requires_grad", "shape")),
    Tensor.data_ptr, Tensor.dim, Tensor.element_size, Tensor.is_complex, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_neg, Tensor.numel, Tensor.size, Tensor.storage_offset, Tensor.stride,
    Tensor.untyped_storage,
}  # fmt: skip
"""What looks at no element and returns no tensor: most of what Triton's interpreter calls."""


def _without_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
    """The arguments with the CPU in place of a device, and that device; None without one."""
    if name == "cuda":
        return args[:1], {}, CUDA
    target = None
    if kwargs.get("device") is not None:
        target, kwargs = torch.device(kwargs["device"]), kwargs | {"device": CPU}
    elif name in ("to", "new_zeros", "new_full", "new_empty", "type"):
        placed = list(args)
        for i, x in enumerate(args[1:], 1):
            if isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] in ("cpu", "cuda", "mps", "xpu")):
                target, placed[i] = torch.device(x), CPU
        args = tuple(placed)
    return args, kwargs, target


class Launches:
    """A kernel that records what the host passes to it: all but the elements of tensors."""

    def __init__(self, kernel: Any, seen: list[object]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            known = [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in arguments]
            self.seen.append((grid, known, constants))
            self.kernel[grid](*arguments, **constants)

        return launch


@contextmanager
def pretended_gpu(kind: str = "cuda") -> Generator[PretendedGpu]:
    """A pretended GPU; Triton's interpreter runs the kernels of "cuda". On "mps" there is no float64."""
    properties = SimpleNamespace(
        name="pretended",
        total_memory=80 << 30,
        shared_memory_per_block_optin=227 << 10,
        multi_processor_count=2,
        major=9,
        minor=0,
    )
    with (
        patch("torch.cuda.device", lambda device: np.errstate(all="ignore")),
        patch("torch.cuda.is_current_stream_capturing", lambda: False),
        patch("torch.cuda.current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)),
        patch("torch.cuda.get_device_properties", lambda device: properties),
        patch("torch.accelerator.synchronize", lambda device: None),
        PretendedGpu(torch.device(kind, 0)) as gpu,
    ):
        yield gpu
