"""How fast attention is on this machine, beside torch and beside the limit of the machine.

```
Case, dtype, threads  ->  measure  ->  Result
sizes, mask, bias                      time, share of the machine's limit, ratio to torch

case.py          `Case`: the sizes, mask and bias of a call
measure.py       `measure` and `Result`
rounds.py        rounds, in which everything is measured once, and their medians
torch_calls.py   the same call by torch's function, in every equivalent form
limits.py        the limits of the processor: products in registers, reads of memory
linear_rates.py  what torch's matrix products reach
this_machine.py  the machine at hand, for `regard cost --machine this`
this_gpu.py      its GPU
```
"""
