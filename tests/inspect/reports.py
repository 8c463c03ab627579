"""Reports made up for tests: heads with a sink, a line one token back, a stripe further back, or nothing at all."""

from dataclasses import replace

import numpy as np

from regard.inspect.surveying.kinds import Estimate, Head, ranked
from regard.inspect.surveying.report import Ablations, CloseUp, Picture, Report, RunInfo

PATTERNS = ("sink", "previous", "induction", "even")


def report(
    layers=3,
    heads=4,
    tokens=None,
    prompt=None,
    *,
    pooled=1,
    causal=True,
    kv_heads=2,
    model="a model",
    close_ups=(),
    other=None,
    ablated=False,
    notes=(),
) -> Report:
    """A report whose pictures show what its scores say: head h of layer l has pattern (l + h) mod 4.

    Args:
        pooled: tokens per cell; above 1 the pictures have their greatest weights too.
        close_ups: the heads (layer, head) that can be read to the last weight.
        other: a report that this one is compared with.
        ablated: whether it says what each head's absence costs.
    """
    tokens = tuple(f" t{n}" for n in range(29)) if tokens is None else tuple(tokens)
    prompt = len(tokens) - 5 if prompt is None else prompt
    kept = np.arange(1, len(tokens) + 1) if causal else np.full(len(tokens), len(tokens))
    made = [head(layer, number, heads // kv_heads, kept) for layer in range(layers) for number in range(heads)]
    if ablated:
        made = [replace(h, scores=dict(h.scores) | {"delta_loss": Estimate(cost(h.layer, h.head), 0.0)}) for h in made]
    places = [(h.layer, h.head) for h in made]
    pairs = layers * heads * int(kept.sum())
    run = RunInfo(
        model, layers, heads, kv_heads, 64, 12_345_678, ("sdpa",) * layers, 321.0, 12.3, 0.5, pairs, 2e-5,
        "a machine, 2 threads", {"torch": "2.13.0"}, {"prompt": 0.1}, tuple(notes),
    )  # fmt: skip
    return Report(
        run,
        "".join(tokens[:prompt]),
        tokens,
        prompt,
        "".join(tokens[prompt:]),
        tuple(replace(h, sure=0.98) for h in ranked(made)),
        tuple(picture(*place, len(tokens), pooled, causal) for place in places),
        close_ups=tuple(close(*place, len(tokens), causal) for place in close_ups),
        profiles={place: profile(weights(*place, len(tokens), causal)) for place in places},
        other=other,
        ablations=Ablations("zero", 2.5, len(tokens) - 1, {place: cost(*place) for place in places}, "No importance.")
        if ablated
        else None,
    )


def head(layer, number, group, kept) -> Head:
    values = dict.fromkeys(("sink", "previous", "induction"), 0.05)
    pattern = PATTERNS[(layer + number) % 4]
    if pattern != "even":
        values[pattern] = 0.9 - 0.05 * layer
    values["alpha"] = values["sink"]
    entropy, chance = float(np.log(kept).mean()), float((1 / kept[1:]).mean())
    mine = entropy if pattern == "even" else 0.4
    scores = {
        "entropy": Estimate(mine, entropy, 0.9 * mine, 1.1 * mine),
        "effective_tokens": Estimate(float(np.exp(mine)), float(kept.mean())),
        "sink_value": Estimate(0.25 + 0.25 * layer, 1.0),
    } | {name: Estimate(value, chance, max(0.0, value - 0.03), value + 0.03) for name, value in values.items()}
    return Head(layer, number, number // group, scores)


def cost(layer, number) -> float:
    """What the loss rises by without this head."""
    return 0.01 * (number - 1) + 0.1 * (layer == 0)


def profile(of_pairs) -> tuple[float, ...]:
    """How the mass of a mean row lies by distance: 0, 1, 2 to 3, 4 to 7 ..."""
    n = len(of_pairs)
    distance = np.abs(np.arange(n)[:, None] - np.arange(n)[None])
    bins = np.where(distance > 0, np.floor(np.log2(np.maximum(distance, 1))) + 1, 0).astype(int)
    return tuple((np.bincount(bins.ravel(), of_pairs.ravel()) / n).tolist())


def close(layer, number, n, causal=True) -> CloseUp:
    """A head whose q and k give, as `CloseUp` says, the weights of the same head's picture.

    k is the identity and q the logarithm of the weights: a dimension a token.
    """
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(weights(layer, number, n, causal)), -20)
    return CloseUp(
        layer, number, logits.astype(np.float32), np.eye(n, dtype=np.float32), np.zeros(n, np.float32), 1.0, None,
        np.zeros(n, np.int32), np.arange(1, n + 1, dtype=np.int32) if causal else np.full(n, n, np.int32),
    )  # fmt: skip


def weights(layer, number, n, causal=True):
    """The attention of a head, float [n, n], rows summing to one."""
    logits = np.random.default_rng([layer, number]).normal(0, 0.7, (n, n))
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    peak = {"sink": k == 0, "previous": k == q - 1, "induction": k == q - n // 3, "even": k < 0}
    logits = np.where(causal & (k > q), -np.inf, logits + 6 * peak[PATTERNS[(layer + number) % 4]])
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def picture(layer, number, n, pooled, causal=True) -> Picture:
    """As `survey` makes it: sides of at most n / pooled cells, each the mean of its pairs."""
    of_pairs, starts = weights(layer, number, n, causal), range(0, n, pooled)
    sums, largest = (by.reduceat(by.reduceat(of_pairs, starts, 0), starts, 1) for by in (np.add, np.maximum))
    size, sides = len(starts), np.diff([*starts, n])
    means = sums / np.outer(sides, sides)
    return Picture(layer, number, size, pooled, coded(means), coded(largest) if pooled > 1 else None)


def coded(weights):
    """Bytes of a picture."""
    return np.round(255 * np.sqrt(weights)).astype(np.uint8)
