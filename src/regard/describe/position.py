"""Positions: how the positions of tokens enter a model.

`Absolute` encodings are added to embeddings, and `Rope` rotates queries and keys. A bias by distance is in `bias.py`.

Positions are counted from 0. The argument `positions` is None (0, 1, 2 ...), an int (position of the first token), or a
tensor `[tokens]` or `[batch, tokens]`. Angles are computed in float64, whatever the type of the activations: in
float32, an angle at position 100,000 is off by up to 0.004 radians.
"""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.describe.not_a_spec import received
from regard.describe.number import number_field
from regard.describe.position_table import check_positions, check_type, end_of, is_traced, rows
from regard.describe.rope_scaling import Scaling
from regard.describe.rotation import rotate_pairs, rotation_table
from regard.describe.spec import Spec, spec
from regard.describe.tensors import beside
from regard.describe.whole_number import whole, whole_field
from regard.errors import ProblemError, RefusalError
from regard.wide import wide_of

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Position(Spec):
    """How positions enter a model; abstract, see `Sinusoidal`, `Learned`, `Rope`."""


class Absolute(Position):
    """A vector per position, added to the token's embedding; abstract, see `Sinusoidal` and `Learned`."""

    def table(self, positions: Tensor) -> Tensor:
        """The vectors of these positions: [*positions.shape, dim]."""
        raise NotImplementedError(f"{type(self).__name__}.table")

    def width(self) -> int:
        """The size of a vector."""
        raise NotImplementedError(f"{type(self).__name__}.width")

    def add(self, x: Tensor, positions: int | Tensor | None = None) -> Tensor:
        """The embeddings with their positions: `x + table`, in the type of x, rounded once.

        Args:
            x: floats [batch, tokens, dim].
            positions: None: 0, 1, 2 ...; an int: the first token's; a tensor [tokens] or [batch, tokens].

        Raises:
            ProblemError: sizes or types do not fit.
        """
        _check_floats(x, self.width(), "[batch, tokens, dim]", self)
        positions = check_positions(positions, x, rank=3)
        return (x + beside(self._rows(positions, x), x)).to(x.dtype)

    def _rows(self, positions: int | Tensor | None, x: Tensor) -> Tensor:
        if not isinstance(positions, Tensor):
            positions = torch.arange(x.shape[-2], device=x.device) + (0 if positions is None else positions)
        return self.table(positions)


