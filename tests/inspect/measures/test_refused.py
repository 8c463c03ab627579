"""Measures say what they were given, what they expected and what to do, where that makes no sense."""

import inspect

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect import measures, observe
from regard.inspect.measures import (
    Inputs,
    best,
    compute,
    duplicate,
    entropy,
    evenness,
    induction,
    induction_scan,
    local_mass,
    mean_distance,
    offset_scan,
    offset_score,
    output_norms,
    rare_word,
    rarest_hits,
    rarity,
    retrieval,
    sink,
    sink_output,
    split_heads,
    syntactic,
    value_weighted,
)
from regard.inspect.measures.values import first_value
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import drawn
from tests.inspect.measures.formulas import pair_measures


def test_tokens_may_be_lists_of_ids():
    call = drawn(mask=Causal())
    ids = torch.randint(7, (2, 29))
    assert torch.equal(induction(Weights.of(call), ids.tolist()).value, induction(Weights.of(call), ids).value)
    alone = Weights.of(call).only(1)
    expected = duplicate(alone, ids[1:]).value
    assert torch.equal(duplicate(alone, ids[1].tolist()).value, expected)
    torch.testing.assert_close(pair_measures(alone, ids[1].numpy())["duplicate"].value, expected)


def outputs_of(heads):
    """Values, a call's outputs, and an output projection of so many heads."""
    return {"v": torch.rand(2, 3, 29, 7), "out": torch.rand(2, heads, 29, 7), "w_o": torch.rand(heads, 7, 8)}


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda w: induction(w, torch.arange(29)), r"tokens is \[29\]: .* \[2, 29\]"),
        (lambda w: induction(w, {"input_ids": torch.zeros(2, 29)}), r"pass its ids, tokens\['input_ids'\]"),
        (lambda w: induction_scan(w, torch.zeros(2, 29), ()), "shifts is empty"),
        (lambda w: offset_scan(w, ()), "offsets is empty"),
        (lambda w: offset_scan(w, (1, 0.5)), r"offsets is \[1, 0.5\]: expected integers"),
        (lambda w: induction(w, torch.ones(2, 29).long(), 1.5), r"shifts is \[1.5\]: expected integers"),
        (lambda w: syntactic(w, [(0, 1, 0), (0, 2, 29)]), "1 of 2 pairs are not in the call"),
        (lambda w: syntactic(w, [(0, 1, 0), (0, 2)]), r"pairs is \[\(0, 1, 0\), \(0, 2\)\] .* int64 \[pairs, 3\]"),
        (lambda w: syntactic(w, "obj"), "pairs is 'obj' .*: expected the sequence, the query and the key"),
        (lambda w: retrieval(w, [[1] * 29] * 2, [[True] * 29] * 2, 5.5), "since is 5.5: expected the position of the"),
        (lambda w: retrieval(w, [[1] * 28] * 2, [[True] * 28] * 2, 5), r"tokens is \[2, 28\] and needle \[2, 28\]"),
        (lambda w: retrieval(w, torch.ones(2, 30), torch.ones(2, 30) > 0, 5), "float32: expected token ids"),
        (lambda w: rarity([0.5]), "float32: expected token ids, integers"),
        (lambda w: rarity([0, 9], torch.ones(9)), "ids from 0 to 9, and frequency counts 9"),
        (lambda w: best({}), "the scan is empty: give the scores at several"),
        (lambda w: sink(w, 29), "token is 29: expected the position of one of the 29 keys"),
        (lambda w: offset_score(w, 1, torch.ones(2, 28) > 0), r"rows is \[2, 28\] .* \[2, 29\]"),
        (lambda w: local_mass(Inputs(w), 6), "width is 6: expected a power of two"),
        (lambda w: mean_distance(Inputs(w)), "sees later keys"),
        (lambda w: rare_word(Inputs(w, rarity=torch.ones(2, 28))), r"rarity are \[2, 1, 28\]"),
        (lambda w: rare_word(Inputs(w)), r"needs `rarity`: pass Inputs\(weights, rarity=...\)"),
        (lambda w: rarest_hits(Inputs(w, rarity=torch.ones(2, 29)), 0), "among is 0"),
        (lambda w: rarest_hits(Inputs(w, rarity=torch.ones(2, 29)), 1.5), "among is 1.5: expected the number of"),
        (lambda w: rarest_hits(Inputs(w, rarity=torch.ones(2, 28))), r"rarity is \[2, 28\]: expected one at each key"),
        (lambda w: induction(w, torch.zeros(2, 29)), r"tokens is torch.float32: expected .* integers"),
        (lambda w: induction(w, [[0.5] * 29] * 2), "tokens is torch.float32"),
        (lambda w: duplicate(w, [[1] * 29, [1] * 28]), "tokens are no ids .* lists of one length"),
        (lambda w: induction_scan(w, None), "tokens are no ids"),
        (lambda w: evenness(Inputs(w, rows=torch.ones(2, 28) > 0)), r"rows is \[2, 28\] torch.bool"),
        (lambda w: evenness(Inputs(w, rows=torch.ones(2, 29))), r"rows is \[2, 29\] torch.float32: expected .* bool"),
        (lambda w: sink(w, -1), "token is -1: expected the position"),
        (lambda w: sink(w, 0.5), r"token is 0\.5: expected the position"),
        (
            lambda w: value_weighted(Inputs(w, norms=torch.rand(2, 6, 29)), token=99),
            "token is 99: expected the position of one of the 29",
        ),
        (lambda w: value_weighted(Inputs(w, norms=torch.rand(2, 6, 29)), token=-1), "token is -1: expected"),
        (lambda w: value_weighted(Inputs(w, norms=torch.rand(2, 4, 29))), r"norms are \[2, 4, 29\]"),
        (lambda w: value_weighted(Inputs(w)), "needs `norms`"),
        (
            lambda w: output_norms(torch.ones(2, 3, 29, 7), torch.ones(5, 7, 8)),
            r"w_o \[5, 7, 8\]: expected .* multiple",
        ),
        (lambda w: output_norms(torch.ones(2, 3, 29, 7), torch.ones(6, 4, 8)), r"w_o \[6, 4, 8\]: expected"),
        (lambda w: output_norms(torch.ones(2, 3, 29, 7), torch.ones(8, 42)), r"w_o \[8, 42\]: .*see split_heads"),
        (
            lambda w: sink_output(Inputs(w, **outputs_of(3))),
            r"out \[2, 3, 29, 7\] .* 6 heads on 3 key heads, 29 queries",
        ),
        (lambda w: sink_output(Inputs(w, **outputs_of(6)), token=29), "token is 29"),
        (lambda w: split_heads(torch.ones(8, 42), 5), r"\[8, 42\]: expected \[d_model, 5 heads"),
        (lambda w: split_heads(torch.ones(8, 42), 0), "expected .*0 heads"),
        (lambda w: split_heads(torch.ones(8, 42), None), "expected .*None heads"),
        (lambda w: sink(w, rows={"attention_mask": 1}), "rows is {'attention_mask': 1}: expected which rows to count"),
        (lambda w: sink(w, rows="all"), "rows is 'all': expected which rows to count, bool"),
        (lambda w: offset_scan(w, 3), r"offsets is 3: expected a list, such as \[3\]"),
        (lambda w: induction_scan(w, torch.ones(2, 29).long(), 2), r"shifts is 2: expected a list, such as \[2\]"),
        (lambda w: local_mass(Inputs(w), None), "width is None: expected a power of two"),
        (lambda w: rarity([0, 1], 3), r"frequency is 3: expected a tensor of counts, \[vocabulary\]"),
        (lambda w: first_value(Inputs(w, v=3)), r"v is 3: expected the values of the call, \[2, 3, 29, v_dim\]"),
        (lambda w: first_value(Inputs(w, v=torch.ones(2, 3, 28, 7))), r"v is \[2, 3, 28, 7\]: expected the values"),
    ],
)
def test_what_makes_no_sense_is_refused(measure, message):
    with pytest.raises(ProblemError, match=message):
        measure(Weights.of(drawn()))


