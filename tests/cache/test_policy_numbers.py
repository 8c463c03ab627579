"""Numbers of policies may be NumPy's, as np.linspace gives a budget for each layer: the policies are the same."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import ProblemError
from regard.cache.evict import Eviction, Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention


@pytest.mark.parametrize("kind", [SinksAndRecent, Knorm, H2O, TOVA, SnapKV, ExpectedAttention])
def test_a_budget_may_be_of_numpy(kind: Any):
    budgets = np.linspace(512, 64, 8).astype(int)
    assert [kind(budget) for budget in budgets] == [kind(int(budget)) for budget in budgets]
    for budget in (np.int64(128), np.int32(128), torch.tensor(128)):
        found: Eviction = kind(budget, sinks=np.int64(2))
        assert found == kind(128, sinks=2)
        assert repr(found) == repr(kind(128, sinks=2))
        assert hash(found) == hash(kind(128, sinks=2))
        assert type(found.budget) is int


@pytest.mark.parametrize("share", [np.float64(0.5), np.float32(0.5)])
def test_a_share_may_be_of_numpy(share: Any):
    found = Knorm(share)
    assert repr(found) == repr(Knorm(0.5))
    assert found.kept(201) == Knorm(0.5).kept(201) == 101


def test_other_numbers_of_a_policy_may_be_of_numpy():
    window, kernel, every = np.int64(6), np.int64(5), np.int64(2)
    found = SnapKV(64, window=window, kernel=kernel, every=every)
    assert repr(found) == repr(SnapKV(64, window=6, kernel=5, every=2))
    assert H2O(64, recent=np.int64(9)).recent == 9  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [True, np.bool_(True), torch.tensor(0.5), [64, 32], 2j, None])
def test_what_is_no_number_is_refused(wrong: Any):
    with pytest.raises(ProblemError, match="expected a number of tokens, or a share below 1"):
        Knorm(wrong)
    for kernel in (np.int64(4), np.float64(5), True):
        with pytest.raises(ProblemError, match="expected an odd number of keys"):
            SnapKV(64, kernel=kernel)  # pyright: ignore[reportArgumentType]
