"""The scan over chunks and the sums of logarithms that all rules share."""

import pytest
import torch

from regard.linear.segment import after, doubled, one_by_one, summed


@pytest.mark.parametrize("chunks", [1, 2, 5, 8, 13])
def test_states_come_out_alike_one_by_one_and_by_doubling(chunks: int):
    steps, first = torch.randn(2, 3, chunks, 5, 7, dtype=torch.float64), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    for shape in ((2, 3, chunks, 5, 1), (1, 1, chunks, 1, 1)):
        fade = torch.rand(shape, dtype=torch.float64)
        state, right = first, []
        for c in range(chunks):
            right.append(state)
            state = fade[:, :, c] * state + steps[:, :, c]
        for found, last in (one_by_one(steps, first, fade), doubled(steps, first, fade)):
            torch.testing.assert_close(found, torch.stack(right, 2))
            torch.testing.assert_close(last, state)


def test_sums_of_logarithms_are_taken_between_two_tokens():
    fade = torch.tensor([-1.0, -2.0, -torch.inf, -4.0])
    low = -torch.inf
    right = [[0.0, low, low, low], [-2.0, 0.0, low, low], [low, low, 0.0, low], [low, low, -4.0, 0.0]]
    assert summed(fade).tolist() == right
    assert after(fade, 0).tolist() == [low, low, -4.0, 0.0]
