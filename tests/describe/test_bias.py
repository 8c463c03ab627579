"""Biases: worked numbers of the papers, sums, and what is refused."""

import math
from dataclasses import field
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.t5.modeling_t5 import T5Attention

from regard import Alibi, ProblemError, T5Bias, TensorBias, attend, explain
from regard.describe.bias import Sum
from regard.describe.mask import CallSizes
from regard.extend import Bias, spec


def test_alibi_slopes_are_the_papers():
    assert Alibi(8).slope_per_head().tolist() == [2.0**-i for i in range(1, 9)]  # §3: 1/2, 1/4, ..., 1/256 for 8 heads
    twelve = Alibi(12).slope_per_head().tolist()
    assert twelve[:8] == Alibi(8).slope_per_head().tolist()
    assert twelve[8:] == pytest.approx([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])


def test_alibi_grows_with_the_distance_to_either_side():
    value = Alibi(2).value(0, torch.tensor([0, 1])[:, None], torch.tensor(2), torch.arange(4))
    assert value.tolist() == [[-0.125, -0.0625, 0.0, -0.0625], [-2 / 256, -1 / 256, 0.0, -1 / 256]]


def test_alibi_takes_slopes():
    slopes = Alibi(4).slope_per_head().float()
    q = torch.randn(1, 4, 7, 8)
    torch.testing.assert_close(attend(q, q, q, bias=Alibi(slopes=slopes)), attend(q, q, q, bias=Alibi(4)))
    assert repr(Alibi(slopes=slopes)) == "Alibi(heads=4, slopes=float32[4])"
    assert Alibi(slopes=slopes) == Alibi(4, slopes.clone()) != Alibi(slopes=slopes + 1)
    assert "bias Alibi(heads=4, slopes=float32[4])" in str(explain(q, q, q, bias=Alibi(slopes=slopes)))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_gradients_flow_to_slopes(backend: str | None):
    q, k, v = torch.randn(3, 1, 2, 7, 8, dtype=torch.float64)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    bias = TensorBias(-slopes[:, None, None] * distance)
    (expected,) = torch.autograd.grad(attend(q, k, v, bias=bias, backend="reference").square().sum(), slopes)
    out = attend(q, k, v, bias=Alibi(slopes=slopes), backend=backend)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), slopes)[0], expected)


