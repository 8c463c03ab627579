"""The cost of caches: a step by layout and codec, a token of a whole model, a long stream, memory.

`./bench caches --write` writes its part of docs/caches.md and a picture; `--only` prints one part of the tables.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks import cache_batches, cache_model, cache_pictures, cache_steps, cache_stream, command
from benchmarks.cache_pictures import Bar
from benchmarks.report import machine
from regard.bench.limits import STREAMED
from regard.bench.rounds import Effort, on_threads
from regard.cli.argument_types import count
from regard.cli.durations import call_duration
from regard.errors import ProblemError
from regard.integrate.checkpoint import load

PAGE, PICTURE, PART = "caches.md", "caches.svg", "speed"
SECONDS = 15.0

METHOD = """\
Measured by `{how}` on {machine}. Every time is a median over rounds that measure every row of a table once, and
ratios are taken within a round, so that load on the machine affects all rows equally."""

STEP = f"""\
One query against {cache_steps.TOKENS:,} tokens, 32 heads on 8 key heads of 128 dimensions; queries are bf16 unless
the row says otherwise. "attend" is the call alone, "append + attend" a whole step. Keys and values are read from
memory: the steps cycle through copies of the cache, {cache_steps.COLD >> 20} MiB in all. Pages of {{pages}} are
scattered, as if sequences grow in turns; the pages of a cache alone in its pool are in order. The
bandwidth is that of one read of {STREAMED >> 20} MiB in the same round."""

LATENT = f"""\
The same for the cache of DeepSeek's attention, {cache_steps.TOKENS:,} latents of 512 and rotated keys of 64, which 16
heads read in the absorbed form; keys and values share memory."""

CHUNK = "A few queries at once against the same caches: a chunk of a prefill, or the verification of draft tokens."

RAGGED = f"""\
One query a row, {len(cache_batches.LENGTHS)} rows of {cache_batches.LENGTHS[0]:,} to {cache_batches.LENGTHS[-1]:,}
tokens, heads as above."""

SHARED = f"""\
{cache_batches.SHARERS} sequences that share a prefix of {cache_batches.PREFIX:,} tokens and have {cache_batches.OWN} of
their own: `attend_shared` reads the prefix once for all, `attend` once for each. A prefix of 4,096 tokens has 16 MiB,
which a CPU with a third level cache of 32 MiB reads again from there. With a prefix of 32,768 tokens, 128 MiB, the
three times were 31, 80 and 82 ms (29 November 2026)."""

MODEL = f"""\
One more token of {{model}} in float32 after {cache_model.TOKENS:,} tokens (random keys and values, which do not
affect the time). "Attention + cache" is the part that grows with the cache: the time minus that of a token with a new
cache and the same attention, in the same round."""

STREAM = f"""\
One layer (9 heads on 3 key heads of 64 dimensions) with `Rolling({cache_stream.WINDOW:,}, {cache_stream.SINKS}, rope)`;
all {{tokens:,}} steps are run. The error is that of the output against the definition: the same tokens rotated to
their positions inside the cache, in float64."""

MEMORY = f"""\
MiB of the caches of SmolLM2-135M with {cache_model.TOKENS:,} tokens, float32: by the formula 2 * layers * kv_heads *
head_dim * tokens * bytes, with scales and the tokens that are not quantised; stored and allocated, as the caches
report; and the growth of the process."""


@dataclass
class Found:
    """The results: sections of the page by title, in order, and the data of the picture."""

    sections: dict[str, str] = field(default_factory=dict)
    steps: list[cache_steps.Line] = field(default_factory=list)
    tokens: list[cache_model.Line] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """The effort and extent of the measurement."""

    effort: Effort
    positions: int
    threads: int
    tell: Callable[[str], None]


# ---- parts ----------------------------------------------------------------------------------------------------------


def _steps(found: Found, settings: Settings) -> None:
    filled = [cache_steps.FilledCaches.of(way) for way in cache_steps.WAYS]
    found.steps = cache_steps.steps(filled, cache_steps.BESIDE, settings.threads, settings.effort)
    pages = " and ".join(
        dict.fromkeys(str(w.options["layout"].page) for w in cache_steps.WAYS if "layout" in w.options)
    )
    text = cache_steps.results_table(found.steps, cache_steps.BESIDE)
    found.sections["A decode step by layout and codec"] = f"{STEP.format(pages=pages)}\n\n{text}"
    few = [one for one in filled if one.way.dtype == cache_steps.BF16]
    text = cache_steps.chunks(few, cache_steps.BESIDE, settings.effort)
    found.sections["A few queries at once"] = f"{CHUNK}\n\n{text}"


def _latent(found: Found, settings: Settings) -> None:
    filled = [cache_steps.FilledCaches.of(way) for way in cache_steps.LATENTS]
    first = filled[0].way.name
    lines = cache_steps.steps(filled, first, settings.threads, settings.effort)
    found.sections["Latents"] = f"{LATENT}\n\n{cache_steps.results_table(lines, first)}"


def _batches(found: Found, settings: Settings) -> None:
    text = cache_batches.ragged(cache_batches.LENGTHS, settings.effort)
    found.sections["Rows of different lengths"] = f"{RAGGED}\n\n{text}"
    text = cache_batches.shared(cache_batches.SHARERS, cache_batches.PREFIX, cache_batches.OWN, settings.effort)
    found.sections["A shared prefix"] = f"{SHARED}\n\n{text}"


def _model(found: Found, settings: Settings) -> None:
    model, _, label = load()
    kinds = [*cache_model.theirs(), *cache_model.OURS]
    found.tokens = cache_model.steps(model, kinds, cache_model.TOKENS, settings.effort)
    found.sections["A whole model"] = f"{MODEL.format(model=label)}\n\n{cache_model.results_table(found.tokens)}"


def _stream(found: Found, settings: Settings) -> None:
    marks = [mark for mark in cache_stream.MARKS if mark <= settings.positions] or cache_stream.MARKS[:1]
    text = cache_stream.results_table(cache_stream.stream(marks))
    found.sections["A long stream"] = f"{STREAM.format(tokens=max(marks))}\n\n{text}"


def _memory(found: Found, settings: Settings) -> None:
    text = cache_model.memory_table(cache_model.memory(cache_model.TOKENS))
    found.sections["Memory"] = f"{MEMORY}\n\n{text}"


PARTS: dict[str, Callable[[Found, Settings], None]] = {
    "steps": _steps,
    "latent": _latent,
    "batches": _batches,
    "model": _model,
    "stream": _stream,
    "memory": _memory,
}


# ---- the page -------------------------------------------------------------------------------------------------------


def part(found: Found, how: str) -> str:
    """The part of docs/caches.md."""
    parts = [METHOD.format(how=how, machine=machine())]
    if found.steps and found.tokens:
        parts.append(f"![A decode step by layout and codec, and a token of a whole model]({PICTURE})")
    return "\n\n".join([*parts, *(f"### {title}\n\n{text}" for title, text in found.sections.items())])


def picture(found: Found) -> str:
    """Times of a step with their goals, and the part of a whole model's token that grows with the cache."""
    plain = next(line for line in found.steps if line.way.name == cache_steps.BESIDE)
    steps = [
        Bar(line.way.name, 1e3 * line.seconds, _step_label(line), goal=_goal(line, plain.seconds))
        for line in found.steps
    ]
    tokens = [
        Bar(line.kind.name, 1e3 * line.attention, call_duration(line.attention), line.kind.options is not None)
        for line in found.tokens
    ]
    return cache_pictures.bars(
        [
            (f"Attention of one query to {cache_steps.TOKENS:,} tokens, 32/8 heads, d 128 (stroke: goal)", steps),
            (f"SmolLM2-135M, {cache_model.TOKENS:,} tokens: attention + cache of one token", tokens),
        ]
    )


