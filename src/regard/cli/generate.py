"""The options of `regard generate`. `generate_text` runs it, and is imported after the options are checked.

```
prompt, model, cache -> text on stdout, token by token -> speed and memory of the cache on stderr
```
"""

import argparse
from typing import Any

from regard.cli import generate_options
from regard.cli.argument_types import chosen_options, count, threads
from regard.cli.outputs import add_force, add_json, check_outputs, output_files
from regard.cli.prompt import add_prompt, prompt_source, read_prompt
from regard.cost.storage_names import float_name
from regard.errors import ProblemError
from regard.integrate.model_folder import check_name

DTYPES = ("float32", "bfloat16", "float16")


def add_to(commands: Any) -> None:
    """Add the command and its options to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="generate text with any KV cache, and report its speed and memory",
        description="Generate text with regard's attention and KV cache. The text goes to stdout token by token, speed "
        "and memory to stderr.",
        epilog='Example: regard generate "Why is the sky blue?" --cache int8 --window 1024 --sinks 4.',
    )
    add_prompt(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="the prompt is a question, for the model's chat template")
    form.add_argument("--raw", action="store_true", help="the prompt is a text to continue (default without template)")
    parser.add_argument(
        "--max-new-tokens",
        type=count(0),
        metavar="N",
        help=f"tokens to generate at most (default: {generate_options.NEW_TOKENS}; 0: read the prompt once)",
    )
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="generate all --max-new-tokens, past the model's end")
    parser.add_argument("--model", help="a folder, or a name known to transformers (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--dtype", type=float_name, choices=DTYPES, default=DTYPES[0], help="type of the weights (default: float32)"
    )
    parser.add_argument("--device", default="cpu", help="such as cuda, cuda:1, mps (default: cpu)")
    parser.add_argument("--threads", type=threads, metavar="N", help="threads (default: torch's)")
    generate_options.add_sampling_options(parser)
    generate_options.add_cache_options(parser)
    parser.add_argument(
        "--compare-cache",
        action="store_true",
        help="generate with a plain cache as well, and report the first token that differs",
    )
    parser.add_argument("--explain", action="store_true", help="show what layers store and how a step runs, then stop")
    add_json(parser, "text, speed and memory")
    add_force(parser)
    parser.set_defaults(run=run, defaults=vars(parser.parse_args([])))


def run(args: argparse.Namespace) -> int:
    """Check the options, read the prompt, and generate; returns the exit code."""
    _check(args)
    prompt = read_prompt(args.prompt, args.prompt_file).removesuffix("\n")
    files = output_files(("--json", args.json, "JSON"))
    check_outputs(files, force=args.force, prompts=[prompt_source(args)], models=[args.model])
    if args.device != "cpu":
        from regard.integrate.checkpoint import device_of

        device_of(args.device)
    from regard.cli.generate_text import generate_text

    return generate_text(args, prompt)


def _check(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for options that do not go together."""
    generate_options.check_cache_options(args)
    generate_options.check_sampling_options(args)
    check_name(args.model)
    if "" in (args.stop or ()):
        raise ProblemError("--stop is empty, and every text begins with that: give a character or more.")
    of_text = ("stop", "ignore_eos", "temperature", "top_p", "top_k", "seed")
    for cause, is_given, names in (
        ("--explain", args.explain, ("json", "compare_cache", "max_new_tokens", *of_text)),
        ("--max-new-tokens 0", args.max_new_tokens == 0, of_text),
    ):
        if is_given and (options := chosen_options(args, {name: args.defaults[name] for name in names})):
            raise ProblemError(f"{cause} generates nothing, so {options[0]} has no effect: leave one of them out.")
    if args.compare_cache and generate_options.is_plain(args):
        raise ProblemError("--compare-cache compares with a plain cache, and this is one: add --cache int8, or others.")
