"""A call of the whole sequence as one rank sees it: checked, bound to the sequence, and equal on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from regard.attention import cast_by_autocast
from regard.backend.contract import Backend
from regard.calls import check_unobserved
from regard.describe.bias import Bias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import CallSizes, Mask, broadcast_shape_of
from regard.describe.score import Dot, Score
from regard.describe.spec import Spec, bound_to
from regard.describe.tensors import elements
from regard.dispatch.choose import check_backend
from regard.errors import ProblemError, RefusalError, RegardError
from regard.lru_cache import LRUCache
from regard.parallel.derivatives import check_tangents, check_untransformed
from regard.parallel.digest import digest
from regard.parallel.layout import Layout
from regard.parallel.placed import Pieces, pieces_of
from regard.parallel.ranks import Ranks
from regard.parallel.rectangle import Formula
from regard.parallel.route import Route, needs_of
from regard.plan.checks import (
    check_has_data,
    check_numbers,
    check_offset,
    check_sink,
    check_specs,
    check_tensors,
    has_own_operators,
)
from regard.seeds import draw, mixed


class Arguments(NamedTuple):
    """The arguments of `ring_attend` on this rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    bias: Bias | None = None
    score: Score | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    layout: Layout | None = None
    key_layout: Layout | None = None
    offset: int | None = None
    backend: str | Backend | None = None


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of the whole sequence.

    Attributes:
        formula: mask and bias bound to the sequence; the seed is this rank's.
        queries, keys: which of them each rank has.
        offset: position of the first query of the sequence.
        route: which blocks of keys travel where.
    """

    formula: Formula
    queries: Layout
    keys: Layout
    offset: int
    route: Route

    def query_pieces(self, rank: int) -> Pieces:
        """Where the queries of a rank are."""
        return tuple((first + self.offset, *more) for first, *more in pieces_of(self.queries.positions(rank)))  # type: ignore[misc]

    def key_pieces(self, rank: int) -> Pieces:
        """Where the keys of a rank are."""
        return pieces_of(self.keys.positions(rank))


class Place(NamedTuple):
    """The number of a rank in the layouts, and how many ranks these have."""

    rank: int
    size: int


def pose(groups: Sequence[Ranks], a: Arguments, place: Place) -> tuple[ShardedCall, Arguments]:
    """The call, and the arguments with q, k and v in the type of `torch.autocast`.

    Args:
        groups: with whose ranks this one computes.

    Raises:
        ProblemError: an argument is wrong, or ranks have different ones; on all ranks if the form of the call is new.
        RefusalError: derivatives of other kinds than `backward`, or an argument that works on one rank only.
        RankError: a rank does not make the call.
    """
    try:
        check_unobserved(groups[0].function)
        check_untransformed(groups[0].function)
        a, sizes, call = _checked(place, a)
        check_tangents(groups[0].function, (a.q, a.k, a.v, *call.formula.tensors()))
    except RegardError as error:
        for ranks in groups:
            ranks.refuse(str(error))
        raise
    form = (groups[0].function, _form(a, sizes), call.queries.digest, call.keys.digest)
    for ranks in groups:
        ranks.agree(form, lambda: _describe(a, sizes, call))
    return call, a


def _checked(place: Place, a: Arguments) -> tuple[Arguments, CallSizes, ShardedCall]:
    if isinstance(cast(object, a.q), Tensor) and torch.is_autocast_enabled(a.q.device.type):
        q, k, v = cast_by_autocast(a.q, a.k, a.v)
        a = a._replace(q=q, k=k, v=v)  # pyright: ignore[reportArgumentType]
    check_tensors(a.q, a.k, a.v)
    if (other := next((t for t in (a.q, a.k, a.v) if has_own_operators(t)), None)) is not None:
        raise ProblemError(
            f"a tensor is a {type(other).__name__}: expected a plain tensor of this rank's tokens, as `to_local()` "
            "of a DTensor that is sharded along its tokens is."
        )
    check_specs(a.mask, a.bias, a.score)
    (a.score or Dot()).dim(a.q.shape[3], a.k.shape[3])  # raises an error if it does not take them
    check_numbers(a.scale, a.softcap, a.dropout)
    check_sink(a.sink, a.q.shape[1], a.q)
    check_backend(a.backend)
    queries = _layout("layout", a.layout, "q", a.q, place)
    keys = _layout("key_layout", a.key_layout, "k", a.k, place) if a.key_layout else queries
    if keys is queries and a.k.shape[2] != a.q.shape[2]:
        raise ProblemError(
            f"q has {a.q.shape[2]} tokens on rank {place.rank} and k has {a.k.shape[2]}: keys of another sequence than "
            "the queries need key_layout=, which keys each rank has."
        )
    offset = first_position(a.offset, keys.tokens - queries.tokens)
    sizes = CallSizes(a.q.shape[0], a.q.shape[1], queries.tokens, keys.tokens, offset)
    if a.mask is not None:
        check_has_data(a.mask)
    mask = None if a.mask is None else bound_to(a.mask, sizes)
    bias = None if a.bias is None else bound_to(a.bias, sizes)
    if torch.is_grad_enabled():
        _check_fields_learn(a)
    seed = mixed(draw(), place.rank) if a.dropout else 0
    formula = Formula(mask, bias, a.score, a.scale, a.softcap, float(a.dropout), a.backend, seed)
    return a, sizes, ShardedCall(formula, queries, keys, offset, route_of(mask, sizes, queries, keys))


def _check_fields_learn(a: Arguments) -> None:
    """Raise `RefusalError` where a user's bias or score reads a tensor that learns and is none of its fields."""
    for name, spec in (("bias", a.bias), ("score", a.score)):
        if spec is None or spec.has_own_classes() or not spec.with_tensors(Tensor.detach).reads_learned():
            continue
        raise RefusalError(
            f"{spec!r} reads a tensor that requires a gradient and is none of its fields, such as a module's weight: "
            f"over ranks no gradient flows to it. Make it a field of the {name}."
        )


