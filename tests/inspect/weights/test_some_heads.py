"""The weights of some heads are those heads' rows of all weights, whatever a word says of heads."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import Alibi, Bias, T5Bias, TensorBias, TensorMask
from regard.describe.bias import Sum
from regard.describe.mask import CallSizes, Rectangles
from regard.describe.spec import spec
from regard.errors import ProblemError
from regard.inspect.sweep import by_triton, sweep
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.some_heads import OfHeads, bias_of_heads, key_heads
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
    bias = TensorBias(torch.randn(29, 29), 0)
    assert bias_of_heads(bias, torch.tensor([1])) is bias


def test_tables_stay_tables_that_engines_know():
    index = torch.tensor([4, 1])
    table, tensor = torch.randn(8, 6), torch.randn(6, 29, 29)
    some = bias_of_heads(T5Bias(table) + TensorBias(tensor, 0), index)
    assert isinstance(some, Sum)
    assert isinstance(some.a, T5Bias)
    assert isinstance(some.b, TensorBias)
    assert torch.equal(some.a.table, table[:, index])
    assert torch.equal(some.b.tensor, tensor[index])
    alibi = bias_of_heads(Alibi(6), index)
    assert alibi is not None
    assert alibi.per_distance()


def test_bounds_and_signatures_are_those_of_the_head_meant():
    keep = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    keep[0, 1] = True
    mask = TensorMask(keep).bind(CallSizes(1, 2, 4, 4, 0))
    first = Rectangles(*(np.array([n]) for n in (0, 0, 0, 4, 0, 4)))
    second = first._replace(h=np.array([1]))
    assert [bool(x[0]) for x in OfHeads(mask, (0,)).bounds(first)] == [False, False]
    assert [bool(x[0]) for x in OfHeads(mask, (1,)).bounds(first)] == [True, True]
    assert np.array_equal(OfHeads(mask, (1,)).signature(first), mask.signature(second))
    assert not np.array_equal(mask.signature(first), mask.signature(second))
    assert OfHeads(mask, (1, 0, 1)).broadcast_shape() == (1, 3)


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
