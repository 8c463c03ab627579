"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only these import Triton.

`forward.py`, `backward.py` and `decode.py` have the kernels, and `scores.py` what they need; `tables.py` puts the
schedule into the memory of the device; `launch.py` cuts a call into programs and starts them, `few_rows.py` those of
decoding.
"""