def _step_label(line: cache_steps.Line) -> str:
    share = "" if line.share is None else f" · {100 * line.share:.0f} % of bandwidth"
    return f"{call_duration(line.seconds)}{share} · {line.faster:.1f}x"


def _goal(line: cache_steps.Line, plain: float) -> float | None:
    """The time of the goal, in milliseconds."""
    if line.way.share is not None and line.share is not None:
        return 1e3 * line.seconds * line.share / line.way.share
    if line.way.faster is not None:
        return 1e3 * plain / line.way.faster
    return None


# ---- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("caches", "The cost of caches, in time and memory.", page=PAGE, seconds=SECONDS)
    parser.add_argument(
        "--positions", type=count(1), default=max(cache_stream.MARKS), metavar="N",
        help=f"tokens of the long stream (default: {max(cache_stream.MARKS):,})",
    )  # fmt: skip
    parser.add_argument("--only", choices=[*PARTS], help="measure this part alone")
    return parser


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """Measure the parts, and print or write them."""
    if args.only and args.write:
        raise ProblemError("--write writes all parts: leave --only out.")
    command.check_part(args.write, PAGE, PART)
    found, threads = Found(), args.threads or torch.get_num_threads()
    how = Settings(
        Effort(seconds=args.seconds, least=3), args.positions, threads, lambda line: print(line, file=sys.stderr)
    )
    with on_threads(threads):
        for name, measure in PARTS.items():
            if args.only in (None, name):
                how.tell(name)
                measure(found, how)
        text = part(found, "./bench caches" + f" --seconds {args.seconds:g}" * (args.seconds != SECONDS))
    pictures = {PICTURE: picture(found)} if args.write else None
    command.publish_part(args.write, PAGE, PART, text, pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
