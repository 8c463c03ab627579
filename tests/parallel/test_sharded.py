"""Decoding over keys that are on several ranks, and the cache of it."""

from typing import Any

import pytest
import torch

from regard import Alibi, Causal, Prefix, Window, attend
from regard.cache import Int8, KVCache, Paged
from regard.parallel import Layout
from tests.parallel import cases
from tests.parallel.comparing import N, assert_close, layouts, some
from tests.parallel.workers import Workers

CALLS: dict[str, dict[str, Any]] = {
    "everything": {},
    "window, sinks and ALiBi": {"mask": Causal() & (Window(20) | Prefix(2)), "bias": Alibi(4), "sink": torch.ones(4)},
    "queries before the end": {"mask": Causal(), "offset": 7, "softcap": 4.0},
}


@pytest.mark.parametrize("name", layouts(4))
@pytest.mark.parametrize("call", CALLS)
def test_every_rank_gets_the_output_of_one_process(four: Workers, name: str, call: str):
    tensors, more = some(), CALLS[call]
    q, k, v = tensors["q"][:, :, :3], tensors["k"], tensors["v"]
    exact = attend(q.double(), k.double(), v.double(), **more, backend="reference64")
    found = four.run(cases.decode, q=q, k=k, v=v, layout=layouts(4)[name], **more)
    assert_close(found[0], exact)
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("backend", ["sdpa", "reference", "native"])
def test_a_rank_without_keys_takes_the_backend_of_the_others(pair: Workers, backend: str):
    q, k = some(tokens=6)["q"], some(tokens=6)["k"]
    for out in pair.run(cases.decode, q=q, k=k, v=k, layout=Layout.of_counts([6, 0]), backend=backend):
        torch.testing.assert_close(out, attend(q, k, k))


def test_compiled_functions_may_decode(pair: Workers):
    tensors = some(tokens=6)
    q, k, v = (tensors[name] for name in "qkv")
    for out in pair.run(cases.decode_compiled, q=q, k=k, v=v, layout=Layout.contiguous(6, 2)):
        torch.testing.assert_close(out, attend(q, k, v))
    for outs in pair.run(cases.fill_and_decode_compiled, q=q, k=k, v=v):
        torch.testing.assert_close(torch.cat(outs, 2), attend(q, k, v, mask=Causal()))


def test_three_ranks_are_a_tree_as_well(four: Workers):
    tensors = some()
    q, k, v = tensors["q"][:, :, :3], tensors["k"], tensors["v"]
    found = four.run(cases.decode_in_three, q=q, k=k, v=v, layout=Layout.striped(N, 3))[:3]
    assert_close(found[0], attend(q.double(), k.double(), v.double()))
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("options", [{}, {"layout": Paged(page=8)}, {"layout": Paged(page=8), "codec": torch.bfloat16}])
@pytest.mark.parametrize("layout", [None, Layout.zigzag(30, 4)])
def test_a_cache_on_four_ranks_decodes_as_one_cache(four: Workers, options: dict[str, Any], layout: Layout | None):
    tensors, prompt = some(), 30
    q, k, v = (tensors[name] for name in "qkv")
    more = {"bias": Alibi(4)}
    found = four.run(cases.fill_and_decode, q=q, k=k, v=v, prompt=prompt, options=options, layout=layout, **more)
    cache = KVCache(**options)
    cache.append(k[:, :, :prompt], v[:, :, :prompt])
    for step, at in enumerate(range(prompt, N)):
        now = slice(at, at + 1)
        keys, values = (
            t if isinstance(t, torch.Tensor) else t.dense() for t in cache.append(k[:, :, now], v[:, :, now])
        )
        exact = attend(q[:, :, now].double(), keys.double(), values.double(), mask=Causal(), **more)
        assert_close(found[0][0][step], exact)
        assert all(torch.equal(outs[step], found[0][0][step]) for outs, _ in found)
    counts = found[0][1]
    assert sum(counts) == N
    assert max(counts) - min(counts) <= 8


def test_the_ranks_compare_the_first_of_all_steps_alone(four: Workers):
    tensors = some(tokens=47)
    del tensors["dout"]
    assert four.run(cases.handshakes_of_decoding, **tensors, prompt=40, options={}, softcap=9.0) == [1] * 4


def test_a_quantised_cache_decodes_within_the_error_of_its_codes(four: Workers):
    tensors = some(tokens=150)
    q, k, v = (tensors[name] for name in "qkv")
    options = {"layout": Paged(page=32), "codec": Int8(residual=0, sinks=0)}
    found = four.run(
        cases.fill_and_decode, q=q, k=k, v=v, prompt=140, options=options, layout=Layout.contiguous(140, 4)
    )
    for step, at in enumerate(range(140, 150)):
        exact = attend(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1])
        assert 0 < (found[0][0][step] - exact).abs().max() < 0.05
