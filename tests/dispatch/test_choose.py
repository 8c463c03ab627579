"""The choice: no silent fallback, reasons for all that were passed over, and a cache that keeps no tensor alive."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from regard import (
    Alibi,
    Call,
    Causal,
    Documents,
    KeyLengths,
    KVCache,
    MaskFunction,
    Prefix,
    ProblemError,
    RefusalError,
    State,
    T5Bias,
    Window,
    attend,
    explain,
    observe_calls,
)
from regard.cache import Contiguous, Int8, Latent, Paged
from regard.dispatch import choose
from regard.dispatch.choose import ASIDE, BACKENDS, ELSEWHERE, ORDER
from regard.extend import Backend, Kernel, Problem, Schedule, register_backend
from regard.plan.problem import Operands
from regard.scores import Additive, Bilinear, Cosine
from regard.storage.stored import Part, StoredTensor
from tests.test_native import needs_library


def meta(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, device="meta")


def test_a_named_engine_never_gives_way_to_another():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RefusalError) as refusal:
        attend(q, q, q, bias=Alibi(2), backend="sdpa")
    assert str(refusal.value).split("\n") == [
        "The backend 'sdpa' cannot run this.",
        "  q [1, 2, 5, 8] · kv [1, 2, 5, 8|8] float32 on cpu, mask None, bias Alibi(heads=2)",
        "  sdpa: a bias would be built in full for every head",
        "  Leave backend=None to let regard choose.",
    ]


def test_a_refusal_is_also_what_python_calls_not_implemented():
    assert issubclass(RefusalError, NotImplementedError)


@pytest.mark.usefixtures("no_library")
def test_the_plan_says_who_was_passed_over_and_why():
    plan = explain(meta(1, 2, 64, 8), meta(1, 2, 64, 8), meta(1, 2, 64, 8), mask=Causal() & Window(8), softcap=2.0)
    assert plan.backend == "reference"
    assert "The compiled library is missing" in plan.passed_over["native"][0]
    assert plan.passed_over["sdpa"] == [
        "mask Causal() & Window(left=8) would be built in full, [queries, keys], and every hidden pair computed",
        "it has no softcap",
    ]
    assert 'only with backend="flex"' in plan.passed_over["flex"][0]


@needs_library
def test_a_plan_is_printed_with_problem_engine_reasons_tiles_and_costs():
    q, kv = meta(1, 32, 4096, 128), meta(1, 8, 4096, 128)
    assert str(explain(q, kv, kv, mask=Causal() & Window(5000))).split("\n") == [
        "q [1, 32, 4096, 128] · kv [1, 8, 4096, 128|128] float32 on cpu, mask Causal() & Window(left=5000), bias None",
        "  simplify_mask: Causal() & Window(left=5000) keeps the same pairs as Causal() in this call",
        "runs on native",
        f"  not chosen: triton ({ASIDE['cpu', 'triton']})",
        f"  not chosen: flex ({ASIDE['cpu', 'flex']})",
        '  not chosen: reference64 (only with backend="reference64": float64 costs twice the time)',
        "tiles of 64 x 64: 66,560 computed (64,512 full, 2,048 partial in 1 pattern), 64,512 skipped",
        "pairs 268,500,992 of 536,870,912 (50 %)",
        "137.5 GFLOP, at least 160 MiB read and written",
    ]


def test_a_small_call_is_counted_in_flop_and_bytes():
    q = torch.randn(1, 1, 2, 64)
    assert str(explain(q, q, q)).split("\n")[-1] == "1,024 FLOP, at least 2,048 bytes read and written"


def test_explaining_computes_nothing():
    huge = meta(1, 8, 1 << 20, 128)
    plan = explain(huge, huge, huge, mask=Causal() & (Window(4096) | Prefix(4)))
    assert plan.schedule.pairs == 8 * 4_290_758_650
    assert plan.flops == 4 * 128 * plan.schedule.pairs


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Window(64), "hides nothing"),
        (KeyLengths(torch.tensor([64])), "hides nothing"),
        (Causal() & Window(64), "keeps the same pairs as Causal() in this call"),
        (Causal() & Documents(torch.zeros(64, dtype=torch.int64)), "keeps the same pairs as Causal() in this call"),
        (Causal() & Window(63), None),
        (Causal(), None),
    ],
)
def test_a_mask_is_written_as_the_simplest_spec(mask, message):
    q = meta(1, 2, 64, 8)
    steps = explain(q, q, q, mask=mask).steps
    assert (message in str(steps[0])) if message else not steps


def test_equal_calls_share_a_plan():
    q = meta(1, 2, 64, 8)
    ids = torch.arange(64) // 10
    assert explain(q, q, q, mask=Documents(ids)) is explain(q, q, q, mask=Documents(ids))


def test_a_mask_changed_in_place_gets_a_new_plan():
    q, k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    lengths = torch.tensor([6])
    before = attend(q, k, v, mask=KeyLengths(lengths))
    lengths[0] = 3
    assert torch.allclose(attend(q, k, v, mask=KeyLengths(lengths)), attend(q, k[:, :, :3], v[:, :, :3]), atol=1e-6)
    assert not torch.equal(attend(q, k, v, mask=KeyLengths(lengths)), before)


def test_the_cache_of_plans_keeps_no_tensor_alive():
    q, ids, slopes = torch.randn(1, 2, 64, 8), torch.arange(64) // 10, torch.randn(2)
    attend(q, q, q, mask=Causal() & Documents(ids), sink=slopes)
    ghosts = [weakref.ref(t) for t in (q, ids, slopes)]
    del q, ids, slopes
    gc.collect()
    assert all(ghost() is None for ghost in ghosts)


def test_every_engine_has_a_place_or_a_reason_not_to():
    for device, row in ORDER.items():
        aside = [name for place, name in ASIDE if place == device]
        assert sorted([*row, *aside]) == sorted(BACKENDS)
    assert {place for place, _ in ASIDE} <= set(ORDER)
    assert set(ELSEWHERE) == set(BACKENDS) - {"reference"}


def test_bytes_count_each_key_once():
    q, kv = meta(2, 4, 256, 16), meta(2, 2, 256, 16)
    rows, keys = 2 * 4 * 256 * 32 * 4, 2 * 2 * 32 * 4
    assert explain(q, kv, kv).bytes == rows + keys * 256
    assert explain(q, kv, kv, mask=Prefix(100)).bytes == rows + keys * 100  # the keys that some query sees


def test_bytes_are_those_of_the_tensors_that_were_given():
    q, k, v = meta(1, 2, 30, 4), meta(1, 2, 50, 64), meta(1, 2, 50, 8)
    moved = 4 * 2 * (30 * (4 + 8) + 50 * (64 + 8))
    assert explain(q, k, v, score=Bilinear(torch.randn(4, 64))).bytes == moved
    weights = torch.randn(16, 4), torch.randn(16, 64), torch.randn(16)
    assert explain(q, k, v, score=Additive(*weights)).bytes == moved


@pytest.mark.parametrize("layout", [Contiguous(), Paged(page=16)], ids=repr)
@pytest.mark.parametrize("codec", [None, Int8()], ids=repr)
def test_bytes_of_stored_keys_are_those_of_the_keys_that_are_seen(layout, codec):
    cache = KVCache(layout, codec)
    k, v = cache.append(torch.randn(2, 2, 1024, 64), torch.randn(2, 2, 1024, 64))
    q = torch.randn(2, 4, 1, 64)
    query = 2 * 4 * 2 * 64 * 4
    assert explain(q, k, v, mask=Causal()).bytes == query + cache.bytes
    assert explain(q, k, v, mask=Causal() & Window(64)).bytes == query + cache.bytes // 16
    assert explain(q, k, v, mask=Causal() & ~Causal()).bytes == query


def test_bytes_of_values_that_lie_in_the_keys_count_once():
    cache = KVCache(Latent(32), Int8())
    k, v = cache.append(torch.randn(1, 1, 512, 48))
    assert explain(torch.randn(1, 4, 1, 48), k, v, mask=Causal()).bytes == 4 * (48 + 32) * 4 + cache.bytes


def test_the_bytes_of_keys_of_which_some_are_codes_are_whole():
    """107.2 bytes for each of 400 keys, whose product is less than 42,880 in floating point."""
    cache = KVCache(codec=Int8(group=16, residual=4))
    k, v = cache.append(torch.randn(2, 2, 100, 32), torch.randn(2, 2, 100, 32))
    assert explain(torch.randn(2, 4, 1, 32), k, v).bytes == 2 * 4 * (32 + 32) * 4 + cache.bytes


def test_bytes_of_rows_of_their_own_lengths_are_those_of_their_tokens():
    lengths = torch.tensor([9, 4])
    parts = (Part(9, torch.randn(2, 1, 16, 3), row_ends=lengths) for _ in range(2))
    k, v = (StoredTensor((part,), (2, 1, 9, 3), torch.float32, lengths) for part in parts)
    assert explain(torch.randn(2, 1, 1, 3), k, v).bytes == (2 * 6 + 13 * 6) * 4


def test_predicates_that_cannot_be_known_again_get_plans_of_their_own():
    class Below:
        __slots__ = ("limit",)

        def __init__(self, limit: int) -> None:
            self.limit = limit

        def __call__(self, b, h, q, k):
            return k < self.limit

    q = torch.randn(1, 1, 20, 4)
    for limit in range(1, 20):
        found = attend(q, q, q, mask=MaskFunction(Below(limit)))
        assert torch.allclose(found, attend(q, q, q, mask=Prefix(limit)), atol=1e-6)


def test_a_predicate_whose_tensor_changed_gets_a_new_plan():
    q, limit = torch.randn(1, 1, 20, 4), torch.tensor(3)
    mask = MaskFunction(lambda b, h, q, k: k < limit)
    for now in (3, 6):
        limit.fill_(now)
        assert torch.allclose(attend(q, q, q, mask=mask), attend(q, q, q, mask=Prefix(now)), atol=1e-6)


@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_is_looked_into_where_there_is_no_batch(rows: int):
    q = torch.randn(0, 2, 5, 4)
    assert attend(q, q, q, mask=KeyLengths(torch.zeros(0, dtype=torch.int64))).shape == (0, 2, 5, 4)
    none = torch.randn(rows, 2, 5, 0)
    assert not attend(none, none, none, mask=Causal(), backend="reference").numel()


def test_plans_are_counted_once_and_leave_when_there_are_many():
    plan, before = explain(*(meta(1, 2, 64, 8),) * 3, mask=Causal()), len(choose._plans)
    for _ in range(2):
        explain(*(meta(1, 2, 64, 8),) * 3, mask=Causal())
    assert len(choose._plans) <= before
    for i in range(300):
        explain(*(meta(1, 2, 64, 8),) * 3, mask=Causal(), scale=float(i))
    assert len(choose._plans) <= 256
    assert explain(*(meta(1, 2, 64, 8),) * 3, mask=Causal()) is not plan
    assert choose._plans.nbytes >= len(choose._plans) * 8


def test_a_bias_that_is_learned_keeps_its_plan():
    q, table = torch.randn(1, 2, 64, 8), torch.randn(8, 2)
    mask = Causal() & Documents(torch.arange(64) // 10)
    first = explain(q, q, q, mask=mask, bias=T5Bias(table, max_distance=16))
    table.add_(1)
    second = explain(q, q, q, mask=mask, bias=T5Bias(table, max_distance=16))
    assert second is first
    assert second.schedule is first.schedule


def test_queries_that_are_not_finite_are_refused_by_sdpa_only_where_gradients_flow():
    """Its gradients of keys take in the queries that the mask hides from them, with a weight of 0."""
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    q[:, :, 1] = torch.nan
    out = attend(q, k, k, mask=Causal(), backend="sdpa")
    assert torch.allclose(out[:, :, 2:], attend(q[:, :, 2:], k, k, mask=Causal(), backend="reference"), atol=1e-6)
    with pytest.raises(RefusalError, match="hold NaN or inf"):
        attend(q, k.requires_grad_(), k, mask=Causal(), backend="sdpa")


@pytest.mark.parametrize(
    ("dtype", "dim", "kv_heads", "chosen"),
    [
        (torch.bfloat16, 64, 2, "sdpa"),
        (torch.bfloat16, 17, 1, "sdpa"),
        (torch.bfloat16, 512, 2, "flex"),  # torch's fused kernels end at 256 dimensions, and ours for many queries, too
        (torch.float32, 64, 2, "sdpa"),
        (torch.float32, 64, 1, "triton"),
        (torch.float32, 18, 2, "triton"),
        (torch.float64, 64, 2, "reference"),
    ],
    ids=str,
)
def test_on_a_gpu_torch_is_never_made_to_build_all_scores(dtype: torch.dtype, dim: int, kv_heads: int, chosen: str):
    q, k = (torch.empty(1, heads, 256, dim, dtype=dtype, device="meta") for heads in (2, kv_heads))
    assert explain(q, k, k, device="cuda").backend == chosen


@pytest.mark.parametrize(("queries", "kind"), [(1, "decode"), (49, "decode"), (256, "no-mask")])
def test_a_batch_that_no_grid_of_programs_has_room_for_runs_on_kernels_with_a_list(queries: int, kind: str):
    pytest.importorskip("triton")
    q = torch.empty(1 << 16, 1, queries, 32, dtype=torch.bfloat16, device="meta")
    plan = explain(q, q, q, device="cuda")
    assert plan.backend == "triton"
    assert plan.order is not None
    assert plan.order.kind == kind
    assert plan.passed_over["sdpa"] == ["on cuda its kernels take at most 65,535 batch rows and heads"]
    with pytest.raises(RefusalError, match="at most 65,535 batch rows and heads"):
        explain(q, q, q, device="cuda", backend="flex")


def test_a_plan_is_its_own_copy_and_is_not_pickled():
    plan = explain(meta(1, 2, 64, 8), meta(1, 2, 64, 8), meta(1, 2, 64, 8), mask=Causal())
    assert copy.copy(plan) is copy.deepcopy(plan) is plan
    with pytest.raises(RefusalError, match=r"a Plan with a mask, .* is not pickled.*regard\.explain again"):
        pickle.dumps(plan)
    q, calls = torch.randn(1, 2, 5, 8), list[Call]()
    with observe_calls(calls.append):
        attend(q, q, q, mask=Causal())
    assert torch.equal(copy.deepcopy(calls[0]).out, calls[0].out)
    with pytest.raises(RefusalError, match=r"a Plan with a mask, .* is not pickled"):
        pickle.dumps(calls[0])


@pytest.mark.parametrize("backend", [None, "sdpa", "reference64"])
def test_a_plan_is_pickled_after_its_call_ran_too(backend: str | None):
    q = torch.randn(1, 2, 5, 8)
    expected = attend(q, q, q, backend=backend)
    plan = explain(q, q, q, backend=backend)
    again = pickle.loads(pickle.dumps(plan))
    assert str(again) == str(plan)
    assert torch.equal(again.run(Operands(q, q, q, None, None, None)).out, expected)


@pytest.mark.parametrize("words", [{"score": Cosine()}, {"mask": Causal()}, {"mask": Window(100)}, {"bias": Alibi(2)}])
def test_a_plan_with_a_spec_that_was_lowered_is_not_pickled(words: dict[str, Any]):
    plan = explain(meta(1, 2, 1, 8), meta(1, 2, 64, 8), meta(1, 2, 64, 8), **words)
    with pytest.raises(RefusalError, match=r"a Plan with a mask, a bias or a score is not pickled"):
        pickle.dumps(plan)


class Tiled(Backend):
    """A backend of a user whose attributes and kernel a test chooses."""

    name = "tiled"

    def __init__(self, **attributes: Any) -> None:
        self.kernel: Any = lambda operands: State(operands.q, operands.q[..., 0])
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    def refusals(self, problem: Problem) -> list[str]:
        return []

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        return self.kernel


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"tile": 0}, "the tile of the backend 'tiled' is 0: expected at least 8 tokens per side"),
        ({"tile": -8}, "the tile of the backend 'tiled' is -8: expected at least 8 tokens per side"),
        ({"tile": 12}, "the tile of the backend 'tiled' is 12: expected a multiple of 8 tokens per side"),
        ({"tile": "64"}, "the tile of the backend 'tiled' is '64': expected a whole number of tokens per side"),
        ({"tile": True}, "the tile of the backend 'tiled' is True: expected a whole number of tokens per side"),
        ({"name": 3}, "the name of the backend Tiled is 3: expected a text"),
        ({"name": ""}, "the name of the backend Tiled is '': expected a text"),
    ],
)
def test_a_backend_has_a_name_and_whole_tiles(attributes: dict[str, Any], message: str):
    q, wrong = torch.randn(1, 2, 70, 8), Tiled(**attributes)
    for call in (lambda: attend(q, q, q, mask=Causal(), backend=wrong), lambda: register_backend(wrong)):
        with pytest.raises(ProblemError, match=f"^{message}"):
            call()


def test_a_backend_without_a_name_is_refused():
    class Nameless(Tiled):
        name = None  # pyright: ignore[reportAssignmentType]

    with pytest.raises(ProblemError, match=r"^the name of the backend Nameless is None: expected a text"):
        register_backend(Nameless())


@pytest.mark.parametrize("kernel", [None, 3])
def test_a_kernel_is_a_function(kernel: object):
    q = torch.randn(1, 2, 70, 8)
    with pytest.raises(ProblemError, match=f"^The backend 'tiled' returned {kernel} as its kernel: expected a"):
        attend(q, q, q, backend=Tiled(kernel=kernel))


@pytest.mark.parametrize("tile", [8, 24, 64])
def test_tiles_may_be_any_multiple_of_eight(tile: int):
    q = torch.randn(1, 2, 70, 8)
    assert torch.equal(attend(q, q, q, mask=Causal(), backend=Tiled(tile=tile)), q)
