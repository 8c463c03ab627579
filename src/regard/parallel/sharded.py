"""Decoding where the keys are on several ranks: each rank has all queries and some of the keys.

Every rank computes a state over its own keys, and the states merge in pairs, up a tree whose order is that of the
ranks: after log2(ranks) exchanges every rank has the same bits. (Tree attention, Shyam et al. 2024, arXiv:2408.04093.)
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from regard.attention import cast_by_autocast
from regard.backend.contract import Backend
from regard.calls import check_unobserved
from regard.describe.bias import Bias
from regard.describe.mask import CallSizes, Mask
from regard.describe.score import Dot, Score
from regard.describe.spec import bound_to
from regard.describe.suggestions import suggest_keywords
from regard.dispatch.choose import check_backend
from regard.errors import ProblemError, RegardError
from regard.parallel.call import Place, check_layout, first_position, form_of, name_of, text_of
from regard.parallel.derivatives import check_tangents, check_untransformed
from regard.parallel.layout import Layout
from regard.parallel.placed import Pieces, pieces_of
from regard.parallel.ranks import TIMEOUT, Message, Ranks
from regard.parallel.rectangle import Formula, Part, check_can_run, empty_state, state_of
from regard.parallel.untraced import untraced
from regard.plan.checks import check_numbers, check_readable, check_sink, check_specs, check_tensors
from regard.state import State
from regard.storage.stored import StoredTensor


@suggest_keywords
@untraced
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
    those of `attend`, in positions of the whole sequence of keys, and the same on every rank; the contents of q, bias,
    score and sink are not compared, and with NCCL mask, offset and layout in the first call of a form only. Not
    differentiable: train with `ring_attend`.

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
    try:
        keys = _keys_of(layout, k, Place(ranks.rank, ranks.size))
    except RegardError as error:
        ranks.refuse(str(error))
        raise
    return attend_keys(ranks, formula, sink, q, (k, v), keys, offset)


class Keys(NamedTuple):
    """Where the keys of a sequence are.

    Attributes:
        tokens: on all ranks.
        own: the positions of those of this rank.
        layout: which rank has which, as a text that is the same on every rank.
    """

    tokens: int
    own: Pieces
    layout: str


def _keys_of(layout: Layout, k: Tensor, place: Place) -> Keys:
    check_readable("k", k, axes := "a tensor [batch, kv_heads, keys, qk_dim]")
    if k.ndim != 4:
        raise ProblemError(f"k has shape {list(k.shape)}: expected {axes}.")
    check_layout("layout", layout, "k", k, place)
    return Keys(layout.tokens, pieces_of(layout.positions(place.rank)), layout.digest)


def attend_keys(
    ranks: Ranks,
    formula: Formula,
    sink: Tensor | None,
    q: Tensor,
    stored: tuple[Tensor | StoredTensor, Tensor | StoredTensor],
    keys: Keys,
    offset: int | None,
) -> Tensor:
    """The output over all tokens, from this rank's keys and values."""
    try:
        q, k, v = cast_by_autocast(q, *stored)
        bound, first = _bound(ranks, formula, sink, q, (k, v), keys.tokens, offset)
    except RegardError as error:
        ranks.refuse(str(error))
        raise
    form = _form(formula, sink, q, k, v)
    form_text = ", ".join(f"{name} {value}" for name, value in form.items())
    now = f", mask {text_of(formula.mask)}, {keys.tokens} tokens, offset {first}, layout {keys.layout}"
    ranks.agree((ranks.function, type(formula.mask), *form.values()), lambda: form_text, now)
    with torch.no_grad():
        queries = ((first, q.shape[2], q.shape[2], q.shape[2]),)
        if bound.backend is not None and not keys.own and keys.tokens:
            key, value = (q.new_zeros(q.shape[0], t.shape[1], 1, t.shape[3]) for t in (k, v))
            check_can_run(bound, Part(q, key, value, queries, ((0, 1, 1, 1),)))  # else it waits for ranks that refuse
        state = state_of(bound, Part(q, k, v, queries, keys.own)) if keys.own else empty_state(q, v.shape[3])
        total = merged(ranks, state)
        return (total.out if sink is None else total.with_sink(sink)).to(q.dtype)


def _form(
    f: Formula, sink: Tensor | None, q: Tensor, k: Tensor | StoredTensor, v: Tensor | StoredTensor
) -> dict[str, Any]:
    """What must be equal on all ranks, and stays the same while a sequence is decoded."""
    return {
        "q": tuple(q.shape), "kv": (k.shape[1], k.shape[3], v.shape[3]), "type": q.dtype, "device": q.device.type,
        "bias": form_of(f.bias), "score": form_of(f.score), "scale": f.scale, "softcap": f.softcap,
        "sink": sink is not None, "backend": name_of(f.backend),
    }  # fmt: skip


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
    check_untransformed(ranks.function)
    check_specs(f.mask, f.bias, f.score)
    check_numbers(f.scale, f.softcap, f.dropout)
    check_backend(f.backend)
    k, v = (t.placeholder if isinstance(t, StoredTensor) else t for t in stored)
    check_tensors(q, k, v)
    (f.score or Dot()).dim(q.shape[3], k.shape[3])  # raises an error if it does not take them
    check_sink(sink, q.shape[1], q)
    learned = (q, *(t for t in (*stored, sink) if isinstance(t, Tensor)), *f.tensors())
    if torch.is_grad_enabled() and any(t.requires_grad for t in learned):
        raise ProblemError(
            f"{ranks.function} is for inference, and a tensor requires a gradient: run under torch.no_grad(), or train "
            "with ring_attend."
        )
    check_tangents(ranks.function, learned)
    first = first_position(offset, tokens - q.shape[2])
    sizes = CallSizes(q.shape[0], q.shape[1], q.shape[2], tokens, first)
    mask = None if f.mask is None else bound_to(f.mask, sizes)
    bias = None if f.bias is None else bound_to(f.bias, sizes)
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
