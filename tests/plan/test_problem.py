"""Posing: what makes no sense is refused in the user's words before anything is computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Alibi,
    Causal,
    KeyLengths,
    Mask,
    Plan,
    ProblemError,
    State,
    TensorBias,
    TensorMask,
    attend,
    attend_state,
    explain,
)
from regard.cache import StoredTensor
from regard.describe.score import Bilinear
from regard.plan.pose import pose
from regard.plan.request import Request
from regard.scores import Cosine

Q, K, V = torch.zeros(2, 32, 5, 8), torch.zeros(2, 8, 7, 8), torch.zeros(2, 8, 7, 6)

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
    "torch's causal mask": ((Q, K, V), {"mask": causal_lower_right(5, 7)}, "mask is a CausalBias.*say mask=Causal()"),
    "a name for a mask": ((Q, K, V), {"mask": "causal"}, "expected a regard Mask"),
    "a score by name": ((Q, K, V), {"score": "dot"}, "expected a regard Score"),
    "scale": ((Q, K, V), {"scale": float("nan")}, "scale is nan: expected a finite number, or None.*the score"),
    "a scale beyond floats": ((Q, K, V), {"scale": 10**400}, "expected a number up to 1.79"),
    "a softcap beyond floats": ((Q, K, V), {"softcap": 10**400}, "expected a number up to 1.79"),
    "a learned scale": ((Q, K, V), {"scale": torch.ones(())}, "expected a number.*multiply q by it and pass scale=1"),
    "a learned softcap": ((Q, K, V), {"softcap": torch.ones(())}, r"softcap is a tensor: expected.* float\.$"),
    "a learned dropout": ((Q, K, V), {"dropout": torch.ones(())}, r"dropout is a tensor: expected.* float\.$"),
    "a scale of numpy": ((Q, K, V), {"scale": np.float32(0.5)}, r"float32\(0.5\): expected a number, as a Python int"),
    "a scale in words": ((Q, K, V), {"scale": "x"}, "scale is 'x': expected a number"),
    "no dropout": ((Q, K, V), {"dropout": None}, "expected a probability"),
    "softcap 0": ((Q, K, V), {"softcap": 0.0}, "above 0, or None for no cap"),
    "softcap inf": ((Q, K, V), {"softcap": float("inf")}, "above 0"),
    "dropout": ((Q, K, V), {"dropout": 1.0}, "0 <= dropout < 1"),
    "sink per key head": ((Q, K, V), {"sink": torch.zeros(8)}, r"a logit per query head, \[32\]"),
    "sink elsewhere": ((Q, K, V), {"sink": torch.zeros(32, device="meta")}, "one device"),
    "offset": ((Q, K, V), {"offset": 1.5}, "offset is 1.5: expected an int"),
    "an offset of one bool": ((Q, K, V), {"offset": torch.tensor(True)}, r"offset is tensor\(True\): expected an int"),
    "an offset of one bool in a list": ((Q, K, V), {"offset": torch.tensor([True])}, r"offset is tensor\(\[True\]\)"),
    "an offset beyond 64 bits": ((Q, K, V), {"offset": 2**63}, "offset is 9223372036854775808: expected an int from"),
    "an offset far before": ((Q, K, V), {"offset": -(2**63) - 1, "mask": Causal()}, "expected an int from"),
    "positions that would wrap": ((Q, K, V), {"offset": 2**63 - 1, "mask": Causal()}, "expected an int from"),
    "offsets of other rows": (
        (Q, K, V),
        {"offset": torch.tensor([2, 3, 4])},
        r"offset is torch.int64 \[3\] for 2 batch rows: expected an int",
    ),
    "offset by bool": ((Q, K, V), {"offset": True}, "expected an int"),
    "lengths of another batch": (
        (Q, K, V),
        {"mask": KeyLengths(torch.zeros(3, dtype=torch.int64))},
        "3 batch rows and the call has 2",
    ),
    "a bias of another shape": ((Q, K, V), {"bias": TensorBias(torch.zeros(7, 5))}, "does not broadcast"),
    "an unknown engine": (
        (Q, K, V),
        {"backend": "cuda"},
        "expected one of native, sdpa, triton, flex, reference, reference64",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused_in_the_users_words(name: str):
    tensors, words, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        attend(*tensors, **words)


FRONT: dict[str, Callable[..., Tensor | State | Plan]] = {
    "attend": attend,
    "attend_state": attend_state,
    "explain": explain,
}


class Metadata(Tensor):
    """A tensor that redefines every function of torch, to pass something on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def nested(layout: torch.layout) -> Tensor:
    rows = [torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)]
    return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


UNREADABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a list": (lambda t: t.tolist(), "is list: expected a tensor"),
    "an array": (lambda t: t.numpy(), "is ndarray: expected a tensor"),
    "sparse": (lambda t: t.to_sparse(), r"has the layout torch.sparse_coo: .* \.to_dense\(\)"),
    "sparse by rows": (lambda t: t.to_sparse_csr(), r"has the layout torch.sparse_csr: .* \.to_dense\(\)"),
    "of oneDNN": (lambda t: t.to_mkldnn(), r"has the layout torch._mkldnn: .* \.to_dense\(\)"),
    "nested": (lambda t: nested(torch.strided), "is a nested tensor: .*to_padded_tensor"),
    "jagged": (lambda t: nested(torch.jagged), "is a nested tensor: .*to_padded_tensor"),
    "masked": (lambda t: masked_tensor(t, t >= 0), "is of the class MaskedTensor, .* __torch_function__"),
    "of a class that redefines functions": (
        lambda t: t.as_subclass(Metadata),
        r"is of the class Metadata, .* \.as_subclass\(torch.Tensor\)",
    ),
    "not filled": (lambda t: torch.nn.UninitializedParameter(), "is of the class UninitializedParameter"),
}


@pytest.mark.filterwarnings("ignore")  # sparse rows, nested and masked tensors are prototypes, says torch
@pytest.mark.parametrize("front", FRONT)
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tensor_whose_elements_cannot_be_read_is_refused_wherever_it_comes_in(name: str, front: str):
    make, says = UNREADABLE[name]
    q, k, v = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 7, 8)
    mask = Causal()
    FRONT[front](q, k, v, mask=mask)  # so that the same call is known
    calls = [(make(q), k, v), (q, make(k), v), (q, k, make(v)), (make(q), make(k), make(v))]
    if (name, front) == ("an array", "attend"):
        calls.pop()  # arrays alone are taken
    for called in calls:
        with pytest.raises(ProblemError, match=f"^[qkv] {says}"):
            FRONT[front](*called)
        with pytest.raises(ProblemError, match=f"^[qkv] {says}"):
            FRONT[front](*called, mask=mask)
    if front == "attend":
        meta = q.to("meta")
        with FlopCounterMode(display=False), pytest.raises(ProblemError, match=f"^k {says}"):
            attend(q, make(k), v)
        with pytest.raises(ProblemError, match=f"^k {says}"):
            attend(meta, make(k), v)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ProblemError, match=f"^k {says}"):
            attend(q, make(k), v)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in UNREADABLE if name not in ("a list", "an array", "not filled")])
def test_words_and_sinks_carry_tensors_that_can_be_read(name: str):
    make, says = UNREADABLE[name]
    q = torch.zeros(1, 2, 5, 8)
    if name != "sparse by rows":
        with pytest.raises(ProblemError, match=f"sink {says}"):
            attend(q, q, q, sink=make(torch.zeros(2)))
    if name not in ("nested", "jagged", "masked"):  # which no word can be made of
        is_made = name.startswith("of a class")  # the word itself refuses the others
        with pytest.raises(
            ProblemError, match=f"a tensor in bias {says}" if is_made else r"TensorBias.*\.to_dense\(\)"
        ):
            attend(q, q, q, bias=TensorBias(make(torch.zeros(5, 5))))
        with pytest.raises(ProblemError, match=f"a tensor in score {says}" if is_made else r"Bilinear.*\.to_dense\(\)"):
            attend(q, q, q, score=Bilinear(make(torch.zeros(8, 8))))
    if name.startswith("of a class"):
        with pytest.raises(ProblemError, match=f"a tensor in mask {says}"):
            attend(q, q, q, mask=Causal() & TensorMask(make(torch.ones(5, 5, dtype=torch.bool))))


def test_a_sparse_tensor_is_refused_where_a_dense_one_of_the_same_strides_is_known():
    dense = torch.ones(()).expand(1, 2, 5, 8)
    assert dense.stride() == dense.to_sparse().stride()
    attend(dense, dense, dense, mask=Causal())
    with pytest.raises(ProblemError, match="layout"):
        attend(*(dense.to_sparse() for _ in "qkv"), mask=Causal())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a list", "three axes", "sparse", "nested", "jagged"])
