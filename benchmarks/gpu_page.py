"""What `./bench gpu` measured: records, the chip with its limits, goals, and the page of a chip."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.gpu_cases import SECTIONS
from benchmarks.report import table
from regard.cli.durations import call_duration
from regard.cost.machines import find_machine

FOLDER = "performance/gpu"

OURS = "regard"
TORCH = ("cuDNN", "flash", "efficient", "math")
OTHERS = (*TORCH, "FlexAttention", "flash-attn", "FlashInfer")

ABOUT = """\
bf16, random tensors. Each time is the median over rounds in which every library has its turn, taken by CUDA events;
outputs and gradients were compared with the definition first. Speeds count kept pairs only: 4 * pairs * dim FLOP
forward, 3.5 times as many with the backward pass. cuDNN, flash, efficient and math are the backends of torch's
`scaled_dot_product_attention`; they get masks other than the causal one as tensors, up to 16,384 tokens. FlexAttention
is compiled for each case. An empty cell: the library has no such call, or failed (the records say why)."""


@dataclass(frozen=True)
class Record:
    """One library in one case.

    Attributes:
        section, case: as in `GpuCase`.
        library: as in `LIBRARIES`.
        backend: regard's, where it is regard.
        kind: of the call, as in `regard.dispatch.cuda_order`.
        seconds, fastest, rounds: median and least time of a call, and how many rounds there were; None if not measured.
        flops, nbytes: FLOPs over kept pairs, and bytes that must be moved at least as regard stores them.
        error: relative error of the output, and of gradients where they are measured.
        note: why it was not measured.
    """

    section: str
    case: str
    library: str
    backend: str
    kind: str = ""
    seconds: float | None = None
    fastest: float | None = None
    rounds: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    error: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Chip:
    """The chip of the measurements.

    Attributes:
        name: fit for a file, of machines.toml where it is known: "h100".
        title: as its driver says.
        versions: of torch, CUDA and Triton.
        flops, bandwidth: published limits in bf16 FLOP/s and bytes/s; those measured where none are known.
        measured: (FLOP/s of the largest product, bytes/s of a large copy) of this run; None on a processor.
    """

    name: str
    title: str
    versions: str
    flops: float | None
    bandwidth: float | None
    measured: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


MACHINES = {
    r"H100.*PCIe": "h100-pcie", r"H100": "h100", r"H200": "h200", r"B200": "b200", r"A100.*40GB": "a100-40gb",
    r"A100": "a100", r"V100": "v100", r"L40S": "l40s", r"L4\b": "l4", r"RTX 4090": "rtx-4090", r"MI300X": "mi300x",
    r"MI325X": "mi325x", r"MI250X": "mi250x",
}  # fmt: skip
"""The chips of machines.toml by the names that drivers give them; the first that fits counts."""


def find_chip(title: str, versions: str, measured: tuple[float, float] | None) -> Chip:
    """The chip that a driver calls so.

    >>> find_chip("NVIDIA H100 80GB HBM3", "", (8e14, 3e12)).name
    'h100'
    >>> find_chip("NVIDIA X1 Ultra", "", (8e14, 3e12)).name
    'nvidia-x1-ultra'
    """
    known = next((name for pattern, name in MACHINES.items() if re.search(pattern, title)), None)
    if known is not None:
        machine = find_machine(known)
        return Chip(known, title, versions, machine.peak("bfloat16"), machine.bandwidth, measured)
    flops, bandwidth = measured or (None, None)
    return Chip(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"), title, versions, flops, bandwidth, measured)


# ---- cells ----------------------------------------------------------------------------------------------------------


def in_words(record: Record) -> str:
    """A record in one line.

    >>> in_words(Record("prefill", "causal", "cuDNN", "", seconds=0.01, flops=5e12, nbytes=1e9))
    'cuDNN 10.0 ms, 500 TFLOP/s, 100 GB/s'
    """
    name = f"{record.library} ({record.backend})" if record.library == OURS and record.backend else record.library
    if record.seconds is None:
        return f"{name}: {record.note}"
    rates = f", {record.flops / record.seconds / 1e12:,.3g} TFLOP/s" if record.flops else ""
    rates += f", {record.nbytes / record.seconds / 1e9:,.0f} GB/s" if record.nbytes else ""
    return f"{name} {call_duration(record.seconds)}{rates}"


def _speed(record: Record | None) -> str:
    if record is None or record.seconds is None:
        return ""
    if record.section == "decode":
        return f"{record.nbytes / record.seconds / 1e9:,.0f}"
    return f"{record.flops / record.seconds / 1e12:,.0f}"


def share(record: Record, chip: Chip) -> float | None:
    """The share of the chip's bandwidth for decoding, else of its peak."""
    limit = chip.bandwidth if record.section == "decode" else chip.flops
    if record.seconds is None or not limit:
        return None
    return (record.nbytes if record.section == "decode" else record.flops) / record.seconds / limit


