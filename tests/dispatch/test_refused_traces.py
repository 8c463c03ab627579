"""What no trace or export records rightly, and is refused: numbers of dynamic lengths, torch.fx, torch.jit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Causal,
    KeyLengths,
    MultiHeadAttention,
    RefusalError,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
    scaled_dot_product_attention,
)
from regard.cache import KVCache
from regard.linear import linear_attend
from regard.scores import Gaussian
from tests.dispatch.traced import K, Q, V
from tests.test_native import needs_library


@pytest.mark.parametrize(
    ("name", "remedy"), [("scale", "multiply q by it and pass scale=1"), ("softcap", "pass a number")]
)
def test_a_number_of_a_dynamic_length_is_refused_in_an_export(name: str, remedy: str):
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q, **{name: 1.0 / q.shape[2]})

    with pytest.raises(RefusalError, match=f"{name} is computed from a dynamic length.*{remedy}"):
        torch.export.export(Layer(), (Q.clone(),), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))


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
        torch.export.export(Layer(), (Q.clone(),), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))


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
