"""The parts of the experiments on rank collapse, induction heads, pruned heads and attention as explanation."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from regard.inspect.intervene.rows import divergence
from regard.nn import Decoder


@pytest.mark.exhaustive
def test_the_log_residual_of_attention_alone_triples_per_layer(load):
    digits, error = load("rank_collapse")["with_digits"](0, 5)
    falls = [after - before for before, after in pairwise(digits)]
    assert error < 1e-12
    assert all(2.8 < after / before < 3.2 for before, after in pairwise(falls[2:]))


def test_a_causal_mask_slows_the_collapse_to_a_constant_factor_per_layer(load):
    through = load("rank_collapse")["through"]
    assert through(0, 5)[-1] < 1e-12
    rates = [after / before for before, after in pairwise(through(0, 8, causal=True)[3:])]
    assert all(0.3 < rate < 0.8 for rate in rates)


def test_larger_mlps_slow_the_collapse(load):
    through = load("rank_collapse")["through"]
    assert through(0, 4, gain=16.0)[-1] > 0.1
    assert through(0, 4, gain=1.0)[-1] < 1e-3


class Successor(torch.nn.Module):
    """Predicts what followed the last occurrence of the current token: a perfect induction head."""

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 64)
        for row, sequence in enumerate(ids.tolist()):
            followed = {}
            for place, token in enumerate(sequence):
                if place:
                    followed[sequence[place - 1]] = token
                if token in followed:
                    logits[row, place, followed[token]] = 1.0
        return logits


def test_an_induction_rule_predicts_the_repeats_of_walks(load):
    names = load("induction_heads")
    ids = names["walks"](16, torch.Generator().manual_seed(0))
    assert all(len(set(sequence)) <= 12 for sequence in ids.tolist())
    assert names["on_repeats"](Successor(), ids)[1] > 0.8
    assert names["on_repeats"](lambda x: Successor()(x.flip(1)), ids)[1] < 0.3


def test_a_sudden_fall_is_sharper_than_an_even_one(load):
    names = load("induction_heads")
    even, sudden = [4.0 - 0.1 * i for i in range(30)], [4.0 - 0.02 * i - 2.5 * (i > 15) for i in range(30)]
    assert names["sharpness"]({"loss": even}) == pytest.approx(1.0)
    assert names["sharpness"]({"loss": sudden}) > 10
    assert names["crossing"](sudden) == 160
    assert names["crossing"]([-value for value in sudden]) == 160


@pytest.mark.parametrize("deciding", [1, 5])
def test_the_majority_of_the_deciding_tokens_is_the_answer(load, deciding):
    (tokens, answers), decides = load("attention_weights")["texts"](deciding, 200, torch.Generator().manual_seed(0))
    assert (decides.sum(1) == deciding).all()
    assert ((tokens < 20) == decides).all()
    positive = ((tokens >= 10) & decides).sum(1, keepdim=True)
    assert torch.equal(answers, (2 * positive > deciding).long())
    assert 0.3 < answers.float().mean() < 0.7


def test_the_most_different_weights_are_those_of_a_search_over_all_weights(load):
    most_different, generator = load("attention_weights")["most_different"], torch.Generator().manual_seed(0)
    own = torch.rand(40, 3, generator=generator, dtype=torch.float64) ** 3
    own /= own.sum(1, keepdim=True)
    logits = 4 * torch.randn(40, 3, generator=generator, dtype=torch.float64)
    parts = torch.cartesian_prod(*[torch.linspace(0, 1, 201, dtype=torch.float64)] * 2)
    parts = parts[parts.sum(1) <= 1]
    every = torch.cat([parts, 1 - parts.sum(1, keepdim=True)], 1)
    found = most_different(own, logits, 0.1)
    before = (own * logits).sum(1).sigmoid()
    assert ((found * logits).sum(1).sigmoid() - before).abs().max() < 0.1 + 1e-9
    allowed = ((logits @ every.T).sigmoid() - before[:, None]).abs() <= 0.1
    searched = divergence(every, own[:, None]).masked_fill(~allowed, 0.0).amax(1)
    exact = divergence(found, own)
    assert (exact > searched - 1e-9).all()
    assert (exact - searched).max() < 0.02
    assert exact.mean() > 0.1


def test_without_context_an_adversary_must_keep_the_weight_on_the_deciding_token(load):
    names = load("attention_weights")
    torch.manual_seed(0)
    model = names["Classifier"](context=False).requires_grad_(False)
    model.embedding.weight[:] = 0.01 * torch.randn_like(model.embedding.weight)
    model.embedding.weight[:10, 0], model.embedding.weight[10:20, 0] = -3.0, 3.0  # negative, positive
    model.embedding.weight[:20, 1] = 3.0  # decides
    model.key.weight.zero_()
    model.key.weight[0, 1], model.query[:], model.query[..., 0] = 1.0, 0.0, 40.0
    model.read.weight.zero_()
    model.read.weight[:, 0], model.read.bias[:] = torch.tensor([-4.0, 4.0]), 0.0
    found, _ = names["examine"](model, 1, quick=True)
    assert found["accuracy"] == 1.0
    assert found["deciding"] > 0.95
    # From 0.99965 to 0.98965 the logit may fall from 7.96 to 4.56: 0.43 of the weight may go to one neutral token.
    assert found["adversary"] == pytest.approx(0.18, abs=0.01)
    assert 0.0099 < found["moved"] <= 0.01
    assert 0.5 * found["adversary"] < found["search"] <= found["adversary"]
    assert found["permutation"] > 0.3


ALPHABET, WORKER = 8, (1, 2)


def one_head_model():
    """A decoder whose head 1.2 alone writes what the logits read: which tokens a text had so far."""
    torch.manual_seed(0)
    model = Decoder(ALPHABET, 32, layers=2, heads=4, mlp=False).requires_grad_(True)
    blocks: Any = model.body.blocks
    one = torch.eye(ALPHABET)
    with torch.no_grad():
        for block in blocks:
            block.attention.o_proj.weight.zero_()
        attention = blocks[WORKER[0]].attention
        own = slice(8 * WORKER[1], 8 * WORKER[1] + 8)
        attention.q_proj.weight[own] = 0  # equal weights for all tokens so far
        attention.v_proj.weight[own] = torch.cat([one, torch.zeros(8, 24)], 1)
        attention.o_proj.weight[16:24, own] = one
        model.body.embedding.weight.copy_(torch.cat([one, torch.zeros(8, 24)], 1))
        model.unembedding.weight.copy_(torch.cat([torch.zeros(8, 16), 3 * one, torch.zeros(8, 8)], 1))
    return model


def test_the_head_that_does_everything_is_removed_last(load):
    names, model = load("head_redundancy"), one_head_model()
    texts = [torch.arange(ALPHABET)[:, None].repeat(1, 12)]  # of one letter each
    curve, raw = names["pruned"](model, texts, texts, (0.0, 0.5, 0.875, 1.0), 3, 0)
    assert len(curve.order) == 8
    assert curve.order[-1] == raw.order[-1] == WORKER
    whole, half, most, none = curve.losses.tolist()
    assert whole == half == most < 0.1
    assert none == pytest.approx(math.log(ALPHABET))
    assert torch.equal(curve.losses, raw.losses)
    assert curve.random.mean(2)[:, 2].max() == pytest.approx(math.log(ALPHABET))


def test_heads_that_do_nothing_change_nothing_when_removed_alone(load):
    names, model = load("head_redundancy"), one_head_model()
    texts = [torch.arange(ALPHABET)[:, None].repeat(1, 12)]
    *others, worker = names["one_by_one"](model, texts, [(0, 1), WORKER, (1, 0), (1, 3)])
    assert others == [0.0, 0.0, 0.0]
    assert worker > 1.9


def test_passages_are_stretches_of_the_text_in_batches_of_four(load):
    batches = load("head_redundancy")["passages"](torch.arange(1000), 8, torch.Generator().manual_seed(0))
    assert [batch.shape for batch in batches] == [(4, 128), (4, 128)]
    assert all((row.diff() == 1).all() for batch in batches for row in batch)
    assert len({int(row[0]) for batch in batches for row in batch}) > 4
