"""`bind` of a user's mask or bias: what it returns is what a call has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, ProblemError, attend, draw, explain
from regard.describe.mask import Varying
from regard.extend import Bias, CallSizes, Mask, check_mask, spec
from regard.parallel import Layout
from regard.scores import Score, SoftDict


def _checks(_: CallSizes) -> Any:
    """It may raise an error, and then forgets to return a spec."""


@spec
class Odd(Mask):
    """Every second key."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return k % 2 == 1

    def bind(self, sizes: CallSizes) -> Any:
        return _checks(sizes)


@spec
class Far(Bias):
    """More for keys that are further away."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (q - k).abs()

    def bind(self, sizes: CallSizes) -> Any:
        return _checks(sizes)


@spec
class Near(Score):
    """Minus the distance."""

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q - k).norm(dim=-1)

    def bind(self, heads: int, kv_heads: int) -> Any:
        """Another one that forgets to return a spec."""


Q = torch.randn(1, 2, 6, 8)
CALLS = {
    "a mask": lambda: attend(Q, Q, Q, mask=Odd()),
    "a mask of the reference": lambda: attend(Q, Q, Q, mask=Odd(), backend="reference"),
    "a mask beside another": lambda: attend(Q, Q, Q, mask=Causal() & Odd()),
    "a negated mask": lambda: attend(Q, Q, Q, mask=~Odd()),
    "a mask with an offset by row": lambda: attend(Q, Q, Q, mask=Odd(), offset=torch.tensor([0])),
    "a bias": lambda: attend(Q, Q, Q, bias=Far()),
    "two biases": lambda: attend(Q, Q, Q, bias=Far() + Far()),
    "explain": lambda: explain(Q, Q, Q, mask=Odd()),
    "draw": lambda: draw(Odd(), 3, 3),
    "a layout of ranks": lambda: Layout.balanced(256, 2, Odd()),
    "a mask that differs by row": lambda: draw(Varying(Odd(), 2, 1), 3, 3),
    "a soft dictionary": lambda: SoftDict(Q[0, 0], Q[0, 0], score=Near()).weights(Q[0, 0]),
    "check_mask": lambda: check_mask(Odd(), queries=8, keys=8),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bind_that_returns_nothing_is_refused(call: Any):
    with pytest.raises(ProblemError, match=r"bind of (Odd|Far|Near) returned None: expected a spec"):
        call()


def test_it_is_refused_in_a_graph():
    torch.compiler.reset()
    compiled = torch.compile(lambda q: attend(q, q, q, mask=Odd()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="bind of Odd returned None"):
        compiled(Q)
