"""SmolLM2-135M with a cache of 8,192 tokens: the time of one more token, and the memory, by cache."""

import ctypes
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, QuantizedCache

from benchmarks.report import table
from regard.bench.rounds import Effort, Measure, Rounds, interleaved
from regard.cli.durations import call_duration
from regard.integrate.cache import regard_cache
from regard.integrate.cache_argument import as_argument
from regard.integrate.transformers import register
from regard.storage.codec import Codec, Fp8, Int4, Int8, code_bytes
from regard.storage.stored import Paged

ROOT = Path(__file__).parents[1]
TOKENS = 8192

DYNAMIC, DENSE = "transformers DynamicCache, sdpa", "regard Contiguous()"


@dataclass(frozen=True)
class Kind:
    """A cache of the whole model: how it is created, and the attention that reads it.

    Attributes:
        options: of `regard_cache`; None for a cache of transformers.
        quantised: whether it is quantised, and must not be slower than `DENSE`.
    """

    name: str
    options: dict[str, Any] | None
    made: Callable[[Any], Any] | None = None
    quantised: bool = False

    @property
    def attention(self) -> str:
        """The attention implementation, by transformers' names."""
        return "sdpa" if self.options is None else "regard"

    def make(self, config: Any) -> Any:
        """An empty cache for the model of this config."""
        if self.options is None:
            assert self.made is not None
            return self.made(config)
        return regard_cache(config, **self.options)


OURS = (
    Kind(DENSE, {}),
    Kind("regard bf16", {"codec": torch.bfloat16}),
    Kind("regard Int8()", {"codec": Int8()}, quantised=True),
    Kind("regard Fp8()", {"codec": Fp8()}, quantised=True),
    Kind("regard Int4()", {"codec": Int4()}, quantised=True),
    Kind("regard Paged(16)", {"layout": Paged(16)}),
    Kind("regard Paged(32), Int8()", {"layout": Paged(32), "codec": Int8()}, quantised=True),
)


def theirs() -> tuple[Kind, ...]:
    """transformers' own caches whose packages are installed."""

    def dynamic(config: Any) -> Any:
        return DynamicCache(config=config)

    def quantised(backend: str) -> Callable[[Any], Any]:
        return lambda config: QuantizedCache(backend, config)

    packages = {"quanto": "optimum.quanto", "hqq": "hqq"}
    installed = [name for name, package in packages.items() if _is_installed(package)]
    coded = [Kind(f"transformers {name}, sdpa", None, quantised(name)) for name in (*installed, "fp8")]
    return (Kind(DYNAMIC, None, dynamic), *coded)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


