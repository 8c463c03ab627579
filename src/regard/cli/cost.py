"""`regard cost`: what a model costs at a context, beside what it would cost with other attention.

Neither torch nor rich is imported: the table is there at once.
"""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regard import __version__
from regard.cli.argument_types import chosen_options, count, rate
from regard.cli.generate_options import SINKS, SINKS_HELP
from regard.cli.outputs import STDOUT, add_force, add_json, check_outputs, output_files, write_text
from regard.cost.storage_names import CODECS, DENSE, NAMES, float_name
from regard.errors import ProblemError

if TYPE_CHECKING:
    from regard.cost.model import Model
    from regard.cost.model_cost import ModelCost
    from regard.parallel.predict import Sharded

EPILOG = """\
examples: regard cost llama-2-70b --context 32k --machine 8xh100
          regard cost path/to/folder --context 128k --batch 16 --cache int8    the config.json of a model
          regard cost llama-3-1-8b --context 1m --ranks 16 --link 100GB/s      its attention sharded over 16 machines
          regard cost gpt-oss-20b --machine this                               measured here once, and stored
          regard cost                                                          the models and machines that are known

Memory is in KiB, MiB and GiB (powers of 1,024), work in FLOP (a multiply-add is 2, masked pairs cost nothing).
"""

DTYPES = ("bfloat16", "float16", "float32")
MACHINE = "h100"


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "cost",
        help="what a model costs, before it runs",
        description="Memory, FLOPs and times of a model at a context, beside other heads, caches and windows.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = count(1)
    parser.add_argument("name", nargs="?", metavar="MODEL", help="a published model, or a folder with a config.json")
    tokens = count(1, more=" or thousands such as 32k")
    parser.add_argument(
        "--context", type=tokens, metavar="N", help="tokens, such as 32k (default: the model's longest)"
    )
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="batch rows (default: 1)")
    parser.add_argument(
        "--dtype",
        type=float_name,
        choices=DTYPES,
        default=DTYPES[0],
        help=f"type of the weights (default: {DTYPES[0]})",
    )
    parser.add_argument(
        "--machine",
        default=MACHINE,
        metavar="NAME",
        help=f"such as a100, 8xh100, or this (its GPU, where torch has one), this-cpu (default: {MACHINE})",
    )
    group = parser.add_argument_group("KV cache")
    group.add_argument("--cache", choices=NAMES, default=DENSE, help="how keys and values are stored")
    group.add_argument("--group-size", type=size, metavar="N", help="elements that share a scale (int8, int4, fp8)")
    group.add_argument("--window", type=size, metavar="N", help="keep the first and the last tokens, N in all")
    group.add_argument("--sinks", type=count(0), metavar="N", help=SINKS_HELP)
    group.add_argument("--page-size", type=size, metavar="N", help="keep tokens in pages of N")
    group = parser.add_argument_group("sharded sequences")
    group.add_argument("--ranks", type=count(2), metavar="N", help="machines that each have a part of the sequence")
    group.add_argument("--link", type=rate, metavar="RATE", help="of a machine in each direction, such as 100GB/s")
    add_json(parser, "the costs")
    parser.add_argument("--plot", metavar="FILE", help="draw memory and times over the context, as SVG")
    add_force(parser)
    defaults = vars(parser.parse_args([]))
    parser.set_defaults(run=run, defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Print the costs of the options."""
    from regard.cli import cost_view

    if args.name is None:
        if options := chosen_options(args, args.defaults):
            raise ProblemError(f"{options[0]} needs a model: add one, as regard cost llama-2-70b {options[0]} ...")
        print(cost_view.known())
        return 0
    check_outputs(output_files(("--json", args.json, "JSON"), ("--plot", args.plot, "picture")), force=args.force)
    current = cost_of(args)
    changes = list(current.what_if())
    sharded = shardings_of(args, current)
    if args.json is not None:
        rows = {name: changed.to_dict() for name, changed in changes}
        content = {"regard": __version__, **rows.pop("as it is"), "what_if": rows}
        if sharded:
            content["sharded"] = [each._asdict() for each in sharded]
        write_text(args.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    if args.plot is not None:
        from regard.cli.cost_plot import draw

        write_text(args.plot, draw(changes))
    if STDOUT not in (args.json, args.plot):
        print(cost_view.view(current, changes))
        if sharded:
            print("\n" + "\n".join(cost_view.sharded_view(current, args.ranks, args.link, sharded)))
    return 0


def shardings_of(args: argparse.Namespace, current: "ModelCost") -> "list[Sharded]":
    """The costs of sharded sequences; none without --ranks.

    Raises:
        ProblemError: one of --ranks and --link is missing, or the model cannot be sharded so.
    """
    if (args.ranks is None) != (args.link is None):
        raise ProblemError("--ranks and --link go together: how many machines, and the rate between them.")
    if args.ranks is None:
        return []
    from regard.parallel.predict import Link, shardings

    return list(shardings(current, args.ranks, Link(args.link)))


def cost_of(args: argparse.Namespace) -> "ModelCost":
    """The cost that the options describe.

    Raises:
        ProblemError: options contradict each other, or name what is not known.
    """
    from regard.cost import Storage, cost, find_machine, load_model
    from regard.cost.machines import THIS

    if args.sinks is not None and args.window is None:
        raise ProblemError(f"--sinks {args.sinks} are the first tokens of a window: add --window.")
    if args.window is not None and args.page_size is not None:
        raise ProblemError("--window and --page-size are two layouts of the cache: leave one of them out.")
    if args.group_size and args.cache not in CODECS:
        raise ProblemError(f"--group-size is for codes, and --cache is {args.cache}: expected int8, int4 or fp8.")
    kind = args.dtype if args.cache == DENSE else args.cache
    storage = Storage(kind, group=args.group_size or 32, page=args.page_size)
    name = args.machine.lower()
    model, machine = load_model(args.name), this_machine(name) if name in THIS else find_machine(args.machine)
    if args.window is not None:
        sinks = min(SINKS, args.window - 1) if args.sinks is None else args.sinks
        if sinks >= args.window:
            raise ProblemError(f"--window {args.window} counts its {sinks} sinks: expected more than those.")
        model = windowed(model, args.window - sinks, sinks)
    return cost(model, context=args.context, batch=args.batch, dtype=args.dtype, storage=storage, machine=machine)


def windowed(model: "Model", window: int, sinks: int) -> "Model":
    """The model whose layers keep the last `window` tokens and the first `sinks`, or a note that this is no change."""
    from regard.cost.model_cost import with_window

    changed = with_window(model, window, sinks)
    if changed != model:
        return changed
    return replace(model, notes=(*model.notes, f"--window {window + sinks:,} changes nothing: no layer stores more."))


def this_machine(name: str = "this") -> Any:
    """The machine that runs this, measured once and stored."""
    from regard.cost.this_machine import read_this_machine

    found = read_this_machine(name)
    if found is not None:
        return found
    from regard.bench.this_machine import measure_this_machine

    return measure_this_machine(name)
