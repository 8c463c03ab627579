"""The backends: the only place where each is named. `contract.py` says what a backend is.

```
contract.py    `Backend`: a name, what it refuses, and `compile`, which makes a kernel
definition.py  the formula that every backend computes, over all pairs

reference.py, reference_products.py   every call, tile by tile, in torch
sdpa.py, sdpa_cuda.py                 torch's fused kernels: on the CPU, and on CUDA
flex.py, flex_blocks.py               FlexAttention, and the schedule as it reads it
triton.py                             our kernels for GPUs, which are in `gpu/`
native.py                             our kernels for the CPU, which are in `native/` of the repository
  native_inputs.py                    the operands as the library reads them
  native_parts.py                     stored keys and values as the library reads them
  native_tiles.py                     the tiles of a call: as intervals, or as lists
  native_repeated.py                  repeated calls, from tensors straight into the library's struct
  native_gradients.py                 gradients: what autograd knows, and the library's call
  native_far_rows.py                  gradients of rows with a log-sum-exp far from 0
```
"""
