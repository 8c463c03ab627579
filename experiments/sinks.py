"""Attention sinks of SmolLM2-135M: the mass on the first token, what eviction of it costs, and where it must be.

1. The mass that later tokens put on the first one, by layer; for the first token of each text, and with a line break
   in front, which says nothing.
2. A text longer than the cache: the losses with the last 256 tokens, with the first ones as well (StreamingLLM), with
   all tokens, and with the last 256 tokens read again for each 32 predictions (the expensive way).
3. Positions: in the cache the sinks are next to the window; in the text they are ever further away. RoPE knows only
   distances, so 4 sinks at the positions 0 to 3 and 508 tokens from position p on are what a cache that keeps the
   positions of the text has there. Position 4 is what a cache with positions of its own always has.
"""

from typing import Any

import numpy as np
import torch
from record import DOCS, Check, Experiment, Result, legends
from torch import Tensor
from torch.nn import functional as F

from regard.cache import Rolling
from regard.evaluate import CacheOptions, Perplexity, Stream, evaluate
from regard.evaluate.corpus import samples
from regard.evaluate.haystack import MOBY_DICK, read
from regard.evaluate.intervals import Interval, drawn
from regard.inspect import measure as measure_heads
from regard.integrate import load, regard_cache, use_regard

BUCKET, SINKS = 32, 4
TABLE_2 = {
    "Falcon-7B": (17.90, 12.12, 12.12),
    "MPT-7B": (460.29, 14.99, 14.99),
    "Pythia-12B": (21.62, 11.95, 12.09),
    "Llama-2-7B": (3359.95, 11.88, 9.59),
}
"""Perplexities of Xiao et al. with 0, 1 and 4 sinks."""
TRAINED = 8192
"""Positions of SmolLM2."""
STARTS = (4, 1024, 4096, TRAINED, 2 * TRAINED, 4 * TRAINED, 8 * TRAINED)
"""Text positions at which the window begins."""


def masses(model: Any, texts: Tensor) -> Tensor:
    """The mean mass on the first token: [texts, layers, heads]."""
    return torch.stack([measure_heads(model, row, "sink")["sink"].value for row in texts])


def streams(model: Any, tokenizer: Any, file: str, window: int) -> dict[str, list[float]]:
    """The losses of a text of 8 windows in buckets of 32 tokens, by cache. Pieces of 16 tokens are read at once."""
    length = 8 * window
    names = {"no sinks": 0, "1 sink": 1, "4 sinks": SINKS}
    rolling = {name: CacheOptions(Rolling(window, sinks), step=16) for name, sinks in names.items()}
    task = Stream(lengths=(length,), samples=1, haystack=file)
    found = {
        name: evaluate(task, model, tokenizer, cache=cache).records
        for name, cache in ({"all tokens": None} | rolling).items()
    }
    windows: Any = Perplexity(context=window, stride=BUCKET, lengths=(length,), haystack=file)
    found["read again"] = evaluate(windows, model, tokenizer).records
    return {name: buckets(records) for name, records in found.items()}


def buckets(records: list[dict[str, Any]]) -> list[float]:
    """The mean losses of each 32 tokens; the records of a text, in its order, have means of shorter or equal parts."""
    losses = np.concatenate([np.repeat(each["losses"], each["counts"]) for each in records])
    return losses.reshape(-1, BUCKET).mean(1).tolist()


@torch.no_grad()
def far_sinks(model: Any, ids: Tensor, start: int) -> list[float]:
    """The losses of the second half of the passages, with sinks at 0 to 3 and the other tokens from a position on."""
    cache, fed = regard_cache(model), ids[:, :-1]
    model.model(fed[:, :SINKS], cache=cache, use_cache=True)
    place = torch.arange(start, start + fed.shape[1] - SINKS).expand(len(ids), -1)
    states = model.model(fed[:, SINKS:], cache=cache, use_cache=True, position_ids=place).last_hidden_state
    scored = ids.shape[1] // 2
    logits = model.lm_head(states[:, -scored:]).flatten(0, 1)
    return F.cross_entropy(logits, ids[:, -scored:].flatten(), reduction="none").view(-1, 16).mean(1).tolist()


def by(losses: dict[Any, list[float]], one: Any, other: Any, skip: int = 0) -> Interval:
    """A perplexity by another, with its 95 % interval over buckets."""
    pair = (np.array(losses[name][skip:]) for name in (one, other))
    return drawn(*pair, of=lambda a, b: np.exp(a - b))


