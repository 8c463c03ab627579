"""What torch traces: whole graphs, export, and the operator's own checks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from regard import (
    Alibi,
    Causal,
    Documents,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    State,
    T5Bias,
    Tree,
    Window,
    attend,
    attend_state,
    explain,
)
from tests.dispatch.traced import IDS, SINK, Attention, K, Q, V, compiled
from tests.test_native import needs_library


def composed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, table: Tensor, sink: Tensor) -> Tensor:
    mask = Causal() & (Window(7) | Prefix(3)) & Documents(ids)
    return attend(q, k, v, mask=mask, bias=T5Bias(table) + Alibi(4), sink=sink, softcap=5.0)


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
    exported = torch.export.export(
        Layer(), (Q, K.clone(), V.clone()), dynamic_shapes=({}, {2: keys}, {2: keys})
    ).module()
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


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about torch
def test_a_program_that_inductor_compiles_ahead_of_time_gives_the_same(tmp_path: Path):
    program = torch.export.export(Attention(), (Q, K, V))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(package)(Q, K, V), attend(Q, K, V, mask=Causal()))


@needs_library
def test_the_backward_pass_of_the_operator_runs_no_forward_pass(monkeypatch: pytest.MonkeyPatch):
    from regard.backend import native

    q, passes = Q.clone().requires_grad_(), list[int]()
    compute = native._Kernel.compute
    monkeypatch.setattr(native._Kernel, "compute", lambda *a: passes.append(1) or compute(*a))
    compiled(lambda q: attend(q, K, V, mask=Causal(), sink=SINK))(q).sum().backward()
    assert len(passes) == 1


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
