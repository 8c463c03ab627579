"""A cache that is moved to other memory goes on as if nothing had happened."""

from typing import Any

import pytest
import torch

from regard import RefusalError
from regard.cache import H2O, Knorm, KVCache
from regard.cache.pool import PagePool
from regard.describe.position import Rope
from regard.integrate.cache import regard_cache
from regard.integrate.cache_layers import dense
from regard.integrate.cache_move import move
from regard.storage.codec import Int4, Int8
from regard.storage.stored import Contiguous, Latent, Paged, Rolling
from tests.integrate.writing import on_regard, prompt, written

WORDS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "int8": (Contiguous(), Int8(residual=3)),
    "rolling": (Rolling(40, rope=Rope(8)),),
    "rolling int4": (Rolling(40, rope=Rope(8)), Int4(residual=3)),
    "paged": (Paged(8),),
    "paged int8": (Paged(16), Int8(16, residual=3)),
    "h2o": (Contiguous(), None, H2O(30)),
    "knorm in pages": (Paged(16), None, Knorm(30)),
    "latent": (Latent(6),),
    "latent int8": (Latent(6), Int8(residual=3)),
}


def steps(words: tuple[Any, ...], moved: bool) -> list[torch.Tensor]:
    """What a cache hands out, before it is moved and after it, with rows in another order."""
    torch.manual_seed(0)
    cache, given = KVCache(*words), []
    for size in (37, 1, 9, 1, 1, 33):
        k = torch.randn(2, 2, size, 8)
        given += [
            dense(found).clone() for found in cache.append(*((k,) if words and type(words[0]) is Latent else (k, -k)))
        ]
        cache.observe(k.repeat(1, 2, 1, 1))
        if moved:
            move(cache, "cpu", copy=True)
        cache.select(torch.tensor([1, 0]))
    return given


@pytest.mark.parametrize("name", WORDS)
def test_what_comes_after_is_the_same(name: str):
    stayed, moved = steps(WORDS[name], False), steps(WORDS[name], True)
    assert all(torch.equal(a, b) for a, b in zip(stayed, moved, strict=True))


def tensors(kept: Any, met: set[int]) -> list[torch.Tensor]:
    """All that can be reached from an object of ours."""
    if id(kept) in met:
        return []
    met.add(id(kept))
    if isinstance(kept, torch.Tensor):
        return [kept]
    if isinstance(kept, list | tuple | dict):
        below: Any = kept.values() if isinstance(kept, dict) else kept
    elif type(kept).__module__.startswith("regard"):
        names = (*getattr(kept, "__dict__", ()), *getattr(type(kept), "__slots__", ()))
        below = [getattr(kept, name) for name in names if hasattr(kept, name)]
    else:
        return []
    return [t for part in below for t in tensors(part, met)]


@pytest.mark.parametrize("name", WORDS)
def test_nothing_stays_behind(name: str):
    cache, k = KVCache(*WORDS[name]), torch.randn(2, 2, 37, 8)
    cache.append(*((k,) if WORDS[name] and type(WORDS[name][0]) is Latent else (k, k)))
    assert tensors(cache, set())
    move(cache, "meta")
    assert {t.device.type for t in tensors(cache, set())} == {"meta"}


def test_views_of_one_memory_stay_so():
    cache, whole = KVCache(), torch.arange(12.0)
    cache.__dict__["views"] = (whole, whole[2:].view(5, 2).T)
    move(cache, "cpu", copy=True)
    first, second = cache.__dict__["views"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != whole.data_ptr()
    assert torch.equal(second, whole[2:].view(5, 2).T)


def test_a_pool_that_others_use_stays_where_it_is():
    cache, k = KVCache(Paged(8, pool=PagePool(64, 8))), torch.randn(2, 2, 5, 8)
    cache.append(k, k)
    with pytest.raises(RefusalError, match="shares its pool with other caches"):
        move(cache, "meta")


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_a_model_whose_layers_wait_elsewhere_writes_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """There is one kind of memory here; layers are copied as if there were two."""
    m, moves = on_regard(name), []

    def moved(kept: Any, device: Any) -> None:
        moves.append(str(device))
        move(kept, device, copy=True)

    monkeypatch.setattr("regard.integrate.cache_layers.move", moved)
    stock = written(m, prompt(), None, num_beams=2)
    ours = written(m, prompt(), regard_cache(m, offload=True, codec=Int8()), num_beams=2)
    assert ours[0] == stock[0]
    assert len(moves) > 2 * 8