def _t5_bucket(distance: int, *, bidirectional: bool, buckets: int, limit: int) -> int:
    """Raffel et al. 2020 for one number, in words of the paper rather than of tensors."""
    start = 0
    if bidirectional:
        buckets //= 2
        start, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    ratio = math.log(distance / exact) / math.log(limit / exact)
    return start + min(exact + int(ratio * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_the_papers(bidirectional: bool):
    distances = [
        d for d in range(-300, 301) if abs(d) not in (16, 32, 64, 128)
    ]  # at borders the last bit of log decides
    found = T5Bias(torch.zeros(32, 1), bidirectional=bidirectional).bucket(torch.tensor(distances)).tolist()
    expected = [_t5_bucket(d, bidirectional=bidirectional, buckets=32, limit=128) for d in distances]
    assert found == expected


def test_biases_add():
    table, tensor = torch.randn(8, 2), torch.randn(3, 5)
    both = T5Bias(table) + TensorBias(tensor, offset=0) + Alibi(2)
    q, k, h = torch.arange(3)[:, None], torch.arange(5), torch.tensor([[[0]], [[1]]])
    parts = [word.value(0, h, q, k) for word in (T5Bias(table), TensorBias(tensor, offset=0), Alibi(2))]
    assert torch.allclose(both.value(0, h, q, k), parts[0] + parts[1] + parts[2])


FRAME = CallSizes(batch=2, heads=4, queries=3, keys=5, offset=2)
WRONG = {
    "alibi of nothing": (Alibi, "give a number of query heads, or slopes="),
    "slopes with two axes": (lambda: Alibi(slopes=torch.ones(2, 4)), r"float32 \[2, 4\]: expected floats \[heads\]"),
    "slopes for other heads": (lambda: Alibi(3, torch.ones(4)), r"\[4\] for 3 heads: expected floats \[heads\]"),
    "slopes for heads that the call lacks": (lambda: Alibi(slopes=torch.ones(3)).bind(FRAME), "3 heads and the call"),
    "alibi for other heads": (lambda: Alibi(3).bind(FRAME), "3 heads and the call has 4"),
    "t5 for other heads": (lambda: T5Bias(torch.zeros(32, 3)).bind(FRAME), "3 heads"),
    "t5 of integers": (lambda: T5Bias(torch.zeros(32, 3, dtype=torch.int64)), "expected floats"),
    "t5 with too near a limit": (lambda: T5Bias(torch.zeros(32, 3), max_distance=8), "must exceed"),
    "a tensor of another shape": (lambda: TensorBias(torch.zeros(3, 4)).bind(FRAME), "does not broadcast"),
    "a bool tensor": (lambda: TensorBias(torch.zeros(3, 4, dtype=torch.bool)), "TensorMask"),
    "a tensor added": (lambda: Alibi(4) + torch.zeros(3), "TensorBias"),  # pyright: ignore[reportOperatorIssue]
    "no heads": (lambda: Alibi(0), "at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused(name: str):
    make, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        make()


def test_a_table_placed_by_offset_serves_calls_inside_it():
    table = torch.randn(9, 9)
    placed = TensorBias(table, offset=0).bind(CallSizes(1, 1, 2, 9, 4))
    assert torch.equal(placed.value(0, 0, torch.tensor([[4], [5]]), torch.arange(9)), table[4:6])
    with pytest.raises(ProblemError, match="must cover"):
        TensorBias(table, offset=0).bind(CallSizes(1, 1, 2, 9, 8))


def alibi_of_the_paper(heads: int) -> list[float]:
    """Press et al. 2022, and the authors' `get_slopes`: a geometric row, for the rest every second of twice as many."""
    nearest = 2 ** math.floor(math.log2(heads))
    row = [2.0 ** (-(2.0 ** -(math.log2(nearest) - 3)) * (i + 1)) for i in range(nearest)]
    return row if nearest == heads else row + alibi_of_the_paper(2 * nearest)[::2][: heads - nearest]


@pytest.mark.parametrize("heads", [*range(1, 18), 40, 71, 112])
def test_alibi_slopes_for_any_number_of_heads(heads: int):
    assert Alibi(heads).slope_per_head().tolist() == pytest.approx(alibi_of_the_paper(heads))


def test_alibi_reaches_past_the_training_length():
    h, long = torch.arange(6)[:, None, None], torch.arange(2 * 53)
    bias = Alibi(6).value(0, h, long[:, None], long)
    short = Alibi(6).value(0, h, long[:53, None], long[:53])
    assert torch.equal(bias[:, :53, :53], short)
    assert torch.equal(bias[:, 53:, 53:], short)  # and the same anywhere


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (32, 256), (64, 128)])
def test_t5_buckets_are_those_of_transformers(buckets: int, limit: int, bidirectional: bool):
    distance = torch.arange(-1000, 1001)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, buckets, limit)
    assert torch.equal(T5Bias(torch.zeros(buckets, 1), bidirectional, limit).bucket(distance), expected)


class Rates(NamedTuple):
    near: torch.Tensor
    far: torch.Tensor


@spec
class Falling(Bias):
    """Learned rates in a tuple."""

    rates: tuple[torch.Tensor, ...]

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        distance = (q - k).abs()
        return -self.rates[0][h] * distance - self.rates[1][h] * torch.log1p(distance.double())


@spec
class FallingByDistance(Falling):
    def per_distance(self) -> bool:
        return True


@pytest.mark.parametrize("q_learns", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("made", [tuple, lambda rates: Rates(*rates)], ids=["tuple", "NamedTuple"])
@pytest.mark.parametrize("kind", [Falling, FallingByDistance])
def test_gradients_flow_to_the_tensors_of_a_tuple(kind: Any, made: Any, backend: str | None, q_learns: bool):
    q = torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=q_learns)
    rates = [torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    near, far = (rate[:, None, None] for rate in rates)
    bias = TensorBias(-near * distance - far * torch.log1p(distance.double()))
    expected = torch.autograd.grad(attend(q, q, q, bias=bias, backend="reference").square().sum(), rates)
    out = attend(q, q, q, bias=kind(made(rates)), backend=backend)
    for found, exact in zip(torch.autograd.grad(out.square().sum(), rates), expected, strict=True):
        torch.testing.assert_close(found, exact)


def test_a_named_tuple_passes_through_a_mode():
    q, rate = torch.randn(1, 2, 7, 8), torch.rand(2, requires_grad=True)
    bias = Falling(Rates(rate, rate))
    expected = attend(q, q, q, bias=bias)
    (grad,) = torch.autograd.grad(expected.sin().sum(), rate)
    with FlopCounterMode(display=False):
        found = attend(q, q, q, bias=bias)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), rate)[0], grad)
    torch.testing.assert_close(found, expected)


def test_the_tensors_of_a_tuple_are_widened():
    half = torch.zeros(2, dtype=torch.bfloat16)
    for rates in ((half, half), Rates(half, half)):
        wide = Falling(rates).widened(torch.float32)
        assert isinstance(wide, Falling)
        assert type(wide.rates) is type(rates)
        assert [rate.dtype for rate in wide.rates] == [torch.float32] * 2


