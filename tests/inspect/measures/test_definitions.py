"""Every measure says all that a report tells of it, gives finite scores, and has a key and a label of its own."""

import torch

from regard import Causal
from regard.inspect.measures import Inputs, compute
from regard.inspect.measures.catalogue import DEFINITIONS, MEASURES
from regard.inspect.measures.copying import Circuit, Vocabulary
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import called


def test_every_measure_is_computed_from_inputs_that_have_what_it_needs():
    call = called(torch.randn(1, 2, 9, 3), torch.randn(1, 2, 9, 3), mask=Causal())
    w_v, w_o, table = torch.randn(2, 4, 5), torch.randn(2, 4, 5), torch.randn(31, 5)
    inputs = Inputs(
        Weights.of(call), torch.zeros(1, 9).long(), rarity=torch.rand(1, 9), norms=torch.rand(1, 2, 9),
        v=torch.randn(1, 2, 9, 4), out=torch.randn(1, 2, 9, 4), w_o=w_o,
        circuit=Circuit(w_v, w_o), vocabulary=Vocabulary(table, table),
    )  # fmt: skip
    for key, score in compute(MEASURES, inputs).items():
        assert score.value.shape[1:] == score.chance.shape[1:] == (2,), key
        assert score.value.isfinite().all(), key
        assert score.chance.isfinite().all(), key
        assert (score.at is not None) == (f"{key}_at" in DEFINITIONS), key


def test_every_definition_is_whole_and_every_key_and_label_is_there_once():
    for name, definition in DEFINITIONS.items():
        assert all(definition), name
        own = ("arXiv:", "20", "inverse participation", "a rule of this report")
        assert any(part in definition.source for part in own), name
    assert len({definition.label for definition in DEFINITIONS.values()}) == len(DEFINITIONS)
    assert len({measure.key for measure in MEASURES}) == len(MEASURES)
