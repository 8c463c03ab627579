"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only this room imports Triton.

`forward.py` and `backward.py` have the kernels, and `scores.py` what both need; `tables.py` puts the schedule into the
memory of the device; `launch.py` cuts a call into programs and starts them.
"""
