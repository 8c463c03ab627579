"""On CUDA each kind of call has its own order of backends, which decides speed and never correctness."""

import pytest
import torch

from regard import Alibi, Causal, KVCache, Prefix, Window, attend_state, explain
from regard.cache import Int8, Paged
from regard.dispatch.choose import ORDER
from regard.dispatch.cuda_order import kind_of, orders


def meta(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, device="meta", dtype=torch.bfloat16)


def test_every_row_orders_the_same_backends():
    assert list(orders()) == ["decode-stored", "decode", "no-mask", "causal", "other"]
    for row in orders().values():
        assert sorted(row.backends) == sorted(ORDER["cuda"])
        assert row.backends[-1] == "reference"
        assert row.reason


@pytest.mark.parametrize(
    ("kind", "queries", "words"),
    [
        ("no-mask", 512, {}),
        ("no-mask", 512, {"mask": Window(512, 512)}),
        ("causal", 512, {"mask": Causal()}),
        ("causal", 512, {"mask": Causal() & Window(512)}),
        ("other", 256, {"mask": Causal()}),
        ("other", 512, {"mask": Causal() & Window(100)}),
        ("other", 512, {"bias": Alibi(8)}),
        ("decode", 1, {"mask": Causal()}),
        ("other", 1, {"mask": Causal() & (Window(100) | Prefix(4))}),
    ],
)
def test_the_kind_is_that_of_the_pairs_that_a_mask_keeps(kind: str, queries: int, words: dict[str, object]):
    k = meta(2, 2, 512, 64)
    plan = explain(meta(2, 8, queries, 64), k, k, **words, device="cuda")
    assert plan.order is not None
    assert plan.order.kind == kind == kind_of(plan.problem)
    assert plan.backend == ("triton" if kind == "other" else "sdpa")


def test_a_causal_call_says_why_torchs_kernels_are_passed_over():
    q = meta(1, 8, 512, 64).float()
    plan = explain(q, q, q, mask=Causal(), device="cuda")
    assert plan.passed_over["sdpa"] == [
        "on cuda, under a mask or with the log-sum-exp, its kernels take float16 and bfloat16, not float32"
    ]
    assert "order for causal: sdpa, triton, flex, reference" in str(plan)


@pytest.mark.parametrize("cache", [KVCache(Paged(16)), KVCache(codec=Int8())], ids=["pages", "codes"])
def test_few_queries_read_pages_and_codes_where_they_are(cache: KVCache):
    k = torch.randn(2, 2, 300, 64).to("meta")
    plan = explain(torch.empty(2, 8, 1, 64, device="meta"), *cache.append(k, k), mask=Causal(), device="cuda")
    assert plan.backend == "triton"
    assert not [step for step in plan.steps if step.name == "gather"]


def test_calls_on_a_cpu_have_one_order():
    q = torch.randn(1, 2, 5, 16)
    assert explain(q, q, q, mask=Causal()).order is None
    assert attend_state(q, q, q).out.shape == q.shape
