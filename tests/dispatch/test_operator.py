"""What torch traces: whole graphs, export, the operator's own checks, vmap and higher derivatives."""

import copy
import enum
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd.forward_ad import dual_level, make_dual
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Alibi,
    Bias,
    Causal,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    MultiHeadAttention,
    Prefix,
    ProblemError,
    RefusalError,
    State,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
    attend_state,
    explain,
    observe_calls,
    scaled_dot_product_attention,
)
from regard.cache import KVCache, Paged
from regard.describe.mask import CallSizes
from regard.describe.spec import spec
from regard.dispatch.choose import BACKENDS
from regard.extend import Backend, Kernel, Operands, Problem, Schedule, register_backend
from regard.linear import linear_attend
from regard.scores import Bilinear, Gaussian, Score
from tests.test_native import needs_library

Q, K, V = torch.randn(2, 4, 11, 8), torch.randn(2, 2, 23, 8), torch.randn(2, 2, 23, 8)
IDS = torch.arange(23) // 9
SINK = torch.linspace(-1, 1, 4)


def composed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, table: Tensor, sink: Tensor) -> Tensor:
    mask = Causal() & (Window(7) | Prefix(3)) & Documents(ids)
    return attend(q, k, v, mask=mask, bias=T5Bias(table) + Alibi(4), sink=sink, softcap=5.0)


def compiled(function: Any, **how: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **how)


@pytest.mark.representative
def test_a_composed_call_compiles_to_one_graph_with_the_same_bits_and_gradients():
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)] + [
        torch.randn(32, 4, requires_grad=True),
        SINK.clone().requires_grad_(),
    ]
    q, k, v, table, sink = leaves
    expected = composed(q, k, v, IDS, table, sink)
    found = compiled(composed)(q, k, v, IDS, table, sink)
    assert torch.equal(found, expected)
    for ours, eager in zip(
        torch.autograd.grad(found.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves), strict=True
    ):
        assert torch.allclose(ours, eager, atol=1e-6)


WORDS = {
    "a predicate": {"mask": MaskFunction(lambda b, h, q, k: (q + k + b) % 3 == 0) | Causal()},
    "not": {"mask": ~Prefix(3)},
    "a tree": {"mask": Tree([-1, 0, 0], start=20)},
    "lengths": {"mask": KeyLengths(torch.tensor([3, 23]))},
    "a named engine": {"mask": Causal(), "backend": "reference"},
    "nothing": {},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in ("not", "nothing") else name for name in WORDS]
)
def test_words_pass_through_the_operator(name: str):
    words = WORDS[name]
    found = compiled(lambda q, k, v: attend(q, k, v, **words))(Q, K, V)
    assert torch.allclose(found, attend(Q, K, V, **words), atol=1e-7)


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


