"""Numbers in descriptions: ints that torch does not take, and flags that are none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard import ProblemError, Rope, Sinusoidal, attend
from regard.linear import Favor, Relu, Taylor, linear_attend
from regard.rope import Linear, LongRope, Yarn
from regard.scores import Epanechnikov, Gaussian, SoftDict

X = torch.randn(1, 2, 3, 8)

WORDS: dict[str, Callable[[Any], torch.Tensor]] = {
    "base": lambda n: Rope(8, n).rotate(X),
    "base of sines": lambda n: Sinusoidal(8, n).add(X[0]),
    "factor": lambda n: Rope(8, scaling=Linear(n)).rotate(X),
    "attention factor": lambda n: Rope(8, scaling=Yarn(2.0, 64, attention_factor=n)).rotate(X),
    "divisors": lambda n: Rope(8, scaling=LongRope((n,) * 4, (2.0,) * 4, 64)).rotate(X),
    "bandwidth": lambda n: attend(X, X, X, score=Gaussian(n)),
    "support": lambda n: attend(X, X, X, score=Epanechnikov(n)),
    "temperature": lambda n: SoftDict(X[0, 0], X[0, 0], temperature=n).weights(X[0, 1]),
    "epsilon": lambda n: linear_attend(X, X, X, features=Relu(n)).out,
    "scale of features": lambda n: linear_attend(X, X, X, features=Taylor(), scale=n).out,
    "scale": lambda n: linear_attend(X, X, X, features=None, scale=n).out,
}


@pytest.mark.parametrize("name", WORDS)
def test_an_int_beyond_64_bits_is_that_number(name: str):
    """10**30 is no int of torch. 1e30 as a float is the same number up to rounding."""
    torch.testing.assert_close(WORDS[name](10**30), WORDS[name](1e30), equal_nan=True)


@pytest.mark.parametrize("name", WORDS)
def test_an_int_beyond_all_floats_is_refused(name: str):
    with pytest.raises(ProblemError, match="expected"):
        WORDS[name](10**400)


@pytest.mark.parametrize("flag", [1, [1], {}, torch.zeros(2), None])
def test_whether_random_features_are_orthogonal_is_a_bool(flag: Any):
    with pytest.raises(ProblemError, match=r"Favor\(orthogonal=.*\): expected True or False"):
        Favor(8, features=16, orthogonal=flag)
