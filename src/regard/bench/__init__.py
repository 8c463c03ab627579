"""How fast attention is on this machine, beside torch and beside the limit of the machine.

```
Case, dtype, threads  ->  measure  ->  Result
sizes, mask, bias                      time, share of the machine's limit, ratio to torch
```
"""
