"""`Measure`: one measure of heads as one value, and `Inputs`, the inputs of its computation.

    Measure(key, label, unit, formula, source, chance, compute, needs, on)      compute(inputs) -> HeadScores

Whatever lists measures (a survey, a report, the CSV file, the page) goes through such values: `catalogue.MEASURES` are
those of the library, and a user's own measure is one more. A measure of which (query, key) pairs count is made of a
function by `Measure.of_pattern`.
"""

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor

from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.measures.copying import Circuit, Vocabulary
from regard.inspect.measures.induction import SHIFTS, induction_scan
from regard.inspect.measures.means import Tokens, tokens_of, uniform
from regard.inspect.measures.offset import OFFSETS, offset_scan
from regard.inspect.measures.pattern import Pattern, pattern_mass
from regard.inspect.measures.received import check_function, check_received
from regard.inspect.measures.score import HeadScores
from regard.inspect.sweep import Sweep, sweep
from regard.inspect.weights.lazy import Weights

T = TypeVar("T")

Need = Literal["tokens", "sweep", "values", "projection", "circuit", "causal"]
Text = Literal["text", "repeats", "jittered repeats"]


class Definition(NamedTuple):
    """The definition of a value of a head: a label, its unit, its formula, its source, its chance value."""

    label: str
    unit: str
    formula: str
    source: str
    chance: str