def by_case(records: Sequence[Record], section: str) -> dict[str, dict[str, Record]]:
    """The records of a section: for each case those of the libraries."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.section == section:
            found.setdefault(record.case, {})[record.library] = record
    return found


def best(own: dict[str, Record], libraries: Sequence[str]) -> Record | None:
    """The fastest of these libraries in a case."""
    found = [own[name] for name in libraries if name in own and own[name].seconds is not None]
    return min(found, key=lambda record: record.seconds or 0.0, default=None)


def ratio(own: dict[str, Record], others: Sequence[str]) -> float | None:
    """Time of the fastest of the others by regard's; above 1 regard is faster."""
    ours, theirs = best(own, [OURS]), best(own, others)
    if ours is None or theirs is None or not ours.seconds or not theirs.seconds:
        return None
    return theirs.seconds / ours.seconds


def _row(case: str, own: dict[str, Record], columns: Sequence[str], chip: Chip) -> list[str]:
    ours = own.get(OURS)
    part = None if ours is None else share(ours, chip)
    times = ratio(own, OTHERS)
    return [
        case,
        "" if ours is None else ours.backend,
        "" if ours is None else call_duration(ours.seconds) if ours.seconds is not None else f"no: {ours.note}",
        _speed(ours),
        "" if part is None else f"{100 * part:.0f} %",
        *(_speed(own.get(name)) for name in columns),
        "" if times is None else f"{times:.2f}x",
    ]


# ---- goals ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A goal: what it is about, the least value, and the value; None where it was not measured."""

    about: str
    least: float
    found: float | None
    percent: bool = True

    def cells(self) -> tuple[str, str, str, str]:
        """Its row."""

        def text(x: float) -> str:
            return f"{100 * x:.0f} %" if self.percent else f"{x:,.3g}"

        reached = "" if self.found is None else "yes" if self.found >= self.least else "**no**"
        return self.about, text(self.least), "" if self.found is None else text(self.found), reached


def goals(records: Sequence[Record], chip: Chip) -> list[Goal]:
    """The goals of the GPU kernels, with what was found."""
    prefill, decode = by_case(records, "prefill"), by_case(records, "decode")
    plain = [own for name, own in prefill.items() if re.fullmatch(r"causal, [\d,]+, d \d+", name)]
    rate = {name: _rate(own.get("regard by triton") or own.get(OURS)) for name, own in prefill.items()}
    causal = rate.get("causal, 16,384, d 128")
    masks = [x for name, x in rate.items() if x and "16,384, d 128" in name and not name.startswith("causal, 16")]
    long, window = rate.get("causal, 65,536, d 128"), rate.get("window 4,096, 131,072, d 128")
    best_16k = _rate(best(prefill.get("causal, 16,384, d 128", {}), [OURS, *(f"{OURS} by {b}" for b in BACKENDS)]))
    found = [
        Goal("causal prefill beside the fastest of cuDNN, flash and FlexAttention", 0.95,
             _least(ratio(own, ("cuDNN", "flash", "FlexAttention")) for own in plain)),
        Goal("window of 4,096 in 131,072: speed per pair, by that of causal 65,536", 0.9, _divided(window, long)),
        Goal("slowest mask or bias at 16,384: speed per pair, by that of causal", 1 / 1.25,
             _divided(_least(masks), causal)),
        Goal("slowest case of prefill beside FlexAttention", 1.0,
             _least(ratio(own, ("FlexAttention",)) for own in prefill.values())),
        Goal("decoding bf16 in pages: share of the bandwidth", 0.85, _share_of(decode, "bf16, pages of 16, 64", chip)),
        Goal("decoding int8: share of the bandwidth", 0.75, _share_of(decode, "int8, 64", chip)),
        Goal("decoding fp8: share of the bandwidth", 0.75, _share_of(decode, "fp8, 64", chip)),
        Goal("schedule of 65,536 tokens: times as fast as FlexAttention's", 100,
             _least(ratio(own, ("FlexAttention",)) for own in by_case(records, "schedule").values()), percent=False),
    ]  # fmt: skip
    if chip.name in ("h100", "h200"):
        found[1:1] = [
            Goal("causal, 16,384, d 128, the fastest backend: TFLOP/s", 550, best_16k and best_16k / 1e12, False),
            Goal("the same by our own kernel: TFLOP/s", 0.75 * 550, causal and causal / 1e12, False),
        ]
    return found


