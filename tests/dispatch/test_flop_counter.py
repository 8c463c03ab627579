"""Calls that torch's FLOP counter counts."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from regard import Causal, KeyLengths, Window, attend, attend_state, explain, observe_calls
from tests.dispatch.traced import SINK, K, Q, V


def counted_flops(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "words",
    [{}, {"mask": Causal() & Window(7)}, {"mask": KeyLengths(torch.tensor([3, 23]))}, {"backend": "reference"}],
    ids=str,
)
def test_torchs_counter_counts_the_flops_of_the_pairs_that_are_kept(words: dict[str, Any]):
    q = Q.clone().requires_grad_()
    forward = explain(Q, K, V, **words).flops
    assert counted_flops(lambda: attend(Q, K, V, **words)) == forward
    assert counted_flops(lambda: attend_state(Q, K, V, **words)) == forward
    both = counted_flops(lambda: attend(q, K, V, **words).sum().backward())
    assert both == forward + forward // (2 * 16) * 2 * (3 * 8 + 2 * 8)  # 8 + 8 dims a pair, five products back


def test_a_call_that_is_counted_is_the_same_call():
    expected = attend(Q, K, V, mask=Causal(), sink=SINK)
    with FlopCounterMode(display=False):
        assert torch.equal(attend(Q, K, V, mask=Causal(), sink=SINK), expected)


def test_an_observer_gets_calls_that_are_counted():
    calls: list[Any] = []
    with FlopCounterMode(display=False), observe_calls(calls.append):
        attend(Q, K, V)
    assert len(calls) == 1


def test_a_call_whose_offset_is_a_tensor_is_counted_as_well():
    expected = explain(Q, K, V, mask=Causal(), offset=5).flops
    assert counted_flops(lambda: attend(Q, K, V, mask=Causal(), offset=torch.tensor(5))) == expected


def test_masks_without_data_count_as_none():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, lengths = torch.empty(2, 4, 11, 8), torch.empty(2, 2, 23, 8), torch.ones(2, dtype=torch.int64)
        attend(q, k, k, mask=KeyLengths(lengths))
    assert counter.get_total_flops() == 2 * 2 * 4 * 11 * 23 * 16
