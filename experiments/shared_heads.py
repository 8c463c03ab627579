"""Fewer key heads, or latents: what they cost in loss, and what they save in cache and time.

    MHA   8 key heads of 8       128 elements of cache for each token and layer
    GQA   2 key heads             32
    MQA   1 key head              16
    MLA   a latent of 24 and a shared rotated key of 8: 32, as many as GQA

The models are trained alike on one text. MHA is also converted to GQA and MQA: each group of key heads becomes one
head, which is their mean, the first of them, or random. Then the training goes on for 5 or 10 % of the steps.

Time is that of a decode step in a layer of real size (width 1,024, 16 heads of 64) after 8,192 tokens in the cache:
the small models would show nothing but overheads.
"""

import time
from copy import deepcopy
from functools import partial
from statistics import mean
from typing import Any

import torch
from record import Check, Experiment, Result, legends, listed, span
from tiny_model import Text, losses, moby_dick, parameters, seeded, train_on_text

from regard import Rope
from regard.cache import KVCache, Latent
from regard.nn import Decoder, LatentAttention, MultiHeadAttention, share_heads

DIM, HEADS, TOKENS = 64, 8, 128
KEY_HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}
KINDS = ("MHA", "GQA", "MQA", "MLA")
UPTRAINED = (0.0, 0.05, 0.1)
"""Share of the steps."""


def decoder(kind: str, text: Text, seed: int) -> Decoder:
    """An untrained decoder of two layers."""
    torch.manual_seed(seed)
    make, size = partial(Decoder, len(text.alphabet), DIM, 2, HEADS), DIM // HEADS
    if kind != "MLA":
        return make(kv_heads=KEY_HEADS[kind], position=Rope(size))
    latent = partial(LatentAttention, kv_rank=24, nope_dim=size, rope_dim=8, v_dim=size)
    return make(position=Rope(8), attention=latent)


def converted(model: Decoder, key_heads: int, how: Any, seed: int) -> Decoder:
    """A copy with fewer key heads."""
    other, generator = deepcopy(model), seeded(seed)
    blocks: Any = other.body.blocks
    for block in blocks:
        block.attention = share_heads(block.attention, key_heads, how, generator)
    return other


def learn(model: Decoder, text: Text, steps: int, seed: int, rate: float, label: str) -> float:
    """Train, and return the loss on unseen text, nats per character."""
    train_on_text(model, text, TOKENS, steps, seed, rate=rate, label=label)
    return losses(model, text.passages(128, TOKENS)).mean().item()


def cache_bytes(model: Decoder) -> float:
    """Bytes of cache for each token, all layers, after reading 128."""
    caches = model.caches()
    with torch.no_grad():
        model(torch.zeros(1, TOKENS, dtype=torch.int64), caches=caches)
    return sum(pair.own.bytes for pair in caches) / TOKENS


def layer(kind: str, tokens: int) -> tuple[MultiHeadAttention | LatentAttention, KVCache]:
    """A layer of real size, and its cache with random content."""
    if kind == "MLA":  # 448 + 64 elements for each token, as GQA with 4 key heads
        made = LatentAttention(1024, 16, kv_rank=448, nope_dim=64, rope_dim=64, v_dim=64, position=Rope(64))
        cache = KVCache(Latent(448))
        cache.append(torch.randn(1, 1, tokens, 512))
        return made, cache
    key_heads = {"MHA": 16, "GQA": 4, "MQA": 1}[kind]
    cache = KVCache()
    cache.append(*(torch.randn(1, key_heads, tokens, 64) for _ in range(2)))
    return MultiHeadAttention(1024, 16, kv_heads=key_heads, position=Rope(64)), cache


@torch.no_grad()
def decode_times(tokens: int, repeats: int) -> dict[str, float]:
    """The shortest time of a decode step of each layer, in ms; the layers take turns."""
    layers, x = {kind: layer(kind, tokens) for kind in KINDS}, torch.randn(1, 1, 1024)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, (attention, cache) in layers.items():
            started = time.perf_counter()
            attention(x, cache=cache)
            found[kind].append(1e3 * (time.perf_counter() - started))
            cache.crop(tokens)
    return {kind: min(times[1:]) for kind, times in found.items()}


