"""The order of sums on amx, where one instruction adds the products of 32 tokens (native/amx.h)."""

import pytest
import torch

from regard import attend
from tests.native.engines import ALL

pytestmark = pytest.mark.skipif("native amx" not in ALL, reason="needs AMX")


@pytest.mark.parametrize("queries", [1, 3, 67])
def test_even_and_odd_tokens_are_two_chains_of_float32(queries: int):
    generator = torch.Generator().manual_seed(queries)
    size = torch.tensor([2.0**24, 5.0, 3.0, 1.0])[torch.randint(4, (64, 203), generator=generator)]
    v = size * (torch.randint(2, (64, 203), generator=generator) * 2 - 1)
    q, k = torch.zeros(1, 1, queries, 32), torch.zeros(1, 1, 64, 32)  # every weight is 1/64, and 1 until the end
    inputs = (t.to(torch.bfloat16) for t in (q, k, v[None, None]))
    out = attend(*inputs, backend="native amx")[0, 0]

    sums = torch.zeros(203)
    for tokens in v.split(32):
        even, odd = torch.zeros(203), torch.zeros(203)
        for pair in tokens.split(2):
            even, odd = even + pair[0], odd + pair[1]
        sums += even + odd
    assert out.unique(dim=0).equal((sums / 64).to(torch.bfloat16)[None])
    assert not sums.equal(v.sum(0, dtype=torch.float64).float()), "no sum is rounded, so any order would do"
