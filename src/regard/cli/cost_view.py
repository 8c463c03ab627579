"""The costs of a model as text: every number with its unit, memory in powers of 1,024 throughout."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from regard.cli.byte_size import size
from regard.cli.durations import duration
from regard.cli.token_count import tokens_of
from regard.cost.fit import USABLE
from regard.cost.machine import Machine
from regard.cost.machines import THIS, find_machine, machine_names
from regard.cost.model import Layer, Model
from regard.cost.model_cost import ModelCost
from regard.cost.parameter_count import parameters
from regard.cost.published import find_model, model_names
from regard.cost.work import Parts

if TYPE_CHECKING:
    from regard.parallel.predict import Sharded

TITLES = {
    "projections": "projections",
    "attention": "attention",
    "recurrent": "states",
    "mlp": "MLPs",
    "logits": "output",
}
INFINITE = "any"


def view(current: ModelCost, changes: Sequence[tuple[str, ModelCost]]) -> str:
    """The whole table."""
    blocks = [_head(current), _memory(current), _work(current), _facts(current), _what_if(current, changes)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def known() -> str:
    """The models and machines that are known."""
    models = [(name, parameters(find_model(name)).total) for name in model_names()]
    names = [f"  {name:18} {big(count)} parameters" for name, count in models]
    found = [find_machine(name) for name in machine_names()]
    machines = [f"  {m.name:18} {m.title}{' *' * bool(m.checked)}" for m in found]
    head = "machines, or several as 8xh100, or this; * whose figures were compared with a second page (machines.toml):"
    return "\n".join(["models:", *names, "", head, *machines])


def _head(c: ModelCost) -> list[str]:
    lines = [f"{c.model.name}: {_sizes(c.model)}", *(f"  layers   {text}" for text in _layers(c.model))]
    lines.append(f"  source   {c.model.source}")
    lines += [f"  note     {note}" for note in c.model.notes]
    rows = f"{c.batch:,} row{'s' * (c.batch > 1)}"
    source = f" and {c.model.source_tokens:,} of the encoder" if c.model.source_tokens and c.model.encoder else ""
    page = "" if c.storage.page is None else f" in pages of {tokens_of(c.storage.page)}"
    cache = f", KV cache {c.storage.kind}{page}" if c.model.is_causal else ""
    lines.append(f"  problem  {tokens_of(c.context)}{source} x {rows}, {c.dtype}{cache}")
    if c.model.context is not None and c.context > c.model.context:
        lines.append(f"  note     The model was made for {c.model.context:,} tokens.")
    return [*lines, f"  machine  {_machine(c.machine, c.dtype)}"] if c.machine else lines


def _sizes(model: Model) -> str:
    experts = max((layer.mlp for layer in model.layers if layer.mlp), key=lambda mlp: mlp.experts, default=None)
    mixture = f", {experts.active} of {experts.experts} experts" if experts and experts.experts > 1 else ""
    encoder = f", and {len(model.encoder)} of an encoder" if model.encoder else ""
    return f"{len(model.layers)} layers{encoder}, d_model {model.d_model:,}, vocabulary {model.vocab:,}{mixture}"


def _layers(model: Model) -> list[str]:
    """Which layers a model has, the same kinds counted: `80 of GQA-8 (64 query heads of 128), causal`."""
    kinds = Counter(_kind(layer) for layer in model.layers)
    return [f"{count} of {kind}" for kind, count in kinds.items()]


def _kind(layer: Layer) -> str:
    a, r = layer.attention, layer.recurrent
    kinds = (
        [f"{a.kind} ({a.heads} query heads of {a.qk_dim}), {a.pattern}{', shared cache' * a.shares_cache}"] if a else []
    )
    if r:
        kinds.append(f"{r.kind.replace('_', ' ')} (a state of {r.state:,} elements)")
    return " beside ".join(kinds) or "an MLP alone"


def _machine(m: Machine, dtype: str) -> str:
    return f"{m.title}: {m.peak(dtype) / 1e12:,.4g} TFLOP/s of {dtype}, {size(m.bandwidth)}/s, {size(m.memory)}"


def _memory(c: ModelCost) -> list[str]:
    p, t = c.parameters, c.training_memory
    active = f", {big(p.active)} active for a token" if p.active < 0.9 * p.total else ""
    cache = f"{size(c.cache_bytes):>12}   {size(c.token_bytes)} a token"
    rows = {
        "weights": f"{size(c.weight_bytes):>12}   {big(p.total)} parameters{active}",
        "KV cache": cache if c.model.is_causal else f"{'none':>12}   an encoder stores none",
        "  states": f"{size(c.state_bytes):>12}   of layers without attention, at any length" if c.state_bytes else "",
        "training": _states(t.states, t.activations, f", {size(t.states)} of states (Adam)"),
        "  recomputed": _states(t.states, t.recomputed, ", where layers are computed again"),
        "  naive": _states(t.states, t.naive, ", where attention stores its weights"),
    }
    return ["memory", *(f"  {name:<13}{text}" for name, text in rows.items() if text)]


def _states(states: int, activations: int, more: str) -> str:
    return f"{size(states + activations):>12}   {size(activations)} of activations{more}"


def _work(c: ModelCost) -> list[str]:
    head = ("work", "FLOP", "bytes", "FLOP/byte", "roofline", "bound by")
    rows = [*_pass(c, "prompt", c.prompt)]
    if c.step is not None:
        rows += _pass(c, "one more token", c.step)
    rows += _pass(c, "training step", c.training(), is_short=True)
    rows += _pass(c, "  recomputing", c.training(recompute=True), is_short=True)
    return _table([head, *rows])


def _pass(c: ModelCost, name: str, parts: Parts, *, is_short: bool = False) -> Iterator[tuple[str, ...]]:
    total = parts.total
    yield (name, flop(total.flops), size(total.moved), intensity(total.intensity), duration(c.seconds(parts)), "")
    for part, work in parts.each.items():
        if is_short or not work.flops:
            continue
        seconds = None if c.machine is None else c.machine.seconds(work.flops, work.moved, c.dtype)
        bound = "" if c.machine is None else "memory" if work.intensity < c.machine.balance(c.dtype) else "products"
        numbers = (flop(work.flops), size(work.moved), intensity(work.intensity), duration(seconds))
        yield (f"  {TITLES[part]}", *numbers, bound)


def _facts(c: ModelCost) -> list[str]:
    lines: list[str] = []
    if c.traffic is not None and c.machine is not None and c.traffic.naive:
        t = c.traffic
        lines.append(
            f"Attention of the prompt moves {size(t.naive)} naively, {size(t.tiled)} tiled in "
            f"{size(c.machine.fast_memory)} of fast memory, {size(t.least)} at least."
        )
    if c.machine is not None:
        lines.append(_times(c, c.machine))
    over, over_all = (_from(n) for n in (c.crossing, c.crossing_all))
    if c.model.attention is not None:
        lines.append(f"Attention outweighs its projections {over}, and projections with MLPs {over_all}.")
    if c.machine is not None and c.model.is_causal:
        lines.append(_fit(c, c.machine))
    return lines


def _from(tokens: int | None) -> str:
    return "at no length" if tokens is None else f"from {tokens:,} tokens on" if tokens > 1 else "at any length"


def _times(c: ModelCost, machine: Machine) -> str:
    """What the times of the table are."""
    prompt, step = c.expected_seconds(c.prompt), c.step and c.expected_seconds(c.step, is_step=True)
    if prompt is None:
        return "Times are rooflines of the machine's figures: limits that no program beats, not what programs reach."
    more = f", one more token in {duration(step)}" if step else ""
    shares = ", ".join(_shares(machine, c.dtype))
    return (
        f"Expected, with the shares of the limits that were measured here ({shares}): prompt {duration(prompt)}{more}."
    )


def _shares(machine: Machine, dtype: str) -> Iterator[str]:
    e = (machine.efficiency or {})[dtype]
    shares = {
        "weights": e.linear_share,
        "one row": e.stream_share,
        "attention": e.wide_share or e.share,
        "one query": e.few_share,
    }
    for name, share in shares.items():
        yield f"{name} {100 * (share or 0):.0f} %"


def _fit(c: ModelCost, machine: Machine) -> str:
    usable = f"{100 * USABLE:.0f} % of {size(machine.memory)}"
    if c.weight_bytes > int(machine.memory * USABLE):
        return f"It does not fit: {size(c.weight_bytes)} of weights, {usable}. Try {_larger(c, machine)}."
    context = "any number of" if c.largest_context is None else f"at most {c.largest_context:,}"
    batch = "any batch" if c.largest_batch is None else f"a batch of {c.largest_batch:,}"
    fits = "It fits" if c.fits else f"It does not fit ({size(c.weight_bytes + c.cache_bytes)})"
    return f"{fits} in {usable}: {context} tokens of context in this batch, or {batch} at this context."


def _larger(c: ModelCost, machine: Machine) -> str:
    """The option with as many machines of this kind as the weights fit; `this` is the only one of its kind."""
    if machine.name in THIS:
        return "another --machine"
    count = -(-c.weight_bytes // int(machine.memory // machine.count * USABLE))
    return f"--machine {count}x{machine.name.partition('x')[2] if machine.count > 1 else machine.name}"


def _what_if(current: ModelCost, changes: Sequence[tuple[str, ModelCost]]) -> list[str]:
    if len(changes) < 2:
        return []
    has_times = current.machine is not None
    head = ["what if", "KV cache", "a token", "parameters", "prompt", "one more token"]
    rows = [head + ["longest context", "largest batch"] * has_times]
    for name, c in changes:
        step = c.step
        row = [name, size(c.cache_bytes), size(c.token_bytes), big(c.parameters.total)]
        if has_times:
            longest = INFINITE if c.largest_context is None else f"{c.largest_context:,}"
            batch = INFINITE if c.largest_batch is None else f"{c.largest_batch:,}"
            row += [duration(c.seconds(c.prompt)), duration(step and c.seconds(step)), longest, batch]
        else:
            row += [flop(c.prompt.total.flops), flop(step.total.flops) if step else "-"]
        rows.append(row)
    return _table(rows)


def sharded_view(c: ModelCost, ranks: int, link: float, rows: "Sequence[Sharded]") -> list[str]:
    """The table of sharded sequences: `c` is the cost on one of the machines."""
    title = c.machine.title if c.machine else ""
    head = ("sharded", "prompt", "attention", "computing", "most work", "sent", "buffers", "memory")
    table = [
        (
            each.name, duration(each.prompt_seconds), duration(each.seconds), duration(each.compute_seconds),
            f"{each.balance:,.3f} x", size(each.sent_bytes), size(each.buffer_bytes), size(each.memory_bytes),
        )
        for each in rows
    ]  # fmt: skip
    return [
        f"The prompt on {ranks:,} ranks, each {title}, that send {size(link)}/s in each direction:",
        *_table([head, *table]),
        "Times are limits: rooflines, and bytes at the rate of the link; a ring sends while it computes. Of one rank:",
        "the most work, as a multiple of the mean; bytes sent; buffers of messages; memory with all weights.",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if not i or cell in ("memory", "products", "bound by") else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    return [line for line, _ in groupby(lines)]


# ---- numbers with their units ---------------------------------------------------------------------------------------


def flop(count: float) -> str:
    """FLOPs in powers of 1,000.

    >>> flop(4.4e12), flop(2e9), flop(12)
    ('4.40 TFLOP', '2.00 GFLOP', '12 FLOP')
    """
    for unit, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= unit:
            value = count / unit
            return f"{value:,.2f} {name}" if value < 100 else f"{value:,.0f} {name}"
    return f"{count:,.0f} FLOP"


def intensity(value: float) -> str:
    """FLOPs for each byte.

    >>> intensity(5912.3), intensity(1.514)
    ('5,912', '1.51')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def big(count: int) -> str:
    """A number of parameters.

    >>> big(68_976_648_192), big(134_515_008)
    ('68.98 B', '134.52 M')
    """
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"
