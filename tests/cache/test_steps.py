"""Steps whose position is on the GPU: the same for the host at every position, and right."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, ProblemError, Rope, Window, attend
from regard.cache import Contiguous, Fp8, Int4, Int8, Knorm, KVCache, Latent, Paged, PagePool, Rolling
from tests.oracle import Case, dense, worst
from tests.pretended_gpu import Launches, PretendedGpu, pretended_gpu
from tests.stored import dense as decoded
from tests.stored import used_pages

few_rows = pytest.importorskip("regard.gpu.few_rows", reason="Triton is not installed", exc_type=ImportError)

ROWS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
WINDOW = Window(7)

CACHES: dict[str, tuple[dict[str, Any], int | None]] = {
    "contiguous": ({}, 80),
    "as bf16": ({"codec": torch.bfloat16}, 80),
    "rolling": ({"layout": Rolling(24, sinks=3)}, None),
    "rolling, rotated sinks": ({"layout": Rolling(24, sinks=3, rope=Rope(DIM))}, None),
    "rolling without sinks": ({"layout": Rolling(9, sinks=0)}, None),
    "pages": ({"layout": Paged(16)}, 80),
    "int8": ({"codec": Int8(group=16, residual=16, sinks=4)}, 80),
    "int8 by token": ({"codec": Int8(group=16, residual=0, sinks=0, keys="token")}, 80),
    "rotated fp8": ({"codec": Fp8(group=16, residual=8, rotate=True)}, 80),
    "int4": ({"codec": Int4(group=32, residual=16, sinks=0)}, 80),
    "rolling int8": ({"layout": Rolling(24, sinks=3), "codec": Int8(group=16, residual=4)}, None),
    "rolling int4, rotated sinks": (
        {"layout": Rolling(24, sinks=3, rope=Rope(DIM)), "codec": Int4(group=16, residual=0, keys="token")},
        None,
    ),
    "pages of int8": ({"layout": Paged(16), "codec": Int8(group=16, residual=16, sinks=4)}, 80),
    "pages of int4": ({"layout": Paged(32), "codec": Int4(group=32, residual=0, sinks=0, rotate=True)}, 80),
}

LIKE_OTHERS = (
    "as bf16", "rolling", "rolling without sinks", "int8", "int8 by token", "rotated fp8", "int4", "rolling int8",
    "pages of int8",
)  # fmt: skip
"""What these do at a step, another one does as well."""


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as gpu:
        yield gpu


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in LIKE_OTHERS else name for name in CACHES]
)
def test_every_step_is_the_same_for_the_host_and_right(name: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch):
    launches: list[object] = []
    for kernel in ("_SPAN", "_MERGE"):
        monkeypatch.setattr(few_rows, kernel, Launches(getattr(few_rows, kernel), launches))
    options, capacity = CACHES[name]
    cache = KVCache(**options)
    prompt = 22 if capacity is None else 40
    cache.append(*tokens(gpu, prompt))
    steps, first = cache.steps(capacity), list[object]()
    for number in range(18):
        k, v = tokens(gpu, 1)
        q = gpu.put(torch.randn(ROWS, HEADS, 1, DIM))
        gpu.events.clear()
        launches.clear()
        out = attend(q, *steps.append(k, v), mask=Causal())
        if number:  # the first one makes what all have in common
            assert gpu.events == []
        first = first or list(launches)
        assert launches == first
        stored = map(decoded, cache.append(k, v))
        assert worst(out.cpu(), dense(Case(q.cpu(), *(t.cpu() for t in stored)))[0]) < 2e-6, number
    assert steps.position.tolist() == [prompt + 18] * ROWS
    steps.check()


def tokens(gpu: PretendedGpu, count: int) -> tuple[Tensor, Tensor]:
    k, v = (gpu.put(torch.randn(ROWS, KV_HEADS, count, DIM)) for _ in range(2))
    return k, v


@pytest.mark.parametrize(
    "name",
    ["int8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("contiguous", "rolling, rotated sinks"))],
)
def test_a_step_can_be_repeated_at_its_position(name: str, gpu: PretendedGpu):
    options, capacity = CACHES[name]
    cache = KVCache(**options)
    cache.append(*tokens(gpu, 40))
    steps = cache.steps(capacity)
    for _ in range(9):
        steps.append(*tokens(gpu, 1))
        steps.position.sub_(1)
        k, v = tokens(gpu, 1)
        q = gpu.put(torch.randn(ROWS, HEADS, 1, DIM))
        stored = map(decoded, cache.append(k, v))
        out = attend(q, *steps.append(k, v))
        assert worst(out.cpu(), dense(Case(q.cpu(), *(t.cpu() for t in stored)))[0]) < 2e-6


def test_a_prompt_in_shared_pages_stays_as_it_is(gpu: PretendedGpu):
    pool = PagePool(page=16)
    cache = KVCache(Paged(16, pool))
    before = [t.dense().clone() for t in cache.append(*tokens(gpu, 40)) if not isinstance(t, Tensor)]
    steps = cache.steps(64)
    used = used_pages(pool)
    for _ in range(20):
        steps.append(*tokens(gpu, 1))
    empty = (gpu.put(torch.empty(ROWS, KV_HEADS, 0, DIM)) for _ in range(2))
    after = [t.dense() for t in cache.append(*empty) if not isinstance(t, Tensor)]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(before, after, strict=True))
    assert used == ROWS * (3 + 2)  # two whole pages are shared
    del steps
    assert used_pages(pool) == ROWS * 3


def test_latents_have_steps(gpu: PretendedGpu):
    cache = KVCache(Latent(24))
    entries = gpu.put(torch.randn(ROWS, 1, 30, DIM))
    cache.append(entries)
    steps = cache.steps(40)
    for _ in range(4):
        k, q = gpu.put(torch.randn(ROWS, 1, 1, DIM)), gpu.put(torch.randn(ROWS, HEADS, 1, DIM))
        out = attend(q, *steps.append(k), mask=Causal())
        stored = (t.cpu() for t in cache.append(k) if isinstance(t, Tensor))
        assert worst(out.cpu(), dense(Case(q.cpu(), *stored))[0]) < 2e-6


def test_latents_as_codes_have_steps(gpu: PretendedGpu):
    cache = KVCache(Latent(24), Int8(group=16, residual=8, sinks=4))
    cache.append(gpu.put(torch.randn(ROWS, 1, 30, DIM)))
    steps = cache.steps(60)
    for _ in range(20):
        k, q = gpu.put(torch.randn(ROWS, 1, 1, DIM)), gpu.put(torch.randn(ROWS, HEADS, 1, DIM))
        out = attend(q, *steps.append(k), mask=Causal())
        stored = (t.dense().cpu() for t in cache.append(k) if not isinstance(t, Tensor))
        assert worst(out.cpu(), dense(Case(q.cpu(), *stored))[0]) < 2e-6


CODES: dict[str, tuple[dict[str, Any], int | None]] = {
    "contiguous": ({"codec": Int8(group=16, residual=8, sinks=4)}, 90),
    "pages": ({"layout": Paged(16), "codec": Int4(group=32, residual=33, sinks=20)}, 180),
    "latents": ({"layout": Latent(24), "codec": Fp8(group=16, residual=0)}, 90),
    "rolling": ({"layout": Rolling(61, sinks=5, rope=Rope(DIM)), "codec": Int8(group=16, residual=9)}, None),
}


@pytest.mark.parametrize("prompt", [37, 80])
@pytest.mark.parametrize("name", CODES)
def test_steps_over_codes_store_the_bits_of_the_ordinary_cache(name: str, prompt: int):
    options, capacity = CODES[name]
    cache, heads = KVCache(**options), 1 if name == "latents" else KV_HEADS

    def new(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(ROWS, heads, count, DIM) for _ in range(1 if name == "latents" else 2))

    cache.append(*new(prompt))
    steps = cache.steps(capacity)
    for number in range(60 if capacity is None else min(60, capacity - prompt)):
        token = new(1)
        for step, stored in zip(steps.append(*token), cache.append(*token), strict=True):
            assert not isinstance(step, Tensor)
            assert not isinstance(stored, Tensor)
            a, b = step.dense()[:, :, : stored.shape[2]], stored.dense()
            assert step.row_lengths == (stored.shape[2],) * ROWS
            if name == "rolling":  # in another order
                a, b = a.sort(2)[0], b.sort(2)[0]
            assert torch.equal(a, b), number


def test_steps_over_pages_of_codes_change_no_page_that_other_sequences_have():
    codec = Int8(group=16, residual=40, sinks=0)
    pool, ids = PagePool(page=16, codec=codec), list(range(96))
    tokens = torch.randn(2, 1, KV_HEADS, 96, DIM)
    known = pool.sequence(ids)
    pool.append([known], *tokens)
    before = [t.dense() for t in pool.append([known], *tokens[:, :, :, :0])]
    cache = KVCache(Paged(16, pool), codec)
    cache.append(*tokens)
    cache.select(torch.zeros(2, dtype=torch.int64))  # two rows with the same pages
    steps = cache.steps(100)
    for _ in range(4):
        steps.append(*torch.randn(2, 2, KV_HEADS, 1, DIM))
    after = [t.dense() for t in pool.append([known], *tokens[:, :, :, :0])]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    used = used_pages(pool)
    del steps
    assert used_pages(pool) < used


@pytest.mark.parametrize("name", CACHES)
def test_steps_made_in_inference_mode_go_on_outside_of_it(name: str):
    options, capacity = CACHES[name]
    cache = KVCache(**options)
    new = [torch.randn(ROWS, KV_HEADS, count, DIM) for count in (40, 1, 1, 1)]
    with torch.inference_mode():
        cache.append(new[0], new[0])
        steps = cache.steps(capacity)
        steps.append(new[1], new[1])
    with torch.no_grad():
        steps.append(new[2], new[2])
    with torch.inference_mode():
        steps.append(new[3], new[3])
    steps.check()
    assert steps.position.tolist() == [43] * ROWS


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda steps: pickle.loads(pickle.dumps(steps))])
@pytest.mark.parametrize(
    "options",
    [
        (), (Rolling(16, 2),), (Rolling(16, 2, Rope(16)),), (Rolling(40, 2, Rope(16)), Int8(16, 16)), (Paged(16),),
        (None, Int8(16, 16)),
    ],
    ids=str,
)  # fmt: skip
def test_steps_copied_in_inference_mode_go_on_outside_of_it(way: Callable[[Any], Any], options: tuple[Any, ...]):
    cache, new = KVCache(*options), torch.randn(2, 2, 1, 16)
    cache.append(*torch.randn(2, 2, 2, 40, 16))
    steps = cache.steps(None if isinstance(cache.layout, Rolling) else 64)
    with torch.inference_mode():
        copied = way(steps)
    found, expected = (x.append(new, new) for x in (copied, steps))
    assert all(torch.equal(decoded(a), decoded(b)) for a, b in zip(found, expected, strict=True))
    assert copied.position.tolist() == [41, 41]


def test_on_a_cpu_the_lengths_are_read():
    cache = KVCache(codec=Int8(group=16, residual=16))
    k, v = torch.randn(2, ROWS, KV_HEADS, 60, DIM)
    cache.append(k[:, :, :50], v[:, :, :50])
    steps, q = cache.steps(60), torch.randn(ROWS, HEADS, 1, DIM)
    for at in range(50, 60):
        new = k[:, :, at : at + 1], v[:, :, at : at + 1]
        assert worst(attend(q, *steps.append(*new), mask=Causal()), attend(q, *cache.append(*new))) < 2e-6


def test_other_calls_read_the_lengths_of_steps_and_are_right(gpu: PretendedGpu):
    cache = KVCache()
    cache.append(*tokens(gpu, 30))
    (k, v), q = tokens(gpu, 1), gpu.put(torch.randn(ROWS, HEADS, 1, DIM))
    softcapped = {"softcap": 2.0, "scale": 0.3}
    handles = cache.steps(64).append(k, v)
    gpu.events.clear()
    found = attend(q, *handles, mask=Causal() & WINDOW, **softcapped)
    assert "read" in {event.kind for event in gpu.events}
    stored = (t.cpu() for t in cache.append(k, v) if isinstance(t, Tensor))
    exact = dense(Case(q.cpu(), *stored, {"mask": Causal() & WINDOW, **softcapped}))[0]
    assert worst(found.cpu(), exact) < 2e-6


@pytest.mark.parametrize("more", [{"mask": Causal() & WINDOW}, {"bias": Alibi(HEADS)}, {"queries": 2}], ids=str)
def test_positions_in_a_ring_are_not_guessed(more: dict[str, Any]):
    cache = KVCache(Rolling(24, sinks=3))
    cache.append(*torch.randn(2, ROWS, KV_HEADS, 40, DIM))
    handles = cache.steps().append(*torch.randn(2, ROWS, KV_HEADS, 1, DIM))
    q = torch.randn(ROWS, HEADS, more.pop("queries", 1), DIM)
    with pytest.raises(ProblemError, match="not in the order of their positions"):
        attend(q, *handles, **more)


def test_what_steps_cannot_have_is_an_error(gpu: PretendedGpu):
    cases: list[tuple[dict[str, Any], int, int | None, str]] = [
        ({}, 0, 9, "append the prompt first"),
        ({}, 30, 30, "expected more than the 30 tokens"),
        ({}, 30, None, "expected more than the 30 tokens"),
        ({"evict": Knorm(24)}, 30, 40, "has no steps"),
        ({"layout": Rolling(24)}, 30, 40, "leave it out"),
        ({"layout": Rolling(24, sinks=4)}, 3, None, "expected the 4 sinks"),
        ({"layout": Rolling(24), "codec": Int8()}, 30, None, "expected a window of 68 tokens or more"),
        ({"layout": Paged(16), "codec": Int8(sinks=32)}, 30, 90, "32 tokens or more"),
        ({"codec": Int8(sinks=32)}, 30, 90, r"32 sinks or more\."),
        ({"codec": Int8(sinks=1)}, 5, 90, r"5 tokens .* 32 sinks or more \(sinks=1, rounded up to groups of 32\)\."),
        ({"layout": Contiguous(capacity=35)}, 30, 40, "capacity=35"),
    ]
    for options, prompt, capacity, says in cases:
        cache = KVCache(**options)
        if prompt:
            cache.append(*tokens(gpu, prompt))
        with pytest.raises(ProblemError, match=says):
            cache.steps(capacity)


def test_a_token_that_is_not_finite_is_found_by_check(gpu: PretendedGpu):
    cache = KVCache(codec=Int8())
    cache.append(*tokens(gpu, 40))
    steps = cache.steps(64)
    k, v = tokens(gpu, 1)
    steps.append(k.fill_(torch.nan), v)
    with pytest.raises(ProblemError, match="NaN or infinite"):
        steps.check()
    with pytest.raises(ProblemError, match="one token of each row"):
        steps.append(*tokens(gpu, 2))


@pytest.mark.parametrize("layout", [Contiguous(), Paged(16)])
def test_a_token_beyond_the_capacity_is_an_error(layout: Any):
    cache = KVCache(layout)
    cache.append(torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16))
    steps, token = cache.steps(31), torch.randn(1, 2, 1, 16)
    steps.append(token, token)
    steps.check()
    with pytest.raises(ProblemError, match=r"steps\(capacity=31\) is full: token 32"):
        steps.append(token, token)


def test_codes_beyond_the_capacity_are_an_error():
    cache = KVCache(codec=Int8())
    cache.append(torch.randn(1, 2, 70, 32), torch.randn(1, 2, 70, 32))
    steps, token = cache.steps(71), torch.randn(1, 2, 1, 32)
    steps.append(token, token)
    with pytest.raises(ProblemError, match=r"steps\(capacity=71\) is full"):
        steps.append(token, token)


def test_check_finds_positions_beyond_the_capacity(gpu: PretendedGpu):
    cache = KVCache()
    cache.append(torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16))
    steps = cache.steps(31)
    steps.position += 2
    with pytest.raises(ProblemError, match="token 32 of a row does not fit"):
        steps.check()


@pytest.mark.parametrize("dims", [(16, 0), (0, 16)])
def test_keys_or_values_without_channels_have_steps_or_an_error(dims: tuple[int, int]):
    for layout, capacity in ((Contiguous(), 80), (Paged(16), 80), (Rolling(24, sinks=3), None)):
        cache = KVCache(layout)
        prompt = [torch.randn(1, 2, 40, dim) for dim in dims]
        cache.append(*prompt)
        steps = cache.steps() if capacity is None else cache.steps(capacity)
        new = [torch.randn(1, 2, 1, dim) for dim in dims]
        out = attend(torch.randn(1, 4, 1, dims[0]), *steps.append(*new), mask=Causal())
        assert out.shape == (1, 4, 1, dims[1])
        if layout != Rolling(24, sinks=3) and not dims[0]:  # equal scores
            torch.testing.assert_close(out[:, ::2], torch.cat([prompt[1], new[1]], 2).mean(2, keepdim=True))
        coded = KVCache(layout, Int8())
        with pytest.raises(ProblemError, match=r"a codec needs elements. Use codec=None."):
            _coded_steps(coded, prompt, capacity)


def _coded_steps(cache: KVCache, prompt: list[Tensor], capacity: int | None) -> None:
    cache.append(*prompt)  # Contiguous and Rolling store values without channels, as latents have them
    cache.steps(capacity)
