"""Other versions of torch: which ones fit, what is reported of newer ones, and what happens without a private name."""

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    RefusalError,
    RegardError,
    VersionWarning,
    attend,
    everywhere,
    native,
    torch_internals,
    torch_versions,
)
from regard.torch_internals import dispatch_keys, missing
from regard.torch_internals.everywhere import NO_EVERYWHERE

ROOT = Path(__file__).parents[1]


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REGARD_QUIET", raising=False)
    native._warn.cache_clear()
    torch_versions.warn_of_untested.cache_clear()
    yield
    torch_versions.warn_of_untested.cache_clear()


def test_this_torch_is_tested_and_has_every_private_name():
    assert torch_versions.untested(torch.__version__) is None
    assert torch_internals.MISSING == {}


def test_the_package_takes_any_newer_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, min(torch_versions.TESTED)))
    assert [each for each in project["dependencies"] if each.startswith("torch")] == [f"torch>={oldest}"]


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0+cpu", "2.99.0a0+git1234567", "3.0.0"])
def test_a_version_that_was_not_tested_is_named(version: str):
    reason = torch_versions.untested(version)
    assert reason is not None
    assert reason.startswith(f"torch {version} is {'older' if version == '2.10.1' else 'newer'} than")


@pytest.mark.usefixtures("loud")
def test_a_newer_torch_is_warned_of_once_at_the_line_of_the_first_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch_versions, "MISSING", {"torch._C._gone": "this and that is slow"})
    q = torch.randn(1, 2, 11, 8)
    with pytest.warns(VersionWarning) as warned:
        attend(q, q, q, softcap=3.14)
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    for part in ("torch 2.99.0 is newer", "torch._C._gone is missing: this and that is slow.", "regard.VersionWarning"):
        assert part in str(warned[0].message)
    attend(q, q, q, softcap=3.15)  # a warning would be an error


@pytest.mark.usefixtures("loud")
def test_the_warning_of_a_newer_torch_can_be_silenced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    q = torch.randn(1, 2, 13, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=VersionWarning)
        attend(q, q, q, softcap=3.16)
    torch_versions.warn_of_untested.cache_clear()
    monkeypatch.setenv("REGARD_QUIET", "1")
    attend(q, q, q, softcap=3.17)


WITHOUT = """
import sys
import torch
from torch.autograd import forward_ad

held = {}
def remove(owner, name):
    held[owner, name] = getattr(owner, name)
    delattr(owner, name)

import torch._subclasses.functional_tensor, torch._dynamo.config
functorch = torch._C._functorch
everything = [
    (torch._subclasses, "FakeTensor"), (torch._subclasses.functional_tensor, "FunctionalTensor"),
    (torch._C, "_is_any_autocast_enabled"), (torch._C, "_disabled_torch_function_impl"),
    (torch._C, "DisableTorchFunctionSubclass"), (torch._C, "_DisableFuncTorch"),
    (functorch, "peek_interpreter_stack"), (functorch, "get_interpreter_stack"),
    (functorch, "is_functorch_wrapped_tensor"), (functorch, "is_batchedtensor"),
    (functorch, "is_legacy_batchedtensor"), (torch._C, "_len_torch_dispatch_stack"), (forward_ad, "_current_level"),
]
everything = [each for each in everything if (each[1] == "_len_torch_dispatch_stack") == (sys.argv[1] == "modes")]
for owner, name in everything:
    remove(owner, name)
from regard import torch_internals
for (owner, name), value in held.items():  # torch itself needs them
    setattr(owner, name, value)
assert len(torch_internals.MISSING) == len(everything), torch_internals.MISSING

from regard import Alibi, Causal, Documents, MaskFunction, attend, attend_state
from torch.nn.functional import scaled_dot_product_attention as theirs
q, k, v = (torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3))
ours, plain = attend(q, k, v, mask=Causal()), theirs(q, k, v, is_causal=True)
torch.testing.assert_close(ours, plain)
grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, plain)]
torch.testing.assert_close(*grads)
seen = Causal() & Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1])) & MaskFunction(lambda b, h, q, k: q - k < 5)
keep = seen.keep(0, 0, torch.arange(7)[:, None], torch.arange(7))
torch.testing.assert_close(attend(q, k, v, mask=seen), theirs(q, k, v, attn_mask=keep))
torch.testing.assert_close(attend_state(q, k, v, mask=Causal()).out, plain)
with torch.autocast("cpu"):
    assert attend(q, k, v).dtype == torch.bfloat16
if sys.argv[1] == "modes":  # then a call is an operator, which torch.func refuses
    raise SystemExit(print("right"))
f, g = (lambda q: attend(q, k, v, mask=Causal())), (lambda q: theirs(q, k, v, is_causal=True))
torch.testing.assert_close(*(torch.func.grad(lambda q: h(q).sum())(q) for h in (f, g)))
tangent = torch.func.jvp(f, (q,), (torch.ones_like(q),))[1]
want = torch.func.jvp(lambda q: attend(q, k, v, mask=Causal(), backend="reference"), (q,), (torch.ones_like(q),))[1]
torch.testing.assert_close(tangent, want)
with torch.no_grad():
    many = torch.randn(3, 1, 2, 7, 8)
    torch.testing.assert_close(torch.vmap(f)(many), torch.stack([g(each) for each in many]))
    torch.testing.assert_close(attend(q, k, v, mask=Causal()), plain)
print("right")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("gone", ["modes", "all others"])
def test_without_the_private_names_of_torch_results_are_right(gone: str):
    ran = subprocess.run([sys.executable, "-c", WITHOUT, gone], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("right\n", 0), ran.stderr  # torch may log to stderr that triton is missing


def test_a_name_that_is_missing_is_noted_with_what_happens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(missing, "MISSING", {})
    assert missing.find("torch._gone._deeper.name", 7, "the sum is slow") == 7
    assert missing.find("torch.Tensor._gone", None, "no sum") is None
    assert missing.find("torch.Tensor._version", None, "no sum") is torch.Tensor._version
    assert missing.MISSING == {"torch._gone._deeper.name": "the sum is slow", "torch.Tensor._gone": "no sum"}


def test_gradients_of_the_operator_are_refused_where_torch_lacks_what_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(missing.MISSING, "torch._C._gone", dispatch_keys.NO_GRADIENTS)
    q = torch.randn(1, 2, 7, 8, requires_grad=True)
    with FlopCounterMode(display=False):
        out = attend(q, q, q)
    with pytest.raises(RefusalError, match=r"need torch\._C\._gone of torch"):
        out.sum().backward()


def test_everywhere_refuses_where_torch_lacks_what_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(missing.MISSING, "torch._native_x", NO_EVERYWHERE)
    with pytest.raises(RefusalError, match=r"regard.everywhere needs torch._native_x of torch"):
        everywhere()


def test_the_kernel_of_torch_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch):
    from regard.backend import sdpa

    monkeypatch.setattr(sdpa, "flash_attention_for_cpu", None)
    q = torch.randn(1, 2, 17, 8)
    with pytest.raises(RegardError, match="sdpa: this version of torch lacks its kernel"):
        attend(q, q, q, softcap=None, scale=0.71, backend="sdpa")
