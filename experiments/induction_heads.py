"""Induction heads: two layers of attention learn to copy from the context, suddenly; one layer does not.

The text: each sequence has 12 of the 64 tokens in its own cycle. A step follows the cycle, or, one time in eight, jumps
to any of the 12. Nothing can be memorised, and jumps make distances random, so a head that looks back by a fixed number
of tokens does not help. Where a pair of tokens has occurred before, an induction circuit predicts its second token: a
head of layer 0 writes into each position which token precedes it, a head of layer 1 looks for positions whose
predecessor is the current token. `induction` measures the weight of a head on such positions, `offset_score` that on
the previous token. Then the real model: does it need the heads with the greatest induction scores to predict repeated
tokens?

Groups of the same size are compared: the 2 strongest induction heads with the 2 heads of the least scores, and in the
real model 10 heads with 10 others of the same layers. `all induction heads` of the tiny model has no such control, for
they are the heads of its layer 1, or nearly all, so the accuracy without them is reported and decides nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from record import Check, Experiment, Result, span
from tiny_model import Batch, seeded, train
from torch import Tensor, nn

from regard import Rope
from regard.inspect import ablated, ablation_effects, observe
from regard.inspect import measure as measure_heads
from regard.inspect.measures import induction, offset_score
from regard.inspect.observing.observe import Look
from regard.integrate import load, use_regard
from regard.nn import Decoder

VOCABULARY, CYCLE, JUMP, TOKENS = 64, 12, 0.125, 49
WIDTH, HEADS, EVERY = 64, 4, 10
FOUND = 0.3
"""The least score of an induction head; chance is 0.08."""


def walks(count: int, generator: torch.Generator) -> Tensor:
    """Sequences, each along its own cycle: int64 [count, TOKENS]."""
    cycle = torch.rand(count, VOCABULARY, generator=generator).argsort(1)[:, :CYCLE]
    places = [torch.randint(CYCLE, (count,), generator=generator)]
    for _ in range(TOKENS - 1):
        jump, to = torch.rand(count, generator=generator) < JUMP, torch.randint(CYCLE, (count,), generator=generator)
        places.append(torch.where(jump, to, (places[-1] + 1) % CYCLE))
    return cycle.gather(1, torch.stack(places, 1))


def on_repeats(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """The loss and the accuracy on tokens that end a pair which has occurred before in the sequence."""
    pairs = ids[:, :-1] * VOCABULARY + ids[:, 1:]
    repeated = (pairs[:, :, None] == pairs[:, None]).tril(-1).any(2)
    with torch.no_grad():
        logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")[repeated]
    return losses.mean().item(), (logits.argmax(-1) == ids[:, 1:])[repeated].float().mean().item()


def score(model: nn.Module, ids: Tensor) -> tuple[list[float], list[float]]:
    """The previous-token and the induction score of each head, layer by layer."""

    def look(one: Look) -> tuple[Tensor, Tensor]:
        return offset_score(one.weights, 1).value.mean(0), induction(one.weights, ids).value.mean(0)

    with torch.no_grad(), observe(model, look) as seen:
        model(ids)
    previous, found = zip(*(layer.value for layer in seen), strict=True)
    return torch.cat(previous).tolist(), torch.cat(found).tolist()


def trained(layers: int, seed: int, steps: int) -> tuple[Decoder, dict[str, list[float]]]:
    """An attention-only model, and its loss on repeats and greatest scores during training."""
    torch.manual_seed(seed)
    model = Decoder(VOCABULARY, WIDTH, layers, HEADS, mlp=False, position=Rope(WIDTH // HEADS))
    generator, test = seeded(seed), walks(64, seeded(1000 + seed))
    curve: dict[str, list[float]] = {"step": [], "loss": [], "previous": [], "induction": []}

    def record(step: int) -> None:
        previous, found = score(model, test[:, :-1])
        values = (step, on_repeats(model, test)[0], max(previous), max(found))
        for name, value in zip(curve, values, strict=True):
            curve[name].append(value)

    def batch(step: int) -> Batch:
        if step % EVERY == 0:
            record(step)
        ids = walks(64, generator)
        return ids[:, :-1], ids[:, 1:]

    train(model, batch, steps, label=f"{layers} layers, seed {seed}")
    record(steps)
    return model, curve


def without(model: Decoder, seed: int) -> tuple[dict[str, float], int]:
    """The accuracy on repeats as it is, and without groups of heads that the scores select; the induction heads."""
    ids = walks(128, seeded(2000 + seed))
    previous, found = score(model, ids[:, :-1])
    names = [(i // HEADS, i % HEADS) for i in range(len(found))]
    by_induction = sorted(range(len(names)), key=lambda i: -found[i])
    by_both = sorted(range(len(names)), key=lambda i: max(found[i], previous[i]))
    groups = {
        "all induction heads": [i for i in by_induction if found[i] >= FOUND],
        "2 strongest induction heads": by_induction[:2],
        "2 strongest previous-token heads": sorted(range(HEADS), key=lambda i: -previous[i])[:2],
        "2 heads with the least scores": by_both[:2],
    }
    accuracy = {"none": on_repeats(model, ids)[1]}
    for name, group in groups.items():
        with ablated(model, [names[i] for i in group]):
            accuracy[name] = on_repeats(model, ids)[1]
    return accuracy, len(groups["all induction heads"])


def in_smollm(seed: int, quick: bool) -> dict[str, list[float]]:
    """The rise of the loss on the second half of repeated random tokens: without 10 heads, chosen by score or not."""
    model, tokenizer, _ = load()
    model, generator = use_regard(model).eval(), seeded(seed)
    half = torch.randint(1000, 40000, (2 if quick else 4, 24), generator=generator)
    ids = torch.cat([half, half], 1)
    best = measure_heads(model, ids[:1], "induction", tokenizer=tokenizer)["induction"].top(10)
    chosen = [name for name, _ in best]
    layers = dict.fromkeys(name.partition(".")[0] for name in chosen)
    others = [name for layer in layers for name in (f"{layer}.{head}" for head in range(9)) if name not in chosen]
    draws = [torch.randperm(len(others), generator=generator)[:10].tolist() for _ in range(2 if quick else 5)]
    groups = [chosen, *([others[i] for i in draw] for draw in draws)]

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(batch).logits[:, 24:-1]
        return F.cross_entropy(logits.mT, batch[:, 25:], reduction="none").mean(1)

    effects = list(ablation_effects(model, [ids], loss_of, groups))
    return {
        "chosen": [effects[0].change], "others": [effect.change for effect in effects[1:]],
        "base": [effects[0].base.mean().item()], "scores": [value for _, value in best],
    }  # fmt: skip


def sharpness(curve: dict[str, list[float]]) -> float:
    """The fastest fall of the loss within 50 steps, by the mean fall in 50 steps before it began."""
    losses, width = curve["loss"], 50 // EVERY
    falls = [a - b for a, b in zip(losses, losses[width:], strict=False)]
    start = max(range(width, len(falls)), key=lambda i: falls[i])
    return falls[start] / ((losses[0] - losses[start]) / start * width)


def crossing(values: list[float]) -> int:
    """The first recorded step on the second side of the middle between the first and the last value."""
    middle, rising = (values[0] + values[-1]) / 2, values[-1] > values[0]
    return EVERY * next(i for i, value in enumerate(values) if (value >= middle) == rising)


def measure(seed: int, quick: bool) -> Result:
    """Tiny models of two layers and of one, ablation, and the real model."""
    steps, seeds = (350, range(seed, seed + 1)) if quick else (400, range(seed, seed + 2))
    two = [trained(2, s, steps) for s in seeds]
    one = [trained(1, s, steps) for s in seeds]
    tests = [walks(128, seeded(2000 + s)) for s in seeds]
    alone = [on_repeats(model, test)[1] for (model, _), test in zip(one, tests, strict=True)]
    removals = [without(model, s) for (model, _), s in zip(two, seeds, strict=True)]
    accuracy, removed = [found for found, _ in removals], [count for _, count in removals]
    worst = {name: max(a[name] for a in accuracy) for name in accuracy[0]}
    curves, flat = [curve for _, curve in two], [curve for _, curve in one]
    sharp = [sharpness(curve) for curve in curves]
    apart = max(abs(crossing(c["loss"]) - crossing(c["induction"])) for c in curves) + EVERY
    real = in_smollm(seed, quick)
    whole, least = min(a["none"] for a in accuracy), min(a["2 heads with the least scores"] for a in accuracy)
    checks = [
        Check("two layers: least accuracy on repeats", whole, low=0.9),
        Check("one layer: greatest accuracy on repeats", max(alone), high=0.5),
        Check("two layers: fastest fall of the loss in 50 steps by the mean fall before it, least", min(sharp), low=3),
        Check("one layer: the same, greatest", max(map(sharpness, flat)), high=1.5),
        Check(f"most steps from the middle of the loss to that of the induction score (a record every {EVERY})", apart,
              high=0.1 * steps),
        Check("one layer: greatest induction score (chance 0.08)", max(c["induction"][-1] for c in flat), high=FOUND),
        Check("without the 2 strongest induction heads: greatest accuracy", worst["2 strongest induction heads"],
              high=0.5),
        Check("without the 2 strongest previous-token heads: the same", worst["2 strongest previous-token heads"],
              high=0.5),
        Check("without the 2 heads with the least scores: least accuracy", least, low=0.8),
        Check("SmolLM2 without its 10 strongest induction heads: rise of the loss on repeated random tokens, nats",
              real["chosen"][0], low=1.0),
        Check("... without 10 other heads of the same layers: greatest rise, by that one",
              max(real["others"]) / real["chosen"][0], high=0.25),
    ]  # fmt: skip
    return Result(
        f"Two layers predict {whole:.2f} of the repeats, one layer {max(alone):.2f}. The loss falls "
        f"{span(sharp, '.1f')} times as fast as before, and induction scores rise within "
        f"{apart} steps of it (a record every {EVERY}). Greatest accuracy without the 2 strongest induction heads "
        f"{worst['2 strongest induction heads']:.2f}, without 2 previous-token heads "
        f"{worst['2 strongest previous-token heads']:.2f}; least without 2 heads of least score {least:.2f}; without "
        f"all induction heads ({' and '.join(map(str, removed))}, by seed; layer 1 has {HEADS}) "
        f"{worst['all induction heads']:.2f}. SmolLM2 loses {real['chosen'][0]:.1f} nats on repeats without 10 "
        f"induction heads, {span(real['others'])} without 10 others of those layers.",
        checks,
        {"curves": curves, "flat": flat, "accuracy": accuracy, "removed": removed, "one_layer": alone, "real": real},
        f"Numbers are the worst of {len(seeds)} seeds. In models this small every head of layer 1, or nearly, becomes "
        "an induction head, and they replace each other: a score says what a head does, not that the model needs it. "
        "Removing them all ('all induction heads' in the figure) leaves less than a one-layer model has: this shows "
        "damage, not what those heads do, so it is no check. Layer 1 has no others to remove for comparison; the 2 "
        "heads with the least scores are of layer 0. The matched control is that of SmolLM2. "
        "The 10 heads of SmolLM2 were chosen on random tokens and removed on others; the loss there is "
        f"{real['base'][0]:.2f} nats with all heads, and their least score {real['scores'][-1]:.2f}. The sudden change "
        "of language models in training, and the claim that induction heads make most of their learning from the "
        "context, were not tested: the text here has nothing else to learn; nor was argument 4, that such heads also "
        "do abstract things (translation, patterns).",
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Losses and scores in training; accuracies without heads; the real model."""
    first, second, third = figure.subplots(1, 3, width_ratios=(1.2, 1, 0.7))
    for curves, style, name in ((data["curves"], "-", "two layers"), (data["flat"], "--", "one layer")):
        for number, curve in enumerate(curves):
            label = None if number else name
            first.plot(curve["step"], curve["loss"], style, color="C0", label=label and f"{label}: loss on repeats")
            scores = [4 * value for value in curve["induction"]]
            first.plot(curve["step"], scores, style, color="C1", label=label and f"{label}: 4 x induction score")
    first.set(title="training", xlabel="step", ylim=(0, 5.5))
    first.legend(fontsize=7, ncols=2)
    names = list(data["accuracy"][0])
    for row, name in enumerate(names):
        second.plot([a[name] for a in data["accuracy"]], [row] * len(data["accuracy"]), "o", color="C0", alpha=0.6)
    second.plot(data["one_layer"], [len(names)] * len(data["one_layer"]), "o", color="C3", alpha=0.6)
    second.set_yticks(range(len(names) + 1), labels=[*(f"without {name}" for name in names), "one layer"], fontsize=7)
    second.invert_yaxis()
    second.set(title="accuracy on repeats, by seed", xlim=(-0.05, 1.05))
    third.plot([0], data["real"]["chosen"], "o", color="C1")
    third.plot([1] * len(data["real"]["others"]), data["real"]["others"], "o", color="C0", alpha=0.6)
    third.set_xticks([0, 1], labels=["10 induction\nheads", "10 others"])
    third.set(title="SmolLM2 without", ylabel="rise of the loss, nats", xlim=(-0.5, 1.5))


EXPERIMENT = Experiment(
    "induction_heads",
    "Induction heads",
    "Models of two layers and more learn to continue what the context repeats in a sudden change, when induction heads "
    "form, and these heads do it.",
    "Olsson et al. 2022, arXiv:2209.11895, arguments 1 (the change, none with one layer) and 3 (ablation); Elhage "
    "et al. 2021, 'A Mathematical Framework for Transformer Circuits' (two layers are needed)",
    "A plateau, then a fast fall of the loss together with a rise of induction scores; no such thing with one layer; "
    "an accuracy of 0.5 or less without the 2 heads of the greatest scores, little change without 2 others; on "
    "SmolLM2 a rise of the loss without 10 of them, little without 10 others of the same layers.",
    measure,
    draw,
    size=(11.5, 3.4),
)

if __name__ == "__main__":
    EXPERIMENT.main()
