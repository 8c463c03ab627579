"""What runs a call: the plan cache, the choice of a backend, and the operator that torch traces.

```
choose.py         `Plan`, and the choice of a backend
cuda_order.py     the order in which backends are tried on CUDA: cuda_order.toml
plan_cache.py     from the arguments of a repeated call to its plan
ready.py          from a key of them straight to the call of the library
ready_tensors.py  the same where a bias, a sink or the mask has tensors, or rows have different lengths
execute.py        from a plan to the state
step.py           a step of decoding whose position is on the GPU
operator.py       the operator `regard::attend`, for what torch traces
traced_call.py    a call of `attend` as a call of that operator
onnx_form.py      a call in operators of ONNX
```
"""
