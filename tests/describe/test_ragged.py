"""`Ragged`: rows of different lengths see what each would see alone, and schedules know it exactly."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Causal, Mask, Prefix, ProblemError, TensorMask, Window, draw
from regard.describe.mask import CallSizes
from regard.describe.ragged import Ragged
from regard.describe.serialized import deserialize
from regard.plan.tiling import schedule

INNER: tuple[Mask | None, ...] = (
    None,
    Causal(),
    Causal() & Window(5),
    Causal() & (Window(3) | Prefix(2)),
    ~Causal(),
    Causal() & Window(sys.maxsize),
)


def kept(mask: Mask, batch: int, queries: int, keys: int) -> torch.Tensor:
    placed = mask.bind(CallSizes(batch, 1, queries, keys, keys - queries))
    b, q, k = torch.arange(batch)[:, None, None], torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    return placed.keep(b, 0, q, k).expand(batch, queries, keys)


@settings(max_examples=40)
@given(st.sampled_from(range(len(INNER))), st.lists(st.integers(1, 23), min_size=1, max_size=4), st.integers(1, 7))
def test_each_row_sees_what_it_sees_alone(which: int, lengths: list[int], queries: int) -> None:
    inner, keys = INNER[which], max(*lengths, queries)
    found = kept(Ragged(inner, lengths), len(lengths), queries, keys)
    for row, length in enumerate(lengths):
        assert not found[row, :, length:].any()
        q, k = torch.arange(length - queries, length)[:, None], torch.arange(length)
        alone = torch.ones(queries, length, dtype=torch.bool) if inner is None else inner.keep(0, 0, q, k)
        assert torch.equal(found[row, :, :length], alone.expand(queries, length))


@settings(max_examples=40)
@given(st.sampled_from(range(len(INNER))), st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 70))
def test_the_schedule_lists_just_these_pairs(which: int, lengths: list[int], queries: int) -> None:
    mask, keys = Ragged(INNER[which], lengths), max(*lengths, queries)
    sizes = CallSizes(len(lengths), 1, queries, keys, keys - queries)
    tiles = schedule(mask.bind(sizes), tile=64, **sizes._asdict())
    assert tiles.pairs == int(kept(mask, len(lengths), queries, keys).sum())


def test_it_can_be_drawn_and_printed() -> None:
    mask = Ragged(Causal(), (2, 3))
    assert draw(mask, 2, 3, batch=0) == "█ · ·\n█ █ ·"
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    assert deserialize(mask.serialize(tensors, numbers), tensors, numbers) == mask
    assert mask.fingerprint().is_constant


def test_masks_laid_out_by_the_rows_of_a_call_are_refused() -> None:
    with pytest.raises(ProblemError, match="mask of positions"):
        Ragged(TensorMask(torch.ones(2, 2, dtype=torch.bool)), (1, 2))
    with pytest.raises(ProblemError, match="2 batch rows"):
        Ragged(None, (1, 2)).bind(CallSizes(3, 1, 1, 4, 3))
    with pytest.raises(ProblemError, match="keys"):
        Ragged(None, (9, 2)).bind(CallSizes(2, 1, 1, 4, 3))