BACKENDS = ("triton", "sdpa", "flex")


def _rate(record: Record | None) -> float | None:
    return None if record is None or not record.seconds else record.flops / record.seconds


def _least(values: "Iterator[float | None] | Sequence[float]") -> float | None:
    return min((x for x in values if x is not None), default=None)


def _divided(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _share_of(decode: dict[str, dict[str, Record]], name: str, chip: Chip) -> float | None:
    found = [own[OURS] for case, own in decode.items() if case.startswith(name) and OURS in own]
    return share(found[0], chip) if found else None


# ---- the page -------------------------------------------------------------------------------------------------------


def page(records: Sequence[Record], chip: Chip) -> str:
    """The page of a chip, docs/performance/gpu/CHIP.md."""
    day = datetime.now(UTC).date()
    parts = [
        f"# Attention on {chip.title}",
        f"Measured by `./bench gpu` on {chip.title}, {chip.versions}, {day}.{_limits(chip)}",
        ABOUT,
        "## Goals",
        table(("goal", "least", "found", "reached"), [goal.cells() for goal in goals(records, chip)]),
    ]
    for section, title in SECTIONS.items():
        cases = by_case(records, section)
        if not cases:
            continue
        columns = [name for name in (*(f"{OURS} by {b}" for b in BACKENDS), *OTHERS) if _is_measured(cases, name)]
        unit = "GB/s" if section == "decode" else "TFLOP/s"
        head = ("case", "backend", "time", unit, "of limit", *columns, "fastest other / regard")
        parts += [
            f"## {title}",
            f"Speeds in {unit}.",
            table(head, [_row(*each, columns, chip) for each in cases.items()]),
        ]
    schedules = by_case(records, "schedule")
    rows = [(case, *(_time(own.get(name)) for name in (OURS, "FlexAttention"))) for case, own in schedules.items()]
    if rows:
        parts += [
            "## Schedules",
            "Time to make them: regard's on the processor, FlexAttention's `BlockMask` on the GPU.",
        ]
        parts += [table(("mask", OURS, "FlexAttention"), rows)]
    return "\n\n".join(parts) + "\n"


def _is_measured(cases: dict[str, dict[str, Record]], library: str) -> bool:
    return any(library in own and own[library].seconds is not None for own in cases.values())


def _time(record: Record | None) -> str:
    return "" if record is None else call_duration(record.seconds) if record.seconds is not None else record.note


def _limits(chip: Chip) -> str:
    if chip.measured is None or chip.flops is None or chip.bandwidth is None:
        return ""
    flops, rate = chip.measured
    return (
        f" Limits: {chip.flops / 1e12:,.0f} TFLOP/s and {chip.bandwidth / 1e9:,.0f} GB/s; the largest product reached "
        f"{flops / 1e12:,.0f} TFLOP/s here, and a large copy {rate / 1e9:,.0f} GB/s."
    )
