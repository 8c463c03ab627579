"""A segment: a run of tokens in the layout that the rules compute on, and the state between two segments.

Two layouts simplify the rest. A column of ones beside the values makes z a column of S, so normalisation needs no code
of its own. The queries of a group are adjacent rows (token, query head of the group), so their product with the shared
keys is one matrix product, and any run of tokens is a run of rows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Some successive tokens, in the dtype of sums."""

    q: Tensor  # [batch, kv_heads, tokens * group, features]
    k: Tensor  # [batch, kv_heads, tokens, features]
    v: Tensor  # [batch, kv_heads, tokens, v_dim], and a column of ones if it normalises
    group: int  # query heads of a key head; 0 without queries
    top: Tensor | None = None  # [batch, kv_heads, tokens]: the true features are exp(top) times k
    log_gamma: Tensor | None = None  # [kv_heads or 1, 1, 1], of Decay
    log_gate: Tensor | None = None  # [batch, kv_heads, tokens, features or 1], of Gated
    beta: Tensor | None = None  # [batch, kv_heads, tokens], of Delta
    log_decay: Tensor | None = None  # [batch, kv_heads, tokens], of Delta

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.k.shape[2]

    def part(self, start: int, stop: int) -> "Segment":
        """Tokens start <= t < stop."""
        q = self.q[:, :, start * self.group : stop * self.group]
        cut = [None if x is None else x[:, :, start:stop] for x in (self.top, self.log_gate, self.beta, self.log_decay)]
        top, log_gate, beta, log_decay = cut
        k, v = self.k[:, :, start:stop], self.v[:, :, start:stop]
        return Segment(q, k, v, self.group, top, self.log_gamma, log_gate, beta, log_decay)

    def each(self) -> Iterator["Segment"]:
        """Token by token."""
        n = self.tokens
        rows = self.q.unflatten(2, (n, self.group)).unbind(2)
        inputs = (self.k, self.v, self.top, self.log_gate, self.beta, self.log_decay)
        for q, k, v, top, gate, beta, decay in zip(rows, *(split(x, 1, n) for x in inputs), strict=True):
            yield Segment(q, cast(Tensor, k), cast(Tensor, v), self.group, top, self.log_gamma, gate, beta, decay)


def split(x: Tensor | None, size: int, count: int) -> Sequence[Tensor | None]:
    """`count` pieces of `size` tokens each. In a backward pass every slice would allocate a gradient of the whole."""
    return [None] * count if x is None else x.split(size, dim=2)


class Carry(NamedTuple):
    """The state between two segments: S with z as its last column, and the logarithm of its scale."""

    matrix: Tensor  # [batch, kv_heads, features, v_dim (+ 1)]
    top: Tensor | None  # [batch, kv_heads]


Run = Callable[[Segment, Carry, int], tuple[Tensor, Carry]]
"""(segment, first state, tokens of a chunk) -> (rows [batch, kv_heads, tokens * group, v_dim (+ 1)], last state)."""


def by_chunks(run: Run, segment: Segment, carry: Carry, chunk: int) -> tuple[Tensor, Carry]:
    """Apply `run` to the whole chunks, and then to the remaining tokens."""
    whole = segment.tokens // chunk * chunk
    if whole in (0, segment.tokens):
        return run(segment, carry, min(chunk, segment.tokens))
    first, carry = run(segment.part(0, whole), carry, chunk)
    last, carry = run(segment.part(whole, segment.tokens), carry, segment.tokens - whole)
    return torch.cat([first, last], dim=2), carry


def cut(x: Tensor, chunks: int) -> Tensor:
    """[batch, kv_heads, rows, ...] as [batch, kv_heads, chunks, rows of a chunk, ...]."""
    return x.unflatten(2, (chunks, x.shape[2] // chunks))


def before(steps: Tensor, first: Tensor, fade: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk, and after the last: `x_{c+1} = fade_c x_c + steps_c`, with `x_0 = first`.

    Args:
        steps: [batch, kv_heads, chunks, features, v_dim].
        first: [batch, kv_heads, features, v_dim].
        fade: [batch or 1, kv_heads or 1, chunks, features or 1, 1]; None for no decay.
    """
    if fade is None:
        states = torch.cat([first[:, :, None], steps], dim=2).cumsum(2)
        return states[:, :, :-1], states[:, :, -1]
    return doubled(steps, first, fade) if torch.compiler.is_compiling() else one_by_one(steps, first, fade)


def one_by_one(steps: Tensor, first: Tensor, fade: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a loop, which reads and writes each state once; a segment has few chunks."""
    states = [first]
    for step, faded in zip(steps.unbind(2), fade.unbind(2), strict=True):
        states.append(torch.addcmul(step, faded, states[-1]))
    return torch.stack(states[:-1], dim=2), states[-1]


def doubled(steps: Tensor, first: Tensor, fade: Tensor) -> tuple[Tensor, Tensor]:
    """The same in log2(chunks) passes over all states, so that the traced graph has no loop over chunks.

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

    Each sum adds its own terms: differences of running sums would lose small terms, and -inf.
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
    """[..., tokens, n] as [..., tokens * group, n]: the row of a token for each query of the group."""
    return x if group == 1 or x.shape[-2] == 1 else x.repeat_interleave(group, dim=-2)
