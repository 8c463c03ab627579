"""Random tokens, repeated: the text on which induction is defined."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Repeats:
    """`period` random tokens, `times` times over, after a beginning-of-sequence token where the model has one.

    25 x 4 as in Olsson et al. 2022. Tokens are drawn without replacement, so the only repetition is the one meant.
    """

    period: int = 25
    times: int = 4

    def fitting(self, vocabulary: int, context: int | None) -> "Repeats":
        """The same, shortened to what a small vocabulary or a short context allows."""
        room = self.period * self.times + 1 if context is None else context - 1
        period = max(1, min(self.period, vocabulary, room // 2))
        return Repeats(period, max(1, min(self.times, room // period)))

    def draw(self, vocabulary: list[int], first: int | None, sequences: int, seed: int = 0) -> Tensor:
        """int64 [sequences, tokens], the same for the same seed; `first` is the beginning-of-sequence token."""
        random = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(len(vocabulary), generator=random) for _ in range(sequences))
        blocks = torch.tensor(vocabulary)[torch.stack([order[: self.period] for order in orders])]
        repeated = blocks.repeat(1, self.times)
        return repeated if first is None else torch.cat([torch.full((sequences, 1), first), repeated], dim=1)


def plain_tokens(tokenizer: Any, embeddings: int) -> list[int]:
    """The ids to draw from: neither special nor added, and of the rest neither the first tenth nor the last.

    Vocabularies list frequent pieces first (byte pairs in the order of merging, pieces by score), so the first tenth
    holds the most common tokens and the last the rarest, which a model may never have seen.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    ids = [i for i in range(min(len(tokenizer), embeddings)) if i not in special]
    return ids[len(ids) // 10 : len(ids) - len(ids) // 10]
