"""What `regard generate` tells after the text: how fast it came, and what the cache held."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.cli.writing import CUT, Written

ENDED = {
    "end": "the model ended it",
    "stop": "ended by --stop",
    "tokens": "as many as were asked for",
    CUT: "interrupted",
}


SHOWN = 32
"""Characters of two texts that are shown where they part."""


@dataclass(frozen=True)
class Held:
    """What a cache held at the end.

    Attributes:
        words: the cache in words.
        layers: what the layers keep, a line for those that are alike.
        seen: tokens that went into it.
        kept: tokens that are in it, of the layer with the most.
        bytes: of what is stored, in all layers.
        held: bytes of memory that it takes, room for tokens to come included.
        dense: bytes that transformers' own cache would store for as many tokens, in the model's type.
    """

    words: str
    layers: list[str]
    seen: int
    kept: int
    bytes: int
    held: int
    dense: int


def held(cache: Any) -> Held:
    """What a `RegardCache` holds, or a `PairedCache` in its part that grows."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = [layer for layer in own.layers if hasattr(layer, "kv")]
    words = [repr(own.words.layout), *(str(word) for word in own.words[1:] if word is not None)]
    return Held(
        words=", ".join(words).replace("torch.", ""),
        layers=cache.explain().split("\n  ")[1:],
        seen=int(cache.get_seq_length()),
        kept=max((layer.kv.tokens for layer in layers), default=0),
        bytes=sum(layer.kv.bytes for layer in layers),
        held=sum(layer.kv.allocated_bytes for layer in layers),
        dense=sum(_dense(layer) for layer in layers),
    )


def _dense(layer: Any) -> int:
    """Bytes of a layer's tokens as they came; layers that look back over a window keep that much anyway."""
    seen, kv = layer.get_seq_length(), layer.kv
    return kv.token_bytes * (min(seen, layer.sliding_window) if layer.is_sliding else seen)


def told_of(written: Written, plain: Written | None, held: Held, facts: dict[str, Any]) -> str:
    """The numbers in a few lines."""
    w = written
    kept = f"{held.kept:,} of {held.seen:,} tokens" if held.kept < held.seen else f"{held.seen:,} tokens"
    dense = f"the {size(held.dense)} of a plain {facts['dtype']} cache"
    share = f", {100 * held.bytes / held.dense:.0f} % of {dense}" if held.dense else ""
    lines = [
        f"{facts['model']}, {facts['dtype']}, {_where(facts)}",
        f"  prompt   {w.prompt_tokens:,} tokens{' in the chat template' * facts['chat']}{_rate(w.prompt_rate)}",
        f"  written  {len(w.tokens):,} tokens{_rate(w.rate)}; {ENDED[w.ended]}",
        f"  cache    {size(held.bytes)} for {kept}{share}; {size(held.held)} held",
    ]
    lines += [f"           {line}" for line in held.layers]
    if plain is not None:
        lines.append(f"  compare  {_compared(written, plain)}")
    if facts["positions"] is not None and held.seen > facts["positions"]:
        lines.append(
            f"  note     {held.seen:,} positions, and the model was made for {facts['positions']:,}: the window keeps "
            "every distance within it"
        )
    return "\n".join(lines)


def _where(facts: dict[str, Any]) -> str:
    return facts["device"] if facts["device"] != "cpu" else f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}"


def size(count: int) -> str:
    """Bytes in a unit that fits.

    >>> size(512), size(18_694_144), size(3 * 10**9)
    ('512 bytes', '18.7 MB', '3.0 GB')
    """
    for unit, number in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= number:
            return f"{count / number:.1f} {unit}"
    return f"{count} bytes"


def _rate(speed: float | None) -> str:
    return "" if speed is None else f", {speed:,.0f} a second" if speed >= 100 else f", {speed:.1f} a second"


def _compared(written: Written, plain: Written) -> str:
    """Where the text parts from that of a plain cache, and how fast that was."""
    count, same = len(written.tokens), alike(written.tokens, plain.tokens)
    fast = f"which wrote{_rate(plain.rate).replace(',', '', 1) or ' nothing'}"
    if same == count == len(plain.tokens):
        return f"the same {count:,} tokens as with a plain cache, {fast}"
    here, there = (text.replace("\n", " ") for text in _parted(written.text, plain.text))
    return f"the first {same:,} of {count:,} tokens are those of a plain cache, {fast}; then {here!r}, not {there!r}"


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first are the same.

    >>> alike([3, 1, 4], [3, 1, 5, 9]), alike("a", "ab")
    (2, 1)
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _parted(one: str, other: str) -> tuple[str, str]:
    """What two texts go on with where they part, from the beginning of a word.

    >>> _parted("the sea is calm today", "the sea is cold")
    ('calm today', 'cold')
    """
    start = one.rfind(" ", 0, alike(one, other)) + 1
    return one[start : start + SHOWN], other[start : start + SHOWN]


def as_json(written: Written, plain: Written | None, held: Held, facts: dict[str, Any]) -> dict[str, Any]:
    """The same, and all tokens, for programs."""
    found = {**facts, **_all_of(written), "cache": asdict(held)}
    if plain is None:
        return found
    return found | {"plain": {**_all_of(plain), "same_tokens": alike(written.tokens, plain.tokens)}}


def _all_of(written: Written) -> dict[str, Any]:
    rates = {"prompt_tokens_per_second": written.prompt_rate, "tokens_per_second": written.rate}
    return {**asdict(written), **rates}
