"""Scaling of rotary frequencies for sequences longer than in training: the `scaling` of `Rope`.

Plain frequencies are `f[i] = base ** (-2 i / d)` radians per token, for the d rotated dimensions. Pair i makes a full
turn in `2 pi / f[i]` tokens, its wavelength. Where the wavelength exceeds the training length, the model has never seen
a full turn, so larger angles are new to it. Each scaling lowers some of the frequencies; some scalings also multiply
queries and keys by an attention factor, which keeps the softmax as sharp over more keys.

Formulas are from the papers; where published checkpoints differ, from the checkpoints (transformers'
`ROPE_INIT_FUNCTIONS`). All is computed in float64.
"""

import math
from typing import cast

import torch
from torch import Tensor

from regard.describe.number import as_number, number_field
from regard.describe.position_table import is_traced
from regard.describe.spec import Spec, spec
from regard.describe.whole_number import whole_field
from regard.errors import ProblemError


class Scaling(Spec):
    """How frequencies are scaled; abstract.

    See `Linear`, `NTK`, `DynamicNTK`, `Yarn`, `Llama3`, `LongRope`, `Proportional`.
    """

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        """The frequencies in place of the plain ones, float64 [pairs]; `tokens`: the current length of the sequence."""
        raise NotImplementedError(f"{type(self).__name__}.scaled")

    def magnitude(self) -> float:
        """The attention factor of rotated queries and keys; scores get its square."""
        return 1.0

    def regime(self, tokens: int | None) -> int | bool | None:
        """A function of the length: equal values have equal frequencies. None: any length has the same ones."""
        return None

    def looks_at_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return False

    def check(self, rotated: int) -> None:
        """Raise `ProblemError` unless the scaling fits this count of rotated dimensions."""


@spec
class Linear(Scaling):
    """Position interpolation: `f[i] / factor`, so tokens appear closer. Chen et al. 2023, arXiv:2306.15595, §3.2.

    >>> Linear(4.0).scaled(torch.tensor([1.0, 0.1]), base=10000.0, tokens=None).tolist()
    [0.25, 0.025]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        return plain / self.factor


@spec
class NTK(Scaling):
    """A larger base, `base * factor ** (d / (d - 2))`. Peng et al. 2023, arXiv:2309.00071, §3.1 ("NTK-aware").

    The fastest pair is unchanged and the slowest is divided by `factor`: `f[i] * factor ** (-2 i / (d - 2))`.

    >>> NTK(16.0).scaled(torch.tensor([1.0, 0.1, 0.01]), base=1000.0, tokens=None).tolist()
    [1.0, 0.025, 0.000625]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        return _with_larger_base(plain, self.factor)

    def check(self, rotated: int) -> None:
        _check_pairs(self, rotated)


@spec
class DynamicNTK(Scaling):
    """`NTK` by a factor that grows with the sequence: `s = factor * n / original - factor + 1`, at least 1.

    n is the current length of the sequence; up to `original` tokens nothing changes. Peng et al. 2023,
    arXiv:2309.00071, §3.3; the formula of s is that of the published checkpoints. Frequencies change as the sequence
    grows, so cached rotated keys differ from keys that are rotated again at the current length.

    Args:
        factor: at least 1.
        original: tokens that the model was trained on.
    """

    factor: float
    original: int

    def __post_init__(self) -> None:
        _check_factor(self)
        whole_field(self, "original", "tokens that the model was trained on", least=1)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        length = self.regime(tokens)
        return _with_larger_base(plain, self.factor * length / self.original - (self.factor - 1))

    def regime(self, tokens: int | None) -> int:
        return self.original if tokens is None else max(tokens, self.original)

    def looks_at_length(self) -> bool:
        return True

    def check(self, rotated: int) -> None:
        _check_pairs(self, rotated)


