"""Models whose sequence is sharded over processes equal those of one process: logits, loss, gradients."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from regard import Alibi, Rope, Sinusoidal, TensorBias, Window
from regard.extend import spec
from regard.integrate.sharded import _dense_tensors  # pyright: ignore[reportPrivateUsage]
from tests.parallel import model_cases
from tests.parallel.workers import Workers, workers


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(request.param, tmp_path_factory.mktemp("group")) as made:
        yield made


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("case", ["plain", "padding on the right", "padding on the left", "packed"])
@pytest.mark.parametrize(("name", "layout", "tokens"), [("llama", "balanced", 37), ("mistral", "zigzag", 41)])
def test_a_model_of_transformers_equals_one_process(
    ranks: Workers, name: str, layout: str, tokens: int, case: str
) -> None:
    ranks.run(model_cases.transformers_model, name=name, tokens=tokens, layout=layout, case=case)


@pytest.mark.parametrize("case", ["plain", "padding on the left, positions counted"])
@pytest.mark.parametrize("name", ["opt", "roberta"])
def test_a_model_that_counts_its_positions_equals_one_process(ranks: Workers, name: str, case: str) -> None:
    ranks.run(model_cases.transformers_model, name=name, tokens=37, layout="zigzag", case=case)


@pytest.mark.parametrize("case", ["plain", "padding on the right"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_whose_loss_has_no_name_equals_one_process(ranks: Workers, name: str, case: str) -> None:
    ranks.run(model_cases.transformers_model, name=name, tokens=37, layout="zigzag", case=case)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_every_layout_gives_the_same_model(ranks: Workers, layout: str) -> None:
    ranks.run(model_cases.transformers_model, name="llama", tokens=37, layout=layout, case="plain")


@pytest.mark.parametrize(
    "more", [{"position": Rope(8)}, {"position": Sinusoidal(32)}, {"position": Alibi(4), "mask": Window(7)}]
)
def test_a_decoder_of_regard_equals_one_process(ranks: Workers, more: dict[str, object]) -> None:
    ranks.run(model_cases.regard_model, more=more, layout="balanced", tokens=37)


def test_a_module_of_your_own_calls_the_ring(ranks: Workers) -> None:
    ranks.run(model_cases.own_module, tokens=37)


def test_what_means_something_else_for_a_part_of_a_sequence_is_refused_by_name(ranks: Workers) -> None:
    expected = [
        "LlamaForCausalLM in context_parallel: cache=...",
        "output_attentions=True: each rank would have other rows",
        "logits_to_keep=1: the last tokens are on one rank",
        "attention_mask is [1, 1, 12, 12] in context_parallel: expected the padding of the whole sequence, [1, 12]",
        "rank 1 would have none",
        "its RoPE (dynamic) depends on the length of the sequence",
        "gradient checkpointing: backward would call the layers again",
        "BertModel in context_parallel: its pooler reads the first token",
        "LayoutLMForMaskedLM in context_parallel: it makes a dense mask or bias [1, 1, 1,",
        "T5ForConditionalGeneration",
        "Decoder(..., caches) in context_parallel",
        "MultiHeadAttention(..., 2 tensors) in context_parallel",
        "no model was sharded in context_parallel",
        'expected mesh["sequence"]',
        "layout='odd': expected one of contiguous, zigzag, striped, balanced",
    ]
    for found in ranks.run(model_cases.refused_calls):
        for text, part in zip(found, expected, strict=True):
            assert part in text


@pytest.mark.exhaustive
def test_a_compiled_model_is_sharded_uncompiled(ranks: Workers) -> None:
    ranks.run(model_cases.compiled_model)


def test_tables_of_users_are_no_dense_tensors_of_the_tokens_of_a_rank() -> None:
    @spec
    class ByCentury(TensorBias):
        def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return self.tensor[q // 100, k // 100]

    dense, own = TensorBias(torch.zeros(5, 5)), ByCentury(torch.zeros(3, 3))
    assert _dense_tensors(None, own + dense) == [dense.tensor]