def test_a_tensor_beside_stored_keys_can_be_read(name: str):
    make, says = {**UNREADABLE, "three axes": (lambda t: t[0], "has shape")}[name]
    q, k, v = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 7, 8)
    with pytest.raises(ProblemError, match=f"^v {says}"):
        attend(q, StoredTensor.of(k), make(v))


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_of_another_class_is_refused_where_one_of_the_same_content_is_known(inference: bool):
    with torch.inference_mode(inference):
        q, keep = torch.zeros(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
        attend(q, q, q, mask=TensorMask(keep))
        with pytest.raises(ProblemError, match="a tensor in mask is of the class Metadata"):
            attend(q, q, q, mask=TensorMask(keep.clone().as_subclass(Metadata)))


class Named(Tensor):
    """A tensor with a further name and nothing else of its own."""


@pytest.mark.parametrize("mask", [None, Causal()])
@pytest.mark.parametrize("backward", [False, True])
def test_parameters_and_plain_subclasses_are_tensors(mask: Mask | None, backward: bool):
    drawn = torch.randn(3, 1, 2, 5, 8)
    sink, table = torch.randn(2), torch.randn(5, 5)

    def gives(wrap: Callable[[Tensor], Tensor]) -> list[Tensor]:
        q, k, v, s, t = (wrap(x.clone()).requires_grad_(backward) for x in (*drawn, sink, table))
        out = attend(q, k, v, mask=mask, sink=s, bias=TensorBias(t))
        return [*torch.autograd.grad(out.sin().sum(), (q, k, v, s, t)), out] if backward else [out]

    for wrap in (torch.nn.Parameter, torch.nn.Buffer, lambda t: t.as_subclass(Named)):
        assert all(torch.equal(a, b) for a, b in zip(gives(wrap), gives(lambda t: t), strict=True))


def test_a_class_that_redefines_what_its_operators_do_computes_by_them():
    """TwoTensor computes everything twice: that both tensors come out says that its own operators ran."""
    a, b = ([torch.randn(1, 2, 5, 8) for _ in "qkv"] for _ in "ab")
    q, k, v = (TwoTensor(x, y) for x, y in zip(a, b, strict=True))
    for words in ({}, {"mask": Causal()}, {"score": Cosine()}, {"sink": torch.randn(2)}):
        out = attend(q, k, v, **words)
        assert isinstance(out, TwoTensor)
        assert torch.allclose(out.a, attend(*a, **words), atol=1e-6)
        assert torch.allclose(out.b, attend(*b, **words), atol=1e-6)


def test_a_mask_is_read_so_its_tensors_have_their_elements_at_their_address():
    q, keep = torch.zeros(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(ProblemError, match="a tensor in mask is of the class TwoTensor"):
        attend(q, q, q, mask=TensorMask(TwoTensor(keep, keep)))


def test_a_problem_holds_no_tensor_and_is_equal_by_value():
    lengths = torch.tensor([3, 7])
    mask = Causal() & KeyLengths(lengths)
    first, second = pose(Request(Q, K, V, mask))[0], pose(Request(Q.clone(), K.clone(), V.clone(), mask))[0]
    assert first == second
    assert hash(first) == hash(second)
    assert not any(isinstance(getattr(first, name), torch.Tensor) for name in first.__slots__)
    lengths[0] = 4
    assert pose(Request(Q, K, V, mask))[0] != first


def test_defaults_are_resolved():
    problem = pose(Request(Q, K, V))[0]
    assert problem.scale == 8**-0.5
    assert problem.offset == 2
    assert not problem.grad


@pytest.mark.parametrize("softcap", [2, 10**20])
def test_a_softcap_is_a_float_whatever_number_it_is_given_as(softcap: int):
    of_int, of_float = (pose(Request(Q, K, V, softcap=number))[0] for number in (softcap, float(softcap)))
    assert of_int == of_float
    assert type(of_int.softcap) is float


def test_a_problem_is_printed_in_a_line():
    problem = pose(Request(Q, K, V, bias=Alibi(32), softcap=5.0, offset=0))[0]
    assert str(problem) == (
        "q [2, 32, 5, 8] · kv [2, 8, 7, 8|6] float32 on cpu, mask None, bias Alibi(heads=32), softcap 5.0, offset 0"
    )
