"""What a session shows of results: a few lines, whatever they hold."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch

import regard.inspect
from regard import Causal, attend
from regard.inspect import HeadScores, Weights, observe
from regard.inspect.brief import brief
from regard.inspect.intervene import Effect, Importance, Integrated
from tests.inspect.reports import report

MANY = tuple((layer, head) for layer in range(31) for head in range(9))


def public_results():
    """Every dataclass of `regard.inspect` and its rooms' public names that has a field of tensors or of many things."""
    names = [regard.inspect, *(importlib.import_module(f"regard.inspect.{room}") for room in ("intervene", "measures"))]
    found: set[Any] = {value for room in names for value in vars(room).values() if dataclasses.is_dataclass(value)}
    tensors = ("Tensor", "tuple[HeadName", "Mapping[", "dict[", "HeadScores", "NDArray", "tuple[Head")
    return [
        kind
        for kind in sorted(found, key=lambda kind: kind.__name__)
        if kind not in (regard.inspect.Report, Integrated)  # below, and in intervene/test_integrated.py
        and any(mark in str(field.type) for field in dataclasses.fields(kind) for mark in tensors)
    ]


@pytest.mark.parametrize("kind", public_results(), ids=lambda kind: kind.__name__)
def test_no_public_result_prints_its_tensors(kind):
    """Every field is a tensor of 3,003 elements, except where a class says its shapes."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, torch.zeros(7, 3, 11, 13))
    assert len(repr(made)) < 1000, repr(made)[:300]


def test_a_report_is_a_few_lines():
    made = report(layers=5, heads=8, notes=("Something to know.",), other=report(model="another"))
    output = repr(made)
    assert len(output) < 600
    assert output.startswith("Report of a model, 5 layers x 8 heads: 24 tokens read, 5 written\n")
    kinds = [head.kind for head in made.heads]
    for kind in set(kinds):
        assert f"{kinds.count(kind)} {kind}" in output
    assert "note: Something to know." in output
    assert "compared with another" in output


def test_weights_say_heads_tokens_and_type():
    q, k = torch.zeros(1, 6, 7, 4), torch.zeros(1, 2, 7, 4)
    with observe(each=lambda look: repr(look.weights)) as seen:
        attend(q, k, k, mask=Causal())
    assert seen[0].value == "Weights(6 heads on 2, 7 queries x 7 keys, float32, mask=Causal())"
    assert "3 sequences" in repr(Weights(q.repeat(3, 1, 1, 1), k.repeat(3, 1, 1, 1), torch.zeros(3, 6, 7)))


def test_many_heads_are_counted_and_a_few_numbers_shown():
    output = repr(Importance(MANY, torch.zeros(2, len(MANY))))
    assert output.startswith(
        "Importance(heads=((0, 0), (0, 1), (0, 2), ... 279 in all), slopes=float32 [2, 279], caveat="
    )
    assert "losses=tensor([1.5000, 2.0000])" in repr(Effect(((0, 1),), torch.ones(2), torch.tensor([1.5, 2.0])))
    assert len(repr(HeadScores(torch.zeros(1, 300), torch.zeros(1, 300)))) < 100


def test_results_within_results_are_brief_as_well():
    @brief
    @dataclasses.dataclass
    class Both:
        score: HeadScores
        found: dict[int, torch.Tensor]

    output = repr(Both(HeadScores(torch.zeros(1, 300), torch.zeros(1, 300)), {n: torch.zeros(99) for n in range(50)}))
    assert output.startswith("Both(score=HeadScores(value=float32 [1, 300], ")
    assert output.endswith("2: float32 [99], ... 50 in all})")
