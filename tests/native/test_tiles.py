"""The order of sums on amx, where one instruction adds the products of 32 tokens (native/amx.h)."""

import pytest
import torch
from torch import Tensor

from regard import Causal, attend
from regard.storage.stored import Part, StoredTensor
from tests.native.engines import ALL

pytestmark = pytest.mark.skipif("native amx" not in ALL, reason="needs AMX")

SPAN = 1024  # sums begin anew there


def chained(v: Tensor) -> Tensor:
    """The sum of all tokens: of each 32, even and odd ones are added on their own."""
    spans = torch.zeros(2, v.shape[1])
    for span, tokens_of_span in enumerate(v.split(SPAN)):
        for tokens in tokens_of_span.split(32):
            even, odd = torch.zeros(v.shape[1]), torch.zeros(v.shape[1])
            for pair in tokens.split(2):
                even += pair[0]
                odd += pair[1] if len(pair) > 1 else 0
            spans[span] += even + odd
    return spans[0] + spans[1]


def values(keys: int, wide: int) -> Tensor:
    """Numbers of bf16 whose sums are rounded, each order in its way."""
    generator = torch.Generator().manual_seed(keys)
    size = torch.tensor([2.0**24, 5.0, 3.0, 1.0])[torch.randint(4, (keys, wide), generator=generator)]
    return size * (torch.randint(2, (keys, wide), generator=generator) * 2 - 1)


@pytest.mark.exhaustive(per="queries")
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 16, 67])
@pytest.mark.parametrize("keys", [64, 100, SPAN + 71])
@pytest.mark.parametrize("wide", [64, 128, 203])
@pytest.mark.parametrize("hidden", [3.0, torch.inf])
def test_even_and_odd_tokens_are_two_chains_of_float32(queries: int, keys: int, wide: int, hidden: float):
    """Rows by vectors, few and many by tiles; the last token is hidden from all but the last row, as inf too."""
    v = values(keys, wide)
    v[-1] = hidden
    q, k = torch.zeros(1, 1, queries, 32), torch.zeros(1, 1, keys, 32)  # every weight is 1 until the end
    inputs = (t.to(torch.bfloat16) for t in (q, k, v[None, None]))
    out = attend(*inputs, mask=Causal(), backend="native amx")[0, 0]

    for row in range(max(queries - 40, 0), queries - (hidden == torch.inf)):
        seen = keys - (queries - 1 - row)
        assert out[row].equal((chained(v[:seen]) / seen).to(torch.bfloat16)), f"row {row}"
    finite = v[:-1]
    assert not chained(finite).equal(finite.sum(0, dtype=torch.float64).float()), "no sum is rounded"


@pytest.mark.parametrize("queries", [1, 4, 5, 67])
@pytest.mark.parametrize("wide", [64, 33])
def test_where_parts_end_does_not_change_the_chains(queries: int, wide: int):
    v = values(203, wide).to(torch.bfloat16)
    parts = tuple(Part(len(some), some[None, None]) for some in v.split([4, 15, 107, 77]))
    stored = StoredTensor(parts, (1, 1, 203, wide), torch.bfloat16)
    q, k = torch.zeros(1, 1, queries, 32).bfloat16(), torch.zeros(1, 1, 203, 32).bfloat16()
    out = attend(q, k, stored, backend="native amx")[0, 0]
    assert out.unique(dim=0).equal((chained(v.float()) / 203).to(torch.bfloat16)[None])
