"""`./bench others`: what the other libraries are given, with attention by regard in their place."""

import pytest
import torch

from benchmarks import others, vllm_calls
from benchmarks.others import CASES, Arguments
from regard import Causal, Documents, KeyLengths, attend
from regard.bench.case import Case
from regard.bench.rounds import QUICK
from regard.errors import ProblemError


def sequences(q, k, v, rows, *, causal=True, window=None, slopes=None, softcap=0.0):
    """Attention of each sequence alone, as the other libraries compute it."""

    def call():
        parts = zip(*(t.split(rows.queries if t is q else rows.keys) for t in (q, k, v)), strict=True)
        heads = ((part.transpose(0, 1)[None] for part in row) for row in parts)
        mask = Causal() if causal else None
        return torch.cat([attend(*row, mask=mask, softcap=softcap or None)[0].transpose(0, 1) for row in heads])

    return call


@pytest.fixture
def _in_their_place(monkeypatch):
    monkeypatch.setattr(vllm_calls, "prepare", sequences)
    monkeypatch.setattr(others.openvino_calls, "prepare", sequences)


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case("causal", 40, 40, mask=Causal, batch=2), Arguments()),
        (Case("decode", 1, 40, 8, 2, mask=Causal, batch=2), Arguments()),
        (Case("dense", 40, 40), Arguments(causal=False)),
        (Case("softcap", 40, 40, mask=Causal, softcap=5.0), Arguments(softcap=5.0)),
        (
            Case("documents", 40, 40, mask=lambda: Causal() & Documents(torch.arange(40) // 20)),
            Arguments(lengths=(20, 20), packed=True),
        ),
        (
            Case("padded", 40, 40, batch=2, mask=lambda: KeyLengths(torch.tensor([30, 40]))),
            Arguments(causal=False, lengths=(30, 40)),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
@pytest.mark.usefixtures("_in_their_place")
def test_a_case_is_the_same_to_the_other_libraries(case, more):
    line = others.measure(case, more, torch.float32, QUICK)
    assert set(line.ratios) == {"vLLM", "OpenVINO"} - ({"OpenVINO"} if not more.causal or more.softcap else set())
    assert f"| {case.name} | fp32 |" in others.rendered([line])


@pytest.mark.usefixtures("_in_their_place")
def test_nothing_is_measured_where_outputs_differ():
    with pytest.raises(ProblemError, match=r"dense, fp32: vLLM differs by"):
        others.measure(Case("dense", 40, 40), Arguments(), torch.float32, QUICK)


def test_what_differs_from_a_plain_causal_call_is_sent_to_the_others():
    for case, more in CASES:
        options = case.options(torch.float32)
        assert more.softcap == options.get("softcap", 0.0), case.name
        assert (more.window is not None) == ("Window" in repr(options.get("mask"))), case.name
        assert more.alibi == ("bias" in options), case.name
        assert more.causal == ("Causal" in repr(options.get("mask"))), case.name


@pytest.mark.parametrize(
    ("best", "library"), [("avx2", "_C_AVX2"), ("avx512vnni", "_C_AVX512"), ("avx512bf16", "_C"), ("avx1024", "_C")]
)
def test_the_library_of_vllm_is_that_for_the_best_instructions(best, library, monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(vllm_calls.native, "best_isa", lambda: best)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    vllm_calls.load(tmp_path)
    assert loaded == [tmp_path / "vllm" / f"{library}.abi3.so"]


@pytest.mark.parametrize("has_amx", [True, False])
def test_vllm_multiplies_bf16_alone_by_amx_where_there_is_amx(has_amx, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert vllm_calls.engine(torch.bfloat16) == ("amx" if has_amx else "vec")
    assert vllm_calls.engine(torch.float32) == "vec"
