"""Every measure equals its formula on the dense weights in float64: shared heads, windows, padding, sinks, softcap."""

from importlib import import_module

import pytest
import torch

from regard import Causal, KeyLengths
from regard.inspect.measures import (
    Inputs,
    alpha,
    blocks,
    distance_profile,
    duplicate,
    effective_tokens,
    entropy,
    evenness,
    induction_scan,
    inverse_squares,
    largest_column,
    largest_weight,
    local_mass,
    mean_distance,
    offset_scan,
    output_norms,
    positional,
    previous_token,
    rare_word,
    rarest_hits,
    sink,
    sink_output,
    value_weighted,
)
from regard.inspect.measures.means import looks_ahead
from regard.inspect.sweep import sweep
from regard.inspect.weights import lazy as module
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import CASES, called, definition, drawn
from tests.inspect.measures.formulas import equal, mean_over, pair_measures, positions, sweep_measures, uniform_of


@pytest.fixture(params=CASES)
def call(request, monkeypatch):
    torch.manual_seed(3)
    monkeypatch.setattr(module, "TILE", 2 * 6 * 29 * 3)
    monkeypatch.setattr(blocks, "AT_ONCE", 2**11)  # several chunks of blocks
    monkeypatch.setattr(import_module("regard.inspect.measures.induction"), "LARGEST", 4)  # several blocks of a token
    return CASES[request.param]()


@pytest.fixture
def weights(call):
    return Weights.of(call)


@pytest.fixture
def dense(call):
    return definition(call)


@pytest.fixture
def both(dense):
    """Of the call and of uniform attention the weights; scores are checked against the one, chances the other."""
    return dense.weights, uniform_of(dense)


@pytest.fixture
def sees(dense):
    return dense.keep.any(-1)


def check(score, both, measure, rows):
    equal(score.value, mean_over(rows, measure(both[0])))
    equal(score.chance, mean_over(rows, measure(both[1])))


def test_offsets_are_diagonals(call, weights, both, sees):
    offsets = (0, 1, 4, -1, 8, 40)
    keys = call.k.shape[2]
    for offset, score in offset_scan(weights, offsets).items():
        target = positions(call) - offset
        at = target.clamp(0, keys - 1)[None, None, :, None]
        rows = sees & (target >= 0) & (target < keys)
        check(score, both, lambda a, at=at: a.gather(-1, at.expand(*a.shape[:3], 1))[..., 0], rows)


@pytest.mark.parametrize("token", [0, 3])
def test_sink_mass_is_a_column(call, weights, both, sees, token):
    check(sink(weights, token), both, lambda a: a[..., token], sees & (positions(call) > token))
    check(alpha(weights, token), both, lambda a: a[..., token], sees & (positions(call) >= token))


def matched(call, tokens, shift):
    """Which pairs are in M_i, by comparing every token with every other: [batch, queries, keys]."""
    keys = call.k.shape[2]
    i, j = positions(call)[:, None], torch.arange(keys)[None, :]
    before = tokens[:, (j[0] - shift).clamp(0, keys - 1)]
    there = (j - shift >= 0) & (j - shift < keys) & (j - shift < i) & (j <= i)
    return (before[:, None, :] == tokens[:, positions(call)][:, :, None]) & there


def test_induction_and_duplicates_are_sums_over_matches(call, weights, both, sees):
    tokens = torch.randint(5, (call.q.shape[0], call.k.shape[2]))
    shifts = (0, 1, 3, -2)
    for shift, score in induction_scan(weights, tokens, shifts).items():
        match = matched(call, tokens, shift)[:, None]
        check(score, both, lambda a, match=match: torch.where(match, a, 0.0).sum(-1), sees & match.any(-1))
    equal(duplicate(weights, tokens).value, induction_scan(weights, tokens, shifts)[0].value)


def test_breadth_is_that_of_the_rows(weights, dense, sees):
    inputs = Inputs(weights)
    visible = dense.keep.sum(-1).double()
    entropies = torch.special.entr(dense.weights).sum(-1) + torch.special.entr(dense.sink_share)
    squares = dense.weights.square().sum(-1) + dense.sink_share.square()
    spread, tokens = entropy(inputs), effective_tokens(inputs)
    equal(spread.value, mean_over(sees, entropies), 1e-5)
    equal(tokens.value / 29, mean_over(sees, entropies.exp()) / 29, 1e-5)
    equal(spread.chance, mean_over(sees, visible.clamp(min=1).log()))
    equal(tokens.chance / 29, mean_over(sees, visible) / 29)
    equal(evenness(inputs).value, mean_over(visible >= 2, entropies / visible.clamp(min=2).log()), 1e-5)
    equal(inverse_squares(inputs).value / 29, mean_over(sees, 1 / squares) / 29, 1e-5)


