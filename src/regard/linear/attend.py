"""The front door of linear attention: `linear_attend`. It maps queries and keys to features, and runs the form.

Long calls are done in segments, one after another, each small enough to stay in the cache: what they need beside q, k,
v and the output does not grow with the number of tokens, unless gradients are wanted or torch traces.
"""

from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.describe.feature import Elu1, Favor, Feature
from regard.linear.call import Call, checked, compute_type, first_carry, last_state
from regard.linear.finite import guarded, is_all_finite
from regard.linear.rule import Rule
from regard.linear.state import LinearResult, LinearState
from regard.linear.stretch import Carry, Stretch, split

ELU1 = Elu1()

CHUNK = 64
"""Tokens whose pairs are taken at once. The products within a chunk grow with it, those of the states shrink."""

SEGMENT = 1 << 18
"""Numbers of features and values, over all heads and batch rows, that a segment has: 1 MiB, so that what is made of
them stays in a core's cache. Fewer make more calls."""

SEGMENT_ON_GPU = 64 * SEGMENT
"""Where a call takes longer to start than such a segment to compute."""


def linear_attend(
    q: Float[Tensor, "batch heads queries qk_dim"],
    k: Float[Tensor, "batch kv_heads keys qk_dim"],
    v: Float[Tensor, "batch kv_heads keys v_dim"],
    features: Feature | EllipsisType | None = ...,
    causal: bool = True,
    state: LinearState | None = None,
    *,
    rule: Rule | None = None,
    scale: float | None = None,
    normalise: bool | None = None,
    form: str | None = None,
    chunk: int = CHUNK,
) -> LinearResult:
    """Linear attention: `out_i = S_i^T phi(q_i) / (z_i . phi(q_i))`.

        S_i = sum_j phi(k_j) v_j^T        z_i = sum_j phi(k_j)        over the keys j <= i, or over all if not causal

    The cost grows linearly with the tokens, and what is kept of them does not grow. It is another function than softmax
    attention: see the README of this room. Katharopoulos et al. 2020, arXiv:2006.16236, §3.2-3.4.

    A row that sees nothing, or whose weights are all 0, gives 0. Changing a later token changes no bit of an earlier
    row; one that is not finite makes NaN of the rows that see it, and of no others.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim]; heads are shared in contiguous groups, as in `attend`.
        v: [batch, kv_heads, keys, v_dim].
        features: phi; None for the vectors themselves, so that weights are plain dot products. Left out: `Elu1()`, and
            under a rule None, as RetNet, GLA and DeltaNet have it.
        causal: where the last query stands at the last key, as in `attend`; False lets every query see all keys.
        state: what came before, of an earlier call with the same words; None for nothing. Every query sees it.
        rule: how the state forgets, `Decay`, `Gated` or `Delta`; None for a sum. Gates and decays belong to key heads.
        scale: what q . k is multiplied by; None for what the features say (`qk_dim ** -0.5` where they come near
            softmax), and 1 without features. The papers of the rules take `qk_dim ** -0.5`.
        normalise: whether to divide by `z . phi(q)`; None does so with features unless the rule is `Delta`.
        form: "chunked", "parallel" (all pairs), "recurrent" (token by token): the same result but for rounding. None
            for recurrent with a single key, else chunked.
        chunk: tokens of a chunk, at least 1; `Gated` takes the greatest power of two within it.

    Returns:
        (out [batch, heads, queries, v_dim] of the type of q, the `LinearState` after the last key). Sums are taken in
        fp32, fp64 for fp64.

    Raises:
        ProblemError: the call makes no sense.

    >>> import torch
    >>> from regard.linear import linear_attend
    >>> q, k, v = torch.randn(1, 8, 64, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 12)
    >>> out, state = linear_attend(q, k, v)
    >>> out.shape, state.S.shape
    (torch.Size([1, 8, 64, 12]), torch.Size([1, 2, 16, 12]))

    A prompt first, then token by token:

    >>> prompt, state = linear_attend(q[:, :, :63], k[:, :, :63], v[:, :, :63])
    >>> last, state = linear_attend(q[:, :, 63:], k[:, :, 63:], v[:, :, 63:], state=state)
    >>> torch.allclose(last, out[:, :, 63:], atol=1e-5)
    True
    """
    features = (ELU1 if rule is None else None) if features is ... else features
    call = checked(q, k, v, features, rule, causal, scale, normalise, state, form, chunk)
    with _without_autocast(q):
        carry = first_carry(call, k, v, state)
        if is_all_finite(call, q, k, v):
            out, carry = _run(call, q, k, v, carry)
        else:
            out, carry = guarded(_run, call, q, k, v, carry)
    return LinearResult(out, last_state(call, carry, state))


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    """The rows and the last state. What stands before the corner of the triangle is taken in, or only read, first."""
    queries, keys = q.shape[2], k.shape[2]
    if call.causal and queries == keys:
        return _segments(call, q, k, v, 0, keys, carry)
    ahead = max(0, keys - queries) if call.causal else keys
    alone = max(0, queries - keys) if call.causal else 0
    outs: list[Tensor] = []
    if alone:
        outs.append(_read(call, q[:, :, :alone], k, v, carry))
    if ahead:
        _, carry = _segments(call, q[:, :0, :0], k, v, 0, ahead, carry)
    if not call.causal:
        return _read(call, q, k, v, carry), carry
    if keys > ahead:
        out, carry = _segments(call, q[:, :, alone:], k, v, ahead, keys, carry)
        outs.append(out)
    if not outs:
        return q.new_zeros(*q.shape[:3], v.shape[3]), carry
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)), carry


