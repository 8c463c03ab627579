"""`./bench gpu` without a GPU: its cases, formulas and page, and the whole way with tiny cases on a CPU."""

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_page, gpu_runner
from benchmarks.gpu import QUICK, TRIED, quick_cases
from benchmarks.gpu_cases import CASES, GpuCase, error, formula, formula_gradients, picked, shrunk
from benchmarks.gpu_clock import CpuClock
from benchmarks.gpu_libraries import LIBRARIES, Unfit, flash_attn, flashinfer, flex_mask
from benchmarks.gpu_order import measured_orders, write_order
from benchmarks.gpu_page import Chip, Record, find_chip, goals, in_words, page, share
from benchmarks.gpu_runner import Runner
from regard import attend, explain
from regard.dispatch.cuda_order import TABLE, orders
from regard.errors import ProblemError
from tests.pretended_gpu import CUDA, pretended_gpu

LONG = pytest.mark.exhaustive
CPU = torch.device("cpu")
H100 = find_chip("NVIDIA H100 80GB HBM3", "torch 2.11.0", (8e14, 3e12))


def prepared(case: GpuCase):
    """A case in float32 on the CPU, and the other arguments of `attend`."""
    return case.tensors(torch.float32, CPU), case.options(CPU)


# ---- cases ----------------------------------------------------------------------------------------------------------


def test_cases_have_names_of_their_own_and_the_quick_ones_are_of_every_section():
    assert len({(case.section, case.name) for case in CASES}) == len(CASES)
    assert [case.section for case in quick_cases()[:3]] == ["prefill", "training", "decode"]
    assert {case.keys for case in CASES} >= {2048 << n for n in range(7)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.section}: {case.name}")
def test_the_formula_the_pairs_and_the_mask_of_a_case_are_those_of_regard(case: GpuCase):
    case = shrunk(case)
    tensors, options = prepared(case)
    assert explain(*tensors, **options).schedule.pairs == case.pairs()
    if case.causal:
        q = torch.arange(case.keys - case.queries, case.keys)[:, None]
        kept = case.keep(q, torch.arange(case.keys)).expand(case.queries, case.keys)
        assert int(kept.sum()) * case.batch * case.heads == case.pairs()
    out = attend(*tensors, **options)
    assert error(picked(case, out), formula(case, tensors, options)) < 1e-6
    if case.backward:
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, tensors, dout)
        for grad, truth in zip(found, formula_gradients(case, tensors, dout, options), strict=True):
            assert error(grad[:1, : truth.shape[1]], truth) < 1e-5


def test_an_error_with_nan_is_infinite():
    assert error(torch.tensor([1.0, torch.nan]), torch.ones(2)) == torch.inf


# ---- the runner -----------------------------------------------------------------------------------------------------


def records_of(case: GpuCase, *libraries: str, **more: object) -> dict[str, Record]:
    runner = Runner(CpuClock(), TRIED, libraries, **more)
    return {record.library: record for record in runner.run(case)}


DECODE = GpuCase("decode", "tiny", 1, 64, 4, 2, 16, 2)


def test_every_library_is_timed_in_every_round():
    found = records_of(replace(DECODE, section="prefill", queries=64), "regard", "flash", "math", "FlashInfer")
    assert found["FlashInfer"].note == "flashinfer is not installed"
    for name in ("regard", "flash", "math"):
        assert found[name].rounds == 2
        assert 0 < (found[name].fastest or 0) <= (found[name].seconds or 0)
        assert (found[name].error or 1) < 1e-5
    assert found["regard"].flops == 4 * 2 * 4 * (64 * 65 / 2) * 16
    assert found["regard"].backend == explain(*prepared(DECODE)[0], **prepared(DECODE)[1]).backend


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("causal, 2,048, d 64", marks=LONG),
        pytest.param("ALiBi, 16,384", marks=LONG),
        pytest.param("causal, sinks learned", marks=LONG),
        "int8, 64",
    ],
)
def test_a_case_has_each_tensor_where_a_gpu_needs_it(name: str):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")

    class Clock(CpuClock):
        device = CUDA

    case = shrunk(next(case for case in CASES if case.name.startswith(name)))
    with pretended_gpu():
        found = {record.library: record for record in Runner(Clock(), TRIED, ("regard", "math")).run(case)}
    assert found["regard"].seconds is not None, found
    assert found["regard"].backend == "triton"
    assert found["regard"].kind in ("causal", "other", "decode-stored")
    assert found["math"].seconds is not None or found["math"].note.startswith("no softcap"), found


