"""What is kept of calls is what was there, in memory or in files, and stays so whatever happens afterwards."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from regard import Causal, KeyLengths, MaskFunction, TensorBias, TensorMask, attend
from regard.calls import observe_calls
from regard.errors import ProblemError
from regard.inspect.observing.disk import Folder
from regard.inspect.observing.observe import observe
from regard.inspect.observing.recorded import read_calls
from regard.inspect.weights.lazy import Weights
from tests.inspect.dense import CASES, definition

PLACES = [None, "cpu", "disk"]
PARTS = ("q", "k", "lse", "sink")


def again(call):
    """The call once more, for whoever watches now."""
    words = {"mask": call.mask, "bias": call.bias, "scale": call.scale, "softcap": call.softcap, "sink": call.sink}
    return attend(call.q, call.k, call.v, offset=call.offset, **words)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, of this test alone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("to", PLACES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_the_call_bit_for_bit(name, to):
    call = CASES[name]()
    with observe(values=True, to=to) as seen:
        out = again(call)
        (kept,) = seen
        weights, passed = kept.weights, Weights.of(call)
        for part in PARTS:
            there, here = getattr(passed, part), getattr(weights, part)
            assert (there is None and here is None) or torch.equal(there, here)
        # a mapped file has other alignments than torch, with which the products of BLAS may have other last bits
        aligned = replace(weights, q=weights.q.clone(), k=weights.k.clone())
        assert torch.equal(aligned.dense(), passed.dense())
        assert torch.equal(kept.v, call.v)
        assert torch.equal(kept.out, out)
        assert (kept.layer, kept.module) == (0, None)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_calls_is_read_again(name, tmp_path):
    call = CASES[name]()
    with observe(to=tmp_path / "calls"):
        again(call)
        again(call)
    for kept in read_calls(tmp_path / "calls"):
        torch.testing.assert_close(kept.weights.dense().double(), definition(call).weights, atol=1e-6, rtol=0)
    assert [kept.layer for kept in read_calls(tmp_path / "calls")] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_kept_as_halves(dtype, tmp_path):
    x = torch.randn(1, 2, 7, 4, dtype=dtype)
    with observe(to=str(tmp_path / "calls")) as seen:
        attend(x, x, x)
    assert seen[0].weights.q.dtype == dtype
    assert torch.equal(seen[0].weights.q, x)


@pytest.mark.parametrize("to", [None, "calls"])
@pytest.mark.parametrize("way", [lambda calls: pickle.loads(pickle.dumps(calls)), copy.deepcopy])
def test_what_is_kept_can_be_pickled_and_copied(way, to, tmp_path):
    x = torch.randn(1, 2, 5, 4)
    with observe(values=True, to=to and tmp_path / to) as seen:
        attend(x, x, x, mask=Causal())
    (kept,), (other,) = seen, way([*seen])
    assert repr(other) == repr(kept)
    assert torch.equal(other.weights.dense(), kept.weights.dense())
    assert torch.equal(other.out, kept.out)


def test_values_and_outputs_are_kept_only_if_asked_for():
    x = torch.randn(1, 2, 5, 4)
    with observe() as seen:
        attend(x, x, x)
    for part in ("v", "out"):
        with pytest.raises(
            ProblemError, match=r"RecordedCall\(layer=0, module=None\) has neither .* observe\(values=True\)"
        ):
            getattr(seen[0], part)


@pytest.mark.parametrize("to", PLACES, ids=str)
def test_what_is_written_into_the_tensors_later_changes_nothing(to):
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    lengths = torch.tensor([3, 5])
    with observe(values=True, to=to) as seen:
        before = attend(q, k, v, mask=KeyLengths(lengths)).clone()
        exact = seen[0].weights.dense().clone()
        for tensor in (q, k, v):
            tensor.zero_()
        lengths.add_(1)
        assert torch.equal(seen[0].weights.dense(), exact)
        assert (exact[0, :, :, 3:] == 0).all()
        torch.testing.assert_close(exact @ seen[0].v, before)


@pytest.mark.parametrize("to", [None, "disk"])
def test_a_copy_takes_its_own_memory_only_and_has_no_gaps(to):
    qkv = torch.randn(1, 5, 6, 4).transpose(1, 2)  # q, k and v of two heads each, made by one product
    with observe(to=to) as seen:
        attend(*qkv.split(2, dim=1))
        q = seen[0].weights.q
        assert torch.equal(q, qkv[:, :2])
        assert q.is_contiguous()
        assert to is not None or q.untyped_storage().nbytes() == 2 * 5 * 4 * 4


@pytest.mark.parametrize("to", [None, "disk"])
def test_a_bias_that_layers_share_is_kept_once(to):
    x, bias = torch.randn(1, 2, 5, 4), TensorBias(torch.randn(2, 5, 5), 0)
    with observe(to=to) as seen:
        for _ in range(3):
            attend(x, x, x, bias=bias)
        bias.tensor.add_(1)
        attend(x, x, x, bias=bias)
        biases = [cast(TensorBias, kept.weights.bias) for kept in seen]
        assert biases[0] is biases[1] is biases[2]
        assert torch.equal(biases[3].tensor, biases[0].tensor + 1)


def test_nothing_is_left_on_the_disk_after_the_block(temporary):
    x = torch.randn(1, 2, 5, 4)
    with observe(to="disk") as seen:
        attend(x, x, x)
        (folder,) = temporary.iterdir()
        assert len(list(folder.iterdir())) == 1
        mapped = seen[0].weights
    assert not list(temporary.iterdir())
    assert torch.equal(mapped.q, x)  # who holds on to it goes on reading it
    with pytest.raises(ProblemError, match=r"does not exist any more: observe\(to='disk'\) removes .* name a folder"):
        seen[0].weights  # noqa: B018


def test_nothing_is_left_on_the_disk_after_an_error(temporary):
    with pytest.raises(KeyError), observe(to="disk"):
        raise KeyError
    assert not list(temporary.iterdir())


@pytest.mark.exhaustive
def test_files_are_mapped_and_not_read():
    code = """
