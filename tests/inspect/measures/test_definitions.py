"""Every measure that is told of is defined, and every definition says all that there is to say."""

import torch

from regard import Causal
from regard.inspect.measures import Vectors, all_pair_measures, all_sweep_measures, places
from regard.inspect.measures.definitions import DEFINITIONS, OTHERS, PAIRS, PLACES, SWEPT
from regard.inspect.sweep import sweep
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called


def test_every_measure_is_defined():
    weights = Weights.of(called(torch.randn(1, 2, 9, 3), torch.randn(1, 2, 9, 3), mask=Causal()))
    vectors = Vectors(torch.rand(1, 9), torch.rand(1, 2, 9))
    swept = sweep(weights, along=vectors.stacked(weights))
    pairs, of_sweep = all_pair_measures(weights, torch.zeros(1, 9).long()), all_sweep_measures(swept, weights, vectors)
    assert pairs.keys() <= PAIRS.keys()
    assert of_sweep.keys() == SWEPT.keys()
    assert places(pairs | of_sweep).keys() == PLACES.keys()
    assert DEFINITIONS.keys() == PAIRS.keys() | SWEPT.keys() | OTHERS.keys() | PLACES.keys()


def test_every_definition_is_whole_and_no_label_stands_twice():
    for name, definition in DEFINITIONS.items():
        assert all(definition), name
        assert any(said in definition.source for said in ("arXiv:", "20", "inverse participation")), name
    assert len({definition.label for definition in DEFINITIONS.values()}) == len(DEFINITIONS)