@spec
class Sinusoidal(Absolute):
    """Sines and cosines of decreasing frequency, interleaved. Vaswani et al. 2017, arXiv:1706.03762, §3.5.

        table[p, 2 i] = sin(p / base ** (2 i / dim)),   table[p, 2 i + 1] = cos(p / base ** (2 i / dim))

    Each pair at p + k is the pair at p rotated by an angle that depends on k alone.

    Args:
        dim: of the embedding, even: every frequency has a sine and a cosine.
        base: 2 pi * base is the limit of the wavelengths, in tokens.

    >>> Sinusoidal(4).table(torch.tensor([0, 1]))
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    dim: int
    base: float = 10000.0

    def __post_init__(self) -> None:
        _check_dim(self)
        _check_base(self)

    def width(self) -> int:
        return self.dim

    def table(self, positions: Tensor) -> Tensor:
        """The vectors of these positions, whole or not: [*positions.shape, dim], float64 for float64, else float32."""
        check_type(positions)
        dtype = wide_of(positions.dtype)
        return self._waves(positions, dtype)

    def _waves(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        angles = positions.to(torch.float64)[..., None] * _plain(self.dim, self.base, positions.device)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).to(dtype)

    def _rows(self, positions: int | Tensor | None, x: Tensor) -> Tensor:
        dtype = wide_of(x.dtype)
        key = (self, dtype, x.device)
        return rows(key, lambda p: self._waves(p, dtype).to(x.device), positions, x)


@spec
class Learned(Absolute):
    """A learned vector per position: `weight[p]`. Gehring et al. 2017, arXiv:1705.03122, §3.1; BERT, GPT-2.

    Args:
        weight: floats [max_tokens, dim]; gradients flow to it.

    >>> learned = Learned(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    >>> learned.add(torch.zeros(1, 2, 2), positions=1)
    tensor([[[3., 4.],
             [5., 6.]]])
    """

    weight: Tensor

    def __post_init__(self) -> None:
        value = cast(object, self.weight)
        if not isinstance(value, Tensor) or value.ndim != 2 or not value.is_floating_point():
            what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ProblemError(f"Learned(weight) is {what}: expected a tensor of floats [max_tokens, dim].")

    def width(self) -> int:
        return self.weight.shape[1]

    def table(self, positions: Tensor) -> Tensor:
        """The vectors of these positions, in the type of the weight: [*positions.shape, dim].

        Raises:
            ProblemError: a position is negative or beyond the table. A traced graph cannot check it; there torch
                raises its own error when the graph runs.
        """
        check_type(positions)
        if positions.is_floating_point():
            raise ProblemError(f"positions are {positions.dtype}: Learned has vectors for whole positions; give ints.")
        positions = positions.long()
        if positions.numel() and not is_traced() and positions.device.type != "meta":
            low, high = (int(bound) for bound in positions.aminmax())
            self._check_reach(low, high)
        return F.embedding(positions, self.weight)

    def _rows(self, positions: int | Tensor | None, x: Tensor) -> Tensor:
        if isinstance(positions, Tensor):
            return self.table(positions)
        first, tokens = 0 if positions is None else positions, x.shape[-2]
        if tokens:
            self._check_reach(first, first + tokens - 1)
        return self.weight[first : first + tokens]

    def _check_reach(self, low: int, high: int) -> None:
        if low < 0 or high >= self.weight.shape[0]:
            raise ProblemError(
                f"positions run from {low} to {high} and Learned has vectors for 0 to {self.weight.shape[0] - 1}: "
                "learned positions end at the trained length; shorten the sequence, or lengthen the weight."
            )


@spec
class Rope(Position):
    """Rotary positions: pair i at position p is rotated by the angle p * f[i]. Su et al. 2021, arXiv:2104.09864.

    So a score depends on the distance of its two tokens alone. `f[i] = base ** (-2 i / d)` radians per token for the d
    rotated dimensions (§3.2.2), changed by `scaling` if given. Which dimensions are a pair, for d = 8:

        interleaved=False   0 1 2 3 4 5 6 7      interleaved=True   0 1 2 3 4 5 6 7
                            └─┼─┼─┼─┘ │ │ │                         └─┘ └─┘ └─┘ └─┘
                              └─┼─┼───┘ │ │
                                └─┼─────┘ │      the paper, GPT-J, DeepSeek
                                  └───────┘
                            GPT-NeoX, Llama and most since

    Args:
        dim: of queries and keys; even.
        base: of the frequencies; `rope_theta` of checkpoints.
        scaling: one of `Linear`, `NTK`, `DynamicNTK`, `Yarn`, `Llama3`, `LongRope`, `Proportional`.
        fraction: the first `int(dim * fraction)` dimensions are rotated, an even count; the others are unchanged
            (GPT-NeoX 0.25, Phi-2 0.4; `partial_rotary_factor`).
        interleaved: whether the two dimensions of a pair are adjacent.

    A subclass may define other `frequencies`, or `rotate`. Frequencies of its own are computed in each call, and
    gradients flow to their tensors. What has to undo, continue or split a rotation refuses a `rotate` of its own:
    `Rolling`, `ExpectedAttention`, `RopePairs` and `to_latent`.

    >>> rope = Rope(4, base=100.0)
    >>> rope.frequencies().tolist()
    [1.0, 0.1]
    >>> rope.rotate(torch.tensor([[[[1.0, 1.0, 0.0, 0.0]] * 2]])).squeeze()
    tensor([[1.0000, 1.0000, 0.0000, 0.0000],
            [0.5403, 0.9950, 0.8415, 0.0998]])
    """

    dim: int
    base: float = 10000.0
    scaling: Scaling | None = None
    fraction: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        _check_dim(self)
        _check_base(self)
        fraction, interleaved = number_field(self, "fraction"), cast(object, self.interleaved)
        if not isinstance(interleaved, bool):
            raise ProblemError(f"Rope(interleaved={interleaved!r}): expected True or False.")
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ProblemError(f"Rope(fraction={fraction!r}): expected a share of the dimensions, 0 < share <= 1.")
        if self.rotated < 2 or self.rotated % 2:
            raise ProblemError(
                f"Rope(dim={self.dim}, fraction={self.fraction}) rotates int({self.dim} * {self.fraction}) = "
                f"{self.rotated} dimensions: expected an even number, at least 2, as dimensions rotate in pairs."
            )
        if self.scaling is not None:
            if not isinstance(self.scaling, Scaling):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ProblemError(f"Rope(scaling={self.scaling!r}): expected a scaling such as Yarn(...), or None.")
            self.scaling.check(self.rotated)

    @property
    def rotated(self) -> int:
        """How many dimensions are rotated: the first ones of a head."""
        return int(self.dim * self.fraction)

    def frequencies(self, tokens: int | None = None) -> Tensor:
        """Radians per token of each pair after scaling, float64 [rotated / 2].

        Args:
            tokens: current length of the sequence, for `DynamicNTK` and `LongRope`; None: at most the training length.
        """
        return self._scaled(_whole_tokens(tokens), torch.device("cpu"))

    def frequencies_at(self, tokens: int | None, device: torch.device) -> Tensor:
        """`frequencies` on a device, [dim / 2], for any length.

        Args:
            tokens: as in `frequencies`; below 1 for negative positions, which have the frequencies of a length of 1.
        """
        if type(self).frequencies is Rope.frequencies:
            return self._scaled(tokens, device)
        return self.frequencies(None if tokens is None else max(tokens, 1)).to(device)

    def attention_factor(self, tokens: int | None = None) -> float:
        """The factor of rotated queries and keys, so scores get its square. 1 without scaling."""
        _whole_tokens(tokens)
        return 1.0 if self.scaling is None else self.scaling.magnitude()

    def rotate(self, x: Tensor, positions: int | Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Queries or keys rotated by their positions, like x. Differentiable to any order; traced by `torch.compile`.

        Half precision is rotated in float32 and rounded once, where transformers rounds sine, cosine and both products:
        results differ in the last bits. As there, `attention_factor` multiplies the rotated dimensions.

        Args:
            x: floats [batch, heads, tokens, dim], any strides.
            positions: None: 0, 1, 2 ...; an int: the first token's; a tensor [tokens] or [batch, tokens], which may be
                fractional.
            tokens: current length of the sequence, for `DynamicNTK` and `LongRope`; None: one more than the greatest
                position (which reads a tensor of positions).

        Raises:
            ProblemError: sizes or types do not fit.
            RefusalError: a traced graph needs the length, and only a tensor of positions has it.
        """
        _check_floats(x, self.dim, "[batch, heads, tokens, dim]", self)
        positions = check_positions(positions, x, rank=4)
        length = self.length_of(x, positions, tokens)
        dtype = wide_of(x.dtype)
        key = (self, self.scaling and self.scaling.regime(length), dtype, x.device)
        key = key if has_constant_table(self) else None
        table = rows(key, lambda p: self._table(p, length, dtype).to(x.device), positions, x)
        if table.ndim == 4:  # [batch, tokens, *row]
            table = table[:, None]
        return rotate_pairs(x, table, interleaved=self.interleaved)

    def length_of(self, x: Tensor, positions: int | Tensor | None, tokens: int | None) -> int | None:
        """The length of the sequence that `rotate` uses; None where the scaling does not depend on it."""
        tokens = _whole_tokens(tokens)
        if self.scaling is None or not self.scaling.looks_at_length() or tokens is not None:
            return tokens
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is documented
            raise RefusalError(
                f"{type(self.scaling).__name__} depends on the length of the sequence, which torch.jit.trace records "
                "as a constant: use torch.compile or torch.export."
            )
        if not isinstance(positions, Tensor):
            return x.shape[-2] + (0 if positions is None else positions)
        if is_traced() or positions.device.type == "meta":
            raise RefusalError(
                f"{type(self.scaling).__name__} depends on the length of the sequence, which a traced graph cannot "
                "read from a tensor of positions: give tokens=."
            )
        return end_of(positions)

    def _table(self, positions: Tensor, length: int | None, dtype: torch.dtype) -> Tensor:
        frequencies, pairs = self.frequencies_at(length, positions.device), self.rotated // 2
        if frequencies.shape[-1:] != (pairs,):
            raise ProblemError(
                f"{type(self).__name__} has frequencies of shape {list(frequencies.shape)}: expected [{pairs}], one "
                f"for each pair of the {self.rotated} dimensions that rotate."
            )
        angles = positions.to(torch.float64)[..., None] * frequencies
        return rotation_table(angles, self.attention_factor(), dtype, interleaved=self.interleaved)

    def _scaled(self, tokens: int | None, device: torch.device) -> Tensor:
        plain = _plain(self.rotated, self.base, device)
        return plain if self.scaling is None else self.scaling.scaled(plain, self.base, tokens)


def has_own_rotate(rope: Rope) -> bool:
    """Whether a rope is of a subclass with another `rotate`, which may be no rotation by `frequencies`."""
    return type(rope).rotate is not Rope.rotate


def has_constant_table(rope: Rope) -> bool:
    """Whether the rotations of a rope depend on its fields and on the regime of its scaling alone, and on no tensor."""
    if rope.is_own() and (rope.scaling is None or rope.scaling.is_own()):
        return True
    kind = type(rope)
    is_known = kind.frequencies is Rope.frequencies and kind.attention_factor is Rope.attention_factor
    return is_known and not rope.tensors()


def _plain(dim: int, base: float, device: torch.device) -> Tensor:
    """`base ** (-2 i / dim)` radians per token, float64 [dim / 2]."""
    pair = torch.arange(0, dim, 2, dtype=torch.float64, device=device)
    return base ** (-pair / dim)


def _check_dim(position: "Sinusoidal | Rope") -> None:
    whole_field(position, "dim", "dimensions")
    if position.dim < 2 or position.dim % 2:
        raise ProblemError(
            f"{type(position).__name__}(dim={position.dim}): expected an even number, at least 2: every frequency "
            "takes two dimensions."
        )


def _check_base(position: Position) -> None:
    base = number_field(position, "base")
    if not isinstance(base, int | float) or isinstance(base, bool) or not 1 < base < math.inf:
        raise ProblemError(f"{type(position).__name__}(base={base!r}): expected a number above 1, such as 10000.0.")


def _check_floats(x: Tensor, dim: int, layout: str, position: Position) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _FLOATS:  # pyright: ignore[reportUnnecessaryIsInstance]
        what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else received(x)  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"x is {what}: expected a tensor {layout} of float64, float32, bfloat16 or float16.")
    if x.ndim < 2 or x.shape[-1] != dim:
        raise ProblemError(f"x is {list(x.shape)} and {position!r} is for {layout} with dim {dim}.")


def _whole_tokens(tokens: object) -> int | None:
    """The length of a sequence as an int of at least 1; None stays None."""
    return None if tokens is None else whole(tokens, "tokens", least=1)
