"""A verdict is counted from checks."""

import pytest

from experiments.record import HOLDS, IN_PART, NOT_HERE, Check, Result

YES, NO = Check("a", 1.0, 0.5, 1.5), Check("b", 2.0, 0.5, 1.5)


@pytest.mark.parametrize(("checks", "verdict"), [((YES, YES), HOLDS), ((YES, NO), IN_PART), ((NO, NO), NOT_HERE)])
def test_a_verdict_counts_the_checks_that_hold(checks, verdict):
    assert Result("", checks).verdict() == verdict


def test_a_check_holds_between_its_bounds():
    assert Check("", 1.0, low=1.0).holds()
    assert not Check("", 0.9, low=1.0).holds()
    assert Check("", 1.0, high=1.0).holds()
    assert not Check("", 1.1, high=1.0).holds()


def test_a_check_of_nan_does_not_hold():
    assert not Check("", float("nan"), high=1.0).holds()
    assert not Check("", float("nan")).holds()


def test_a_check_states_its_range():
    assert [check.expected() for check in (YES, Check("", 0.0, low=1e-9), Check("", 0.0, high=4000))] == [
        "0.5 to 1.5", "at least 1e-09", "at most 4,000",
    ]  # fmt: skip
