"""Models that call regard, as ONNX files: what onnxruntime computes from them, and the operators in them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import (
    Alibi,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    MaskFunction,
    MultiHeadAttention,
    Prefix,
    ProblemError,
    Rope,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
    attend_state,
)
from regard.integrate.onnx import decompositions, export
from regard.scores import Cosine, Gaussian

pytest.importorskip("onnx", reason="the package onnx is missing: pip install regard[onnx]")
pytest.importorskip("onnxscript", reason="the package onnxscript is missing: pip install regard[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="the package onnxruntime is missing: pip install regard[onnx]")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning"),  # torch's exporter about itself
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]

VERSIONS = (23, 24, 25)
torch.manual_seed(0)
DYNAMIC = torch.export.Dim.DYNAMIC


class Model(torch.nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn

    def forward(self, *tensors: Tensor) -> Any:
        return self.fn(*tensors)


class Case(NamedTuple):
    """A function, its inputs, those of other sizes that the same file must serve, and which axes differ."""

    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    axes: tuple[tuple[int, ...], ...]


def qkv(batch: int, queries: int, keys: int, *more: Tensor) -> tuple[Tensor, ...]:
    """Queries of 4 heads, keys and values of 2, and more inputs."""
    generator = torch.Generator().manual_seed(keys)
    shapes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)
    return (*(torch.randn(shape, generator=generator) for shape in shapes), *more)


def case(fn: Callable[..., Any], first: tuple[Tensor, ...] = (), then: tuple[Tensor, ...] = (), *axes: Any) -> Case:
    """A case with 3 queries at the end of 5 keys, and then 2 at the end of 7."""
    return Case(fn, qkv(2, 3, 5, *first), qkv(3, 2, 7, *then), ((0, 2),) * 3 + axes)


def masked(mask: Any, **more: Any) -> Case:
    """A case of a mask."""
    return case(lambda q, k, v: attend(q, k, v, mask=mask, **more))


def state(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the earlier and the later keys, merged."""
    early = attend_state(q, k[:, :, :2], v[:, :, :2], mask=Prefix(2), offset=0)
    whole = early | attend_state(q, k[:, :, 2:], v[:, :, 2:], mask=Causal())
    return whole.out, whole.lse


