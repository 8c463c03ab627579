"""What holds of every measure: heads that are permuted permute it, and uniform attention scores its chance value."""

import pytest
import torch

from regard import Causal, KeyLengths, Prefix, TensorMask, Window
from regard.inspect.measures import Inputs
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called
from tests.inspect.measures.formulas import pair_measures, sweep_measures

MASKS = {
    "none": lambda: None,
    "causal": Causal,
    "window and sinks": lambda: Causal() & (Window(5) | Prefix(2)),
    "both ways": lambda: Window(4, 3),
    "padding": lambda: Causal() & KeyLengths(torch.tensor([11, 23])),
    "per head": lambda: TensorMask(torch.rand(1, 4, 23, 23) < 0.5),
}


@pytest.fixture(params=MASKS)
def mask(request):
    torch.manual_seed(4)
    return MASKS[request.param]()


def all_measures(weights, tokens):
    """Every measure that takes a call alone, with vectors of the tokens' own."""
    rarity = tokens.float()
    norms = (rarity + 1)[:, None].expand(-1, weights.shape[1], -1)
    return pair_measures(weights, tokens) | sweep_measures(Inputs(weights, rarity=rarity, norms=norms))


def test_uniform_attention_scores_its_chance(mask):
    """But for argmax, which of equal weights takes the first, and the best of a scan, which is above chance nowhere."""
    tokens = torch.randint(6, (2, 23))
    weights = Weights.of(called(torch.zeros(2, 4, 23, 3), torch.zeros(2, 2, 23, 3), mask=mask))
    for name, score in all_measures(weights, tokens).items():
        if name != "positional":
            torch.testing.assert_close(score.value, score.chance, atol=1e-5, rtol=1e-5, equal_nan=True, msg=name)


def test_measures_of_permuted_heads_permute(mask):
    tokens, order = torch.randint(6, (2, 23)), torch.tensor([2, 0, 3, 1])
    weights = Weights.of(called(torch.randn(2, 4, 23, 3), torch.randn(2, 2, 23, 3), mask=mask))
    here, there = all_measures(weights, tokens), all_measures(weights.heads(order), tokens)
    for name, score in here.items():
        same = {"equal_nan": True, "atol": 1e-6, "rtol": 1e-6}
        torch.testing.assert_close(there[name].value, score.value[:, order], **same, msg=name)
        torch.testing.assert_close(there[name].chance, score.chance[:, order], **same, msg=name)
        ours, theirs = score.interval(draws=50), there[name].interval(draws=50)
        torch.testing.assert_close(theirs.low, ours.low[order], **same, msg=name)


def test_measures_of_a_batch_are_those_of_its_sequences(mask):
    tokens = torch.randint(6, (2, 23))
    weights = Weights.of(called(torch.randn(2, 4, 23, 3), torch.randn(2, 2, 23, 3), mask=mask))
    together = all_measures(weights, tokens)
    for b in range(2):
        for name, score in all_measures(weights.only(b), tokens[b : b + 1]).items():
            if name != "best_offset":  # which is the best in the mean over sequences
                same = {"equal_nan": True, "atol": 1e-6, "rtol": 1e-6}
                torch.testing.assert_close(together[name].value[b : b + 1], score.value, **same, msg=name)
                torch.testing.assert_close(together[name].chance[b : b + 1], score.chance, **same, msg=name)


def test_every_measure_has_an_interval_around_it(mask):
    weights = Weights.of(called(torch.randn(2, 4, 23, 3), torch.randn(2, 2, 23, 3), mask=mask)).only(1)
    for name, score in all_measures(weights, torch.randint(3, (1, 23))).items():
        low, high, over = score.interval()
        if name == "column":
            assert over == "nothing"
            continue
        assert over == "blocks of rows", name
        there = ~score.value[0].isnan()
        assert (low[there] <= score.value[0][there] + 1e-6).all(), name
        assert (high[there] >= score.value[0][there] - 1e-6).all(), name
