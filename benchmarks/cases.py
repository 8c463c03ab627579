"""The project's own cases: what is measured, beside what, and what must be reached.

The goals are for every machine where they are shares of its limit, costs, microseconds or mebibytes; ratios to torch
were set on 2 cores of AMD Zen 5, and say less elsewhere.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard import (
    Alibi,
    Bias,
    Causal,
    Documents,
    Global,
    KeyLengths,
    Mask,
    Prefix,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
)
from regard.bench.case import Case
from regard.bench.limits import STREAMED

F32, BF16 = torch.float32, torch.bfloat16
BESIDE_LIMIT = ("time", "speed", "limit", "of limit", "torch", "torch / regard")


@dataclass(frozen=True)
class Goal:
    """What must be reached; None asks for nothing.

    Attributes:
        share: of the machine's limit, at least.
        ratio: of torch's time to ours, at least.
        cost: of a kept pair, by that of the case beside, at most.
        microseconds: of one call, at most.
        mebibytes: of memory beyond q, k, v and out, at most.
    """

    share: float | None = None
    ratio: float | None = None
    cost: float | None = None
    microseconds: float | None = None
    mebibytes: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: a case, the one beside it if its cost is compared, and the goals by type."""

    case: Case
    goals: dict[torch.dtype, Goal] = field(default_factory=dict)
    beside: Case | None = None
    dtypes: tuple[torch.dtype, ...] = (F32, BF16)

    @property
    def name(self) -> str:
        """The name of its case."""
        return self.case.name

    def limited(self) -> "Row":
        """The row where both have older instructions than AVX-512: to be ahead of torch is the goal there."""
        goals = {
            dtype: goal if goal.ratio is None else replace(goal, ratio=min(goal.ratio, 1.0))
            for dtype, goal in self.goals.items()
        }
        return replace(self, goals=goals)


@dataclass(frozen=True)
class Section:
    """Rows that belong together, what a reader must know of them, and the columns of their table (see report.py)."""

    title: str
    about: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ()


def _goals(f32: Goal, bf16: Goal) -> dict[torch.dtype, Goal]:
    return {F32: f32, BF16: bf16}


def _square(name: str, tokens: int, **more: object) -> Case:
    return Case(name, tokens, tokens, **more)  # pyright: ignore[reportArgumentType]


# ---- masks ----------------------------------------------------------------------------------------------------------


def _t5(_: torch.dtype) -> Bias:
    return T5Bias(torch.randn(32, 8), bidirectional=False)


def _dense_bias(dtype: torch.dtype) -> Bias:
    return TensorBias(torch.randn(1, 8, 2048, 2048).to(dtype))


