"""The same call by OpenVINO's operator for paged keys and values, compiled as a model of that operator alone.

Keys and values stay in the type of the call (by default OpenVINO stores them in 8 bits). The operator is always causal.
"""

import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.vllm_calls import Rows

PAGE = 32
"""Tokens of a page; OpenVINO's CPU plugin has no other."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def load(folder: Path) -> None:
    """Let `import openvino` find the package in this folder; raises ImportError where it is missing."""
    sys.path.append(str(folder))
    import_module("openvino")


def prepare(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, window: int | None = None, slopes: Tensor | None = None
) -> Callable[[], Tensor]:
    """A call without arguments; it returns the output, [tokens, heads, dim].

    Args:
        q: queries of all sequences, [tokens, heads, dim].
        k, v: keys and values of all sequences, [tokens, kv_heads, dim].
        rows: how many tokens belong to which sequence; those before the queries are written into pages here.
    """
    heads, (kv_heads, dim) = q.shape[1], k.shape[1:]
    pages = [math.ceil(n / PAGE) for n in rows.keys]
    request = _model(heads, kv_heads, dim, q.dtype, max(rows.keys), window, slopes, len(pages)).create_infer_request()
    past = [n - new for n, new in zip(rows.keys, rows.queries, strict=True)]
    ends = np.cumsum([0, *rows.keys])
    new = torch.cat([torch.arange(end - count, end) for end, count in zip(ends[1:], rows.queries, strict=True)])
    inputs = {
        "q": _tensor(q.flatten(1)),
        "k": _tensor(k[new].flatten(1)),
        "v": _tensor(v[new].flatten(1)),
        "key_cache": _tensor(_paged(k, ends, pages)),
        "value_cache": _tensor(_paged(v, ends, pages)),
        "past": _integers(past),
        "starts": _integers(np.cumsum([0, *rows.queries])),
        "pages": _integers(range(sum(pages))),
        "first_pages": _integers(np.cumsum([0, *pages])),
    }
    for name, (tensor, _) in inputs.items():
        request.set_tensor(name, tensor)
    memory = list(inputs.values())  # OpenVINO reads the memory of these tensors: they live as long as the call

    def call() -> Tensor:
        assert memory
        request.infer()
        out = np.asarray(request.get_output_tensor(0).data)
        if q.dtype == torch.bfloat16:  # NumPy has no such type: OpenVINO shows its bits as another of two bytes
            return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).view(-1, heads, dim)
        return torch.from_numpy(out).view(-1, heads, dim)

    return call


def _tensor(t: Tensor) -> tuple[Any, Tensor]:
    """OpenVINO's view of this memory, and what owns the memory."""
    openvino = import_module("openvino")
    t = t.contiguous()
    if t.dtype == torch.bfloat16:
        bits = t.view(torch.int16).numpy()
        return openvino.Tensor(bits, openvino.Shape(list(t.shape)), openvino.Type.bf16), t
    return openvino.Tensor(t.numpy(), shared_memory=True), t


def _integers(values: Sequence[int] | np.ndarray | range) -> tuple[Any, Tensor]:
    return _tensor(torch.tensor(list(values), dtype=torch.int32))


def _paged(tokens: Tensor, ends: np.ndarray, pages: list[int]) -> Tensor:
    """Tokens [tokens, heads, dim] in pages [pages, heads, PAGE, dim]."""
    parts = list[Tensor]()
    for row, count in enumerate(pages):
        padded = tokens.new_zeros(count * PAGE, *tokens.shape[1:])
        own = tokens[ends[row] : ends[row + 1]]
        padded[: len(own)] = own
        parts.append(padded.unflatten(0, (count, PAGE)).transpose(1, 2))
    return torch.cat(parts)


def _model(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, longest: int,
    window: int | None, slopes: Tensor | None, rows: int,
) -> Any:  # fmt: skip
    """The operator as a compiled model. It has 28 inputs; those of what is not measured here are empty."""
    openvino, opset = import_module("openvino"), import_module("openvino.opset13")
    f32, i32 = openvino.Type.f32, openvino.Type.i32
    kind = {torch.float32: f32, torch.bfloat16: openvino.Type.bf16}[dtype]

    def parameter(name: str, shape: list[int], of: Any) -> Any:
        return opset.parameter(openvino.PartialShape(shape), of, name=name)

    def scalar(value: float, of: Any) -> Any:
        return opset.constant(np.asarray(value, dtype=np.float32 if of == f32 else np.int32), dtype=of)

    def empty(of: type) -> Any:
        return opset.constant(np.zeros(0, dtype=of))

    none = [empty(np.int32) for _ in range(9)]
    parameters = [
        *(parameter(name, [-1, n * dim], kind) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))),
        *(parameter(name, [-1, kv_heads, PAGE, dim], kind) for name in ("key_cache", "value_cache")),
        *(parameter(name, [-1], i32) for name in ("past", "starts", "pages", "first_pages")),
    ]
    rest = [
        scalar(1 / math.sqrt(dim), f32),
        scalar(0 if window is None else window, i32),
        empty(np.float32) if slopes is None else opset.constant(slopes.numpy()),
        scalar(longest, i32),
        opset.constant(np.zeros(rows, dtype=np.int32)),  # tokens whose scores are summed up
        none[0], none[1], empty(np.float32),  # rotation of cached keys
        empty(np.float32), scalar(64, i32), scalar(8, i32),  # sparse attention: threshold, block, stride
        empty(np.float32),  # sinks
        scalar(0, i32), none[2], none[3], none[4],  # diversity of cached keys
        none[5],  # types of tokens
        empty(np.uint8), none[6],  # bias among queries
    ]  # fmt: skip
    node = import_module("openvino.op")._PagedAttentionExtension([n.output(0) for n in (*parameters, *rest)])
    sizes = node.get_rt_info()
    for name, value in (
        ("k_head_size", dim),
        ("v_head_size", dim),
        ("num_k_heads", kv_heads),
        ("num_v_heads", kv_heads),
    ):
        sizes[name] = value
    model = openvino.Model([opset.result(node.output(0))], parameters)
    options = {
        "KV_CACHE_PRECISION": NAMES[dtype],
        "INFERENCE_PRECISION_HINT": NAMES[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    return openvino.Core().compile_model(model, "CPU", options)
