"""Repeated random tokens: the texts on which induction is defined.

    Repeats     a b c d e  a b c d e  a b c d e      always at the same distance; the published stimulus
    Jittered    a b c d  a b c d e  a b c  a b c d   at varying distances: a purely positional head scores about chance
    Walks       a c b a c d e b a c b ...            each token has a usual successor, now and then the walk jumps

A head that looks a fixed distance back scores on `Repeats` like one that finds what followed, if that distance is the
period; on `Jittered` it scores about chance. On `Walks` nothing but the successor of the last occurrence helps, so that
models that learn them learn induction at a shift of 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ProblemError


@dataclass(frozen=True)
class Repeats:
    """`period` random tokens, `times` times over, after a beginning-of-sequence token where the model has one.

    25 x 4 as in Olsson et al. 2022. Tokens are drawn without replacement, so the only repetition is the one meant.

    >>> Repeats(period=3, times=2).draw([7, 8, 9], first=0, sequences=1)
    tensor([[0, 9, 7, 8, 9, 7, 8]])
    """

    period: int = 25
    times: int = 4

    def __post_init__(self) -> None:
        if self.period < 1 or self.times < 1:
            raise ProblemError(f"{self}: expected a period and times of 1 or more.")

    def fitting(self, vocabulary: int, context: int | None) -> "Repeats":
        """The same, shortened to what a small vocabulary or a short context allows."""
        room = self.period * self.times + 1 if context is None else context - 1
        period = max(1, min(self.period, vocabulary, room // 2))
        return Repeats(period, max(1, min(self.times, room // period)))

    def draw(self, vocabulary: list[int], first: int | None, sequences: int, seed: int = 0) -> Tensor:
        """int64 [sequences, tokens], the same for the same seed; `first` is the beginning-of-sequence token."""
        random = torch.Generator().manual_seed(seed)
        blocks = _blocks(vocabulary, self.period, sequences, random)
        return _begun(blocks.repeat(1, self.times), first)


@dataclass(frozen=True)
class Jittered:
    """Random tokens repeated `times` times, each time a random number of them, from `shortest` to `longest`.

    The distance from a token to its last occurrence is the length of that repetition, drawn uniformly for
    each repetition of each sequence: 15 to 35, around the 25 of `Repeats`. All sequences are cut to the length
    1 + times * (shortest + longest) / 2, rounded down, and what the shorter ones lack is filled by going on.

    >>> Jittered(shortest=2, longest=4, times=3).draw([6, 7, 8, 9], None, sequences=1)  # 2, 3, 2 and 2 of 6 7 9 8
    tensor([[6, 7, 6, 7, 9, 6, 7, 6, 7]])
    """

    shortest: int = 15
    longest: int = 35
    times: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or self.times < 1:
            raise ProblemError(f"{self}: expected 1 <= shortest <= longest, and times of 1 or more.")

    def fitting(self, vocabulary: int, context: int | None) -> "Jittered":
        """The same, shortened to what a small vocabulary or a short context allows."""
        room = self.times * self.longest + 1 if context is None else context - 1
        longest = max(1, min(self.longest, vocabulary, room // 2))
        shortest = max(1, min(self.shortest, longest * self.shortest // self.longest))
        return Jittered(shortest, longest, max(1, min(self.times, 2 * room // (shortest + longest))))

    @property
    def length(self) -> int:
        """Tokens of a sequence, without the one that begins it."""
        return self.times * (self.shortest + self.longest) // 2

    def draw(self, vocabulary: list[int], first: int | None, sequences: int, seed: int = 0) -> Tensor:
        """int64 [sequences, tokens], the same for the same seed; `first` is the beginning-of-sequence token."""
        random = torch.Generator().manual_seed(seed)
        blocks = _blocks(vocabulary, self.longest, sequences, random)
        most = -(-self.length // self.shortest)
        lengths = torch.randint(self.shortest, self.longest + 1, (sequences, most), generator=random)
        rows = [
            torch.cat([block[:n] for n in of.tolist()])[: self.length]
            for block, of in zip(blocks, lengths, strict=True)
        ]
        return _begun(torch.stack(rows), first)


@dataclass(frozen=True)
class Walks:
    """Walks over `states` random tokens, each of which has one successor, the same throughout a sequence.

    With probability `restart` a step goes to any of the states instead. Models learn to look up what followed the last
    occurrence of a token, and no other distance helps. A model that knows the successors can at best reach the entropy
    of a step.

    >>> Walks(states=3, restart=0.0, length=7).draw([7, 8, 9], first=0, sequences=1)  # without jumps
    tensor([[0, 9, 7, 8, 9, 7, 8, 9]])
    """

    states: int = 16
    restart: float = 0.25
    length: int = 128

    def __post_init__(self) -> None:
        if self.states < 1 or self.length < 1 or not 0 <= self.restart <= 1:
            raise ProblemError(f"{self}: expected states and a length of 1 or more, and a restart from 0 to 1.")

    def draw(self, vocabulary: list[int], first: int | None, sequences: int, seed: int = 0) -> Tensor:
        """int64 [sequences, tokens], the same for the same seed; `first` is the beginning-of-sequence token."""
        random = torch.Generator().manual_seed(seed)
        named = _blocks(vocabulary, self.states, sequences, random)  # [sequences, states]
        jumps = torch.rand(sequences, self.length, generator=random) < self.restart
        anywhere = torch.randint(self.states, (sequences, self.length), generator=random)
        at, steps = anywhere[:, 0], list[Tensor]()
        for step in range(self.length):
            at = torch.where(jumps[:, step], anywhere[:, step], at)
            steps.append(at)
            at = (at + 1) % self.states  # a cycle, whose states are random tokens
        return _begun(named.gather(1, torch.stack(steps, dim=1)), first)


def plain_tokens(tokenizer: Any, embeddings: int) -> list[int]:
    """The ids to draw from: neither special nor added, and of the rest neither the first tenth nor the last.

    Vocabularies list frequent pieces first (byte pairs in the order of merging, pieces by score), so the first tenth
    holds the most common tokens and the last the rarest, which a model may never have seen.

    >>> from types import SimpleNamespace
    >>> class Words(SimpleNamespace):
    ...     def __len__(self):
    ...         return 12
    >>> plain_tokens(Words(all_special_ids=[0], get_added_vocab=lambda: {"<user>": 11}), embeddings=12)  # of 1 to 10
    [2, 3, 4, 5, 6, 7, 8, 9]
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    ids = [i for i in range(min(len(tokenizer), embeddings)) if i not in special]
    return ids[len(ids) // 10 : len(ids) - len(ids) // 10]


def _blocks(vocabulary: list[int], size: int, sequences: int, random: torch.Generator) -> Tensor:
    """Different random tokens for each sequence, [sequences, size]."""
    if sequences < 1:
        raise ProblemError(f"sequences is {sequences}: expected a number of 1 or more.")
    if len(vocabulary) < size:
        raise ProblemError(f"{len(vocabulary)} tokens to draw from: expected {size} different ones at least.")
    orders = (torch.randperm(len(vocabulary), generator=random) for _ in range(sequences))
    return torch.tensor(vocabulary)[torch.stack([order[:size] for order in orders])]


def _begun(tokens: Tensor, first: int | None) -> Tensor:
    return tokens if first is None else torch.cat([torch.full((len(tokens), 1), first), tokens], dim=1)
