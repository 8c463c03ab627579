"""The published cases of the ONNX operator `Attention`, computed by regard."""

import warnings
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import ProblemError
from regard.integrate.onnx import attention

onnx = pytest.importorskip("onnx", reason="the package onnx is missing: pip install regard[onnx]")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="the package ml_dtypes is missing: pip install regard[onnx]")


def published() -> dict[str, Any]:
    """The cases of the package onnx by their names, without those of the operator written out in others."""
    with warnings.catch_warnings():  # some cases of other operators overflow on purpose
        warnings.simplefilter("ignore")
        cases = import_module("onnx.backend.test.case.node").collect_testcases("Attention")
    return {case.name: case for case in cases if not case.name.endswith("_expanded")}


CASES = published()


def tensor(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def arguments(case: Any) -> dict[str, Any]:
    """The arguments of a case by their names in the standard."""
    (node,), (inputs, _) = case.model.graph.node, case.data_sets[0]
    schema = onnx.defs.get_schema("Attention", case.model.opset_import[0].version)
    names = [slot.name for slot, given in zip(schema.inputs, node.input, strict=False) if given]
    fields = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
    if len(node.output) == 4 and node.output[3]:
        fields.setdefault("qk_matmul_output_mode", 0)
    return dict(zip(names, map(tensor, inputs), strict=True)) | fields


def test_there_are_93_published_cases():
    assert len(CASES) == 93


@pytest.mark.parametrize("name", CASES)
def test_a_published_case(name: str):
    case = CASES[name]
    outputs = attention(**arguments(case))
    wanted = [bool(slot) for slot in case.model.graph.node[0].output]
    named = [out for out, is_wanted in zip(outputs, wanted, strict=False) if is_wanted]
    for ours, array in zip(named, case.data_sets[0][1], strict=True):
        expected = tensor(array)
        assert ours.dtype == expected.dtype
        assert ours.shape == expected.shape
        rounding = 4 * torch.finfo(ours.dtype).eps  # the reference rounds every product in half precision
        torch.testing.assert_close(ours, expected, rtol=max(case.rtol, rounding), atol=max(case.atol, rounding))


def test_float64_in_the_softmax_is_float64_in_all():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    exact = attention(q.double(), k.double(), v.double()).Y.float()
    torch.testing.assert_close(attention(q, k, v, softmax_precision=11).Y, exact, rtol=1e-7, atol=1e-7)


def test_half_a_past_is_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ProblemError, match="past_key and past_value: one is given"):
        attention(q, q, q, past_key=q)
