"""Positions that are added to embeddings; positions and scalings as specs, and what they refuse."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.describe.position import Learned, Rope, Sinusoidal
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn
from regard.describe.serialized import deserialize

FAR = 1_000_000


@pytest.mark.parametrize("base", [10000.0, 71.0])
def test_sinusoids_move_on_by_one_rotation_for_all_positions(base: float):
    word, ahead = Sinusoidal(14, base), 17
    here = word.table(torch.arange(0, FAR, 9973, dtype=torch.float64)).unflatten(-1, (7, 2))
    there = word.table(torch.arange(0, FAR, 9973, dtype=torch.float64) + ahead).unflatten(-1, (7, 2))
    angle = ahead * base ** (-torch.arange(7, dtype=torch.float64) / 7)
    block = torch.stack((angle.cos(), angle.sin(), -angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
    torch.testing.assert_close(torch.einsum("ixy,piy->pix", block, here), there, atol=1e-9, rtol=0)


def test_sinusoids_are_the_papers():
    table = Sinusoidal(4, base=100.0).table(torch.tensor([[0, 3]]))  # frequencies 1 and 1/10
    hand = [[0.0, 1.0, 0.0, 1.0], [math.sin(3), math.cos(3), math.sin(0.3), math.cos(0.3)]]
    torch.testing.assert_close(table, torch.tensor([hand]))


@pytest.mark.parametrize("word", [Rope, Sinusoidal])
def test_a_width_is_a_whole_number_of_any_kind(word: Any):
    assert word(np.int64(16)) == word(16)
    for width, says in ((True, "whole number"), (16.0, "whole number"), (7, "even number"), (0, "at least 2")):
        with pytest.raises(ProblemError, match=says):
            word(width)


# ---- added to embeddings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sinusoids_are_added_in_the_type_of_the_embeddings(dtype: torch.dtype):
    word, x = Sinusoidal(6), torch.randn(2, 5, 6).to(dtype)
    wide = word.table(torch.arange(5, dtype=torch.float64))
    torch.testing.assert_close(word.add(x), (x.double() + wide).to(dtype), atol=1e-6, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(word.add(x, torch.tensor([[0, 1, 2, 3, 4]] * 2)), word.add(x))
    torch.testing.assert_close(word.add(x[:, 2:], 2), word.add(x)[:, 2:])


def test_learned_positions_are_rows_of_the_weight():
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    word, x = Learned(weight), torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(word.add(x), x + weight[:5])
    assert torch.equal(word.add(x, 6), x + weight[6:])
    p = torch.randint(0, 11, (2, 5))
    assert torch.equal(word.add(x, p), x + weight[p])
    assert torch.equal(word.table(p), weight[p])
    assert torch.autograd.gradcheck(lambda w: Learned(w).add(x, p), weight)
    assert word.add(x.bfloat16()).dtype == torch.bfloat16


def test_absolute_positions_are_traced_whole():
    x, weight = torch.randn(2, 5, 6), torch.randn(11, 6)
    for word in (Sinusoidal(6), Learned(weight)):
        traced = torch.compile(word.add, backend="eager", fullgraph=True)
        torch.testing.assert_close(traced(x, 3), word.add(x, 3))
        torch.testing.assert_close(traced(x, torch.arange(5)), word.add(x))


# ---- words ----------------------------------------------------------------------------------------------------------


def test_words_are_values():
    assert Rope(8, scaling=Yarn(4.0, 64)) == Rope(8, scaling=Yarn(4.0, 64))
    assert hash(Rope(8)) == hash(Rope(8))
    assert Rope(8) != Rope(8, interleaved=True)
    assert repr(Rope(8, scaling=Yarn(4.0, 64))) == "Rope(dim=8, scaling=Yarn(factor=4.0, original=64))"
    rope = Rope(4, scaling=LongRope((1.0, 2.0), (2.0, 3.0), 4))
    tensors: list[Tensor] = []
    numbers: list[int] = []
    assert deserialize(rope.serialize(tensors, numbers), tensors, numbers) == rope


X = torch.zeros(2, 3, 5, 8)


def test_positions_and_tokens_may_be_integers_of_numpy():
    rope = Rope(8, scaling=DynamicNTK(2.0, 4))
    assert torch.equal(rope.rotate(X + 1, np.int64(2), tokens=np.int64(9)), rope.rotate(X + 1, 2, tokens=9))  # pyright: ignore[reportArgumentType]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "an odd dim": (lambda: Rope(7), "dim=7.*even"),
    "a negative dim": (lambda: Sinusoidal(-2), "dim=-2.*even"),
    "an odd embedding": (lambda: Sinusoidal(5), "dim=5.*even"),
    "a base of 1": (lambda: Rope(8, base=1.0), "base=1.0.*above 1"),
    "no fraction": (lambda: Rope(8, fraction=0.0), "fraction=0.0"),
    "more than all": (lambda: Rope(8, fraction=1.5), "fraction=1.5"),
    "an odd number that turns": (lambda: Rope(10, fraction=0.5), r"int\(10 \* 0.5\) = 5 dimensions.*even"),
    "nothing that turns": (lambda: Rope(8, fraction=0.1), "= 0 dimensions"),
    "a factor as the scaling": (lambda: Rope(8, scaling=4.0), "scaling=4.0.*Yarn"),
    "a factor below 1": (lambda: Linear(0.5), "factor=0.5.*at least 1"),
    "a factor of text": (lambda: NTK("4"), "factor='4'"),
    "no training length": (lambda: Yarn(4.0, 0), "original=0"),
    "half a training length": (lambda: DynamicNTK(4.0, 2.5), "original=2.5"),
    "betas swapped": (lambda: Yarn(4.0, 64, 1.0, 32.0), "beta_fast > beta_slow"),
    "one mscale": (lambda: Yarn(4.0, 64, mscale=1.0), "mscale=1.0, mscale_all_dim=None.*both or neither"),
    "an mscale of 0": (lambda: Yarn(4.0, 64, mscale=0.0, mscale_all_dim=1.0), "mscale=0.0"),
    "low above high": (lambda: Llama3(8.0, 4.0, 1.0), "low=4.0, high=1.0"),
    "tuples of two lengths": (lambda: LongRope((1.0, 2.0), (1.0,), 4), "short has 2 divisors and long has 1"),
    "tuples for another dim": (lambda: Rope(8, scaling=LongRope((1.0,) * 3, (1.0,) * 3, 4)), "3 divisors.*expected 4"),
    "a list of divisors": (lambda: LongRope([1.0], (1.0,), 4), "expected a tuple"),
    "a divisor of 0": (lambda: LongRope((0.0,), (1.0,), 4), "above 0"),
    "a share above 1": (lambda: Proportional(1.5), "share=1.5"),
    "ntk for a single pair": (lambda: Rope(2, scaling=NTK(2.0)), "at least 4.*not 2"),
    "x of another dim": (lambda: Rope(6).rotate(X), r"x is \[2, 3, 5, 8\].*dim 6"),
    "x of integers": (lambda: Rope(8).rotate(X.long()), r"torch.int64 \[2, 3, 5, 8\]"),
    "x that is no tensor": (lambda: Rope(8).rotate([1.0]), r"x is \[1.0\]"),
    "too few positions": (lambda: Rope(8).rotate(X, torch.arange(4)), r"positions are \[4\].*\[tokens\] = \[5\]"),
    "positions of another batch": (lambda: Rope(8).rotate(X, torch.zeros(3, 5)), r"\[3, 5\].*\[2, 5\]"),
    "a position alone": (lambda: Rope(8).rotate(X, torch.tensor(4)), r"positions are \[\]"),
    "positions per head": (lambda: Rope(8).rotate(X, torch.zeros(2, 3, 5)), r"\[2, 3, 5\]"),
    "positions that are a mask": (lambda: Rope(8).rotate(X, torch.ones(5, dtype=torch.bool)), "torch.bool"),
    "a float as the offset": (lambda: Rope(8).rotate(X, 1.5), "positions is 1.5"),
    "no tokens": (lambda: Rope(8).rotate(X, tokens=0), "tokens is 0"),
    "embeddings of another dim": (lambda: Sinusoidal(6).add(X[0]), r"\[3, 5, 8\].*dim 6"),
    "embeddings and positions": (lambda: Sinusoidal(8).add(X[0], torch.zeros(2, 5)), r"\[2, 5\].*\[3, 5\]"),
    "a weight of integers": (lambda: Learned(torch.zeros(4, 8, dtype=torch.int64)), "int64"),
    "a flat weight": (lambda: Learned(torch.zeros(4)), r"\[4\]"),
    "beyond the table": (lambda: Learned(torch.zeros(4, 8)).add(X[0]), "from 0 to 4.*for 0 to 3"),
    "beyond by an offset": (lambda: Learned(torch.zeros(6, 8)).add(X[0], 2), "from 2 to 6.*for 0 to 5"),
    "before the table": (lambda: Learned(torch.zeros(6, 8)).add(X[0], -1), "from -1 to 3"),
    "one beyond the table": (lambda: Learned(torch.zeros(6, 8)).table(torch.tensor([0, 6])), "from 0 to 6.*for 0 to 5"),
    "learned in between": (lambda: Learned(torch.zeros(6, 8)).table(torch.tensor([0.5])), "whole positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused(name: str):
    make, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        make()
