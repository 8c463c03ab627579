"""Arrays of other libraries as tensors, and back: NumPy, JAX and what else has `__dlpack__` or `__array__`.

Memory is shared where both sides can: an array in native byte order with positive strides is not copied on its way in,
nor is the output on its way back. bfloat16 of the package ml_dtypes, which is NumPy's and JAX's, is torch's bfloat16.
"""

import sys
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ProblemError


@runtime_checkable
class StandardArray(Protocol):
    """An array of the Python array API standard: JAX, CuPy, NumPy from 2.1 on."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """The module with the functions of such arrays."""


Array = NDArray[Any] | StandardArray
A = TypeVar("A", bound=Array)


def is_array(x: object) -> bool:
    """Whether it is an array of another library, and no tensor."""
    if isinstance(x, Tensor) or hasattr(x, "__torch_function__"):  # also a handle of a cache, or a Proxy of torch.fx
        return False
    return hasattr(x, "__dlpack__") or hasattr(x, "__array__")


def as_tensor(name: str, x: Any) -> Any:
    """An array as a tensor; what is no array as it is.

    Raises:
        ProblemError: an array without elements, as jax.jit traces, or of elements that torch does not have.
    """
    if not is_array(x):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ProblemError(
            f"{name} is a masked array, whose hidden elements attention would read: expected an array without a mask. "
            f"Give the hidden keys by `mask`, and {name}.filled(0) in its place."
        )
    try:
        if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
            return torch.from_dlpack(x)
        return _of_numpy(np.asarray(x))
    except Exception as error:
        raise ProblemError(f"{name} is {type(x).__name__}: {_reason(x, error)}") from error


def as_array_like(x: Any, out: Tensor) -> Any:
    """A tensor as an array of the kind of x: of NumPy where x is, or where its library has no `from_dlpack`."""
    if not isinstance(x, np.ndarray) and hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().from_dlpack(out)
    if out.dtype == torch.bfloat16:
        return out.view(torch.int16).numpy().view(sys.modules["ml_dtypes"].bfloat16)
    return out.cpu().numpy()


def _of_numpy(array: NDArray[Any]) -> Tensor:
    """A tensor on the array's memory, also where that is read-only, as attention does not write to it."""
    if array.dtype.name == "bfloat16":
        return _of_numpy(array.view(np.int16)).view(torch.bfloat16)
    if not array.dtype.isnative or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_dlpack(array)
    except BufferError:  # NumPy before 2.1 does not pass on read-only memory
        return torch.from_numpy(array.copy())


def _reason(x: Any, error: Exception) -> str:
    if "Tracer" in type(x).__name__:
        return (
            "jax is tracing, and the array has no elements yet. Call attend outside of jax.jit and jax.grad, or by "
            "jax.pure_callback(attend, jax.ShapeDtypeStruct(shape, dtype), q, k, v)."
        )
    dtype = cast(object, getattr(x, "dtype", None))
    return f"torch cannot read it ({error}). Its dtype is {dtype}: expected float64, float32, bfloat16 or float16."
