"""How good Performer's random features are: error by the number of features m and by the norms, and when they pay.

phi(q).phi(k) has the mean exp(q.k / sqrt(d)) over draws of the features. For independent draws its variance, by the
square of that mean, is (exp(|q + k|^2 / sqrt(d)) - 1) / m: it falls with m and grows exponentially with the norms.
"""

import time
from typing import Any

import torch
from record import Check, Experiment, Result, legends
from torch import Tensor

from regard import Causal, attend
from regard.linear import Favor, linear_attend
from regard.scores import SoftDict

DIM, N = 64, 256
FEATURES = (16, 64, 256, 1024, 4096)
NORMS = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Standard deviations of the entries of q and k; 1 is what attention is scaled for."""


def points(size: float) -> tuple[Tensor, Tensor]:
    """Queries and keys with normal entries."""
    return size * torch.randn(N, DIM, dtype=torch.float64), size * torch.randn(N, DIM, dtype=torch.float64)


def errors(size: float, features: int, draws: range, *, orthogonal: bool = True) -> tuple[float, float]:
    """The root mean square error of the kernel, relative, and the share of weight on wrong keys; means over draws."""
    q, k = points(size)
    found = [Favor(DIM, features, seed=seed, orthogonal=orthogonal).error(q, k) for seed in draws]
    kernel = sum(each.kernel**2 for each in found) / len(found)
    return kernel**0.5, sum(each.weights for each in found) / len(found)


def uniform(size: float) -> float:
    """The share of weight on wrong keys where all keys get the same weight: what no approximation must exceed."""
    q, k = points(size)
    return (SoftDict(k, k).weights(q) - 1 / N).abs().sum(1).mean().item() / 2


def slope(x: tuple[int, ...], y: list[float]) -> float:
    """Of log y by log x, by least squares."""
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    return ((a - a.mean()) @ (b - b.mean()) / (a - a.mean()).square().sum()).item()


def seconds(tokens: int, repeats: int) -> tuple[float, float]:
    """The shortest times of causal attention, exact and with 256 features: 4 heads of 64 in float32, in turns."""
    q, k, v = (torch.randn(1, 4, tokens, DIM) for _ in range(3))
    exact, linear = list[float](), list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        attend(q, k, v, mask=Causal())
        between = time.perf_counter()
        linear_attend(q, k, v, features=Favor(DIM, 256), causal=True)
        exact.append(between - started)
        linear.append(time.perf_counter() - between)
    return min(exact[1:]), min(linear[1:])


def measure(seed: int, quick: bool) -> Result:
    """Errors over draws of the features, and times."""
    draws = range(100 * seed, 100 * seed + (3 if quick else 10))
    small = [errors(0.25, m, draws) for m in FEATURES]
    unit = [errors(1.0, m, draws) for m in FEATURES]
    norms = [errors(size, 256, draws) for size in NORMS]
    plain = errors(0.25, 256, draws, orthogonal=False)[0]
    q, k = points(0.25)
    lemma = Favor(DIM, 256).variance(q, k).mean().sqrt().item()

    chance = [uniform(size) for size in NORMS]
    lengths = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    times = [seconds(n, 3 if quick else 4) for n in lengths]
    faster = [n for n, (exact, linear) in zip(lengths, times, strict=True) if linear < exact]
    power, worse = slope(FEATURES, [kernel for kernel, _ in small]), unit[2][1] / chance[NORMS.index(1.0)]
    checks = [
        Check("entries of size 0.25: slope of log error by log m (-0.5 by Lemma 2)", power, -0.6, -0.4),
        Check("the same, independent draws, m 256: error of the kernel by that of Lemma 2", plain / lemma, 0.8, 1.25),
        Check("orthogonal draws: error by that of independent ones (Theorem 2: below 1)", small[2][0] / plain, high=1),
        Check("m 256: error of the kernel at size 1 by that at size 0.25", norms[3][0] / norms[0][0], low=10),
        Check("size 0.25, m 4,096: weight on wrong keys by that of equal weights", small[-1][1] / chance[0], high=0.5),
        Check("size 1, m 256: weight on wrong keys by that of equal weights", worse, high=0.5),
        Check("size 1, m 4,096: the same", unit[-1][1] / chance[NORMS.index(1.0)], high=0.5),
    ]
    crossing = f"from {faster[0]:,} tokens on" if faster else f"at no length up to {lengths[-1]:,} tokens"
    return Result(
        f"The error falls as m^{power:.2f} and grows with the norms. For entries of size 1 and m 256, "
        f"{100 * unit[2][1]:.0f} % of the attention is on wrong keys ({100 * unit[-1][1]:.0f} % at m 4,096): "
        f"{worse:.1f} times as much as with equal weights for all keys. Faster than exact causal attention {crossing} "
        "(m 256, forward).",
        checks,
        {
            "features": FEATURES, "small": small, "unit": unit, "norms": NORMS, "by_norm": norms, "uniform": chance,
            "lengths": lengths, "times": times,
        },
        "Random queries and keys without structure, all pairs, in float64. The lemmas hold, but for entries of size "
        "1, for which the scores have variance 1, they promise little: the weights are further from those of "
        "softmax than uniform weights are. A model that is trained with the features can keep its norms small; such "
        "a model was not tried. Times are of 4 heads of 64 in float32 on this machine.",
    )  # fmt: skip


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Errors by features and by norms; times."""
    first, second, third = figure.subplots(1, 3)
    for name, size in (("small", 0.25), ("unit", 1)):
        first.loglog(data["features"], [w for _, w in data[name]], marker=".", label=f"entries of size {size}")
    first.set(title="share of attention on wrong keys", xlabel="features m")
    second.semilogy(data["norms"], [e for e, _ in data["by_norm"]], marker=".", label="kernel, relative")
    second.semilogy(data["norms"], [w for _, w in data["by_norm"]], marker=".", label="share on wrong keys")
    second.semilogy(data["norms"], data["uniform"], ":", color="gray", label="the same, uniform weights")
    second.set(title="error at m 256", xlabel="size of the entries")
    for index, label in enumerate(("exact", "256 features")):
        third.loglog(data["lengths"], [1e3 * pair[index] for pair in data["times"]], marker=".", label=label)
    third.set(title="ms, causal, 4 heads of 64", xlabel="tokens")
    legends(first, second, third)


EXPERIMENT = Experiment(
    "performer",
    "Performer's random features",
    "Positive random features approximate softmax attention in linear time, with an error that falls with their "
    "number.",
    "Choromanski et al. 2021, arXiv:2009.14794, Lemma 1 and 2, Theorem 2",
    "Error of m^-0.5, less with orthogonal features, exponential in the squared norms; useful weights for scores of "
    "variance 1; faster than exact attention at length.",
    measure,
    draw,
    size=(11.0, 3.2),
)

if __name__ == "__main__":
    EXPERIMENT.main()
