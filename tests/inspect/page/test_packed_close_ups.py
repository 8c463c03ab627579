"""CloseUp-ups come back as exactly as they say, and keys that heads share are stored once."""

import base64
import zlib
from dataclasses import replace

import numpy as np
import pytest

from regard.inspect.page.packing import deflate_arrays, pack_close_ups, quantise, relative_error
from regard.inspect.surveying.closeup import close_up_rows
from tests.inspect.page.long import random_close


def unpacked(data, shapes):
    """Arrays of (type, shape) out of a block, as the page's script takes them."""
    rest = np.frombuffer(zlib.decompress(base64.b64decode(data), -zlib.MAX_WBITS), np.uint8)
    for kind, shape in shapes:
        size, count = np.dtype(kind).itemsize, int(np.prod(shape))
        planes, rest = rest[: size * count].reshape(size, count), rest[size * count :]
        yield np.ascontiguousarray(planes.T).view(kind).reshape(shape)
    assert len(rest) == 0


def test_arrays_come_back_as_they_were():
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(7, 3)).astype(np.float32), np.arange(-5, 5, dtype=np.int16)
    back = unpacked(deflate_arrays(*arrays), [("<f4", (7, 3)), ("<i2", (10,))])
    assert all(np.array_equal(a, b) for a, b in zip(arrays, back, strict=True))


def test_what_the_page_holds_gives_the_weights_back():
    close = replace(random_close(97, 8), first=np.maximum(0, np.arange(97) - 40).astype(np.int32), prefix=3)
    [pack] = pack_close_ups([close])
    rows, keys = (pack.blocks[pack.caption[name]] for name in ("rows", "keys"))
    q_step, q, total, first, last = unpacked(
        rows, [("<f4", 8), ("<i2", (97, 8)), ("<f4", 97), ("<i4", 97), ("<i4", 97)]
    )
    k_step, k = unpacked(keys, [("<f4", 8), ("<i2", (97, 8))])
    ends = np.cumsum(first, dtype=np.int32), np.cumsum(last, dtype=np.int32)
    again = replace(close, q=q * q_step, k=k * k_step, total=total, first=ends[0], last=ends[1])
    exact, stored = close_up_rows(close, 0, 97), close_up_rows(again, 0, 97)
    assert np.array_equal(exact > 0, stored > 0)
    assert np.abs(stored / np.where(exact > 0, exact, 1) - 1)[exact > 1e-4].max() <= 0.005


def test_the_error_it_tells_is_the_error_there_is():
    close = random_close(97, 8)
    q, k = quantise(close.q), quantise(close.k)
    coarse = k._replace(codes=(k.codes // 256 * 256).astype(np.int16))
    assert relative_error(close, q, k) < 0.005
    assert relative_error(close, q, coarse) > 0.02


def test_a_step_is_a_32767th_of_the_greatest_and_nothing_stays_nothing():
    numbers = np.array([[1.0, 0.0, -3.0], [-0.5, 0.0, 2.0]])
    counts, step = quantise(numbers)
    assert step == pytest.approx([1 / 32767, 1, 3 / 32767])
    assert counts.tolist() == [[32767, 0, -32767], [-16384, 0, 21845]]


def test_keys_that_heads_share_are_stored_once():
    own = random_close(31, 4)
    shared = replace(random_close(31, 4, seed=1), head=1, k=own.k)
    other = replace(random_close(31, 4, seed=2), head=2)
    names = [close.caption["keys"] for close in pack_close_ups([own, shared, other])]
    assert names == ["keys-0-0", "keys-0-0", "keys-0-1"]