@spec
class Yarn(Scaling):
    """Fast pairs unchanged, slow pairs interpolated, a ramp in between. Peng et al. 2023, arXiv:2309.00071, §3.4.

    Pair `i(r) = d ln(original / (2 pi r)) / (2 ln base)` makes r turns within `original` tokens. With
    `low = i(beta_fast)` and `high = i(beta_slow)`, rounded outwards if `truncate`,

        f'[i] = f[i] * (1 - ramp + ramp / factor),   ramp = (i - low) / (high - low), within 0 and 1

        f'/f   1 ─────────╮
                           ╲
               1/factor     ╰──────────
        pair   0         low high     d/2

    The ramp is linear in the pair, as in published checkpoints; that of the paper (§3.2) is linear in the turns. Where
    low = high, pairs up to low are unchanged and all others interpolated, as in the authors' code. The same holds where
    low > high, as where every pair makes more than beta_fast turns: all are unchanged. The authors' code, and
    transformers, have a ramp there that falls, and interpolate all.

    The attention factor is `0.1 ln(factor) + 1` (the paper's 1/sqrt(t)) if not given. DeepSeek's checkpoints have two
    parameters: then it is `m(mscale) / m(mscale_all_dim)` with `m(c) = 0.1 c ln(factor) + 1`, and their softmax scale
    is multiplied by `score_factor()`.

    Args:
        factor: at least 1.
        original: tokens that the model was trained on.
        beta_fast, beta_slow: turns within `original`: at least beta_fast, unchanged; at most beta_slow, interpolated.
        attention_factor: instead of the formula.
        mscale, mscale_all_dim: both or neither, above 0.
        truncate: whether the ramp begins and ends at whole pairs; False in gpt-oss.

    >>> Yarn(4.0, 32768).magnitude()
    1.1386294361119891
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self)
        whole_field(self, "original", "tokens that the model was trained on", least=1)
        for name in ("beta_fast", "beta_slow"):
            _check_positive(self, name)
        _check_positive(self, "attention_factor", absent=True)
        _check_flag(self, "truncate", self.truncate)
        if not self.beta_fast > self.beta_slow > 0:
            raise ProblemError(
                f"Yarn(beta_fast={self.beta_fast}, beta_slow={self.beta_slow}): both are turns within {self.original} "
                "tokens, and beta_fast is that of the faster pairs: expected beta_fast > beta_slow > 0."
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ProblemError(
                f"Yarn(mscale={self.mscale}, mscale_all_dim={self.mscale_all_dim}): expected both or neither. "
                "Implementations disagree on the meaning of one alone: give attention_factor instead."
            )
        _check_positive(self, "mscale", absent=True)
        _check_positive(self, "mscale_all_dim", absent=True)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        low, high = self.ramp(2 * len(plain), base)
        pair = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        return plain * (1 - ramp + ramp / self.factor)

    def ramp(self, rotated: int, base: float) -> tuple[float, float]:
        """The pairs, maybe fractional, at which interpolation begins and is complete.

        >>> Yarn(4.0, 32768).ramp(128, 1000000.0)
        (23, 40)
        """
        low, high = self._ends(rotated, base)
        return low, high if high > low else low + 0.001  # a step

    def falls(self, rotated: int, base: float) -> bool:
        """Whether low > high, where transformers gives other frequencies.

        >>> Yarn(4.0, 32768).falls(128, 1000000.0), Yarn(4.0, 100_000).falls(16, 10.0)
        (False, True)
        """
        low, high = self._ends(rotated, base)
        return low > high

    def _ends(self, rotated: int, base: float) -> tuple[float, float]:
        low, high = (self._pair(turns, rotated, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, rotated - 1)

    def _pair(self, turns: float, rotated: int, base: float) -> float:
        return rotated * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return self._m(self.mscale or 1.0) / (1.0 if self.mscale_all_dim is None else self._m(self.mscale_all_dim))

    def score_factor(self) -> float:
        """DeepSeek's additional factor of the softmax scale: `m(mscale_all_dim) ** 2`; 1 if it is None.

        >>> Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0).score_factor()
        1.8738542070926265
        """
        return 1.0 if self.mscale_all_dim is None else self._m(self.mscale_all_dim) ** 2

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@spec
class Llama3(Scaling):
    """Low frequencies divided by `factor`, high ones unchanged, a ramp in between: Llama from 3.1 on.

    A pair of wavelength `w = 2 pi / f` makes `original / w` turns within the training length:

        turns > high           f
        low <= turns <= high   f * (1 - t) / factor + f * t,   t = (turns - low) / (high - low)
        turns < low            f / factor

    The formula is that of the models' reference code (3.1: factor 8, 3.2: 32; both low 1, high 4, original 8192).

    Args:
        factor: at least 1.
        low, high: turns; `low_freq_factor` and `high_freq_factor` of the checkpoints.
        original: tokens that the model was trained on.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        _check_factor(self)
        whole_field(self, "original", "tokens that the model was trained on", least=1)
        for name in ("low", "high"):
            _check_positive(self, name)
        if not 0 < self.low < self.high:
            raise ProblemError(f"Llama3(low={self.low}, high={self.high}): expected turns, 0 < low < high.")

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        turns = self.original * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * ((1 - kept) / self.factor + kept)


