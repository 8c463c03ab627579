"""The mask and the bias of some heads of a call are those of the heads that are meant."""

import numpy as np
import pytest
import torch

from regard import Alibi, Causal, MaskFunction, T5Bias, TensorBias, TensorMask, check_mask
from regard.describe.bias import Sum
from regard.describe.mask import CallSizes, Rectangles
from regard.describe.score_function import ScoreFunction
from regard.describe.some_heads import MaskOfHeads, bias_of_heads, mask_of_heads

CHOSEN = [(4, 1), (2, 3, 4), (5,)]


def test_what_is_the_same_for_all_heads_stays_as_it_is():
    bias = TensorBias(torch.randn(29, 29), 0)
    assert bias_of_heads(bias, (1,)) is bias
    assert mask_of_heads(Causal(), (1,)) == Causal()


def test_the_only_head_of_a_call_may_be_taken_twice():
    """Its mask has one head, and reads the number of the head: the second is head 0 as well."""
    mask = MaskFunction(lambda b, h, q, k: (k + h) % 2 == 0)
    twice = mask_of_heads(mask, (0, 0))
    assert twice is not None
    head, key = torch.arange(2)[:, None], torch.arange(5)
    assert torch.equal(twice.keep(0, head, 0, key), (key % 2 == 0).expand(2, 5))


@pytest.mark.parametrize("heads", CHOSEN)
def test_tables_stay_tables_that_backends_support(heads: tuple[int, ...]):
    index = list(heads)
    table, tensor = torch.randn(8, 6), torch.randn(6, 29, 29)
    some = bias_of_heads(T5Bias(table) + TensorBias(tensor, 0), heads)
    assert isinstance(some, Sum)
    assert isinstance(some.a, T5Bias)
    assert isinstance(some.b, TensorBias)
    assert torch.equal(some.a.table, table[:, index])
    assert torch.equal(some.b.tensor, tensor[index])
    alibi = bias_of_heads(Alibi(6), heads)
    assert alibi is not None
    assert alibi.per_distance()
    positions = torch.arange(len(heads))[:, None], 7, torch.arange(9)
    assert torch.equal(alibi.value(0, *positions), Alibi(6).value(0, torch.tensor(index)[:, None], *positions[1:]))


def test_gradients_of_adjacent_heads_flow_to_the_table_without_a_copy():
    table = torch.randn(6, 5, 5, requires_grad=True)
    some = bias_of_heads(TensorBias(table, 0), (2, 3))
    assert isinstance(some, TensorBias)
    assert some.tensor.data_ptr() == table[2].data_ptr()
    some.tensor.sum().backward()
    assert table.grad is not None
    assert table.grad.sum((1, 2)).tolist() == [0, 0, 25, 25, 0, 0]


@pytest.mark.parametrize("heads", CHOSEN)
def test_a_function_of_the_score_is_called_with_the_heads_that_are_meant(heads: tuple[int, ...]):
    of_head = ScoreFunction(lambda scores, b, h, q, k: scores * h)
    some = bias_of_heads(of_head, heads)
    assert isinstance(some, ScoreFunction)
    ones = torch.ones(1, len(heads), 3, 3)
    found = some.changed(ones, 0, torch.arange(len(heads))[:, None, None], torch.arange(3)[:, None], torch.arange(3))
    assert found[0, :, 0, 0].tolist() == list(heads)


def test_bounds_and_signatures_are_those_of_the_head_meant():
    keep = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    keep[0, 1] = True
    mask = TensorMask(keep).bind(CallSizes(1, 2, 4, 4, 0))
    first = Rectangles(*(np.array([n]) for n in (0, 0, 0, 4, 0, 4)))
    second = first._replace(h=np.array([1]))
    assert [bool(x[0]) for x in MaskOfHeads(mask, (0,)).bounds(first)] == [False, False]
    assert [bool(x[0]) for x in MaskOfHeads(mask, (1,)).bounds(first)] == [True, True]
    assert np.array_equal(MaskOfHeads(mask, (1,)).signature(first), mask.signature(second))
    assert not np.array_equal(mask.signature(first), mask.signature(second))
    assert MaskOfHeads(mask, (1, 0, 1)).broadcast_shape() == (1, 3)


@pytest.mark.parametrize("heads", CHOSEN)
def test_a_mask_of_some_heads_keeps_what_the_heads_keep(heads: tuple[int, ...]):
    keep = torch.rand(2, 6, 9, 9) < 0.5
    mask = (Causal() & TensorMask(keep)).bind(CallSizes(2, 6, 9, 9, 0))
    some = MaskOfHeads(mask, heads)
    check_mask(some, queries=9, keys=9, batch=2, heads=len(heads))
    at = (torch.arange(n).view(-1, *[1] * axes) for n, axes in ((2, 3), (len(heads), 2), (9, 1), (9, 0)))
    assert torch.equal(some.keep(*at), keep[:, list(heads)].tril())
