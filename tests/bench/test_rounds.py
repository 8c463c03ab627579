"""Rounds measure everything once each, end when enough is known, and keep what they have when interrupted."""

import time

import pytest
import torch

from regard.bench.rounds import Effort, Rounds, interleaved, on_threads, timed


def test_every_round_measures_everything_and_every_other_in_the_opposite_order():
    order = []
    measures = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    rounds = interleaved(measures, Effort(seconds=0.0, least=2))
    assert order == [*"abc", *"cba"]
    assert rounds.rounds == [{"a": 1.0, "b": 1.0, "c": 1.0}] * 2


def test_rounds_go_on_for_their_time_but_never_beyond_the_most():
    def measures():
        return {"a": lambda: time.sleep(0.001) or 1.0}

    assert len(interleaved(measures(), Effort(seconds=60.0, least=1, most=7)).rounds) == 7
    assert len(interleaved(measures(), Effort(seconds=0.05, least=1)).rounds) > 7


def test_a_ratio_is_taken_within_each_round():
    rounds = Rounds([{"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 20.0}, {"a": 100.0, "b": 500.0}])
    assert rounds.median(lambda b, a: b / a, "b", "a") == 2.0
    assert rounds.median(lambda c: c, "c") is None


def test_progress_knows_how_many_rounds_there_will_be():
    output = []
    interleaved({"a": lambda: 1.0}, Effort(seconds=0.0, least=3, most=3), lambda *now: output.append(now))
    assert output == [(1, 3), (2, 3), (3, 3)]


def interrupts_at(count):
    """A measurement that Ctrl-C falls into at its call number `count`."""
    calls = []

    def measure():
        calls.append(None)
        if len(calls) == count:
            raise KeyboardInterrupt
        return float(len(calls))

    return measure


def test_an_interruption_keeps_the_whole_rounds():
    rounds = interleaved({"a": interrupts_at(5), "b": lambda: 1.0}, Effort())
    assert rounds.interrupted
    assert [one["a"] for one in rounds.rounds] == [1.0, 2.0, 3.0, 4.0]


def test_an_interruption_before_the_first_round_is_raised():
    with pytest.raises(KeyboardInterrupt):
        interleaved({"a": interrupts_at(1)}, Effort())


def test_a_fast_call_is_measured_many_times_and_a_slow_one_once():
    fast, slow = [], []
    measure = timed(lambda: fast.append(None))
    fast.clear()
    assert 0 < measure() < 1e-4
    assert len(fast) > 10
    measure = timed(lambda: slow.append(time.sleep(0.006)))
    slow.clear()
    assert 0.006 < measure() < 0.1
    assert len(slow) == 1


def test_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
