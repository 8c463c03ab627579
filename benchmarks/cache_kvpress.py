"""Eviction policies beside NVIDIA's kvpress, which has the same rules: perplexity after one eviction.

`./bench cache-kvpress` writes its part of docs/caches.md. Where kvpress is not installed, its column is empty:
`pip install kvpress==0.5.5`, or `--no-deps` to keep other versions of its dependencies.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from benchmarks import command
from benchmarks.report import machine, table
from regard.cache import TOVA, ExpectedAttention, Knorm, SnapKV
from regard.cli.argument_types import count
from regard.evaluate.corpus import samples, text_of
from regard.integrate.cache import regard_cache
from regard.integrate.cache_argument import as_argument, usual_name
from regard.integrate.checkpoint import load as load_checkpoint
from regard.integrate.transformers import use_regard

PAGE, PART = "caches.md", "kvpress"
PROMPT, KEPT, SCORED = 1024, 512, 1024

ABOUT = """\
Measured by `{how}` on {machine}: {model} in float32 reads {prompt:,} tokens of {text}, keeps {kept} of them per key
head, once, and then predicts the {scored:,} tokens that follow, without further eviction; {samples}. kvpress {kvpress}
scores and drops tokens by its `press.compress` in transformers' DynamicCache and attention; ours runs through
`regard_cache(model, evict=...)`. The options make the rules equal: no sinks where kvpress has none. The
perplexity with all tokens is {plain:.2f}."""


@dataclass(frozen=True)
class Rule:
    """A policy, and the press of the same rule: its class in kvpress and its options."""

    policy: Any
    press: str
    options: dict[str, Any]


RULES = (
    Rule(Knorm(KEPT, sinks=0, recent=0), "KnormPress", {}),
    Rule(SnapKV(KEPT, sinks=0, window=64, kernel=5), "SnapKVPress", {"window_size": 64, "kernel_size": 5}),
    Rule(TOVA(KEPT, sinks=0), "TOVAPress", {}),
    Rule(ExpectedAttention(KEPT, sinks=4, future=512), "ExpectedAttentionPress", {"n_future_positions": 512}),
)


def version() -> str | None:
    """The version of kvpress; None if it is not installed."""
    return importlib.metadata.version("kvpress") if importlib.util.find_spec("kvpress") is not None else None


@torch.no_grad()
def ours(model: Any, policy: Any, ids: Tensor, prompt: int) -> float:
    """The mean negative log-likelihood, in nats, of all tokens after a prompt: ids are int64 [1, tokens]."""
    cache = regard_cache(model, evict=policy)
    read = model.model(ids[:, :prompt], **as_argument(model.model, cache), use_cache=True).last_hidden_state[:, -1:]
    return _rest(model, ids, prompt, cache, read)


def _rest(model: Any, ids: Tensor, prompt: int, cache: Any, read: Tensor) -> float:
    """The loss of the tokens after the prompt, all at once; `read` is the last state of the prompt."""
    positions = torch.arange(prompt, ids.shape[1] - 1)[None]  # a DynamicCache would count the remaining tokens only
    rest = model.model(ids[:, prompt:-1], position_ids=positions, **as_argument(model.model, cache), use_cache=True)
    logits = model.lm_head(torch.cat([read, rest.last_hidden_state], dim=1)).float()
    return float(torch.nn.functional.cross_entropy(logits[0], ids[0, prompt:]))


@contextmanager
def pressed(model: Any, press: Any) -> Generator[None]:
    """Let a press of kvpress drop tokens of a DynamicCache after each layer's attention has read a prompt.

    kvpress's own hook needs an argument (`cache_position`) that transformers 5.23 no longer passes.
    """

    def after(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        layer = options[usual_name()].layers[module.layer_idx]
        layer.keys, layer.values = press.compress(
            module, options["hidden_states"], layer.keys, layer.values, output[1], options
        )

    hooks: list[Any] = []
    try:
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress's own context does
            hooks.append(layer.self_attn.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def by_kvpress(model: Any, rule: Rule, ids: Tensor, prompt: int) -> float:
    """As `ours`, with the tokens that kvpress keeps, in transformers' attention."""
    press = getattr(importlib.import_module("kvpress"), rule.press)(compression_ratio=0.5, **rule.options)
    cache, tokens = DynamicCache(config=model.config), ids[:, :prompt]
    model.set_attn_implementation("sdpa")
    with pressed(model, press):
        read = model.model(tokens, **as_argument(model.model, cache), use_cache=True).last_hidden_state[:, -1:]
    return _rest(model, ids, prompt, cache, read)


# ---- the page -------------------------------------------------------------------------------------------------------


def measured(
    model: Any, ids: Tensor, prompt: int, rules: Sequence[Rule], tell: Callable[[str], None]
) -> tuple[float, dict[str, tuple[float, float | None]]]:
    """(perplexity with all tokens, by policy (ours, kvpress's or None)); ids are int64 [samples, tokens]."""

    def perplexity(of: Callable[[Tensor], float]) -> float:
        return math.exp(sum(of(row[None]) for row in ids) / len(ids))

    use_regard(model)
    plain = perplexity(lambda row: ours(model, None, row, prompt))
    tell(f"all tokens: {plain:.2f}")
    found: dict[str, tuple[float, float | None]] = {}
    for rule in rules:
        use_regard(model)
        own = perplexity(lambda row, rule=rule: ours(model, rule.policy, row, prompt))
        peer = None if version() is None else perplexity(lambda row, rule=rule: by_kvpress(model, rule, row, prompt))
        found[repr(rule.policy)] = own, peer
        tell(f"{rule.policy!r}: {own:.2f}, kvpress {peer}")
    return plain, found


def results_table(found: dict[str, tuple[float, float | None]]) -> str:
    """The table of these."""
    rows = [(f"`{name}`", f"{own:.2f}", "" if peer is None else f"{peer:.2f}") for name, (own, peer) in found.items()]
    return table(("policy", "regard", "kvpress"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, the process's own if None, and return its exit code."""
    return command.main(_parser, run, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("cache-kvpress", "Perplexity of eviction policies, beside those of kvpress.", page=PAGE)
    parser.add_argument("--samples", type=count(1), default=1, metavar="N", help="samples of the text (default: 1)")
    parser.add_argument("--text", metavar="FILE", help="the text (default: Moby-Dick, by npm pack)")
    return parser


def run(args: argparse.Namespace, load: Callable[[], tuple[Any, Any, str]] | None = None) -> int:
    """Measure the policies, and print or write their table. `load` gives (model, tokenizer, label)."""
    command.check_part(args.write, PAGE, PART)
    text = text_of(args.text)
    model, tokenizer, label = (load or load_checkpoint)()
    ids = samples(text, tokenizer, args.samples, PROMPT + SCORED)
    plain, found = measured(model, ids, PROMPT, RULES, lambda line: print(line, file=sys.stderr, flush=True))
    about = ABOUT.format(
        how="./bench cache-kvpress" + f" --samples {args.samples}" * (args.samples != 1),
        machine=f"{machine()}, transformers {transformers.__version__}", model=label, prompt=PROMPT, scored=SCORED,
        text="Moby-Dick" if args.text is None else Path(args.text).name, kept=KEPT, plain=plain,
        samples="from its beginning" if args.samples == 1 else f"{args.samples} samples, spread over it",
        kvpress=version() or "(not installed)",
    )  # fmt: skip
    command.publish_part(args.write, PAGE, PART, f"{about}\n\n{results_table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
