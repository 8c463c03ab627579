"""Calls in the operators of ONNX; what onnxruntime computes from them is in tests/integrate/test_onnx_export.py."""

from typing import Any

import torch
from torch import Tensor

from regard import Causal, Mask, attend
from regard.dispatch.onnx_form import in_onnx
from regard.extend import spec
from regard.plan.request import Request


@spec
class Odd(Causal):
    """A token sees itself and the tokens of odd numbers before it."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return super().keep(b, h, q, k) & ((q == k) | (k % 2 == 1))

    def bounds(self, r: Any) -> Any:
        return Mask.bounds(self, r)

    def signature(self, r: Any) -> Any:
        return Mask.signature(self, r)

    def intervals(self, sizes: Any) -> None:
        return None


def test_a_subclass_of_a_causal_mask_is_no_attribute():
    q, k, v = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    out = in_onnx(Request(q, k, v, Odd(), offset=0)).out
    torch.testing.assert_close(out, attend(q, k, v, mask=Odd(), offset=0))
