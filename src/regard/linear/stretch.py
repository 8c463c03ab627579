"""A stretch of tokens in the form that the rules compute with, and the state that is carried from one to the next.

Two layouts make all else plain. A column of ones beside the values makes z a column of S, so the sums of weights that
normalise need no code. Queries of one group lie side by side as rows (token, query head of the group), so a product
with the keys that they share is one product of matrices, and any run of tokens is a run of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor


class Stretch(NamedTuple):
    """Some successive tokens, in the type that sums are taken in."""

    q: Tensor  # [batch, kv_heads, tokens * group, features]
    k: Tensor  # [batch, kv_heads, tokens, features]
    v: Tensor  # [batch, kv_heads, tokens, v_dim], and a column of ones if it normalises
    group: int  # query heads of a key head; 0 where nothing is asked
    top: Tensor | None = None  # [batch, kv_heads, tokens]: k counts times exp(top)
    log_gamma: Tensor | None = None  # [kv_heads or 1, 1, 1], of Decay
    log_gate: Tensor | None = None  # [batch, kv_heads, tokens, features or 1], of Gated
    beta: Tensor | None = None  # [batch, kv_heads, tokens], of Delta
    log_decay: Tensor | None = None  # [batch, kv_heads, tokens], of Delta

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.k.shape[2]

    def part(self, start: int, stop: int) -> "Stretch":
        """Tokens start <= t < stop."""
        q = self.q[:, :, start * self.group : stop * self.group]
        cut = [None if x is None else x[:, :, start:stop] for x in (self.top, self.log_gate, self.beta, self.log_decay)]
        top, log_gate, beta, log_decay = cut
        k, v = self.k[:, :, start:stop], self.v[:, :, start:stop]
        return Stretch(q, k, v, self.group, top, self.log_gamma, log_gate, beta, log_decay)

    def each(self) -> Iterator["Stretch"]:
        """Token by token."""
        n = self.tokens
        rows = self.q.unflatten(2, (n, self.group)).unbind(2)
        given = (self.k, self.v, self.top, self.log_gate, self.beta, self.log_decay)
        for q, k, v, top, gate, beta, decay in zip(rows, *(split(x, 1, n) for x in given), strict=True):
            yield Stretch(q, cast(Tensor, k), cast(Tensor, v), self.group, top, self.log_gamma, gate, beta, decay)


def split(x: Tensor | None, size: int, count: int) -> Sequence[Tensor | None]:
    """So many pieces along the tokens, of so many each. Slices would cost a whole each in a backward pass."""
    return [None] * count if x is None else x.split(size, dim=2)


class Carry(NamedTuple):
    """A state on its way: S with z as its last column, and the logarithm that it counts with."""

    matrix: Tensor  # [batch, kv_heads, features, v_dim (+ 1)]
    top: Tensor | None  # [batch, kv_heads]


Run = Callable[[Stretch, Carry, int], tuple[Tensor, Carry]]
"""A stretch in chunks of so many tokens, from a state: its rows [batch, kv_heads, tokens * group, v_dim (+ 1)]."""


def by_chunks(run: Run, stretch: Stretch, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """What `run` gives for whole chunks, and then for the tokens that are left."""
    whole = stretch.tokens // chunk * chunk
    if whole in (0, stretch.tokens):
        return run(stretch, carry, min(chunk, stretch.tokens))
    first, carry = run(stretch.part(0, whole), carry, chunk)
    last, carry = run(stretch.part(whole, stretch.tokens), carry, stretch.tokens - whole)
    return torch.cat([first, last], dim=2), carry


def cut(x: Tensor, chunks: int) -> Tensor:
    """[batch, kv_heads, rows, ...] as [batch, kv_heads, chunks, rows of a chunk, ...]."""
    return x.unflatten(2, (chunks, x.shape[2] // chunks))


def before(steps: Tensor, first: Tensor, fade: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk, and after the last: `x_{c+1} = fade_c x_c + steps_c`, with `x_0 = first`.

    Args:
        steps: [batch, kv_heads, chunks, features, v_dim].
        first: [batch, kv_heads, features, v_dim].
        fade: [batch or 1, kv_heads or 1, chunks, features or 1, 1]; None for no fading.
    """
    if fade is None:
        states = torch.cat([first[:, :, None], steps], dim=2).cumsum(2)
        return states[:, :, :-1], states[:, :, -1]
    return doubled(steps, first, fade) if torch.compiler.is_compiling() else one_by_one(steps, first, fade)


def one_by_one(steps: Tensor, first: Tensor, fade: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a loop, which reads and writes each state once; chunks of a segment are few."""
    states = [first]
    for step, faded in zip(steps.unbind(2), fade.unbind(2), strict=True):
        states.append(torch.addcmul(step, faded, states[-1]))
    return torch.stack(states[:-1], dim=2), states[-1]


def doubled(steps: Tensor, first: Tensor, fade: Tensor) -> tuple[Tensor, Tensor]:
    """The same in log2(chunks) passes over all, so that what torch traces has no loop over chunks.

    Hillis and Steele 1986, doi:10.1145/7902.7903.
    """
    states = torch.cat([first[:, :, None], steps], dim=2)
    fade = torch.cat([torch.ones_like(fade[:, :, :1]), fade], dim=2)
    reach = 1
    while reach < states.shape[2]:
        states = torch.cat([states[:, :, :reach], states[:, :, reach:] + fade[:, :, reach:] * states[:, :, :-reach]], 2)
        fade = torch.cat([fade[:, :, :reach], fade[:, :, reach:] * fade[:, :, :-reach]], dim=2)
        reach *= 2
    return states[:, :, :-1], states[:, :, -1]


def summed(fade: Tensor) -> Tensor:
    """The sums of logarithms over `j < t <= i`: [..., tokens] to [..., tokens i, tokens j]; -inf above the diagonal.

    Each sum is taken over its own terms: differences of running sums would lose the small ones, and -inf.
    """
    tokens = fade.shape[-1]
    index = torch.arange(tokens, device=fade.device)
    terms = torch.where(index[:, None] > index, fade[..., :, None], 0.0)
    return torch.where(index[:, None] >= index, terms.cumsum(-2), -torch.inf)


def after(fade: Tensor, dim: int) -> Tensor:
    """The sums of logarithms over the tokens after each one, along `dim`."""
    later = torch.cat([fade.narrow(dim, 1, fade.shape[dim] - 1), torch.zeros_like(fade.narrow(dim, 0, 1))], dim)
    return later.flip(dim).cumsum(dim).flip(dim)


def rows(x: Tensor, group: int) -> Tensor:
    """[..., tokens, n] as [..., tokens * group, n]: each token's for the queries of its group."""
    return x if group == 1 or x.shape[-2] == 1 else x.repeat_interleave(group, dim=-2)
