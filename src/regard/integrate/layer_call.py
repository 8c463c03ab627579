"""The call of a layer, which is that of all layers under one mask of a pass, with other elements.

A model's weights drive everything else out of the caches of the processor between two layers, so a call costs mainly
the memory that it reads: in a small model each check of Python takes 0.3 to 10 us, five times as long as in a loop of
its own. So the first layer's call is kept in the mask, and one function of C++ compares the later ones with it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor

from regard.attention import attend_not_ready
from regard.backend.contract import Bound
from regard.describe.mask import Mask, is_made_of
from regard.describe.mask_by_rule import Causal, KeyLengths, Window
from regard.dispatch import ready
from regard.plan.request import Request
from regard.torch_internals import guard_of

if TYPE_CHECKING:
    from regard.integrate.layer_mask import LayerMask


class KnownCall(NamedTuple):
    """A layer's call that was run.

    Attributes:
        is_like: whether three tensors are like q, k and v in all but their elements, in settings of the thread that
            are the same (`guard_of`).
        scale: of the call.
        softcap: of the call.
        run: what runs such calls.
        keys: their number.
        offset: of the call.
    """

    is_like: Callable[..., bool]
    scale: float | None
    softcap: float | None
    run: Bound
    keys: int
    offset: int


def run_layer(q: Tensor, k: Tensor, v: Tensor, mask: "LayerMask", scale: float | None, softcap: float | None) -> Tensor:
    """The output of a layer's call, [batch, queries, heads, v_dim]; it is known to the layers after it if it can be.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim].
        v: [batch, kv_heads, keys, v_dim].
    """
    key, out = ready.run(q, k, v, mask.mask, scale, softcap, mask.offset, None)
    if out is None:
        call = Request(q, k, v, mask.mask, scale=scale, softcap=softcap, offset=mask.offset)
        out = attend_not_ready(call, key)
    elif mask.known is None and _stays(key, mask.mask) and not (q.requires_grad or k.requires_grad or v.requires_grad):
        offset = cast(int, mask.offset)  # else the call is not ready
        is_like, run = guard_of(q, k, v), ready.bind(cast(ready.AnyKey, key), q, k, v, mask.mask, offset)
        if is_like is not None and run is not None:
            mask.known = KnownCall(is_like, scale, softcap, run, k.shape[2], offset)
    return out.transpose(1, 2).contiguous()


def _stays(key: ready.AnyKey | None, mask: Mask | None) -> bool:
    """Whether a ready call has a mask that nobody changes between two layers: its tensors, if any, were made here.

    A tensor of bools may be the model's own, which a hook may write to.
    """
    return type(key) is tuple or (
        key is not None and mask is not None and is_made_of(mask, (Causal, KeyLengths, Window))
    )
