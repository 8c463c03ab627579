"""The cost and the exactness of `regard.inspect`: sweeps, measures, the page.

`./bench inspect --write` writes its part of docs/inspect.md; `--quick` measures few tokens, and no model.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks import command
from benchmarks.inspect_cost import DIM, HEADS, KV_HEADS, PICTURE, long_sweep, pair_measures, sweeps
from benchmarks.inspect_exact import agreement
from benchmarks.inspect_page import page
from benchmarks.report import machine
from regard.bench.rounds import Effort, on_threads
from regard.errors import ProblemError
from regard.integrate.checkpoint import load
from regard.integrate.transformers import use_regard

PAGE, PART = "inspect.md", "cost"

TOKENS, QUICK_TOKENS = (1024, 4096, 16_384), (1024,)
LONG, QUICK_LONG = 131_072, 4096
MODEL_TOKENS, PAGE_TOKENS, EXACT_TOKENS = 8192, 1024, 1024

METHOD = """\
Measured by `{how}` on {machine}. Every time is a median over rounds in which both sides are measured once, and ratios
are taken within a round."""

SWEEP = f"""\
Causal, float32, {HEADS} heads on {KV_HEADS}, {DIM} dimensions: a layer of SmolLM2-135M on random tensors. A sweep
computes entropies, squares, masses, the top key of each row, masses by distance, column masses, a picture of
{PICTURE} x {PICTURE} cells by mean and maximum, and sums along two vectors. "Of the limit": products alone, at
the speed of this machine's registers."""

LONG_METHOD = "The same sweep of a single head, from q, k and lse, in a process of its own."

PAIRS = """\
All measures that are sums over O(n) pairs, of every head of every layer, while a model reads random tokens."""

EXACT = f"""\
The largest difference of any of {HEADS} heads between the measure and the formula on the dense matrix in float64;
{EXACT_TOKENS:,} random tokens, half of them twice, scores of standard deviation 2."""

PAGE_METHOD = "The page that `regard inspect` writes for this repository's README."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("inspect", "The cost and the exactness of regard.inspect.", page=PAGE, seconds=4.0)
    parser.add_argument("--quick", action="store_true", help="few tokens, and no model")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and print or write the part of the page."""
    if args.quick and args.write:
        raise ProblemError("--write measures everything: omit --quick.")
    command.check_part(args.write, PAGE, PART)
    effort, threads = Effort(seconds=0.2 if args.quick else args.seconds, least=2), args.threads
    with on_threads(threads or torch.get_num_threads()):
        command.publish_part(args.write, PAGE, PART, part(quick=args.quick, effort=effort))
    return 0


def part(*, quick: bool, effort: Effort) -> str:
    """The part of docs/inspect.md."""
    how = "./bench inspect" + " --quick" * quick
    found = [METHOD.format(how=how, machine=machine())]
    found += ["### A sweep beside its attention", SWEEP]
    found += [sweeps(QUICK_TOKENS if quick else TOKENS, effort, torch.get_num_threads())]
    found += ["### A long text", LONG_METHOD, long_sweep(QUICK_LONG if quick else LONG)]
    found += ["### Exactness", EXACT, agreement(EXACT_TOKENS)]
    if not quick:
        model, tokenizer, label = load()
        use_regard(model)
        found += ["### Measures beside a forward pass", PAIRS, pair_measures(model, label, MODEL_TOKENS, effort)]
        found += ["### The page", PAGE_METHOD, page(model, tokenizer, PAGE_TOKENS)]
    return "\n\n".join(found)


if __name__ == "__main__":
    sys.exit(main())