@pytest.mark.parametrize(
    "mask",
    [
        Shown(TensorMask(torch.rand(11, 23, generator=torch.Generator().manual_seed(3)) < 0.6), lambda kept: kept),
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


def test_one_graph_serves_every_length():
    torch._dynamo.reset()
    counts = CompileCounterWithBackend("aot_eager")
    function = torch.compile(
        lambda q, k, v: attend(q, k, v, mask=Causal()), fullgraph=True, dynamic=True, backend=counts
    )
    compiled_by = []
    for keys in (13, 17, 19, 23):
        k, v = K[:, :, :keys].contiguous(), V[:, :, :keys].contiguous()
        assert torch.allclose(function(Q, k, v), attend(Q, k, v, mask=Causal()))
        compiled_by.append(counts.frame_count)
    assert set(compiled_by) == {compiled_by[0]}  # all of it at the first call


@pytest.mark.parametrize(
    "mask", [Causal() & Window(7), MaskFunction(lambda b, h, q, k: (k <= q) & (q - k < 7))], ids=repr
)
def test_one_graph_serves_every_position_that_travels_as_a_tensor(mask: Mask):
    torch._dynamo.reset()
    counts = CompileCounterWithBackend("aot_eager")
    function = torch.compile(
        lambda q, at: attend(q, K, V, mask=mask, offset=at), fullgraph=True, dynamic=False, backend=counts
    )
    for position in (2, 3, 5, 11):
        q = Q.clone().requires_grad_()
        expected = attend(q, K, V, mask=mask, offset=position)
        found = function(q, torch.tensor(position))
        assert torch.allclose(found, expected, atol=1e-6)
        ours, eager = (torch.autograd.grad(out.square().sum(), q)[0] for out in (found, expected))
        assert torch.allclose(ours, eager, atol=1e-5)
    assert counts.frame_count == 1


def test_a_position_may_be_an_int_of_a_graph():
    torch._dynamo.reset()
    function = compiled(lambda q, at: attend(q, K, V, mask=Causal(), offset=at))
    for position in (2, 3, 5):  # a constant at first, then a symbol
        assert torch.equal(function(Q, position), attend(Q, K, V, mask=Causal(), offset=position))


def test_an_offset_that_is_a_tensor_is_read_at_every_call():
    at = torch.tensor(3)
    first = attend(Q, K, V, mask=Causal(), offset=at)
    at.add_(5)
    second = attend(Q, K, V, mask=Causal(), offset=at)
    assert torch.equal(first, attend(Q, K, V, mask=Causal(), offset=3))
    assert torch.equal(second, attend(Q, K, V, mask=Causal(), offset=8))
    planned = [explain(Q, K, V, mask=Causal(), offset=place).schedule.pairs for place in (at, 8)]
    assert planned[0] == planned[1]


@pytest.mark.parametrize("offset", [torch.tensor([1, 2, 3]), torch.tensor(1.5), 1.5, True], ids=repr)
def test_an_offset_that_is_no_position_is_an_error(offset: Any):
    with pytest.raises(ProblemError, match=r"offset is .*: expected an int, an integer tensor of one element"):
        attend(Q, K, V, offset=offset)
    with pytest.raises(ProblemError, match="offset is"):
        attend(Q.to("meta"), K.to("meta"), V.to("meta"), offset=offset)


def test_states_compile_and_merge_inside_a_graph():
    def halves(q: Tensor, k: Tensor, v: Tensor) -> State:
        return attend_state(q, k[:, :, :9], v[:, :, :9]) | attend_state(q, k[:, :, 9:], v[:, :, 9:])

    found, whole = compiled(lambda *t: halves(*t).out)(Q, K, V), attend(Q, K, V)
    assert torch.allclose(found, whole, atol=1e-6)


def test_dropout_in_a_graph_is_seeded_and_differentiated_with_the_same_draw():
    v = V.double().requires_grad_()
    function = compiled(lambda v: attend(Q.double(), K.double(), v, dropout=0.5))
    torch.manual_seed(3)
    out = function(v)
    torch.manual_seed(3)
    assert torch.equal(function(v), out)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose((grad * v).sum(), out.sum())


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


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_output_of_a_graph_is_stored_as_outside_of_one(backend: str | None):
    def flat(x: Tensor) -> Tensor:
        q = x.view(2, 11, 4, 8).transpose(1, 2)
        return attend(q, q, q, mask=Causal(), backend=backend).transpose(1, 2).view(2, 11, 32)

    x = torch.randn(2, 11, 32)
    expected = attend(*[x.view(2, 11, 4, 8).transpose(1, 2)] * 3, mask=Causal()).transpose(1, 2).flatten(2)
    for dynamic in (False, True):
        assert torch.allclose(compiled(flat, dynamic=dynamic)(x), expected, atol=1e-6)
    assert flat(x.to("meta")).shape == (2, 11, 32)


def test_a_module_exports():
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask=Causal() & Window(5))

    keys = torch.export.Dim("keys", min=11, max=512)
    exported = torch.export.export(Layer(), (Q, K, V), dynamic_shapes=({}, {2: keys}, {2: keys})).module()
    assert torch.equal(exported(Q, K, V), Layer()(Q, K, V))
    longer = [torch.cat([t, t], dim=2) for t in (K, V)]
    assert torch.equal(exported(Q, *longer), Layer()(Q, *longer))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck reads it, torch 2.14
def test_the_operator_passes_torchs_own_checks():
    carried: list[Tensor] = []
    numbers: list[int] = []
    mask = (Causal() & Documents(IDS)).serialize(carried, numbers)
    bias = T5Bias(torch.randn(32, 4, requires_grad=True)).serialize(carried, numbers)
    leaves = [t.clone().requires_grad_() for t in (Q, K, V, SINK)]
    opcheck(torch.ops.regard.attend, (*leaves, carried, numbers, mask, bias, "", None, 5.0, 0.0, None, 12, None, True))
    moved = (Q, K, V, None, [torch.tensor(12)], [], "", "", "", None, None, 0.0, None, None, None, True)
    opcheck(torch.ops.regard.attend, moved)
    wide = (Q.double(), K.double(), V.double(), None, [], [], "", "", "", 0.5, None, 0.0, None, 12, None, False)
    opcheck(torch.ops.regard.attend, wide)


def test_meta_tensors_have_shapes_and_wrong_ones_errors():
    q, k, v = (t.to("meta") for t in (Q, K, V))
    assert attend(q, k, v[..., :5]).shape == (2, 4, 11, 5)
    assert attend_state(q, k, v).lse.dtype == torch.float32
    with pytest.raises(ProblemError, match="same qk_dim"):
        attend(q, k[..., :5], v)


def test_vmap_over_a_leading_axis():
    q, k, v = (torch.stack([t, 2 * t, 3 * t]) for t in (Q, K, V))
    mask = Causal() & Documents(IDS)
    found = torch.vmap(lambda q, k, v: attend(q, k, v, mask=mask))(q, k, v)
    assert torch.allclose(
        found, torch.stack([attend(*each, mask=mask) for each in zip(q, k, v, strict=True)]), atol=1e-6
    )
    shared = torch.vmap(lambda q: attend(q, K, V))(q)
    assert torch.allclose(shared, torch.stack([attend(each, K, V) for each in q]), atol=1e-6)


def test_vmap_inside_a_graph():
    q = torch.stack([Q, 2 * Q])
    found = compiled(torch.vmap(lambda q: attend(q, K, V, mask=Causal())))(q)
    assert torch.allclose(found, torch.stack([attend(each, K, V, mask=Causal()) for each in q]), atol=1e-6)


LENGTHS = torch.tensor([13, 23])
MASKS = {
    "lengths": lambda: KeyLengths(LENGTHS),
    "documents": lambda: Causal() & Documents(IDS),
    "a table": lambda: TensorMask(IDS[:11, None] != IDS),
    "a prefix of each row": lambda: Window(3) | Prefix(LENGTHS // 2),
    "made inside": lambda: KeyLengths(LENGTHS - 1) & Documents(IDS // 2),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_mask_of_tensors_is_read_under_torch_func(name: str, backend: str | None):
    given = None if name == "made inside" else MASKS[name]()

    def loss(q: Tensor) -> Tensor:
        return attend(q, K, V, mask=MASKS[name]() if given is None else given, backend=backend).sin().sum()

    leaf = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    both, of_both = torch.stack([Q, Q]), torch.stack([expected, expected])
    assert torch.allclose(torch.func.grad(loss)(Q), expected, atol=1e-6)
    assert torch.allclose(torch.vmap(torch.func.grad(loss))(both), of_both, atol=1e-6)
    along = torch.func.jvp(loss, (Q,), (K[:, :1, :11].expand_as(Q),))[1]
    assert torch.allclose(along, (expected * K[:, :1, :11]).sum(), atol=1e-4)


def test_a_mask_that_vmap_maps_over_is_refused_inside_of_a_gradient_too():
    def loss(q: Tensor) -> Tensor:
        return attend(q, q, q, mask=TensorMask(q @ q.mT > 0)).sum()

    for function in (loss, torch.func.grad(loss)):
        with pytest.raises(ProblemError, match="mapped over by vmap"):
            torch.vmap(function)(torch.stack([Q, 2 * Q]))


def small(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(3), *(pytest.param(mask, marks=pytest.mark.exhaustive) for mask in (~Causal(), None))],
)
def test_derivatives_of_every_order_and_direction(mask: Any):
    q, k, v, sink, bias = small(1, 2, 4, 3), small(1, 1, 5, 3), small(1, 1, 5, 2), small(2), small(1, 2, 4, 5)

    def function(*t: Tensor) -> Tensor:
        return attend(*t[:3], sink=t[3], bias=TensorBias(t[4]), mask=mask, softcap=3.0, backend="reference")

    assert torch.autograd.gradcheck(function, (q, k, v, sink, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v, sink, bias))


def test_a_call_that_sees_nothing_has_second_derivatives_of_zero():
    """A gradient penalty takes them, and a whole batch may be padding."""
    leaves = small(1, 2, 3, 4), small(1, 2, 3, 4), small(1, 2, 3, 4), small(2)
    out = attend(*leaves[:3], mask=Causal(), offset=-3, sink=leaves[3], backend="reference")
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([grad.square().sum() for grad in first]).sum(), leaves)
    assert not any(bool(grad.any()) for grad in (*first, *second))


def test_the_log_sum_exp_is_differentiable():
    q, k, v = small(1, 2, 4, 3), small(1, 1, 5, 3), small(1, 1, 5, 2)
    assert torch.autograd.gradcheck(lambda *t: attend_state(*t, mask=Causal()).lse, (q, k, v))


def test_transforms_choose_an_engine_that_knows_them():
    q = torch.randn(1, 2, 5, 4)
    out, tangent, *_ = torch.func.jvp(lambda t: attend(t, t, t, mask=Causal()), (q,), (torch.ones_like(q),))
    assert torch.allclose(out, attend(q, q, q, mask=Causal()), atol=1e-6)
    assert tangent.shape == q.shape
    hessian = torch.func.hessian(lambda t: attend(t, t, t, mask=Causal()).sum())(q[:, :1, :2, :2])
    assert bool(torch.isfinite(hessian).all())


BIASES = {
    "none": lambda: None,
    "slopes": lambda: Alibi(2),
    "a table": lambda: T5Bias(torch.linspace(-1, 1, 64).view(32, 2)),
    "a tensor": lambda: TensorBias(torch.linspace(-1, 1, 9).view(3, 3)),
}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize(
    "mask", [Causal(), Window(2), TensorMask(torch.eye(3) > 0), MaskFunction(lambda b, h, q, k: k != q)]
)
def test_nested_transforms_leave_nothing_of_theirs_to_later_calls(mask: Mask, bias: str):
    q, k = torch.randn(1, 2, 3, 2), torch.randn(1, 2, 3, 2)

    def loss(q: Tensor) -> Tensor:
        return attend(q, k, k, mask=mask, bias=BIASES[bias]()).square().sum()

    first, again = torch.func.hessian(loss)(q), torch.func.hessian(loss)(q)
    assert torch.equal(first, again)
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.allclose(torch.func.grad(loss)(q), expected, atol=1e-6)


def test_nested_transforms_over_stored_keys_leave_them_to_later_calls():
    q, stored = Q[:, :, :3], KVCache(Paged(16)).append(K, V)
    expected = attend(q, K, V, mask=Causal())
    torch.func.hessian(lambda q: attend(q, *stored, mask=Causal()).square().sum())(q)
    assert torch.allclose(attend(q, *stored, mask=Causal()), expected, atol=1e-6)


@pytest.mark.exhaustive
def test_words_with_lengths_in_them_compile_once_for_all_lengths():
    function = torch.compile(
        lambda q, k: attend(q, k, k, mask=Window(k.shape[2] // 2) & MaskFunction(lambda b, h, q, k: k <= q)),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for keys in (13, 17, 23):
        k = K[:, :, :keys].contiguous()
        expected = attend(Q, k, k, mask=Window(keys // 2) & Causal())
        assert torch.allclose(function(Q, k), expected, atol=1e-6)


@pytest.mark.parametrize("words", [{"offset": -20}, {"mask": Prefix(0)}])
def test_a_graph_of_a_call_that_keeps_nothing_has_gradients_of_zero(words: dict[str, Any]):
    q = Q.clone().requires_grad_()
    compiled(lambda q: attend(q, K, V, **{"mask": Causal(), **words}))(q).sum().backward()
    assert q.grad is not None
    assert not q.grad.any()


@pytest.mark.parametrize("words", [{"dropout": 3.0}, {"softcap": -1.0}, {"backend": "x"}, {"sink": torch.zeros(3)}])
def test_what_makes_no_sense_is_an_error_on_meta_tensors_too(words: dict[str, Any]):
    q = Q.to("meta")
    with pytest.raises(ProblemError):
        attend(q, q, q, **words)


def test_a_named_engine_is_differentiated_inside_a_graph():
    q, k = Q.clone().requires_grad_(), Q.clone()
    (ours,) = torch.autograd.grad(compiled(lambda q: attend(q, k, k, mask=Causal(), backend="sdpa"))(q).sum(), q)
    (eager,) = torch.autograd.grad(attend(q, k, k, mask=Causal(), backend="sdpa").sum(), q)
    assert torch.allclose(ours, eager, atol=1e-6)


@pytest.mark.parametrize("how", ["counted", "compiled"])
def test_a_bias_may_be_all_that_vmap_maps_over_where_torch_sees_the_operator(how: str):
    biases = torch.randn(3, 11, 23)

    def mapped(biases: Tensor) -> Tensor:
        return torch.vmap(lambda bias: attend(Q, K, V, bias=TensorBias(bias)))(biases)

    with FlopCounterMode(display=False) if how == "counted" else nullcontext():
        found = mapped(biases) if how == "counted" else compiled(mapped)(biases)
        twice = torch.vmap(mapped)(biases[None])[0]
    expected = torch.stack([attend(Q, K, V, bias=TensorBias(bias)) for bias in biases])
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(twice, expected, atol=1e-6)


def test_an_offset_cannot_be_mapped_over():
    for offsets in (torch.tensor([3, 5]), torch.tensor([[3, 5], [7, 9]])):
        with pytest.raises(ProblemError, match="offset is mapped over by vmap"):
            torch.vmap(lambda offset: attend(Q, K, V, mask=Causal(), offset=offset))(offsets)


def test_a_mask_cannot_be_mapped_over():
    with pytest.raises(ProblemError, match="mapped over by vmap"):
        torch.vmap(lambda lengths: attend(Q, K, V, mask=KeyLengths(lengths)))(torch.tensor([[3, 5], [7, 9]]))
    with pytest.raises(ProblemError, match="mapped over by vmap"):
        torch.vmap(lambda size: attend(Q, K, V, mask=MaskFunction(lambda b, h, q, k: q - k < size)))(torch.arange(1, 3))
    with pytest.raises(ProblemError, match=r"Global\(positions\) is mapped over by vmap"):
        torch.vmap(lambda positions: attend(Q, K, V, mask=Global(positions)))(torch.tensor([[0], [1]]))


def test_a_traced_forward_derivative_is_refused_and_not_zero():
    def tangent(q: Tensor) -> Tensor:
        _, found, *_ = torch.func.jvp(lambda t: attend(t, K, V, mask=Causal()), (q,), (torch.ones_like(q),))
        return found

    with pytest.raises(Exception, match=r"forward-mode derivatives \(jvp\) of a call that torch traces"):
        compiled(tangent)(Q)
    for backend in ("aot_eager", "eager"):  # a graph break: eager, and right
        torch._dynamo.reset()  # or torch compiles `attend` in no later test, having failed once
        assert torch.allclose(torch.compile(tangent, backend=backend)(Q), tangent(Q))
    torch._dynamo.reset()


def test_a_traced_functional_gradient_is_refused_and_eager_where_graphs_may_break():
    def gradient(q: Tensor) -> Tensor:
        return torch.func.grad(lambda t: attend(t, K, V, mask=Causal()).square().sum())(q)

    def of_each(q: Tensor) -> Tensor:
        return torch.vmap(gradient)(q)

    for function, q in ((gradient, Q), (of_each, torch.stack([Q, -Q]))):
        assert torch.allclose(torch.compile(function, backend="aot_eager")(q), function(q))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"torch\.func\.grad of a call that torch traces"):
            compiled(function)(q)
        with FlopCounterMode(display=False), pytest.raises(RefusalError, match=r"FLOP counter.*is not supported"):
            function(q)
    torch._dynamo.reset()


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about torch
def test_a_program_that_inductor_compiles_ahead_of_time_gives_the_same(tmp_path: Path):
    program = torch.export.export(Attention(), (Q, K, V))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(Q, K, V), attend(Q, K, V, mask=Causal()))


SMALL = tuple(torch.randn(1, 2, 5, 8) for _ in range(3))


def strided(t: Tensor) -> Tensor:
    """The same tensor, whose last dimension is not contiguous."""
    return t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)


DIFFERENTIATED: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "nothing": (lambda q, k, v, t: attend(q, k, v), None),
    "strided": (lambda q, k, v, t: attend(strided(q), strided(k), strided(v)), None),
    "T5Bias": (lambda q, k, v, t: attend(q, k, v, bias=T5Bias(t)), (32, 2)),
    "two biases": (lambda q, k, v, t: attend(q, k, v, bias=TensorBias(t) + TensorBias(t[:, :, :1])), (1, 2, 5, 5)),
    "a sink in bfloat16": (
        lambda q, k, v, t: attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), sink=t.bfloat16()).float(),
        (2,),
    ),
    "Bilinear": (lambda q, k, v, t: attend(q, k, v, score=Bilinear(t)), (8, 8)),
    "reference": (lambda q, k, v, t: attend(q, k, v, backend="reference"), None),
    "sdpa": (lambda q, k, v, t: attend(q, k, v, backend="sdpa"), None),
}


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def leaves_of(sizes: tuple[int, ...] | None) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in (*SMALL, *([] if sizes is None else [torch.randn(sizes)]))]


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


