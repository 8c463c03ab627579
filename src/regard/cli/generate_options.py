"""The options of `regard generate` for its length, its KV cache and sampling: which exist, and which go together.

Options that contradict each other, or would have no effect, are refused before torch is imported.
"""

import argparse
import importlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.cli.argument_types import budget, count, number
from regard.cost.storage_names import DENSE, FLOATS, NAMES
from regard.errors import ProblemError

if TYPE_CHECKING:
    import torch

    from regard.storage.codec import Codec
    from regard.storage.stored import Layout

NEW_TOKENS = 256
"""Default of --max-new-tokens; fewer where the model's context is shorter."""

CODECS = {"int8": "Int8", "int4": "Int4", "fp8": "Fp8"}
"""Classes of `regard.storage.codec`."""

POLICIES = {
    "recent": ("regard.cache.evict", "SinksAndRecent"),
    "knorm": ("regard.cache.evict", "Knorm"),
    "h2o": ("regard.cache.evict_by_attention", "H2O"),
    "tova": ("regard.cache.evict_by_attention", "TOVA"),
    "snapkv": ("regard.cache.evict_by_attention", "SnapKV"),
    "expected": ("regard.cache.expected_attention", "ExpectedAttention"),
}
"""Module and class of each eviction policy."""

SINKS = 4
"""Default sink tokens of a window: Xiao et al. 2023, arXiv:2309.17453, table 2."""

SINKS_HELP = f"first tokens kept by --window (default: {SINKS}, or all but one of the window if that is less)"

COLDEST = 1e-6
"""The lowest temperature above 0: logits divided by far lower ones are infinite in float32."""

EVERY = 16
"""Tokens above the budget after which a policy evicts: each eviction copies the tokens that stay."""


class CacheSpec(NamedTuple):
    """Layout, codec and eviction policy, as `regard_cache` takes them."""

    layout: "Layout"
    codec: "Codec | torch.dtype | None"
    evict: Any


# ---- the KV cache ---------------------------------------------------------------------------------------------------


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the KV cache."""
    group = parser.add_argument_group("KV cache")
    size = count(1)
    group.add_argument("--cache", choices=NAMES, default=DENSE, help="how keys and values are stored (default: dense)")
    group.add_argument("--group-size", type=size, metavar="N", help="elements that share a scale (int8, int4, fp8)")
    group.add_argument(
        "--rotate",
        action="store_true",
        help="rotate keys and values by a Hadamard matrix before they are quantised (int8, int4, fp8)",
    )
    group.add_argument("--window", type=size, metavar="N", help="keep the first and the last tokens, N in all")
    group.add_argument("--sinks", type=count(0), metavar="N", help=SINKS_HELP)
    group.add_argument("--page-size", type=size, metavar="N", help="keep tokens in pages of N")
    group.add_argument("--evict", choices=list(POLICIES), help="evict tokens by this policy when --budget is reached")
    group.add_argument("--budget", type=budget, metavar="N", help="tokens that --evict keeps, or a share such as 0.25")


def is_plain(args: argparse.Namespace) -> bool:
    """Whether no option of the cache is given: every token is kept in the type of the model."""
    return args.cache == DENSE and args.window is None and args.page_size is None and args.evict is None


def check_cache_options(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for cache options that do not go together."""
    if args.sinks is not None and args.window is None:
        raise ProblemError(f"--sinks {args.sinks} are the first tokens of a window: add --window.")
    if args.window is not None and args.page_size is not None:
        raise ProblemError("--window and --page-size are two layouts of the cache: leave one of them out.")
    for option, value in (("--group-size", args.group_size), ("--rotate", args.rotate)):
        if value and args.cache not in CODECS:
            raise ProblemError(f"{option} is for codes, and --cache is {args.cache}: expected {', '.join(CODECS)}.")
    if args.evict is None and args.budget is not None:
        raise ProblemError(f"--budget is for an eviction policy: add --evict, one of {', '.join(POLICIES)}.")
    if args.evict is not None and args.budget is None:
        raise ProblemError(f"--evict {args.evict} keeps a budget of tokens: add --budget, such as 1024 or 0.25.")
    if args.evict is not None and args.window is not None:
        raise ProblemError("--window and --evict both drop tokens: leave one of them out.")


