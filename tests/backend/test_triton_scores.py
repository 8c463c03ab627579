"""The arithmetic of scores that the GPU kernels share, beside float64."""

from typing import Any

import numpy as np
import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")
tl: Any = pytest.importorskip("triton.language")
capped: Any = pytest.importorskip("regard.gpu.scores").capped


@triton.jit
def capped_scores(x, out, scale, softcap, FORM: tl.constexpr, COUNT: tl.constexpr):  # noqa: N803  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, COUNT)
    tl.store(out + at, capped(tl.load(x + at), scale, softcap, FORM))


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0, 1e3])
@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("exact", [False, True])
def test_the_softcap_is_near_that_of_float64(softcap: float, scale: float, exact: bool):
    size = torch.logspace(-6, 4, 2048) * softcap
    x = torch.cat([-size, size[:-3], torch.tensor([0.0, torch.inf, -torch.inf])])
    found = torch.empty_like(x)
    with np.errstate(over="ignore"):  # exp2 of large scores is inf
        capped_scores[(1,)](x, found, scale, softcap, 2 if exact else 1, len(x))
    true = softcap * torch.tanh(x.double() * scale / softcap)
    assert (found - true).abs().max() <= 1e-6 * softcap
    if exact:  # the relative error is small, too
        assert ((found - true).abs() <= 1e-6 * true.abs()).all()


@pytest.mark.parametrize("exact", [False, True])
def test_the_softcap_of_nan_is_nan(exact: bool):
    x = torch.full((16,), torch.nan)
    found = torch.zeros_like(x)
    capped_scores[(1,)](x, found, 0.125, 3.0, 2 if exact else 1, len(x))
    assert found.isnan().all()


def test_large_softcaps_are_exact_in_half_types_too(monkeypatch: pytest.MonkeyPatch):
    from regard.gpu import launch

    monkeypatch.setattr(launch, "IS_INTERPRETED", False)
    half, full = torch.zeros(1).half(), torch.zeros(1)
    forms = [launch.softcap_form(softcap, half) for softcap in (None, 50.0, 1e3, 1e5)]
    assert forms == [0, 1, 1, 2]
    assert launch.softcap_form(50.0, full) == 2