def test_what_differs_is_not_timed(monkeypatch):
    monkeypatch.setitem(LIBRARIES, "wrong", lambda *_: lambda q, k, v: attend(q, k, v) * 1.1)
    found = records_of(DECODE, "regard", "wrong")
    assert found["wrong"].note == "differs from the definition by 0.1"
    assert found["wrong"].seconds is None
    assert found["regard"].seconds is not None


def test_gradients_are_compared_as_well(monkeypatch):
    def make(*_):
        return lambda q, k, v: attend(q, k, v.detach()) + 0 * v.sum()

    monkeypatch.setitem(LIBRARIES, "wrong", make)
    case = GpuCase("training", "tiny", 40, 40, 2, 2, 16, causal=False, backward=True)
    assert records_of(case, "regard", "wrong")["wrong"].note == "differs from the definition by 1"


def test_a_library_that_fails_does_not_stop_the_others(monkeypatch):
    def fail(*_):
        raise ValueError("no\nsuch call")

    monkeypatch.setitem(LIBRARIES, "broken", fail)
    found = records_of(DECODE, "broken", "regard")
    assert found["broken"].note == "ValueError: no"
    assert found["regard"].seconds is not None


def test_a_fault_of_the_gpu_ends_the_run(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setitem(LIBRARIES, "broken", fail)
    with pytest.raises(ProblemError, match="after broken in tiny: RuntimeError: CUDA error: an illegal memory"):
        records_of(DECODE, "broken")


def test_calls_without_time_left_are_listed():
    assert records_of(DECODE, "regard", until=0.0)["regard"].note == "no time left"


def test_without_a_gpu_one_line_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "regard: error: torch sees no GPU here: ./bench gpu --device cpu tries the way with tiny cases."
    ]


