"""The latent cache: one memory, of which values are the first channels, plain and as codes."""

import pytest
import torch
from torch import Tensor

from regard import ProblemError, explain
from regard.cache import KVCache
from regard.cache.store import leading_channels
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Latent, Paged, Part, StoredTensor

BATCH, RANK, ROPE = 2, 13, 4


def entries_of(count: int) -> Tensor:
    return torch.randn(BATCH, 1, count, RANK + ROPE)


def append(cache: KVCache, k: Tensor, v: Tensor | None = None) -> tuple[StoredTensor, StoredTensor]:
    """What a cache of codes hands out: handles."""
    keys, values = cache.append(k, v)
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    return keys, values


def test_values_are_the_latents_in_the_memory_of_the_keys():
    cache, x = KVCache(Latent(RANK)), entries_of(71)
    cache.append(x[:, :, :70])
    keys, values = cache.append(x[:, :, 70:], None)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    assert torch.equal(keys, x)
    assert torch.equal(values, x[..., :RANK])
    assert keys.data_ptr() == values.data_ptr()
    assert cache.bytes == BATCH * 71 * (RANK + ROPE) * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_latents_are_read_once(device: str):
    x = entries_of(71)
    keys, values = KVCache(Latent(RANK)).append(x.to(device))
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    q = torch.zeros(BATCH, 4, 1, RANK + ROPE, device=device)
    assert explain(q, keys, values).bytes == x.nbytes + q.nbytes + BATCH * 4 * RANK * 4
    assert explain(q, keys, values.clone()).bytes == x.nbytes + q.nbytes + BATCH * (4 + 71) * RANK * 4


@pytest.mark.parametrize(
    "codec", [torch.bfloat16, Int8(16, 5), Int4(16, 5), Fp8(16, 5), Int8(16, 5, keys="token"), Int4(32, 0, 0)], ids=repr
)
def test_written_in_fewer_bits_they_still_share_their_memory(codec: Codec | torch.dtype):
    cache, x = KVCache(Latent(RANK), codec), entries_of(101)
    keys, values = append(cache, x[:, :, :0])
    for chunk in x.split([37, 1, 1, 29, 33], 2):
        keys, values = append(cache, chunk)
        assert torch.equal(values.dense(), keys.dense()[..., :RANK])
        assert [p.data.data_ptr() for p in keys.parts] == [p.data.data_ptr() for p in values.parts]
    torch.testing.assert_close(keys.dense(), x, rtol=0, atol=0.3)
    assert len(keys.parts) == (1 if isinstance(codec, torch.dtype) else 3 if codec.sinks and codec.residual else 2)


def test_it_is_cropped_and_selected_as_others_are():
    cache, x = KVCache(Latent(RANK), Int8(16, 7)), entries_of(53)
    expected = append(cache, x)[0].dense()
    cache.append(entries_of(3))
    cache.crop(53)
    cache.select(torch.tensor([1, 1, 0]))
    keys, values = append(cache, torch.randn(3, 1, 0, RANK + ROPE))
    assert torch.equal(keys.dense(), expected[[1, 1, 0]])
    assert torch.equal(values.dense(), expected[[1, 1, 0], :, :, :RANK])
    cache.reset()
    assert cache.tokens == cache.tokens_seen == cache.allocated_bytes == 0


def test_what_is_no_entry_is_refused():
    x = entries_of(3)
    with pytest.raises(ProblemError, match=r"v float32 \[2, 1, 3, 17\].*append\(entries\)"):
        KVCache(Latent(RANK)).append(x, x)
    with pytest.raises(ProblemError, match=r"entries have 17 dimensions.*rank=18"):
        KVCache(Latent(18)).append(x)
    with pytest.raises(ProblemError, match=r"Int8.*rotate=True.*Latent\(rank=13\).*rotate=False"):
        KVCache(Latent(RANK), Int8(rotate=True))
    cache = KVCache(Latent(RANK))
    cache.append(x)
    for wrong in (x[..., :16], x.double(), x[:1], x.expand(-1, 2, -1, -1)):
        with pytest.raises(ProblemError, match="k is"):
            cache.append(wrong)
        assert cache.tokens == 3


def test_the_first_channels_of_pages_lie_in_pages():
    cache, x = KVCache(Paged(16), Int8(16, 5)), entries_of(101)
    found = append(cache, x, x)[0]
    first = leading_channels(found, RANK)
    assert isinstance(first, StoredTensor)
    assert torch.equal(first.dense(), found.dense()[..., :RANK])
    turned = StoredTensor((Part(3, x),), (BATCH, 1, 3, 17), torch.float32, rotated=True)
    with pytest.raises(ProblemError, match="rotated"):
        leading_channels(turned, RANK)
