"""What is known in closed form: a copy model finds every needle, a uniform model none but by chance."""

import re

import pytest
import torch

from regard.evaluate import KeyValues, Needle, Passkey, as_model, evaluate

BYTES = 256
NEEDLE = Needle((400, 700), (0.0, 0.4, 1.0), samples=3, haystack="noise")
TASKS = [NEEDLE, Passkey((400, 700), (0.0, 0.4, 1.0), samples=3), KeyValues((3, 7), (0.0, 0.4, 1.0), samples=3)]
MODEL = as_model(lambda tokens: torch.zeros(*tokens.shape, BYTES))

ASKED = re.compile(
    r'(?:for (\S+) mentioned in the provided text is|(pass key) is|Key: "(\S+)"\nCorresponding value:)( \S*)?$'
)
TOLD = (r"for {} is: (\d+)", r"The {} is (\d+)\.", r'"{}": ("\S+")')


def copying(window: int | None = None):
    """A model that looks the answer up in the last `window` tokens that it reads, and copies it."""

    def call(tokens):
        (ids,) = tokens.tolist()
        logits = torch.zeros(1, len(ids), BYTES)
        for end in range(max(1, len(ids) - 60), len(ids) + 1):
            token = following(bytes(ids[:end]).decode(), window or end)
            if token is not None:
                logits[0, end - 1, token] = 1.0
        return logits

    return call


def following(text: str, window: int) -> int | None:
    """The byte that continues an answer at the end of the text; None where none is begun."""
    asked = ASKED.search(text)
    if asked is None:
        return None
    kind = next(i for i in range(3) if asked[i + 1])
    told = re.search(TOLD[kind].format(re.escape(asked[kind + 1])), text[-window : asked.start()])
    whole, begun = f" {told[1]}" if told else "", asked[4] or ""
    return whole.encode()[len(begun)] if whole.startswith(begun) and len(begun) < len(whole) else None


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_copy_model_finds_everything(task):
    results = evaluate(task, copying())
    assert results.score.value == 1
    assert len(results.records) == 18
    assert [each.count for each in results.cells()] == [3] * 6


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_uniform_model_scores_chance(task):
    results = evaluate(task, lambda tokens: torch.zeros(*tokens.shape, BYTES))
    for record, example in zip(results.records, task.examples(MODEL), strict=True):
        assert record["score"] == pytest.approx(BYTES ** -len(example.target))
        assert record["nll"] == pytest.approx(len(example.target) * torch.tensor(BYTES).log().item())
