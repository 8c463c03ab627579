"""What torch's kernels computed, computed again where something in it is not finite.

They hide a pair by a weight of 0, and 0 * NaN is NaN: what a hidden NaN or inf reaches is itself not finite. So the
kernels of both passes read the results, and programs whose rows are all finite go on at once; rows that see NaN or inf
are computed twice. Nothing is read on the host, and a call without NaN reads its results once.
"""

from torch import Tensor

from regard.gpu.call import Call, Inputs
from regard.gpu.gradients import of_keys, of_queries, prepared
from regard.gpu.launch import computed_in, run
from regard.state import State


def repair(call: Call, i: Inputs, found: State) -> None:
    """Compute the rows of the state in place in which something is not finite; its lse is contiguous."""
    out = _computed(found.out)
    run(call, i, (out, found.lse))
    _written(out, found.out)


def repair_gradients(call: Call, i: Inputs, state: State, dout: Tensor, found: tuple[Tensor | None, ...]) -> None:
    """Compute the rows of the gradients of q, k and v in place in which something is not finite; None: not wanted.

    Args:
        state: of the call, repaired; lse contiguous.
        dout: the gradient of its output; the channels of a token are contiguous in memory.
    """
    dq, dk, dv = (None if t is None else _computed(t) for t in found)
    rows = prepared(state.out, dout, state.lse, call.schedule.tile)
    if dq is not None:
        of_queries(call, i, rows, distance_wanted=False, bias_wanted=False, found=dq)
    of_keys(call, i, rows, dk is not None, dv is not None, found=(dk, dv))
    for of_kernel, of_torch in zip((dq, dk, dv), found, strict=True):
        if of_kernel is not None and of_torch is not None:
            _written(of_kernel, of_torch)


def _computed(t: Tensor) -> Tensor:
    """The results as the kernels write them: other tensors under the interpreter alone (`computed_in`)."""
    return t.to(computed_in(t))


def _written(t: Tensor, into: Tensor) -> None:
    if t is not into:
        into.copy_(t)