@pytest.mark.exhaustive
def test_the_whole_way_on_a_cpu(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'regard[gpu]'")
    monkeypatch.setattr(
        gpu_runner, "LIBRARIES", {name: LIBRARIES[name] for name in ("regard", "regard by triton", "math")}
    )
    file = tmp_path / "found.json"
    assert gpu.main(["--device", "cpu", "--quick", "--cases", "64 x 8,192", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["stopped"] == ""
    ran = {(record["case"], record["library"]) for record in content["records"] if record["seconds"]}
    assert ("fp8, 64 x 8,192", "regard by triton") in ran
    assert "## Decoding" in capsys.readouterr().out


# ---- other packages, in whose place regard computes -----------------------------------------------------------------


def by_head(t):
    return t.transpose(1, 2)


def fake_flash_attn():
    def flash_attn_func(q, k, v, *, causal, window_size, softcap=0.0, alibi_slopes=None):
        assert alibi_slopes is None
        case = GpuCase("", "", q.shape[1], k.shape[1], window=window_size[0] + 1 if window_size[0] >= 0 else None)
        return by_head(attend(*map(by_head, (q, k, v)), mask=case.mask(), softcap=softcap or None))

    def flash_attn_varlen_func(q, k, v, starts, _, longest, __, **more):
        assert starts.dtype == torch.int32
        assert longest == max(starts.diff())
        cut = [t.tensor_split(starts[1:-1].tolist()) for t in (q, k, v)]
        return torch.cat([flash_attn_func(*(t[None] for t in own), **more)[0] for own in zip(*cut, strict=True)])

    def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, block_table=None, **more):
        if block_table is not None:
            k, v = (t[block_table.long()].flatten(1, 2) for t in (k, v))
        assert cache_seqlens.tolist() == [k.shape[1]] * len(q)
        return flash_attn_func(q, k, v, **more)

    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    return types.SimpleNamespace(**{function.__name__: function for function in functions})


class FakeDecoding:
    def __init__(self, workspace, layout, *, use_tensor_cores):
        assert layout == "NHD"
        assert use_tensor_cores == (workspace.device != CPU or use_tensor_cores)

    def plan(self, starts, pages, last, heads, kv_heads, dim, page, **more):
        self.table = pages.view(len(last), -1)
        assert starts.tolist() == [i * self.table.shape[1] for i in range(len(last) + 1)]
        assert set(more) == {"window_left", "q_data_type", "kv_data_type"}

    def run(self, q, cache):
        k, v = (by_head(t[self.table.long()].flatten(1, 2)) for t in cache)
        return attend(q[:, :, None], k, v)[:, :, 0]


def fake_flashinfer():
    def single_prefill_with_kv_cache(q, k, v, *, causal, window_left):
        case = GpuCase("", "", len(q), len(k), causal=causal, window=window_left + 1 if window_left >= 0 else None)
        return attend(*(by_head(t[None]) for t in (q, k, v)), mask=case.mask())[0].transpose(0, 1)

    return types.SimpleNamespace(
        single_prefill_with_kv_cache=single_prefill_with_kv_cache, BatchDecodeWithPagedKVCacheWrapper=FakeDecoding
    )


SIZES = {
    "causal": GpuCase("prefill", "", 64, 64, 4, 2, 16, 2),
    "window": GpuCase("prefill", "", 64, 64, 4, 2, 16, 2, window=20),
    "softcap": GpuCase("prefill", "", 64, 64, 4, 2, 16, 2, softcap=3.0),
    "documents": GpuCase("prefill", "", 96, 96, 4, 2, 16, document=32),
    "decode": GpuCase("decode", "", 1, 512, 4, 2, 16, 2),
    "decode, pages": GpuCase("decode", "", 1, 512, 4, 2, 16, 2, page=16),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("package", "make"), [("flash_attn", flash_attn), ("flashinfer", flashinfer)])
def test_other_packages_get_what_regard_gets(package: str, make, name: str, monkeypatch):
    monkeypatch.setitem(sys.modules, package, {"flash_attn": fake_flash_attn, "flashinfer": fake_flashinfer}[package]())
    case = SIZES[name]
    tensors, options = prepared(case)
    try:
        call = make(case, tensors, options)
    except Unfit:
        assert package == "flashinfer"
        assert name in ("documents", "softcap")
        return
    assert error(picked(case, call(*tensors)), formula(case, tensors, options)) < 1e-5


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "decode"])
def test_flex_and_torch_get_what_regard_gets(name: str):
    case = SIZES[name]
    tensors, options = prepared(case)
    truth = formula(case, tensors, options)
    if name != "softcap":
        out = LIBRARIES["math"](case, tensors, options)(*tensors)
        assert error(picked(case, out), truth) < 1e-5
    block_mask = flex_mask(case, CPU)
    assert (block_mask is None) == (name == "decode")


def test_a_backend_of_torch_without_a_kernel_is_unfit():
    if torch.cuda.is_available():
        pytest.skip("a GPU has these kernels")
    case = SIZES["causal"]
    with pytest.raises(Unfit, match="no kernel"):
        LIBRARIES["cuDNN"](case, *prepared(case))


# ---- the page -------------------------------------------------------------------------------------------------------


def record(case: str, library: str, seconds: float | None, section: str = "prefill", **more) -> Record:
    values = {"flops": 5e12, "nbytes": 1e9, "backend": library.partition(" by ")[2] or "triton", **more}
    return Record(section, case, library, seconds=seconds, fastest=seconds, rounds=5, **values)


RECORDS = [
    record("causal, 16,384, d 128", "regard", 0.010),
    record("causal, 16,384, d 128", "cuDNN", 0.0098),
    record("causal, 16,384, d 128", "FlexAttention", 0.015),
    record("window 4,096, 16,384, d 128", "regard", 0.005, flops=2e12),
    record("causal, 65,536, d 128", "regard", None, note="not enough memory"),
    record("int8, 64 x 8,192", "regard", 0.0004, "decode"),
]


def test_the_page_has_speeds_shares_and_ratios():
    text = page(RECORDS, H100)
    assert "# Attention on NVIDIA H100 80GB HBM3" in text
    assert "Limits: 989 TFLOP/s and 3,352 GB/s; the largest product reached 800 TFLOP/s here" in text
    assert "| causal, 16,384, d 128 | triton | 10.0 ms | 500 | 51 % | 510 | 333 | 0.98x |" in text
    assert "| causal, 65,536, d 128 | triton | no: not enough memory |" in text
    assert "| int8, 64 x 8,192 | triton | 400 us | 2,500 | 75 % |" in text


