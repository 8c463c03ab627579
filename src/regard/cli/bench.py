"""`regard bench`: how fast attention of given shapes is here, beside torch and the machine's limit."""

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from regard.cli.argument_types import count, number, threads
from regard.cli.durations import call_duration
from regard.cli.expression_names import BIASES, MASKS, check_names
from regard.cli.outputs import STDOUT, add_force, add_json, check_outputs, output_files, write_json
from regard.cli.progress import progress_bars
from regard.cost.storage_names import float_name
from regard.errors import ProblemError, RefusalError

if TYPE_CHECKING:
    from regard.bench.case import Case
    from regard.bench.measure import Result
    from regard.bench.rounds import Effort

EPILOG = f"""\
example: regard bench --queries 4096 --query-heads 32 --kv-heads 8 --mask "Causal() & Window(512)"

masks:  {", ".join(MASKS)},
        combined by & | ~; tables are lists, such as Documents([0] * 100 + [1] * 28)
biases: {", ".join(BIASES)}, combined by +
"""

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure attention of given shapes, beside torch and the machine's limit",
        description="Measure attention of these shapes: regard, torch, and the machine's limit.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = count(1)
    parser.add_argument("--queries", type=size, default=2048, metavar="N", help="queries, such as 4k (default: 2048)")
    parser.add_argument("--keys", type=size, metavar="N", help="keys; queries are the last (default: as --queries)")
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="batch rows (default: 1)")
    parser.add_argument("--query-heads", type=size, default=8, metavar="N", help="query heads (default: 8)")
    parser.add_argument("--kv-heads", type=size, metavar="N", help="key heads (default: as --query-heads)")
    parser.add_argument("--dim", type=size, default=64, metavar="N", help="dim of a head (default: 64)")
    parser.add_argument("--v-dim", type=size, metavar="N", help="dim of the values (default: as --dim)")
    parser.add_argument("--mask", metavar="MASK", help='such as "Causal() & (Window(512) | Prefix(4))" (default: none)')
    parser.add_argument("--bias", metavar="BIAS", help='such as "Alibi(8)" (default: none)')
    cap = number("above 0", math.ulp(0.0), math.inf)
    parser.add_argument("--softcap", type=cap, metavar="C", help="softcap of the scores (default: none)")
    parser.add_argument(
        "--dtype", type=float_name, choices=DTYPES, default=DTYPES[0], help="type of q, k and v (default: float32)"
    )
    parser.add_argument("--backward", action="store_true", help="the gradients as well")
    parser.add_argument("--backend", metavar="NAME", help="a backend by name (default: regard chooses)")
    parser.add_argument("--threads", type=threads, metavar="N", help="threads (default: torch's)")
    parser.add_argument("--rounds", type=size, metavar="N", help="rounds to measure (default: as many as fit in 2 s)")
    add_json(parser, "the result")
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the case of the options. Every error in them is found before, most of them before torch is imported."""
    _check(args)
    check_outputs(output_files(("--json", args.json, "JSON")), force=args.force)
    import torch

    from regard.bench.limits import MEMORY
    from regard.bench.measure import measure

    case, dtype = case_of(args), getattr(torch, args.dtype)
    if (size := case.nbytes(dtype)) > MEMORY // 2:
        raise ProblemError(
            f"{case.name} takes {size / 2**30:,.0f} GiB, and this machine has {MEMORY / 2**30:,.0f}: ask for fewer "
            "tokens, heads or rows."
        )
    try:
        with progress_bars() as progress:
            result = measure(
                case, dtype, args.threads or torch.get_num_threads(), effort(args.rounds),
                progress=lambda done, total: progress("measuring", done, total),
            )  # fmt: skip
    except RefusalError as error:
        raise _in_one_line(error) from None
    write_json(args.json, asdict(result))
    if args.json != STDOUT:
        print(table(result))
    return 130 if result.interrupted else 0


def _in_one_line(error: RefusalError) -> RefusalError:
    """The error with its reasons as parts of one sentence, and with the option in place of the argument."""
    head, *lines = (line.strip() for line in str(error).splitlines())
    reasons = [line for line in lines if not line.startswith("Leave backend=")]
    if not reasons:
        return error
    hint = " Leave --backend out to let regard choose." if len(reasons) < len(lines) else ""
    return RefusalError(f"{head.removesuffix('.')}: {'; '.join(reasons)}.{hint}")


def _check(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for options that contradict each other, without torch."""
    kv_heads = args.kv_heads or args.query_heads
    if args.query_heads % kv_heads:
        raise ProblemError(
            f"--query-heads {args.query_heads} is no whole multiple of --kv-heads {kv_heads}: query heads share "
            "key heads in groups of one size."
        )
    check_names(args.mask)
    check_names(args.bias)


