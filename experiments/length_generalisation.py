"""Longer texts than in training: five kinds of positions, and how RoPE is repaired.

Decoders are trained on passages of 64 characters and read passages of 64 to 512. The loss is that of the same last 32
characters each time, with more and more of the text before them, so a model that generalises loses nothing.

A window of 64 tokens hides what is further away than in training: whatever repairs RoPE should beat that.
"""

from collections.abc import Iterable
from statistics import mean
from typing import Any, NamedTuple

import torch
from record import Check, Experiment, Result, legends, listed
from tiny_model import Text, losses, moby_dick, train_on_text
from torch import Tensor

from regard import Alibi, Bias, Call, Mask, Position, Rope, Sinusoidal, T5Bias, Window, observe_calls
from regard.nn import Decoder
from regard.rope import NTK, Linear, Scaling, Yarn

TRAINED, DIM, HEADS = 64, 64, 4
LENGTHS, COUNTED, FACTOR = (64, 128, 256, 512), 32, 4
KINDS = ("none", "sinusoidal", "RoPE", "ALiBi", "T5")


def position(kind: str, scaling: Scaling | None = None) -> Position | Bias | None:
    """A new position of a kind."""
    match kind:
        case "sinusoidal":
            return Sinusoidal(DIM)
        case "RoPE":
            return Rope(DIM // HEADS, scaling=scaling)
        case "ALiBi":
            return Alibi(HEADS)
        case "T5":
            return T5Bias(torch.zeros(32, HEADS, requires_grad=True), bidirectional=False)
        case _:
            return None


def repair(name: str, factor: float) -> Scaling | None:
    """The scaling of RoPE for texts that are longer by this factor."""
    scalings = {"linear": Linear(factor), "NTK": NTK(factor), "YaRN": Yarn(factor, TRAINED)}
    return scalings.get(name)


def decoder(kind: str, text: Text, scaling: Scaling | None = None, mask: Mask | None = None) -> Decoder:
    """An untrained decoder of two layers."""
    return Decoder(len(text.alphabet), DIM, 2, HEADS, position=position(kind, scaling), mask=mask).eval()


def changed(model: Decoder, text: Text, scaling: Scaling | None = None, mask: Mask | None = None) -> Decoder:
    """A RoPE decoder with the weights of another, and another scaling or mask."""
    other = decoder("RoPE", text, scaling, mask)
    other.load_state_dict(model.state_dict())
    return other


def read(model: Decoder, passages: Tensor, tokens: int) -> float:
    """Nats per character of the last 32 of the passages, each with `tokens` tokens up to its end."""
    return losses(model, passages[:, -tokens - 1 :])[:, -COUNTED:].mean().item()


def greatest_score(model: Decoder, passages: Tensor) -> tuple[float, float]:
    """The greatest score, by size, at distances of the training and beyond."""
    found: list[list[float]] = []

    def look(call: Call) -> None:
        scores = (call.q @ call.k.transpose(2, 3) * call.q.shape[3] ** -0.5).abs()
        place = torch.arange(scores.shape[3])
        distance = place[:, None] - place
        near = (distance >= 0) & (distance < TRAINED)
        found.append([scores[..., mask].max().item() for mask in (near, distance >= TRAINED)])

    with observe_calls(look):
        losses(model, passages)
    near, far = zip(*found, strict=True)
    return max(near), max(far)


class Losses(NamedTuple):
    """Nats per character, a value or a row (one for each of `LENGTHS`) for each seed."""

    kinds: dict[str, list[list[float]]]
    repaired: dict[str, list[list[float]]]
    tuned: dict[str, list[float]]
    growth: list[float]  # RoPE's greatest score beyond the training length, by that within


def train_and_read(seeds: Iterable[int], steps: int, quick: bool) -> Losses:
    """Train each kind and read longer texts; RoPE also with each repair, tuned and not."""
    text = moby_dick()
    passages = text.passages(16 if quick else 64, LENGTHS[-1])
    found = Losses(
        {kind: [] for kind in KINDS},
        {name: [] for name in ("window", "linear", "NTK", "YaRN")},
        {name: [] for name in ("RoPE", "linear", "NTK", "YaRN")},
        [],
    )
    for s in seeds:
        for kind in KINDS:
            torch.manual_seed(s)
            enough = 40 if quick and kind != "RoPE" else steps
            model = decoder(kind, text)
            train_on_text(model, text, TRAINED, enough, s, label=f"{kind}, seed {s}")
            found.kinds[kind].append([read(model, passages, n) for n in LENGTHS])
            if kind != "RoPE":
                continue
            near, far = greatest_score(model, passages[:16])
            found.growth.append(far / near)
            for name, row in found.repaired.items():
                mask = Window(TRAINED) if name == "window" else None
                row.append([read(changed(model, text, repair(name, n / TRAINED), mask), passages, n) for n in LENGTHS])
            for name, row in found.tuned.items():
                other, label = changed(model, text, repair(name, FACTOR)), f"{name}, fine tuned, seed {s}"
                train_on_text(other, text, FACTOR * TRAINED, steps // 10, s + 1, rate=1e-3, label=label)
                row.append(read(other, passages, FACTOR * TRAINED))
    return found


def measure(seed: int, quick: bool) -> Result:
    """The rises of the loss, by kind and by repair."""
    steps = 150 if quick else 200
    kinds, repaired, tuned, growth = train_and_read(range(seed, seed + (1 if quick else 3)), steps, quick)
    rise = {name: [mean(row[i] - row[0] for row in rows) for i in range(len(LENGTHS))] for name, rows in kinds.items()}
    start = mean(row[0] for row in kinds["RoPE"])
    rise |= {name: [mean(row[i] for row in rows) - start for i in range(len(LENGTHS))]
             for name, rows in repaired.items()}  # fmt: skip
    after, at = {name: mean(row) - start for name, row in tuned.items()}, LENGTHS.index(FACTOR * TRAINED)
    last, names = -1, ("linear", "NTK", "YaRN")
    checks = [
        Check("sinusoidal, 8 times: rise of the loss", rise["sinusoidal"][last], low=0.1),
        Check("RoPE, 8 times: rise", rise["RoPE"][last], low=0.1),
        Check("RoPE's rise less that of sinusoidal positions, 8 times", rise["RoPE"][last] - rise["sinusoidal"][last],
              high=0),
        Check("T5, 8 times: rise", rise["T5"][last], high=0.1),
        Check("ALiBi, 8 times: rise", rise["ALiBi"][last], high=0.03),
        Check("none, 8 times: rise less that of ALiBi", rise["none"][last] - rise["ALiBi"][last], high=0),
        Check("RoPE: greatest score beyond the training length by that within ('blows up')", mean(growth), low=2),
        *(Check(f"{name}, {times} times, not tuned: share of RoPE's rise that is left",
                rise[name][i] / rise["RoPE"][i], high=0.5) for times, i in ((4, at), (8, last)) for name in names),
        Check("YaRN, 4 times, not tuned: rise less that of a window of 64", rise["YaRN"][at] - rise["window"][at],
              high=0),
        *(Check(f"{name}, 4 times, tuned for {steps // 10} steps: rise", after[name], high=0.02) for name in names),
        Check("the same without a scaling: loss above that of linear", after["RoPE"] - after["linear"], low=0.01),
    ]  # fmt: skip
    short = listed({kind: mean(row[0] for row in rows) for kind, rows in kinds.items()})

    def rises(kinds: Iterable[str], place: int) -> str:
        return listed({kind: rise[kind][place] for kind in kinds})

    return Result(
        f"At 8 times the length the loss rises by {rises(KINDS, last)}. RoPE at 4 times: "
        f"{rises(('RoPE', *names), at)}, with a window of 64 {rise['window'][at]:.2f}; after tuning {listed(after)}. "
        f"At 8 times, not tuned: {rises(names, last)}. RoPE's greatest score "
        f"beyond the training length is {mean(growth):.2f} times that within.",
        checks,
        {"lengths": LENGTHS, "kinds": kinds, "repaired": repaired, "tuned": tuned, "rise": rise, "growth": growth},
        "Nats per character of Moby-Dick, means over the seeds. Two layers of width 64, trained briefly: what is more "
        "than some words away helps little, so the task shows what breaks, not who uses a long text. Who hardly uses "
        f"positions has little to lose: at 64 tokens the losses are {short}. That is so for sinusoidal positions and "
        "T5's bias here; RoPE, which gains most, loses most. A plain window of the training length is the repair of "
        "RoPE to beat on such a text. A rotation changes no norm, so a score is at most |q| |k| / sqrt(d) at any "
        "distance: what fails is not their size. With 16 dimensions, five of RoPE's eight pairs "
        f"make no full turn in 64 tokens. {steps // 10} steps of tuning are few; in them interpolation by one factor "
        "for all pairs does worse than tuning without any scaling.",
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    """The rise of the loss by length, for kinds and repairs; after tuning."""
    left, right = figure.subplots(1, 2, sharey=True)
    for name in data["kinds"]:
        left.plot(data["lengths"], data["rise"][name], marker=".", label=name)
    for name in ("RoPE", *data["repaired"]):
        right.plot(data["lengths"], data["rise"][name], marker=".", label=name)
    start = mean(row[0] for row in data["kinds"]["RoPE"])
    for index, (name, values) in enumerate(data["tuned"].items()):
        tuned = [value - start for value in values]
        right.plot([FACTOR * TRAINED] * len(tuned), tuned, f"C{(0, 2, 3, 4)[index]}x", label=f"{name}, tuned")
    for axes, title in ((left, "rise of the loss, nats per character"), (right, "the same: RoPE and its repairs")):
        axes.set(title=title, xlabel="tokens read; 64 in training")
        axes.set_xscale("log", base=2)
    legends(left, right)


EXPERIMENT = Experiment(
    "length_generalisation",
    "Longer than in training",
    "Positions decide whether a model reads texts longer than in training: sinusoidal ones and RoPE fail, T5's bias "
    "and ALiBi do not, and no positions do best; RoPE's scores blow up, and rescaling its frequencies repairs it.",
    "Press et al. 2022, arXiv:2108.12409, §2; Kazemnejad et al. 2023, arXiv:2305.19466; Chen et al. 2023, "
    "arXiv:2306.15595; Peng et al. 2023, arXiv:2309.00071",
    "Sinusoidal positions worst, then RoPE; little or no rise for T5, ALiBi and none. Linear interpolation after fine "
    "tuning, NTK and YaRN without.",
    measure,
    draw,
    size=(10.0, 3.6),
)

if __name__ == "__main__":
    EXPERIMENT.main()
