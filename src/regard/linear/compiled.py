"""Linear attention by the compiled library (native/linear.h): on the CPU, with every rule.

One pass maps features, multiplies chunks and divides rows, and no intermediate tensor leaves the cache. The forms in
PyTorch (`sums.py`, `gated.py`, `delta.py`) remain for gradients, tracing, float64, other devices and `Taylor`.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard import native, native_calls
from regard.describe.feature import Elu1, Favor, Relu
from regard.linear import delta, gated, sums
from regard.linear.call import LinearCall
from regard.linear.finite import rule_tensors
from regard.linear.segment import Carry
from regard.plan.checks import can_be_read, has_own_operators
from regard.torch_internals import dispatch_modes, is_lazy_zero

CHUNK = 64
"""The most tokens of a chunk."""

FLOPS = 4 << 30
"""FLOPs of one call of the library, some 50 ms on one core: Python handles its signals in between."""

IDENTITY, ELU1, RELU, FAVOR = range(4)
"""regard_feature of native/abi.h."""

AT = {name: number for number, name in enumerate(native_calls.LINEAR)}


class Found(NamedTuple):
    """The result, and whether all of q, k and v are finite; if not, the rest is of no use."""

    out: Tensor
    carry: Carry
    finite: bool


def fits(call: LinearCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library computes this call, with any number of tokens."""
    tensors = (q, k, v)
    return (
        call.in_place
        and (call.any_form or call.run in (sums.chunked, gated.chunked, delta.chunked))
        and (type(call.features) in (type(None), Favor) or (type(call.features) in (Elu1, Relu) and call.scale is None))
        and q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.dtype == v.dtype == q.dtype
        and all(t.shape[0] * t.shape[1] * t.shape[3] for t in tensors)
        and not any(_is_elsewhere(t) for t in (*tensors, *rule_tensors(call)) if t is not None)
        and not dispatch_modes()
        and can_be_read(*tensors)
        and _entry() is not None
    )


def _is_elsewhere(t: Tensor) -> bool:
    """Whether its elements may not be at its address."""
    return t.is_neg() or is_lazy_zero(t) or has_own_operators(t)


@cache
def _entry() -> native_calls.Entry | None:
    """The function of the library; None without the library, or if it was compiled before it had the function."""
    try:
        return native_calls.Entry("regard_attend_linear", native_calls.LINEAR) if native.available() else None
    except AttributeError:
        return None


@cache
def _chosen() -> int:
    return native.isas().index(native.isa())


def run(
    call: LinearCall, q: Tensor | None, k: Tensor | None, v: Tensor | None, carry: Carry, isa: int | None = None
) -> Found:
    """The rows and the last state of tensors that `fits`, causal, with a query for each key.

    Args:
        q: None for no rows; `out` has none then.
        k, v: None for rows of the state alone, without its decay; else a key for each token of the rule's tensors.
        isa: an index into `native.isas()`, or -1 for the plain loops; None for the one in use.
    """
    entry, shown = _entry(), k if q is None else q
    assert entry is not None
    assert shown is not None
    state = carry.matrix.clone(memory_format=torch.contiguous_format)
    top = None if carry.top is None else carry.top.clone(memory_format=torch.contiguous_format)
    out = shown.new_empty(*shown.shape[:2], 0 if q is None else q.shape[2], state.shape[3] - call.normalise)
    fade = None if call.log_gamma is None or k is None else call.log_gamma.reshape(-1).contiguous()
    values = _values(call, shown, state, fade) | {"isa": _chosen() if isa is None else isa}
    vectors = _vectors(call.features) if isinstance(call.features, Favor) else None
    values |= {"top": 0 if top is None else top.data_ptr(), "vectors": 0 if vectors is None else vectors.ctypes.data}
    gate, beta, decay = (None, None, None) if k is None else (call.log_gate, call.beta, call.log_decay)
    values["log_gate_feature"] = int(gate is not None and gate.shape[3] > 1)
    given = {"q": q, "k": k, "v": v, "out": None if q is None else out, "log_gate": gate}
    given |= {name: None if t is None else t[..., None] for name, t in (("beta", beta), ("log_fade", decay))}
    tensors = {name: t if t.stride(3) == 1 else t.contiguous() for name, t in given.items() if t is not None}
    size = _tokens_of_a_call(call, shown, state)
    for start in range(0, shown.shape[2], size):
        stop = min(start + size, shown.shape[2])
        places = _places({name: t[:, :, start:stop] for name, t in tensors.items()})
        struct = entry.opened(entry.packed(values | places | {"tokens": stop - start}))
        memory = torch.empty(entry.workspace(struct) + 64, dtype=torch.uint8, device="cpu")
        struct[AT["workspace"]] = -(-memory.data_ptr() // 64) * 64
        struct[AT["workspace_bytes"]] = memory.nbytes - 64
        entry(struct)
        if struct[AT["spoilt"]]:
            return Found(out, carry, False)
    return Found(out, Carry(state, top), True)


def _values(call: LinearCall, shown: Tensor, state: Tensor, fade: Tensor | None) -> dict[str, float]:
    """The fields of regard_linear that do not depend on the tokens."""
    feature, epsilon, scale = IDENTITY, 0.0, 1.0
    if isinstance(call.features, Relu):
        feature, epsilon = RELU, call.features.epsilon
    elif isinstance(call.features, Favor):
        feature, scale = FAVOR, shown.shape[3] ** -0.5
    elif call.features is not None:
        feature = ELU1
    return {
        "batch": shown.shape[0],
        "heads": shown.shape[1],
        "kv_heads": state.shape[1],
        "qk_dim": shown.shape[3],
        "v_dim": state.shape[3] - call.normalise,
        "state": state.data_ptr(),
        "dtype": native_calls.DTYPES[shown.dtype],
        "threads": torch.get_num_threads(),
        "chunk": min(call.chunk, CHUNK),
        "feature": feature,
        "features": state.shape[2],
        "normalise": int(call.normalise),
        "scale": scale if call.scale is None else call.scale,
        "epsilon": epsilon,
        "log_decay": 0 if fade is None else fade.data_ptr(),
        "log_decay_head": 0 if fade is None or fade.numel() == 1 else 1,
    }


@lru_cache(16)  # as numpy's: a tensor would belong to the mode of its first use
def _vectors(favor: Favor) -> NDArray[np.float32]:
    """The random vectors in blocks of 64, [blocks][dim][64], zeros after the last."""
    padded = np.zeros((-(-favor.features // CHUNK) * CHUNK, favor.dim), np.float32)
    padded[: favor.features] = favor.vectors().numpy()
    return np.ascontiguousarray(padded.reshape(-1, CHUNK, favor.dim).transpose(0, 2, 1))


def _places(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The addresses and strides of these tensors."""
    found: dict[str, int] = {}
    for name, t in tensors.items():
        fields = zip(("data", "batch", "head", "token"), (t.data_ptr(), *t.stride()[:3]), strict=True)
        found |= {f"{name}.{field}": value for field, value in fields}
    return found


def _tokens_of_a_call(call: LinearCall, shown: Tensor, state: Tensor) -> int:
    """Whole chunks of up to `FLOPS` FLOPs, at least one."""
    chunk, (batch, kv_heads, features, width) = min(call.chunk, CHUNK), state.shape
    token = 2 * batch * (shown.shape[1] + kv_heads) * (features * width + chunk * (features + width))
    return max(1, FLOPS // token // chunk) * chunk
