"""Where rows lie in memory changes no bit: repeated tokens, heads side by side, rows that share sets of the caches."""

import pytest
import torch
from torch import Tensor

from regard import attend
from tests.native.engines import ALL, PLAIN

DIM, KEYS = 128, 300


def repeated(t: Tensor) -> Tensor:
    return t[:, :, :1].expand(t.shape)


def heads_side_by_side(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def in_pages_of_their_own(t: Tensor) -> Tensor:
    return t.new_zeros(*t.shape[:3], 4096 // t.element_size())[..., : t.shape[3]].copy_(t)


def with_a_gap(t: Tensor) -> Tensor:
    return t.new_zeros(*t.shape[:3], t.shape[3] + 24)[..., : t.shape[3]].copy_(t)


@pytest.mark.parametrize("engine", [*ALL, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [repeated, heads_side_by_side, in_pages_of_their_own, with_a_gap])
def test_rows_at_any_distance_give_the_same_bits(place, dtype: torch.dtype, engine: str):
    torch.manual_seed(0)
    for queries in (1, 3, 20):
        q, k, v = (torch.randn(2, 8, n, DIM).to(dtype) for n in (queries, KEYS, KEYS))
        k, v = place(k), place(v)
        found = attend(q, k, v, backend=engine)
        assert torch.equal(found, attend(q, k.contiguous(), v.contiguous(), backend=engine))
        assert torch.allclose(found.double(), attend(q, k, v, backend="reference").double(), atol=2e-2)
