"""What looking inside costs and how exact it is: sweeps, measures, the page.

`./bench inspect` writes its part of docs/inspect.md; `--quick` prints some of it, of few tokens and without a model.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.inspect_cost import DIM, HEADS, KV_HEADS, PICTURE, long_sweep, pair_measures, sweeps
from benchmarks.inspect_exact import agreement
from benchmarks.inspect_page import page
from benchmarks.page_parts import with_part, write_part
from benchmarks.report import machine
from regard.bench.rounds import Effort, on_threads
from regard.cli.main import Parser, run_command
from regard.integrate.checkpoint import load
from regard.integrate.transformers import use_regard

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PART = "inspect.md", "cost"

TOKENS, QUICK_TOKENS = (1024, 4096, 16_384), (1024,)
LONG, QUICK_LONG = 131_072, 4096
MODEL_TOKENS, PAGE_TOKENS, EXACT_TOKENS = 8192, 1024, 1024

METHOD = """\
Measured by `{how}` on {machine}. Every time is a median over rounds in which both sides are measured once, and ratios
are taken within a round."""

SWEEP = f"""\
Causal, float32, {HEADS} heads on {KV_HEADS}, {DIM} dimensions: a layer of SmolLM2-135M on random numbers. A sweep
gathers entropies, squares, masses, the top key of each row, masses by distance, column masses, a picture of {PICTURE} x
{PICTURE} cells by mean and maximum, and sums along two vectors. "Of the limit": products alone, at the speed of this
machine's registers."""

LONG_SAID = "The same sweep of a single head, given q, k and lse, in a process of its own."

PAIRS = """\
All measures that are sums over O(n) pairs, of every head of every layer, while a model reads random tokens."""

EXACT = f"""\
The largest difference of any of {HEADS} heads between what is measured and the formula on the dense matrix in float64;
{EXACT_TOKENS:,} random tokens, half of them twice, scores of standard deviation 2."""

SHOWN = "The page that `regard inspect` writes, of this repository's README."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return run_command(lambda: run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="./bench inspect", description="What looking inside costs, and how exact it is.")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="for each measurement (default: 4)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="default: as torch")
    parser.add_argument("--quick", action="store_true", help="few tokens, no model, and nothing is written")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of inspect.md (default: docs)")
    return parser


def run(asked: argparse.Namespace) -> int:
    """Do what was asked."""
    if not asked.quick:
        with_part(asked.docs / PAGE, PART, "")  # a page without its markers fails here, not after minutes
    effort = Effort(seconds=0.2 if asked.quick else asked.seconds, least=2)
    with on_threads(asked.threads):
        text = part(asked, effort)
    if asked.quick:
        print(text)
    else:
        print(f"page: {write_part(asked.docs / PAGE, PART, text)}", file=sys.stderr)
    return 0


def part(asked: argparse.Namespace, effort: Effort) -> str:
    """The part of docs/inspect.md."""
    how = "./bench inspect" + " --quick" * asked.quick
    found = [METHOD.format(how=how, machine=machine())]
    found += ["### A sweep beside its attention", SWEEP]
    found += [sweeps(QUICK_TOKENS if asked.quick else TOKENS, effort, asked.threads)]
    found += ["### A long text", LONG_SAID, long_sweep(QUICK_LONG if asked.quick else LONG)]
    found += ["### Exactness", EXACT, agreement(EXACT_TOKENS)]
    if not asked.quick:
        model, tokenizer, label = load()
        use_regard(model)
        found += ["### Measures beside a forward pass", PAIRS, pair_measures(model, label, MODEL_TOKENS, effort)]
        found += ["### The page", SHOWN, page(model, tokenizer, PAGE_TOKENS)]
    return "\n\n".join(found)


if __name__ == "__main__":
    sys.exit(main())