import torch
from regard import attend
from regard.inspect.observing.observe import observe
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
x = torch.zeros(1, 1, 64, 8)
with observe(to="disk") as seen:
    attend(x, x, x)  # loads all there is to load
    q, k = torch.zeros(1, 1, 2, 2**22), torch.zeros(1, 1, 4, 2**22)
    attend(q, k, k[..., :8])
    seen[0].weights
    del q, k
    before = anonymous()
    weights = seen[1].weights
    weights.k.sum()
    print(anonymous() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to ask how much memory is in use")
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 8 * 1024  # KiB; q and k are 96 MiB


def test_a_folder_with_calls_of_another_run_is_refused(tmp_path):
    x = torch.randn(1, 2, 5, 4)
    with observe(to=tmp_path):
        attend(x, x, x)
    with (
        pytest.raises(ProblemError, match=r"contains \.safetensors files already: name a new folder"),
        observe(to=tmp_path),
    ):
        pass


def test_a_number_is_no_place_to_record_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProblemError, match="to is 3: expected a device"), observe(to=3):  # pyright: ignore[reportArgumentType]
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["cuda:99", torch.device("cuda:99"), "meta"], ids=repr)
def test_a_device_that_is_not_there_is_an_error(to):
    with (
        pytest.raises(ProblemError, match=r"to='(cuda:99|meta)': torch has no such device here .*'cpu'"),
        observe(to=to),
    ):
        pass


def test_a_folder_without_a_name_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProblemError, match=r"to is '': expected .* '\.' is the working directory"), observe(to=""):
        attend(*[torch.randn(1, 2, 5, 4)] * 3)
    assert not list(tmp_path.iterdir())
    with observe(to="."):
        attend(*[torch.randn(1, 2, 5, 4)] * 3)
    assert len(read_calls(".")) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_calls_cannot_be_kept_there():
    with pytest.raises(ProblemError, match="to='cuda': torch has no such device here"), observe(to="cuda"):
        pass


def test_a_folder_without_calls_is_an_error(tmp_path):
    with pytest.raises(
        ProblemError, match=r"contains no calls: expected a folder that `observe\(..., to=folder\)` wrote"
    ):
        read_calls(tmp_path)


def test_a_mask_that_is_a_function_is_kept_in_memory_and_not_in_a_folder(tmp_path):
    x = torch.randn(1, 2, 5, 4)
    with observe(to=tmp_path) as seen:
        attend(x, x, x, mask=MaskFunction(lambda b, h, q, k: q >= k))
        attend(x, x, x, mask=Causal())
    torch.testing.assert_close(seen[0].weights.dense(), seen[1].weights.dense())
    with pytest.raises(ProblemError, match="contains a function, which cannot be written"):
        read_calls(tmp_path)


def test_without_safetensors_a_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.inspect.observing.disk.find_spec", lambda name: None)
    with pytest.raises(ProblemError, match="install safetensors"):
        Folder(tmp_path)


def test_files_are_those_of_the_published_format(tmp_path):
    from safetensors import safe_open

    x = torch.randn(1, 2, 5, 4)
    with observe(to=tmp_path, values=True), observe_calls(lambda call: None):
        attend(x, x, x, mask=TensorMask(torch.ones(5, 5, dtype=torch.bool)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000-layer-0.safetensors", "spec-0.safetensors"]
    with safe_open(tmp_path / "000000-layer-0.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["k", "lse", "out", "q", "v"]


@pytest.mark.parametrize("to", PLACES, ids=str)
def test_the_positions_of_rows_are_kept_where_no_mask_needs_them(to):
    lengths = torch.tensor([4, 9])
    q, k, v = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 8)
    calls = []
    for mask in (None, KeyLengths(lengths), TensorMask(torch.ones(2, 1, 1, 9, dtype=torch.bool))):
        with observe(to=to) as seen, observe_calls(calls.append):
            attend(q, k, v, mask=mask, offset=lengths - 1)
            assert seen[0].weights.starts == calls[-1].starts == (3, 8)
    with observe_calls(calls.append):
        attend(q, k, v, offset=3)
    assert (calls[-1].starts, calls[-1].offset) == (None, 3)


def test_a_folder_has_the_positions_of_rows(tmp_path):
    q, k = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 9, 8)
    with observe(to=tmp_path / "calls"):
        attend(q, k, k, offset=torch.tensor([3, 8]))
    assert read_calls(tmp_path / "calls")[0].weights.starts == (3, 8)
