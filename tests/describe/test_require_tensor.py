"""What is no dense tensor is refused by every word that carries one, in words."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported

from regard import (
    Blocks,
    Documents,
    Global,
    KeyLengths,
    Prefix,
    ProblemError,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    attend,
)
from regard.cache import Int8
from regard.cache.evict_by_attention import SnapKV
from regard.rope import Llama3, Yarn
from regard.scores import Additive, Bilinear

with warnings.catch_warnings(action="ignore"):  # torch calls nested tensors a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

GIVEN: dict[str, Any] = {
    "a nested tensor": NESTED,
    "a jagged tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "a sparse tensor": torch.ones(5, dtype=torch.int64).to_sparse(),
    "complex numbers": torch.ones(5, dtype=torch.complex64),
    "a text": "11",
    "None": None,
    "a dict": {},
}

WORDS: dict[str, Callable[[Any], object]] = {
    "Prefix": Prefix,
    "KeyLengths": KeyLengths,
    "Documents": Documents,
    "Global": Global,
    "Tree": Tree,
    "Blocks": lambda given: Blocks(given, 2),
    "TensorMask": TensorMask,
    "T5Bias": T5Bias,
    "TensorBias": TensorBias,
    "Bilinear": Bilinear,
    "Additive w_q": lambda given: Additive(given, torch.ones(3, 2), torch.ones(3)),
    "Additive v": lambda given: Additive(torch.ones(3, 2), torch.ones(3, 2), given),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", WORDS)
def test_a_spec_reports_what_is_no_dense_tensor(name: str, given: str):
    if (name, given) == ("Global", "a dict"):
        pytest.skip("a dict is an iterable, here of no position")
    with pytest.raises(ProblemError, match=r"is |expected"):
        WORDS[name](GIVEN[given])


@pytest.mark.parametrize("kind", [Global, Tree])
def test_positions_that_are_read_at_once_must_be_there(kind: Callable[[Any], object]):
    with pytest.raises(ProblemError, match="without data"):
        kind(torch.empty(3, dtype=torch.int64, device="meta"))


class Masked(torch.nn.Module):
    """Attention under a mask of a tensor that is an input."""

    def __init__(self, kind: Callable[[Any], Any]):
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, mask=self.kind(given))


@pytest.mark.parametrize("kind", [Global, Tree])
def test_positions_of_a_traced_tensor_cannot_be_read(kind: Callable[[Any], Any]):
    x, given, reason = torch.randn(1, 1, 2, 4), torch.tensor([0, 1]), "give a list, or create the mask outside"
    with pytest.raises(ProblemError, match=reason):
        torch.export.export(Masked(kind), (x, given))
    with pytest.raises(Unsupported, match=reason):
        torch.compile(Masked(kind), fullgraph=True, backend="eager")(x, given)


@pytest.mark.parametrize("kind", [Global, Tree])
def test_positions_of_a_tensor_break_the_graph_where_it_may_break(kind: Callable[[Any], Any]):
    x, given = torch.randn(1, 1, 2, 4), torch.tensor([-1, 0]) if kind is Tree else torch.tensor([0, 1])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(Masked(kind), backend="eager")(x, given), Masked(kind)(x, given))


TABLE = torch.zeros(32, 2)

FIELDS: dict[str, Callable[[], object]] = {
    "a flag that is a number": lambda: T5Bias(TABLE, bidirectional=1),  # pyright: ignore[reportArgumentType]
    "a distance that is None": lambda: T5Bias(TABLE, max_distance=None),  # pyright: ignore[reportArgumentType]
    "an offset that is a text": lambda: TensorBias(TABLE, offset="1"),  # pyright: ignore[reportArgumentType]
    "turns that are None": lambda: Yarn(2.0, original=16, beta_fast=None),  # pyright: ignore[reportArgumentType]
    "low turns that are None": lambda: Llama3(2.0, low=None),  # pyright: ignore[reportArgumentType]
    "a side that is an array": lambda: Int8(keys=np.array([1, 2])),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_type_is_refused_in_words(name: str):
    with pytest.raises(ProblemError, match="expected"):
        FIELDS[name]()


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert T5Bias(TABLE, max_distance=np.int64(64)) == T5Bias(TABLE, max_distance=64)  # pyright: ignore[reportArgumentType]
    assert TensorBias(TABLE, np.int64(3)) == TensorBias(TABLE, 3)  # pyright: ignore[reportArgumentType]
    assert Int8(residual=np.int64(64)) == Int8(residual=64)  # pyright: ignore[reportArgumentType]
    assert Llama3(2.0, original=np.int64(16)) == Llama3(2.0, original=16)  # pyright: ignore[reportArgumentType]


def test_policies_of_eviction_take_whole_numbers_of_numpy():
    policy = SnapKV(7, window=np.int64(3), sinks=np.int64(2))  # pyright: ignore[reportArgumentType]
    assert (type(policy.window), policy.window, policy.sinks) == (int, 3, 2)
