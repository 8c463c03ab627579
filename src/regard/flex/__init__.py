"""FlexAttention's functions, with torch's signatures, on regard's kernels: on a CPU with gradients.

```
attention.py           `flex_attention`; check.py: the errors that torch raises
call.py                a call in regard's words: mask, bias, scale, softcap
trace.py               what a `mask_mod` or `score_mod` computes, as a term
recognise.py           terms as masks of regard; mod_mask.py: any `mask_mod` as a mask
score.py               a `score_mod` as scale, softcap and bias
every_pair.py          what needs the score of every pair
block_mask.py          `create_block_mask`; layout.py: which blocks a mask keeps
read_block_mask.py     a `BlockMask` as a mask
compiled.py            inside `torch.compile`
outside_derivatives.py inside `torch.func.grad` and the like
```
"""

from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from regard.flex.attention import flex_attention
from regard.flex.block_mask import create_block_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]
