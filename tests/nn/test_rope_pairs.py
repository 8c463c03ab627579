"""`RopePairs`: a choice of the pairs of a `Rope` for each head."""

import pytest
import torch

from regard.describe.position import Rope
from regard.describe.rope_scaling import DynamicNTK, LongRope, Scaling, Yarn
from regard.errors import ProblemError
from regard.nn.rope_pairs import RopePairs
from tests.own_rope import Mirrored


def test_all_pairs_in_their_order_are_the_rope_itself():
    x = torch.randn(2, 3, 5, 8).double()
    chosen, whole = RopePairs(Rope(8), ((0, 1, 2, 3),)), Rope(8, interleaved=True)
    positions = torch.randint(0, 1000, (2, 5))
    for at in (None, 7, torch.arange(5), positions):
        torch.testing.assert_close(chosen.rotate(x, at), whole.rotate(x, at))


def test_pairs_keep_the_scaling_and_the_attention_factor_of_their_rope():
    yarn = Yarn(4.0, 32)
    x = torch.randn(2, 3, 5, 4).double()
    whole = Rope(8, 100.0, yarn, interleaved=True).rotate(torch.cat([torch.zeros_like(x[..., :4]), x], -1), 9)
    torch.testing.assert_close(RopePairs(Rope(8, 100.0, yarn), ((2, 3),)).rotate(x, 9), whole[..., 4:])


@pytest.mark.parametrize("scaling", [DynamicNTK(2.0, 4), LongRope((1.0,) * 4, (2.0,) * 4, 4)], ids=str)
@pytest.mark.parametrize(("tokens", "first"), [(0, None), (0, 3), (2, -3), (2, torch.tensor([-5, -2]))], ids=str)
def test_all_pairs_are_the_rope_without_tokens_and_before_the_first_one(
    scaling: Scaling, tokens: int, first: int | torch.Tensor | None
):
    rope = Rope(8, interleaved=True, scaling=scaling)
    x = torch.randn(1, 3, tokens, 8)
    torch.testing.assert_close(RopePairs(rope, ((0, 1, 2, 3),)).rotate(x, first), rope.rotate(x, first))


def test_each_head_turns_by_its_own_pairs_and_query_heads_follow_their_key_head():
    pairs = RopePairs(Rope(8), ((0,), (3,)))
    out = pairs.rotate(torch.tensor([1.0, 0.0]).expand(1, 4, 1, 2), positions=1)
    expected = torch.tensor([1.0, 1.0, 1e-3, 1e-3])  # radians: 10000 ** 0 and 10000 ** (-3 / 4)
    torch.testing.assert_close(out[0, :, 0], torch.stack([expected.cos(), expected.sin()], -1))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [((), "the same number of pairs"), (((0,), (1, 2)), "the same number"), (((0, 0),), "different pairs from 0 to 3"),
     (((4,),), "different pairs from 0 to 3"), (((-1,),), "different pairs")],
)  # fmt: skip
def test_pairs_that_are_not_there_are_refused(pairs, message):
    with pytest.raises(ProblemError, match=message):
        RopePairs(Rope(8), pairs)


def test_pairs_refuse_heads_that_they_were_not_chosen_for():
    with pytest.raises(ProblemError, match=r"expected \[batch, heads, tokens, 4\], heads a multiple of 2"):
        RopePairs(Rope(8), ((0, 1), (1, 2))).rotate(torch.zeros(1, 3, 5, 4))
    for wrong, message in (
        (torch.zeros(4), r"x has shape \[4\]"),
        (torch.ones(1, 2, 5, 4, dtype=torch.int32), "x is torch.int32: expected float64"),
        ([1.0], "x is list: expected a tensor"),
    ):
        with pytest.raises(ProblemError, match=message):
            RopePairs(Rope(8), ((0, 1), (1, 2))).rotate(wrong)


@pytest.mark.parametrize("pairs", [[[0, 1]], ((0.0, 1.0),), ((0, True),), (0, 1), 3])
def test_pairs_are_tuples_of_whole_numbers(pairs):
    with pytest.raises(ProblemError, match="expected a tuple of whole numbers for each head"):
        RopePairs(Rope(8), pairs)
    with pytest.raises(ProblemError, match=r"RopePairs.rope=8.: expected a Rope"):
        RopePairs(8, ((0, 1),))
    with pytest.raises(ProblemError, match=r"RopePairs.rope=Mirrored.*Mirrored has a rotate of its own"):
        RopePairs(Mirrored(8), ((0, 1),))
