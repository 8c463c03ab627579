"""From a call to a plan: pose the problem, schedule the tiles, lower the problem. No attention is computed here.

```
request.py      the arguments of a call, and the key of its plan
checks.py       whether they make sense
pose.py         from a request to a problem and its operands; problem.py: a call without its tensors
schedule.py     which tiles are computed, and how
tiling.py       making a schedule; closed_form.py and few_rows.py: by arithmetic, where kept keys are intervals;
                few_pairs.py: of every pair, where there are few
lower.py        the problem in words that a backend knows
distance.py     biases by distance as one vector for each head
far_lse.py      where one number is too coarse for a log-sum-exp
```
"""
