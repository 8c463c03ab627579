"""The soft dictionary: a blend at every temperature, a look-up of the best key at 0."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Additive, Cosine, Gaussian, ProblemError, Score, SoftDict, attend

SCORES: list[Score | None] = [
    None,
    Cosine(),
    Gaussian(0.7),
    Additive(torch.randn(5, 3), torch.randn(5, 3), torch.randn(5)),
]


def a_dict(temperature: float | None, score: Score | None = None, dtype: torch.dtype = torch.float64) -> SoftDict:
    return SoftDict(torch.randn(11, 3, dtype=dtype), torch.randn(11, 2, dtype=dtype), temperature, score)


def test_a_blend_by_hand():
    """Scores 1 and 0 at temperature 1/ln 3: weights 3/4 and 1/4, so 10 * 3/4 + 30 / 4 = 15."""
    found = SoftDict(torch.eye(2), torch.tensor([[10.0], [30.0]]), temperature=1 / math.log(3))
    assert found.look_up(torch.tensor([1.0, 0.0])).item() == pytest.approx(15)


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_without_a_temperature_it_is_attention(score: Score | None):
    found, queries = a_dict(None, score), torch.randn(7, 3, dtype=torch.float64)
    out = attend(queries[None, None], found.keys[None, None], found.values[None, None], score=score)
    assert torch.equal(found.look_up(queries), out[0, 0])
    assert torch.allclose(found.weights(queries) @ found.values, found.look_up(queries), atol=1e-14)


@pytest.mark.parametrize("score", SCORES, ids=str)
@given(seed=st.integers(0, 999))
@settings(max_examples=25)
def test_the_limit_of_low_temperatures_is_the_hard_look_up(score: Score | None, seed: int):
    torch.manual_seed(seed)
    cold, hard = a_dict(1e-9, score), None
    hard = SoftDict(cold.keys, cold.values, 0, score)
    queries = torch.randn(7, 3, dtype=torch.float64)
    assert torch.allclose(cold.look_up(queries), hard.look_up(queries), atol=1e-6)
    assert torch.equal(hard.weights(queries).amax(1), torch.ones(7, dtype=torch.float64))


def test_the_limit_of_high_temperatures_is_the_mean():
    hot = a_dict(1e12)
    assert torch.allclose(hot.look_up(torch.randn(3, dtype=torch.float64)), hot.values.mean(0), atol=1e-9)


def test_keys_that_are_equally_good_share_at_temperature_0():
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = SoftDict(keys, torch.tensor([[2.0], [4.0], [100.0]]), temperature=0)
    assert found.look_up(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() == [[3.0], [100.0]]
    assert found.weights(torch.tensor([1.0, 0.0])).tolist() == [0.5, 0.5, 0.0]


def test_every_entry_is_found_under_its_own_key():
    found = SoftDict(torch.randn(501, 16), torch.randn(501, 3), temperature=0, score=Gaussian(1.0))
    assert torch.equal(found.look_up(found.keys), found.values)


def test_gradients_flow_through_a_soft_look_up():
    keys, values, query = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (5, 2), (4, 3)))
    assert torch.autograd.gradcheck(lambda k, v, q: SoftDict(k, v, 0.7).look_up(q), (keys, values, query))
    (grad,) = torch.autograd.grad(SoftDict(keys, values, 0).look_up(query).sum(), values)
    assert grad.sum().item() == 4 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SoftDict(torch.eye(3), torch.eye(2)), "3 keys and 2 values"),
        (lambda: SoftDict(torch.zeros(0, 3), torch.zeros(0, 2)), "at least one"),
        (lambda: SoftDict(torch.zeros(3), torch.eye(3)), r"keys\) is \[3\]: expected a tensor \[keys, numbers\]"),
        (lambda: SoftDict(torch.eye(3), [1, 2, 3]), r"values\) is list"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), temperature=-1), "at least 0"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), temperature=math.nan), "nan"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3)).look_up(torch.zeros(1, 1, 3)), r"queries are \[1, 1, 3\]"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3)).look_up(torch.zeros(4)), "q has 4 dimensions and k 3"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), 0).look_up(torch.zeros(5)), "q has 5 dimensions and k 3"),
    ],
)
def test_what_makes_no_sense_is_said(make: Any, message: str):
    with pytest.raises(ProblemError, match=message):
        make()
