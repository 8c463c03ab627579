"""Biases as vectors over the distance: kept for calls to come, and never those of a tensor that has changed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard import Alibi, Bias, Causal, T5Bias, TensorBias, attend
from regard.extend import spec
from regard.plan import distance
from regard.plan.distance import by_distance, kept_by_distance, line, split_by_distance
from regard.plan.problem import Operands
from tests.pretended_gpu import CUDA, pretended_gpu


@pytest.fixture(autouse=True)
def nothing_kept():
    distance._vectors.clear()
    distance._lines.clear()


@pytest.mark.parametrize("bias", [Alibi(3), T5Bias(torch.randn(16, 3)), Alibi(3) + T5Bias(torch.randn(8, 3), False)])
@pytest.mark.parametrize(("first", "count"), [(-7, 12), (0, 1), (-1, 300), (5000, 40), (-5000, 40), (0, 0)])
def test_a_vector_holds_the_bias_of_each_distance(bias: Bias, first: int, count: int):
    exact = by_distance(bias, 3, torch.float64, first, count)
    for _ in range(2):
        assert torch.equal(kept_by_distance(bias, 3, torch.float64, first, count), exact)
    steps = torch.arange(first, first + count)
    values = [term.value(0, torch.arange(3)[:, None], steps, torch.zeros_like(steps)).double() for term in bias.terms()]
    assert torch.equal(exact, sum(values))


def test_ever_longer_calls_make_few_vectors(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    slopes = Alibi.slope_per_head
    monkeypatch.setattr(Alibi, "slope_per_head", lambda self: made.append(1) or slopes(self))
    for keys in range(1, 1000):
        kept_by_distance(Alibi(4), 4, torch.float32, 0, keys)
    assert len(made) <= 11


def test_far_from_the_diagonal_only_what_is_asked_for_is_made():
    assert kept_by_distance(Alibi(1), 1, torch.float32, 1 << 40, 5).shape == (1, 5)
    assert distance._vectors.nbytes == 5 * 4


def test_a_vector_on_a_gpu_is_there_for_every_stream_once_it_is_kept(monkeypatch: pytest.MonkeyPatch):
    kept_before = list[int]()
    with pretended_gpu() as gpu:
        waits = SimpleNamespace(synchronize=lambda: kept_before.append(len(distance._vectors)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waits)
        for _ in range(3):
            assert gpu.is_on_gpu(kept_by_distance(Alibi(2), 2, torch.float32, 0, 9, CUDA))
        kept_by_distance(Alibi(2), 2, torch.float32, 0, 9)
    assert kept_before == [0]


def test_a_vector_that_is_made_while_a_graph_is_captured_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    with pretended_gpu():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kept_by_distance(Alibi(2), 2, torch.float32, 0, 9, CUDA)
    assert len(distance._vectors) == 0


def test_a_table_that_changed_has_a_new_vector():
    q, table = torch.randn(1, 2, 6, 4), torch.randn(8, 2)
    bias = T5Bias(table, max_distance=16)
    for _ in range(3):
        table.mul_(2)
        expected = attend(q, q, q, mask=Causal(), bias=bias, backend="reference")
        assert torch.allclose(attend(q, q, q, mask=Causal(), bias=bias), expected, atol=1e-5)


def test_what_is_kept_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distance._vectors, "_most", 20_000)
    for heads in range(1, 40):
        kept_by_distance(Alibi(heads), heads, torch.float32, 0, 64)
    assert distance._vectors.nbytes <= 20_000


def test_a_table_that_changed_unseen_has_a_new_vector():
    """Fused optimizers, and writing through .data, change numbers and no version."""
    q, table = torch.randn(1, 2, 6, 4), torch.randn(8, 2, requires_grad=True)
    optimizer = torch.optim.AdamW([table], lr=1.0, fused=True)
    bias = T5Bias(table, max_distance=16)
    for change in (optimizer.step, lambda: table.data.mul_(2)):
        table.grad = torch.randn(8, 2)
        with torch.no_grad():
            attend(q, q, q, mask=Causal(), bias=bias)
            change()
            expected = attend(q, q, q, mask=Causal(), bias=bias, backend="reference")
            assert torch.allclose(attend(q, q, q, mask=Causal(), bias=bias), expected, atol=1e-5)


def test_a_bias_of_inference_serves_training_after_it():
    q = torch.randn(1, 2, 53, 8)
    with torch.inference_mode():
        expected = attend(q, q, q, mask=Causal(), bias=Alibi(2))
    leaf = q.clone().requires_grad_()
    out = attend(leaf, q, q, mask=Causal(), bias=Alibi(2))
    out.sum().backward()
    torch.testing.assert_close(out, expected)


@spec
class Nearest(Bias):
    """`-rate[h] * |q - k|` by functions that take tensors alone."""

    rate: torch.Tensor

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.rate[h] * (torch.minimum(q, k) - torch.maximum(q, k)).to(self.rate.dtype) + 0 * b.float()

    def per_distance(self) -> bool:
        return True


def test_a_bias_of_a_user_gets_tensors():
    q, rate = torch.randn(2, 3, 7, 8), torch.rand(3)
    torch.testing.assert_close(attend(q, q, q, bias=Nearest(rate)), attend(q, q, q, bias=Alibi(slopes=rate)))


def test_a_bias_is_split_into_terms_by_distance_and_the_others_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    asked: list[Bias] = []
    monkeypatch.setattr(Nearest, "per_distance", lambda self: asked.append(self) or True)
    near, table, other = Nearest(torch.rand(2)), TensorBias(torch.zeros(3, 5)), TensorBias(torch.ones(3, 5))
    found, others = split_by_distance(table + near + Alibi(2) + other)
    assert found is not None
    assert found.terms() == [near, Alibi(2)]
    assert others == [table, other]
    assert asked == [near]
    assert split_by_distance(near) == (near, [])
    assert split_by_distance(table) == (None, [table])
    assert split_by_distance(None) == (None, [])


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(5, 5, 0), (3, 300, 297), (7, 4, -3), (1, 9, 5000)])
def test_a_line_has_the_values_of_the_vector(heads: int, queries: int, keys: int, offset: int):
    found = line(Alibi(heads), operands(queries, keys, offset))
    assert found is not None
    assert found.dtype == torch.float32
    slope, start = found.unbind(1)
    assert start.tolist() == [offset] * heads
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    values = -slope[:, None, None] * (i + start[:, None, None] - j).abs()
    exact = by_distance(Alibi(heads), heads, torch.float32, offset - (keys - 1), queries + keys - 1)[
        :, i - j + keys - 1
    ]
    assert bool(((values - exact).abs() <= torch.finfo(torch.float32).eps * exact.abs()).all())  # 1 ulp


def test_a_line_is_kept_by_heads_and_offset():
    first = line(Alibi(4), operands(3, 9, 6))
    assert line(Alibi(4), operands(5, 7, 6)) is first
    assert line(Alibi(4), operands(3, 9, 5)) is not first


@pytest.mark.parametrize(
    "bias",
    [
        None,
        T5Bias(torch.randn(16, 4)),
        Alibi(4) + Alibi(4),
        Alibi(slopes=torch.tensor([0.5, 0.25])),
        Alibi(slopes=torch.tensor([0.5, 0.25], requires_grad=True)),
    ],
)
def test_only_slopes_of_the_paper_are_a_line(bias: Bias | None):
    assert line(bias, operands(3, 9, 6)) is None


@pytest.mark.parametrize(("offset", "is_line"), [((1 << 24) - 13, True), ((1 << 24) - 12, False), (-(1 << 24), False)])
def test_a_line_has_only_distances_that_float32_has(offset: int, is_line: bool):
    assert (line(Alibi(2), operands(3, 9, offset)) is not None) == is_line


def operands(queries: int, keys: int, offset: int) -> Operands:
    """A call of such sizes."""
    q, k = torch.zeros(1, 1, queries, 1), torch.zeros(1, 1, keys, 1)
    return Operands(q, k, k, None, None, None, offset=offset)