def test_the_largest_weight_and_its_distance(call, weights, dense, sees):
    inputs, visible = Inputs(weights), dense.keep.sum(-1).double().clamp(min=1)
    swept, score = inputs.swept, largest_weight(inputs)
    equal(score.value, mean_over(sees, dense.weights.amax(-1)))
    equal(score.chance, mean_over(sees, 1 / visible))
    share = positional(inputs)
    offset = share.at
    assert offset is not None
    equal(dense.weights.gather(-1, swept.top_key[..., None])[..., 0], dense.weights.amax(-1))  # caps make equals
    distance = positions(call) - swept.top_key
    for b in range(offset.shape[0]):
        for h in range(offset.shape[1]):
            counts = [((distance == o) & sees)[b, h].sum() for o in range(-29, 30)]
            assert counts[int(offset[b, h]) + 29] == max(counts)
    equal(share.value, mean_over(sees, (distance == offset[..., None]).double()))
    key = positions(call) - offset[..., None]
    at = key.clamp(0, dense.keep.shape[-1] - 1)[..., None]
    kept = dense.keep.gather(-1, at)[..., 0] & (key >= 0) & (key < dense.keep.shape[-1])
    equal(share.chance, mean_over(sees, kept / visible))


def test_distances_are_those_of_every_pair(call, weights, both, sees):
    inputs = Inputs(weights)
    distance = (positions(call)[:, None] - torch.arange(call.k.shape[2])).abs()
    check(local_mass(inputs, 4), both, lambda a: torch.where(distance < 4, a, 0.0).sum(-1), sees)
    profile = distance_profile(inputs)
    for bin_, (start, stop) in enumerate(zip(profile.edges, (*profile.edges[1:], 10**9), strict=True)):
        here = (distance >= start) & (distance < stop)
        for found, a in zip((profile.value, profile.chance), both, strict=True):
            equal(found[..., bin_], mean_over(sees, torch.where(here, a, 0.0).sum(-1)))
    assert distance.max() >= profile.edges[-1]


def test_columns_are_sums_over_rows(weights, both):
    inputs = Inputs(weights)
    for swept, a in zip((inputs.swept, inputs.even), both, strict=True):
        equal(swept.columns.expand(a.sum(2).shape), a.sum(2), 1e-5)
    found = largest_column(inputs)
    equal(found.value, both[0].sum(2).amax(-1) / both[0].sum((2, 3)))
    equal(found.chance, both[1].sum(2).amax(-1) / both[1].sum((2, 3)))


def test_columns_of_chosen_rows_are_sums_over_these(weights, both):
    rows = torch.rand(weights.shape[0], weights.shape[2]) < 0.6
    found = largest_column(Inputs(weights, rows=rows))
    for value, a in zip((found.value, found.chance), both, strict=True):
        columns = torch.where(rows[:, None, :, None], a, 0.0).sum(2)
        equal(value, columns.amax(-1) / columns.sum(-1))
    assert torch.equal(found.at, torch.where(rows[:, None, :, None], both[0], 0.0).sum(2).argmax(-1))


def test_means_along_positions_and_rarities(call, weights, dense, both, sees):
    rarities = torch.rand(call.q.shape[0], call.k.shape[2])
    inputs = Inputs(weights, rarity=rarities)

    def mean_of(a, numbers):
        return (a * numbers).sum(-1) / a.sum(-1).clamp(min=1e-30)

    exact = [mean_of(a, rarities[:, None, None].double()) for a in both]
    score = rare_word(inputs)
    equal(score.value, mean_over(sees, exact[0] - exact[1]))
    back = positions(call)[:, None] - torch.arange(call.k.shape[2])
    if not looks_ahead(weights):
        score = mean_distance(inputs)
        equal(score.value, mean_over(sees, mean_of(both[0], back)), 1e-5)
        equal(score.chance, mean_over(sees, mean_of(both[1], back)), 1e-5)


