"""The options of choosing tokens: `--temperature 0.7 --top-p 0.9 --seed 3`, as transformers' `generate` takes them."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from regard.cli.bench import count
from regard.errors import ProblemError


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of choosing tokens."""
    group = parser.add_argument_group(
        "the choice of tokens",
        "What is not said is as the model's own settings have it; where it has none, the likeliest.",
    )
    warm, share = _number("0 or more", 0.0, math.inf), _number("above 0, at most 1", math.ulp(0.0), 1.0)
    group.add_argument("--temperature", type=warm, metavar="T", help="draw at this temperature; 0 takes the likeliest")
    group.add_argument("--top-p", type=share, metavar="P", help="draw among the likeliest that make up this share")
    group.add_argument(
        "--top-k", type=count(0), metavar="K", help="draw among the K likeliest, 0 for all (default: 50)"
    )
    group.add_argument("--seed", type=count(0), metavar="N", help="of what is drawn (default: 0)")


def check(asked: argparse.Namespace) -> None:
    """Raise `ProblemError` for options that do not go together."""
    for name in ("top_p", "top_k", "seed"):
        if asked.temperature == 0 and getattr(asked, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ProblemError(
                f"{option} is for drawing, and --temperature 0 takes the likeliest: leave one of them out."
            )


def check_drawn(asked: argparse.Namespace, own: Any) -> None:
    """Raise `ProblemError` for a seed where nothing is drawn; `own` are the model's own settings."""
    if asked.seed is not None and not settings(asked).get("do_sample", own.do_sample):
        raise ProblemError(
            f"--seed {asked.seed} is of what is drawn, and this model takes the likeliest token: add --temperature, "
            "such as 0.7, or leave it out."
        )


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    """What `generate` of transformers is told; beams would make it impossible to show tokens as they come."""
    said: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
    if asked.temperature == 0:
        return said | {"do_sample": False}
    names = ("temperature", "top_p", "top_k")
    drawn = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    return said | drawn | ({"do_sample": True} if drawn else {})


def _number(which: str, least: float, most: float) -> Callable[[str], float]:
    """Reads a finite number between these, for argparse."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (least <= number <= most and math.isfinite(number)):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number {which}")
        return number

    return read