# ---- time of a token ------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A cache, measured; medians over rounds, ratios and differences within them.

    Attributes:
        seconds: of one token.
        attention: seconds of the part that grows with the cache: those of one token minus those with a new cache.
        faster: the growing part of `DYNAMIC`, divided by this one's.
        beside: the token's time, divided by that of `DENSE`.
    """

    kind: Kind
    seconds: float
    attention: float
    faster: float
    beside: float

    def goal(self) -> str:
        """The goals as a short text; empty without one."""
        speed = ["attention ≥ 3x"] if self.kind.name == DENSE else []
        return ", ".join([*speed, *(["≤ Contiguous()"] if self.kind.quantised else [])])

    def reached(self) -> str:
        """`yes`, `**no**`, or empty without a goal."""
        if not self.goal():
            return ""
        return "yes" if (not self.kind.quantised or self.beside <= 1) and self.is_fast_enough() else "**no**"

    def is_fast_enough(self) -> bool:
        """Whether the attention reaches its goal."""
        return self.kind.name != DENSE or self.faster >= 3


def steps(model: Any, kinds: Sequence[Kind], tokens: int, effort: Effort) -> list[Line]:
    """One token with each of these caches, in the same rounds."""
    register()
    measures: dict[str, Measure] = {}
    for kind in kinds:
        measures[kind.name] = _step(model, kind, tokens)
    for attention in dict.fromkeys(kind.attention for kind in kinds):
        kind = next(kind for kind in kinds if kind.attention == attention)
        measures[f"{attention}, new"] = _step(model, kind, 1)
    rounds = interleaved(measures, effort)
    return [_line(kind, rounds) for kind in kinds]


def _line(kind: Kind, rounds: Rounds) -> Line:
    names = DYNAMIC, "sdpa, new", kind.name, f"{kind.attention}, new"
    seconds = rounds.median(lambda t: t, kind.name)
    own = rounds.median(lambda t, new: t - new, *names[2:])
    faster = rounds.median(lambda t, new, own, ours: (t - new) / max(1e-6, own - ours), *names)
    beside = rounds.median(lambda t, dense: t / dense, kind.name, DENSE)
    assert seconds is not None and own is not None and faster is not None and beside is not None  # noqa: PT018
    return Line(kind, seconds, own, faster, beside)


def filled(config: Any, kind: Kind, tokens: int) -> Any:
    """A cache with random keys and values of the model's shape; a prefill of this length would take minutes."""
    cache = kind.make(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = 1, config.num_key_value_heads, tokens, dim
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def _step(model: Any, kind: Kind, tokens: int) -> Measure:
    """Measures one more token after `tokens`; the cache grows by one token a round."""
    model.set_attn_implementation(kind.attention)
    given, token = as_argument(model, filled(model.config, kind, tokens)), torch.tensor([[7]])

    def once() -> float:
        model.set_attn_implementation(kind.attention)
        start = time.perf_counter()
        model(token, **given, use_cache=True)
        return time.perf_counter() - start

    once()
    return once


def results_table(lines: Sequence[Line]) -> str:
    """The table of these."""
    rows = [
        (
            line.kind.name, f"{1e3 * line.seconds:.1f} ms", call_duration(line.attention), f"{line.faster:.2f}x",
            f"{line.beside:.2f}x", line.goal(), line.reached(),
        )
        for line in lines
    ]  # fmt: skip
    head = ("cache", "a token", "attention + cache", "DynamicCache / this", "of Contiguous()", "goal", "reached")
    return table(head, rows)


# ---- memory ---------------------------------------------------------------------------------------------------------


class Bytes(NamedTuple):
    """Bytes of a cache, all layers: by the formula, stored, allocated, and resident in the process."""

    formula: int
    stored: int
    allocated: int
    resident: int


def formula(config: Any, options: dict[str, Any], tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """2 * layers * kv_heads * head_dim * tokens * bytes, and scales.

    With a codec, for each key and value: the codes, a scale of 2 bytes for `group` tokens of a key's channel, and one
    for each group of a value's channels (and a zero point of 2 bytes beside each scale of int4); the first and the last
    tokens are not quantised.
    """
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each, codec = config.num_hidden_layers * config.num_key_value_heads, options.get("codec")
    if not isinstance(codec, Codec):
        width = (codec or dtype).itemsize
        return 2 * each * dim * tokens * width
    page = options["layout"].page if isinstance(options.get("layout"), Paged) else codec.group
    first, group = -(-codec.sinks // page) * page, min(codec.group, page)
    coded = (tokens - first - codec.residual) // page * page
    scales = 1 + (codec.kind == "int4")  # and a zero point
    keys = code_bytes(codec.kind, dim, tiled=True) + 2 * scales * dim / group
    values = code_bytes(codec.kind, dim, tiled=False) + 2 * scales * -(-dim // codec.channels(dim))
    return round(each * (coded * (keys + values) + (tokens - coded) * 2 * dim * dtype.itemsize))


def memory(tokens: int, kinds: Sequence[Kind] = OURS) -> dict[str, Bytes]:
    """The memory of these kinds, measured in a process that returns large blocks to the system at once."""
    known = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.cache_model", str(tokens), *(kind.name for kind in kinds)]
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"ended with {done.returncode}")
    return {name: Bytes(*found) for name, found in json.loads(done.stdout).items()}


def _measured(tokens: int, names: Sequence[str]) -> dict[str, Bytes]:
    config: Any = LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    config._attn_implementation = "regard"
    found: dict[str, Bytes] = {}
    for kind in (kind for kind in OURS if kind.name in names):
        filled(config, kind, 256)  # the allocations of a first use do not count
        before = _resident()
        cache = filled(config, kind, tokens)
        kept = [layer.kv for layer in cache.layers]
        stored, allocated = sum(kv.bytes for kv in kept), sum(kv.allocated_bytes for kv in kept)
        found[kind.name] = Bytes(formula(config, kind.options or {}, tokens), stored, allocated, _resident() - before)
        del cache, kept
    return found


def _resident() -> int:
    """The resident bytes of this process."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_table(found: dict[str, Bytes]) -> str:
    """The table of these."""
    rows: list[tuple[str, ...]] = []
    for name, b in found.items():
        off = (b.stored - b.formula) / b.formula
        mebibytes = (f"{n / 2**20:.1f}" for n in b)
        rows.append((name, *mebibytes, f"{100 * off:+.1f} %", "≤ 5 %", "yes" if abs(off) <= 0.05 else "**no**"))
    head = ("cache", "by the formula", "stored", "allocated", "resident", "stored / formula", "goal", "reached")
    return table(head, rows)


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(_measured(int(sys.argv[1]), sys.argv[2:])))
