"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only these import Triton.

The kernels are in `forward.py` (forward pass), `gradient_of_queries.py` and `gradient_of_keys.py` (backward pass),
`rows.py` and `far_rows.py` (before the backward pass), `span.py` and `merge.py` (decoding), and `sweep.py` (statistics
of all weights, which `inspect.py` starts). Device functions that several kernels call are in `scores.py` and
`tokens.py`; device functions that load quantised keys and values are in `codes.py`, `pieces.py` and
`codes_to_float.py`. `call.py` has a call as all of them take it, `totals.py` its log-sum-exp, and `tables.py` copies
the schedule to the device. `launch.py` chooses block sizes and launches the forward pass, `gradients.py` the backward
pass, `few_rows.py` decoding, through `starts.py`; `repair.py` recomputes tiles of torch's kernels that are not finite.
"""
