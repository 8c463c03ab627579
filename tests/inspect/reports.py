"""Reports made up for tests: heads with a sink, a line one token back, a stripe further back, or nothing at all."""

import numpy as np

from regard.inspect.report import Head, Picture, Report, Run, ranked

PATTERNS = ("sink", "previous", "induction", "even")


def report(
    layers=3, heads=4, tokens=None, prompt=None, *, pooled=1, causal=True, kv_heads=2, model="a model"
) -> Report:
    """A report whose pictures show what its scores say: head h of layer l has pattern (l + h) mod 4."""
    tokens = tuple(f" t{n}" for n in range(29)) if tokens is None else tuple(tokens)
    prompt = len(tokens) - 5 if prompt is None else prompt
    kept = np.arange(1, len(tokens) + 1) if causal else np.full(len(tokens), len(tokens))
    made = [head(layer, number, heads // kv_heads, kept) for layer in range(layers) for number in range(heads)]
    pictures = [picture(h.layer, h.head, len(tokens), pooled, causal) for h in made]
    pairs = layers * heads * int(kept.sum())
    run = Run(
        model, layers, heads, kv_heads, 64, 12_345_678, ("sdpa",) * layers, 321.0, 12.3, 0.5, pairs, 2e-5,
        "a machine, 2 threads", {"torch": "2.13.0"}, {"prompt": 0.1},
    )  # fmt: skip
    return Report(
        run, "".join(tokens[:prompt]), tokens, prompt, "".join(tokens[prompt:]), ranked(made), tuple(pictures)
    )


def head(layer, number, group, kept) -> Head:
    scores = dict.fromkeys(("sink", "previous", "induction"), 0.05)
    pattern = PATTERNS[(layer + number) % 4]
    if pattern != "even":
        scores[pattern] = 0.9 - 0.05 * layer
    entropy, chance = float(np.log(kept).mean()), float((1 / kept[1:]).mean())
    mine = entropy if pattern == "even" else 0.4
    chances = dict.fromkeys(("sink_chance", "previous_chance", "induction_chance"), chance)
    return Head(layer, number, number // group, mine, float(np.exp(mine)), **scores, entropy_chance=entropy, **chances)


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
    of_pairs, size = weights(layer, number, n, causal), -(-n // pooled)
    cells = [
        np.array_split(rows, range(pooled, n, pooled), axis=1)
        for rows in np.array_split(of_pairs, range(pooled, n, pooled))
    ]
    means = np.array([[cell.mean() for cell in row] for row in cells])
    return Picture(layer, number, size, pooled, np.round(255 * np.sqrt(means)).astype(np.uint8))
