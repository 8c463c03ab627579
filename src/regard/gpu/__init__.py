"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only these import Triton.

`forward.py`, `backward.py` and `decode.py` have the kernels, `rows.py` and `far_rows.py` those that prepare rows for
gradients, `scores.py` and `tokens.py` what they need; `tables.py` puts the schedule into the memory of the device;
`launch.py` cuts a call into programs, `starts.py` starts them, `gradients.py` and `few_rows.py` do it for gradients and
for decoding; `repair.py` has rows computed again that another kernel spoiled.
"""
