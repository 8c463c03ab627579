"""What the weights of a surveyed model say of copying; no text is read for it."""

from collections.abc import Mapping
from typing import Any

import torch

from regard.inspect.measures import copying, copying_eigenvalues
from regard.inspect.measures.circuits import Parts, circuits_of, vocabulary_of
from regard.inspect.measures.score import HeadScores
from regard.inspect.measures.stimulus import plain_tokens
from regard.inspect.surveying.subject import Subject
from regard.inspect.surveying.wanted import Wanted

MEASURES = ("copying", "copying_eigenvalues")


def copied(parts: Parts, subject: Subject, tokenizer: Any, asked: Wanted) -> Mapping[int, Mapping[str, HeadScores]]:
    """The copying scores of each layer by its number. The circuit of one layer exists at a time."""
    vocabulary, among = vocabulary_of(parts), torch.tensor(plain_tokens(tokenizer, subject.embeddings))
    return {
        number: {
            "copying": copying(circuit, vocabulary, among),
            "copying_eigenvalues": copying_eigenvalues(circuit, vocabulary),
        }
        for number, circuit in enumerate(circuits_of(parts))
        if asked.layer(number)
    }
