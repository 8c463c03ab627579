"""A survey of a model, from tokens to a report of plain values.

```
survey.py     `survey`; measure.py: `measure`, for some measures without a report
model.py      the model: its sizes, running and restoring it; prompt.py: its text
selection.py  which measures, layers and heads
inputs.py     what measures are computed from; layer.py: the results of a layer
kinds.py      the kind of a head; other_texts.py: how sure it is
sinks.py      sinks of the whole model; ablation.py: the loss without each head
closeup.py    all weights of one head in O(n) bytes
run.py        time, machine and versions; report.py: the report
```
"""
