"""The worked examples of five introductions to attention, computed: which printed figures are right?

Each check is the greatest distance between a printed figure and the computed one, and holds if that is at most half a
unit of the last printed digit (and a hair: 0.0051 for two decimals, as halves are rounded either way).
"""

from collections.abc import Sequence
from typing import Any

import torch
from record import Check, Experiment, Result
from torch import Tensor

from regard import MultiHeadAttention, attend
from regard.cost import Attention, cost, find_model
from regard.scores import SoftDict

TWO_DECIMALS = 0.0051
THEORY, FORMULA = "Attention Mechanism Theory", "Scaled Dot-Product Attention Formula"
QKV, DIVE, NOTES = "Query, Key, Value Framework", "The Mathematics of Attention: A Deep Dive", "Attention mechanism"


def m(*rows: Sequence[float]) -> Tensor:
    """A matrix in float64."""
    return torch.tensor(rows, dtype=torch.float64)


def softmax(*scores: float) -> Tensor:
    """By a soft dictionary with one key for each score."""
    keys = m(*([score] for score in scores))
    return SoftDict(keys, keys, temperature=1.0).weights(m([1.0]))[0]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of matrices [tokens, dim]."""
    return attend(q[None, None], k[None, None], v[None, None])[0, 0]


def apart(printed: Tensor | Sequence[float], computed: Tensor) -> float:
    """The greatest difference."""
    return (torch.as_tensor(printed, dtype=torch.float64) - computed).abs().max().item()


X = m([1.0, 0.5, 0.2, 0.8], [0.3, 0.9, 0.1, 0.4], [0.7, 0.2, 0.6, 0.3])
W_Q = m([0.5, 0.3], [0.2, 0.4], [0.1, 0.6], [0.7, 0.2])
W_K = m([0.4, 0.1], [0.3, 0.5], [0.6, 0.2], [0.2, 0.4])
W_V = m([0.6, 0.3], [0.2, 0.7], [0.4, 0.1], [0.3, 0.5])
PRINTED = {
    "Q": m([1.07, 0.77], [0.47, 0.57], [0.61, 0.55]),
    "K": m([0.79, 0.79], [0.35, 0.51], [0.62, 0.41]),
    "V": m([1.09, 0.97], [0.44, 0.59], [0.71, 0.52]),
    "QK^T": m([1.45, 0.76, 1.09], [0.66, 0.46, 0.52], [0.92, 0.49, 0.61]),
    "QK^T / sqrt(2)": m([1.03, 0.54, 0.77], [0.47, 0.33, 0.37], [0.65, 0.35, 0.43]),
    "A": m([0.48, 0.25, 0.27], [0.35, 0.31, 0.34], [0.40, 0.29, 0.31]),
    "AV": m([0.81, 0.78], [0.64, 0.65], [0.71, 0.68]),
}
"""The example of QKV, as printed."""


def steps(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Each step of the example."""
    weights = SoftDict(k, v).weights(q)
    scores, out = q @ k.T, attention(q, k, v)
    return {"Q": q, "K": k, "V": v, "QK^T": scores, "QK^T / sqrt(2)": scores / 2**0.5, "A": weights, "AV": out}


