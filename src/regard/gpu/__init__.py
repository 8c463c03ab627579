"""Kernels for GPUs, in Triton, and what starts them: the GPU's counterpart of `native/`. Only these import Triton.

`forward.py`, `gradient_of_queries.py` and `gradient_of_keys.py` have the main kernels, and `span.py` and `merge.py`
those of decoding; `rows.py` and `far_rows.py` have kernels that run before the backward pass. `scores.py` and
`tokens.py` have device functions that they share, and `codes.py`, `pieces.py` and `codes_to_float.py` those that load
quantised keys and values. `tables.py` copies the schedule to the device. `launch.py` chooses block sizes and launches
the forward pass, `gradients.py` the backward pass, `few_rows.py` decoding, through `starts.py`; `repair.py` recomputes
tiles of torch's kernels that are not finite.
"""
