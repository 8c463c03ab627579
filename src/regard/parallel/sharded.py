"""Decoding where the keys are on several ranks: each rank has all queries and some of the keys.

Every rank computes a state over its own keys, and the states merge in pairs, up a tree whose order is that of the
ranks: after log2(ranks) exchanges every rank has the same bits. (Tree attention, Shyam et al. 2024, arXiv:2408.04093.)
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.backend.contract import Backend
from regard.calls import check_unobserved
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Score
from regard.describe.suggestions import suggest_keywords
from regard.errors import ProblemError, RegardError
from regard.parallel.layout import Layout
from regard.parallel.placed import Pieces, pieces_of
from regard.parallel.ranks import TIMEOUT, Message, Ranks
from regard.parallel.rectangle import Formula, Part, empty_state, state_of
from regard.plan.checks import check_numbers, check_offset, check_readable, check_sink, check_specs
from regard.state import State
from regard.storage.stored import StoredTensor


@suggest_keywords
def attend_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = None,
    bias: Bias | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    offset: int | None = None,
    group: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    backend: str | Backend | None = None,
) -> Tensor:
    """Attention of queries that every rank has, over keys that are sharded; every rank gets the whole output.

    For decoding: each rank reads its own keys, and only a state per query is sent, log2(ranks) times. The arguments are
    those of `attend`, in positions of the whole sequence of keys. Not differentiable: train with `ring_attend`.

    Args:
        q: [batch, heads, queries, qk_dim], the same on every rank.
        k: [batch, kv_heads, keys of this rank, qk_dim].
        v: [batch, kv_heads, keys of this rank, v_dim].
        layout: which keys each rank has.
        offset: position of the first query; None puts the last query at the last key.

    Returns:
        [batch, heads, queries, v_dim], the same bits on every rank.

    Raises:
        ProblemError: an argument is wrong, or ranks call with different arguments.
        RankError: another rank ended, or does not answer within the timeout; it names the rank.

    >>> import torch, torch.distributed as dist
    >>> from regard import attend
    >>> from regard.parallel import Layout, attend_sharded
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more ranks
    >>> q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> torch.allclose(attend_sharded(q, k, v, layout=Layout.contiguous(6, 1)), attend(q, k, v), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    ranks = Ranks(group, timeout, "attend_sharded")
    formula = Formula(mask, bias, score, scale, softcap, 0.0, backend)
    if layout.ranks != ranks.size or layout.counts[ranks.rank] != k.shape[2]:
        error = f"k has {k.shape[2]} tokens on rank {ranks.rank} of {ranks.size}, and the layout is {layout}: "
        error += f"expected {layout.counts[ranks.rank] if layout.ranks == ranks.size else 'one'} for each rank."
        ranks.refuse(error)
        raise ProblemError(error)
    return attend_pieces(
        ranks, formula, sink, q, (k, v), pieces_of(layout.positions(ranks.rank)), layout.tokens, offset
    )


def attend_pieces(
    ranks: Ranks,
    formula: Formula,
    sink: Tensor | None,
    q: Tensor,
    stored: tuple[Tensor | StoredTensor, Tensor | StoredTensor],
    pieces: Pieces,
    tokens: int,
    offset: int | None,
) -> Tensor:
    """The output over all tokens, from this rank's tokens, which are at `pieces`."""
    k, v = stored
    try:
        formula, first = _bound(ranks, formula, sink, q, stored, tokens, offset)
    except RegardError as error:
        ranks.refuse(str(error))
        raise
    form = (ranks.function, q.shape, k.shape[1], k.shape[3], v.shape[3], q.dtype, q.device.type, sink is None)
    numbers = (formula.scale, formula.softcap, *(s if s is None else s.form() for s in (formula.bias, formula.score)))
    kind = None if formula.mask is None else type(formula.mask)
    ranks.agree((*form, *numbers, kind), lambda: f"{form[1:]}, {numbers}, mask {kind and kind.__name__}")
    with torch.no_grad():
        queries = ((first, q.shape[2], q.shape[2], q.shape[2]),)
        state = state_of(formula, Part(q, k, v, queries, pieces)) if pieces else empty_state(q, v.shape[3])
        total = merged(ranks, state)
        return (total.out if sink is None else total.with_sink(sink)).to(q.dtype)


def _bound(
    ranks: Ranks,
    formula: Formula,
    sink: Tensor | None,
    q: Tensor,
    stored: tuple[Tensor | StoredTensor, Tensor | StoredTensor],
    tokens: int,
    offset: int | None,
) -> tuple[Formula, int]:
    """The formula bound to the sequence, and the position of the first query."""
    f = formula
    check_unobserved(ranks.function)
    check_specs(f.mask, f.bias, f.score)
    check_numbers(f.scale, f.softcap, f.dropout)
    check_readable("q", q, "a tensor [batch, heads, queries, qk_dim]")
    if q.ndim != 4:
        raise ProblemError(f"q has shape {list(q.shape)}: expected [batch, heads, queries, qk_dim].")
    check_sink(sink, q.shape[1], q)
    learned = (q, *(t for t in (*stored, sink) if isinstance(t, Tensor)), *f.tensors())
    if torch.is_grad_enabled() and any(t.requires_grad for t in learned):
        raise ProblemError(
            f"{ranks.function} is for inference, and a tensor requires a gradient: run under torch.no_grad(), or train "
            "with ring_attend."
        )
    first = tokens - q.shape[2] if offset is None else check_offset(offset)
    sizes = CallSizes(q.shape[0], q.shape[1], q.shape[2], tokens, first)
    mask, bias = None if f.mask is None else f.mask.bind(sizes), None if f.bias is None else f.bias.bind(sizes)
    return replace(f, mask=mask, bias=bias), first


def merged(ranks: Ranks, state: State) -> State:
    """The state over the keys of all ranks, the same bits on every rank.

    In each round the ranks whose numbers differ in one bit exchange their states. Ranks beyond the largest power of two
    give theirs to another before, and get the result after.
    """
    me, power = ranks.rank, 1 << (ranks.size.bit_length() - 1)
    if me >= power:
        _send(ranks, state, me - power)
        return _received(ranks, state, me - power)
    if me + power < ranks.size:
        state = state | _received(ranks, state, me + power)
    stride = 1
    while stride < power:
        other = _swapped(ranks, state, me ^ stride)
        state = state | other if not me & stride else other | state
        stride *= 2
    if me + power < ranks.size:
        _send(ranks, state, me + power)
    return state


def _send(ranks: Ranks, state: State, peer: int) -> None:
    ranks.wait(ranks.start([Message(_flat(state), peer, 0, is_sent=True)]))


def _received(ranks: Ranks, like: State, peer: int) -> State:
    flat = torch.empty_like(_flat(like))
    ranks.wait(ranks.start([Message(flat, peer, 0, is_sent=False)]))
    return _state(flat, like)


def _swapped(ranks: Ranks, state: State, peer: int) -> State:
    sent = _flat(state)
    flat = torch.empty_like(sent)
    ranks.wait(ranks.start([Message(sent, peer, 0, is_sent=True), Message(flat, peer, 0, is_sent=False)]))
    return _state(flat, state)


def _flat(state: State) -> Tensor:
    return torch.cat([state.out.reshape(-1), state.lse.reshape(-1)])


def _state(flat: Tensor, like: State) -> State:
    at = like.out.numel()
    return State(flat[:at].view(like.out.shape), flat[at:].view(like.lse.shape))
