"""What `regard generate` reports after the text: speed, and memory of the KV cache."""

from dataclasses import asdict, dataclass
from typing import Any

from regard.cli.byte_size import size
from regard.cli.generation import INTERRUPTED, Generation
from regard.cli.token_count import tokens_of
from regard.evaluate.common_prefix import common_prefix
from regard.storage.codec import Codec

ENDED = {
    "end": "ended by the model",
    "stop": "ended by --stop",
    "tokens": "ended by --max-new-tokens",
    INTERRUPTED: "interrupted",
}

SHOWN = 32
"""Characters of two texts that are shown after their first difference."""


@dataclass(frozen=True)
class CacheMemory:
    """Tokens and bytes of a cache at the end.

    Attributes:
        spec: layout, codec and policy of the cache.
        layers: what the layers store, one line for all layers that are alike.
        tokens_seen: tokens that were appended.
        tokens: tokens that are stored, in the layer with the most.
        bytes: bytes of the stored tokens, in all layers.
        allocated_bytes: bytes of memory, including free room for later tokens.
        plain_bytes: bytes of transformers' own cache for the same tokens, in the model's type.
        unquantised: the most tokens that a codec stores as they are, the first and the last; None without a codec.
    """

    spec: str
    layers: list[str]
    tokens_seen: int
    tokens: int
    bytes: int
    allocated_bytes: int
    plain_bytes: int
    unquantised: int | None


def cache_memory(cache: Any) -> CacheMemory:
    """The memory of a `RegardCache`, or of the growing part of a `PairedCache`."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = [layer for layer in own.layers if hasattr(layer, "kv")]
    parts = [repr(own.options.layout), *(str(part) for part in own.options[1:] if part is not None)]
    return CacheMemory(
        spec=", ".join(parts).replace("torch.", ""),
        layers=cache.explain().split("\n  ")[1:],
        tokens_seen=int(cache.get_seq_length()),
        tokens=max((layer.kv.tokens for layer in layers), default=0),
        bytes=sum(layer.kv.bytes for layer in layers),
        allocated_bytes=sum(layer.kv.allocated_bytes for layer in layers),
        plain_bytes=sum(_plain_bytes(layer) for layer in layers),
        unquantised=_unquantised(own.options.codec),
    )


def _unquantised(codec: Any) -> int | None:
    """The first tokens in whole groups, the last ones, and those that wait until a group is complete."""
    if not isinstance(codec, Codec):
        return None
    return -(-codec.sinks // codec.group) * codec.group + codec.residual + codec.group - 1


def _plain_bytes(layer: Any) -> int:
    """Bytes of a layer's tokens in the model's type, at most those of its sliding window."""
    seen, kv = layer.get_seq_length(), layer.kv
    return kv.token_bytes * (min(seen, layer.sliding_window) if layer.is_sliding else seen)


def report(made: Generation, plain: Generation | None, memory: CacheMemory, facts: dict[str, Any]) -> str:
    """The report in a few lines of text."""
    share = f", {100 * memory.bytes / memory.plain_bytes:.0f} % of " if memory.plain_bytes else ""
    share += f"the {size(memory.plain_bytes)} of a plain {facts['dtype']} cache" if share else ""
    tokens = f"{memory.tokens:,} of " if memory.tokens < memory.tokens_seen else ""
    stored = f"{size(memory.bytes)} for {tokens}{tokens_of(memory.tokens_seen)}{share}"
    chat = " in the chat template" * facts["chat"]
    lines = [
        f"{facts['model']}, {facts['dtype']}, {_where(facts)}",
        f"  prompt     {tokens_of(made.prompt_tokens)}{chat}{rate(made.prompt_rate)}",
        f"  generated  {tokens_of(len(made.tokens))}{rate(made.rate)}; {ENDED[made.ended]}",
        f"  KV cache   {stored}; {size(memory.allocated_bytes)} allocated",
    ]
    lines += [f"             {line}" for line in memory.layers]
    if memory.unquantised is not None and memory.tokens <= memory.unquantised:
        lines.append(
            f"  note       up to {memory.unquantised:,} tokens (the first and the latest) stay unquantised, so this "
            "codec saves no memory on a text this short"
        )
    if plain is not None:
        lines.append(f"  compare    {_comparison(made, plain)}")
    if facts["positions"] is not None and memory.tokens_seen > facts["positions"]:
        lines.append(
            f"  note       {memory.tokens_seen:,} positions, and the model has {facts['positions']:,}: the window "
            "keeps every distance within them"
        )
    return "\n".join(lines)


def _where(facts: dict[str, Any]) -> str:
    return facts["device"] if facts["device"] != "cpu" else f"{facts['threads']} thread{'s' * (facts['threads'] > 1)}"


def rate(speed: float | None) -> str:
    """Tokens per second, as the end of a line; empty where none were generated.

    >>> rate(1234.5), rate(12.34), rate(None)
    (', 1,234 per second', ', 12.3 per second', '')
    """
    return "" if speed is None else f", {speed:,.0f} per second" if speed >= 100 else f", {speed:.1f} per second"


def _comparison(made: Generation, plain: Generation) -> str:
    """The first difference from the text with a plain cache, and the speed of that."""
    count, same = len(made.tokens), common_prefix(made.tokens, plain.tokens)
    speed = f"which generated{rate(plain.rate).replace(',', '', 1) or ' nothing'}"
    if same == count == len(plain.tokens):
        return f"the same {tokens_of(count, 'generated ')} as with a plain cache, {speed}"
    here, there = (text.replace("\n", " ") for text in _differing_ends(made.text, plain.text))
    are = "is that" if same == 1 else "are those"
    first = f"the first {same:,} of {tokens_of(count, 'generated ')} {are} of a plain cache"
    return f"{first}, {speed}; then {here!r}, not {there!r}"


def _differing_ends(one: str, other: str) -> tuple[str, str]:
    """How two texts continue after their common prefix, from the beginning of a word.

    >>> _differing_ends("the sea is calm today", "the sea is cold")
    ('calm today', 'cold')
    """
    start = one.rfind(" ", 0, common_prefix(one, other)) + 1
    return one[start : start + SHOWN], other[start : start + SHOWN]


def as_dict(made: Generation, plain: Generation | None, memory: CacheMemory, facts: dict[str, Any]) -> dict[str, Any]:
    """The report with all tokens, for JSON."""
    fields = {**facts, **_fields(made), "cache": asdict(memory)}
    if plain is None:
        return fields
    return fields | {"plain": {**_fields(plain), "same_tokens": common_prefix(made.tokens, plain.tokens)}}


def _fields(made: Generation) -> dict[str, Any]:
    rates = {"prompt_tokens_per_second": made.prompt_rate, "tokens_per_second": made.rate}
    return {**asdict(made), **rates}
