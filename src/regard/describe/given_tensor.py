"""Tensors as the fields of descriptions take them: with elements that can be read one by one."""

import torch
from torch import Tensor

from regard.describe.tensors import is_without_data
from regard.errors import ProblemError


def given_tensor(given: object, what: str, expected: str, *, read: bool = False) -> Tensor:
    """The tensor, which is neither nested, sparse nor quantised.

    Args:
        what: how the message names it.
        expected: its types and sizes, in words.
        read: whether its elements are read at once, so that they must be there.

    Raises:
        ProblemError: it is none.

    >>> given_tensor([1, 2], "KeyLengths(lengths)", "integers [batch]")
    Traceback (most recent call last):
    regard.errors.ProblemError: KeyLengths(lengths) is list: expected a tensor, integers [batch].
    """
    if not isinstance(given, Tensor):
        raise ProblemError(f"{what} is {type(given).__name__}: expected a tensor, {expected}.")
    if given.is_nested:
        raise ProblemError(f"{what} is a nested tensor: expected {expected}; pad it (torch.nested.to_padded_tensor).")
    if given.layout is not torch.strided:
        raise ProblemError(f"{what} is {given.layout} {list(given.shape)}: expected {expected}; say t.to_dense().")
    if given.is_quantized:
        raise ProblemError(f"{what} is {given.dtype} {list(given.shape)}: expected {expected}; say t.dequantize().")
    if read and is_without_data(given):
        raise ProblemError(f"{what} is on {given.device}, without data: expected {expected}, with elements to read.")
    return given
