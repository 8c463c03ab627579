"""How fast attention is on the machine at hand, beside torch's own and beside what the machine can do at all.

```
Case, dtype, threads  ->  measure  ->  Result
sizes and words                        time, share of the machine's limit, ratio to torch
```
"""
