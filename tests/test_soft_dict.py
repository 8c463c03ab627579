"""The soft dictionary: a blend at every temperature, a look-up of the best key at 0."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import ProblemError, attend
from regard.scores import Additive, Bilinear, Cosine, Epanechnikov, Gaussian, Score, SoftDict

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


def test_half_precision_does_not_make_ties_at_temperature_0():
    keys = torch.tensor([[1.0, 0.01], [1.0, 0.005]], dtype=torch.bfloat16)
    found = SoftDict(keys, torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16), temperature=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert found.look_up(torch.tensor([1.0, 0.1], dtype=torch.bfloat16)).item() == 1


@pytest.mark.parametrize("temperature", [0, 1e-20, 1.0])
def test_nan_is_not_hidden(temperature: float):
    found = SoftDict(torch.eye(3), torch.eye(3), temperature)
    assert bool(found.look_up(torch.tensor([1.0, torch.nan, 0.0])).isnan().all())
    assert bool(found.weights(torch.tensor([1.0, torch.nan, 0.0])).isnan().all())


def test_very_low_temperatures_choose_the_best_key():
    found = SoftDict(torch.eye(2) * 10, torch.tensor([[1.0], [2.0]]), temperature=1e-20)
    assert found.look_up(torch.tensor([10.0, 9.9])).item() == 1
    assert found.weights(torch.tensor([10.0, 9.9])).tolist() == [1.0, 0.0]


def test_a_query_beyond_a_support_finds_nothing():
    for temperature in (None, 0, 0.5):
        found = SoftDict(torch.zeros(3, 1), torch.ones(3, 1), temperature, Epanechnikov(1.0))
        assert found.look_up(torch.tensor([5.0])).item() == 0
        assert not found.weights(torch.tensor([5.0])).any()


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
        (lambda: SoftDict(torch.zeros(3, 0), torch.eye(3)), "keys of 0 dimensions"),
        (lambda: SoftDict(torch.zeros(3), torch.eye(3)), r"keys\) is torch.float32 \[3\]: expected a tensor of floats"),
        (lambda: SoftDict(torch.eye(3), [1, 2, 3]), r"values\) is list: expected a tensor of floats"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), temperature=-1), "temperature=-1.: expected a number from"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), temperature=math.nan), "nan"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3)).look_up(torch.zeros(1, 1, 3)), r"queries is .* \[1, 1, 3\]"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), 1e-310), "expected a number from 1e-30 up, 0 for the best"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3).double()), "must agree"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), score="dot"), "expected a score such as"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), backend="fast"), "backend 'fast' is not known"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3)).look_up([1.0, 0.0]), "queries is list"),
        (
            lambda: SoftDict(torch.eye(2), torch.eye(2), 0, Bilinear(torch.ones(3, 2, 2))).look_up(torch.ones(2)),
            "for 3",
        ),
        (lambda: SoftDict(torch.eye(3), torch.eye(3)).look_up(torch.zeros(4)), "q has 4 dimensions and k 3"),
        (lambda: SoftDict(torch.eye(3), torch.eye(3), 0).look_up(torch.zeros(5)), "q has 5 dimensions and k 3"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str):
    with pytest.raises(ProblemError, match=message):
        make()


def test_with_the_reference_a_look_up_has_a_second_derivative():
    found = a_dict(0.5)
    query = torch.randn(3, dtype=torch.float64, requires_grad=True)
    twice = SoftDict(found.keys, found.values, 0.5, backend="reference")
    assert torch.autograd.gradgradcheck(twice.look_up, (query,))
    assert "backend='reference'" in repr(twice)
