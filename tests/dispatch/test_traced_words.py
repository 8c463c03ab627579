"""Masks, biases and scores of users, and their fields, where torch traces the call."""

import enum
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from regard import Alibi, Bias, Causal, Documents, Mask, RefusalError, TensorBias, TensorMask, attend
from regard.describe.mask import CallSizes
from regard.describe.spec import spec
from regard.scores import Score
from tests.dispatch.traced import IDS, K, Q, V, compiled
from tests.test_native import needs_library


@spec
class CountedFromTheEnd(Mask):
    """A function of a key's distance to the last one, which `bind` tells it."""

    shows: Callable[[Any], Any]
    last: int = 0

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.shows(self.last - k) | (q == k)

    def broadcast_shape(self) -> tuple[int, int]:
        return 1, 1

    def bind(self, sizes: CallSizes) -> Mask:
        return self.with_fields(last=sizes.keys - 1)


@spec
class BoundAsItsBase(Mask):
    shows: Callable[[Any, Any], Any]

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.shows(q, k)

    def bind(self, sizes: CallSizes) -> Mask:
        return super().bind(sizes)


def test_a_graph_takes_a_mask_that_binds_as_its_base():
    mask = BoundAsItsBase(lambda q, k: k <= q)
    found = compiled(lambda q, k, v: attend(q, k, v, mask=mask))(Q, K, V)
    assert torch.allclose(found, attend(Q, K, V, mask=Causal()), atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_with_a_function_is_bound_in_a_graph(dynamic: bool):
    mask = CountedFromTheEnd(lambda far: far < 3)
    function = compiled(lambda q, k, v: attend(q, k, v, mask=mask), dynamic=dynamic)
    for keys in (23, 17):
        k, v = K[:, :, :keys].contiguous(), V[:, :, :keys].contiguous()
        assert torch.allclose(function(Q, k, v), attend(Q, k, v, mask=mask), atol=1e-6)


@spec
class Shown(Mask):
    """A table of the call's rows that a function is applied to."""

    table: TensorMask
    shows: Callable[[Any], Any]

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.shows(self.table.keep(b, h, q, k))

    def broadcast_shape(self) -> tuple[int, int]:
        return 1, 1

    def bind(self, sizes: CallSizes) -> Mask:
        return self.with_fields(table=self.table.bind(sizes))


TABLE = torch.rand(11, 23, generator=torch.Generator().manual_seed(3)) < 0.6


@pytest.mark.parametrize(
    "mask",
    [
        Shown(TensorMask(TABLE), lambda kept: kept),
        CountedFromTheEnd(lambda far: far < 3),
    ],
)
def test_a_mask_that_binds_meets_an_offset_by_row(mask: Mask):
    offset = torch.tensor([12, 7])
    expected = attend(Q, K, V, mask=mask, offset=offset)
    with FlopCounterMode(display=False):
        assert torch.allclose(attend(Q, K, V, mask=mask, offset=offset), expected, atol=1e-6)
    with pytest.raises(Exception, match="needs the offset as a number"):
        compiled(lambda q, k, v, o: attend(q, k, v, mask=mask, offset=o))(Q, K, V, offset)


def test_a_mask_that_binds_as_its_base_meets_an_offset_by_row_in_a_graph():
    mask, offset = BoundAsItsBase(lambda q, k: k <= q), torch.tensor([12, 7])
    found = compiled(lambda q, k, v, o: attend(q, k, v, mask=mask, offset=o))(Q, K, V, offset)
    assert torch.allclose(found, attend(Q, K, V, mask=Causal(), offset=offset), atol=1e-6)


@spec
class Shared(Mask):
    """The documents of the call's batch rows, of which a function keeps some queries."""

    documents: Documents
    shows: Callable[[Any], Any]

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.documents.keep(b, h, q, k) & self.shows(q)

    def broadcast_shape(self) -> tuple[int, int]:
        return 2, 1

    def bind(self, sizes: CallSizes) -> Mask:
        return self.with_fields(documents=self.documents.bind(sizes))


@pytest.mark.parametrize(
    ("mask", "axis"),
    [
        (Shown(TensorMask(TABLE), lambda kept: kept), 2),
        (Shared(Documents(torch.stack([IDS, IDS + IDS % 2])), lambda q: q > 13), 0),
    ],
    ids=["rows and columns", "batch rows"],
)
def test_sizes_of_a_masks_tensors_meet_dynamic_sizes_of_the_call(mask: Mask, axis: int):
    """As after a call of another size: then torch.compile makes a graph in which this size is a symbol."""
    tensors = [t.clone() for t in (Q, K, V)]
    for t in tensors:
        torch._dynamo.maybe_mark_dynamic(t, axis)
    found = compiled(lambda q, k, v: attend(q, k, v, mask=mask))(*tensors)
    assert torch.allclose(found, attend(Q, K, V, mask=mask), atol=1e-6)


class Kind(enum.IntEnum):
    CAUSAL = 0
    ALL = 1


@spec
class OfKind(Mask):
    kind: Kind

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return q >= k if self.kind is Kind.CAUSAL else q >= k * 0


@spec
class FallingOfKind(Bias):
    kind: Kind

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (k - q) * 1.0 if self.kind is Kind.CAUSAL else (k - q) * 0.0


@spec
class Listed(Bias):
    slopes: Any

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (k - q) * self.slopes[0]


@pytest.mark.parametrize(
    "words",
    [
        {"mask": OfKind(Kind.CAUSAL)},
        {"bias": FallingOfKind(Kind.CAUSAL)},
        {"bias": Listed([2]) + Alibi(4)},
        {"bias": Listed([2]), "offset": torch.tensor([12, 7])},
    ],
)
def test_fields_that_no_graph_has_keep_their_types(words: dict[str, Any]):
    expected = attend(Q, K, V, **words)
    assert torch.allclose(compiled(lambda q, k, v: attend(q, k, v, **words))(Q, K, V), expected, atol=1e-6)
    with FlopCounterMode(display=False):
        assert torch.allclose(attend(Q, K, V, **words), expected, atol=1e-6)


@spec
class Waves(Bias):
    factors: Tensor

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (self.factors[h] * torch.exp(1j * (q - k))).real


def test_gradients_flow_to_a_complex_field_in_a_graph():
    factors = torch.randn(4, dtype=torch.complex64, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, factors: Tensor) -> Tensor:
        return attend(q, k, v, bias=Waves(factors)).sin().sum()

    (expected,) = torch.autograd.grad(loss(Q, K, V, factors), factors)
    (found,) = torch.autograd.grad(compiled(loss)(Q, K, V, factors), factors)
    assert torch.allclose(found, expected, atol=1e-5)


@spec
class ConjugateWaves(Bias):
    factors: Tensor

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (self.factors.conj()[h] * torch.exp(1j * (q - k))).real


@spec
class ConjugatePairs(Score):
    """The real part of the product of complex numbers, which pairs of elements are."""

    factors: Tensor

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
        return ((q * self.factors)[..., :, None, :] * k[..., None, :, :].conj()).sum(-1).real


def negated(t: Tensor) -> Tensor:
    """The same numbers, stored with the other sign."""
    found = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert found.is_neg()
    return found


LAZY = {
    "complex": (Waves, torch.randn(4, dtype=torch.complex64)),
    "conj": (ConjugateWaves, torch.randn(4, dtype=torch.complex64)),
    "negated": (TensorBias, negated(torch.randn(4, 11, 23))),
    "negated slopes": (lambda x: Alibi(slopes=x), negated(torch.rand(4))),
    "score": (ConjugatePairs, torch.randn(4, dtype=torch.complex64)),
}


def is_recomputed(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def in_checkpoint(call: Any) -> Any:
    return partial(
        checkpoint, call, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, is_recomputed)
    )


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("how", ["compiled", "counted", "in a checkpoint"])
@pytest.mark.parametrize("name", LAZY)
def test_conjugation_and_negation_are_seen_inside_of_the_operator(name: str, how: str, backend: str | None):
    torch.compiler.reset()  # each case compiles the same function
    make, x = LAZY[name]
    x = x.detach().requires_grad_()
    q, weights = Q.clone().requires_grad_(), torch.randn(2, 4, 11, 8)

    def call(q: Tensor, x: Tensor) -> Tensor:
        made = make(x)
        return attend(q, K, V, backend=backend, **{"score" if isinstance(made, Score) else "bias": made})

    def run(call: Any) -> tuple[Tensor, ...]:
        out = call(q, x)
        return out, *torch.autograd.grad((out * weights).sum(), (q, x))

    expected = run(call)
    seen = {"compiled": compiled, "counted": lambda f: f, "in a checkpoint": in_checkpoint}[how](call)
    with FlopCounterMode(display=False) if how == "counted" else nullcontext():
        for _ in range(2):  # the first call of a graph runs below a mode
            for found, right in zip(run(seen), expected, strict=True):
                assert torch.allclose(found, right, atol=1e-4)


@spec
class FallingAtLearnedRate(Bias):
    """Reads a weight that is no field."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (k - q) * RATE[h]


RATE = torch.nn.Parameter(torch.rand(4))


def test_a_bias_that_learns_by_no_field_is_refused_in_a_graph():
    q = Q.clone().requires_grad_()
    bias = FallingAtLearnedRate()
    eager = attend(q, K, V, bias=bias)
    assert torch.autograd.grad(eager.sin().sum(), RATE)[0].abs().sum() > 0
    with FlopCounterMode(display=False):
        out = attend(q, K, V, bias=bias)
    assert torch.allclose(out, eager, atol=1e-6)
    with pytest.raises(RefusalError, match="Make it a field of the bias"):
        out.sum().backward()


@spec
class Wrapped(Bias):
    inner: TensorBias

    def bind(self, sizes: CallSizes) -> Bias:
        return self.with_fields(inner=self.inner.bind(sizes))

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.inner.value(b, h, q, k)


@pytest.mark.parametrize("keys", [23, 0])
def test_a_bias_that_binds_learns_in_a_counted_call(keys: int):
    table = torch.randn(4, 11, keys, requires_grad=True)

    def gradient() -> Tensor:
        out = attend(Q, K[:, :, :keys], V[:, :, :keys], bias=Wrapped(TensorBias(table)))
        return torch.autograd.grad(out.sin().sum(), table)[0]

    expected = gradient()
    with FlopCounterMode(display=False):
        assert torch.allclose(gradient(), expected, atol=1e-6)


@spec
class Tempered(Score):
    by: Any

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * float(self.by)


def test_what_a_score_has_is_the_same_in_a_counted_call_or_refused():
    expected = attend(Q, K, V, score=Tempered(np.float32(0.5)))
    with FlopCounterMode(display=False):
        assert torch.allclose(attend(Q, K, V, score=Tempered(np.float32(0.5))), expected, atol=1e-6)
        with pytest.raises(RefusalError, match="a Kind in a mask, bias or score"):
            attend(Q, K, V, score=Tempered(Kind.ALL))


@needs_library
@pytest.mark.parametrize(
    "bias",
    [lambda: Alibi(np.int64(2)), lambda: TensorBias(torch.ones(8, 8), offset=np.int64(0))],
    ids=["heads", "offset"],
)
def test_integers_of_numpy_are_compiled(bias: Any):
    q = torch.randn(1, 2, 8, 16)
    assert torch.equal(compiled(lambda q: attend(q, q, q, bias=bias()))(q), attend(q, q, q, bias=bias()))