@pytest.mark.parametrize("among", [1, 2])
def test_the_rarest_tokens_that_a_row_sees(call, weights, dense, sees, among):
    rarities = torch.randint(4, (call.q.shape[0], call.k.shape[2])).float()
    seen = torch.where(dense.keep, rarities[:, None, None], -torch.inf)
    least = seen.sort(dim=-1, descending=True).values[..., among - 1]
    counts = seen.where(seen > -torch.inf, torch.nan).sort(dim=-1).values  # rows that see fewer: their least rare
    least = torch.where(least == -torch.inf, counts.nan_to_num(torch.inf).amin(-1), least)
    at_top = rarities[:, None].expand(*seen.shape[:2], -1).gather(-1, sweep(weights).top_key)
    found = rarest_hits(Inputs(weights, rarity=rarities), among)
    equal(found.value, mean_over(sees, (at_top >= least).double()))
    share = ((seen >= least[..., None]) & dense.keep).sum(-1) / dense.keep.sum(-1).clamp(min=1)
    equal(found.chance, mean_over(sees, share.double()))


def test_what_looks_ahead_is_reported(call, weights, dense):
    later = positions(call)[:, None] < torch.arange(call.k.shape[2])
    assert looks_ahead(weights) == bool((dense.keep & later).any())


def test_what_the_sink_moves(call, weights, dense, both, sees):
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    v, w_o = torch.randn(*call.k.shape[:3], 4), torch.randn(heads, 4, 11)
    moved = v.repeat_interleave(heads // kv_heads, dim=1).double() @ w_o.double()  # [batch, heads, keys, d_model]
    norms = moved.norm(dim=-1)
    torch.testing.assert_close(output_norms(v, w_o).double(), norms, atol=0, rtol=1e-5)
    rows = sees & (positions(call) > 0)
    score = value_weighted(Inputs(weights, norms=norms.float()), token=0)
    check(score, both, lambda a: a[..., 0] * norms[..., :1] / (a * norms[:, :, None]).sum(-1).clamp(min=1e-30), rows)
    out = (dense.weights @ v.repeat_interleave(heads // kv_heads, dim=1).double()).to(call.q.dtype)
    found = sink_output(Inputs(weights, v=v.to(call.q.dtype), out=out, w_o=w_o.to(call.q.dtype)), token=0)
    for value, a in zip((found.value, found.chance), both, strict=True):
        ratio = a[..., 0] * norms[..., :1] / (a @ moved).norm(dim=-1).clamp(min=1e-30)
        torch.testing.assert_close(value.double(), mean_over(rows, ratio), atol=1e-5, rtol=1e-5, equal_nan=True)


def test_rows_that_are_padding_do_not_count():
    real = torch.tensor([[True] * 29, [True] * 11 + [False] * 18])
    call = drawn(mask=Causal() & KeyLengths(real.sum(-1)))
    short = called(call.q[1:, :, :11], call.k[1:, :, :11], mask=Causal())
    tokens = torch.randint(4, (2, 29))
    padded, whole = Weights.of(call), Weights.of(short)
    pairs = pair_measures(padded, tokens, rows=real), pair_measures(whole, tokens[1:, :11])
    swept = sweep_measures(Inputs(padded, rows=real)), sweep_measures(Inputs(whole))
    for found, alone in (pairs, swept):
        for name in found.keys() - {"best_offset"}:  # which is the best of both sequences
            torch.testing.assert_close(found[name].value[1:], alone[name].value, msg=name)
            torch.testing.assert_close(found[name].chance[1:], alone[name].chance, msg=name)
    equal(previous_token(padded, rows=real).value[1:], previous_token(whole).value)


def test_keys_that_are_hidden_may_be_anything():
    torch.manual_seed(0)
    call = drawn(mask=Causal() & KeyLengths(torch.tensor([20, 20])))
    tokens = torch.randint(4, (2, 29))
    spoilt = call.k.clone()
    spoilt[:, :, 20:] = torch.nan
    clean, hidden = Weights.of(call), Weights(call.q, spoilt, call.lse, call.mask, scale=call.scale)
    for name, score in pair_measures(clean, tokens).items():
        assert torch.equal(pair_measures(hidden, tokens)[name].value, score.value), name
