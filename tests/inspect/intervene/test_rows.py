"""Rows that are set freely: the model's own give what it gave, and others what the formula gives."""

import math

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.rows import divergence, mean_divergence, observe_rows, prediction_shift, with_rows
from regard.integrate.transformers import use_regard
from tests.inspect.intervene.models import DRAWN, Stack, decoder, dropping, stack_input, texts
from tests.integrate import zoo


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_the_models_own_rows_change_nothing(name):
    model, ids = zoo.model(name), zoo.tokens()
    use_regard(model)
    predict = lambda: model(ids).logits[:, -1]  # noqa: E731
    subject = observe_rows(model, predict, [(0, 1), (1, 0), (1, 3)], [-1, 4])
    own = {site: one.weights for site, one in subject.own.items()}
    with torch.no_grad():
        assert prediction_shift(subject, own).max() < 1e-5
        even = {site: torch.full_like(w, 1 / w.shape[-1]) for site, w in own.items()}
        assert prediction_shift(subject, even).min() > 1e-4
    assert torch.equal(mean_divergence(subject, own), torch.zeros(2).double())


def test_own_rows_are_those_of_the_matrix():
    model, x = Stack(sink=True), stack_input()
    _, matrices = model.in_full(x)
    subject = observe_rows(model, lambda: model(x)[:, -1], [(1, 3), (1, 0)], [4, -1])
    ((site, own),) = subject.own.items()
    assert (site.layer, own.heads) == (1, (3, 0))
    assert torch.allclose(own.weights[..., :-1], matrices[1][:, [3, 0]][:, :, [4, 10]], atol=1e-10)
    assert torch.allclose(own.weights.sum(-1), torch.ones(2, 2, 2).double())
    assert own.allowed[0, 0, 0].tolist() == [True] * 5 + [False] * 6 + [True]


def test_rows_without_a_sink_may_not_use_one():
    model, x = Stack(), stack_input()
    subject = observe_rows(model, lambda: model(x)[:, -1], [(1, 3)], [-1])
    assert not next(iter(subject.own.values())).allowed[..., -1].any()


def test_other_weights_take_other_values():
    q, v = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    subject = observe_rows(None, lambda: attend(q, q[:, :1], v, mask=Causal())[:, :, 3].flatten(1), [(0, 1)], [3])
    ((site, own),) = subject.own.items()
    one = torch.zeros_like(own.weights)
    one[..., 2] = 1
    with with_rows(subject, {site: one}):
        out = attend(q, q[:, :1], v, mask=Causal())
    before = attend(q, q[:, :1], v, mask=Causal())
    assert torch.equal(out[0, 1, 3], v[0, 0, 2])
    out[0, 1, 3] = before[0, 1, 3]
    assert torch.equal(out, before)


def test_the_row_that_moved_furthest_counts():
    model, ids = decoder(), texts()
    subject = observe_rows(model, lambda: model(ids), [(1, 0)], [7])
    other = {site: one.weights.roll(1, -1) * one.allowed for site, one in subject.own.items()}
    with torch.no_grad():
        whole = prediction_shift(subject, other)
        alone = observe_rows(model, lambda: model(ids)[:, 7], [(1, 0)], [7])
        assert torch.allclose(whole, prediction_shift(alone, other), atol=1e-12)


def test_divergence_is_a_mean_of_two_relative_entropies():
    p, q = torch.rand(3, 7).double().softmax(-1), torch.rand(3, 7).double().softmax(-1)
    m = (p + q) / 2
    expected = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    assert torch.allclose(divergence(p, q), expected)
    assert divergence(torch.eye(2)[0], torch.eye(2)[1]).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("heads", "rows", "message"),
    [
        ([], [-1], "at least one"),
        ([(0, 0)], [], "at least one"),
        ([(0, 0)], 0, r"rows is 0: expected a list, such as \[0\]"),
        ([(0, 0)], [11], "row 11"),
        ([(3, 0)], [0], "layer 3"),
        ([(0, 0)], [4, -1, 10], r"rows \(4, -1, 10\) name row 10 of 11 twice"),
    ],
)
def test_what_does_not_exist_is_reported(heads, rows, message):
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match=message):
        observe_rows(model, lambda: model(ids)[:, -1], heads, rows)


def test_rows_may_be_a_tensor():
    model, ids = decoder(), texts()
    found = observe_rows(model, lambda: model(ids)[:, -1], [(0, 0)], torch.tensor([4, -1]))
    assert found.rows == (4, -1)


def test_a_prediction_must_be_a_batch_of_logits():
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match=r"predict returned \[19\]: expected logits \[5"):
        observe_rows(model, lambda: model(ids)[0, -1], [(0, 0)], [-1])
    with pytest.raises(ProblemError, match="no cache"):
        observe_rows(model, lambda: model(model.generate(ids, 3))[:, -1], [(0, 0)], [-1])


def test_dropout_is_refused():
    model, ids = dropping(), texts()
    with pytest.raises(ProblemError, match=DRAWN):
        observe_rows(model, lambda: model(ids)[:, -1], [(0, 0)], [-1])
    observe_rows(model.eval(), lambda: model(ids)[:, -1], [(0, 0)], [-1])
    with pytest.raises(ProblemError, match=r"layer 0 drops weights \(dropout 0\.5\)"):
        observe_rows(None, lambda: attend(*torch.randn(3, 1, 2, 5, 4), dropout=0.5).flatten(2), [(0, 0)], [-1])
