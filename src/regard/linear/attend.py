"""`linear_attend`, the entry point of linear attention: map queries and keys to features, and run the form.

A long call runs in segments, one after another, each small enough for the CPU cache: the memory beside q, k, v and the
output does not grow with the number of tokens, unless gradients are required or torch traces.
"""

from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.describe.feature import Elu1, Feature
from regard.describe.suggestions import suggest_keywords
from regard.linear import compiled
from regard.linear.call import LinearCall, check_call, first_carry, is_split, last_state
from regard.linear.finite import guarded, is_all_finite, rule_tensors
from regard.linear.rule import Rule
from regard.linear.segment import Carry, Segment, split
from regard.linear.state import LinearResult, LinearState
from regard.wide import autocast_dtype, wide_of

ELU1 = Elu1()

CHUNK = 64
"""Tokens of a chunk. The products within a chunk grow with it, those of the states shrink."""

SEGMENT = 1 << 18
"""Elements of features and values in a segment, over all heads and batch rows: 1 MiB, so that intermediate tensors stay
in a core's cache. Smaller segments make more calls."""

SEGMENT_ON_GPU = 64 * SEGMENT
"""The same on a GPU, where launching a kernel takes longer than computing a segment of the CPU's size."""


@suggest_keywords
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

    The cost is linear in the tokens, and the size of the state is constant. This is not softmax attention: see
    `regard/linear/README.md`. Katharopoulos et al. 2020, arXiv:2006.16236, §3.2-3.4.

    A row that sees no key, or whose weights are all 0, is 0. A later token changes no bit of an earlier row; a token
    that is not finite makes the rows that see it NaN, and no others.

    Args:
        q: [batch, heads, queries, qk_dim].
        k: [batch, kv_heads, keys, qk_dim]; heads are shared in contiguous groups, as in `attend`.
        v: [batch, kv_heads, keys, v_dim].
        features: phi; None for the identity, so that weights are plain dot products. By default `Elu1()`, and with a
            rule None, as in RetNet, GLA and DeltaNet.
        causal: whether a query sees no later key; the last query is aligned with the last key, as in `attend`.
        state: the state of an earlier call with the same features and rule; None for none. Every query sees it.
        rule: how the state decays, `Decay`, `Gated` or `Delta`; None for a sum. Gates and decays are per key head.
        scale: the factor of q . k; None for the default of the features (`qk_dim ** -0.5` if they approximate
            softmax), and 1 without features. The papers of the rules use `qk_dim ** -0.5`.
        normalise: whether to divide by `z . phi(q)`; None: yes with features, unless the rule is `Delta`.
        form: "chunked", "parallel" (all pairs), "recurrent" (token by token): the same result up to rounding. None:
            recurrent for a single key, else chunked; the compiled library computes a single key as a chunk.
        chunk: tokens of a chunk, at least 1; `Gated` rounds it down to a power of two, and the compiled library uses
            at most 64.

    Returns:
        (out [batch, heads, queries, v_dim] in the dtype of q, the `LinearState` after the last key). Sums are
        accumulated in fp32, and in fp64 for fp64 inputs, under autocast as well. Call `backward()` outside of
        `torch.autocast`, as torch recommends: inside of it, autograd multiplies in the dtype of autocast.

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
    call = check_call(q, k, v, features, rule, causal, scale, normalise, state, form, chunk)
    with _without_autocast(q):
        carry = first_carry(call, k, v, state)
        if not (k.shape[2] or call.in_place):
            carry = carry._replace(matrix=_tied(call, carry.matrix, k, v))
        out, last = _computed(call, q, k, v, carry)
        if not (q.shape[2] or call.in_place):
            out = _tied(call, out, q, k, v, carry.matrix)
    return LinearResult(out, last_state(call, last, state))


def _tied(call: LinearCall, x: Tensor, *inputs: Tensor) -> Tensor:
    """x, for which the inputs and the rule have gradients of 0 rather than none."""
    every = (*inputs, call.log_gamma, *rule_tensors(call))
    return x + sum(t[..., :0].sum() for t in every if t is not None)


def _computed(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    """The rows and the last state, of inputs that may be NaN or infinite."""
    if call.causal and q.shape[2] == k.shape[2] and compiled.fits(call, q, k, v):
        out, last, finite = compiled.run(call, q, k, v, carry)  # which looks whether they are finite as it reads them
        if finite:
            return out, last
    elif is_all_finite(call, q, k, v):
        return _run(call, q, k, v, carry)
    return guarded(_run, call, q, k, v, carry)


def _run(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    """The rows and the last state. Keys before the first query, and queries before the first key, come first."""
    queries, keys = q.shape[2], k.shape[2]
    if call.causal and queries == keys:
        return _segments(call, q, k, v, 0, keys, carry)
    early_keys = max(0, keys - queries) if call.causal else keys
    early_queries = max(0, queries - keys) if call.causal else 0
    outs: list[Tensor] = []
    if early_queries:
        outs.append(_read(call, q[:, :, :early_queries], k, v, carry))
    if early_keys:
        _, carry = _segments(call, q[:, :0, :0], k, v, 0, early_keys, carry)
    if not call.causal:
        return _read(call, q, k, v, carry), carry
    if keys > early_keys:
        out, carry = _segments(call, q[:, :, early_queries:], k, v, early_keys, keys, carry)
        outs.append(out)
    if not outs:
        return q.new_zeros(*q.shape[:3], v.shape[3]), carry
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)), carry


