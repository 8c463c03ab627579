"""Linear attention by the compiled library (native/linear.h): a causal call without a rule or with `Decay`, on the CPU.

One pass maps features, multiplies chunks and divides rows, and no intermediate tensor leaves the cache. The forms in
PyTorch (`sums.py`) remain for gradients, tracing, float64, other devices and other features.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard import native
from regard.describe.feature import Elu1, Relu
from regard.linear import sums
from regard.linear.call import LinearCall
from regard.linear.rule import Decay
from regard.linear.segment import Carry
from regard.plan.checks import can_be_read, has_own_operators
from regard.torch_internals import dispatch_modes

CHUNK = 64
"""The most tokens of a chunk."""

FLOPS = 4 << 30
"""FLOPs of one call of the library, some 50 ms on one core: Python handles its signals in between."""

IDENTITY, ELU1, RELU = range(3)
"""regard_feature of native/abi.h."""

AT = {name: number for number, name in enumerate(native.LINEAR)}


class Found(NamedTuple):
    """The result, and whether all of q, k and v are finite; if not, the rest is of no use."""

    out: Tensor
    carry: Carry
    finite: bool


def fits(call: LinearCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library computes this call."""
    tensors = (q, k, v)
    return (
        call.in_place
        and (call.any_form or call.run is sums.chunked)
        and (call.rule is None or isinstance(call.rule, Decay))
        and call.causal
        and q.shape[2] == k.shape[2]
        and (call.features is None or (type(call.features) in (Elu1, Relu) and call.scale is None))
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.dtype == v.dtype == q.dtype
        and all(t.numel() and not t.is_neg() and not has_own_operators(t) for t in tensors)
        and not dispatch_modes()
        and can_be_read(*tensors)
        and _entry() is not None
    )


@cache
def _entry() -> native.Entry | None:
    """The function of the library; None without the library, or if it was compiled before it had the function."""
    try:
        return native.Entry("regard_attend_linear", native.LINEAR) if native.available() else None
    except AttributeError:
        return None


@cache
def _chosen() -> int:
    return native.isas().index(native.isa())


def run(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, carry: Carry, isa: int | None = None) -> Found:
    """The rows and the last state of a call that `fits`.

    Args:
        isa: an index into `native.isas()`, or -1 for the plain loops; None for the one in use.
    """
    entry = _entry()
    assert entry is not None
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    state = carry.matrix.clone(memory_format=torch.contiguous_format)
    fade = None if call.log_gamma is None else call.log_gamma.reshape(-1).contiguous()
    values = _values(call, q, k, v, fade) | {"isa": _chosen() if isa is None else isa, "state": state.data_ptr()}
    size = _tokens_of_a_call(call, q, k, v)
    for start in range(0, q.shape[2], size):
        stop = min(start + size, q.shape[2])
        pieces = {name: t[:, :, start:stop] for name, t in (("q", q), ("k", k), ("v", v), ("out", out))}
        struct = entry.opened(entry.packed(values | {"tokens": stop - start} | _places(pieces)))
        memory = torch.empty(entry.workspace(struct) + 64, dtype=torch.uint8)
        struct[AT["workspace"]] = -(-memory.data_ptr() // 64) * 64
        struct[AT["workspace_bytes"]] = memory.nbytes - 64
        entry(struct)
        if struct[AT["spoilt"]]:
            return Found(out, carry, False)
    return Found(out, Carry(state, None), True)


def _values(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, fade: Tensor | None) -> dict[str, float]:
    """The fields of regard_linear that do not depend on the tokens."""
    feature, epsilon = IDENTITY, 0.0
    if isinstance(call.features, Relu):
        feature, epsilon = RELU, call.features.epsilon
    elif call.features is not None:
        feature = ELU1
    sizes = {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "qk_dim": q.shape[3], "v_dim": v.shape[3],
    }  # fmt: skip
    return {
        **sizes,
        "dtype": native.DTYPES[q.dtype],
        "threads": torch.get_num_threads(),
        "chunk": min(call.chunk, CHUNK),
        "feature": feature,
        "normalise": int(call.normalise),
        "scale": 1.0 if call.scale is None or call.features is not None else call.scale,
        "epsilon": epsilon,
        "log_decay": 0 if fade is None else fade.data_ptr(),
        "log_decay_head": 0 if fade is None or fade.numel() == 1 else 1,
    }


def _places(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The addresses and strides of these tensors."""
    found: dict[str, int] = {}
    for name, t in tensors.items():
        fields = zip(("data", "batch", "head", "token"), (t.data_ptr(), *t.stride()[:3]), strict=True)
        found |= {f"{name}.{field}": value for field, value in fields}
    return found


def _tokens_of_a_call(call: LinearCall, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Whole chunks of up to `FLOPS` FLOPs, at least one."""
    chunk, (features, width) = min(call.chunk, CHUNK), (k.shape[3], v.shape[3])
    token = 2 * q.shape[0] * (q.shape[1] + k.shape[1]) * (features * width + chunk * (features + width))
    return max(1, FLOPS // token // chunk) * chunk
