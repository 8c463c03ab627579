"""The name of this kind of machine, which decides the page of its measurements."""

import pytest

from benchmarks.machine_kind import machine_kind, title

AVX512 = "avx2 avx512f"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"


def cpuinfo(vendor: str, family: int, model: int, flags: str) -> str:
    lines = {
        "processor": 0, "vendor_id": vendor, "cpu family": family, "model": model, "model name": "A CPU @ 2.6 GHz",
        "flags": f"fpu {flags} rdpid",
    }  # fmt: skip
    return "".join(f"{name}\t: {value}\n" for name, value in lines.items()) * 2


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "kind"),
    [
        ("AuthenticAMD", 25, 1, "avx2", "zen3"),
        ("AuthenticAMD", 25, 17, BF16, "zen4"),
        ("AuthenticAMD", 26, 2, BF16, "zen5"),
        ("GenuineIntel", 6, 85, AVX512, "cascade-lake"),
        ("GenuineIntel", 6, 85, f"{AVX512} avx512_vnni", "cascade-lake"),
        ("GenuineIntel", 6, 143, f"{BF16} amx_bf16 amx_tile", "sapphire-rapids"),
    ],
)
def test_a_model_whose_instructions_fit_has_its_name(vendor: str, family: int, model: int, flags: str, kind: str):
    assert machine_kind(cpuinfo(vendor, family, model, flags)) == kind


@pytest.mark.parametrize("model", [85, 106, 167, 9999])
def test_an_intel_cpu_with_amx_is_named_by_amx_whatever_another_model_says(model: int):
    kind = machine_kind(cpuinfo("GenuineIntel", 6, model, f"{BF16} amx_bf16 amx_tile amx_int8"))
    assert kind == "intel-amx"
    assert title(kind) == "Intel Xeon with AMX (Sapphire Rapids or later)"


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "kind"),
    [
        ("GenuineIntel", 6, 143, BF16, "genuineintel-6-143-avx512-bf16"),
        ("GenuineIntel", 6, 85, BF16, "genuineintel-6-85-avx512-bf16"),  # Cooper Lake
        ("AuthenticAMD", 25, 97, "avx2", "authenticamd-25-97-avx2"),
        ("GenuineIntel", 6, 1, "", "genuineintel-6-1"),
    ],
)
def test_a_model_without_its_instructions_is_a_kind_of_its_own(
    vendor: str, family: int, model: int, flags: str, kind: str
):
    assert machine_kind(cpuinfo(vendor, family, model, flags)) == kind