def measure(seed: int, quick: bool) -> Result:
    """Nothing is random but the resamples of the intervals, which have a seed of their own."""
    model, tokenizer, _ = load()
    use_regard(model)
    file, window = (str(DOCS.parent / "LICENSE"), 64) if quick else (MOBY_DICK, 256)
    text = read(file)
    texts = samples(text, tokenizer, 2 if quick else 5, 128)
    line = torch.tensor(tokenizer("\n").input_ids)
    mass, blank = masses(model, texts), masses(model, torch.cat((line.expand(len(texts), -1), texts), 1))
    layers = mass.mean((0, 2))

    losses = streams(model, tokenizer, file, window)
    past = 2 * window // BUCKET  # the first bucket that is counted: the first tokens are long gone
    cost = by(losses, "no sinks", "all tokens", past)
    without = by(losses, "no sinks", "4 sinks", past)
    paper = [(none / four, single / four) for none, single, four in TABLE_2.values()]
    one, again = by(losses, "1 sink", "4 sinks", past), by(losses, "4 sinks", "read again", past)
    ids = samples(text, tokenizer, 1 if quick else 3, 257 if quick else 513)
    starts = STARTS[::3] if quick else STARTS
    shifted = {start: far_sinks(model, ids, start) for start in starts}
    inside = max(by(shifted, start, 4)[0] for start in starts if start < TRAINED)
    far = by(shifted, starts[-1], 4)
    many, same = (mass.mean(0) > 0.3).double().mean().item(), (blank.mean() / mass.mean()).item()
    evicted, cache = f"window {window} without sinks, past {2 * window} tokens", "those of the cache"
    checks = [
        Check("mass on the first token, mean of all heads ('30-50 %+')", mass.mean().item(), low=0.3),
        Check("the same, least mean of a layer beyond the first two", layers[2:].min().item(), low=0.3),
        Check("share of heads with more than 0.3", many, low=0.5),
        Check("mass on a line break in front, by that on the text's first token", same, low=0.8),
        Check(f"{evicted}: perplexity by that with all tokens", cost[0], low=1.5),
        Check("the same, by perplexity with 4 sinks: as in table 2 (Falcon 1.48, Pythia 1.79, MPT 31, Llama-2 350)",
              without[0], low=min(none for none, _ in paper), high=max(none for none, _ in paper)),
        Check("4 sinks: perplexity by that of the last tokens read again", again[0], high=1.05),
        Check("1 sink: perplexity by that with 4, at most as in table 2 (Pythia 0.99, Falcon and MPT 1, Llama-2 1.24)",
              one[0], high=max(single for _, single in paper)),
        Check(f"positions of the text, up to 4,096: greatest perplexity by that with {cache}", inside, high=1.02),
        Check(f"positions of the text, {starts[-1]:,}: perplexity by that with {cache}", far[0], low=1.05),
    ]  # fmt: skip
    return Result(
        f"The first token gets {100 * mass.mean():.0f} % of the mass ({100 * layers[:2].mean():.0f} % in the first two "
        f"layers, {100 * layers[2:].mean():.0f} % in the others), a line break {100 * blank.mean():.0f} %. Without "
        f"sinks the perplexity is {cost[0]:.2f} times that with all tokens ({cost[1]:.2f} to {cost[2]:.2f}), "
        f"{without[0]:.2f} times that with 4; with 4 it is {again[0]:.2f} times that of reading again "
        f"({again[1]:.2f} to {again[2]:.2f}); with 1 sink {one[0]:.3f} times that with 4. Sinks "
        f"{starts[-1]:,} positions away: {far[0]:.2f} times ({far[1]:.2f} to {far[2]:.2f}).",
        checks,
        {
            "layers": layers.tolist(), "texts": mass.mean(2).tolist(), "blank": blank.mean((0, 2)).tolist(),
            "losses": losses, "shifted": {str(start): by(shifted, start, 4) for start in starts},
            "bucket": BUCKET, "window": window, "trained": TRAINED,
        },
        f"{len(texts)} passages of 128 tokens for the mass; one text of {BUCKET * len(losses['4 sinks']):,} tokens for "
        "the losses, whose intervals are over its parts. A query sees up to 15 tokens more than the window, and with "
        "reading again up to 31 fewer; also, cached keys and values were computed with earlier tokens in view, and "
        "those of a second reading were not. Without sinks the perplexity rises as for Falcon and Pythia in table 2, "
        "unlike Llama-2 and MPT, which collapse; 1 sink does as well as 4, as for Falcon, MPT and Pythia, unlike "
        "Llama-2. SmolLM2 was trained without a special first token; any first token is its sink. Sinks keep the text "
        "fluent; what was evicted is forgotten (needles: docs/evaluate.md). One small model.",
    )  # fmt: skip


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Mass by layer; perplexity along the text; perplexity by the distance of the sinks."""
    first, second, third = figure.subplots(1, 3)
    for row in data["texts"]:
        first.plot(row, color="C0", linewidth=0.6, alpha=0.6)
    first.plot(data["layers"], color="C0", linewidth=2, label="first token of a text")
    first.plot(data["blank"], color="C1", label="a line break in front")
    first.set(title="mass on the first token", xlabel="layer", ylim=(0, 1))
    for name, losses in data["losses"].items():
        joined = np.array(losses).reshape(-1, 4).mean(1)
        second.plot((np.arange(len(joined)) + 0.5) * 4 * data["bucket"], np.exp(joined), label=name)
    second.axvline(data["window"], color="gray", linewidth=0.8, linestyle=":")
    second.set(title=f"perplexity, window {data['window']}", xlabel="position in the text", yscale="log")
    starts = [int(start) for start in data["shifted"]]
    ratio, low, high = zip(*data["shifted"].values(), strict=True)
    third.semilogx(starts, ratio, marker=".", label="sinks at 0 to 3")
    third.fill_between(starts, low, high, alpha=0.2)
    third.axvline(data["trained"], color="gray", linewidth=0.8, linestyle=":", label="positions of the model")
    third.set(title="perplexity by that at position 4", xlabel="text position of the window", yscale="log")
    legends(first, second, third)


EXPERIMENT = Experiment(
    "sinks",
    "Attention sinks",
    "Much of the attention goes to the first token whatever it says; a cache that evicts it breaks, and one that keeps "
    "a few first tokens, at positions of the cache, does not.",
    "Xiao et al. 2023, arXiv:2309.17453, §3.1 (sinks; table 2: perplexities with 0 to 8 of them) and §3.2 (positions "
    "in the cache); introductions: '30-50 %+ of total attention weight'",
    "Mass of 0.3 or more beyond the first two layers, on a line break too; without sinks a perplexity of 1.48 to "
    "350 times that with 4, as in table 2, and with 4 that of reading again; harm by positions of the text only beyond "
    "those of the model.",
    measure,
    draw,
    size=(11.0, 3.2),
)

if __name__ == "__main__":
    EXPERIMENT.main()
