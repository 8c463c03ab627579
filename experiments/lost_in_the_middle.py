"""Is the middle of a long prompt lost? SmolLM2-135M-Instruct on one of many documents.

The task of Liu et al.: a question about one of many documents, by the position of that document. The documents are
lives of invented people, so the model cannot know an answer; the question is where one of them was born. A text is read
once, and the documents at seven positions of it are asked for, so that differences between positions are paired. An
answer is right if each of its tokens is the most probable one.

The interval of each difference decides: a curve through a few right and wrong answers always has some shape.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from record import Check, Experiment, Result

from regard.evaluate import Model, Question, Results, as_model, evaluate
from regard.evaluate.documents import BEFORE, invented
from regard.evaluate.intervals import Interval, drawn
from regard.evaluate.task import generator
from regard.integrate import load

DEPTHS = tuple(i / 6 for i in range(7))
MIDDLE = slice(2, 5)
"""Of the positions: at 33, 50 and 67 %."""


@dataclass(frozen=True)
class Lives:
    """Where was the person born whose life is at this position? The attributes are those of `Documents`."""

    name: ClassVar[str] = "lives"
    axes: ClassVar[tuple[str, ...]] = ("depth", "documents")
    source: ClassVar[str] = "Liu et al. 2023, arXiv:2307.03172, section 2"

    documents: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int

    def examples(self, model: Model) -> Iterator[Question]:
        """The positions of a sample share its documents."""
        encode = model.tokenizer.encode
        for count, sample in itertools.product(self.documents, range(self.samples)):
            by = generator(self, f"{count}/{sample}")
            people = invented(by, count)
            lives = [people.gold, *people.others]
            by.shuffle(lives)
            shown = [f"Document [{i}](Title: {each.title}) {each.text}" for i, each in enumerate(lives, 1)]
            context = (*model.tokenizer.start, *encode(BEFORE + "\n".join(shown)))
            for depth in self.depths:
                who, text = lives[round(depth * (count - 1))]
                asked = f"\n\nQuestion: In which city was {who} born?\nAnswer: {who} was born in"
                city = text.split(" was born in ")[1].split()[0]
                cell: dict[str, int | float | str] = {"documents": count, "depth": depth}
                name = f"{count}/{depth:g}/{sample}"
                yield Question(name, cell, context, tuple(encode(asked)), tuple(encode(f" {city}")), (city,))


def by_position(results: Results, samples: int) -> np.ndarray[Any, Any]:
    """Scores [texts, positions]."""
    return np.array([record["score"] for record in results.records]).reshape(samples, -1)


def first_instead(task: Lives, results: Results, model: Model) -> float:
    """The share of wrong answers that name the first document's answer: 1 for a model that always gives it."""
    examples = list(task.examples(model))
    first = {each.context: each.answers[0] for each in examples if each.cell["depth"] == 0}
    answer = {each.name: first[each.context] for each in examples}
    wrong = [record for record in results.records if not record["score"]]
    return sum(record["text"].strip() == answer[record["example"]] for record in wrong) / max(1, len(wrong))


def less(scores: np.ndarray[Any, Any], end: int) -> Interval:
    """The accuracy at an end less that of the middle, with its interval over texts."""
    return drawn(scores[:, end], scores[:, MIDDLE].mean(1), of=lambda a, b: a - b)


def measure(seed: int, quick: bool) -> Result:
    """The same texts asked at seven positions."""
    plain, tokenizer, _ = load(dtype=torch.bfloat16)
    model = as_model(plain, tokenizer)
    alone = evaluate(Lives((1,), (0.0,), 4 if quick else 40, seed), model).score
    sizes = ((6, 4),) if quick else ((10, 30), (30, 16))  # documents, samples
    checks, curves, shown = list[Check](), dict[str, Any](), list[str]()
    shapes, instead = dict[str, tuple[Interval, Interval]](), dict[str, float]()
    for documents, samples in sizes:
        name, task = f"{documents} documents", Lives((documents,), DEPTHS, samples, seed)
        results = evaluate(task, model)
        scores = by_position(results, samples)
        first, last = shapes[name] = less(scores, 0), less(scores, -1)
        instead[name] = first_instead(task, results, model)
        curves[name] = [tuple(each.score) for each in results.along("depth")]
        begin, middle, end = scores[:, 0].mean(), scores[:, MIDDLE].mean(), scores[:, -1].mean()
        checks += [
            Check(f"{name}: accuracy at the first less the middle, lower end of the interval", first.low, low=0.001),
            Check(f"{name}: accuracy at the last less the middle, lower end of the interval", last.low, low=0.001),
            Check(f"{name}: accuracy lost in the middle against the better end ('30 %+')",
                  float(max(begin, end) - middle), low=0.3),
        ]  # fmt: skip
        shown.append(f"{name}: {100 * begin:.0f} % first, {100 * middle:.0f} % middle, {100 * end:.0f} % last")
    controls = [
        Check("control: accuracy with the one document alone", alone.value, low=0.8),
        Check("control: share of wrong answers that are the first document's", max(instead.values()), high=0.2),
    ]
    differences = "; ".join(
        f"{name} {100 * first.low:+.0f} to {100 * first.high:+.0f} and {100 * last.low:+.0f} to {100 * last.high:+.0f}"
        for name, (first, last) in shapes.items()
    )
    return Result(
        f"{'. '.join(shown)}. Points by which the first and the last exceed the middle, 95 %: {differences}. The one "
        f"document alone: {100 * alone.value:.0f} %. At most {100 * max(instead.values()):.0f} % of the wrong "
        "answers are the first document's.",
        [*controls, *checks],
        {"depths": DEPTHS, "curves": curves, "alone": list(alone), "instead": instead},
        "The middle is the mean of the positions at 33, 50 and 67 %. Liu et al. move one document and let the "
        "model generate; here the question moves, and the answer begins with the document's own text, so the task is "
        "easier, as it must be for a model of 135M parameters. RoPE is no explanation by itself: in the paper the "
        "shapes differ between models with RoPE, and MPT has ALiBi. Nothing follows for larger models.",
    )


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Accuracy by position."""
    axes = figure.subplots()
    for name, curve in data["curves"].items():
        value, low, high = zip(*curve, strict=True)
        (line,) = axes.plot(data["depths"], value, marker=".", label=name)
        axes.fill_between(data["depths"], low, high, color=line.get_color(), alpha=0.15)
    axes.axhline(data["alone"][0], color="gray", linewidth=0.8, linestyle=":", label="one document alone")
    axes.set(title="accuracy by the position of the answer, 95 % intervals", xlabel="position", ylim=(-0.02, 1.02))
    axes.legend(fontsize=7)


EXPERIMENT = Experiment(
    "lost_in_the_middle",
    "Lost in the middle",
    "Answers at the beginning and at the end of a long prompt are found more often than those in its middle: accuracy "
    "by position is U-shaped, with 30 % or more lost in the middle.",
    "Liu et al. 2023, arXiv:2307.03172, §2.3, figures 1 and 5; introductions: 'performance drops 30%+', "
    "because of RoPE",
    "The first and the last position above the middle, each by more than the interval of the difference.",
    measure,
    draw,
    size=(6.0, 3.6),
    quick_decides=False,
)

if __name__ == "__main__":
    EXPERIMENT.main()
