"""Posing: what makes no sense is said in the user's words before anything is computed."""

from typing import Any

import pytest
import torch

from regard import Alibi, Causal, Lengths, ProblemError, TensorBias, attend
from regard.plan.problem import pose

Q, K, V = torch.zeros(2, 32, 5, 8), torch.zeros(2, 8, 7, 8), torch.zeros(2, 8, 7, 6)
NONE: dict[str, Any] = {"mask": None, "bias": None, "score": None, "scale": None, "softcap": None, "sink": None}

WRONG: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "not a tensor": (([1.0], K, V), {}, r"q is list: expected a tensor \[batch, heads, queries, qk_dim\]"),
    "three axes": ((Q[0], K, V), {}, r"q has shape \[32, 5, 8\]: expected \[batch, heads"),
    "integers": ((Q.int(), K, V), {}, "q is torch.int32: expected float64"),
    "mixed types": ((Q, K.double(), V), {}, r"one type; convert with .to\(q.dtype\)"),
    "mixed devices": ((Q, K.to("meta"), V), {}, "one device"),
    "batches": ((Q, K[:1], V), {}, "q has 2 batch rows, k 1 and v 2"),
    "keys without values": ((Q, K, V[:, :, :3]), {}, "a value belongs to each key"),
    "dimensions": ((Q, K[..., :4], V), {}, "same qk_dim"),
    "groups": (
        (Q, K[:, :7], V[:, :7]),
        {},
        "q has 32 heads and k has 7: query heads must be a whole multiple of key heads",
    ),
    "a tensor for a mask": ((Q, K, V), {"mask": torch.ones(5, 7)}, "TensorBias"),
    "a bias for a mask": ((Q, K, V), {"mask": Alibi(32)}, "expected a regard Mask"),
    "a mask for a bias": ((Q, K, V), {"bias": Causal()}, "expected a regard Bias"),
    "a name for a mask": ((Q, K, V), {"mask": "causal"}, "expected a regard Mask"),
    "a score by name": ((Q, K, V), {"score": "dot"}, "expected a regard Score"),
    "scale": ((Q, K, V), {"scale": float("nan")}, "scale is nan: expected a finite number"),
    "a learned scale": ((Q, K, V), {"scale": torch.ones(())}, "scale is a tensor: expected a number"),
    "a scale in words": ((Q, K, V), {"scale": "x"}, "scale is 'x': expected a number"),
    "no dropout": ((Q, K, V), {"dropout": None}, "expected a probability"),
    "softcap 0": ((Q, K, V), {"softcap": 0.0}, "above 0, or None for no cap"),
    "softcap inf": ((Q, K, V), {"softcap": float("inf")}, "above 0"),
    "dropout": ((Q, K, V), {"dropout": 1.0}, "0 <= dropout < 1"),
    "sink per key head": ((Q, K, V), {"sink": torch.zeros(8)}, r"a logit per query head, \[32\]"),
    "sink elsewhere": ((Q, K, V), {"sink": torch.zeros(32, device="meta")}, "one device"),
    "offset": ((Q, K, V), {"offset": 1.5}, "offset is 1.5: expected an int"),
    "offset by bool": ((Q, K, V), {"offset": True}, "expected an int"),
    "lengths of another batch": (
        (Q, K, V),
        {"mask": Lengths(torch.zeros(3, dtype=torch.int64))},
        "3 batch rows and the call has 2",
    ),
    "a bias of another shape": ((Q, K, V), {"bias": TensorBias(torch.zeros(7, 5))}, "does not broadcast"),
    "an unknown engine": ((Q, K, V), {"backend": "cuda"}, "expected one of native, sdpa, flex, reference, reference64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_said_in_the_users_words(name: str):
    tensors, words, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        attend(*tensors, **words)


def test_a_problem_holds_no_tensor_and_is_equal_by_value():
    lengths = torch.tensor([3, 7])
    asked = {**NONE, "mask": Causal() & Lengths(lengths), "dropout": 0.0, "offset": None, "lse": False}
    first, second = pose(Q, K, V, **asked)[0], pose(Q.clone(), K.clone(), V.clone(), **asked)[0]
    assert first == second
    assert hash(first) == hash(second)
    assert not any(isinstance(getattr(first, name), torch.Tensor) for name in first.__slots__)
    lengths[0] = 4
    assert pose(Q, K, V, **asked)[0] != first


def test_defaults_are_resolved():
    problem = pose(Q, K, V, **NONE, dropout=0.0, offset=None, lse=False)[0]
    assert problem.scale == 8**-0.5
    assert problem.offset == 2
    assert not problem.grad


def test_a_problem_is_printed_in_a_line():
    problem = pose(Q, K, V, **{**NONE, "bias": Alibi(32), "softcap": 5.0}, dropout=0.0, offset=0, lse=False)[0]
    assert str(problem) == (
        "q [2, 32, 5, 8] · kv [2, 8, 7, 8|6] float32 on cpu, mask None, bias Alibi(heads=32), softcap 5.0, offset 0"
    )