def _packed() -> Mask:
    return Causal() & Documents(torch.arange(4096) // 512)


_LENGTHS = torch.arange(256, 2049, 256)


def _padded() -> Mask:
    return KeyLengths(_LENGTHS)


def _ragged() -> Mask:
    """Padding is a document of its own, whose keys are hidden: padded queries see nothing, as in a varlen kernel."""
    return KeyLengths(_LENGTHS) & Documents((torch.arange(2048) >= _LENGTHS[:, None]).long())


def _band(tokens: int) -> Tensor:
    """A mask of bools as users have them: a band, and a tenth of the blocks of 128."""
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)
    blocks = torch.rand(tokens // 128, tokens // 128) < 0.1
    return (k <= q) & ((q - k < 512) | blocks.repeat_interleave(128, 0).repeat_interleave(128, 1))


# ---- cases ----------------------------------------------------------------------------------------------------------

_LARGE = _goals(Goal(share=0.85, ratio=2.3), Goal(share=0.75, ratio=4.0))
_2048 = _goals(Goal(share=0.76, ratio=2.3), Goal(share=0.70, ratio=4.0))
_CAUSAL = _square("causal, 2,048, d 64", 2048, mask=Causal)
_GROUPED = _square("causal, 16/8 heads, 2,048, d 128", 2048, heads=16, dim=128, mask=Causal)
_MILD = _goals(Goal(cost=1.10), Goal(cost=1.12))

PREFILL = Section(
    "Prompts",
    "All queries at once, 8 heads unless two counts are named (query heads / key heads).",
    (
        *(
            Row(_square(f"{name}, {n:,}, d {d}", n, dim=d, mask=mask), _LARGE if n > 2048 else _2048)
            for name, mask in (("dense", None), ("causal", Causal))
            for n in (2048, 4096, 8192)
            for d in (64, 128)
        ),
        Row(
            _square("causal, 32/8 heads, 2,048, d 128", 2048, heads=32, dim=128, mask=Causal),
            _goals(Goal(ratio=2.8), Goal(ratio=5.0)),
        ),
        *(
            Row(_square(f"causal, window 512, {n:,}, d 64", n, mask=lambda: Causal() & Window(512)), goals)
            for n, goals in (
                (4096, _goals(Goal(ratio=15), Goal(ratio=30))),
                (16384, _goals(Goal(ratio=50), Goal(ratio=100))),
            )
        ),
        Row(
            _square(
                "causal, window 512 + 4 sinks, 4,096, d 64", 4096, mask=lambda: Causal() & (Window(512) | Prefix(4))
            )
        ),
    ),
    BESIDE_LIMIT,
)

WORDS = Section(
    "Cost of masks and biases",
    "`cost` is the time for each kept pair, by that of a causal call of the same length and heads in the same rounds;"
    " for packed documents as a batch, by that of 8 causal rows of 512.",
    (
        Row(_square("ALiBi, causal, 2,048, d 64", 2048, mask=Causal, bias=lambda _: Alibi(8)), _MILD, _CAUSAL),
        Row(_square("T5, causal, 2,048, d 64", 2048, mask=Causal, bias=_t5), _MILD, _CAUSAL),
        Row(
            _square("8 packed documents of 512, causal, 4,096, d 64", 4096, mask=_packed),
            _MILD,
            _square("causal, 4,096, d 64", 4096, mask=Causal),
        ),
        Row(
            _square("the same, by a batch of 8 x 512", 4096, mask=_packed),
            {},
            _square("causal, 8 x 512, d 64", 512, batch=8, mask=Causal),
        ),
        Row(_square("8 rows padded to 2,048, d 64", 2048, batch=8, mask=_padded), _MILD, _CAUSAL),
        Row(_square("8 rows padded to 2,048, no padded query, d 64", 2048, batch=8, mask=_ragged), _MILD, _CAUSAL),
        Row(
            replace(_GROUPED, name="softcap, causal, 16/8 heads, 2,048, d 128", softcap=50.0),
            _goals(Goal(cost=1.15), Goal(cost=1.25)),
            _GROUPED,
        ),
        Row(
            _square("a bias for every pair and head, causal, 2,048, d 64", 2048, mask=Causal, bias=_dense_bias),
            _goals(Goal(cost=1.4), Goal(cost=1.6)),
            _CAUSAL,
        ),
    ),
    ("time", "speed", "of limit", "cost", "torch", "torch / regard"),
)

TRAINING = Section(
    "Forward and backward",
    "The gradients of q, k and v as well; FLOPs of the backward pass count 2.5 times those of the forward pass.",
    (
        Row(
            _square("forward + backward, causal, 2,048, d 64", 2048, mask=Causal, backward=True),
            _goals(Goal(ratio=2.8), Goal(ratio=3.5)),
        ),
        Row(
            _square(
                "forward + backward, window 512, 4,096, d 64", 4096, mask=lambda: Causal() & Window(512), backward=True
            )
        ),
    ),
    BESIDE_LIMIT,
)


def _decode(heads: int, kv_heads: int, batch: int = 1, queries: int = 1, keys: int = 8192, dim: int = 128) -> Case:
    what = "decode" if queries == 1 else f"{queries} queries"
    rows = f", {batch} rows" if batch > 1 else ""
    return Case(
        f"{what}, {heads}/{kv_heads} heads, {keys:,} keys, d {dim}{rows}",
        queries, keys, heads, kv_heads, dim, batch, mask=Causal, cold=True,
    )  # fmt: skip


def _from_cache(case: Case) -> Case:
    return replace(case, name=case.name.replace("decode,", "decode from a KVCache,"), cached=True)


_STREAMED = _goals(Goal(share=0.80), Goal(share=0.75))

DECODE = Section(
    "Decoding",
    "One new token, or 8, against keys that come from memory, as they do when other layers were read in "
    f"between. A limit in GB/s is one read of {STREAMED >> 20} MiB in the same round. A `KVCache` asks Linux for "
    "pages of 2 MiB, "
    "which a core reads faster than the usual ones of 4 KiB, as the tensors of the other cases and the limit are on.",
    (
        Row(_decode(32, 8), _STREAMED),
        Row(_decode(32, 32), _STREAMED),
        Row(_from_cache(_decode(32, 8)), _STREAMED),
        Row(_from_cache(_decode(32, 32)), _STREAMED),
        Row(_decode(28, 4)),
        Row(_decode(64, 8)),
        Row(_decode(32, 1)),
        Row(_decode(8, 4, dim=256)),
        Row(_decode(32, 8, batch=8)),
        Row(_decode(32, 8, queries=8)),
        Row(_decode(32, 8, batch=32, keys=300)),
        Row(_decode(8, 8, batch=64, keys=128, dim=64)),
    ),
    BESIDE_LIMIT,
)

SMALL = Section(
    "Small calls",
    "On one thread, through `attend`: finding the plan of an earlier call and launching are included. The first call "
    "of its kind also checks its arguments and makes the plan, which the next table shows.",
    tuple(
        Row(
            _square(f"causal, {n}, d 64, 1 thread", n, mask=Causal, threads=1),
            _goals(Goal(ratio=3.0 if n == 256 else 1.0), Goal(ratio=5.0 if n == 256 else 1.0)),
        )
        for n in (64, 128, 256, 512)
    ),
    ("time", "speed", "of limit", "torch", "torch / regard"),
)

_ONE = [
    Case(f"one call, {name}", 1, 64, mask=mask, threads=1)
    for name, mask in (("no mask", None), ("causal", Causal), ("window 512", lambda: Causal() & Window(512)))
]

FIXED = Section(
    "Cost of a call before it computes",
    "One query of 8 heads against 64 keys on one thread, which is next to nothing to compute. The plan is known from "
    "an earlier call of the same sizes, types and masks, or it is new: made once for all layers of a model, and in "
    "decoding not again for one key more. `cost` is the time with a new plan by that with a known one, in the same "
    "rounds. The schedule in the plan of a long prompt takes longer ([schedules](../schedules.md)).",
    (
        *(Row(case, {F32: Goal(microseconds=12)}, dtypes=(F32,)) for case in _ONE),
        *(Row(replace(case, name=f"{case.name}, a new plan", new_plan=True), {}, case, (F32,)) for case in _ONE),
    ),
    ("time", "cost", "torch", "torch / regard"),
)

SECTIONS = (PREFILL, WORDS, TRAINING, DECODE, SMALL, FIXED)

_SMALL_ENOUGH = {F32: Goal(mebibytes=64)}

MEMORY = Section(
    "Memory",
    "The most that one call holds beyond q, k, v and its output, at 16,384 tokens: measured in a process of its own.",
    tuple(
        Row(_square(f"{name}, 16,384, d 64", 16384, mask=mask, bias=bias), _SMALL_ENOUGH, dtypes=(F32,))
        for name, mask, bias in (
            ("dense", None, None),
            ("causal", Causal, None),
            ("window 512 + 4 sinks", lambda: Causal() & (Window(512) | Prefix(4)), None),
            ("32 packed documents", lambda: Causal() & Documents(torch.arange(16384) // 512), None),
            ("64 global tokens", lambda: Window(256, 256) | Global(range(64)), None),
            ("ALiBi, causal", Causal, lambda _: Alibi(8)),
            ("a mask of bools", lambda: TensorMask(_band(16384)), None),
        )
    ),
)