@spec
class LongRope(Scaling):
    """A divisor for every pair, found by search: `f[i] / short[i]`, in long sequences `f[i] / long[i]`.

    Ding et al. 2024, arXiv:2402.13753, §3. A sequence is long when it has more than `original` tokens. The attention
    factor is `sqrt(1 + ln(factor) / ln(original))` if not given, for every length. Cached keys keep the rotation of the
    short sequence (compare `DynamicNTK`).

    Args:
        short, long: a divisor per pair, each a tuple of d / 2 floats above 0.
        original: tokens that the model was trained on.
        factor: longest sequence / `original`; None: 1, so no attention factor. Phi-3 has
            `max_position_embeddings / original_max_position_embeddings`.
        attention_factor: instead of the formula.

    >>> scaling = LongRope((1.0, 1.5), (2.0, 8.0), original=4096, factor=32.0)
    >>> scaling.scaled(torch.tensor([1.0, 0.01]), base=10000.0, tokens=4097).tolist(), scaling.magnitude()
    ([0.5, 0.00125], 1.190238071...)
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short", "long"):
            value = cast(object, getattr(self, name))
            numbers = tuple(map(as_number, cast("tuple[object, ...]", value))) if isinstance(value, tuple) else None
            if numbers is None or not all(map(_is_positive, numbers)):
                raise ProblemError(f"LongRope({name}={value!r}): expected a tuple of floats above 0, one per pair.")
            object.__setattr__(self, name, numbers)
        if len(self.short) != len(self.long):
            raise ProblemError(
                f"LongRope: short has {len(self.short)} divisors and long has {len(self.long)}: expected one per pair."
            )
        whole_field(self, "original", "tokens that the model was trained on", least=1)
        if self.original == 1:
            raise ProblemError("LongRope(original=1): expected the tokens that the model was trained on, at least 2.")
        if self.factor is not None:
            _check_factor(self)
        _check_positive(self, "attention_factor", absent=True)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        if tokens is not None and is_traced():  # one graph for all lengths
            short, long = (torch.tensor(n, dtype=plain.dtype, device=plain.device) for n in (self.short, self.long))
            is_long = torch.full((), tokens, device=plain.device) > self.original
            return plain / torch.where(is_long, long, short)
        divisors = self.long if self.regime(tokens) else self.short
        return plain / torch.tensor(divisors, dtype=plain.dtype, device=plain.device)

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor or 1.0) / math.log(self.original))

    def regime(self, tokens: int | None) -> bool:
        return tokens is not None and tokens > self.original

    def looks_at_length(self) -> bool:
        return True

    def check(self, rotated: int) -> None:
        if 2 * len(self.short) != rotated:
            raise ProblemError(
                f"LongRope has {len(self.short)} divisors per tuple, for {rotated} rotated dimensions: expected "
                f"{rotated // 2}, one per pair."
            )


@spec
class Proportional(Scaling):
    """Rotate the fastest pairs only: `f[i] / factor` for the first `int(share * d / 2)` pairs, 0 for the rest. Gemma 4.

    `Rope(fraction=share)` pairs the first dimensions among themselves, with the frequencies of fewer dimensions; here
    pairs and frequencies are those of all d.

    Args:
        share: rotated pairs / all pairs, above 0 and at most 1; `partial_rotary_factor` of the checkpoints.
        factor: at least 1.

    >>> Proportional(0.5).scaled(torch.tensor([1.0, 0.1, 0.01, 0.001]), base=10000.0, tokens=None).tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        share = number_field(self, "share")
        if not _is_positive(share) or cast(float, share) > 1:
            raise ProblemError(f"Proportional(share={share!r}): expected a share of the pairs, 0 < share <= 1.")
        _check_factor(self)

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        rotated = int(self.share * (2 * len(plain)) // 2)
        pair = torch.arange(len(plain), device=plain.device)
        return torch.where(pair < rotated, plain / self.factor, 0.0)


def _with_larger_base(plain: Tensor, factor: float) -> Tensor:
    """The frequencies of the base `base * factor ** (d / (d - 2))`."""
    pair = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    return plain * factor ** (-pair / (len(plain) - 1))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_factor(scaling: Scaling) -> None:
    factor = number_field(scaling, "factor")
    if not _is_positive(factor) or cast(float, factor) < 1:
        raise ProblemError(
            f"{type(scaling).__name__}(factor={factor!r}): expected how many times longer sequences may be, at least 1."
        )


def _check_flag(scaling: Scaling, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ProblemError(f"{type(scaling).__name__}({name}={value!r}): expected True or False.")


def _check_positive(scaling: Scaling, name: str, *, absent: bool = False) -> None:
    value = number_field(scaling, name)
    if not _is_positive(value) and not (absent and value is None):
        or_none = ", or None" if absent else ""
        raise ProblemError(f"{type(scaling).__name__}({name}={value!r}): expected a number above 0{or_none}.")


def _check_pairs(scaling: Scaling, rotated: int) -> None:
    if rotated < 4:
        raise ProblemError(
            f"{scaling!r} spreads its factor over the pairs between the first and the last: expected at least 4 "
            f"rotated dimensions, not {rotated}."
        )