@brief
@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of measures for one call of attention; shared intermediate results are computed once, at first use.

    Args:
        weights: of the call.
        tokens: integer [batch, keys], the token at each key position.
        rows: bool [batch, queries], the rows that means count; None counts all that see a key.
        rarity: how rare each token is, nats, [batch, keys]; see `rare.rarity`.
        norms: ||v_j W_O|| of each head and key, [batch, heads, keys]; see `values.output_norms`.
        v, out: values [batch, kv_heads, keys, v_dim] and output [batch, heads, queries, v_dim] of the call.
        w_o: the output projection by head, [heads, v_dim, d_model]; see `values.split_heads`.
        circuit, vocabulary: of the layer and of the model; see `copying`.
        picture: cells per side of the picture that the sweep makes; None for none.

    >>> from regard import Causal
    >>> q = k = torch.zeros(1, 1, 3, 2)  # uniform attention: row i gives 1 / (i + 1) to each key
    >>> inputs = Inputs(Weights(q, k, torch.tensor([[[1.0, 2, 3]]]).log(), Causal()))
    >>> inputs.swept.columns, inputs.mean_position(inputs.swept)
    (tensor([[[1.8333, 0.8333, 0.3333]]]), tensor([[[0.0000, 0.5000, 1.0000]]]))
    """

    weights: Weights
    tokens: Tokens | None = None
    rows: Tensor | None = None
    rarity: Tensor | None = None
    norms: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    w_o: Tensor | None = None
    circuit: Circuit | None = None
    vocabulary: Vocabulary | None = None
    picture: int | None = None

    def __post_init__(self) -> None:
        check_received(self.weights, Weights, "Inputs", "weights")

    @cached_property
    def ids(self) -> Tensor:
        """The tokens, integer [batch, keys]. Raises `ProblemError` if they are missing, or of another shape."""
        return tokens_of(self.weights, required(self.tokens, "tokens"))

    @cached_property
    def offsets(self) -> dict[int, HeadScores]:
        """`offset_scan` of the offsets 0 to 8."""
        return offset_scan(self.weights, OFFSETS, self.rows)

    @cached_property
    def matches(self) -> dict[int, HeadScores]:
        """`induction_scan` of the shifts 0 (duplicate tokens) and 1 (induction)."""
        return induction_scan(self.weights, self.ids, (0, 1), self.rows)

    @cached_property
    def shifted_matches(self) -> dict[int, HeadScores]:
        """`induction_scan` of the shifts 1 to 8."""
        return induction_scan(self.weights, self.ids, SHIFTS[1:], self.rows)

    @cached_property
    def swept(self) -> Sweep:
        """The sweep over all weights, with the averages of the vectors below."""
        return sweep(self.weights, picture=self.picture, along=self._vectors)

    @cached_property
    def even(self) -> Sweep:
        """The sweep of uniform attention over the same mask, for chance values."""
        vectors = self._vectors
        return sweep(uniform(self.weights, whole_batch=vectors.shape[0] > 1), along=vectors)

    def mean_position(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] j, [batch, heads, queries], of `swept` or `even`."""
        return _averages(swept)[..., 0]

    def mean_rarity(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] r_j, [batch, heads, queries], of `swept` or `even`."""
        required(self.rarity, "rarity")
        return _averages(swept)[..., 1]

    def mean_norm(self, swept: Sweep) -> Tensor:
        """sum_j A[i, j] nu_j, each head by its own norms, [batch, heads, queries], of `swept` or `even`."""
        required(self.norms, "norms")
        by_head = _averages(swept)[..., 1 if self.rarity is None else 2 :]  # [batch, heads or 1, queries, heads]
        if by_head.shape[1] == 1:
            return by_head[:, 0].movedim(-1, 1)
        return by_head.diagonal(dim1=1, dim2=3).movedim(-1, 1)

    @cached_property
    def _vectors(self) -> Tensor:
        """The vectors that the sweep averages, [batch or 1, m, keys]: positions, rarities, norms by head."""
        batch, heads, _, keys = self.weights.shape
        parts = [torch.arange(keys, device=self.weights.q.device)[None, None].to(self.weights.dtype)]
        for name, part, shape in (
            ("rarity", None if self.rarity is None else self.rarity[:, None], (batch, 1, keys)),
            ("norms", self.norms, (batch, heads, keys)),
        ):
            if part is None:
                continue
            if tuple(part.shape) != shape:
                raise ProblemError(f"{name} are {list(part.shape)} for the keys of a call: expected {list(shape)}.")
            parts.append(part.to(parts[0]))
        most = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(most, -1, -1) for part in parts], dim=1)


@brief
@dataclass(frozen=True, eq=False)
class Measure:
    """A measure of heads.

    Args:
        key: its name in reports, tables and files.
        label: its name for people.
        unit: "mass" or "share" (from 0 to 1), "nats", "tokens", "ratio".
        formula: what it computes, with A[i, j] the weight of key j in row i.
        source: the paper with its section.
        chance: what uniform attention over the same mask scores.
        compute: the scores of one call of attention, [batch, heads].
        needs: what `compute` reads beside the weights: "tokens" (also `Inputs.rarity`), "sweep" (`Inputs.swept`, all
            weights), "values" (`v`), "projection" (`v`, `out`, `w_o`, `norms`), "circuit" (`circuit`, `vocabulary`),
            "causal" (no row sees a later key).
        on: the text that it is defined on: the user's, or random tokens that repeat at one distance or at several.
        on_demand: whether it is computed only where it is named, as it takes as long as another sweep.
        at: where the score is the best of several, what says which of them it is (`HeadScores.at`).

    >>> def to_the_middle(inputs):
    ...     middle = inputs.weights.shape[3] // 2
    ...     return offset_scan(inputs.weights, (middle,))[middle]
    >>> Measure("middle", "half the text back", "mass", "A[i, i - n/2]", "ours", "1 / visible keys", to_the_middle)
    Measure(key='middle', unit='mass')
    """

    key: str
    label: str = field(repr=False)
    unit: str
    formula: str = field(repr=False)
    source: str = field(repr=False)
    chance: str = field(repr=False)
    compute: Callable[[Inputs], HeadScores] = field(repr=False)
    needs: frozenset[Need] = field(default=frozenset(), repr=False)
    on: Text = field(default="text", repr=False)
    on_demand: bool = field(default=False, repr=False)
    at: Definition | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("key", "label", "unit", "formula", "source", "chance"):
            _check_text(name, getattr(self, name))
        check_function(self.compute, "compute", "a function of Inputs that returns HeadScores")
        if self.on not in (texts := get_args(Text)):
            raise ProblemError(f"on is {self.on!r}: expected one of {', '.join(map(repr, texts))}.")
        needs, known = cast(object, self.needs), sorted(get_args(Need))
        if not isinstance(needs, set | frozenset) or not needs <= {*known}:
            raise ProblemError(f"needs is {needs!r}: expected a frozenset of some of {', '.join(known)}.")

    @property
    def definition(self) -> Definition:
        """The definition of this measure for reports."""
        return Definition(self.label, self.unit, self.formula, self.source, self.chance)

    @classmethod
    def of_pattern(
        cls, key: str, pattern: Pattern, *, label: str = "", formula: str = "", source: str = "", on: Text = "text"
    ) -> "Measure":
        """The mass on chosen pairs: mean over the rows that have a pair of sum_j A[i, j] over the pairs (i, j).

        Chance: mean over the same rows of (visible keys of its pairs) / (visible keys). O(pairs).

        Args:
            pattern: `pattern(tokens) -> (queries, keys)`: of one sequence, integer [tokens], the positions of the
                pairs that count, int64 [pairs] each; or a bool matrix [tokens, tokens].

        Raises:
            ProblemError: the key is no string, the pattern is no function, or another argument is not allowed.

        >>> def same_parity(tokens):  # keys earlier in the text, of the same parity
        ...     i, j = torch.tril_indices(len(tokens), len(tokens), offset=-1)
        ...     return i[(i - j) % 2 == 0], j[(i - j) % 2 == 0]
        >>> from regard import Causal
        >>> q = torch.zeros(1, 1, 3, 2)  # uniform attention
        >>> weights = Weights(q, q, torch.tensor([[[1.0, 2, 3]]]).log(), Causal())
        >>> Measure.of_pattern("parity", same_parity).compute(Inputs(weights, tokens=torch.tensor([[7, 8, 9]])))
        HeadScores(value=tensor([[0.3333]]), chance=tensor([[0.3333]]))
        """
        _check_text("key", key)
        check_function(pattern, "pattern", "a function of the tokens of a text that returns (queries, keys)")
        formula = formula or "mean over rows with a pair of sum_j A[i,j] over the pairs of the pattern"
        return cls(
            key,
            label or key.replace("_", " "),
            "mass",
            formula,
            source or "a pattern of the user",
            "mean of (visible keys of the row's pairs) / (number of keys that row i sees)",
            lambda inputs: pattern_mass(inputs.weights, inputs.ids, pattern, inputs.rows),
            frozenset({"tokens"}),
            on,
        )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or (name == "key" and not value):
        raise ProblemError(f"{name} is {reprlib.repr(value)}: expected a text, such as 'two_back'.")


def compute(measures: Iterable[Measure], inputs: Inputs) -> dict[str, HeadScores]:
    """The scores of several measures on one call, by their keys.

    Raises:
        ProblemError: `inputs` are no `Inputs`, or an error of a measure.
    """
    check_received(inputs, Inputs, "compute", "inputs")
    return {measure.key: measure.compute(inputs) for measure in measures}


def required(value: T | None, name: str) -> T:
    """An input that a measure requires. Raises `ProblemError` if it is None."""
    if value is None:
        raise ProblemError(f"this measure needs `{name}`: pass Inputs(weights, {name}=...).")
    return value


def _averages(swept: Sweep) -> Tensor:
    if swept.along is None:
        raise ProblemError("the sweep averaged no vectors: use `swept` and `even` of the same Inputs.")
    return swept.along
