"""`regard.everywhere` while torch compiles or exports: which calls are the operator, and which are torch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import regard
from regard import native
from regard.override import decide
from regard.torch_internals import VERSION
from tests.override.of_torch import of_size

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")


def test_an_exported_program_needs_no_regard():
    layer = nn.TransformerEncoderLayer(128, 4, dropout=0.0, batch_first=True)
    with regard.everywhere():
        graph = torch.export.export(layer, (of_size(2, 256, 128),)).graph
    assert not [node for node in graph.nodes if "regard" in str(node.target)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tokens", [40, 256])
def test_an_exported_program_serves_any_length(strict: bool, tokens: int):
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    lengths = {"q": {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim("tokens", max=4096)}}
    with regard.everywhere() as caught:
        program = torch.export.export(Attention(), (of_size(2, 8, tokens, 64),), dynamic_shapes=lengths, strict=strict)
    assert [row.form.why for row in caught.rows] == [decide.KIND]
    q = of_size(3, 8, 20, 64)
    torch.testing.assert_close(program.module()(q), F.scaled_dot_product_attention(q, q, q, is_causal=True))


@pytest.mark.parametrize("strict", [False, True])
def test_an_encoder_layer_that_is_exported_for_inference_serves_any_length(strict: bool):
    if strict and VERSION < (2, 13):
        pytest.skip("torch itself exports no encoder layer for inference with dynamic sizes")
    layer = nn.TransformerEncoderLayer(128, 4, batch_first=True).eval()
    lengths = {"src": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=4096)}}
    with torch.no_grad():
        with regard.everywhere():
            program = torch.export.export(layer, (of_size(2, 256, 128),), dynamic_shapes=lengths, strict=strict)
        x = of_size(3, 20, 128)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learned", [False, True])
def test_one_compiled_graph_serves_all_lengths_that_regard_runs(dtype: torch.dtype, learned: bool):
    graphs = list[Any]()

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=count, dynamic=True)
    with regard.everywhere() as caught:
        for tokens in (256, 320, 384):
            q = of_size(2, 8, tokens, 64, dtype=dtype, requires_grad=learned)
            tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(run(q), F.scaled_dot_product_attention(q, q, q), **tolerance)
    assert len(graphs) == 1
    traced = [row.form for row in caught.rows if "traced" in row.form.text]
    assert [(form.query, form.keys, form.why) for form in traced] == [((2, 8, 256, 64), 256, None)]


@pytest.mark.skipif(VERSION < (2, 12), reason="torch 2.11 passes encoder layers on to its own kernel in a graph")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_encoder_layer_for_inference_is_compiled_whole(dynamic: bool):
    layer, x = nn.TransformerEncoderLayer(128, 4, batch_first=True).eval(), of_size(2, 256, 128)
    with torch.no_grad():
        with regard.everywhere() as caught:
            out = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
        torch.testing.assert_close(out, layer(x), atol=1e-5, rtol=1e-5)
    assert None in {row.form.why for row in caught.rows if "traced" in row.form.text}


@pytest.mark.parametrize("sliced", ["all", "keys"])
def test_sizes_that_depend_on_data_are_traced_as_torch_does(sliced: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)

    def run(x: Tensor, count: Tensor) -> Tensor:
        tokens = int(count.item())
        torch._check(tokens >= 2)
        torch._check(tokens <= x.shape[2])
        part = x[:, :, :tokens]
        return F.scaled_dot_product_attention(part if sliced == "all" else x, part, part)

    x, count = of_size(2, 8, 256, 64), torch.tensor(200)
    with regard.everywhere() as caught:
        out = torch.compile(run, backend="aot_eager", fullgraph=True)(x, count)
    assert decide.DATA_SIZE in {row.form.why for row in caught.rows}
    torch.testing.assert_close(out, run(x, count))


@pytest.mark.skipif(VERSION < (2, 13), reason="torch itself compiles no encoder layer for inference with dynamic sizes")
def test_an_encoder_layer_may_have_a_length_that_depends_on_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_scalar_outputs", True)
    layer, x, count = (
        nn.TransformerEncoderLayer(128, 4, batch_first=True).eval(),
        of_size(2, 256, 128),
        torch.tensor(99),
    )

    def run(x: Tensor, count: Tensor) -> Tensor:
        tokens = int(count.item())
        torch._check(tokens >= 2)
        torch._check(tokens <= x.shape[1])
        return layer(x[:, :tokens])

    with torch.no_grad():
        with regard.everywhere():
            out = torch.compile(run, backend="aot_eager", fullgraph=True)(x, count)
        torch.testing.assert_close(out, run(x, count), atol=1e-5, rtol=1e-5)


def test_a_compiled_graph_has_the_operator_and_serves_other_lengths():
    run: Any = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2), backend="aot_eager", dynamic=True
    )
    with regard.everywhere() as caught:
        for tokens in (256, 320):
            q = of_size(2, tokens, 8, 64).transpose(1, 2).requires_grad_()
            ours = run(q)
            theirs = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            for a, b in zip(*(torch.autograd.grad(t.sin().sum(), q) for t in (ours, theirs)), strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert any("traced" in row.form.text and row.form.why is None for row in caught.rows)


def test_what_is_compiled_while_it_is_on_has_the_operator_also_after_torch_compiled_others():
    """torch remembers which kernel it traced attention to; what it compiles afterwards is torch's again."""
    q = of_size(2, 8, 256, 64)

    def targets() -> set[str]:
        found: set[str] = set()

        def note(graph: torch.fx.GraphModule, _: object) -> Any:
            found.update(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        torch.compiler.reset()
        torch.compile(lambda t: F.scaled_dot_product_attention(t, t, t), backend=aot_autograd(fw_compiler=note))(q)
        return found

    before = targets()
    with regard.everywhere() as caught:
        inside = targets()
    assert "regard.attend.default" in inside
    assert any("traced" in row.form.text for row in caught.rows)
    assert before == targets()
    assert not any("regard" in target for target in before)
