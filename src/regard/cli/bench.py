"""`regard bench`: how fast attention of one's own shapes is here, beside torch's and beside what the machine can do."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from regard import native
from regard.bench.case import Case
from regard.bench.limits import MEMORY
from regard.bench.measure import Result, measure
from regard.bench.rounds import Effort
from regard.cli import expression
from regard.cli.outputs import STDOUT, add_force, check_outputs, outputs, write_json
from regard.errors import ProblemError

EPILOG = f"""\
example: regard bench --queries 4096 --heads 32 --kv-heads 8 --mask "Causal() & Window(512)"

words of --mask: {", ".join(word.__name__ for word in expression.MASKS)},
                 joined by & | ~; tables are lists, such as Documents([0] * 100 + [1] * 28)
words of --bias: {", ".join(word.__name__ for word in expression.BIASES)}, joined by +
"""

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_to(commands: Any) -> None:
    """Add the command and its arguments to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure attention of your own shapes, beside torch and the machine's limit",
        description="Measure attention of these shapes: regard, torch's own, and what the machine can do at most.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = count(1)
    parser.add_argument("--queries", type=size, default=2048, metavar="N", help="queries (default: 2048)")
    parser.add_argument("--keys", type=size, metavar="N", help="keys; the queries are the last (default: as queries)")
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="rows of the batch (default: 1)")
    parser.add_argument("--heads", type=size, default=8, metavar="N", help="query heads (default: 8)")
    parser.add_argument("--kv-heads", type=size, metavar="N", help="key heads (default: as heads)")
    parser.add_argument("--dim", type=size, default=64, metavar="N", help="dim of a head (default: 64)")
    parser.add_argument("--v-dim", type=size, metavar="N", help="dim of the values (default: as --dim)")
    parser.add_argument(
        "--mask", metavar="WORDS", help='such as "Causal() & (Window(512) | Prefix(4))" (default: none)'
    )
    parser.add_argument("--bias", metavar="WORDS", help='such as "Alibi(8)" (default: none)')
    parser.add_argument("--softcap", type=float, metavar="C", help="cap of the scores (default: none)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="type of the numbers (default: float32)")
    parser.add_argument("--backward", action="store_true", help="the gradients as well")
    parser.add_argument("--backend", metavar="NAME", help="an engine by name (default: regard chooses)")
    parser.add_argument("--threads", type=size, metavar="N", help="threads (default: as torch has)")
    parser.add_argument("--rounds", type=size, metavar="N", help="rounds to measure (default: 2 seconds of them)")
    parser.add_argument("--json", metavar="FILE", help="the result as JSON; - for stdout, with nothing else there")
    add_force(parser)
    parser.set_defaults(run=run)


def count(least: int) -> Callable[[str], int]:
    """Reads a whole number that is at least this, for argparse."""

    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no count: expected {least}, {least + 1}, {least + 2} ...")
        return number

    return read


def run(asked: argparse.Namespace) -> int:
    """Measure what was asked for. Everything that can be wrong with it is found before."""
    check_outputs(outputs(("--json", asked.json, "JSON")), force=asked.force)
    case, dtype = case_of(asked), getattr(torch, asked.dtype)
    threads = asked.threads or torch.get_num_threads()
    if (size := case.nbytes(dtype)) > MEMORY // 2:
        raise ProblemError(
            f"{case.name} takes {size / 2**30:,.0f} GiB, and this machine has {MEMORY / 2**30:,.0f}: ask for fewer "
            "tokens, heads or rows."
        )
    with stages() as progress:
        told = (lambda done, total: progress("measuring", done, total)) if progress else lambda done, total: None
        result = measure(case, dtype, threads, effort(asked.rounds), progress=told)
    write_json(asked.json, asdict(result))
    if asked.json != STDOUT:
        print(told_of(result))
    return 130 if result.cut else 0


def case_of(asked: argparse.Namespace) -> Case:
    """The case that the arguments say."""
    keys, kv_heads = asked.keys or asked.queries, asked.kv_heads or asked.heads
    mask = None if asked.mask is None else expression.mask(asked.mask)
    bias = None if asked.bias is None else expression.bias(asked.bias)
    words = "".join(f", {name} {word}" for name, word in (("mask", mask), ("bias", bias)) if word is not None)
    v_dim = f"|{asked.v_dim}" if asked.v_dim else ""
    name = (
        f"q [{asked.batch}, {asked.heads}, {asked.queries}, {asked.dim}] · "
        f"kv [{asked.batch}, {kv_heads}, {keys}, {asked.dim}{v_dim}] {asked.dtype}{words}"
    )
    return Case(
        name=name,
        queries=asked.queries,
        keys=keys,
        heads=asked.heads,
        kv_heads=kv_heads,
        dim=asked.dim,
        batch=asked.batch,
        v_dim=asked.v_dim,
        mask=None if mask is None else lambda: mask,
        bias=None if bias is None else lambda _: bias,
        softcap=asked.softcap,
        backward=asked.backward,
        cold=asked.queries <= 16 < keys,
        backend=asked.backend,
    )


def effort(rounds: int | None) -> Effort:
    """So many rounds, or two seconds of them."""
    return Effort() if rounds is None else Effort(seconds=0.0, least=rounds, most=rounds)


def stages() -> Any:
    """Progress on stderr, where rich is there to draw it."""
    try:
        from regard.cli.terminal import Stages
    except ModuleNotFoundError:
        return nullcontext()
    return Stages()


# ---- words for a result ---------------------------------------------------------------------------------------------


def told_of(result: Result) -> str:
    """The result in a few lines."""
    r = result
    lines = [
        r.name,
        f"  regard  {duration(r.seconds)}  {r.rate / 1e9:,.0f} GFLOP/s of {r.pairs:,} pairs, {_engine(r.engine)}",
        f"  torch   {_torch(r)}",
        f"  limit   {_limit(r)}",
        f"  medians of {r.rounds} interleaved rounds on {r.threads} thread{'s' * (r.threads > 1)}"
        + (", ended early" if r.cut else ""),
    ]
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """A time in milliseconds, or below one in microseconds.

    >>> duration(0.0234), duration(0.0000234), duration(None)
    ('23.4 ms', '23.4 us', '-')
    """
    if seconds is None:
        return "-"
    number, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{number:,.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}" if number < 1000 else f"{number:,.0f} {unit}"


def _engine(name: str) -> str:
    return f"engine {name}" + (f" ({native.isa()})" if name == "native" else "")


def _torch(r: Result) -> str:
    if r.torch_seconds is None or r.ratio is None:
        return f"not measured: {r.torch_way}"
    return f"{duration(r.torch_seconds)}  {r.ratio:.2f}x the time of regard, said as: {r.torch_way}"


def _limit(r: Result) -> str:
    if r.limit is None or r.share is None:
        return "not known: it is measured by the compiled library, which is not here"
    amount = f"{r.limit / 1e9:,.0f} GFLOP/s" if r.bound == "products" else f"{r.limit / 1e9:,.0f} GB/s of memory"
    theirs = "" if r.torch_share is None else f", torch {100 * r.torch_share:.0f} %"
    return f"{amount}; regard reaches {100 * r.share:.0f} %{theirs}"
