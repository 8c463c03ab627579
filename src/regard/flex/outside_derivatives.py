"""Masks inside `torch.func.grad`, `jvp` and other derivatives: read as outside of them, for a mask has no derivative.

Inside, every operator returns a wrapper of its result, and the function of a mask and what records its operators would
see different tensors.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from regard.describe.outside_transforms import outside_transforms
from regard.errors import RefusalError
from regard.torch_internals import in_func_derivative


@contextmanager
def outside_derivatives() -> Generator[None]:
    """A context in which the `mask_mod` of a `BlockMask` is read.

    Raises:
        RefusalError: it reads a tensor that `torch.vmap` maps over, around the derivative.
    """
    if not in_func_derivative():
        yield
        return
    with outside_transforms(partial(mapped_mask, ", inside of a derivative")):
        yield


def mapped_mask(where: str = "") -> RefusalError:
    """The error for a `mask_mod` that reads a tensor which `torch.vmap` maps over."""
    return RefusalError(
        f"a mask_mod reads a tensor that torch.vmap maps over{where}: a mask is read once for all that vmap maps over. "
        "Make what it reads outside of vmap, and what vmap would map over batch rows."
    )
