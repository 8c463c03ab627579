"""Attention against a cache of 8,192 tokens by layout and codec: one query, and a few at once.

Keys and values are read from memory and not from the CPU's cache, as in a model with many layers: the calls cycle
through copies of the cache. Every round measures all kinds and the machine's limit once.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.report import table
from regard import Causal, attend
from regard.bench import limits
from regard.bench.case import COLD
from regard.bench.rounds import Effort, Measure, Rounds, interleaved, timed
from regard.cache.kv_cache import KVCache
from regard.cache.pool import PagePool
from regard.cli.durations import call_duration
from regard.storage.codec import Fp8, Int4, Int8
from regard.storage.stored import Latent, Paged

TOKENS = 8192
F32, BF16 = torch.float32, torch.bfloat16
CHUNKS = (16, 64)


@dataclass(frozen=True)
class Way:
    """The options of a cache, the dtype of queries, keys and values, the sizes, and the goals.

    Attributes:
        options: of `KVCache`.
        share: of the memory's bandwidth, at least.
        faster: than `BESIDE`, at least.
        within: (the name of another way, the maximum ratio to its time).
        alone: whether each cache has its own pool, with its pages in order; else caches share one and grow in turns.
    """

    name: str
    options: dict[str, Any]
    dtype: torch.dtype = BF16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    share: float | None = None
    faster: float | None = None
    within: tuple[str, float] | None = None
    alone: bool = False

    def new(self, heads: int, tokens: int) -> Tensor:
        """Random values, [1, heads, tokens, dim]."""
        return torch.randn(1, heads, tokens, self.dim).to(self.dtype)

    def append(self, cache: KVCache, tokens: int) -> tuple[Any, Any]:
        """Append `tokens` random tokens."""
        k = self.new(self.kv_heads, tokens)
        return cache.append(k) if isinstance(cache.layout, Latent) else cache.append(k, torch.randn_like(k))


PLAIN, BESIDE = "Contiguous(), float32", "Contiguous(), bf16"

WAYS = (
    Way(PLAIN, {}, F32, share=0.80),
    Way(BESIDE, {}, share=0.75),
    Way("bf16, float32 queries", {"codec": BF16}, F32),
    Way("Int8()", {"codec": Int8()}, faster=1.6),
    Way("Int8(), float32 queries", {"codec": Int8()}, F32),
    Way("Fp8()", {"codec": Fp8()}),
    Way("Fp8(), float32 queries", {"codec": Fp8()}, F32),
    Way("Int4()", {"codec": Int4()}, faster=2.4),
    Way("Int4(), float32 queries", {"codec": Int4()}, F32),
    Way("Paged(16) alone, float32", {"layout": Paged(16)}, F32, within=(PLAIN, 1.10), alone=True),
    Way("Paged(16) alone, bf16", {"layout": Paged(16)}, within=(BESIDE, 1.10), alone=True),
    Way("Paged(16), float32", {"layout": Paged(16)}, F32, within=(PLAIN, 1.10)),
    Way("Paged(16), bf16", {"layout": Paged(16)}, within=(BESIDE, 1.10)),
    Way("Paged(32), Int8()", {"layout": Paged(32), "codec": Int8()}, within=("Int8()", 1.10)),
)

LATENTS = (
    Way("Latent(512), float32", {"layout": Latent(512)}, F32, heads=16, kv_heads=1, dim=576),
    Way("Latent(512), bf16", {"layout": Latent(512)}, heads=16, kv_heads=1, dim=576),
    Way("Latent(512), Int8()", {"layout": Latent(512), "codec": Int8()}, heads=16, kv_heads=1, dim=576),
)


@dataclass
class FilledCaches:
    """A way with its caches, in total larger than the CPU's cache."""

    way: Way
    caches: list[KVCache]
    found: list[tuple[Any, Any]]
    """The keys and values of each cache's last append."""

    turn: int = field(default=0)

    @staticmethod
    def of(way: Way, tokens: int = TOKENS, cold: int = COLD) -> "FilledCaches":
        """Create and fill the caches, `cold` bytes in all."""
        layout = way.options.get("layout")
        if isinstance(layout, Paged) and way.alone:
            caches = [KVCache(**way.options)]
            while way.append(caches[-1], tokens) and sum(cache.bytes for cache in caches) < cold:
                caches.append(KVCache(**way.options))
        elif isinstance(layout, Paged):
            caches = _sharing_a_pool(way, layout, tokens, cold)
        else:
            first = KVCache(**way.options)
            way.append(first, tokens)
            caches = [first, *(copy.deepcopy(first) for _ in range(min(64, math.ceil(cold / first.bytes))))]
        return FilledCaches(way, caches, [way.append(cache, 1) for cache in caches])

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads: the stored keys and values."""
        k, v = self.found[0]
        own = k.nbytes if isinstance(self.way.options.get("layout"), Latent) else k.nbytes + v.nbytes
        return int(own)

    def attending(self, queries: int) -> Callable[[], Tensor]:
        """Attention of `queries` queries to the next cache."""
        q = self.way.new(self.way.heads, queries)
        scale = 192**-0.5 if isinstance(self.way.options.get("layout"), Latent) else None

        def run() -> Tensor:
            self.turn = (self.turn + 1) % len(self.caches)
            return attend(q, *self.found[self.turn], mask=Causal(), scale=scale)

        return run

    def stepping(self) -> Callable[[], Tensor]:
        """A whole step: append a token to the next cache, and attend."""
        k, v = (self.way.new(self.way.kv_heads, 1) for _ in range(2))
        is_latent = isinstance(self.way.options.get("layout"), Latent)
        attending = self.attending(1)

        def run() -> Tensor:
            at = (self.turn + 1) % len(self.caches)
            self.found[at] = self.caches[at].append(k) if is_latent else self.caches[at].append(k, v)
            return attending()

        return run


def _sharing_a_pool(way: Way, layout: Paged, tokens: int, cold: int) -> list[KVCache]:
    """Caches in one pool that grow in turns, so that the pages of each are scattered over it."""
    each = 2 * tokens * way.kv_heads * way.dim * way.dtype.itemsize  # an upper bound
    pool = PagePool(page=layout.page, codec=way.options.get("codec"))
    options: dict[str, Any] = {**way.options, "layout": Paged(layout.page, pool)}
    caches = [KVCache(**options) for _ in range(1 + math.ceil(cold / each))]
    for _ in range(-(-tokens // layout.page)):
        for cache in caches:
            way.append(cache, layout.page)
    return caches


# ---- one query ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """The times of a way: seconds of attention and of a whole step, bytes, and ratios within the rounds.

    Attributes:
        rate: bytes/s that are read.
        share: of the machine's bandwidth; None if that is unknown.
        faster: the time of `BESIDE`, divided by this one's.
        within: its time, divided by that of the way in `way.within`; None without one.
    """

    way: Way
    seconds: float
    step: float
    nbytes: int
    rate: float
    share: float | None
    faster: float
    within: float | None

    def goal(self) -> str:
        """The goals as a short text; empty without one."""
        w = self.way
        goals = [f"≥ {100 * w.share:.0f} %"] if w.share is not None else []
        goals += [f"≥ {w.faster:g}x"] if w.faster is not None else []
        return ", ".join([*goals, *([f"≤ {w.within[1]:.2f} of {w.within[0]}"] if w.within is not None else [])])

    def reached(self) -> str:
        """`yes`, `**no**`, or empty without a goal."""
        w = self.way
        if not self.goal():
            return ""
        found = (
            w.share is None or (self.share is not None and self.share >= w.share),
            w.faster is None or self.faster >= w.faster,
            w.within is None or (self.within is not None and self.within <= w.within[1]),
        )
        return "yes" if all(found) else "**no**"


def steps(filled: list[FilledCaches], beside: str, threads: int, effort: Effort) -> list[Line]:
    """One query against each of these, in the same rounds."""
    measures: dict[str, Measure] = {}
    for one in filled:
        measures[one.way.name] = timed(one.attending(1))
        measures[f"{one.way.name}, step"] = timed(one.stepping())
    if limits.stream(threads) is not None:
        measures["limit"] = lambda: limits.stream(threads) or math.nan
    rounds = interleaved(measures, effort)
    return [_line(one, rounds, beside) for one in filled]


def _line(filled: FilledCaches, rounds: Rounds, beside: str) -> Line:
    way, nbytes = filled.way, filled.nbytes
    seconds, step = (_median(rounds, lambda t: t, name) for name in (way.name, f"{way.name}, step"))
    return Line(
        way, seconds, step, nbytes, nbytes / seconds,
        rounds.median(lambda limit, t: nbytes / t / limit, "limit", way.name),
        _median(rounds, lambda theirs, t: theirs / t, beside, way.name),
        None if way.within is None else _median(rounds, lambda t, other: t / other, way.name, way.within[0]),
    )  # fmt: skip


def _median(rounds: Rounds, of: Callable[..., float], *names: str) -> float:
    found = rounds.median(of, *names)
    return math.nan if found is None else found


def results_table(lines: list[Line], beside: str) -> str:
    """The table of these."""
    head = ["stored as", "MiB", "attend", "read", "of bandwidth", f"{beside} / this", "append + attend"]
    rows = [
        [
            line.way.name, f"{line.nbytes / 2**20:.1f}", call_duration(line.seconds), f"{line.rate / 1e9:.0f} GB/s",
            "" if line.share is None else f"{100 * line.share:.0f} %", f"{line.faster:.2f}x", call_duration(line.step),
            line.goal(), line.reached(),
        ]
        for line in lines
    ]  # fmt: skip
    head += ["goal", "reached"]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


# ---- a few queries --------------------------------------------------------------------------------------------------


def chunks(filled: list[FilledCaches], beside: str, effort: Effort) -> str:
    """The table of 16 and of 64 queries against each of these."""
    measures = {
        f"{one.way.name}, {queries}": timed(one.attending(queries)) for one in filled for queries in CHUNKS
    }  # fmt: skip
    rounds = interleaved(measures, effort)
    rows: list[list[str]] = []
    for one in filled:
        row = [one.way.name]
        for queries in CHUNKS:
            names = f"{beside}, {queries}", f"{one.way.name}, {queries}"
            ratio = _median(rounds, lambda theirs, t: theirs / t, *names)
            row += [call_duration(_median(rounds, lambda t: t, names[1])), f"{ratio:.2f}x"]
        rows.append(row)
    return table(("stored as", *(f for n in CHUNKS for f in (f"{n} queries", f"{beside} / this"))), rows)