TABLE, SINK = torch.randn(32, 4), torch.randn(4)
LENGTHS = (torch.tensor([2, 9]),), (torch.tensor([0, 1, 3]),), (0,)
CASES = {
    "no mask": masked(None),
    "causal": masked(Causal()),
    "causal, scale and softcap": masked(Causal(), scale=0.3, softcap=2.0),
    "window": masked(Causal() & Window(3)),
    "window to both sides": masked(Window(3, 2)),
    "window of a dynamic size": case(lambda q, k, v: attend(q, k, v, mask=Causal() & Window(k.shape[2] // 2))),
    "window and sinks": masked(Causal() & (Window(2) | Prefix(1))),
    "lengths": case(lambda q, k, v, n: attend(q, k, v, mask=KeyLengths(n)), *LENGTHS),
    "causal and lengths": case(lambda q, k, v, n: attend(q, k, v, mask=Causal() & KeyLengths(n)), *LENGTHS),
    "alibi": masked(Causal(), bias=Alibi(4)),
    "t5 bias": masked(None, bias=T5Bias(TABLE)),
    "global and dilated": masked(Causal() & (Global([0, 1]) | Dilated(2))),
    "a function": masked(MaskFunction(lambda b, h, q, k: (q + k) % 2 == h % 2)),
    "not": masked(~Causal()),
    "first query at 0": masked(Causal(), offset=0),
    "sink": masked(Causal(), sink=SINK),
    "cosine": masked(Causal(), score=Cosine(), scale=4.0),
    "gaussian": masked(None, score=Gaussian(1.0)),
    "states": case(state),
    "documents": case(
        lambda q, k, v, ids: attend(q, k, v, mask=Causal() & Documents(ids)),
        (torch.tensor([0, 0, 1, 1, 1]),),
        (torch.tensor([0, 0, 1, 1, 1, 2, 2]),),
        (0,),
    ),
    "offset": case(
        lambda q, k, v, at: attend(q, k, v, mask=Causal() & Window(3), offset=at),
        (torch.tensor(1),),
        (torch.tensor(4),),
        (),
    ),
    "sink and offset": case(
        lambda q, k, v, at: attend(q, k, v, mask=Causal(), sink=SINK, offset=at),
        (torch.tensor(1),),
        (torch.tensor(4),),
        (),
    ),
    "a tensor mask": case(
        lambda q, k, v, t: attend(q, k, v, mask=TensorMask(t)),
        (torch.rand(2, 1, 3, 5) > 0.5,),
        (torch.rand(3, 1, 2, 7) > 0.5,),
        (0, 2, 3),
    ),
    "rows that see nothing, two axes": case(
        lambda q, k, v, t: attend(q, k, v, mask=TensorMask(t)),
        (torch.arange(3)[:, None] > torch.arange(5),),
        (torch.arange(2)[:, None] > torch.arange(7),),
        (0, 1),
    ),
    "a bias of three axes and softcap": case(
        lambda q, k, v, t: attend(q, k, v, bias=TensorBias(t), mask=Causal(), softcap=1.5),
        (torch.randn(4, 3, 5),),
        (torch.randn(4, 2, 7),),
        (1, 2),
    ),
    "a tensor bias": case(
        lambda q, k, v, t: attend(q, k, v, bias=TensorBias(t)),
        (torch.randn(1, 4, 3, 5),),
        (torch.randn(1, 4, 2, 7),),
        (2, 3),
    ),
}


def computed(program: Any, inputs: tuple[Tensor, ...]) -> list[np.ndarray]:
    """What onnxruntime computes."""
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    feeds = {given.name: t.numpy() for given, t in zip(session.get_inputs(), inputs, strict=True)}
    return session.run(None, feeds)


def check(program: Any, fn: Callable[..., Any], *calls: tuple[Tensor, ...]) -> None:
    for inputs in calls:
        expected = fn(*inputs)
        listed = expected if isinstance(expected, tuple) else (expected,)
        for ours, theirs in zip(computed(program, inputs), listed, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-6, rtol=2e-6)


def shapes(axes: tuple[tuple[int, ...], ...]) -> Any:
    return (tuple(dict.fromkeys(own, DYNAMIC) for own in axes),)


def operators(program: Any) -> list[str]:
    return [node.op_type for node in program.model.graph]


def attributes(program: Any) -> dict[str, Any]:
    (node,) = [node for node in program.model.graph if node.op_type == "Attention"]
    return {name: attribute.value for name, attribute in node.attributes.items()}


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_computes_what_attend_does(name: str, version: int):
    fn, inputs, others, axes = CASES[name]
    program = export(Model(fn).eval(), inputs, opset_version=version, dynamic_shapes=shapes(axes), verbose=False)
    check(program, fn, inputs, others)
    assert operators(program).count("Attention") == (name not in ("sink", "gaussian", "states", "sink and offset"))


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("version", [18, 20, 23])
@pytest.mark.parametrize("name", CASES)
def test_torch_exports_the_same_call_by_itself(name: str, version: int):
    fn, inputs, others, axes = CASES[name]
    program = torch.onnx.export(
        Model(fn).eval(), inputs, dynamo=True, opset_version=version, dynamic_shapes=shapes(axes), verbose=False
    )
    check(program, fn, inputs, others)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_without_a_root_is_exported(scale: float):
    fn, inputs, *_ = masked(Causal(), scale=scale)
    for version in VERSIONS:
        check(export(Model(fn).eval(), inputs, opset_version=version, verbose=False), fn, inputs)
    check(torch.onnx.export(Model(fn).eval(), inputs, dynamo=True, opset_version=18, verbose=False), fn, inputs)


def test_attributes_say_what_the_standard_has_an_attribute_for():
    found = {}
    for version in VERSIONS:
        fn, inputs, _, axes = CASES["window"]
        program = export(Model(fn).eval(), inputs, opset_version=version, dynamic_shapes=shapes(axes), verbose=False)
        found[version] = {name: value for name, value in attributes(program).items() if name != "scale"}
    assert found == {23: {}, 24: {"is_causal": 1}, 25: {"is_causal": 1, "left_window_size": 2}}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(3)])
def test_joined_keys_become_the_past_of_the_operator(mask: Any, version: int):
    def step(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, ...]:
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return attend(q, k, v, mask=mask), k, v

    first, then = (*qkv(2, 3, 3), *qkv(2, 1, 5)[1:]), (*qkv(3, 2, 2), *qkv(3, 1, 7)[1:])
    axes = ({0: "batch", 2: "new"},) * 3 + ({0: "batch", 2: "past"},) * 2
    program = export(Model(step).eval(), first, opset_version=version, dynamic_shapes=(axes,), verbose=False)
    check(program, step, first, then)
    if mask is None or mask == Causal() or version == 25:
        assert operators(program) == ["Attention"]


def test_keys_that_are_joined_for_more_queries_than_are_new_are_not_the_past():
    def all_queries(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        return attend(q, torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2), mask=Causal())

    inputs = (*qkv(2, 8, 3), *qkv(2, 1, 5)[1:])
    program = export(Model(all_queries).eval(), inputs, verbose=False)
    check(program, all_queries, inputs)
    assert operators(program).count("Concat") == 2


def test_constants_of_a_mask_are_in_the_file():
    def tree(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Tree([-1, 0, 0]))

    inputs = qkv(2, 3, 5)
    program = export(Model(tree).eval(), inputs, verbose=False)
    check(program, tree, inputs)
    assert operators(program) == ["Attention"]


def test_half_precision_keeps_its_type():
    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal(), bias=Alibi(4))

    inputs = tuple(t.half() for t in qkv(2, 3, 5))
    for version in VERSIONS:
        (out,) = computed(export(Model(biased).eval(), inputs, opset_version=version, verbose=False), inputs)
        assert out.dtype == np.float16
        np.testing.assert_allclose(out, biased(*inputs).numpy(), atol=2e-3)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_program_that_torch_exported_before_is_taken(version: int):
    fn, inputs, others, axes = CASES["causal and lengths"]
    program = torch.export.export(Model(fn).eval(), inputs, dynamic_shapes=shapes(axes))
    check(export(program, opset_version=version, verbose=False), fn, inputs, others)
    plain = torch.onnx.export(program.run_decompositions(decompositions()), dynamo=True, verbose=False)
    check(plain, fn, inputs, others)


