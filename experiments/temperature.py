"""Soft to hard look-up: what the temperature of the softmax does.

A soft dictionary returns the mean of its values, weighted by `softmax(scores / T)`. Beside the limits at T -> 0 and
T -> infinity there is a bound for each T: with n keys and a gap g between the best score and the second,

    |soft - hard| <= 2 max|v| (1 - p_best),    1 - p_best <= (n - 1) exp(-g / T)
"""

import math
from typing import Any

import torch
from record import Check, Experiment, Result
from torch import Tensor

from regard.scores import SoftDict

KEYS, DIM, V_DIM = 64, 32, 8


def look_up(keys: Tensor, values: Tensor, queries: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """The blends [queries, v_dim], and the weights [queries, keys]."""
    soft = SoftDict(keys, values, temperature=t)
    return soft.look_up(queries), soft.weights(queries)


def measure(seed: int, quick: bool) -> Result:
    """Look up random queries at temperatures over seven decades, in float64."""
    queries = torch.randn(20 if quick else 500, DIM, dtype=torch.float64)
    keys, values = torch.randn(KEYS, DIM, dtype=torch.float64), torch.randn(KEYS, V_DIM, dtype=torch.float64)
    scores = queries @ keys.T
    best = scores.topk(2).values
    gap = best[:, 0] - best[:, 1]
    hard, _ = look_up(keys, values, queries, 0)
    mean, longest = values.mean(0), values.norm(dim=1).max()

    temperatures = [10 ** (e / 4) for e in range(-12, 17)]
    entropy, from_hard, from_mean, gradient, excess = [], [], [], [], -math.inf
    for t in temperatures:
        out, weights = look_up(keys, values, queries, t)
        rows = -(weights * weights.clamp(min=1e-300).log()).sum(1)
        entropy.append(rows)
        wrong = (KEYS - 1) * torch.exp(-gap / t)
        excess = max(excess, ((out - hard).norm(dim=1) - 2 * longest * wrong).max().item())
        from_hard.append(((out - hard).norm(dim=1) / longest).median().item())
        from_mean.append(((out - mean).norm(dim=1) / longest).median().item())
        p = weights  # d(weights) / d(scores / T) = diag(p) - p p^T; its Frobenius norm, from sums over p
        square = (p**2).sum(1) - 2 * (p**3).sum(1) + (p**2).sum(1) ** 2
        gradient.append(square.clamp(min=0).sqrt().median().item())
    rises = torch.stack(entropy).diff(dim=0).min().item()

    tied = SoftDict(keys[[0, 0, 1]], values[:3], temperature=0).look_up(keys[0])
    argmax = scores.argmax(1)
    checks = [
        Check("temperature 0 returns the value of the best key: greatest difference",
              _most(hard - values[argmax]), high=0),
        Check("two equal best keys at temperature 0 return their mean: greatest difference",
              _most(tied - values[:2].mean(0)), high=1e-15),
        Check("lowest temperature (0.001): median distance from the hard look-up, by the longest value",
              from_hard[0], high=1e-9),
        Check("highest temperature (10,000): median distance from the mean of all values, same unit",
              from_mean[-1], high=0.01),
        Check("least rise of a row's entropy from one temperature to the next, nats", rises, low=-1e-9),
        Check("greatest excess over the bound 2 max|v| (n - 1) exp(-gap / T), all queries and temperatures",
              excess, high=1e-9),
        Check("derivative of the weights by score / T at the lowest temperature (median; Frobenius norm)",
              gradient[0], high=1e-9),
    ]  # fmt: skip
    own = SoftDict(keys, values).weights(queries).max(1).values.median().item()
    return Result(
        f"The distance from the hard look-up falls from {from_hard[-1]:.2f} to {from_hard[0]:.1g} as T goes from "
        "10,000 to 0.001, within the bound; entropy rises with T in every row. At T = sqrt(d), as in attention, the "
        f"best key has {own:.2f} of the weight (median).",
        checks,
        {
            "temperature": temperatures, "from_hard": from_hard, "from_mean": from_mean, "gradient": gradient,
            "entropy": [rows.median().item() for rows in entropy], "own": math.sqrt(DIM), "keys": KEYS,
        },
        "The limits are theorems, and the bound follows from the definition; the experiment shows that the library "
        "keeps them at every temperature, and where between them sqrt(d) is for random keys. A hard choice has a "
        "price: the derivative of the weights goes to 0, so gradients no longer tell which key to take.",
    )  # fmt: skip


def _most(t: Tensor) -> float:
    return t.abs().max().item()


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Distances from both limits; entropy and derivative."""
    left, right = figure.subplots(1, 2)
    t = data["temperature"]
    left.loglog(t, [max(1e-16, x) for x in data["from_hard"]], label="from the hard look-up")
    left.loglog(t, [max(1e-16, x) for x in data["from_mean"]], label="from the mean of all values")
    left.set(title="distance (median), by the longest value", xlabel="temperature", ylim=(1e-10, 3))
    right.semilogx(t, [h / math.log(data["keys"]) for h in data["entropy"]], label="entropy / log n")
    right.semilogx(t, data["gradient"], label="norm of d weights / d (score / T)")
    right.set(title="how soft the choice is (median)", xlabel="temperature")
    for axes in (left, right):
        axes.axvline(data["own"], color="gray", linewidth=0.8, linestyle=":", label="sqrt(d)")
        axes.legend()


EXPERIMENT = Experiment(
    "temperature",
    "Soft and hard look-up",
    "Attention is a soft dictionary look-up: a low temperature selects the best key, a high one blends all values.",
    "Bahdanau et al. 2015, arXiv:1409.0473, §3.1 (soft search); Hinton et al. 2015, arXiv:1503.02531, §2 (temperature)",
    "The hard look-up as T goes to 0, the mean of the values as T grows, more entropy in between.",
    measure,
    draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
