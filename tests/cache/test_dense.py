"""The dense cache: it gives back what was put in, copies nothing twice, and refuses what does not belong to it."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, ProblemError, attend
from regard.cache import KVCache


def tokens_of(count: int, batch: int = 2, heads: int = 3, qk_dim: int = 5, v_dim: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, count, qk_dim), torch.randn(batch, heads, count, v_dim)


@given(steps=st.lists(st.integers(0, 97), min_size=1, max_size=7))
def test_what_comes_out_is_what_was_put_in(steps: list[int]):
    cache, parts = KVCache(), [tokens_of(n) for n in steps]
    for done, part in enumerate(parts, 1):
        found = cache.append(*part)
        for one, so_far in zip(found, zip(*parts[:done], strict=True), strict=True):
            assert torch.equal(one, torch.cat(so_far, dim=2))
        assert cache.tokens == sum(steps[:done])


def test_a_prompt_in_chunks_attends_as_one_shot_does():
    q, k, v = torch.randn(2, 6, 101, 16), torch.randn(2, 3, 101, 16), torch.randn(2, 3, 101, 16)
    cache, out = KVCache(), []
    for start, end in ((0, 53), (53, 54), (54, 71), (71, 101)):
        keys, values = cache.append(k[:, :, start:end], v[:, :, start:end])
        out.append(attend(q[:, :, start:end], keys, values, mask=Causal(), backend="native"))
    assert torch.equal(torch.cat(out, dim=2), attend(q, k, v, mask=Causal(), backend="native"))


def test_old_tokens_are_copied_only_when_memory_doubles():
    cache, places = KVCache(), []
    for _ in range(1000):
        k, v = cache.append(*tokens_of(1))
        places.append((k.data_ptr(), v.data_ptr()))
    assert len(set(places)) == 5  # 64, 128, 256, 512, 1024 tokens


def test_what_was_given_out_stays_true():
    cache = KVCache()
    early = cache.append(*tokens_of(61))
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
    assert torch.equal(cache.append(*tokens_of(0))[0][:, :, 3:], ours[0])
    assert torch.equal(branch.append(*tokens_of(0))[0][:, :, 3:], theirs[0])


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
    assert repr(cache) == (
        "KVCache(3 tokens, k [2, 3, 3, 5], v [2, 3, 3, 7], float32: 864 bytes in room for 64 tokens, 18,432 bytes)"
    )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"batch": 1}, r"\[1, 3, 1, 5\].*\[2, 3, 4, 5\]"),
        ({"heads": 6}, r"\[2, 6, 1, 5\].*\[2, 3, 4, 5\]"),
        ({"qk_dim": 8}, r"\[2, 3, 1, 8\].*\[2, 3, 4, 5\]"),
        ({"v_dim": 8}, r"v is .*\[2, 3, 1, 8\].*\[2, 3, 4, 7\]"),
    ],
)
def test_tokens_of_another_size_are_named_beside_what_is_stored(sizes: dict[str, int], said: str):
    cache = KVCache()
    cache.append(*tokens_of(4))
    with pytest.raises(ProblemError, match=said):
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
    with pytest.raises(ProblemError, match=r"serves inference.*torch\.no_grad"):
        KVCache().append(k, v)
    with torch.no_grad():
        assert KVCache().append(k, v)[0].shape == k.shape


def test_what_inference_mode_stored_can_be_added_to_outside_of_it():
    cache, first, second = KVCache(), tokens_of(3), tokens_of(2)
    with torch.inference_mode():
        cache.append(*first)
    assert torch.equal(cache.append(*second)[0], torch.cat([first[0], second[0]], dim=2))
    with torch.inference_mode():
        assert cache.append(*tokens_of(1))[0].shape[2] == 6


def test_what_is_cropped_is_forgotten():
    cache, k = KVCache(), torch.randn(1, 2, 7, 4)
    cache.append(k[:, :, :5], k[:, :, :5])
    cache.crop(3)
    assert cache.tokens == 3
    keys, _ = cache.append(k[:, :, 5:], k[:, :, 5:])
    assert torch.equal(keys, torch.cat([k[:, :, :3], k[:, :, 5:]], dim=2))
    with pytest.raises(ProblemError, match=r"crop\(6\): expected a number from 0 to the 5 tokens"):
        cache.crop(6)
