"""`regard convert`: a checkpoint with fewer key and value heads, and so a smaller cache."""

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from regard.cli.bench import count, stages
from regard.errors import ProblemError

if TYPE_CHECKING:
    from regard.integrate.convert import Conversion

DTYPES = ("float32", "bfloat16", "float16")


def add_to(commands: Any) -> None:
    """Add the command and its arguments to the parser of `regard`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="give a checkpoint fewer key and value heads, and so a smaller cache",
        description="Write a transformers checkpoint with fewer key and value heads (MHA to GQA or MQA), each the mean "
        "of a group. The result has to be trained on: 5 % of the original steps in arXiv:2305.13245.",
        epilog="Example: regard convert checkpoints/llama-2-7b checkpoints/llama-2-7b-gqa --kv-heads 8.",
    )
    parser.add_argument(
        "checkpoint",
        help="its folder, a name that is in the Hugging Face cache, or SmolLM2-135M-Instruct, which comes as a package",
    )
    parser.add_argument("out", help="the folder to write, whole or not at all")
    parser.add_argument("--kv-heads", type=count(1), required=True, metavar="N", help="key and value heads; 1 is MQA")
    parser.add_argument(
        "--how",
        choices=("mean", "first", "random"),
        default="mean",
        help="what stands for a group of heads: their mean, the first, or new numbers alike (default: mean)",
    )
    parser.add_argument("--seed", type=count(0), metavar="N", help="of --how random (default: 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights written (default: as they are)")
    parser.add_argument("--force", action="store_true", help="replace what an earlier conversion wrote there")
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Convert, and say what became of it."""
    for package in ("safetensors", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ProblemError(
                f"`regard convert` needs {package}, which is not installed: pip install 'regard[models]'."
            )
    if asked.seed is not None and asked.how != "random":
        raise ProblemError(f"--seed is for --how random, and --how is {asked.how}, which draws nothing: leave it out.")
    import torch

    from regard.integrate.convert import convert_checkpoint

    with stages() as progress:
        done = convert_checkpoint(
            asked.checkpoint,
            asked.out,
            kv_heads=asked.kv_heads,
            how=asked.how,
            seed=asked.seed or 0,
            dtype=None if asked.dtype is None else getattr(torch, asked.dtype),
            force=asked.force,
            progress=progress,
        )
    print(told_of(done, asked.out))
    if done.left_out:
        print(f"regard: weights in other forms were not copied: {', '.join(done.left_out)}", file=sys.stderr)
    return 0


def told_of(done: "Conversion", out: str) -> str:
    """What became of a checkpoint, in a few lines."""
    name = done.model_type if done.made_type == done.model_type else f"{done.model_type} written as {done.made_type}"
    lines = [
        f"{out}: {name}, {done.layers} layers of {done.heads} query heads; {done.bytes_written / 1e6:,.1f} MB",
        f"  key heads  {done.kv_heads} -> {done.made_kv_heads}",
        f"  cache      {done.cache_bytes:,} -> {done.made_cache_bytes:,} bytes a token",
    ]
    for kind, distances in (("keys", done.key_distance), ("values", done.value_distance)):
        mean, worst = sum(distances) / len(distances), max(range(len(distances)), key=distances.__getitem__)
        most = f"most in layer {worst}: {100 * distances[worst]:.1f} %"
        lines.append(f"  {kind:<9}  moved by {100 * mean:.1f} % of their norm, {most}")
    return "\n".join(lines)
