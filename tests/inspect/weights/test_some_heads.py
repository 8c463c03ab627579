"""The weights of some heads are those heads' rows of all weights, whatever a word says of heads."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import Alibi, Bias, T5Bias, TensorBias
from regard.calls import Call, observe_calls
from regard.describe.bias import Sum
from regard.describe.score_function import ScoreFunction
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.flex import flex_attention
from regard.inspect.measures import offset_score
from regard.inspect.sweep import by_triton, sweep
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.some_heads import key_heads
from tests.inspect.dense import CASES, HEADS, definition, drawn

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("index", [2, [0, 1], [2, 0, 1], torch.tensor([1, 1])], ids=str)
def test_the_weights_of_some_heads_are_those_of_the_call(call, index):
    exact, some = definition(call), Weights.of(call).heads(index)
    index = [index] if isinstance(index, int) else index
    torch.testing.assert_close(some.dense().double(), exact.weights[:, index], atol=1e-6, rtol=0)
    torch.testing.assert_close(some.sink_share.double(), exact.sink_share[:, index], atol=1e-6, rtol=0)
    assert torch.equal(some.visible.expand(some.shape[:3]), exact.keep[:, index].sum(-1))
    covered = torch.zeros_like(exact.weights[:, index])
    for tile in some.tiles():
        covered[:, :, tile.rows, tile.keys] += tile.weights
    torch.testing.assert_close(covered, exact.weights[:, index], atol=1e-6, rtol=0)


def test_some_heads_of_one_sequence_and_some_of_those():
    call = CASES["all at once"]()
    weights = Weights.of(call).heads([5, 3, 1]).only(1).heads([2, 0])
    torch.testing.assert_close(weights.dense().double(), definition(call).weights[1:, [1, 5]], atol=1e-6, rtol=0)


def test_heads_that_share_keys_evenly_go_on_sharing_them():
    weights = Weights.of(drawn())
    assert weights.heads(range(HEADS)).k.shape[1] == 3
    assert weights.heads([2, 3]).k.shape[1] == 1
    assert weights.heads([1, 2, 3]).k.shape[1] == 3
    assert key_heads(torch.tensor([0, 2, 1]), group=2).tolist() == [0, 1, 0]


def test_words_that_do_not_tell_heads_apart_stay_as_they_are():
    weights = Weights.of(CASES["padding to the left"]())
    assert weights.heads([1]).mask is weights.mask


@pytest.mark.parametrize(
    "index",
    [np.int64(4), torch.tensor(4), torch.tensor([4]), np.array([4], dtype=np.int16), (4,), range(4, 5)],
    ids=repr,
)
def test_whatever_counts_as_an_integer_names_a_head(index):
    weights = Weights.of(drawn())
    assert torch.equal(weights.heads(index).q, weights.heads(4).q)


@pytest.mark.parametrize(
    "index", [6, -1, [0, 9], [], 1.5, [0, 1.0], "1", None, True, torch.ones(6) > 0, torch.tensor([1.0]), np.ones(1)]
)
def test_heads_that_do_not_exist_are_an_error(index):
    with pytest.raises(ProblemError, match=r"of 6 heads: expected one or more integers from 0 to 5"):
        Weights.of(drawn()).heads(index)


@spec
class Negated(T5Bias):
    """The table with the other sign."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return -super().value(b, h, q, k)


@spec
class Squared(TensorBias):
    """The squares of a table."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return super().value(b, h, q, k).square()


@spec
class Doubled(Sum):
    """Twice the sum."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return 2 * super().value(b, h, q, k)


OWN: dict[str, Bias] = {
    "buckets": Negated(torch.linspace(-1, 1, 8 * HEADS).view(8, HEADS)),
    "a table": Squared(torch.linspace(-2, 2, HEADS * 29 * 29).view(HEADS, 29, 29)),
    "a sum": Doubled(Alibi(HEADS), TensorBias(torch.linspace(0, 1, HEADS * 29).view(HEADS, 1, 29))),
}


@pytest.mark.parametrize("name", OWN)
def test_a_subclass_of_a_bias_has_values_of_its_own_in_some_heads_and_in_a_sweep(name: str):
    call = drawn(bias=OWN[name])
    exact, weights = definition(call).weights, Weights.of(call)
    torch.testing.assert_close(weights.heads([4, 1]).dense().double(), exact[:, [4, 1]], atol=1e-6, rtol=0)
    torch.testing.assert_close(sweep(weights).columns.double(), exact.sum(2), atol=1e-5, rtol=0)
    assert not by_triton.knows(weights) or OWN[name].per_distance()


TABLE = torch.randn(HEADS)
SCORES = {
    "a term": lambda score, b, h, q, k: torch.sin(score) * (h + 1),
    "a table": lambda score, b, h, q, k: torch.sin(score) * TABLE[h] - (q - k).abs() / 4,
    "a function that cannot be traced": lambda score, b, h, q, k: _Doubled.apply(score) - 0.1 * h,
    "a constant": lambda score, b, h, q, k: torch.zeros_like(score) * torch.sin(score),
}


class _Doubled(torch.autograd.Function):
    """Twice the score."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score: torch.Tensor) -> torch.Tensor:
        return 2 * score

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


@pytest.mark.parametrize("name", SCORES)
def test_a_call_of_flex_attention_has_the_weights_of_its_function_of_the_score(name: str):
    score_mod, calls = SCORES[name], list[Call]()
    q, k = torch.randn(2, HEADS, 29, 7), torch.randn(2, HEADS, 29, 7)
    with observe_calls(calls.append):
        out = flex_attention(q, k, k, score_mod=score_mod)
    (call,) = calls
    assert isinstance(call.bias, ScoreFunction)
    h, i, j = torch.arange(HEADS)[:, None, None], torch.arange(29)[:, None], torch.arange(29)
    expected = score_mod(q @ k.mT * 7**-0.5, 0, h, i, j).softmax(-1)
    weights = Weights.of(call)
    close = {"atol": 1e-5, "rtol": 0}
    torch.testing.assert_close(weights.dense(), expected, **close)
    torch.testing.assert_close(weights.dense() @ k, out, **close)
    torch.testing.assert_close(weights.heads([4, 1]).dense(), expected[:, [4, 1]], **close)
    torch.testing.assert_close(weights.heads(range(2, 4)).only(1).dense(), expected[1:, 2:4], **close)
    torch.testing.assert_close(weights.scores(3, 5).softmax(-1), expected[:, :, 3:5], **close)
    torch.testing.assert_close(sweep(weights).columns, expected.sum(2).double(), check_dtype=False, **close)
    before = expected.diagonal(-1, 2, 3).mean(-1)
    torch.testing.assert_close(offset_score(weights).value, before, check_dtype=False, **close)
    row, key = torch.tensor([0, 28, 5]), torch.tensor([3, 0, 5])
    torch.testing.assert_close(weights.pairs(row, key), expected[:, :, row, key], **close)