OF_WEIGHTS = ("alpha", "offset_scan", "offset_score", "previous_token", "sink")
OF_INPUTS = (
    "distance_profile", "effective_tokens", "entropy", "evenness", "inverse_squares", "largest_column",
    "largest_weight", "local_mass", "mean_distance", "positional", "rare_word", "rarest_hits", "sink_output",
    "value_weighted",
)  # fmt: skip


def refusal(measure, *arguments, **named):
    """What the `ProblemError` says."""
    with pytest.raises(ProblemError) as error:
        measure(*arguments, **named)
    return str(error.value)


def test_a_distance_may_be_a_tensor():
    weights, ids = Weights.of(drawn(mask=Causal())), torch.randint(7, (2, 29))
    assert torch.equal(offset_score(weights, torch.tensor(2)).value, offset_score(weights, 2).value)
    assert torch.equal(induction(weights, ids, torch.tensor(2)).value, induction(weights, ids, 2).value)
    assert list(offset_scan(weights, torch.tensor([2, 1]))) == [2, 1]


def test_all_measures_of_one_call_are_tested():
    ids = torch.ones(2, 29).long()
    more = {"induction": (ids,), "duplicate": (ids,), "induction_scan": (ids,), "syntactic": ([(0, 1, 0)],)}
    first = {name: next(iter(inspect.signature(getattr(measures, name)).parameters), "") for name in FUNCTIONS}
    assert {name for name, parameter in first.items() if parameter == "inputs"} == set(OF_INPUTS)
    assert {name for name, parameter in first.items() if parameter == "weights"} == {*OF_WEIGHTS, *more}
    for name, arguments in more.items():
        assert "inputs.weights" in refusal(getattr(measures, name), Inputs(Weights.of(drawn())), *arguments)


