"""The definition itself, against examples that are computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, KeyLengths, Prefix, TensorBias, TensorMask, Window, attend
from regard.backend import reference
from regard.backend.definition import attention, kept, positions

LOG2, LOG3 = math.log(2), math.log(3)


def call(scores: list[list[float]], values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one head with these dot products, for `scale=1`: q holds the scores, k is the identity."""
    n = len(values)
    return torch.tensor(scores)[None, None], torch.eye(n)[None, None], torch.tensor(values).view(1, 1, n, 1)


def numbers(t: Tensor) -> list[float]:
    return t.flatten().tolist()


def test_weights_are_the_softmax_of_scaled_dot_products():
    # exp(log 3) : exp(0) = 3 : 1
    out, lse = attention(*call([[LOG3, 0.0]], [10.0, 2.0]), scale=1.0)
    assert numbers(out) == pytest.approx([0.75 * 10 + 0.25 * 2])
    assert numbers(lse) == pytest.approx([math.log(4)])


def test_the_scale_is_one_over_the_root_of_the_dimension():
    q, k, v = (
        torch.tensor([[[[2 * LOG3, 0.0, 0.0, 0.0]]]]),
        torch.eye(4)[None, None, :2],
        torch.tensor([[[[4.0], [0.0]]]]),
    )
    out, _ = attention(q, k, v)  # 4 dimensions: scores 2 log 3 / 2 and 0
    assert numbers(out) == pytest.approx([3.0])


def test_a_softcap_bounds_scores_before_the_bias():
    # 1 * tanh(1000 / 1) = 1, then + bias log 2 - 1: weights 2 : 1
    bias = TensorBias(torch.tensor([[LOG2 - 1, 0.0]]))
    out, lse = attention(*call([[1000.0, 0.0]], [3.0, 0.0]), scale=1.0, softcap=1.0, bias=bias)
    assert numbers(out) == pytest.approx([2.0])
    assert numbers(lse) == pytest.approx([LOG3])


def test_masked_keys_have_no_weight():
    out, lse = attention(*call([[0.0, 0.0, 9.0]] * 3, [1.0, 3.0, 8.0]), scale=1.0, mask=Causal() & Window(2))
    # the last query sees the scores 0 and 9
    last = (3 + 8 * math.exp(9)) / (1 + math.exp(9))
    assert numbers(out) == pytest.approx([1.0, 2.0, last])
    assert numbers(lse) == pytest.approx([0.0, LOG2, math.log(1 + math.exp(9))])


def test_a_sink_takes_weight_and_is_not_in_the_lse():
    # weights 1 : 1 : 2, of which the last is the sink's
    out, lse = attention(*call([[0.0, 0.0]], [4.0, 8.0]), scale=1.0, sink=torch.tensor([LOG2]))
    assert numbers(out) == pytest.approx([1 + 2])
    assert numbers(lse) == pytest.approx([LOG2])


def test_dropout_multiplies_weights_after_the_softmax():
    out, lse = attention(*call([[0.0, 0.0]], [4.0, 8.0]), scale=1.0, dropout=torch.tensor([2.0, 0.0]))
    assert numbers(out) == pytest.approx([4.0])
    assert numbers(lse) == pytest.approx([LOG2])


def test_a_query_that_keeps_no_key_is_zero_with_and_without_a_sink():
    for sink in (None, torch.tensor([1.0])):
        q, k, v = call([[1.0, 2.0]], [5.0, 6.0])
        q.requires_grad_()
        out, lse = attention(q, k, v, mask=Prefix(0), sink=sink)
        assert numbers(out) == [0.0]
        assert numbers(lse) == [-math.inf]
        out.sum().backward()
        assert numbers(q.grad) == [0.0, 0.0]


def test_scores_of_minus_infinity_are_not_kept():
    out, lse = attention(*call([[0.0, 0.0]], [5.0, 7.0]), bias=TensorBias(torch.tensor([[0.0, -math.inf]])))
    assert (numbers(out), numbers(lse)) == ([5.0], [0.0])


def test_query_heads_share_the_key_head_of_their_group():
    q, k = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1)
    out, _ = attention(q, k, torch.tensor([1.0, 2.0]).view(1, 2, 1, 1))
    assert numbers(out) == [1.0, 1.0, 2.0, 2.0]


def test_the_last_query_is_at_the_last_key_unless_an_offset_says_otherwise():
    v = torch.tensor([2.0, 4.0, 6.0]).view(1, 1, 3, 1)
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 1)
    assert numbers(attention(q, k, v, mask=Causal())[0]) == pytest.approx([3.0, 4.0])
    assert numbers(attention(q, k, v, mask=Causal(), offset=0)[0]) == pytest.approx([2.0, 3.0])