def _segments(
    call: LinearCall, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, carry: Carry
) -> tuple[Tensor, Carry]:
    """Keys start <= t < stop with a query each, or with none if q has none."""
    queried = q if q.shape[2] else None
    if start < stop and compiled.fits(call, k if queried is None else q, k, v):
        rule = (None if t is None else t[:, :, start:stop] for t in rule_tensors(call))
        cut = call._replace(**dict(zip(("log_gate", "beta", "log_decay"), rule, strict=True)))
        return compiled.run(cut, queried, k[:, :, start:stop], v[:, :, start:stop], carry)[:2]
    size = _segment_tokens(call, q, k, v, stop - start)
    out = _Rows(call, q, v, whole=size >= stop - start)
    if start == stop:
        return out.all(), carry
    count = -(-(stop - start) // size)
    queries = q.split(size, dim=2) if q.shape[2] else [None] * count
    inputs = (k, v, call.log_gate, call.beta, call.log_decay)
    pieces = zip(*(split(None if x is None else x[:, :, start:stop], size, count) for x in inputs), strict=True)
    for i, (here, piece) in enumerate(zip(queries, pieces, strict=True)):
        rows, carry = call.run(_segment(call, here, *piece), carry, call.chunk)
        if here is not None:
            out.add(i * size, _heads(call, rows, here, k))
    return out.all(), carry


def _read(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, carry: Carry) -> Tensor:
    """The output of queries that see the state only, in the same segments."""
    if compiled.fits(call, q, k, v):
        return compiled.run(call, q, None, None, carry).out
    size = _segment_tokens(call, q, k, v, q.shape[2])
    out = _Rows(call, q, v, whole=size >= q.shape[2])
    for t in range(0, q.shape[2], size):
        here = q[:, :, t : t + size]
        out.add(t, _heads(call, _query_features(call, here, k) @ carry.matrix, here, k))
    return out.all()


class _Rows:
    """The rows of all segments; in place if neither autograd nor tracing sees the steps, to save a copy."""

    def __init__(self, call: LinearCall, q: Tensor, v: Tensor, *, whole: bool) -> None:
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


def _segment(
    call: LinearCall,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    log_gate: Tensor | None,
    beta: Tensor | None,
    log_decay: Tensor | None,
) -> Segment:
    """A run of tokens: the features of its keys and, unless q is None, of its queries."""
    v = _copy(v) if not call.normalise else torch.cat([v.to(wide_of(k.dtype)), _ones(v)], dim=3)
    key, top = _mapped(call, k)
    rows, group = (key[:, :, :0], 0) if q is None else (_query_features(call, q, k), q.shape[1] // max(1, k.shape[1]))
    return Segment(rows, key, v, group, top, call.log_gamma, log_gate, beta, log_decay)


def _ones(v: Tensor) -> Tensor:
    """The column of ones whose sum is z."""
    return v.new_ones(*v.shape[:3], 1, dtype=wide_of(v.dtype))


def _copy(x: Tensor) -> Tensor:
    """A contiguous copy of x: the rounding of a matrix product depends on the memory layout of its operands.

    Without it, a later token that forces a copy of all tokens would change the bits of earlier rows.
    """
    return x.to(wide_of(x.dtype)).clone(memory_format=torch.contiguous_format)


def _mapped(call: LinearCall, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The features of queries or keys, and their exponents."""
    if is_split(call.features):
        return call.features.split(x, call.scale)
    if call.features is not None:
        return call.features.map(x, call.scale), None
    return _copy(x), None


def _query_features(call: LinearCall, q: Tensor, k: Tensor) -> Tensor:
    """The features of queries, as rows (token, query of the group)."""
    rows = _mapped(call, _rows(q, k))[0]
    return rows if call.features is not None or call.scale is None else rows * call.scale


def _heads(call: LinearCall, rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Rows of (token, query of the group), normalised, as [batch, heads, queries, v_dim] in the dtype of q."""
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


def _segment_tokens(call: LinearCall, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> int:
    """The length of a segment of a call with this many tokens, at least 1."""
    if not call.bounded:
        return max(1, tokens)
    features = k.shape[3] if call.features is None else call.features.size(k.shape[3])
    token = max(1, k.shape[0] * max(q.shape[1], k.shape[1]) * (features + v.shape[3]))
    elements = SEGMENT if k.device.type == "cpu" else SEGMENT_ON_GPU
    return max(1, elements // token // call.chunk) * call.chunk


def _without_autocast(q: Tensor) -> AbstractContextManager[object]:
    """Disable autocast: sums are accumulated in fp32 under autocast as well."""
    kind = q.device.type
    return nullcontext() if autocast_dtype(kind) is None else torch.autocast(kind, enabled=False)