FUNCTIONS = [name for name in measures.__all__ if inspect.isfunction(getattr(measures, name)) and name != "split_heads"]


@pytest.mark.parametrize("name", OF_INPUTS)
def test_a_measure_of_inputs_says_how_to_make_them(name):
    measure, weights = getattr(measures, name), Weights.of(drawn())
    asked = f"inputs is {weights!r}: expected Inputs. Give Inputs(weights) to {name}."
    assert refusal(measure, weights) == refusal(measure, inputs=weights) == asked
    assert refusal(measure, torch.rand(2, 6, 29, 29)) == (
        f"inputs is float32 [2, 6, 29, 29]: expected Inputs. Give Inputs(calls[0].weights), of the calls that "
        f"`regard.inspect.observe` collects, to {name}."
    )


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_measure_of_weights_says_where_they_are(name):
    measure, inputs = getattr(measures, name), Inputs(Weights.of(drawn()))
    asked = f"weights is Inputs: expected Weights. Give inputs.weights to {name}."
    assert refusal(measure, inputs) == refusal(measure, weights=inputs) == asked
    assert "Give calls[0].weights, of the calls that" in refusal(measure, torch.rand(2, 6, 29, 29))


def test_calls_and_lists_are_no_weights():
    q = torch.rand(2, 3, 29, 7)
    with observe() as calls:
        attend(q, q, q)
    assert refusal(entropy, calls[0]) == (
        "inputs is RecordedCall: expected Inputs. Give Inputs(call.weights) to entropy."
    )
    assert "calls is Inputs: expected Weights. Give inputs.weights to retrieval" in refusal(
        retrieval, Inputs(calls[0].weights), torch.ones(2, 30).long(), torch.ones(2, 30) > 0, 5
    )
    assert "weights is RecordedCall: expected Weights. Give call.weights to Inputs" in refusal(Inputs, calls[0])
    assert "Give Inputs(weights) to compute" in refusal(compute, [], calls[0].weights)