def test_a_model_is_written_while_regard_runs_torchs_attention():
    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=TensorMask(torch.ones(200, 200).tril().bool()))

    inputs = qkv(2, 200, 200)
    with regard.everywhere():
        program = torch.onnx.export(Model(masked).eval(), inputs, dynamo=True, verbose=False)
    check(program, masked, inputs)


def test_a_module_is_exported_with_its_rotation_and_its_mask():
    attention = MultiHeadAttention(
        32, heads=4, kv_heads=2, mask=Causal() & Window(5), position=Rope(8), qk_norm=True
    ).eval()
    x, y = torch.randn(2, 6, 32), torch.randn(3, 9, 32)
    with torch.no_grad():
        program = export(attention, (x,), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},), verbose=False)
        check(program, attention, (x,), (y,))
    assert attributes(program)["left_window_size"] == 4


def test_a_file_is_written_with_names(tmp_path: Any):
    fn, inputs, *_ = CASES["causal"]
    path = tmp_path / "attention.onnx"
    export(Model(fn).eval(), inputs, path, verbose=False, input_names=list("qkv"), output_names=["out"])
    session = onnxruntime.InferenceSession(path)
    assert [given.name for given in session.get_inputs()] == list("qkv")
    (out,) = session.run(["out"], {name: t.numpy() for name, t in zip("qkv", inputs, strict=True)})
    np.testing.assert_allclose(out, fn(*inputs).numpy(), atol=2e-6)


def test_dropout_is_refused():
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout=0.1)

    with pytest.raises(Exception, match="a call with dropout needs"):
        export(Model(dropped).eval(), qkv(2, 3, 5), verbose=False)


def test_a_version_without_the_operator_is_refused():
    with pytest.raises(ProblemError, match="opset_version is 20: expected 23, 24 or 25"):
        export(Model(torch.relu).eval(), (torch.ones(2),), opset_version=20)


LEARNED = torch.nn.Parameter(torch.randn(1, 2, 4, 8))


def behind_learned_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, torch.cat([LEARNED, k], 2), torch.cat([LEARNED, v], 2))


def behind_learned_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat([LEARNED, t], 2) for t in (q, k, v))
    return attend(q, k, v, mask=Window(3, 3))


def behind_learned_tokens_that_are_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.cat([LEARNED, t], 2) for t in (q, k, v))
    return attend(q, k, v, mask=Window(3, 3)), k, v


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "function", [behind_learned_keys, behind_learned_tokens, behind_learned_tokens_that_are_returned]
)
def test_keys_that_are_joined_in_front_are_not_always_a_past(function: Callable[..., Any], version: int):
    model, tensors = Model(function).eval(), (torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8))
    program = export(model, tensors, opset_version=version, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    given = {node.name: t.numpy() for node, t in zip(session.get_inputs(), tensors, strict=True)}
    expected = model(*tensors)
    out = session.run(None, given)[0]
    torch.testing.assert_close(torch.from_numpy(out), expected[0] if isinstance(expected, tuple) else expected)
