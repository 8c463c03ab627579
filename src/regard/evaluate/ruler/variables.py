"""RULER's variables: a chain of five, assigned one to the next, in noise."""

import itertools
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from regard.evaluate.haystack import NOISE
from regard.evaluate.prompts import Prompt
from regard.evaluate.ruler.task import RulerTask, Text

HOPS = 4
"""Variables after the first one, each of which is assigned the one before it."""


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """RULER's vt: the variables of a chain of assignments in noise, after one example with its answer."""

    name: ClassVar[str] = "vt"
    new_tokens: ClassVar[int] = 30

    def least(self) -> int:
        return 2

    def make(self, units: int, by: random.Random, length: int) -> Text:
        """Units are lines of noise."""
        shown = chain(15 if length >= 1024 else 5, 3, random.Random(0))  # noqa: S311  names of 3 letters
        asked = chain(units, 5, by)
        example = f"{shown.prompt.before}{shown.context}{shown.prompt.question} {shown.prompt.begun} "
        before = f"{example}{' '.join(shown.answers)}\n\n\n{asked.prompt.before}"
        return Text(asked.prompt._replace(before=before), asked.context, asked.answers)


def chain(lines: int, letters: int, by: random.Random) -> Text:
    """Noise with a chain of assignments: `VAR ABC = 12345`, `VAR DEF = VAR ABC` ..."""
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(by.choices(string.ascii_uppercase, k=letters))] = None
    variables, value = list(names), by.randint(10000, 99998)
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(variables)]
    noise = [f"{NOISE}\n"] * lines
    if len(noise) <= len(links):  # the noise of few lines is split into its sentences
        noise = [f"{part}." if part.strip() else part for line in noise for part in line.split(".")]
    for i, place in enumerate(sorted(by.sample(range(len(noise)), len(links)))):
        noise.insert(place + i, links[i])
    context = " ".join(noise).replace(". \n", ".\n")
    prompt = Prompt(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assgined the value {value}, they are:",  # as RULER spells it
    )
    return Text(prompt, context, tuple(variables))
