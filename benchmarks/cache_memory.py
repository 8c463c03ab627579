"""The resident memory of a process that reads a prompt: before, at the peak and after it, by cache.

`./bench cache-memory --write` writes its part of docs/caches.md. Each cache is measured in a process of its own, with
the default malloc: `python -m benchmarks.cache_memory NAME TOKENS LAYERS THREADS` prints one line of JSON.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks import command
from benchmarks.memory import peak, peak_from_here
from benchmarks.report import machine, table
from regard.bench.rounds import on_threads
from regard.cache import H2O, TOVA, ExpectedAttention, Knorm, SinksAndRecent, SnapKV
from regard.errors import ProblemError
from regard.integrate.cache import RegardCache, regard_cache
from regard.integrate.cache_argument import as_argument
from regard.integrate.heap import trim_heap
from regard.integrate.transformers import register

ROOT = Path(__file__).parents[1]
PAGE, PART = "caches.md", "memory"
TOKENS, LAYERS, BUDGET, STEPS, RUNS = 2048, 30, 512, 4, 5

ABOUT = """\
Measured by `{how}` on {machine}: resident memory (VmRSS, and VmHWM for the peak) of a
process that reads a prompt of {tokens:,} tokens with a model of SmolLM2-135M's shape (random weights, a small
vocabulary), as growth in MiB: at the peak of the prompt, after it, and after {steps} more tokens. Each cache has its
own processes, which read a short text first; medians of {runs}, of which peaks vary by up to 1.6
times, as gaps in the heap do; malloc has the system's settings, {threads} thread{s}. "Stored" is the cache's own count
after the last token. Activations of the prompt, and the part of them that malloc does not return, count in all rows
(regard_cache returns it to the system after an eviction, and with the second token after a prompt); policies keep
{budget} tokens per key head. `Contiguous()` allocates the keys and values of each layer between activations, and
glibc does not fill all of the gaps again."""


@dataclass(frozen=True)
class Kind:
    """A cache: the function that creates it for a model, and the attention implementation that reads it."""

    name: str
    make: Callable[[Any], Any]
    attention: str = "regard"


def _policy(policy: Any) -> Kind:
    return Kind(f"regard {type(policy).__name__}({BUDGET})", lambda model: regard_cache(model, evict=policy))


KINDS = (
    Kind("transformers DynamicCache, sdpa", lambda model: DynamicCache(config=model.config), "sdpa"),
    Kind("transformers DynamicCache, regard's attention", lambda model: DynamicCache(config=model.config)),
    Kind("regard Contiguous()", regard_cache),
    *map(
        _policy,
        (SinksAndRecent(BUDGET), Knorm(BUDGET), H2O(BUDGET), TOVA(BUDGET), SnapKV(BUDGET), ExpectedAttention(BUDGET)),
    ),
)


class Growth(NamedTuple):
    """Growth of a process in bytes: at the prompt's peak, after it, after some more tokens; and the cache's size."""

    peak: int
    prompt: int
    after: int
    stored: int


def measured(kind: Kind, tokens: int = TOKENS, layers: int = LAYERS, threads: int = 1, runs: int = 1) -> Growth:
    """Measure one kind in processes of its own; medians.

    Args:
        tokens: of the prompt.
        layers: of the model.
        runs: processes.
    """
    found = [_measured_once(kind, tokens, layers, threads) for _ in range(runs)]
    return Growth(*(int(statistics.median(sizes)) for sizes in zip(*found, strict=True)))


def _measured_once(kind: Kind, tokens: int, layers: int, threads: int) -> Growth:
    command = [sys.executable, "-m", "benchmarks.cache_memory", kind.name, *map(str, (tokens, layers, threads))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"ended with {done.returncode}")
    return Growth(*json.loads(done.stdout))


def _grown(kind: Kind, tokens: int, layers: int) -> Growth:
    sizes: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = LlamaConfig(vocab_size=997, num_hidden_layers=layers, max_position_embeddings=2 * tokens, **sizes)
    register()
    model: Any = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(kind.attention)
    ids = torch.randint(3, 997, (1, tokens))
    _read(model, kind.make(model), ids[:, :64])  # the allocations of a first use do not count
    before, cache = _resident(), kind.make(model)
    peak_from_here()
    model.model(ids, **as_argument(model.model, cache), use_cache=True)
    highest, prompt = peak(), _now()
    _read(model, cache, ids[:, :0])
    return Growth(highest - before, prompt - before, _now() - before, _stored(cache))


def _read(model: Any, cache: Any, ids: torch.Tensor) -> None:
    """Read a text, and then some more tokens, one at a time."""
    if ids.numel():
        model.model(ids, **as_argument(model.model, cache), use_cache=True)
    for _ in range(STEPS):
        model.model(torch.tensor([[7]]), **as_argument(model.model, cache), use_cache=True)


def _resident() -> int:
    """Resident bytes, after malloc has returned free memory to the system."""
    gc.collect()
    trim_heap()
    return _now()


def _now() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) * 1024


def _stored(cache: Any) -> int:
    if isinstance(cache, RegardCache):
        return cache.bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


# ---- the page -------------------------------------------------------------------------------------------------------


def results_table(found: dict[str, Growth]) -> str:
    """The table of these."""
    rows = [(name, *(f"{n / 2**20:.0f}" for n in growth)) for name, growth in found.items()]
    return table(("cache", "peak of the prompt", "after the prompt", f"after {STEPS} more tokens", "stored"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("cache-memory", "The memory of a process that reads a prompt, by cache.", page=PAGE)
    parser.set_defaults(threads=1)
    parser.add_argument("--only", metavar="TEXT", help="measure only the caches with this in their name")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the caches, and print or write their table."""
    if args.only and args.write:
        raise ProblemError("--write writes all caches: leave --only out.")
    command.check_part(args.write, PAGE, PART)
    found: dict[str, Growth] = {}
    for kind in KINDS:
        if (args.only or "").lower() in kind.name.lower():
            print(kind.name, file=sys.stderr)
            found[kind.name] = measured(kind, threads=args.threads, runs=RUNS)
    with on_threads(args.threads):
        here = f"{machine()}, transformers {transformers.__version__}"
    about = ABOUT.format(
        how="./bench cache-memory" + f" --threads {args.threads}" * (args.threads != 1), machine=here,
        threads=args.threads, tokens=TOKENS, steps=STEPS, runs=RUNS, budget=BUDGET, s="s" * (args.threads != 1),
    )  # fmt: skip
    command.publish_part(
        args.write, PAGE, PART, results_table(found) if args.only else f"{about}\n\n{results_table(found)}"
    )
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] in {kind.name for kind in KINDS}:
        name, tokens, layers, threads = sys.argv[1], *map(int, sys.argv[2:])
        with on_threads(threads), torch.no_grad():
            print(json.dumps(_grown(next(kind for kind in KINDS if kind.name == name), tokens, layers)))
    else:
        sys.exit(main())
