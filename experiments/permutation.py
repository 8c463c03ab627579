"""Attention does not see the order of tokens; what positions, and a causal mask, add.

An attention layer f without a mask has f(P x) = P f(x) for any permutation P, and so has a stack of them with MLPs. The
task of the training: eight tokens, each once, in any order; which of the tokens 0 and 1 comes first? All sequences have
the same tokens, so only the order helps. The answer is read from the mean over the tokens, which has no order either.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import Check, Experiment, Result
from torch import Tensor

from regard import Alibi, Bias, Causal, Learned, Mask, Position, Rope, Sinusoidal
from regard.nn import Encoder

TOKENS, DIM, HEADS = 8, 32, 4


def table() -> Learned:
    """Learned positions of all tokens."""
    return Learned((0.5 * torch.randn(TOKENS, DIM)).requires_grad_())


KINDS: dict[str, Callable[[], tuple[Position | Bias | None, Mask | None]]] = {
    "none": lambda: (None, None),
    "none, causal mask": lambda: (None, Causal()),
    "sinusoidal": lambda: (Sinusoidal(DIM), None),
    "learned": lambda: (table(), None),
    "RoPE": lambda: (Rope(DIM // HEADS), None),
    "ALiBi": lambda: (Alibi(HEADS), None),
    "ALiBi, causal mask": lambda: (Alibi(HEADS), Causal()),
}


def encoder(kind: str, seed: int) -> Encoder:
    """Two layers with an MLP."""
    torch.manual_seed(seed)
    position, mask = KINDS[kind]()
    return Encoder(TOKENS, DIM, 2, HEADS, position=position, mask=mask)


def moved(kind: str, seed: int, order: Tensor) -> float:
    """|f(P x) - P f(x)| by |f(x)|, of an untrained encoder in float64."""
    model, x = encoder(kind, seed).double(), torch.arange(TOKENS)[None]
    with torch.no_grad():
        return ((model(x[:, order]) - model(x)[:, order]).norm() / model(x).norm()).item()


def orders(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Permutations [count, tokens], and whether 0 comes before 1 in each."""
    places = torch.rand(count, TOKENS, generator=generator).argsort(1)  # of each token
    return places.argsort(1), (places[:, 0] < places[:, 1]).float()


def accuracy(kind: str, seed: int, steps: int) -> float:
    """After training with Adam, on 4,000 other sequences."""
    model, generator = encoder(kind, seed), torch.Generator().manual_seed(seed)
    read = torch.nn.Linear(DIM, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *read.parameters()], lr=3e-3)
    for _ in range(steps):
        x, first = orders(128, generator)
        loss = F.binary_cross_entropy_with_logits(read(model(x).mean(1))[:, 0], first)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, first = orders(4000, generator)
    with torch.no_grad():
        return ((read(model(x).mean(1))[:, 0] > 0).float() == first).float().mean().item()


def measure(seed: int, quick: bool) -> Result:
    """Untrained encoders under permutations, then trained ones."""
    shuffled, reversed_ = torch.tensor([3, 6, 0, 5, 1, 7, 2, 4]), torch.arange(TOKENS).flip(0)
    change = {kind: moved(kind, seed, shuffled) for kind in KINDS}
    mirror = {kind: moved(kind, seed, reversed_) for kind in KINDS}
    seeds = range(seed, seed + (1 if quick else 3))
    found = {kind: [accuracy(kind, s, 100 if quick else 200) for s in seeds] for kind in KINDS}
    mean = {kind: sum(values) / len(values) for kind, values in found.items()}
    with_position = [kind for kind in KINDS if not kind.startswith("none")]
    checks = [
        Check("no positions: |f(Px) - P f(x)| / |f(x)|, float64", change["none"], high=1e-12),
        Check("with positions: the least of the same", min(change[kind] for kind in with_position), low=0.01),
        Check("no positions: accuracy, chance being 0.5", mean["none"], 0.47, 0.53),
        Check("no positions, causal mask: accuracy", mean["none, causal mask"], 0.47, 0.53),
        *(Check(f"{kind}: accuracy", mean[kind], low=0.95) for kind in with_position),
    ]
    return Result(
        f"Without positions the encoder is equivariant to {change['none']:.0e}, and its accuracy is "
        f"{mean['none']:.2f}. A causal mask alone gives {mean['none, causal mask']:.2f}. Sinusoidal, learned and "
        f"RoPE give at least {min(mean[kind] for kind in ('sinusoidal', 'learned', 'RoPE')):.2f}; ALiBi "
        f"{mean['ALiBi']:.2f} without a causal mask, {mean['ALiBi, causal mask']:.2f} with one.",
        checks,
        {"change": change, "mirror": mirror, "accuracy": found},
        "Two qualifications. A causal mask is a source of order of its own: tokens differ in how many they see, so "
        "decoders without positions learn order (Haviv et al. 2022, arXiv:2203.16634). And ALiBi without a causal mask "
        "depends on |q - k| alone: a sequence and its reverse are processed alike (difference "
        f"{mirror['ALiBi']:.0e}), so the order of time is lost; it was proposed for causal models.",
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Accuracies; how much a permutation and a reversal change."""
    left, right = figure.subplots(1, 2, sharey=True)
    kinds = list(data["accuracy"])
    for index, kind in enumerate(kinds):
        left.plot(data["accuracy"][kind], [index] * len(data["accuracy"][kind]), "o", color="C0", alpha=0.6)
    left.axvline(0.5, color="gray", linewidth=0.8, linestyle=":")
    left.set(title="which token comes first: accuracy, by seed", xlim=(0.4, 1.05))
    left.set_yticks(range(len(kinds)), labels=kinds)
    left.invert_yaxis()
    for name, marker in (("change", "o"), ("mirror", "x")):
        label = "a permutation" if name == "change" else "the reversal"
        right.semilogx([max(1e-17, x) for x in data[name].values()], range(len(kinds)), marker, label=label)
    right.set(title="|f(Px) - P f(x)| / |f(x)|, untrained")
    right.legend()


EXPERIMENT = Experiment(
    "permutation",
    "Permutations and positions",
    "Attention is permutation-equivariant: without positional encoding a transformer cannot tell the order of "
    "tokens, and with it can.",
    "Vaswani et al. 2017, arXiv:1706.03762, §3.5; Yun et al. 2020, arXiv:1912.10077, §2 (equivariance)",
    "Equality to rounding and chance accuracy without positions; the right answer with each of them.",
    measure,
    draw,
    size=(9.0, 3.2),
)

if __name__ == "__main__":
    EXPERIMENT.main()