def called(function: Any, leaves: list[Tensor]) -> Tensor:
    return function(*leaves, *([None] * (4 - len(leaves))))


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("mode", [PassThrough, lambda: FlopCounterMode(display=False)], ids=["a mode", "the counter"])
def test_gradients_in_a_dispatch_mode_are_those_outside(name: str, mode: Any):
    function, sizes = DIFFERENTIATED[name]
    leaves = leaves_of(sizes)
    expected = gradients(called(function, leaves), leaves)
    with mode():
        found = gradients(called(function, leaves), leaves)
    for ours, outside in zip(found, expected, strict=True):
        assert torch.equal(ours, outside)


def test_a_compiled_call_whose_backward_pass_alone_is_in_a_dispatch_mode_has_its_gradients():
    function, sizes = DIFFERENTIATED["T5Bias"]
    leaves = leaves_of(sizes)
    out = compiled(function)(*leaves)
    with FlopCounterMode(display=False):
        found = gradients(out, leaves)
    for ours, outside in zip(found, gradients(function(*leaves), leaves), strict=True):
        assert torch.equal(ours, outside)


def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return attend(q, k, v, backend="reference")


def exported() -> Any:
    return torch.export.export(Attention(), SMALL).module()


OPERATORS = {
    "exported": exported,
    "compiled": lambda: torch.compile(Attention(), backend="eager", fullgraph=True),
    "counted": lambda: counted,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_second_derivative_of_the_operator_is_refused_and_not_a_part_of_it(name: str):
    leaves = leaves_of(None)
    out = OPERATORS[name]()(*leaves)
    (grad,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RefusalError, match="second derivative: leave torch"):
        torch.autograd.grad(out.sum() + grad.square().sum(), leaves)


def test_an_exported_program_refuses_forward_mode_and_gives_no_tangents_of_zero():
    program, tangents = exported(), tuple(t.cos() for t in SMALL)
    with pytest.raises(RefusalError, match=r"jvp.*exports"):
        torch.func.jvp(program, SMALL, tangents)
    with dual_level(), pytest.raises(RefusalError, match=r"jvp.*exports"):
        program(*map(make_dual, SMALL, tangents))


def test_an_exported_program_runs_where_no_derivative_flows_through_it():
    program, expected = exported(), Attention()(*SMALL)

    def held(x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = program(*SMALL).sum()
        return x.square().sum() * frozen

    x = torch.ones(3)
    torch.testing.assert_close(torch.func.grad(held)(x), 2 * x * expected.sum())
    torch.testing.assert_close(torch.func.jvp(held, (x,), (x,))[1], 6 * expected.sum())
    with dual_level():
        assert torch.equal(program(*SMALL), expected)


@pytest.mark.parametrize("how", ["counted", "graph", "graph with breaks"])
@pytest.mark.parametrize("kind", ["grad", "jvp"])
def test_a_traced_call_that_no_derivative_reaches_is_constant_in_torch_func(kind: str, how: str):
    def scaled(x: Tensor) -> Tensor:
        return x.square().sum() * attend(Q, K, V, mask=Causal(), sink=SINK).sum()

    def derivative(x: Tensor) -> Tensor:
        return torch.func.grad(scaled)(x) if kind == "grad" else torch.func.jvp(scaled, (x,), (x,))[1]

    x = torch.ones(3)
    expected = derivative(x)
    if how == "counted":
        with FlopCounterMode(display=False):
            found = derivative(x)
    else:
        found = torch.compile(derivative, fullgraph=how == "graph", backend="aot_eager")(x)
        torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", ["k", "sink", "bias"])
@pytest.mark.parametrize("kind", ["grad", "jvp"])
def test_a_counted_call_is_refused_where_a_derivative_reaches_any_of_its_tensors(kind: str, changed: str):
    tensors = {"k": K, "sink": SINK, "bias": torch.randn(4, 11, 23)}

    def total(t: Tensor) -> Tensor:
        k, sink, bias = (t if name == changed else given for name, given in tensors.items())
        return attend(Q, k, V, mask=Causal(), sink=sink, bias=TensorBias(bias)).sum()

    t = tensors[changed]
    with FlopCounterMode(display=False), pytest.raises(RefusalError, match=r"FLOP counter.*is not supported"):
        torch.func.grad(total)(t) if kind == "grad" else torch.func.jvp(total, (t,), (t,))


def test_an_exported_program_is_counted_inside_of_forward_mode():
    program, expected = exported(), Attention()(*SMALL)
    with FlopCounterMode(display=False) as counter, dual_level():
        assert torch.equal(program(*SMALL), expected)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("how", ["exported", "counted"])
def test_forward_mode_in_another_thread_leaves_gradients_as_they_are(how: str):
    program = exported() if how == "exported" else counted
    leaves = [t.clone().requires_grad_() for t in SMALL]
    expected = gradients(program(*leaves), leaves)
    with dual_level(), ThreadPoolExecutor(1) as other:  # a level is of all threads
        found = other.submit(lambda: gradients(program(*leaves), leaves)).result()
    for ours, alone in zip(found, expected, strict=True):
        assert torch.equal(ours, alone)


@pytest.mark.parametrize("kind", ["grad", "jacrev", "grad of vmap"])
def test_an_exported_program_refuses_the_gradients_of_torch_func(kind: str):
    program = exported()
    functions: dict[str, Any] = {
        "grad": torch.func.grad(lambda *t: program(*t).sum()),
        "jacrev": torch.func.jacrev(program),
        "grad of vmap": torch.func.grad(lambda q, k, v: torch.vmap(program)(q[None], k[None], v[None]).sum()),
    }
    with pytest.raises(RefusalError, match=r"torch\.func\.grad of a call that torch traces or exports"):
        functions[kind](*SMALL)


def test_an_exported_program_refuses_several_gradients_at_once():
    leaves = leaves_of(None)
    out = exported()(*leaves)
    several = torch.stack([torch.ones_like(out)] * 3)
    with pytest.raises(RefusalError, match="several at once"):
        torch.autograd.grad(out, leaves, several, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RefusalError, match="several at once"):
        torch.vmap(lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True))(several)


def counted_flops(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "words",
    [{}, {"mask": Causal() & Window(7)}, {"mask": KeyLengths(torch.tensor([3, 23]))}, {"backend": "reference"}],
    ids=str,
)
def test_torchs_counter_counts_the_flops_of_the_pairs_that_are_kept(words: dict[str, Any]):
    q = Q.clone().requires_grad_()
    forward = explain(Q, K, V, **words).flops
    assert counted_flops(lambda: attend(Q, K, V, **words)) == forward
    assert counted_flops(lambda: attend_state(Q, K, V, **words)) == forward
    both = counted_flops(lambda: attend(q, K, V, **words).sum().backward())
    assert both == forward + forward // (2 * 16) * 2 * (3 * 8 + 2 * 8)  # 8 + 8 dims a pair, five products back


def test_a_call_that_is_counted_is_the_same_call():
    expected = attend(Q, K, V, mask=Causal(), sink=SINK)
    with FlopCounterMode(display=False):
        assert torch.equal(attend(Q, K, V, mask=Causal(), sink=SINK), expected)


def test_an_observer_gets_calls_that_are_counted():
    calls: list[Any] = []
    with FlopCounterMode(display=False), observe_calls(calls.append):
        attend(Q, K, V)
    assert len(calls) == 1


def test_a_call_whose_offset_is_a_tensor_is_counted_as_well():
    expected = explain(Q, K, V, mask=Causal(), offset=5).flops
    assert counted_flops(lambda: attend(Q, K, V, mask=Causal(), offset=torch.tensor(5))) == expected


def test_masks_without_data_count_as_none():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, lengths = torch.empty(2, 4, 11, 8), torch.empty(2, 2, 23, 8), torch.ones(2, dtype=torch.int64)
        attend(q, k, k, mask=KeyLengths(lengths))
    assert counter.get_total_flops() == 2 * 2 * 4 * 11 * 23 * 16


@needs_library
def test_the_backward_pass_of_the_operator_runs_no_forward_pass(monkeypatch: pytest.MonkeyPatch):
    from regard.backend import native

    q, passes = Q.clone().requires_grad_(), list[int]()
    compute = native._Kernel.compute
    monkeypatch.setattr(native._Kernel, "compute", lambda *a: passes.append(1) or compute(*a))
    compiled(lambda q: attend(q, K, V, mask=Causal(), sink=SINK))(q).sum().backward()
    assert len(passes) == 1


@needs_library
@pytest.mark.parametrize(
    "bias",
    [lambda: Alibi(np.int64(2)), lambda: TensorBias(torch.ones(8, 8), offset=np.int64(0))],
    ids=["heads", "offset"],
)
def test_integers_of_numpy_are_compiled(bias: Any):
    q = torch.randn(1, 2, 8, 16)
    assert torch.equal(compiled(lambda q: attend(q, q, q, bias=bias()))(q), attend(q, q, q, bias=bias()))


@pytest.mark.parametrize(
    ("name", "remedy"), [("scale", "multiply q by it and pass scale=1"), ("softcap", "pass a number")]
)
def test_a_number_of_a_dynamic_length_is_refused_in_an_export(name: str, remedy: str):
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q, **{name: 1.0 / q.shape[2]})

    with pytest.raises(RefusalError, match=f"{name} is computed from a dynamic length.*{remedy}"):
        torch.export.export(Layer(), (Q,), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda q: linear_attend(q, q, q, scale=1.0 / q.shape[2]).out, "scale is .* multiply q and k by its square"),
        (lambda q: attend(q, q, q, score=Gaussian(q.shape[2])), r"Gaussian\(bandwidth\) is .* divide q and k by it"),
    ],
    ids=["linear", "bandwidth"],
)
def test_a_factor_of_a_dynamic_length_is_refused_in_an_export(call: Any, reason: str):
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return call(q)

    with pytest.raises(RefusalError, match=reason):
        torch.export.export(Layer(), (Q,), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))