def first_position(offset: object, default: int) -> int:
    """The position of the first query of the sequence; `default` where `offset` is None."""
    if isinstance(offset, Tensor) and offset.numel() != 1:
        raise ProblemError(
            f"offset is {offset.dtype} {list(offset.shape)}: expected an int, as the rows of a sharded sequence begin "
            "at one position. Pass the rows one at a time."
        )
    return default if offset is None else check_offset(offset)


def _layout(name: str, layout: Layout | None, tensor: str, t: Tensor, place: Place) -> Layout:
    if layout is None:
        return _contiguous(t.shape[2] * place.size, place.size)
    check_layout(name, layout, tensor, t, place)
    return layout


def check_layout(name: str, layout: Layout, tensor: str, t: Tensor, place: Place) -> None:
    """Raise `ProblemError` unless it is a layout that gives this rank the tokens of the tensor."""
    if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ProblemError(f"{name} is {layout!r}: expected a Layout, such as Layout.zigzag(tokens, ranks).")
    if layout.ranks != place.size:
        raise ProblemError(f"{name} is for {layout.ranks} ranks, and the group has {place.size}.")
    if layout.counts[place.rank] != t.shape[2]:
        raise ProblemError(
            f"{tensor} has {t.shape[2]} tokens on rank {place.rank} of the group, and {name} gives it "
            f"{layout.counts[place.rank]} of {layout.tokens}."
        )


_contiguous = lru_cache(maxsize=64)(Layout.contiguous)

_routes: LRUCache[object, Route] = LRUCache(entries=256, nbytes=16 << 20, size=lambda route: route.needs.nbytes)


def route_of(mask: Mask | None, sizes: CallSizes, queries: Layout, keys: Layout) -> Route:
    """The route of a call, by the content of its mask, which is bound to the sequence."""
    content = None if mask is None else mask.fingerprint()
    key = (content, sizes, queries.digest, keys.digest)  # a layout has an array of the length of the sequence
    cacheable = content is None or content.is_cacheable
    route = _routes.get(key) if cacheable else None
    if route is None:
        maps = (1, 1) if mask is None else broadcast_shape_of(mask)
        maps = (sizes.batch if maps[0] != 1 else 1, sizes.heads if maps[1] != 1 else 1)
        route = Route(needs_of(mask, queries, keys, sizes.offset, maps))
        if cacheable:
            _routes.put(key, route)
    return route


def _form(a: Arguments, sizes: CallSizes) -> tuple[Any, ...]:
    """What must be equal on all ranks, as far as it can be compared in this process without reading much."""
    mask = None if a.mask is None else a.mask.fingerprint()
    specs = (mask, form_of(a.bias), form_of(a.score))
    return (*_kind(a), sizes, *specs, a.scale, a.softcap, a.dropout, name_of(a.backend))


def name_of(backend: str | Backend | None) -> str | None:
    """The name of a backend that a call names, or has."""
    return backend if isinstance(backend, str | None) else backend.name


def _kind(a: Arguments) -> tuple[Any, ...]:
    tensors = (a.q, a.k, a.v, *([] if a.sink is None else [a.sink]))
    more = [t for spec in (a.bias, a.score) if spec is not None for t in spec.tensors()]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *more))
    return a.k.shape[1], a.k.shape[3], a.v.shape[3], a.q.shape[3], a.q.dtype, a.q.device.type, a.sink is not None, grad


def _describe(a: Arguments, sizes: CallSizes, call: ShardedCall) -> str:
    kv_heads, k_dim, v_dim, qk_dim, dtype, device, sink, grad = _kind(a)
    kind = str(dtype).removeprefix("torch.")
    extra = {"scale": a.scale, "softcap": a.softcap, "dropout": a.dropout or None, "sink": sink or None}
    extra |= {"backend": name_of(a.backend)}
    more = "".join(f", {name} {value}" for name, value in extra.items() if value is not None)
    return (
        f"q [{sizes.batch}, {sizes.heads}, {sizes.queries}, {qk_dim}] · kv [{sizes.batch}, {kv_heads}, {sizes.keys}, "
        f"{k_dim}|{v_dim}] {kind} on {device}, mask {text_of(a.mask)}, bias {form_of(a.bias)}, score "
        f"{form_of(a.score)}{more}, offset {sizes.offset}, layouts {call.queries.digest} {call.keys.digest}, "
        f"gradients {grad}"
    )


def form_of(spec: Spec | None) -> Fingerprint | None:
    """The spec without the content of its tensors."""
    return None if spec is None else spec.form()


_texts: LRUCache[Fingerprint, str] = LRUCache(entries=256, nbytes=1 << 20, size=len)


def text_of(spec: Spec | None) -> str:
    """The spec, with a digest of its tensors, which is the same in every process; of a function its name."""
    if spec is None:
        return "None"
    content = spec.fingerprint()
    text = _texts.get(content) if content.is_cacheable else None
    if text is None:
        tensors = [t.detach().cpu().contiguous() for t in spec.tensors()]
        parts = [elements(t.view(torch.uint8)).tobytes() if t.ndim else repr(t) for t in tensors]
        text = f"{content} {digest(*parts)}" if parts else str(content)
        if content.is_cacheable:
            _texts.put(content, text)
    return text
