"""The dense cache: it gives back what was put in, copies nothing twice, and refuses what does not belong to it."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache import KVCache
from regard.storage.stored import Contiguous, StoredTensor


def tokens_of(count: int, batch: int = 2, heads: int = 3, qk_dim: int = 5, v_dim: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, count, qk_dim), torch.randn(batch, heads, count, v_dim)


def append(cache: KVCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What a plain cache hands out: tensors."""
    keys, values = cache.append(k, v)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return keys, values


@given(steps=st.lists(st.integers(0, 97), min_size=1, max_size=7))
def test_what_comes_out_is_what_was_put_in(steps: list[int]):
    cache, parts = KVCache(), [tokens_of(n) for n in steps]
    for done, part in enumerate(parts, 1):
        found = append(cache, *part)
        for one, so_far in zip(found, zip(*parts[:done], strict=True), strict=True):
            assert torch.equal(one, torch.cat(so_far, dim=2))
        assert cache.tokens == sum(steps[:done])


def test_a_prompt_in_chunks_attends_as_one_shot_does():
    q, k, v = torch.randn(2, 6, 101, 16), torch.randn(2, 3, 101, 16), torch.randn(2, 3, 101, 16)
    cache, out = KVCache(), []
    for start, end in ((0, 53), (53, 54), (54, 71), (71, 101)):
        keys, values = append(cache, k[:, :, start:end], v[:, :, start:end])
        out.append(attend(q[:, :, start:end], keys, values, mask=Causal(), backend="native"))
    assert torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal(), backend="native"))


def test_old_tokens_are_copied_only_when_memory_doubles():
    cache, places = KVCache(), []
    for _ in range(1000):
        k, v = append(cache, *tokens_of(1))
        places.append((k.data_ptr(), v.data_ptr()))
    assert len(set(places)) == 5  # 64, 128, 256, 512, 1024 tokens


def test_what_was_given_out_stays_true():
    cache = KVCache()
    early = append(cache, *tokens_of(61))
    kept = [t.clone() for t in early]
    for _ in range(7):
        cache.append(*tokens_of(1))
    cache.reset()
    cache.append(*tokens_of(61))
    assert all(map(torch.equal, early, kept))


def test_a_copy_goes_its_own_way():
    cache = KVCache()
    cache.append(*tokens_of(3))
    branch = copy.deepcopy(cache)
    ours, theirs = tokens_of(1), tokens_of(1)
    cache.append(*ours)
    branch.append(*theirs)
    assert torch.equal(append(cache, *tokens_of(0))[0][:, :, 3:], ours[0])
    assert torch.equal(append(branch, *tokens_of(0))[0][:, :, 3:], theirs[0])


def test_after_a_reset_other_sizes_are_welcome():
    cache = KVCache()
    cache.append(*tokens_of(3))
    cache.reset()
    assert (cache.tokens, cache.bytes, repr(cache)) == (0, 0, "KVCache(0 tokens)")
    assert cache.append(*tokens_of(2, batch=1, heads=1))[0].shape == (1, 1, 2, 5)


def test_it_says_how_much_it_holds():
    cache = KVCache()
    cache.append(*tokens_of(3))
    assert cache.bytes == 3 * 2 * 3 * (5 + 7) * 4
    assert repr(cache) == ("KVCache(3 tokens, k [2, 3, 3, 5], v [2, 3, 3, 7], float32: 864 bytes, 18,432 allocated)")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 1}, r"\[1, 3, 1, 5\].*\[2, 3, 4, 5\]"),
        ({"heads": 6}, r"\[2, 6, 1, 5\].*\[2, 3, 4, 5\]"),
        ({"qk_dim": 8}, r"\[2, 3, 1, 8\].*\[2, 3, 4, 5\]"),
        ({"v_dim": 8}, r"v is .*\[2, 3, 1, 8\].*\[2, 3, 4, 7\]"),
    ],
)
def test_tokens_of_another_size_are_named_beside_what_is_stored(sizes: dict[str, int], message: str):
    cache = KVCache()
    cache.append(*tokens_of(4))
    with pytest.raises(ProblemError, match=message):
        cache.append(*tokens_of(1, **sizes))
    assert cache.tokens == 4


def test_tokens_of_another_type_are_named_beside_what_is_stored():
    cache = KVCache()
    cache.append(*tokens_of(4))
    with pytest.raises(ProblemError, match=r"bfloat16.*float32"):
        cache.append(*(t.bfloat16() for t in tokens_of(1)))


def test_keys_and_values_must_belong_together():
    k, v = tokens_of(4)
    for wrong in (v[:, :, :3], v[:, :2], v[:1], v.double(), v[0]):
        with pytest.raises(ProblemError, match="k is float32"):
            KVCache().append(k, wrong)


def test_it_serves_inference_and_says_so_where_gradients_would_flow():
    k, v = (t.requires_grad_() for t in tokens_of(4))
    with pytest.raises(ProblemError, match=r"is for inference.*torch\.no_grad"):
        KVCache().append(k, v)
    with torch.no_grad():
        assert append(KVCache(), k, v)[0].shape == k.shape