@spec
class LowRank(Bias):
    """A product of two factors, one of them transposed once."""

    left: torch.Tensor
    right: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "turned", self.right.mT.contiguous())

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        turned: torch.Tensor = self.__dict__["turned"]
        return (self.left @ turned)[q, k]


@spec
class LowRankByConstructor(LowRank):
    """The same, where a constructor does it."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        for name, value in (("left", left), ("right", right), ("turned", right.mT.contiguous())):
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kind", [LowRank, LowRankByConstructor])
def test_what_a_bias_derives_of_its_tensors_is_widened_with_them(kind: Any, backend: str | None):
    q = torch.randn(1, 2, 7, 8, dtype=torch.bfloat16)
    exact = [torch.randn(7, 3).bfloat16().double().requires_grad_() for _ in range(2)]
    wide = q.double()
    expected = attend(wide, wide, wide, bias=TensorBias(exact[0] @ exact[1].mT), backend="reference")
    factors = [factor.detach().bfloat16().requires_grad_() for factor in exact]
    out = attend(q, q, q, bias=kind(*factors), backend=backend)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(out.double().sum(), factors)
    for found, right in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=5e-2, atol=5e-2)


@spec
class Powered(Bias):
    """A keyword-only field before one that is not."""

    power: float = field(default=1.0, kw_only=True)
    rate: torch.Tensor  # pyright: ignore[reportGeneralTypeIssues] - it does not know `spec`, which makes a dataclass

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return -self.rate[h] * (q - k).abs() ** self.power


def test_a_bias_may_have_fields_by_name_only():
    q, rate = torch.randn(1, 2, 7, 8), torch.rand(2, requires_grad=True)
    expected = attend(q, q, q, bias=Powered(rate, power=0.5), backend="reference")

    def run(rate: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, bias=Powered(rate, power=0.5))

    for one in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = one(rate)
        torch.testing.assert_close(out, expected)
        out.sum().backward()


@pytest.mark.parametrize("per_distance", [False, True])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "returned NoneType; expected a tensor"),
        (1.0, "returned float; expected a tensor"),
        (torch.ones(5, 7), r"returned \[5, 7\] for positions that broadcast to .*: expected that shape, or one that"),
    ],
)
def test_the_value_of_a_bias_is_a_tensor_of_the_shape_of_its_positions(value: Any, says: str, per_distance: bool):
    methods = {"value": lambda self, b, h, q, k: value, "per_distance": lambda self: per_distance}
    bias, x = spec(type("Own", (Bias,), {"__module__": __name__, **methods}))(), torch.ones(1, 2, 4, 8)
    for one, backend in product((bias, bias + Alibi(2)), (None, "reference")):
        with pytest.raises(ProblemError, match=rf"^Own\(\): value\(b, h, q, k\) {says}"):
            attend(x, x, x, bias=one, backend=backend)


@spec
class NoValue(Bias):
    slope: float


@spec
class OfTwo(Bias):
    def value(self, q: Any, k: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (q - k).float()


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (NoValue(0.5), r"NoValue is a bias without value: define value\(self, b, h, q, k\)"),
        (OfTwo(), r"OfTwo\.value takes \(q, k\): expected value\(self, b, h, q, k\)"),
    ],
)
def test_a_bias_of_a_user_that_is_no_bias_says_what_it_lacks(bias: Bias, says: str):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ProblemError, match=says):
        attend(q, q, q, bias=bias)


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


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_subclass_of_a_sum_has_the_values_of_its_own(backend: str | None):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    table, near = torch.randn(2, 5, 7), torch.tensor([0.5, 0.25])
    for own, twice in (
        (Doubled(Alibi(2), TensorBias(table)), Alibi(2) + Alibi(2) + TensorBias(2 * table)),
        (Doubled(Alibi(2), Alibi(slopes=near)), Alibi(2) + Alibi(2) + Alibi(slopes=2 * near)),
    ):
        expected = attend(q, k, v, bias=twice, backend="reference")
        torch.testing.assert_close(attend(q, k, v, bias=own, backend=backend), expected)
        torch.testing.assert_close(
            attend(q, k, v, bias=own + TensorBias(table), backend=backend),
            attend(q, k, v, bias=twice + TensorBias(table), backend="reference"),
        )


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_subclass_of_a_table_has_the_values_of_its_own(backend: str | None):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    table = torch.randn(2, 5, 7, requires_grad=True)
    own, written = Squared(table), TensorBias(table.square())
    for bias, same in ((own, written), (own + Alibi(2), written + Alibi(2))):
        out = attend(q, k, v, bias=bias, backend=backend)
        expected = attend(q, k, v, bias=same, backend="reference")
        torch.testing.assert_close(out, expected)
        grads = (torch.autograd.grad(each.square().sum(), table, retain_graph=True)[0] for each in (out, expected))
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
