"""The check of tensors in descriptions: their elements must be readable one by one."""

import torch
from torch import Tensor

from regard.describe.tensors import is_without_data
from regard.describe.traced import refuse_proxy
from regard.errors import ProblemError
from regard.torch_internals import is_mapped


def require_tensor(value: object, what: str, expected: str, *, read: bool = False) -> Tensor:
    """The tensor, unless it is nested, sparse or quantised.

    Args:
        what: its name in the message.
        expected: text of the expected types and sizes.
        read: whether the caller reads elements, so a tensor without data, or that torch traces or maps over, is
            refused.

    Raises:
        ProblemError: the argument is not such a tensor.
        RefusalError: it is a Proxy of `torch.fx`.

    >>> require_tensor([1, 2], "KeyLengths(lengths)", "integers [batch]")
    Traceback (most recent call last):
    regard.errors.ProblemError: KeyLengths(lengths) is list: expected a tensor, integers [batch].
    """
    if not isinstance(value, Tensor):
        refuse_proxy(what, value)
        raise ProblemError(f"{what} is {type(value).__name__}: expected a tensor, {expected}.")
    if value.is_nested:
        raise ProblemError(f"{what} is a nested tensor: expected {expected}; pad it (torch.nested.to_padded_tensor).")
    if value.layout is not torch.strided:
        raise ProblemError(f"{what} is {value.layout} {list(value.shape)}: expected {expected}; use t.to_dense().")
    if value.is_quantized:
        raise ProblemError(f"{what} is {value.dtype} {list(value.shape)}: expected {expected}; use t.dequantize().")
    if read and (torch.compiler.is_dynamo_compiling() or is_without_data(value)):
        if torch.compiler.is_compiling():
            raise ProblemError(
                f"{what} is a tensor, whose elements cannot be read while torch.compile or torch.export traces: "
                "give a list, or create the mask outside of the traced function."
            )
        raise ProblemError(f"{what} is on {value.device}, without data: expected {expected}, with elements to read.")
    if read and is_mapped(value):
        raise ProblemError(f"{what} is mapped over by vmap: expected {expected}, the same for all.")
    return value
