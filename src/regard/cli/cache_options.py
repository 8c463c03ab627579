"""The options of a cache: `--cache int8 --window 1024 --sinks 4`, read as regard's words.

What is asked for together must make sense together, and an option that would change nothing is refused.
"""

import argparse
import importlib
from typing import Any, NamedTuple

import torch

from regard.cli.bench import count
from regard.errors import ProblemError
from regard.storage.codec import Codec, Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Layout, Paged, Rolling

CODES: dict[str, type[Codec]] = {"int8": Int8, "int4": Int4, "fp8": Fp8}
FLOATS = {"dense": None, "bf16": torch.bfloat16, "fp16": torch.float16}

POLICIES = {
    "recent": ("regard.cache.evict", "SinksAndRecent"),
    "knorm": ("regard.cache.evict", "Knorm"),
    "h2o": ("regard.cache.evict_by_attention", "H2O"),
    "tova": ("regard.cache.evict_by_attention", "TOVA"),
    "snapkv": ("regard.cache.evict_by_attention", "SnapKV"),
    "expected": ("regard.cache.expected_attention", "ExpectedAttention"),
}
"""Where the policy of a name stands."""

SINKS = 4
"""First tokens that a window keeps, if nothing is said: Xiao et al. 2023, arXiv:2309.17453, table 2."""


EVERY = 16
"""Tokens over the budget that gather before a policy forgets them: what stays is copied each time."""


class CacheWords(NamedTuple):
    """The words of a cache, as `regard_cache` takes them."""

    layout: Layout
    codec: Codec | torch.dtype | None
    evict: Any


PLAIN = CacheWords(Contiguous(), None, None)
"""What nobody said anything about: everything is kept, as it comes."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of a cache."""
    group = parser.add_argument_group("the cache of keys and values")
    size = count(1)
    kinds = [*FLOATS, *CODES]
    group.add_argument(
        "--cache", choices=kinds, default="dense", help="how numbers are written (default: as they come)"
    )
    group.add_argument("--group", type=size, metavar="N", help="numbers that share a scale (int8, int4, fp8)")
    group.add_argument("--rotate", action="store_true", help="rotate channels before they are written (the same)")
    group.add_argument("--window", type=size, metavar="N", help="keep the first and the last tokens, N in all")
    group.add_argument("--sinks", type=count(0), metavar="N", help=f"the first tokens of --window (default: {SINKS})")
    group.add_argument("--page", type=size, metavar="N", help="keep tokens in pages of N")
    group.add_argument("--evict", choices=list(POLICIES), help="forget tokens by this policy when --budget is reached")
    group.add_argument("--budget", type=_budget, metavar="N", help="tokens that --evict keeps, or a share such as 0.25")


def words(asked: argparse.Namespace) -> CacheWords:
    """The words that the options say.

    Raises:
        ProblemError: options that do not go together.
    """
    return CacheWords(_layout(asked), _codec(asked), _policy(asked))


def _layout(asked: argparse.Namespace) -> Layout:
    if asked.sinks is not None and asked.window is None:
        raise ProblemError(f"--sinks {asked.sinks} are the first tokens of a window: add --window.")
    if asked.window is not None and asked.page is not None:
        raise ProblemError("--window and --page are two ways to keep tokens: leave one of them out.")
    if asked.window is not None:
        return Rolling(asked.window, sinks=min(SINKS, asked.window - 1) if asked.sinks is None else asked.sinks)
    return Contiguous() if asked.page is None else Paged(asked.page)


def _codec(asked: argparse.Namespace) -> Codec | torch.dtype | None:
    if asked.cache in CODES:
        group = {} if asked.group is None else {"group": asked.group}
        return CODES[asked.cache](**group, rotate=asked.rotate)
    for option in ("group", "rotate"):
        if getattr(asked, option):
            raise ProblemError(f"--{option} is for codes, and --cache is {asked.cache}: expected {', '.join(CODES)}.")
    return FLOATS[asked.cache]


def _policy(asked: argparse.Namespace) -> Any:
    if asked.evict is None:
        if asked.budget is not None:
            raise ProblemError(f"--budget is what a policy keeps: add --evict, one of {', '.join(POLICIES)}.")
        return None
    if asked.budget is None:
        raise ProblemError(f"--evict {asked.evict} forgets what is over a budget: add --budget, such as 1024 or 0.25.")
    if asked.window is not None:
        raise ProblemError("--window and --evict both forget tokens: leave one of them out.")
    module, name = POLICIES[asked.evict]
    every = 1 if asked.evict == "snapkv" else EVERY  # SnapKV forgets once, after the prompt
    return getattr(importlib.import_module(module), name)(asked.budget, every=every)


def _budget(text: str) -> int | float:
    """A number of tokens, or a share of them, below 1.

    >>> _budget("1024"), _budget("0.25")
    (1024, 0.25)
    """
    if text.isascii() and text.isdigit():
        return count(1)(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no budget: expected tokens, such as 1024, or a share as 0.25")
    return share
