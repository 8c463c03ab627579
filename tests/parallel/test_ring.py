"""Ring attention equals attention in one process, forward and backward, whatever the layout of the tokens."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from regard import (
    Alibi,
    Causal,
    Documents,
    Global,
    KeyLengths,
    MaskFunction,
    Prefix,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
)
from regard.parallel import Layout
from regard.scores import Bilinear
from tests.expressions import BATCH, HEADS, biases, masks
from tests.parallel import cases
from tests.parallel.comparing import IDS, N, assert_close, check, in_one_process, joined, layouts, some
from tests.parallel.workers import Workers
from tests.selection import examples

CALLS: dict[str, Any] = {
    "everything": dict,
    "causal": lambda: {"mask": Causal()},
    "window and sinks": lambda: {"mask": Causal() & (Window(13) | Prefix(2))},
    "window of both sides": lambda: {"mask": Window(5, 4)},
    "documents and ALiBi": lambda: {"mask": Documents(IDS) & Causal(), "bias": Alibi(4)},
    "learned slopes": lambda: {"mask": Causal(), "bias": Alibi(slopes=torch.tensor([0.5, 0.2, 0.1, 0.3]))},
    "T5, sink and softcap": lambda: {
        "mask": Causal(),
        "bias": T5Bias(torch.randn(32, 4)),
        "sink": torch.randn(4),
        "softcap": 3.0,
        "scale": 0.5,
    },
    "tensors": lambda: {
        "bias": TensorBias(torch.randn(4, N, N)) + Alibi(4),
        "mask": TensorMask(torch.rand(2, 1, N, N) < 0.3),
    },
    "lengths": lambda: {"mask": KeyLengths(torch.tensor([20, 45]))},
    "global": lambda: {"mask": Global([0, 30]) | Window(4, 4)},
    "not": lambda: {"mask": ~Causal()},
    "function": lambda: {"mask": MaskFunction(cases.every_third)},
    "a learned score": lambda: {"mask": Causal(), "score": Bilinear(0.2 * torch.randn(16, 16))},
}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", layouts(2))
@pytest.mark.parametrize("call", CALLS)
def test_two_ranks_give_what_one_process_gives(pair: Workers, name: str, call: str):
    torch.manual_seed(0)
    check(pair, layouts(2)[name], some(), **CALLS[call]())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", layouts(4))
@pytest.mark.parametrize("call", ["causal", "window of both sides", "documents and ALiBi", "T5, sink and softcap"])
def test_four_ranks_give_what_one_process_gives(four: Workers, name: str, call: str):
    torch.manual_seed(0)
    check(four, layouts(4)[name], some(), **CALLS[call]())


@given(data=st.data())
@examples(6, everything=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_masks_and_biases_in_random_layouts(four: Workers, data: st.DataObject):
    tokens = data.draw(st.sampled_from([29, 13, 11]))
    sendable = masks(tokens, tokens).filter(lambda mask: mask.can_be_serialized())
    mask, bias = data.draw(st.one_of(st.none(), sendable)), data.draw(biases(tokens, tokens))
    ranks = data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens))
    own = [[range(t, t + 1) for t in range(tokens) if ranks[t] == rank] for rank in range(4)]
    layout = data.draw(st.sampled_from([Layout(tokens, tuple(map(tuple, own))), *layouts(4, tokens).values()]))
    sink = data.draw(st.sampled_from([None, torch.linspace(-3, 3, HEADS)]))
    tensors = some(BATCH, HEADS, data.draw(st.sampled_from([1, 3, 6])), tokens, data.draw(st.integers(0, 99)))
    check(four, layout, tensors, mask=mask, bias=bias, sink=sink)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(pair: Workers, dtype: torch.dtype):
    tensors, layout = {name: t.to(dtype) for name, t in some().items()}, Layout.zigzag(N, 2)
    out, grads = in_one_process(**tensors, mask=Causal())
    plain = [t.clone().requires_grad_() for t in list(tensors.values())[:3]]
    one = attend(*plain, mask=Causal(), backend="reference")
    ones = [one.detach(), *torch.autograd.grad(one, plain, tensors["dout"])]
    found, found_grads = joined(pair.run(cases.ring, **tensors, layout=layout, mask=Causal()), layout, layout)
    assert found.dtype == dtype
    for own, single, exact in zip([found, *found_grads], ones, [out, *grads], strict=True):
        error, usual = ((t.double() - exact).abs().max() for t in (own, single))
        assert error <= 2 * usual + 1e-14


def test_bits_are_the_same_from_run_to_run(four: Workers):
    tensors, more = some(), {"mask": Window(9, 9), "bias": Alibi(4), "layout": Layout.zigzag(N, 4)}
    first, second = (four.run(cases.ring, **tensors, **more) for _ in range(2))
    for (out, grads), (again, grads_again) in zip(first, second, strict=True):
        assert torch.equal(out, again)
        assert all(map(torch.equal, grads, grads_again))


def test_the_state_has_the_log_sum_exp_of_all_keys(pair: Workers):
    tensors, layout = some(), Layout.striped(N, 2)
    q, k, v = (tensors[name] for name in "qkv")
    whole = attend_state(q, k, v, mask=Causal())
    for rank, state in enumerate(pair.run(cases.ring_state, q=q, k=k, v=v, layout=layout, mask=Causal())):
        at = torch.tensor(layout.indices(rank))
        torch.testing.assert_close(state.lse, whole.lse[:, :, at])


def test_keys_of_another_sequence(pair: Workers):
    queries, keys = Layout.zigzag(31, 2), Layout.striped(N, 2)
    tensors = some()
    tensors = {"q": tensors["q"][:, :, :31], "k": tensors["k"], "v": tensors["v"], "dout": tensors["dout"][:, :, :31]}
    for more in ({"mask": Causal()}, {"mask": Causal() & Window(20), "offset": 3, "bias": Alibi(4)}):
        out, grads = in_one_process(**tensors, **more)
        found = joined(pair.run(cases.ring, **tensors, **more, layout=queries, key_layout=keys), queries, keys)
        for own, exact in zip([found[0], *found[1]], [out, *grads], strict=True):
            assert_close(own, exact)


def test_a_group_of_some_ranks(four: Workers):
    tensors, layout = some(), Layout.zigzag(N, 2)
    out, _ = in_one_process(**tensors, mask=Causal())
    found = four.run(cases.ring_in_halves, **tensors, layout=layout, mask=Causal())
    for start in (0, 2):
        own, _ = joined(found[start : start + 2], layout, layout)
        assert_close(own, out)


def test_dropout_drops_the_same_pairs_backward(pair: Workers):
    """The output is linear in v: v . dv is out . dout, if the same pairs are dropped."""
    tensors, layout = some(), Layout.zigzag(N, 2)
    found = pair.run(cases.ring, **tensors, layout=layout, mask=Causal(), dropout=0.4)
    out, grads = joined(found, layout, layout)
    torch.testing.assert_close((tensors["v"] * grads[2]).sum(), (out * tensors["dout"]).sum(), rtol=1e-4, atol=1e-3)
    plain, _ = in_one_process(**tensors, mask=Causal())
    assert (out - plain).abs().max() > 0.1


def test_large_rectangles_with_a_bias_by_distance_are_cut(pair: Workers):
    tokens = 2300
    tensors = some(1, 4, 2, tokens)
    check(pair, Layout.zigzag(tokens, 2), tensors, mask=Causal() & Window(700), bias=Alibi(4))
