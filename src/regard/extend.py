"""What you need to write a mask, a bias, a backend or an eviction policy of your own: docs/extending.md shows each.

- `Mask`, `Bias`: abstract; subclasses are made with `@spec`. `check_mask` finds methods that contradict `keep`.
- `Backend`: the protocol of what computes attention; `Problem`, `Operands`, `Schedule`, `State` are what it gets and
  gives.
- `Eviction` and `Tally`: which tokens a KV cache drops, and what a policy remembers of them; `Store` has the tokens.
"""

from regard.backend.contract import Backend, Ready
from regard.cache.evict import Eviction, Tally
from regard.cache.store import Store
from regard.describe.bias import Bias
from regard.describe.check_mask import check_mask
from regard.describe.interval import Interval
from regard.describe.mask import CallSizes, Mask, Rectangles
from regard.describe.spec import spec
from regard.plan.problem import Operands, Problem
from regard.plan.schedule import Schedule
from regard.state import State

__all__ = [
    "Backend",
    "Bias",
    "CallSizes",
    "Eviction",
    "Interval",
    "Mask",
    "Operands",
    "Problem",
    "Ready",
    "Rectangles",
    "Schedule",
    "State",
    "Store",
    "Tally",
    "check_mask",
    "spec",
]