def measure(seed: int, quick: bool) -> Result:
    """Train each kind, convert MHA, time layers."""
    text, seeds, steps = moby_dick(), range(seed, seed + (1 if quick else 3)), 40 if quick else 200
    loss: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cases = [("GQA", "mean"), ("GQA", "first"), ("GQA", "random"), ("MQA", "mean")]
    after: dict[str, list[list[float]]] = {" ".join(case): [] for case in cases}
    for s in seeds:
        models = {kind: decoder(kind, text, s) for kind in KINDS}
        for kind, model in models.items():
            loss[kind].append(learn(model, text, steps, s, 3e-3, f"{kind}, seed {s}"))
        for kind, how in cases:
            row = after[f"{kind} {how}"]
            row.append([
                learn(converted(models["MHA"], KEY_HEADS[kind], how, s), text, round(share * steps), s + 1, 1e-3, how)
                for share in UPTRAINED
            ])  # fmt: skip
    stored = {kind: cache_bytes(decoder(kind, text, seed)) for kind in KINDS}
    weights = {kind: parameters(decoder(kind, text, seed)) for kind in KINDS}
    times = decode_times(1024 if quick else 8192, 5 if quick else 100)
    at = {kind: mean(values) for kind, values in loss.items()}
    up = {name: [mean(row[i] for row in rows) for i in range(len(UPTRAINED))] for name, rows in after.items()}
    checks = [
        *(Check(f"cache of MHA by that of {kind}", stored["MHA"] / stored[kind], ratio, ratio)
          for kind, ratio in (("GQA", 4), ("MQA", 8), ("MLA", 4))),
        Check("loss of GQA less that of MHA, nats per character", at["GQA"] - at["MHA"], low=0),
        Check("loss of MQA less that of GQA", at["MQA"] - at["GQA"], low=0),
        Check("loss of MLA less that of MHA", at["MLA"] - at["MHA"], high=0),
        Check("loss of MLA less that of GQA, with equal caches", at["MLA"] - at["GQA"], high=0),
        *(Check(f"MHA to GQA, {when}: loss by {b} less that by {a}", up[f"GQA {b}"][i] - up[f"GQA {a}"][i], low=0)
          for i, when in enumerate(("at once", "5 % more steps")) for a, b in (("mean", "first"), ("first", "random"))),
        Check("decode time of MHA by that of GQA", times["MHA"] / times["GQA"], low=1.5),
        Check("decode time of GQA by that of MQA", times["GQA"] / times["MQA"], low=1),
        Check("decode time of MHA by that of MLA", times["MHA"] / times["MLA"], low=1),
    ]  # fmt: skip
    apart = [gqa - mha for gqa, mha in zip(loss["GQA"], loss["MHA"], strict=True)]
    more = listed({kind: at[kind] - at["MHA"] for kind in KINDS[1:]}, "+.3f")
    ways = ", ".join(f"{row[0] - at['MHA']:.3f} and {row[1] - at['MHA']:.3f} ({name})" for name, row in up.items())
    return Result(
        f"From scratch, loss above that of MHA ({at['MHA']:.3f}): {more}. Converted, at once and after 5 % more "
        f"steps: {ways}. A decode step takes {', '.join(f'{ms:.2f} ms ({kind})' for kind, ms in times.items())}.",
        checks,
        {"loss": loss, "after": after, "uptrained": UPTRAINED, "bytes": stored, "weights": weights, "ms": times},
        "Means over the seeds; two layers of width 64 on Moby-Dick by characters; all kinds see the same batches. GQA "
        f"less MHA is {span(apart, '+.3f')} by seed. The MLPs are equal, so fewer key heads are fewer "
        f"weights: {listed(weights, ',')}. The order MHA, GQA, MQA "
        "from scratch is that of DeepSeek-V2, D.1, on benchmarks of models of 7B in which more layers make up for "
        "missing weights. What Ainslie et al. find close to MHA is not GQA from scratch: it is converted from MHA and "
        "trained for 5 % of its steps, and their order of conversions is of MQA. That the converted model comes "
        f"close is not a check here: 5 % are {round(steps * UPTRAINED[1])} steps, where the papers have thousands. "
        f"GQA by mean is then {up['GQA mean'][1] - at['MHA']:.3f} above MHA and "
        f"{up['GQA mean'][1] - at['GQA']:.3f} above GQA from scratch, and MHA got no further steps as a control. "
        "A model of this size on text says little about tasks that need several "
        "look-ups at once. Random heads have the mean and deviation of the weights that they replace. The time is of "
        "one sequence in float32 on this processor, projections included; the 64 MiB of MHA's cache are read from "
        "memory at each step, the 16 MiB of GQA's and 4 of MQA's may stay in the processor's own cache. MLA's step "
        "multiplies 16 queries by the latents of all tokens, 512 dimensions each: it saves memory, not arithmetic.",
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Loss by cache, conversion by steps, and time."""
    left, middle, right = figure.subplots(1, 3)
    for index, kind in enumerate(KINDS):
        values = data["loss"][kind]
        left.plot([data["bytes"][kind]] * len(values), values, f"C{index}o", alpha=0.6, label=kind)
    left.set(title="loss by bytes of cache per token", xlabel="bytes")
    start = mean(data["loss"]["MHA"])
    for name, rows in data["after"].items():
        means = [mean(row[i] for row in rows) - start for i in range(len(data["uptrained"]))]
        middle.plot([100 * share for share in data["uptrained"]], means, marker=".", label=name)
    middle.set(title="converted: loss above MHA's", xlabel="more steps, %")
    right.bar(KINDS, [data["ms"][kind] for kind in KINDS], color=[f"C{i}" for i in range(len(KINDS))])
    right.set(title="decode step at 8,192 tokens, ms")
    legends(left, middle)


EXPERIMENT = Experiment(
    "shared_heads",
    "Shared key heads and latents",
    "Fewer key heads need less cache and time; trained from scratch, MHA is better than GQA and GQA than MQA, and MLA "
    "is better than MHA with a cache like GQA's; to convert a trained MHA, the mean of its heads is better than the "
    "first of them, and that than random heads.",
    "Shazeer 2019, arXiv:1911.02150 (cache, time); DeepSeek-AI 2024, arXiv:2405.04434, §2.1, D.1 and D.2 (from "
    "scratch); Ainslie et al. 2023, arXiv:2305.13245, §2.1 and §3.3 (conversion)",
    "Losses from scratch MLA < MHA < GQA < MQA; conversion by mean better than by first, and that than random; faster "
    "steps.",
    measure,
    draw,
    size=(11.0, 3.2),
)

if __name__ == "__main__":
    EXPERIMENT.main()
