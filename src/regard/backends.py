"""Backends: what computes attention, and how to write one of your own.

A backend subclasses `Backend`, says what it refuses, and compiles a kernel: a function from the operands of a call to
its `State`. An object of it goes where the name of a backend goes. It runs or raises `RefusalError` with its reasons;
no other backend takes its place. This one is whole:

>>> import torch
>>> from regard import Causal, State, attend, explain
>>> from regard.backends import Backend, Kernel, Operands, Problem, Schedule
>>> class Plain(Backend):
...     name = "plain"
...
...     def refusals(self, problem: Problem) -> list[str]:
...         reasons = {
...             "it has no bias": problem.bias is not None,
...             "it has no softcap": problem.softcap is not None,
...             "it has no sink": problem.sink,
...             "it has no dropout": problem.dropout > 0,
...             "it shares no key heads": problem.heads != problem.kv_heads,
...         }
...         return [reason for reason, applies in reasons.items() if applies]
...
...     def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
...         keep = schedule.keep()  # [batch or 1, heads or 1, queries, keys]
...
...         def kernel(operands: Operands) -> State:
...             scores = problem.scale * operands.q @ operands.k.mT
...             scores = scores.masked_fill(~keep, -torch.inf)
...             return State(scores.softmax(-1).nan_to_num() @ operands.v, scores.logsumexp(-1))
...
...         return kernel

>>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
>>> plain = Plain()
>>> torch.allclose(attend(q, k, v, mask=Causal(), backend=plain), attend(q, k, v, mask=Causal()), atol=1e-6)
True
>>> explain(q, k, v, backend=plain).backend
'plain'
>>> attend(q, k, v, softcap=5.0, backend=plain)
Traceback (most recent call last):
regard.errors.RefusalError: The backend 'plain' cannot run this.
  q [1, 2, 5, 8] · kv [1, 2, 5, 8|8] float32 on cpu, mask None, bias None, softcap 5.0
  plain: it has no softcap
  Leave backend=None to let regard choose.

`schedule.runs(t)` and `schedule.patches(t)` list the tiles of query tile t, so that a backend skips what is hidden.
`Problem` has all that a backend may refuse or depend on, `Operands` all that differs from call to call. Under
`torch.compile` a backend is known by its name: `register` it first. A class should be stateless and hashable, for
example a frozen dataclass: plans are cached by the backend.
"""

from regard.backend.contract import Backend, Kernel, ResumableKernel
from regard.dispatch.choose import register
from regard.plan.lower import Lowering, Step, add_biases, gather, gather_where_needed, pack, prepare_score, turn
from regard.plan.problem import Operands, Problem, Storage
from regard.plan.schedule import Patch, Schedule, Span
from regard.state import State

__all__ = [
    "Backend",
    "Kernel",
    "Lowering",
    "Operands",
    "Patch",
    "Problem",
    "ResumableKernel",
    "Schedule",
    "Span",
    "State",
    "Step",
    "Storage",
    "add_biases",
    "gather",
    "gather_where_needed",
    "pack",
    "prepare_score",
    "register",
    "turn",
]
