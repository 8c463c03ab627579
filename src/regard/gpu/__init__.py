"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only these import Triton.

`forward.py`, `backward.py` and `decode.py` have the main kernels; `rows.py` and `far_rows.py` have kernels that run
before the backward pass; `scores.py` and `tokens.py` have device functions that they share. `tables.py` copies the
schedule to the device. `launch.py` chooses block sizes and launches the forward pass, `gradients.py` the backward pass,
`few_rows.py` decoding, through `starts.py`; `repair.py` recomputes tiles of torch's kernels that are not finite.
"""