def test_a_bias_and_a_mask_are_those_of_their_head_and_row():
    # two heads with slopes 1/16 and 1/256, one key at distance 0 and one at distance 1
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    out, _ = attention(torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 2, 1), v, bias=Alibi(2))
    assert numbers(out) == pytest.approx([1 / (1 + math.exp(2**-4 * 1)), 1 / (1 + math.exp(2**-8 * 1))])
    lengths = kept(KeyLengths(torch.tensor([1, 2])), 2, 1, 1, 2)
    assert lengths.tolist() == [[[[True, False]]], [[[True, True]]]]
    per_head = TensorMask(torch.tensor([[[True, False]], [[True, True]]]))
    assert kept(per_head, 1, 2, 1, 2).tolist() == [[[[True, False]], [[True, True]]]]


def test_any_comparison_of_queries_and_keys_may_replace_the_dot_product():
    def negative_distance(q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, 0] - k[..., None, :, 0]).abs()

    q, k = torch.tensor([[[[5.0]]]]), torch.tensor([[[[5.0], [5.0 + LOG3]]]])
    out, _ = attention(q, k, torch.tensor([[[[4.0], [0.0]]]]), compare=negative_distance)
    assert numbers(out) == pytest.approx([3.0])


def test_the_precision_is_the_one_that_is_asked_for():
    q, k, v = call([[1.0, 2.0]], [1.0, 2.0])
    assert attention(q, k, v)[0].dtype == torch.float64
    assert attention(q, k, v, dtype=torch.float32)[1].dtype == torch.float32


def test_positions_broadcast_to_all_pairs():
    shapes = torch.broadcast_shapes(*(t.shape for t in positions(2, 3, 5, 7)))
    assert shapes == (2, 3, 5, 7)
    assert positions(2, 3, 5, 7)[2].flatten().tolist() == [2, 3, 4, 5, 6]


def test_the_rows_of_a_bias_are_those_of_the_call():
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8)
    for bias in (TensorBias(torch.randn(2, 5)), TensorBias(torch.randn(2, 1)), TensorBias(torch.randn(4, 5), offset=1)):
        for offset in (None, 2) if bias.offset is None else (2,):
            found = attend(q, k, k, bias=bias, offset=offset)
            assert torch.allclose(found.double(), attention(q, k, k, bias=bias, offset=offset)[0], atol=1e-6)


def test_reference_weighs_each_key_of_a_row_that_a_finite_number_hides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "SCORES", 1)  # 300 keys are three chunks, the last of 44
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, n, 8, generator=generator) for n in (7, 300, 300)]
    bias = torch.randn(1, 1, 7, 300, generator=generator)
    bias[:, :, 3] = torch.finfo(torch.float32).min
    moves = torch.randn(1, 2, 7, 8, generator=generator)

    leaves = [t.clone().requires_grad_() for t in (*inputs, bias)]
    out = attend(*leaves[:3], bias=TensorBias(leaves[3]), backend="reference")
    found = out, *torch.autograd.grad(out, leaves, moves)
    exact = [t.double().requires_grad_() for t in (*inputs, bias)]
    true, _ = attention(*exact[:3], bias=TensorBias(exact[3]))
    for ours, theirs in zip(found, (true, *torch.autograd.grad(true, exact, moves.double())), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("far", [2.0**18, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("remembered", [reference.REMEMBERED, 0], ids=["kept", "computed again"])
def test_a_sink_near_far_scores_has_its_exact_share_in_reference(
    far: float, remembered: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reference, "SCORES", 1)  # 300 keys are three chunks
    monkeypatch.setattr(reference, "REMEMBERED", remembered)
    q, k, v = torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 300, 8), torch.ones(1, 2, 300, 8)
    bias = torch.zeros(7, 300)
    bias[3] = far
    keeps = torch.arange(300) < torch.tensor([9, 99])[:, None, None]  # of each head: two maps of the schedule
    sink = torch.tensor([far, far], requires_grad=True)
    out = attend(q, k, v, bias=TensorBias(bias), mask=TensorMask(keeps), sink=sink, backend="reference")
    assert numbers(out[0, :, 3, 0]) == pytest.approx([0.9, 0.99])
    (found,) = torch.autograd.grad(out[0, :, 3, 0].sum(), sink)
    assert numbers(found) == pytest.approx([-0.9 * 0.1, -0.99 * 0.01], rel=1e-4)