def cache_spec(args: argparse.Namespace) -> CacheSpec:
    """Layout, codec and policy of the options. A `ProblemError` of theirs says which value is wrong."""
    return CacheSpec(_layout(args), _codec(args), _policy(args))


def _layout(args: argparse.Namespace) -> "Layout":
    from regard.storage.stored import Contiguous, Paged, Rolling

    if args.window is not None:
        return Rolling(args.window, sinks=min(SINKS, args.window - 1) if args.sinks is None else args.sinks)
    return Contiguous() if args.page_size is None else Paged(args.page_size)


def _codec(args: argparse.Namespace) -> "Codec | torch.dtype | None":
    import torch

    from regard.storage import codec

    if args.cache in CODECS:
        group = {} if args.group_size is None else {"group": args.group_size}
        return getattr(codec, CODECS[args.cache])(**group, rotate=args.rotate)
    return None if args.cache == DENSE else getattr(torch, FLOATS[args.cache])


def _policy(args: argparse.Namespace) -> Any:
    if args.evict is None:
        return None
    module, name = POLICIES[args.evict]
    every = 1 if args.evict == "snapkv" else EVERY  # SnapKV evicts once, after the prompt
    return getattr(importlib.import_module(module), name)(args.budget, every=every)


# ---- sampling -------------------------------------------------------------------------------------------------------


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling, named as in transformers' `generate`."""
    group = parser.add_argument_group(
        "sampling", "Defaults are the model's own generation settings, or greedy decoding where it has none."
    )
    share = number("above 0, at most 1", math.ulp(0.0), 1.0)
    group.add_argument("--temperature", type=temperature, metavar="T", help="sample at this temperature; 0 is greedy")
    group.add_argument("--top-p", type=share, metavar="P", help="sample among the likeliest that make up this share")
    group.add_argument(
        "--top-k", type=count(0), metavar="K", help="sample among the K likeliest, 0 for all (default: 50)"
    )
    group.add_argument("--seed", type=count(0), metavar="N", help="seed of sampling (default: 0)")


def temperature(text: str) -> float:
    """A temperature: 0, or one by which logits can be divided.

    >>> temperature("0.7"), temperature("0")
    (0.7, 0.0)
    """
    value = number("0 or more", 0.0, math.inf)(text)
    if 0 < value < COLDEST:
        raise argparse.ArgumentTypeError(f"{text!r} is too low: expected {COLDEST:g} or more, or 0 for greedy decoding")
    return value


def check_sampling_options(args: argparse.Namespace) -> None:
    """Raise `ProblemError` for options of sampling where decoding is greedy."""
    for option, value in (("--top-p", args.top_p), ("--top-k", args.top_k), ("--seed", args.seed)):
        if args.temperature == 0 and value is not None:
            raise ProblemError(
                f"{option} is for sampling, and --temperature 0 is greedy decoding: leave one of them out."
            )


def check_seed(args: argparse.Namespace, defaults: Any) -> None:
    """Raise `ProblemError` for a seed where nothing is sampled; `defaults` are the model's generation settings."""
    if args.seed is not None and not sampling_settings(args).get("do_sample", defaults.do_sample):
        raise ProblemError(
            f"--seed {args.seed} is for sampling, and this model decodes greedily: add --temperature, such as 0.7, or "
            "leave --seed out."
        )


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of transformers' `generate`, without beams: tokens of a beam cannot be shown as they come."""
    settings: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
    if args.temperature == 0:
        return settings | {"do_sample": False}
    names = ("temperature", "top_p", "top_k")
    sampling = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return settings | sampling | ({"do_sample": True} if sampling else {})
