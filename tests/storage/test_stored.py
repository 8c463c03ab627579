"""Storage: what a handle stands for, whatever it is made of; and words that make no sense are refused."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import ProblemError, attend
from regard.cache import Contiguous, Int4, Int8, Latent, Paged, Rolling, StoredTensor
from regard.storage.codec import Codec, encode_rows, encode_tiled
from regard.storage.hadamard import hadamard
from regard.storage.stored import Part
from tests.stored import coded, normal, paged, plain


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 41), st.sampled_from([1, 3, 16, 64]), st.integers(0, 5), st.integers(0, 99))
def test_pages_stand_for_the_tokens_in_order(batch: int, tokens: int, page: int, skip: int, seed: int) -> None:
    t = normal(batch, 2, tokens, 5, seed=seed)
    assert torch.equal(paged(t, page, first_slot=skip, seed=seed).dense(), t)


def test_parts_stand_one_after_the_other() -> None:
    t = normal(2, 3, 7 + 64 + 11, 13)
    middle = coded(t[:, :, 7:71], Int8(), keys=True)
    whole = StoredTensor((plain(t[:, :, :7]), middle, plain(t[:, :, 71:])), (2, 3, 82, 13), torch.float32)
    found = whole.dense()
    assert torch.equal(found[:, :, :7], t[:, :, :7])
    assert torch.equal(found[:, :, 71:], t[:, :, 71:])
    assert 0 < (found - t).abs().max() < 0.03
    assert whole.encodings == ("float32", "int8", "float32")


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_codes_may_begin_and_end_inside_of_a_group(keys: bool) -> None:
    t = normal(1, 2, 64, 6)
    part = coded(t, Int4(), keys=keys)
    cut = StoredTensor((part._replace(first_slot=5, tokens=50),), (1, 2, 50, 6), torch.float32)
    whole = StoredTensor((part,), (1, 2, 64, 6), torch.float32)
    assert torch.equal(cut.dense(), whole.dense()[:, :, 5:55])


def test_rows_of_different_lengths_are_zeros_beyond_their_end() -> None:
    t = normal(2, 1, 9, 4)
    pages = paged(t, 3)
    lengths = torch.tensor([9, 4])
    ragged = StoredTensor((pages.parts[0]._replace(row_ends=lengths),), (2, 1, 9, 4), torch.float32, lengths)
    assert torch.equal(ragged.dense()[0], t[0])
    assert torch.equal(ragged.dense()[1, :, :4], t[1, :, :4])
    assert not ragged.dense()[1, :, 4:].any()
    assert ragged.row_lengths == (9, 4)


def test_rotated_numbers_are_turned_back() -> None:
    t = normal(1, 2, 5, 24)
    turned = StoredTensor((plain(hadamard(t)),), (1, 2, 5, 24), torch.float32, rotated=True)
    assert torch.allclose(turned.dense(), t, atol=1e-6)
    assert "rotated" in turned.encodings


def test_rotated_tokens_in_float64_are_exact_to_float64() -> None:
    t = normal(1, 2, 5, 24).double()
    turned = StoredTensor((plain(hadamard(t)),), (1, 2, 5, 24), torch.float64, rotated=True)
    torch.testing.assert_close(turned.dense(), t, rtol=0, atol=1e-14)


@pytest.mark.parametrize("keys", [True, False])
def test_rotated_codes_are_as_exact_as_the_type_of_the_handle(keys: bool) -> None:
    part = coded(normal(1, 2, 16, 32), Int8(16, rotate=True), keys=keys)
    handle = StoredTensor((part,), (1, 2, 16, 32), torch.float64, rotated=True)
    codes = StoredTensor((part,), (1, 2, 16, 32), torch.float32).dense()
    torch.testing.assert_close(handle.dense(), hadamard(codes.double()), rtol=0, atol=1e-14)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(handle.to(dtype).dense(), hadamard(codes).to(dtype))


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
def test_bytes_are_those_of_codes_and_scales(codec: Codec) -> None:
    t = normal(2, 3, 64, 32)
    keys = StoredTensor((coded(t, codec, keys=True),), (2, 3, 64, 32), torch.float32)
    numbers, scales = t.numel() * codec.bits // 8, t.numel() // 32 * 2 * (2 if codec.bits == 4 else 1)
    assert keys.nbytes == numbers + scales


def test_a_tensor_is_one_plain_part_where_it_lies() -> None:
    t = normal(2, 5, 3, 4).transpose(1, 2)
    stored = StoredTensor.of(t)
    assert stored.parts[0].data.data_ptr() == t.data_ptr()
    assert torch.equal(stored.dense(), t)
    assert repr(stored) == "StoredTensor([2, 3, 5, 4] float32: 5 float32)"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Contiguous(capacity=0), "capacity=0"),
        (lambda: Rolling(window=4, sinks=4), "larger"),
        (lambda: Rolling(window=4, sinks=-1), "sinks=-1"),
        (lambda: Paged(page=0), "page=0"),
        (lambda: Paged(page=True), "page=True"),
        (lambda: Latent(rank=2.5), "rank=2.5.*dimensions"),
    ],
    ids=["capacity", "window", "sinks", "page", "bool", "rank"],
)
def test_layouts_that_make_no_sense_are_refused(make: Any, what: str) -> None:
    with pytest.raises(ProblemError, match=what):
        make()


def test_an_empty_handle_is_an_empty_tensor() -> None:
    nothing = StoredTensor((Part(0, torch.zeros(1, 2, 8, 3)),), (1, 2, 0, 3), torch.float32)
    assert nothing.dense().shape == (1, 2, 0, 3)
    assert nothing.nbytes == 0


def test_encoders_make_what_parts_describe() -> None:
    t = normal(1, 2, 32, 7)
    key, value = encode_tiled(t, Int8(), per_token=True), encode_rows(t, Int8())
    assert key.scale.shape == (1, 2, 32)
    assert value.scale.shape == (1, 2, 32, 1)


USES: dict[str, Any] = {
    "an operator": lambda t: t + 1,
    "an operator from the right": lambda t: 2.0 * t,
    "a product with a tensor": lambda t: torch.ones(5, 4) @ t,
    "an index": lambda t: t[0],
    "a loop": list,
    "a length": len,
    "a function of torch": lambda t: torch.cat([t, t]),
}


@pytest.mark.parametrize("name", USES)
def test_what_only_a_tensor_can_do_is_answered_with_dense(name: str) -> None:
    stored = plain_handle()
    with pytest.raises(ProblemError, match=r"StoredTensor.*handle of stored .*dense\(\) is a plain tensor"):
        USES[name](stored)


@pytest.mark.parametrize("name", ["float", "mT", "contiguous", "transpose"])
def test_an_attribute_of_tensors_is_answered_with_dense(name: str) -> None:
    stored: Any = plain_handle()
    with pytest.raises(AttributeError, match=rf"no '{name}': .*dense\(\) is a plain tensor"):
        getattr(stored, name)
    assert not hasattr(stored, name)
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = stored.colour


def test_a_handle_is_true_and_can_be_copied() -> None:
    stored = plain_handle()
    assert stored
    assert torch.equal(copy.copy(stored).dense(), stored.dense())


def plain_handle() -> StoredTensor:
    t = normal(1, 2, 4, 5)
    return StoredTensor((plain(t),), (1, 2, 4, 5), torch.float32)


def test_numpy_is_refused_and_makes_no_array_of_one_object():
    handle = StoredTensor((plain(torch.zeros(1, 2, 5, 4)),), (1, 2, 5, 4), torch.float32)
    with pytest.raises(ProblemError, match=r"^NumPy got a StoredTensor: .*dense\(\) is a plain tensor"):
        np.asarray(handle)
    q = torch.randn(1, 2, 3, 4)
    assert np.array_equal(attend(q.numpy(), handle, handle), attend(q, handle, handle))
