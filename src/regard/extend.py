"""What you need to write a mask, a bias, a backend or an eviction policy of your own: docs/extending.md shows each.

- `Mask`, `Bias`: abstract; subclasses are made with `@spec`. `check_mask` finds methods that contradict `keep`.
- `Backend`: what computes attention, to be subclassed; `backend=` takes an object of it, or its name after
  `register_backend`. It compiles a `Kernel` from a `Problem` and a `Schedule`, which makes a `State` of `Operands`;
  a `Lowering`, such as `gather`, `prepare_score` and `pack`, simplifies a problem before.
- `Eviction` and `EvictionState`: which tokens a KV cache evicts, and what a policy observes of
  them; `Store` has the tokens.
"""

from regard.backend.contract import Backend, Kernel, ResumableKernel
from regard.cache.evict import Eviction, EvictionState
from regard.cache.store import Store
from regard.describe.bias import Bias
from regard.describe.check_mask import check_mask
from regard.describe.interval import Interval
from regard.describe.mask import CallSizes, Mask, Rectangles
from regard.describe.spec import spec
from regard.dispatch.choose import register_backend
from regard.plan.lower import Lowering, Step, gather, pack, prepare_score
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State

__all__ = [
    "Backend",
    "Bias",
    "CallSizes",
    "Eviction",
    "EvictionState",
    "Interval",
    "Kernel",
    "Lowering",
    "Mask",
    "Operands",
    "Problem",
    "Rectangles",
    "ResumableKernel",
    "Schedule",
    "State",
    "Step",
    "Store",
    "check_mask",
    "gather",
    "pack",
    "prepare_score",
    "register_backend",
    "spec",
]
