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


def test_a_mask_of_integers_and_a_negative_window_are_refused():
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ProblemError, match=r"attn_mask is torch.int64: expected bools \(True keeps\) or floats"):
        attention(q, q, q, torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(
        ProblemError, match="left_window_size is -2 and right_window_size -1: expected a number of keys"
    ):
        attention(q, q, q, left_window_size=-2)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 3, 5), (2, 1, 3, 5), (2, 4, 3, 3)], ids=str)
def test_a_mask_of_any_axes_also_with_rows_that_see_nothing(shape: tuple[int, ...], kind: str):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    keeps = torch.rand(shape) < 0.6
    if len(shape) > 1:
        keeps[..., 0, :] = False
    mask = keeps if kind == "bool" else torch.randn(shape).masked_fill(~keeps, -torch.inf)
    lacking = 5 - mask.shape[-1]
    whole = torch.nn.functional.pad(mask, (0, lacking), value=False if kind == "bool" else -torch.inf)
    keys = k.repeat_interleave(2, dim=1)
    exact = torch.nn.functional.scaled_dot_product_attention(q, keys, keys, whole.expand(2, 4, 3, 5))
    out = attention(q, k, k, mask, qk_matmul_output_mode=3)
    torch.testing.assert_close(out.Y, exact)
    torch.testing.assert_close(out.qk_matmul_output @ keys, exact)


def test_the_scores_of_a_mode_are_before_and_after_the_softcap():
    """As onnxruntime and the function of the standard; the reference of the package onnx caps those of mode 0 too."""
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    scores = q @ k.repeat_interleave(2, dim=1).mT * 8**-0.5
    for mode, exact in enumerate((scores, torch.tanh(scores / 0.5) * 0.5)):
        torch.testing.assert_close(attention(q, k, k, softcap=0.5, qk_matmul_output_mode=mode)[3], exact)
