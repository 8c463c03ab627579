"""Do attention weights explain a prediction? Other weights for the same prediction, and what that depends on.

A classifier reads 20 tokens. Some of them, the deciding tokens, are positive or negative, at random places among
neutral ones, and the majority is the answer; so it is known which tokens an explanation should name. One query attends
to a state per token, and the answer is read from the result. States are those of a bidirectional LSTM, which may have
seen the whole text (as in Jain and Wallace), or of the token alone. Tests, over the weights of that query:

    adversary       the most different weights that move the prediction by at most 0.01 (Jain and Wallace, §4.2.2): the
                    exact maximum, and what the search of `regard.inspect.intervene.adversary` finds
    permutation     how much shuffled weights move it (§4.2.1)
    uniform         a model trained with equal weights: is attention needed? (Wiegreffe and Pinter, §3.2)
    seeds           how different the weights of models are that differ in the seed only (the same, §3.3)
"""

from itertools import combinations
from typing import Any

import torch
from record import Check, Experiment, Result, span
from tiny_model import Batch, accuracy, seeded, train
from torch import Tensor, nn

from regard import attend
from regard.inspect.intervene import adversary, permuted
from regard.inspect.intervene.rows import divergence

VOCABULARY, TOKENS, OPINIONS, WIDTH = 100, 20, 10, 32
TASKS = (1, 5)
"""How many tokens decide."""
EPSILON = 0.01
"""How much an adversary may move a prediction, total variation."""


