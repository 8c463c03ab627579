"""The export to ONNX where the packages that it needs are missing."""

import pytest
import torch

from regard import RefusalError
from regard.integrate import onnx


@pytest.mark.parametrize("missing", [["onnx"], ["onnxscript"], ["onnx", "onnxscript"]])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    missing: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(RefusalError, match=rf"{' and '.join(missing)}, not installed: pip install 'regard\[onnx\]'"):
        onnx.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),))
