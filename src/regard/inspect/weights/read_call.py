"""A call of attention as it is read afterwards: its tensors and words, which pairs there are, and their scores.

This is what holds before the softmax. `Weights` is this and what the softmax makes of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from regard.attention import Call
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Dot
from regard.errors import ProblemError
from regard.inspect.weights.index import index_of
from regard.inspect.weights.some_heads import bias_of_heads, chosen_heads, key_heads, mask_of_heads
from regard.inspect.weights.stages import Stage, check_stage, of_rectangle


@dataclass(frozen=True, eq=False)
class ReadCall:
    """The tensors and words of a call; abstract, see `Weights`, which says what each field is."""

    q: Tensor
    k: Tensor
    lse: Tensor
    mask: Mask | None = None
    bias: Bias | None = None
    scale: float = 1.0
    softcap: float | None = None
    sink: Tensor | None = None
    offset: int = 0
    sequence: int = 0

    @classmethod
    def of(cls, call: Call) -> Self:
        """The weights of a `regard.attention.Call`, such as `observe_calls` and `observe` hand out, without gradients.

        Of a call of `attend_state`, which knows a part of the keys, they are the shares within that part. Of scores
        that are dot products of prepared tokens (`Cosine`, `Bilinear`), q and k are the prepared ones.

        Raises:
            ProblemError: the call scores pairs by what is no dot product.
        """
        q, k, score = call.q.detach(), call.k.detach(), call.score
        if score is not None and not isinstance(score, Dot):
            with torch.no_grad():
                q, k, score = score.prepare(q, k)
            if score is not None:
                raise ProblemError(
                    f"the call scores pairs by {call.score!r}: weights can be read of dot products only. Observe with "
                    "a function of your own that takes what it needs from `look.call`."
                )
        sink = None if call.sink is None else call.sink.detach()
        return cls(q, k, call.lse.detach(), call.mask, call.bias, call.scale, call.softcap, sink, call.offset)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, queries, keys]."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: float32, or float64 for a call in float64."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def positions(self) -> Tensor:
        """Where the queries stand among the keys; int64 [queries]."""
        return torch.arange(self.offset, self.offset + self.shape[2], device=self.q.device)

    def only(self, batch: int) -> Self:
        """The weights of one sequence of the batch, as a batch of one.

        Raises:
            ProblemError: there is no such sequence.

        >>> import torch
        >>> from regard.inspect import Weights
        >>> q = torch.randn(3, 6, 5, 4)
        >>> Weights(q, q, torch.zeros(3, 6, 5)).only(2).shape
        (1, 6, 5, 5)
        """
        number, sequences = index_of(batch), self.shape[0]
        if number is None or not 0 <= number < sequences:
            raise ProblemError(
                f"only({batch!r}) of {sequences} sequences: expected the number of one, 0 to {sequences - 1}."
            )
        own = slice(number, number + 1)
        return replace(self, q=self.q[own], k=self.k[own], lse=self.lse[own], sequence=self.sequence + number)

    def heads(self, index: int | Sequence[int] | Tensor) -> Self:
        """The weights of some query heads, in the order given, as a call of so many heads.

        Raises:
            ProblemError: there is no such head, or that is no whole number.

        >>> import torch
        >>> from regard.inspect import Weights
        >>> q, k = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4)
        >>> Weights(q, k, torch.zeros(1, 6, 5)).heads([4, 1]).shape
        (1, 2, 5, 5)
        """
        chosen = chosen_heads(index, self.shape[1]).to(self.q.device)
        return replace(
            self,
            q=self.q[:, chosen],
            k=self.k[:, key_heads(chosen, self.shape[1] // self.k.shape[1])],
            lse=self.lse[:, chosen],
            mask=mask_of_heads(self.mask, chosen),
            bias=bias_of_heads(self.bias, chosen),
            sink=None if self.sink is None else self.sink[chosen],
        )

    def scores(self, start: int, stop: int, stage: Stage = "biased") -> Tensor:
        """The scores of queries start <= i < stop on their way to weights: [batch, heads, rows, keys].

            raw = scale * q.k        capped = c * tanh(raw / c)        biased = capped + bias

        A stage that the call does not have is the one before it. A pair that the mask hides has no score: -inf at every
        stage. The softmax of the last stage over the keys, and over the sink where there is one, is `rows`.

        Raises:
            ProblemError: there is no such stage, or there are no such rows.
        """
        stage, row = check_stage(stage), self.span("scores", start, stop, 2)
        scores, i, j = of_rectangle(self, row, slice(0, self.shape[3]), stage)
        return scores.masked_fill_(~self.keep(i, j), -torch.inf)

    def keep(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """Whether the mask keeps pairs: bool, broadcasts to [batch, heads, *shape]; the indices have the same axes."""
        if self.mask is None:
            return torch.ones((1,) * (2 + q_index.ndim), dtype=torch.bool, device=q_index.device)
        kept = self.mask.keep(*self.coordinates(q_index, k_index))
        return kept[(None,) * (2 + q_index.ndim - kept.ndim)]

    def coordinates(self, q_index: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(b, h, q, k) as masks and biases take them, of pairs in every batch row and head."""
        batch, heads, axes = *self.shape[:2], q_index.ndim
        b = torch.arange(self.sequence, self.sequence + batch, device=self.q.device).view(-1, 1, *[1] * axes)
        h = torch.arange(heads, device=self.q.device).view(1, -1, *[1] * axes)
        return b, h, (q_index + self.offset)[None, None], k_index[None, None]

    def span(self, what: str, start: int, stop: int, axis: int) -> slice:
        """Rows (axis 2) or keys (axis 3) start <= i < stop, if there are such. Raises `ProblemError` if not."""
        size, kind = self.shape[axis], ("queries", "keys")[axis - 2]
        whole = index_of(start) is not None and index_of(stop) is not None
        if not whole or not 0 <= start <= stop <= size:
            raise ProblemError(f"{what}({start}, {stop}) of {size} {kind}: expected 0 <= start <= stop <= {size}.")
        return slice(start, stop)