def texts(deciding: int, count: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
    """Texts with their answers, [count, TOKENS] and [count, 1], and which tokens decide.

    Tokens below OPINIONS are negative, below 2 OPINIONS positive, and all others neutral.
    """
    neutral = torch.randint(2 * OPINIONS, VOCABULARY, (count, TOKENS), generator=generator)
    positive = torch.randint(2, (count, TOKENS), generator=generator)
    opinion = positive * OPINIONS + torch.randint(OPINIONS, (count, TOKENS), generator=generator)
    decides = torch.rand(count, TOKENS, generator=generator).argsort(1) < deciding
    answer = (positive * decides).sum(1, keepdim=True) > deciding // 2
    return (torch.where(decides, opinion, neutral), answer.long()), decides


class Classifier(nn.Module):
    """Tokens to logits [batch, 1, 2], by one query that attends to the states; or by their mean."""

    def __init__(self, *, context: bool, uniform: bool = False) -> None:
        super().__init__()
        self.uniform, self.embedding = uniform, nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True) if context else None
        self.key, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.query = nn.Parameter(torch.randn(1, 1, 1, WIDTH))

    def states(self, tokens: Tensor) -> Tensor:
        """[batch, TOKENS, WIDTH]."""
        x = self.embedding(tokens)
        return torch.tanh(x) if self.lstm is None else self.lstm(x)[0]

    def answer(self, states: Tensor) -> Tensor:
        """Logits [batch, 1, 2]."""
        if self.uniform:
            return self.read(states.mean(1, keepdim=True))
        query = self.query.expand(len(states), 1, 1, WIDTH)
        return self.read(attend(query, self.key(states)[:, None], states[:, None])[:, 0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 1, 2]."""
        return self.answer(self.states(tokens))


def trained(deciding: int, seed: int, steps: int, *, context: bool, uniform: bool = False) -> Classifier:
    """A classifier, trained on fresh texts."""
    torch.manual_seed(seed)
    model, generator = Classifier(context=context, uniform=uniform), seeded(seed)
    train(model, lambda step: texts(deciding, 64, generator)[0], steps, rate=1e-2)
    return model.requires_grad_(False)


def most_different(own: Tensor, logits: Tensor, epsilon: float) -> Tensor:
    """The weights at the greatest divergence from `own` that move a prediction by at most epsilon, [texts, TOKENS].

    A text has the logit `weights @ logits`, where `logits` [texts, TOKENS] are those of each token alone. So the
    weights allowed are the part of the simplex between two parallel planes. The divergence is convex, and greatest at a
    vertex of that part: all weight on one token, or on two tokens with the logit on a plane. All of them are tried.
    """
    before = (own * logits).sum(1).sigmoid()
    low, high = ((before + change).clamp(0, 1).logit()[:, None] for change in (-epsilon, epsilon))
    tokens = torch.arange(own.shape[1])
    i, j = torch.cartesian_prod(tokens, tokens).T
    alone = torch.where((low <= logits) & (logits <= high), 1.0, torch.nan)[:, i]
    pairs = [(plane - logits[:, j]) / (logits[:, i] - logits[:, j]) for plane in (low, high)]
    share = torch.cat([torch.where(i == j, alone, pair) for pair in pairs], 1)[..., None]  # of i; j has the rest
    first, second = (torch.eye(len(tokens), dtype=own.dtype)[index].repeat(2, 1) for index in (i, j))
    weights = share * first + (1 - share) * second
    allowed = ((share >= 0) & (share <= 1))[..., 0]
    best = divergence(weights, own[:, None]).masked_fill(~allowed, -1.0).argmax(1)
    return weights[torch.arange(len(own)), best]


def examine(model: Classifier, deciding: int, quick: bool) -> tuple[dict[str, float], Tensor]:
    """What the tests find over 50 texts, and the weights of the model, [texts, TOKENS]."""
    batch, decides = texts(deciding, 50, seeded(10_000))
    states = model.states(batch[0])
    steps, starts, draws = (150, 1, 20) if quick else (500, 1, 50)

    def predict() -> Tensor:
        return model.answer(states)[:, 0]

    found = adversary(None, predict, [(0, 0)], (0,), epsilon=EPSILON, steps=steps, starts=starts)
    weights = next(iter(found.own.values()))[:, 0, 0, :TOKENS]
    logits = model.read(states).double()
    other = most_different(weights.double(), logits[..., 1] - logits[..., 0], 0.999 * EPSILON)  # 0.001 for rounding
    moved = model.read((other.float()[:, None] @ states)[:, 0]).softmax(-1) - predict().softmax(-1)
    shuffled = permuted(None, predict, [(0, 0)], (0,), draws=draws)
    return {
        "accuracy": accuracy(model, texts(deciding, 1000, seeded(20_000))[0]),
        "adversary": divergence(other, weights.double()).mean().item(), "moved": moved.abs().max().item(),
        "search": found.divergence.mean().item(),
        "permutation": shuffled.median.mean().item(), "deciding": (weights * decides).sum(1).mean().item(),
    }, weights  # fmt: skip


def measure(seed: int, quick: bool) -> Result:
    """All tasks, with and without context, over seeds."""
    steps, seeds = (150, range(seed, seed + 2)) if quick else (300, range(seed, seed + 3))
    data: dict[str, dict[str, list[float]]] = {}
    for context in (True, False):
        for deciding in TASKS:
            rows, weights = zip(
                *(examine(trained(deciding, s, steps, context=context), deciding, quick) for s in seeds), strict=True
            )
            found = {name: [row[name] for row in rows] for name in rows[0]}
            found["seeds"] = [divergence(a, b).mean().item() for a, b in combinations(weights, 2)]
            test = texts(deciding, 1000, seeded(20_000))[0]
            equal = [trained(deciding, s, steps, context=context, uniform=True) for s in seeds]
            found["uniform"] = [accuracy(model, test) for model in equal]
            data[f"{'LSTM' if context else 'no context'}, {deciding} deciding"] = found
    models = list(data.values())
    one, five = ([found for name, found in data.items() if f"{deciding} deciding" in name] for deciding in TASKS)

    share = [found / exact for m in models for found, exact in zip(m["search"], m["adversary"], strict=True)]
    checks = [
        Check("accuracy, least of all models with attention", min(every(models, "accuracy")), low=0.9),
        Check("adversary: greatest change of a prediction", max(every(models, "moved")), high=EPSILON),
        Check("adversary: greatest share of the exact divergence that the search finds", max(share), high=1.0),
        *(Check(f"{name}: divergence of the adversary (at most 0.693), least", min(m["adversary"]), low=0.5)
          for name, m in data.items()),
        Check("divergence of the adversary by the greatest between seeds, least",
              min(min(m["adversary"]) / max(m["seeds"]) for m in models), low=1.0),
        *(Check(f"{name}: change of a prediction under shuffled weights, greatest", max(m["permutation"]), high=0.1)
          for name, m in data.items()),
        *(Check(f"{name}: weight on the deciding tokens, greatest (an explanation would be near 1)",
                max(m["deciding"]), high=0.5) for name, m in data.items()),
    ]  # fmt: skip
    return Result(
        f"At the same prediction weights may differ by {over(one, 'adversary')} where 1 token decides, and by "
        f"{over(five, 'adversary')} where 5 do (divergence, of at most 0.693; with context and without). Shuffled "
        f"weights move predictions by {over(models, 'permutation')}. The weight on deciding tokens is "
        f"{over(models, 'deciding')}. With equal weights accuracy is at least {min(every(models, 'uniform')):.3f}.",
        checks,
        data,
        "The divergence of the adversary is the exact maximum; the search of Jain and Wallace, here from one start "
        f"beside the model's weights, finds {min(share):.0%} to {max(share):.0%} of it. In these tasks it depends on "
        "how many tokens decide, and hardly on context: where 5 do, almost disjoint weights give the same answer, as "
        "Jain and Wallace claim, even for states of the token alone; where 1 does, weights cannot differ as much. "
        "Shuffling is another matter: where 5 tokens decide it moves an LSTM by "
        f"{over([five[0]], 'permutation')}, and a model without context by {over([five[1]], 'permutation')}. Most of a "
        "model's own weight is on the deciding tokens, so weights may name the right tokens without being the only "
        "ones that give the answer. Two reservations of Wiegreffe and Pinter apply: where a model with equal weights "
        "is as accurate, the task cannot show what attention explains; and adversarial weights are found text by text, "
        f"they are not those of a trained model (weights of two seeds differ by {over(models, 'seeds')}). Ranges are "
        f"over {len(seeds)} seeds. Synthetic texts, one layer, 50 texts for each model; the bounds of the checks are "
        "ours; correlation with gradients was not measured.",
    )


def every(kinds: list[dict[str, list[float]]], name: str) -> list[float]:
    """A number of all models, of all seeds."""
    return [value for found in kinds for value in found[name]]


def over(kinds: list[dict[str, list[float]]], name: str) -> str:
    """The same as a range."""
    return span(every(kinds, name))


def draw(figure: Any, data: dict[str, Any]) -> None:
    """The adversary, the permutation and the weight on deciding tokens, by model."""
    panels = (
        ("adversary", "divergence of the adversary\n(bar: search; cross: seeds)", 0.72),
        ("permutation", "change under shuffled weights\n(total variation)", 1.0),
        ("deciding", "weight on the deciding tokens", 1.05),
    )
    plots = figure.subplots(1, 3, sharey=True)
    for axes, (key, title, right) in zip(plots, panels, strict=True):
        for row, one in enumerate(data.values()):
            axes.plot(one[key], [row] * len(one[key]), "o", color="C0", alpha=0.6)
            if key == "adversary":
                axes.plot(one["search"], [row] * len(one["search"]), "|", color="C0")
                axes.plot(one["seeds"], [row] * len(one["seeds"]), "x", color="C1")
        axes.set_yticks(range(len(data)), labels=list(data))
        axes.set(title=title, xlim=(-0.03, right))
    plots[0].invert_yaxis()


EXPERIMENT = Experiment(
    "attention_weights",
    "Attention as explanation",
    "Attention weights do not explain predictions: quite different weights, or shuffled ones, give the same output.",
    "Jain and Wallace 2019, arXiv:1902.10186, §4.2; against it Wiegreffe and Pinter 2019, arXiv:1908.04626, §3",
    "Adversarial weights near the greatest divergence, ln 2 = 0.693, at equal predictions; small changes under "
    "permutation; little weight on the tokens that decide.",
    measure,
    draw,
    size=(10.0, 3.0),
)

if __name__ == "__main__":
    EXPERIMENT.main()
