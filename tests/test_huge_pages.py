"""Large caches and outputs are on pages of 2 MiB where Linux grants them to those who ask."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard import Causal, Window, attend
from regard.cache import KVCache, Paged
from regard.huge_pages import advise_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GRANTED = SETTING.exists() and "[never]" not in SETTING.read_text()

pytestmark = pytest.mark.skipif(not GRANTED, reason="this system has no transparent huge pages")


def has_advice(memory: Tensor) -> bool:
    """Whether the kernel has noted, for the mapping in the middle of the memory, that huge pages are wanted."""
    middle, inside = memory.data_ptr() + memory.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping holds the memory")


@pytest.mark.parametrize("layout", [None, Paged(64)])
def test_a_large_cache_asks_for_huge_pages(layout: Paged | None):
    cache = KVCache() if layout is None else KVCache(layout)
    k = torch.randn(1, 2, 16411, 64)
    stored, _ = cache.append(k, torch.randn(1, 2, 16411, 64))
    memory = stored if isinstance(stored, Tensor) else stored.parts[0].data
    assert has_advice(memory)


@pytest.mark.parametrize("by_token", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_large_outputs_and_gradients_ask_for_huge_pages(by_token: bool):
    """33 MiB, which glibc takes from the system for each call, so that no earlier advice is seen."""
    q, k, v = (torch.randn(1, 2, 16900, 256) for _ in range(3))
    if by_token:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):  # a plan is made, found again, repeated
        out = attend(q, k, v, mask=Causal() & Window(16), backend="native")
        assert has_advice(out)
        del out
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*inputs, mask=Causal() & Window(16), backend="native")
    for gradient in torch.autograd.grad(out, inputs, torch.ones_like(out)):
        assert has_advice(gradient)


def test_memory_smaller_than_a_huge_page_is_left_alone():
    memory = torch.empty(1 << 18, dtype=torch.float32)  # 1 MiB
    before = has_advice(memory)
    advise_huge_pages(memory)
    assert has_advice(memory) == before


def test_tokens_in_huge_pages_are_those_that_were_appended():
    k, v = torch.randn(1, 2, 16411, 64), torch.randn(1, 2, 16411, 64)
    keys, values = KVCache().append(k, v)
    assert torch.equal(torch.as_tensor(keys), k)
    assert torch.equal(torch.as_tensor(values), v)