@pytest.mark.parametrize(
    "call",
    [
        lambda q: attend(q, q, q),
        lambda k: attend(Q, k, k),
        lambda q: attend_state(q, q, q).out,
        lambda q: scaled_dot_product_attention(q, q, q),
        lambda q: linear_attend(q, q, q).out,
        MultiHeadAttention(8, heads=2),
        lambda k: KVCache().append(k, k)[0],
        lambda x: attend(Q, K, V, mask=x),
        lambda x: attend(Q, K, V, mask=TensorMask(x)),
        lambda x: attend(Q, K, V, mask=KeyLengths(x)),
        lambda x: attend(Q, K, V, bias=TensorBias(x)),
        lambda x: attend(Q, K, V, sink=x),
        lambda x: attend(Q, K, V, scale=x),
        lambda x: attend(Q, K, V, offset=x),
    ],
    ids=[
        *("attend", "keys", "state", "sdpa", "linear", "module", "cache"),
        *("mask", "tensor mask", "lengths", "bias", "sink", "scale", "offset"),
    ],
)
def test_symbolic_traces_of_torch_fx_are_refused(call: Any):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x)

    with pytest.raises(RefusalError, match=r"symbolic_trace .* is a Proxy.*: use torch\.export.*is_leaf_module"):
        torch.fx.symbolic_trace(Model())


