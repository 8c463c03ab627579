"""Programs that do not know regard: `regard.everywhere` gives them torch's results, and their attention is regard's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import native
from regard.bench.rounds import on_threads
from tests.override.programs import PROGRAMS

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled library torch runs every call")


COMPILED = ("a decoder with an early import", "an encoder with masks")
"""Programs that are compiled in the default run as well; each takes seconds."""


def in_float64(module: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(module).double()(x if not x.is_floating_point() else x.double())


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "gradients"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_torchs_results(name: str, how: str):
    with on_threads(1):  # with more the calls of these programs are small, and run by torch
        gives_torchs_results(name, how)


@pytest.mark.parametrize(
    "name",
    [name if name in COMPILED else pytest.param(name, marks=pytest.mark.exhaustive) for name in PROGRAMS],
)
def test_a_compiled_program_gives_torchs_results(name: str):
    with on_threads(1):
        gives_torchs_results(name, "compiled")


def gives_torchs_results(name: str, how: str) -> None:
    make, sample = PROGRAMS[name]
    module, x = make().eval(), sample()
    run: Any = torch.compile(module, backend="aot_eager") if how == "compiled" else module
    context: Any = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)
    exact = in_float64(module, x)
    with context():
        theirs = module(x)
        with regard.everywhere() as caught:
            ours = run(x)
    assert sum(row.calls for row in caught.rows if row.form.why is None) >= 1
    assert (ours.double() - exact).abs().max() < 2 * (theirs.double() - exact).abs().max() + 1e-6
    if how == "gradients":
        for a, b in zip(*(torch.autograd.grad(out.sin().sum(), [*module.parameters()]) for out in (ours, theirs)),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
