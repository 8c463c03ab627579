"""DTensors, FSDP2 and tensor parallelism beside a sharded sequence, on 2 x 2 processes."""

from collections.abc import Generator

import pytest
from torch.distributed.tensor import Replicate, Shard

from regard import Causal, Mask, Window
from tests.parallel import model_cases
from tests.parallel.workers import Workers, workers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[Workers]:
    with workers(4, tmp_path_factory.mktemp("group")) as made:
        yield made


@pytest.mark.parametrize("mask", [Causal() & Window(9), None])
@pytest.mark.parametrize(
    "placements",
    [(Shard(2), Shard(1)), (Replicate(), Shard(2)), (Shard(0), Shard(2)), (Shard(0), Shard(1))],
)
def test_sharded_dtensors_are_attended_where_they_are(
    ranks: Workers, placements: tuple[object, ...], mask: Mask | None
) -> None:
    ranks.run(model_cases.placed, placements=placements, mask=mask, tokens=13)


@pytest.mark.parametrize("placements", [(Shard(2), Shard(1)), (Shard(0), Shard(2)), (Replicate(), Shard(2))])
def test_sharded_dtensors_are_rotated_where_they_are(ranks: Workers, placements: tuple[object, ...]) -> None:
    ranks.run(model_cases.rotated, placements=placements, tokens=13)


def test_positions_are_added_to_sharded_dtensors(ranks: Workers) -> None:
    ranks.run(model_cases.positioned, tokens=13)


def test_latent_attention_composes_with_tensor_parallelism_of_heads(ranks: Workers) -> None:
    ranks.run(model_cases.latent_heads, tokens=13)


def test_a_mask_of_a_user_may_differ_between_heads_that_are_not_sharded(ranks: Workers) -> None:
    mask = model_cases.WiderHeads(2)
    ranks.run(model_cases.placed, placements=(Shard(0), Shard(2)), mask=mask, tokens=13)


def test_other_placements_are_refused_by_name(ranks: Workers) -> None:
    for found in ranks.run(model_cases.refused):
        for text, part in zip(
            found,
            [
                "dimension a of the mesh: q S(2), k R, v R",
                "q S(3), k S(3), v S(3)",
                "k and v: expected a DTensor",
                "tokens sharded over 2 dimensions of the mesh",
                "Alibi(heads=4) with DTensors whose batch or heads are sharded",
                "differs between batch rows, which are sharded",
                "WiderHeads(width=2) differs between heads, which are sharded",
                "differs between batch rows, which are sharded",
                "has a DTensor: expected a plain tensor of the whole sequence",
                "explain of DTensors: attend computes with the tensors of each rank",
            ],
            strict=True,
        ):
            assert part in text


def test_a_compiled_function_attends_dtensors_outside_of_its_graph(ranks: Workers) -> None:
    ranks.run(model_cases.compiled, tokens=13)


def test_a_sharded_sequence_composes_with_fsdp2(ranks: Workers) -> None:
    ranks.run(model_cases.fsdp_and_sequence, tokens=29)


def test_a_sharded_sequence_composes_with_tensor_parallelism_of_heads(ranks: Workers) -> None:
    ranks.run(model_cases.heads_and_sequence, tokens=29)