@needs_library
@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
def test_a_trace_of_torch_jit_is_refused_as_its_graph_would_not_compute():
    q = torch.randn(1, 2, 8, 16)
    for mask, backend in itertools.product((None, Causal(), Window(3)), (None, "reference", "sdpa")):
        with pytest.raises(RefusalError, match=r"torch\.jit\.trace records the operators of torch of one path"):
            torch.jit.trace(lambda q, m=mask, b=backend: attend(q, q, q, mask=m, backend=b), (q,), check_trace=False)


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "reference"])
def test_a_traced_call_with_dropout_leaves_torchs_generators_to_other_threads(
    backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("regard.backend.reference.REMEMBERED", 0)  # so that `reference` computes tiles again
    monkeypatch.setattr(torch.random, "fork_rng", refuse)
    q = torch.randn(1, 2, 300, 16)
    v = torch.randn(1, 2, 300, 16, requires_grad=True)
    with FlopCounterMode(display=False):
        torch.manual_seed(3)
        out, after = attend(q, q, v, dropout=0.5, backend=backend), torch.rand(1)
        torch.rand(1)  # what another thread draws
        (dv,) = torch.autograd.grad(out.sum(), v)
        assert torch.allclose((dv * v).sum(), out.sum(), rtol=1e-4)  # the output is linear in v
        torch.manual_seed(3)
        assert torch.equal(attend(q, q, v, dropout=0.5, backend=backend), out)
        assert torch.equal(torch.rand(1), after)


def refuse(*_: object, enabled: bool = True, **__: object) -> Any:
    assert not enabled, "a generator of torch was taken"
    return nullcontext()


class Drawing(Backend):
    name = "drawing"

    def refusals(self, problem: Problem) -> list[str]:
        return []

    def compile(self, problem: Problem, schedule: Schedule) -> Kernel:
        def kernel(operands: Operands) -> State:
            scores = problem.scale * operands.q @ operands.k.mT
            weights = torch.nn.functional.dropout(scores.softmax(-1), problem.dropout)
            return State(weights @ operands.v, scores.logsumexp(-1))

        return kernel


@dataclass(frozen=True)
class Equal(Drawing):
    name: str = "equal"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda _: Equal()])
