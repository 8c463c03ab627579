"""Scores of heads on other texts: whether a head has the same kind there shows how reliable its kind is.

Blocks drawn from one text are still that text: of the heads of SmolLM2 that kept their kind in 99 of 100 such draws,
one in eight has another kind on another text. So three short texts, unlike each other, are read as well.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.inspect.measures.catalogue import MEASURES
from regard.inspect.measures.measure import Inputs, compute
from regard.inspect.observing.observe import Look
from regard.inspect.surveying.kinds import NAMERS
from regard.inspect.surveying.layer import LayerScores

PROSE = (
    "The water for the town comes from the hills, through a pipe that was laid before anyone now living "
    "was born. In a dry summer the level of the lake falls by a hand's breadth each week. The engineers "
    "then open a second well, which is deeper and costs more to pump, and ask people to water their "
    "gardens in the evening. Most of them do. Nobody has yet found where the pipe loses the fifth part "
    "of what enters it; a new survey, with microphones, is to begin in March."
)
TALK = (
    '"Did you bring the keys?"\n"I thought you had them."\n"I gave them to you on Tuesday, when we came '
    'back from the market."\n"On Tuesday I was not even here! You gave them to Ruth."\n"Then call Ruth, '
    'please, before it gets dark."\n"She does not answer. Shall I try the window?"\n"Not again. Last time '
    'it took you an hour, and the neighbours came to ask what we were doing."\n"Well, I am cold, and so '
    'are you."\n"Try it, then, but be quick."'
)
PROGRAM = (
    'def moving_average(values, width):\n    """Means of `width` neighbours."""\n    if width < 1:\n        '
    'raise ValueError(f"width is {width}")\n    total = sum(values[:width])\n    means = [total / width]\n  '
    "  for old, new in zip(values, values[width:]):\n        total += new - old\n        "
    "means.append(total / width)\n    return means\n\n\nfor width in (1, 3, 7):\n    means = "
    "moving_average([4, 8, 15, 16, 23, 42, 7, 9], width)\n    print(width, [round(mean, 2) for mean in "
    "means])\n"
)
OTHERS = (PROSE, TALK, PROGRAM)
"""Texts of a few hundred tokens: prose, a dialogue, a program."""


def other_texts(tokenizer: Any, tokens: int) -> Tensor | None:
    """The other texts, int64 [texts, tokens]: each cut to the length of the text, or to that of the shortest of them.

    A kind depends on how long a text is, so that texts of one length are compared as far as there are. None where a
    tokenizer leaves less than two tokens of one.
    """
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in OTHERS]
    shortest = min(tokens, *map(len, ids))
    return None if shortest < 2 else torch.tensor([each[:shortest] for each in ids])


def on_other_texts(look: Look, *, sweep: bool) -> list[LayerScores]:
    """The scores that name the heads of a layer, in each of several texts of one call.

    Args:
        sweep: whether the measures that need a sweep are among those of the text itself.
    """
    measures = [m for m in MEASURES if m.key in NAMERS and m.on == "text" and (sweep or "sweep" not in m.needs)]
    texts = [LayerScores() for _ in range(look.weights.shape[0])]
    found = compute(measures, Inputs(look.weights))
    for number, scores in enumerate(texts):
        for measure in measures:
            scores.add(measure, replace(found[measure.key].only(number), at=None))
    return texts
