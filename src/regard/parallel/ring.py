"""Ring attention: each rank has some tokens of a sequence; keys and values travel from rank to rank.

While a rank computes with one block of keys, the next one arrives. The states of the blocks merge in an order that
follows from the layout alone, so a result has the same bits in every run. Backward sends keys and values around once
more, and the sums of their gradients behind them, from each rank to the next and at last home. (Liu et al. 2023,
arXiv:2310.01889; merging by log-sum-exp as in Dao et al. 2022, arXiv:2205.14135, §3.1.)
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.backend.contract import Backend
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.score import Score
from regard.describe.suggestions import suggest_keywords
from regard.errors import RefusalError
from regard.parallel.call import Arguments, Place, ShardedCall, pose
from regard.parallel.derivatives import no_tangents
from regard.parallel.layout import Layout
from regard.parallel.ranks import TIMEOUT, Message, Ranks
from regard.parallel.rectangle import Formula, Gradients, Part, added, empty_state, gradients_of, state_of
from regard.parallel.route import Visit
from regard.seeds import mixed
from regard.state import State
from regard.torch_internals import leave_out_of_graphs
from regard.wide import wide_of


@suggest_keywords
def ring_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    offset: int | None = None,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> Tensor:
    """This rank's rows of the attention over a sequence that is sharded over ranks; every rank of the group calls it.

    The arguments are those of `attend`. Mask, bias, score, sink and offset are those of the whole sequence, the same on
    every rank: positions are positions in the sequence, and the rows and columns of a `TensorMask` are its tokens. The
    result equals that of `attend` in one process but for rounding, and its bits are the same in every run.

    Differentiable; every rank of the group calls backward, too. The gradients of bias, score and sink that a rank gets
    are those of its own queries: their sum over the ranks is the gradient, as for every other parameter of a model
    whose tokens are sharded. Dropout draws from a seed of torch's generator on each rank, other pairs than in one
    process.

    Args:
        q: [batch, heads, tokens of this rank, qk_dim].
        k: [batch, kv_heads, tokens of this rank, qk_dim].
        v: [batch, kv_heads, tokens of this rank, v_dim].
        layout: which tokens each rank has; None: contiguous, as many on each rank as on this one.
        key_layout: which keys each rank has, where they are another sequence than the queries; None: `layout`.
        offset: position of the first query of the sequence; None puts its last query at its last key.
        group: the ranks; None for all. `mesh.get_group("name")` is that of a dimension of a `DeviceMesh`.
        timeout: seconds to wait for another rank.

    Returns:
        [batch, heads, tokens of this rank, v_dim], of the type of q.

    Raises:
        ProblemError: an argument is wrong, or ranks call with different arguments.
        RefusalError: no backend can run it; inside of `torch.func`, or with tensors that have tangents.
        RankError: another rank ended, or does not answer within the timeout; it names the rank.

    >>> import torch, torch.distributed as dist
    >>> from regard import Causal, attend
    >>> from regard.parallel import ring_attend
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
    >>> q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    >>> torch.allclose(ring_attend(q, k, v, mask=Causal()), attend(q, k, v, mask=Causal()), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    arguments = Arguments(
        q, k, v, mask, bias, score, scale, softcap, sink, dropout, layout, key_layout, offset, backend
    )  # fmt: skip
    state, dtype = _run(Ranks(group, timeout, "ring_attend"), arguments)
    out = state.out if sink is None else state.with_sink(sink)
    return out.to(dtype)


@suggest_keywords
def ring_attend_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    offset: int | None = None,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> State:
    """`ring_attend` as a `State`, which has the log-sum-exp and merges with states over other keys by `|`.

    The arguments and errors are those of `ring_attend`; `out` is in float32 or wider.
    """
    arguments = Arguments(
        q, k, v, mask, bias, score, scale, softcap, None, 0.0, layout, key_layout, offset, backend
    )  # fmt: skip
    return _run(Ranks(group, timeout, "ring_attend_state"), arguments)[0]


def _run(ranks: Ranks, arguments: Arguments) -> tuple[State, torch.dtype]:
    """The state, its output in float32 or wider, and the type of the output of the call."""
    if torch.compiler.is_compiling():  # what is sent is no part of a graph
        untraced: Any = torch.compiler.disable(_run_untraced)
        return untraced(ranks, arguments)
    return _run_untraced(ranks, arguments)


def _run_untraced(ranks: Ranks, arguments: Arguments) -> tuple[State, torch.dtype]:
    call, a = pose([ranks], arguments, Place(ranks.rank, ranks.size))
    return run_ring(ranks, call, a.q, a.k, a.v), a.q.dtype


def run_ring(ranks: Ranks, call: ShardedCall, q: Tensor, k: Tensor, v: Tensor) -> State:
    """The state of this rank's queries, its output in float32 or wider; differentiable."""
    computed = _Attend.apply(Ring(ranks, call), q, k, v, *call.formula.tensors())
    return State(*cast("tuple[Tensor, Tensor]", computed))


class _Attend(torch.autograd.Function):
    """(out, lse) of a rank's queries, both in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, ring: "Ring", q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ring.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, *more)
        ctx.ring = ring
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = _Gradient.apply(ctx.ring, ctx.needs_input_grad[4:], *grads, *ctx.saved_tensors)
        return None, *cast("tuple[Tensor | None, ...]", found)


leave_out_of_graphs(_Attend.backward)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Attend`, which have no derivatives themselves."""

    @staticmethod
    def forward(
        ctx: Any, ring: "Ring", wanted: tuple[bool, ...], dout: Tensor, dlse: Tensor, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *more = saved
        found = ring.backward(q, k, v, (out, lse), dout, dlse)
        # zeros, not None, on a rank that computed nothing with a tensor: the ranks add up their gradients
        learned = zip(found.more, more, wanted, strict=True)
        own = (torch.zeros_like(t) if grad is None and is_wanted else grad for grad, t, is_wanted in learned)
        return *(grad.to(t.dtype) for grad, t in zip(found[:3], (q, k, v), strict=True)), *own

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise no_tangents("the backward pass of attention over ranks")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RefusalError(
            "attention over ranks can be differentiated once, and this asks for a second derivative: gather q, k and v "
            'on one rank and call attend(..., backend="reference").'
        )


UP, DOWN, KEYS, SUMS, HOME = 0, 1, 0, 2, 4
"""Parts of the tag of a message: its way; keys and values, sums of gradients, such sums on their way home."""


@dataclass(frozen=True, eq=False)
class Ring:
    """One call on one rank."""

    ranks: Ranks
    call: ShardedCall

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of this rank's queries over all keys."""
        total: State | None = None
        blocks = self._own_blocks(k, v)
        for step in range(self.call.route.steps + 1):
            arriving, messages = self._travel(blocks, step, k, v)
            with self.ranks.sending(messages):
                for visit in self._computed(step):
                    part = self._part(q, k, v, visit.origin, blocks.get(visit.way))
                    state = state_of(self._formula(visit.origin), part)
                    total = state if total is None else total | state
            blocks = arriving
        total = total or empty_state(q, v.shape[3])
        return total.out, total.lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, total: tuple[Tensor, Tensor], dout: Tensor, dlse: Tensor
    ) -> Gradients:
        """The gradients of this rank's tensors.

        A sum of gradients follows its block one step behind: it is sent on while the next block is computed.
        """
        route = self.call.route
        blocks, sums = self._own_blocks(k, v), dict[int, Tensor]()
        own, dq = (
            torch.zeros(k.numel() + v.numel(), dtype=wide_of(k.dtype), device=k.device),
            torch.zeros_like(q, dtype=wide_of(q.dtype)),
        )
        more: list[Tensor | None] = [None] * len(self.call.formula.tensors())
        for step in range(route.steps + 2):
            arriving, messages = self._travel(blocks, step, k, v)
            received, home, following = self._follow(sums, step, k, v)
            sums = {visit.way: self._empty(visit.origin, k, v, wide_of(k.dtype)).zero_() for visit in self._here(step)}
            with self.ranks.sending([*messages, *following]):
                for visit in self._computed(step):
                    part = self._part(q, k, v, visit.origin, blocks.get(visit.way))
                    found = gradients_of(self._formula(visit.origin), part, State(*total), dout, dlse)
                    dq += found.q
                    more = added(more, found.more)
                    (sums[visit.way] if step else own).add_(packed(found.k, found.v))
            for way, before in received.items():
                sums[way] += before
            for each in home:
                own += each
            blocks = arriving
        dk, dv = unpacked(own, k, v, k.shape[2])
        return Gradients(dq, dk, dv, more)

    def _here(self, step: int) -> list[Visit]:
        """The blocks of other ranks that are here after `step` hops."""
        return self.call.route.visits(self.ranks.rank, step) if step else []

    def _computed(self, step: int) -> list[Visit]:
        """The blocks that this rank computes with at a step: its own at first."""
        me = self.ranks.rank
        here = self._here(step) if step else [Visit(me, 0, False, bool(self.call.route.needs[me, me]))]
        return [visit for visit in here if visit.is_needed]

    def _own_blocks(self, k: Tensor, v: Tensor) -> dict[int, Tensor]:
        """This rank's block by the ways on which it leaves."""
        route, me = self.call.route, self.ranks.rank
        ways = [way for way, hops in ((1, route.up), (-1, route.down)) if hops[me]]
        return dict.fromkeys(ways, packed(k, v)) if ways else {}

    def _travel(
        self, blocks: dict[int, Tensor], step: int, k: Tensor, v: Tensor
    ) -> tuple[dict[int, Tensor], list[Message]]:
        """(the blocks that arrive for the next step, by their ways; what is sent and received for that)."""
        going = {visit.way for visit in self._here(step) if visit.goes_on} if step else set(blocks)
        coming = {visit.way: self._empty(visit.origin, k, v, k.dtype) for visit in self._here(step + 1)}
        sent = [self._message(blocks[way], way, KEYS, way, is_sent=True) for way in sorted(going)]
        return coming, [*sent, *(self._message(t, -way, KEYS, way) for way, t in sorted(coming.items()))]

    def _follow(
        self, sums: dict[int, Tensor], step: int, k: Tensor, v: Tensor
    ) -> tuple[dict[int, Tensor], list[Tensor], list[Message]]:
        """(the sums that arrive for the blocks here, by their ways; those of the own block; what is sent and received).

        Args:
            sums: of the blocks that were here one step before.
        """
        route, me = self.call.route, self.ranks.rank
        messages: list[Message] = []
        for visit in self._here(step - 1) if step else []:
            if visit.goes_on:
                messages.append(self._message(sums[visit.way], visit.way, SUMS, visit.way, is_sent=True))
            else:
                messages.append(self._message(sums[visit.way], visit.origin - me, HOME, visit.way, is_sent=True))
        here = self._here(step) if step > 1 else []
        received = {visit.way: self._empty(visit.origin, k, v, wide_of(k.dtype)) for visit in here}
        messages += [self._message(t, -way, SUMS, way) for way, t in received.items()]
        home: list[Tensor] = []
        for way, hops in ((1, route.up), (-1, route.down)):
            if hops[me] and hops[me] == step - 1:
                home.append(self._empty(me, k, v, wide_of(k.dtype)))
                messages.append(self._message(home[-1], way * hops[me], HOME, way))
        return received, home, messages

    def _message(self, tensor: Tensor, distance: int, kind: int, way: int, *, is_sent: bool = False) -> Message:
        peer = (self.ranks.rank + distance) % self.ranks.size
        return Message(tensor, peer, kind + (UP if way > 0 else DOWN), is_sent)

    def _empty(self, origin: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for the keys and values of a rank, or for their gradients."""
        each = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        return torch.empty(each * self.call.keys.counts[origin], dtype=dtype, device=k.device)

    def _part(self, q: Tensor, k: Tensor, v: Tensor, origin: int, block: Tensor | None) -> Part:
        if origin != self.ranks.rank:
            k, v = unpacked(cast(Tensor, block), k, v, self.call.keys.counts[origin])
        return Part(q, k, v, self.call.query_pieces(self.ranks.rank), self.call.key_pieces(origin))

    def _formula(self, origin: int) -> Formula:
        formula = self.call.formula
        return replace(formula, seed=mixed(formula.seed, origin)) if formula.dropout else formula


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Both in one tensor of one axis."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpacked(block: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The keys and values, [batch, kv_heads, tokens, dim], of a block; shaped as k and v but for the tokens."""
    shapes = [(*t.shape[:2], tokens, t.shape[3]) for t in (k, v)]
    at = k.shape[0] * k.shape[1] * tokens * k.shape[3]
    return block[:at].view(shapes[0]), block[at:].view(shapes[1])
