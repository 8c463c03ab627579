"""What torch is asked for is what regard is asked for, in every way that says it."""

import pytest
import torch

from regard import Alibi, Causal, Documents, KeyLengths, TensorBias, Window, attend
from regard.bench.case import Case
from regard.bench.torch_calls import refusal, torch_calls

CASES = {
    "no mask": Case("", 13, 13, 4, 2, 5),
    "causal": Case("", 13, 13, 4, 2, 5, mask=Causal),
    "the last token": Case("", 1, 13, 4, 2, 5, batch=3, mask=Causal),
    "the last token, without sharing": Case("", 1, 13, 4, 4, 5, mask=Causal),
    "some last tokens": Case("", 3, 13, 4, 2, 5, mask=Causal),
    "window": Case("", 13, 13, 4, 2, 5, mask=lambda: Causal() & Window(3)),
    "documents": Case("", 13, 13, 4, 2, 5, mask=lambda: Causal() & Documents(torch.arange(13) // 5)),
    "lengths": Case("", 13, 13, 4, 2, 5, batch=2, mask=lambda: KeyLengths(torch.tensor([3, 13]))),
    "alibi": Case("", 13, 13, 4, 2, 5, mask=Causal, bias=lambda _: Alibi(4)),
    "a bias alone": Case("", 7, 13, 4, 2, 5, bias=lambda _: TensorBias(torch.randn(4, 7, 13))),
    "other values": Case("", 13, 13, 4, 2, 5, v_dim=3, mask=Causal),
}


@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_what_regard_gives(name):
    case = CASES[name]
    words = case.options(torch.float32)
    q, k, v = case.tensors(torch.float32)
    found = torch_calls(case, torch.float32, words)
    assert found
    for way in found.values():
        torch.testing.assert_close(way(q, k, v), attend(q, k, v, **words, backend="reference"))


def test_what_torch_can_compute_without_a_mask_gets_none():
    assert list(torch_calls(CASES["causal"], torch.float32, {"mask": Causal()})) == ["is_causal"]
    assert list(torch_calls(CASES["the last token"], torch.float32, {"mask": Causal()})) == [
        "no mask",
        "heads as queries",
    ]


def test_what_torch_cannot_say_is_not_asked_and_a_reason_given():
    capped = Case("", 13, 13, softcap=3.0)
    assert torch_calls(capped, torch.float32, capped.options(torch.float32)) == {}
    assert "softcap" in str(refusal(capped, torch.float32, {}))


def test_a_mask_that_would_not_fit_is_not_built():
    long = Case("", 1 << 20, 1 << 20, mask=lambda: Causal() & Window(3))
    words = long.options(torch.float32)
    assert refusal(long, torch.float32, words) == "its mask alone would take 4,096 GiB"
    assert torch_calls(long, torch.float32, words) == {}