def test_a_copy_of_a_registered_backend_and_an_equal_one_are_traced(again: Callable[[Equal], Equal]):
    register_backend(mine := Equal())
    try:
        module, q = MultiHeadAttention(24, 3, backend=mine), torch.randn(1, 5, 24)
        copied = copy.deepcopy(module)
        copied.backend = again(mine)
        compiled = torch.compile(copied, backend="eager", fullgraph=True)
        with FlopCounterMode(display=False):
            assert torch.equal(copied(q), module(q))
        assert torch.equal(compiled(q), module(q))
    finally:
        del BACKENDS["equal"]


def test_a_module_is_copied_with_its_backend():
    module = MultiHeadAttention(24, 3, backend=Drawing())
    assert copy.deepcopy(module).backend is module.backend


def test_a_users_backend_draws_the_same_in_the_backward_pass_of_a_traced_call():
    register_backend(Drawing())
    try:
        q, v = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16, requires_grad=True)
        with FlopCounterMode(display=False):
            out = attend(q, q, v, dropout=0.5, backend="drawing")
            state = torch.get_rng_state()
            (dv,) = torch.autograd.grad(out.sum(), v)
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.allclose((dv * v).sum(), out.sum(), rtol=1e-4)
    finally:
        del BACKENDS["drawing"]


def test_key_heads_that_data_decide_are_checked_when_the_graph_runs():
    def some(q: Tensor, count: Tensor) -> Tensor:
        k = q[:, : int(count)]
        return attend(q, k, k, mask=Causal())

    q = torch.randn(1, 4, 9, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = compiled(some)
        for count in (2, 4, 1):
            assert torch.allclose(graph(q, torch.tensor(count)), some(q, torch.tensor(count)), atol=1e-6)
        with pytest.raises(Exception, match="q has 4 heads and k has 3: query heads must be a whole multiple"):
            graph(q, torch.tensor(3))
    torch._dynamo.reset()
