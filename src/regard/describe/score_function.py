"""Any function of the score and its positions, in the place of a bias: `scores` becomes `function(scores, b, h, q, k)`.

Only the backend `reference` computes it: others know what may be added to a score, not what a function does with it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Positions, as_tensors
from regard.describe.spec import spec
from regard.describe.term import Term, evaluate


@spec
class ScoreFunction(Bias):
    """A term of the score and its positions, or a function that is called with tensors that broadcast.

    Args:
        function: a term, or `function(scores, b, h, q, k)`.
        captured: the tensors that a function reads; gradients flow to them. A term has its own.
    """

    function: Term | Callable[..., Tensor]
    captured: tuple[Tensor, ...] = ()

    def changed(self, scores: Tensor, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        """The scores after the function, in their type and shape."""
        positions = as_tensors(b, h, q, k)
        if isinstance(self.function, Term):
            found = evaluate(self.function, {"score": scores, **dict(zip("bhqk", positions, strict=True))})
        else:
            found = self.function(scores, *positions)
        return found.to(scores.dtype).expand_as(scores)

    def value(self, b: Positions, h: Positions, q: Positions, k: Positions) -> Tensor:
        raise NotImplementedError("a ScoreFunction is no value that is added: see `changed`")

    def widened(self, dtype: torch.dtype) -> Bias:
        return self

    def tensors(self) -> list[Tensor]:
        return self.function.tensors() if isinstance(self.function, Term) else list(self.captured)

    @classmethod
    def written(cls, parts: tuple[Any, ...]) -> str:
        return f"ScoreFunction({parts[0]})"
