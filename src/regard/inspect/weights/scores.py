"""The scores of one attention call, up to the softmax; `Weights` adds the softmax.

    raw      scale * q.k
    capped   c * tanh(raw / c)        equal to raw where the call has no softcap
    biased   capped + bias            equal to capped where it has no bias; f(capped) for a `score_mod` f of flex
    weight   exp(biased - L)          0 where the mask hides the pair; L is `Weights.total`

Scores are computed in float32, in float64 for calls in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Literal, NamedTuple, Self, cast, get_args

import torch
from torch import Tensor

from regard.calls import Call
from regard.describe.bias import Bias, values_of
from regard.describe.by_row import row_starts
from regard.describe.mask import Mask
from regard.describe.score import Dot
from regard.describe.score_function import ScoreFunction
from regard.describe.some_heads import bias_of_heads, mask_of_heads
from regard.errors import ProblemError
from regard.inspect.weights.index import index_of
from regard.inspect.weights.some_heads import chosen_heads, key_heads
from regard.wide import wide_of

Stage = Literal["raw", "capped", "biased"]


class Scored(NamedTuple):
    """Scores [batch, heads, *pairs], also of pairs that the mask hides, and the query and the key of each pair."""

    scores: Tensor
    q_index: Tensor
    k_index: Tensor


def cap_and_bias(raw: Tensor, softcap: float | None, bias: Tensor | None) -> Tensor:
    """c * tanh(raw / c) + bias: the scores that the softmax takes. `raw` is overwritten.

    Args:
        raw: scale * q.k, of any shape.
        bias: broadcasts to it, or None.

    >>> cap_and_bias(torch.tensor([2.5]), softcap=2.0, bias=torch.tensor([1.0]))
    tensor([2.6966])
    """
    if softcap is not None:
        raw.div_(softcap).tanh_().mul_(softcap)
    return raw if bias is None else raw + bias.to(raw.dtype)


def summed_bias(bias: Bias, positions: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """The bias at (b, h, q, k) in the dtype of the scores, to which each term is converted before they are added.

    >>> from regard import TensorBias
    >>> both = TensorBias(torch.tensor(256.0).bfloat16()) + TensorBias(torch.tensor(1.0).bfloat16())
    >>> first = (torch.tensor(0),) * 4
    >>> both.value(*first), summed_bias(both, first, torch.float32)
    (tensor(256., dtype=torch.bfloat16), tensor(257.))
    """
    return reduce(add, (values_of(term, *positions).to(dtype) for term in bias.terms()))


def biased_scores(
    raw: Tensor, softcap: float | None, bias: Bias | None, positions: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Tensor:
    """The scores that the softmax takes, of pairs at (b, h, q, k); a function of the score is applied to capped ones.

    Args:
        raw: scale * q.k, of the shape that the positions broadcast to; overwritten.
    """
    if isinstance(bias, ScoreFunction):
        changed = bias.changed(cap_and_bias(raw, softcap, None), *positions)
        return changed.clone(memory_format=torch.contiguous_format)  # may be a tensor of the user's, or an expanded one
    return cap_and_bias(raw, softcap, None if bias is None else summed_bias(bias, positions, raw.dtype))


@dataclass(frozen=True, eq=False)
class CallScores:
    """The tensors, mask and bias of a call, and its scores; `Weights` documents the fields."""

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
    starts: tuple[int, ...] | None = None
    dropped: int = 0
    has_gaps: bool = False

    def __post_init__(self) -> None:
        if self.starts is None:
            object.__setattr__(self, "starts", row_starts(self.mask, self.bias, self.q.shape[-2]))

    @classmethod
    def of(cls, call: Call) -> Self:
        """The weights of a `regard.calls.Call`, as `observe_calls` and `observe` pass it, without gradients.

        For a call of `attend_state`, which has a part of the keys, they are the weights within that part. For scores
        that are dot products of prepared tokens (`Cosine`, `Bilinear`), q and k are the prepared ones.

        Raises:
            ProblemError: the scores of the call are not dot products.
        """
        q, k, score = call.q.detach(), call.k.detach(), call.score
        if score is not None and type(score) is not Dot:
            with torch.no_grad():
                q, k, score = score.prepare(q, k)
            if score is not None:
                raise ProblemError(
                    f"the call scores pairs by {call.score!r}: weights can be read for dot products only. Observe with "
                    "a function of your own that computes from `look.call`."
                )
        sink = None if call.sink is None else call.sink.detach()
        lse, rest = call.lse.detach(), (call.mask, call.bias, call.scale, call.softcap, sink, call.offset)
        return cls(q, k, lse, *rest, starts=call.starts, dropped=call.dropped, has_gaps=call.has_gaps)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[batch, heads, queries, keys]."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights: float32, or float64 for a call in float64."""
        return wide_of(self.q.dtype)

    @property
    def first_positions(self) -> tuple[int, ...]:
        """The position of the first query among the keys, of each sequence; a single one where it is that of all."""
        own = self.starts[self.sequence : self.sequence + self.shape[0]] if self.starts else (self.offset,)
        return own if len(set(own)) > 1 else own[:1]

    @property
    def first_position(self) -> int:
        """The same where all sequences start at one position.

        Raises:
            ProblemError: they start at different ones.
        """
        first, *others = self.first_positions
        if others:
            raise ProblemError(
                f"the sequences of the call start at different positions, {min(first, *others)} to "
                f"{max(first, *others)}: read one sequence at a time, `weights.only(0)`."
            )
        return first

    @property
    def positions(self) -> Tensor:
        """The positions of the queries among the keys; int64, broadcasts to [batch, heads, queries]."""
        first = torch.tensor(self.first_positions, device=self.q.device)[:, None, None]
        return first + torch.arange(self.shape[2], device=self.q.device)

    def by_start(self) -> list[Self]:
        """The call in parts that start at one position each: itself, or its sequences one by one."""
        return [self] if len(self.first_positions) == 1 else [self.only(b) for b in range(self.shape[0])]

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
            raise ProblemError(f"only({batch!r}) of {sequences} sequences: expected one of 0 to {sequences - 1}.")
        own = slice(number, number + 1)
        return replace(self, q=self.q[own], k=self.k[own], lse=self.lse[own], sequence=self.sequence + number)

    def own_rows(self, table: Tensor) -> Tensor:
        """The rows of these sequences, of a tensor that has one row for all sequences of the call, or one for each."""
        return table if table.shape[0] == 1 else table[self.sequence : self.sequence + self.shape[0]]

    def heads(self, index: int | Sequence[int] | Tensor) -> Self:
        """The weights of some query heads, in the order of `index`, as a call with these heads.

        Weights do not know their layer: name heads by layer where it is known, `call.heads("18.6")` of what `observe`
        returns.

        Raises:
            ProblemError: there is no such head, or `index` has a value that is not an integer.

        >>> import torch
        >>> from regard.inspect import Weights
        >>> q, k = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4)
        >>> Weights(q, k, torch.zeros(1, 6, 5)).heads([4, 1]).shape
        (1, 2, 5, 5)
        """
        chosen = chosen_heads(index, self.shape[1])
        heads, chosen = tuple(chosen.tolist()), chosen.to(self.q.device)
        return replace(
            self,
            q=self.q[:, chosen],
            k=self.k[:, key_heads(chosen, self.shape[1] // self.k.shape[1])],
            lse=self.lse[:, chosen],
            mask=mask_of_heads(self.mask, heads),
            bias=bias_of_heads(self.bias, heads),
            sink=None if self.sink is None else self.sink[chosen],
        )

    def scores(self, start: int, stop: int, stage: Stage = "biased") -> Tensor:
        """The scores of queries start <= i < stop at one stage: [batch, heads, rows, keys].

            raw = scale * q.k        capped = c * tanh(raw / c)        biased = capped + bias

        A pair that the mask hides has -inf at every stage. The softmax of the last stage over the keys, and over the
        sink where there is one, is `rows`.

        Raises:
            ProblemError: there is no such stage, or there are no such rows.
        """
        stage, row = _check_stage(stage), self.span("scores", start, stop, 2)
        scores, i, j = self.score_tile(row, slice(0, self.shape[3]), stage)
        return scores.masked_fill_(~self.keep(i, j), -torch.inf)

    def score_tile(self, row: slice, key: slice, stage: Stage = "biased") -> Scored:
        """The scores of some rows on some keys, [batch, heads, rows, keys], also of pairs that the mask hides."""
        i = torch.arange(row.start, row.stop, device=self.q.device)
        return self._scored(self.q[:, :, row], i, key, stage)

    def score_rows(self, rows: Tensor, key: slice) -> Scored:
        """The same for rows that need not be adjacent, int64 [rows]."""
        return self._scored(self.q[:, :, rows], rows, key, "biased")

    def score_pairs(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """The scores of pairs, [batch, heads, pairs], also of those that the mask hides."""
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[:, :, q_index].to(self.dtype)  # [batch, heads, pairs, qk_dim]
        k = self.k[:, :, k_index].to(self.dtype).repeat_interleave(group, dim=1)
        return self._score((q * k).sum(-1), q_index, k_index)

    def keep(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        """Whether the mask keeps pairs: bool, broadcasts to [batch, heads, *shape]; the indices have the same axes."""
        if self.mask is None:
            return torch.ones((1,) * (2 + q_index.ndim), dtype=torch.bool, device=q_index.device)
        kept = self.mask.keep(*self.coordinates(q_index, k_index))
        return kept[(None,) * (2 + q_index.ndim - kept.ndim)]

    def keep_at(self, distance: int) -> Tensor:
        """Whether the mask keeps the key at p_i - distance of each row i: bool, broadcasts to [batch, heads, queries].

        Arbitrary where there is no such key.
        """
        row = torch.arange(self.shape[2], device=self.q.device)
        if self.mask is None:
            return torch.ones_like(row, dtype=torch.bool)[None, None]
        b, h, q, _ = self.coordinates(row, row)
        return self.mask.keep(b, h, q, (self.positions - distance).clamp(0, max(0, self.shape[3] - 1)))

    def coordinates(self, q_index: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(b, h, q, k) as masks and biases take them, of pairs in every batch row and head."""
        batch, heads, axes = *self.shape[:2], q_index.ndim
        b = torch.arange(self.sequence, self.sequence + batch, device=self.q.device).view(-1, 1, *[1] * axes)
        h = torch.arange(heads, device=self.q.device).view(1, -1, *[1] * axes)
        return b, h, (q_index + self.offset)[None, None], k_index[None, None]

    def span(self, what: str, start: int, stop: int, axis: int) -> slice:
        """Rows (axis 2) or keys (axis 3) start <= i < stop. Raises `ProblemError` if the call does not have them."""
        size, kind = self.shape[axis], ("queries", "keys")[axis - 2]
        whole = index_of(start) is not None and index_of(stop) is not None
        if not whole or not 0 <= start <= stop <= size:
            raise ProblemError(f"{what}({start}, {stop}) of {size} {kind}: expected 0 <= start <= stop <= {size}.")
        return slice(start, stop)

    def _scored(self, q: Tensor, rows: Tensor, key: slice, stage: Stage) -> Scored:
        """The scores of the queries q [batch, heads, rows, qk_dim], which are in these rows."""
        (batch, heads), (kv_heads, dim) = self.shape[:2], (self.k.shape[1], self.k.shape[3])
        # the queries of all heads that share a key head are the rows of one product
        q = q.to(self.dtype).reshape(batch, kv_heads, heads // kv_heads * len(rows), dim)
        products = q @ self.k[:, :, key].to(self.dtype).mT
        i, j = rows[:, None], torch.arange(key.start, key.stop, device=q.device)[None, :]
        return Scored(self._score(products.view(batch, heads, len(rows), j.shape[1]), i, j, stage), i, j)

    def _score(self, products: Tensor, i: Tensor, j: Tensor, stage: Stage = "biased") -> Tensor:
        """Dot products of queries i and keys j, which are overwritten, as scores of a stage."""
        products.mul_(self.scale)
        softcap = None if stage == "raw" else self.softcap
        if stage != "biased" or self.bias is None:
            return cap_and_bias(products, softcap, None)
        return biased_scores(products, softcap, self.bias, self.coordinates(i, j))


def _check_stage(stage: object) -> Stage:
    """The stage, if it is one. Raises `ProblemError` for other values."""
    if stage not in get_args(Stage):
        raise ProblemError(
            f"stage is {stage!r}: expected one of {', '.join(map(repr, get_args(Stage)))}. The weights are `rows`."
        )
    return cast(Stage, stage)