def case_of(args: argparse.Namespace) -> "Case":
    """The case that the options describe."""
    from regard.bench.case import Case
    from regard.cli import expression

    keys, kv_heads = args.keys or args.queries, args.kv_heads or args.query_heads
    mask = None if args.mask is None else expression.mask(args.mask)
    bias = None if args.bias is None else expression.bias(args.bias)
    specs = "".join(
        f", {name} {spec}"
        for name, spec in (("mask", mask), ("bias", bias), ("softcap", args.softcap))
        if spec is not None
    )
    passes = "forward + backward, " if args.backward else ""
    v_dim = f"|{args.v_dim}" if args.v_dim else ""
    name = (
        f"{passes}q [{args.batch}, {args.query_heads}, {args.queries}, {args.dim}] · "
        f"kv [{args.batch}, {kv_heads}, {keys}, {args.dim}{v_dim}] {args.dtype}{specs}"
    )
    return Case(
        name=name,
        queries=args.queries,
        keys=keys,
        heads=args.query_heads,
        kv_heads=kv_heads,
        dim=args.dim,
        batch=args.batch,
        v_dim=args.v_dim,
        mask=None if mask is None else lambda: mask,
        bias=None if bias is None else lambda _: bias,
        softcap=args.softcap,
        backward=args.backward,
        cold=args.queries <= 16 < keys,
        backend=args.backend,
    )


def effort(rounds: int | None) -> "Effort":
    """This many rounds, or as many as fit in two seconds."""
    from regard.bench.rounds import Effort

    return Effort() if rounds is None else Effort(seconds=0.0, least=rounds, most=rounds)


# ---- the result as text ---------------------------------------------------------------------------------------------


def table(result: "Result") -> str:
    """The result in a few lines."""
    r, work = result, f"{result.rate / 1e9:,.0f} GFLOP/s of {result.pairs:,} pairs"
    lines = [
        r.name,
        f"  regard  {call_duration(r.seconds)}  {work}, {_backend(r.backend)}",
        f"  torch   {_torch(r)}",
        f"  limit   {_limit(r)}",
        f"  medians of {r.rounds} interleaved rounds on {r.threads} thread{'s' * (r.threads > 1)}; "
        "the ratio is the median of those within a round" + (", ended early" if r.interrupted else ""),
    ]
    return "\n".join(lines)


def _backend(name: str) -> str:
    from regard import native

    return f"backend {name}" + (f" ({native.isa()})" if name == "native" else "")


def _torch(r: "Result") -> str:
    if r.torch_seconds is None or r.ratio is None:
        return f"not measured: {r.torch_call}"
    return f"{call_duration(r.torch_seconds)}  {r.ratio:.2f}x the time of regard, with {r.torch_call}"


def _limit(r: "Result") -> str:
    if r.limit is None or r.share is None:
        return "not known: the compiled library measures it, and is not installed"
    amount = f"{r.limit / 1e9:,.0f} GFLOP/s" if r.bound == "products" else f"{r.limit / 1e9:,.0f} GB/s of memory"
    theirs = "" if r.torch_share is None else f", torch {100 * r.torch_share:.0f} %"
    return f"{amount}; regard reaches {100 * r.share:.0f} %{theirs}"