def test_goals_are_measured_or_empty():
    found = {goal.about: goal for goal in goals(RECORDS, H100)}
    beside = found["causal prefill beside the fastest of cuDNN, flash and FlexAttention"]
    assert beside.found == pytest.approx(0.98)
    assert beside.cells()[3] == "yes"
    assert found["causal, 16,384, d 128, the fastest backend: TFLOP/s"].found == pytest.approx(500)
    assert found["causal, 16,384, d 128, the fastest backend: TFLOP/s"].cells()[3] == "**no**"
    masks = found["slowest mask or bias at 16,384: speed per pair, by that of causal"]
    assert masks.found == pytest.approx(400 / 500)
    assert found["decoding int8: share of the bandwidth"].found == pytest.approx(2500 / 3352, rel=1e-3)
    assert found["decoding fp8: share of the bandwidth"].cells()[2:] == ("", "")


def test_a_chip_that_is_not_known_is_measured_by_what_it_reached():
    chip = find_chip("NVIDIA X1", "", (8e14, 3e12))
    assert (chip.name, chip.flops, chip.bandwidth) == ("nvidia-x1", 8e14, 3e12)
    assert share(record("", "regard", 0.01), chip) == pytest.approx(5e14 / 8e14)
    assert share(record("", "regard", 0.01), Chip("cpu", "", "", None, None, None)) is None
    assert in_words(record("", "regard", None, note="why")) == "regard (triton): why"


def test_a_page_is_written_where_it_is_asked_for(tmp_path, monkeypatch):
    class Fake(CpuClock):
        def chip(self) -> Chip:
            return H100

    monkeypatch.setattr(gpu, "CudaClock", Fake)
    monkeypatch.setattr(gpu, "CASES", [DECODE])
    monkeypatch.setattr(gpu, "FULL", QUICK)
    monkeypatch.setattr(gpu, "time_schedules", lambda *_: [record("window", "regard", 0.001, "schedule")])
    monkeypatch.setattr(Runner, "run", lambda self, case: self.records.extend(RECORDS) or RECORDS)
    assert gpu.main(["--write", str(tmp_path)]) == 0
    assert (tmp_path / gpu_page.FOLDER / "h100.md").read_text() == page(
        [*RECORDS, record("window", "regard", 0.001, "schedule")], H100
    )


# ---- the order of backends ------------------------------------------------------------------------------------------


KINDS = [
    record("a", "regard", 0.010, kind="causal"),
    record("a", "regard by flex", 0.008, kind="causal"),
    record("b", "regard", 0.010, kind="causal"),
    record("b", "regard by flex", 0.010, kind="causal"),
    record("c", "regard", 0.001, kind="causal"),  # flex was not measured there
    record("a", "cuDNN", 0.001, kind="causal"),
    record("d", "regard", 0.001, kind="decode"),
]


def test_the_measured_order_takes_the_places_of_the_measured_backends():
    (row,) = measured_orders(KINDS, H100)
    assert row.kind == "causal"
    assert row.backends == ("sdpa", "flex", "triton", "reference")
    assert row.measured.startswith("times of the fastest: flex 1.00, triton 1.12; NVIDIA H100 80GB HBM3, 2 cases, ")


def test_the_table_is_written_with_what_was_measured(tmp_path, monkeypatch):
    file = tmp_path / "cuda_order.toml"
    shutil.copy(TABLE, file)
    (line,) = write_order(KINDS, H100, file)
    assert line.startswith("order for causal: sdpa, flex, triton, reference (times of the fastest")
    monkeypatch.setattr("regard.dispatch.cuda_order.TABLE", file)
    orders.cache_clear()
    try:
        assert orders()["causal"].backends == ("sdpa", "flex", "triton", "reference")
        assert orders()["other"].measured == ""
    finally:
        monkeypatch.undo()
        orders.cache_clear()
    assert write_order([], H100, file) == ["no kind of call was measured by two backends: the order stays as it is"]