def _segments(call: Call, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, carry: Carry) -> tuple[Tensor, Carry]:
    """Keys start <= t < stop with a query each, or with none if q has none."""
    size = _segment(call, q, k, v, stop - start)
    out = _Rows(call, q, v, whole=size >= stop - start)
    if start == stop:
        return out.all(), carry
    count = -(-(stop - start) // size)
    asked = q.split(size, dim=2) if q.shape[2] else [None] * count
    given = (k, v, call.log_gate, call.beta, call.log_decay)
    pieces = zip(*(split(None if x is None else x[:, :, start:stop], size, count) for x in given), strict=True)
    for i, (here, piece) in enumerate(zip(asked, pieces, strict=True)):
        rows, carry = call.run(_stretch(call, here, *piece), carry, call.chunk)
        if here is not None:
            out.add(i * size, _heads(call, rows, here, k))
    return out.all(), carry


def _read(call: Call, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> Tensor:
    """What queries get from a state, by the same segments."""
    size = _segment(call, q, k, v, q.shape[2])
    out = _Rows(call, q, v, whole=size >= q.shape[2])
    for t in range(0, q.shape[2], size):
        here = q[:, :, t : t + size]
        out.add(t, _heads(call, _asked(call, here, k) @ carry.matrix, here, k))
    return out.all()


class _Rows:
    """The rows of segments, put together; in place where nothing looks at the steps, else all would be there twice."""

    def __init__(self, call: Call, q: Tensor, v: Tensor, *, whole: bool) -> None:
        self._none = q.new_zeros(*q.shape[:3], v.shape[3]) if not q.shape[2] else None
        self._out = q.new_empty(*q.shape[:3], v.shape[3]) if call.in_place and not whole else None
        self._rows: list[Tensor] = []

    def add(self, start: int, rows: Tensor) -> None:
        """Rows from token `start` on."""
        if self._out is None:
            self._rows.append(rows)
        else:
            self._out[:, :, start : start + rows.shape[2]] = rows

    def all(self) -> Tensor:
        """[batch, heads, tokens, v_dim]."""
        if self._out is not None or self._none is not None:
            return cast(Tensor, self._none if self._out is None else self._out)
        return self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, dim=2)


def _stretch(
    call: Call,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    beta: Tensor | None,
    log_decay: Tensor | None,
) -> Stretch:
    """Keys and the queries beside them, if there are any, as features."""
    v = _copied(v) if not call.normalise else torch.cat([v.to(compute_type(k)), _ones(v)], dim=3)
    key, top = _mapped(call, k)
    rows, group = (key[:, :, :0], 0) if q is None else (_asked(call, q, k), q.shape[1] // max(1, k.shape[1]))
    return Stretch(rows, key, v, group, top, call.log_gamma, log_gate, beta, log_decay)


def _ones(v: Tensor) -> Tensor:
    """The column that z is summed in."""
    return v.new_ones(*v.shape[:3], 1, dtype=compute_type(v))


def _copied(x: Tensor) -> Tensor:
    """x in a layout of our own, since products of matrices round as their operands lie in memory.

    Else a row would have other bits where a later token made a copy of everything necessary.
    """
    return x.to(compute_type(x)).clone(memory_format=torch.contiguous_format)


def _mapped(call: Call, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The features of queries or keys, and the exponents that they count with."""
    if isinstance(call.features, Favor):
        return call.features.split(x, call.scale)
    if call.features is not None:
        return call.features.map(x, call.scale), None
    return _copied(x), None


def _asked(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """The features of queries, as rows."""
    rows = _mapped(call, _rows(q, k))[0]
    return rows if call.features is not None or call.scale is None else rows * call.scale


def _heads(call: Call, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Rows of (token, query of the group), normalised, as [batch, heads, queries, v_dim] of the type of q."""
    if call.normalise:
        weights = rows[..., -1:]
        rows = rows[..., :-1] / torch.where(weights == 0, 1.0, weights)
    group = q.shape[1] // max(1, k.shape[1])
    rows = rows.unflatten(2, (q.shape[2], group)).transpose(2, 3)
    return rows.reshape(*q.shape[:3], rows.shape[4]).to(q.dtype)


def _rows(q: Tensor, k: Tensor) -> Tensor:
    """The inverse: [batch, kv_heads, queries * group, qk_dim]."""
    group = q.shape[1] // max(1, k.shape[1])
    return q if group == 1 else q.unflatten(1, (k.shape[1], group)).transpose(2, 3).flatten(2, 3)


def _segment(call: Call, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> int:
    """How many of so many tokens are a segment, at least 1."""
    if not call.bounded:
        return max(1, tokens)
    features = k.shape[3] if call.features is None else call.features.size(k.shape[3])
    token = max(1, k.shape[0] * max(q.shape[1], k.shape[1]) * (features + v.shape[3]))
    numbers = SEGMENT if k.device.type == "cpu" else SEGMENT_ON_GPU
    return max(1, numbers // token // call.chunk) * call.chunk


def _without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Sums are taken in fp32 under autocast as well."""
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