def test_what_inference_mode_stored_can_be_added_to_outside_of_it():
    cache, first, second = KVCache(), tokens_of(3), tokens_of(2)
    with torch.inference_mode():
        cache.append(*first)
    assert torch.equal(append(cache, *second)[0], torch.cat([first[0], second[0]], dim=2))
    with torch.inference_mode():
        assert cache.append(*tokens_of(1))[0].shape[2] == 6


def test_what_is_cropped_is_forgotten():
    cache, k = KVCache(), torch.randn(1, 2, 7, 4)
    cache.append(k[:, :, :5], k[:, :, :5])
    cache.crop(3)
    assert cache.tokens == 3
    keys, _ = append(cache, k[:, :, 5:], k[:, :, 5:])
    assert torch.equal(keys, torch.cat([k[:, :, :3], k[:, :, 5:]], dim=2))
    with pytest.raises(ProblemError, match=r"crop\(6\): expected 0 to 5, the tokens"):
        cache.crop(6)


STEPS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from([0, 1, 1, 2, 7, 97])),
    st.tuples(st.just("crop"), st.integers(0, 120)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
)


@pytest.mark.parametrize("codec", [None, torch.bfloat16], ids=str)
@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_it_is_a_list_of_tokens(codec: torch.dtype | None, steps: list[tuple[str, Any]]):
    cache, batch = KVCache(codec=codec), 2
    kept: list[tuple[Tensor, Tensor]] = []
    for step, what in steps:
        if step == "append":
            new = tokens_of(what, batch)
            kept += list(zip(*(t.unbind(2) for t in new), strict=True))
            for side, found in enumerate(cache.append(*new) if kept else ()):
                expected = torch.stack([token[side] for token in kept], 2)
                if isinstance(found, Tensor):
                    assert codec is None
                    assert torch.equal(found, expected)
                else:
                    assert torch.equal(found.dense(), expected.to(codec).to(torch.float32))
        elif step == "crop":
            kept = kept[: max(len(kept) - what, 0)]
            cache.crop(len(kept))
            batch = batch if kept else 2
        elif kept:
            rows = torch.tensor(what) % batch
            cache.select(rows)
            kept, batch = [(k[rows], v[rows]) for k, v in kept], len(rows)
        assert cache.tokens == cache.tokens_seen == len(kept)


def test_another_float_type_halves_the_bytes_and_is_returned_as_it_is():
    cache, (k, v) = KVCache(codec=torch.float16), tokens_of(71)
    keys, values = cache.append(k, v)
    assert isinstance(keys, StoredTensor)
    assert isinstance(values, StoredTensor)
    assert (keys.dtype, keys.parts[0].data.dtype) == (torch.float32, torch.float16)
    assert torch.equal(values.dense(), v.half().float())
    assert cache.bytes == 71 * 2 * 3 * (5 + 7) * 2
    assert cache.allocated_bytes == cache.bytes * 79 // 71  # an eighth to spare
    same = KVCache(codec=torch.float32).append(k, v)[0]
    assert isinstance(same, Tensor)  # the type that they come in: nothing to say


def test_room_for_so_many_is_made_at_once_and_ends_there_without_loss():
    cache, (k, v) = KVCache(Contiguous(capacity=71)), tokens_of(71)
    first = append(cache, k[:, :, :3], v[:, :, :3])[0]
    assert cache.allocated_bytes == 71 * 2 * 3 * (5 + 7) * 4
    last = append(cache, k[:, :, 3:70], v[:, :, 3:70])[0]
    assert first.data_ptr() == last.data_ptr()
    for new in (2, 5):
        with pytest.raises(ProblemError, match=rf"{new} tokens more than the 70 .* make {70 + new}, .*capacity=71"):
            cache.append(*tokens_of(new))
    assert torch.equal(append(cache, k[:, :, 70:], v[:, :, 70:])[0], k)
    with pytest.raises(ProblemError, match="capacity=71"):
        cache.append(*tokens_of(1))
    with pytest.raises(ProblemError, match="capacity=3"):
        KVCache(Contiguous(capacity=3)).append(*tokens_of(4))


def test_tokens_are_forgotten_head_by_head():
    cache, (k, v) = KVCache(), tokens_of(101)
    cache.append(k, v)
    index = torch.stack([torch.randperm(101)[:37].sort().values for _ in range(6)]).view(2, 3, 37)
    held = cache.allocated_bytes
    cache._store.keep(index)
    assert (cache.tokens, cache.tokens_seen) == (37, 101)
    assert cache.allocated_bytes < held
    more = tokens_of(2)
    for found, x, new in zip(append(cache, *more), (k, v), more, strict=True):
        kept = x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
        assert torch.equal(found, torch.cat([kept, new], 2))
    assert (cache.tokens, cache.tokens_seen) == (39, 103)
    cache.crop(102)
    assert cache.tokens == 38
    with pytest.raises(ProblemError, match=r"crop\(63\): expected 64 to 102"):
        cache.crop(63)
    assert (cache.tokens, cache.tokens_seen) == (38, 102)
