"""Ready calls over stored keys and values: the bits of the long way, whatever changes in a cache between two calls."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    KeyLengths,
    Mask,
    Prefix,
    ProblemError,
    RefusalError,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
)
from regard.cache import Fp8, Int4, Int8, KVCache, Latent, Paged, PagePool, Rolling
from regard.calls import observe_calls
from regard.dispatch import ready
from regard.storage.stored import StoredTensor

pytestmark = pytest.mark.usefixtures("no_plans")


INT4 = Int4(group=16, residual=32)

CACHES: dict[str, Callable[[], KVCache]] = {
    "int8": lambda: KVCache(codec=Int8(group=32, residual=32)),
    "int4": lambda: KVCache(codec=Int4(group=32, residual=32)),
    "fp8": lambda: KVCache(codec=Fp8(group=32, residual=32)),
    "half precision": lambda: KVCache(codec=torch.bfloat16),
    "rolling int8": lambda: KVCache(Rolling(window=96, sinks=4), codec=Int8(group=32, residual=32)),
    "pages": lambda: KVCache(Paged(16)),
    "pages of int8": lambda: KVCache(Paged(16), codec=Int8(group=16, residual=32)),
    "pages of a pool": lambda: KVCache(Paged(16, PagePool(None, 16, INT4)), codec=INT4),
}

LIKE_INT8 = {"int4", "fp8", "pages of int8"}


def _new(tokens: int, batch: int = 2, heads: int = 2) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, batch, heads, tokens, 32)
    return k, v


def _queries(queries: int = 1, batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, queries, 32)


def _run(q: Tensor, k: Any, v: Any, mask: Any = None, offset: int | None = None) -> Tensor | None:
    return ready.run(q, k, v, mask, None, None, offset, None)[1]


def _check(q: Tensor, k: Any, v: Any) -> bool:
    """Compare a call that may be ready with the long way over new handles; returns whether it was ready."""
    found = _run(q, k, v, Causal())
    seen: list[Any] = []
    with observe_calls(seen.append):  # the long way
        expected = attend(q, k.to(k.dtype), v.to(v.dtype), mask=Causal())
    assert len(seen) == 1
    assert torch.allclose(expected, attend(q, k.dense(), v.dense(), mask=Causal()), atol=1e-4)
    assert torch.equal(attend(q, k, v, mask=Causal()), expected)
    if found is not None:
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
    return found is not None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LIKE_INT8)) for name in CACHES]
)
def test_each_step_has_the_bits_of_the_long_way_through_crops_copies_and_resets(name: str) -> None:
    torch.manual_seed(0)
    cache, steps = CACHES[name](), 0
    for round_ in range(2):
        k, v = cache.append(*_new(70))
        _check(_queries(3), k, v)
        for i in range(110):
            new, q = _new(1), _queries()
            k, v = cache.append(*new)
            steps += _check(q, k, v)
            if i % 40 == 10:
                fork = copy.deepcopy(cache)
                forked = fork.append(*_new(1))
                _check(q, *forked)
                _check(q, *cache.append(*_new(1)))
            if i % 30 == 20:
                cache.crop(max(cache.tokens_seen - 5 * round_ - 2, cache.min_crop))
            if i == 60:
                cache.select(torch.tensor([1, 1]))
        cache.reset()
    assert steps > 150  # most steps are ready


WITH_TENSORS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a sink": lambda keys: {"mask": Causal(), "sink": torch.randn(4)},
    "ALiBi": lambda keys: {"mask": Causal(), "bias": Alibi(4)},
    "a bias": lambda keys: {"bias": TensorBias(torch.randn(2, 1, 1, keys))},
    "padding": lambda keys: {"mask": Causal() & ~Prefix(torch.tensor([3, 0]))},
    "a table": lambda keys: {"mask": Causal() & TensorMask(torch.rand(2, 1, 1, keys) < 0.8)},
    "all": lambda keys: {
        "mask": TensorMask(torch.rand(2, 4, 1, keys) < 0.8),
        "bias": TensorBias(torch.randn(4, 1, keys)),
        "sink": torch.randn(4),
    },
}


@pytest.mark.parametrize("words", WITH_TENSORS)
@pytest.mark.parametrize("name", ["int8", "half precision", "pages", "pages of a pool"])
def test_calls_with_more_tensors_are_ready_and_have_the_bits_of_the_long_way(name: str, words: str) -> None:
    torch.manual_seed(0)
    cache, steps = CACHES[name](), 0
    cache.append(*_new(70))
    for i in range(40):
        k, v = cache.append(*_new(1 + (i == 9)))
        q, more = _queries(), WITH_TENSORS[words](k.shape[2])
        bias, sink = more.get("bias"), more.get("sink")
        found = ready.run(q, k, v, more.get("mask"), None, None, None, None, bias, sink)[1]
        with observe_calls(lambda _: None):  # the long way
            expected = attend(q, k.to(k.dtype), v.to(v.dtype), **more)
        dense = (t.dense() if isinstance(t, StoredTensor) else t for t in (k, v))
        assert torch.allclose(expected, attend(q, *dense, backend="reference", **more), atol=1e-4)
        assert torch.equal(attend(q, k, v, **more), expected)
        if found is not None:
            assert torch.equal(found, expected)
            steps += 1
        if i == 20:
            cache.crop(cache.tokens_seen - 9)
    assert steps > 25


@pytest.mark.parametrize("batch", [1, 3])
def test_caches_of_one_form_share_a_ready_call_and_keep_their_keys(batch: int) -> None:
    torch.manual_seed(0)
    caches = [KVCache(codec=Int8(group=32, residual=32)) for _ in range(3)]
    for tokens, cache in zip((80, 100, 130), caches, strict=True):
        cache.append(*_new(tokens, batch))
    for step in range(40):
        for cache in caches:
            k, v = cache.append(*_new(1, batch))
            assert _check(_queries(1 + step % 2, batch), k, v) or step < 2


def test_a_call_after_the_number_of_parts_changed() -> None:
    torch.manual_seed(0)
    cache = KVCache(codec=Int8(group=32, residual=32, sinks=32))
    parts: set[int] = set()
    k, v = cache.append(*_new(33))
    for i in range(190):
        k, v = cache.append(*_new(1))
        assert isinstance(k, StoredTensor)
        is_known = len(k.parts) in parts
        parts.add(len(k.parts))
        assert _check(_queries(), k, v) == is_known
        if i == 100:
            cache.crop(75)  # inside a group of codes: from the next group on there are two ranges
    assert parts == {2, 3, 4}


def test_prompts_tokens_before_heads_and_offsets_have_the_bits_of_the_long_way() -> None:
    torch.manual_seed(0)
    k, v = KVCache(codec=Int8()).append(*_new(200))
    for queries in (1, 5, 130):
        q = _queries(queries)
        by_token, with_gaps = q.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([q, q], -1)[..., 0]
        for offset in (None, 20, 250):
            expected = attend(q, k, v, mask=Causal(), offset=offset)
            for one in (q, by_token, with_gaps):
                found = _run(one, k, v, Causal(), offset)
                assert (found is None) == (one is with_gaps)
                again = attend(one, k, v, mask=Causal(), offset=offset)
                assert torch.equal(again, expected)
                assert found is None or (torch.equal(found, expected) and found.stride() == again.stride())


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
def test_calls_that_need_more_than_the_kernel_go_the_long_way() -> None:
    torch.manual_seed(0)
    q, cache = _queries(), KVCache(codec=Int8())
    assert cache.append(*_new(0))[0].shape[2] == 0
    k, v = cache.append(*_new(0))
    assert not attend(q, k, v).any()
    assert _run(q, k, v) is None
    k, v = cache.append(*_new(100))
    plain = attend(q, k, v)
    found = _run(q, k, v)
    assert found is not None
    assert torch.equal(found, plain)
    assert attend(q.clone().requires_grad_(), k, v).requires_grad
    assert _run(q.double(), k, v) is None
    assert isinstance(k, StoredTensor)
    assert isinstance(v, StoredTensor)
    assert _run(q, k, v.dense()) is None
    assert torch.allclose(attend(q, k, v.dense()), plain, atol=1e-6)
    for keys, values in ((k.to(torch.bfloat16), v.to(torch.bfloat16)), (k, v.to(torch.bfloat16))):
        with pytest.raises(ProblemError):
            attend(q, keys, values)
    with pytest.raises(ProblemError):
        attend(q[:1], k, v)
    with pytest.raises(ProblemError):
        attend(q[..., :16], k, v)
    with pytest.raises(RefusalError, match="trace"):
        torch.jit.trace(lambda x: attend(x, k, v), q, check_trace=False)  # pyright: ignore[reportUnknownMemberType]
    rotated = KVCache(codec=Int8(rotate=True)).append(*_new(100))
    for _ in range(2):
        attend(q, *rotated)
        assert _run(q, *rotated) is None


ROW_MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "a window and sinks": Causal() & (Window(20) | Prefix(3)),
}


def _pool_of_rows(*lengths: int) -> tuple[PagePool, list[Any]]:
    pool = PagePool(None, 16)
    sequences = [pool.sequence() for _ in lengths]
    for tokens, sequence in zip(lengths, sequences, strict=True):
        pool.append([sequence], *_new(tokens, 1))
    return pool, sequences


@pytest.mark.parametrize("name", ROW_MASKS)
@pytest.mark.parametrize("queries", [1, 3])
def test_rows_of_different_lengths_are_ready_and_have_the_bits_of_the_long_way(name: str, queries: int) -> None:
    torch.manual_seed(0)
    (pool, sequences), mask, steps = _pool_of_rows(20, 37, 70), ROW_MASKS[name], 0
    for i in range(30):
        if i % 3 == 2:  # one row gets longer than the others
            pool.append(sequences[i % 2 : i % 2 + 1], *_new(5, 1))
        k, v = pool.append(sequences, *_new(queries, 3))
        for sink in (None, torch.randn(4)):
            q = _queries(queries, 3)
            found = ready.run(q, k, v, mask, None, None, None, None, None, sink)[1]
            with observe_calls(lambda _: None):  # the long way
                expected = attend(q, k, v, mask=mask, sink=sink)
            assert torch.allclose(expected, attend(q, k, v, mask=mask, sink=sink, backend="reference"), atol=1e-5)
            assert torch.equal(attend(q, k, v, mask=mask, sink=sink), expected)
            if found is not None:
                assert torch.equal(found, expected)
                steps += 1
    assert steps > 50


def test_two_layers_of_different_lengths_are_not_taken_for_each_other() -> None:
    torch.manual_seed(0)
    layers = [_pool_of_rows(20, 37), _pool_of_rows(37, 20), _pool_of_rows(20, 38)]
    for _ in range(4):
        for pool, sequences in layers:
            k, v = pool.append(sequences, *_new(1))
            q = _queries()
            expected = attend(q, k, v, mask=Causal(), backend="reference")
            assert torch.allclose(attend(q, k, v, mask=Causal()), expected, atol=1e-5)


def test_what_rows_of_different_lengths_do_not_take_is_refused_as_ever() -> None:
    torch.manual_seed(0)
    pool, sequences = _pool_of_rows(20, 37)
    k, v = pool.append(sequences, *_new(1))
    for _ in range(2):
        attend(_queries(), k, v, mask=Causal())
    assert _run(_queries(), k, v, Causal()) is not None
    for words in ({"offset": 3}, {"mask": Tree((-1, 0))}, {"mask": TensorMask(torch.rand(38) < 0.5)}):
        with pytest.raises(ProblemError):
            attend(_queries(), k, v, **words)
    with pytest.raises(ProblemError):
        attend(_queries(), k, pool.append(sequences[:1], *_new(1, 1))[1], mask=Causal())
    biased = attend(_queries(), k, v, mask=Causal(), bias=Alibi(4))
    assert biased.shape == (2, 4, 1, 32)
    assert _run(_queries(), k, v, KeyLengths(torch.tensor([3, 3]))) is None


@pytest.mark.parametrize("lengths", [[21], [21, 39], [21, 38, 5]], ids=str)
def test_lengths_that_do_not_fit_are_refused_as_ever(lengths: list[int]) -> None:
    torch.manual_seed(0)
    pool, sequences = _pool_of_rows(20, 37)
    k, v = pool.append(sequences, *_new(1))
    wrong = [StoredTensor(t.parts, (2, *t.shape[1:]), t.dtype, torch.tensor(lengths)) for t in (k, v)]
    for _ in range(2):
        attend(_queries(), k, v, mask=Causal())
        with pytest.raises(ProblemError, match="the call has"):
            attend(_queries(), *wrong, mask=Causal())


def test_latents_are_ready() -> None:
    torch.manual_seed(0)
    cache = KVCache(Latent(24), codec=Int8(keys="channel", group=32, residual=32))
    cache.append(torch.randn(2, 1, 100, 32))
    assert [_check(_queries(), *cache.append(torch.randn(2, 1, 1, 32))) for _ in range(8)] == [False] + [True] * 7


@pytest.mark.parametrize("name", ["int8", "pages of int8"])
def test_ready_calls_keep_no_tensor_of_a_cache(name: str) -> None:
    cache = CACHES[name]()
    k, v = cache.append(*_new(100))
    for _ in range(3):
        k, v = cache.append(*_new(1))
        attend(_queries(), k, v, mask=Causal())
    assert _run(_queries(), k, v, Causal()) is not None
    assert isinstance(k, StoredTensor)
    assert isinstance(v, StoredTensor)
    tensors = [t for part in (*k.parts, *v.parts) for t in (part.data, part.scale, part.table) if t is not None]
    alive = [weakref.ref(t) for t in tensors]
    del cache, k, v, tensors
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_what_is_known_of_parts_is_not_copied_with_them() -> None:
    torch.manual_seed(0)
    k, v = KVCache(codec=Int8()).append(*_new(150))
    q = _queries()
    expected = attend(q, k, v)
    k2, v2 = copy.deepcopy((k, v))
    assert isinstance(k2, StoredTensor)
    assert k2.fixed is not None
    assert k2.fixed.known is None
    assert torch.equal(attend(q, k2, v2), expected)


def test_memory_that_moved_is_found_again() -> None:
    torch.manual_seed(0)
    k, v = KVCache(codec=Int8()).append(*_new(150))
    q = _queries()
    expected = attend(q, k, v)
    assert isinstance(k, StoredTensor)
    codes = k.parts[1].data
    assert torch.equal(attend(q, k, v), expected)
    codes.set_(codes.flip(0).clone())  # pyright: ignore[reportUnknownMemberType]
    assert torch.equal(attend(q, k, v), attend(q, k.to(k.dtype), v))
    assert not torch.equal(attend(q, k, v), expected)