def measure(seed: int, quick: bool) -> Result:
    """Compute everything; nothing is random."""
    exact, follows = steps(X @ W_Q, X @ W_K, X @ W_V), steps(*(PRINTED[name] for name in "QKV"))
    example = [Check(f"{QKV}, {name}", apart(PRINTED[name], exact[name]), high=TWO_DECIMALS) for name in PRINTED]
    own = apart(PRINTED["AV"], follows["AV"])
    example.append(Check(f"{QKV}, AV from its own printed Q, K, V", own, high=TWO_DECIMALS))

    exercise = attention(m([1, 0]), m([1, 0], [0, 1], [1, 1]), m([1, 2], [3, 4], [5, 6]))
    search, shares = m([0.92, 0.15, 0.78, 0.45])[0], m([0.52, 0.03, 0.35, 0.10])[0]
    best = min(apart(shares, softmax(*(search / t).tolist())) for t in (0.01 * i for i in range(5, 201)))
    one, eight, mqa = (MultiHeadAttention(64, h, kv_heads=kv) for h, kv in ((1, 1), (8, 8), (8, 1)))
    count = [sum(p.numel() for p in module.parameters()) for module in (one, eight, mqa)]
    gqa = cost("llama-2-70b", context=32768).cache_bytes
    others = [
        Check(f"{THEORY}, the weights .19 .24 .27 .30 of its picture",
              apart([0.19, 0.24, 0.27, 0.30], softmax(0.72, 0.96, 1.08, 1.18)), high=TWO_DECIMALS),
        Check(f"{THEORY}, sqrt(512) = 22.6", abs(22.6 - 512**0.5), high=0.051),
        Check(f"{THEORY}, one head and eight have 4 d^2 weights", max(abs(c - 4 * 64**2) for c in count[:2]), high=0),
        Check(f"{THEORY}, MQA has d^2 + 2 d (d / h) + d^2", abs(count[2] - (2 * 64**2 + 2 * 64 * 8)), high=0),
        Check(f"{FORMULA}, QK^T of §2.2",
              apart(m([1, 1, 0], [0, 1, 1]), m([1, 0], [0, 1]) @ m([1, 0], [1, 1], [0, 1]).T), high=0),
        Check(f"{FORMULA}, softmax([1, 2, 3])", apart([0.09, 0.24, 0.67], softmax(1, 2, 3)), high=TWO_DECIMALS),
        Check(f"{FORMULA}, softmax([10, 20, 30])", apart([0, 0, 1], softmax(10, 20, 30)), high=TWO_DECIMALS),
        Check(f"{FORMULA}, softmax([100, 200, 300]) overflows: elements that are not finite",
              float((~softmax(100, 200, 300).isfinite()).sum()), low=1),
        Check(f"{FORMULA}, outputs of §2.5",
              apart(m([0.8, 0.3], [0.2, 0.9]), m([0.7, 0.2, 0.1], [0.1, 0.8, 0.1]) @ m([1, 0], [0, 1], [1, 1])),
              high=1e-12),
        Check(f"{FORMULA}, the search's 52 3 35 10 % are softmax(scores / T) for some T", best, high=TWO_DECIMALS),
        Check(f"{FORMULA}, '16 million' pairs at 4,096 tokens, by 10^6", 4096**2 / 1e6, 16, 17),
        Check(f"{QKV}, 512 x 512 x 4 bytes = 1 MB, in MiB", 512 * 512 * 4 / 2**20, 1, 1),
        Check(f"{QKV}, 144 MB for 12 layers of 12 heads, in MiB", 12 * 12 * 512 * 512 * 4 / 2**20, 144, 144),
        Check(f"{DIVE}, a cache of 'tens of gigabytes' at 80 layers, 64 heads, 32k, in GB",
              2 * 80 * 64 * 128 * 32768 * 2 / 1e9, 20, 100),
        Check(f"{NOTES}, '~80 GB' for the same, in GiB", 8 * gqa / 2**30, 79.5, 80.5),
        Check(f"{NOTES}, '~10 GB' with 8 key heads, in GiB", gqa / 2**30, 9.5, 10.5),
        Check(f"{NOTES}, 'Falcon 40B uses full MQA (1 KV head)': its key heads", _kv_heads("falcon-40b"), 1, 1),
        Check(f"{NOTES}, '5.4x' from 1.51 s to 0.28 s", 1.51 / 0.28, 5.35, 5.45),
    ]  # fmt: skip
    checks = [*others, *example]
    right = sum(check.holds() for check in checks)
    return Result(
        f"{right} of {len(checks)} are right. In {QKV} no step is: A is "
        f"{_text(exact['A'])} and the output {_text(exact['AV'])}. Exercise 4 of {FORMULA} gives {_text(exercise)}.",
        checks,
        {"printed": {n: t.tolist() for n, t in PRINTED.items()}, "computed": {n: t.tolist() for n, t in exact.items()}},
        f"The computed steps of {QKV}: " + "; ".join(f"{name} = {_text(t)}" for name, t in exact.items())
        + ". Its figures do not follow from one another either. Its sentence on causal masks, 'future tokens can't "
        "attend to past', is the wrong way round: a token must not attend to later ones. Its MB are MiB, and the "
        "caches of 80 and 10 GB are 80 and 10 GiB: 85.9 and 10.7 GB. Falcon-7B is the one with a single key head. "
        "softmax([100, 200, 300]) overflows only where the maximum is not subtracted first. '16 million attention "
        "computations per layer' is per head. The percentages of the search are an illustration, no softmax of its "
        "scores.",
    )  # fmt: skip


def _kv_heads(name: str) -> int:
    attention = find_model(name).layers[0].attention
    assert isinstance(attention, Attention)
    return attention.kv_heads


def _text(t: Tensor) -> str:
    return "[" + ", ".join("[" + " ".join(f"{x:.4f}" for x in row) + "]" for row in t.tolist()) + "]"


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Every figure of the example: printed across, computed upwards."""
    axes = figure.subplots()
    for index, name in enumerate(data["printed"]):
        across = [x for row in data["printed"][name] for x in row]
        upwards = [x for row in data["computed"][name] for x in row]
        axes.plot(across, upwards, "o^svD*P"[index], markersize=5, label=name)
    axes.plot([0.2, 1.6], [0.2, 1.6], color="gray", linewidth=0.8, label="equal")
    axes.set(title=QKV, xlabel="printed", ylabel="computed")
    axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    "worked_examples",
    "Worked examples",
    "The figures in the worked examples of introductions to attention are right.",
    f"Five introductions on the web, as of 2026: '{THEORY}', '{FORMULA}' (chapter 2 of Attention Mechanism From "
    f"Scratch), '{QKV}', '{DIVE} into the Transformer Mechanism', '{NOTES}'",
    "Every printed figure within half a unit of its last digit.",
    measure,
    draw,
    size=(5.0, 4.0),
)

if __name__ == "__main__":
    EXPERIMENT.main()
