"""Ready calls that have more tensors than q, k and v: a bias, a sink, a mask with tensors, or lengths of rows.

Such a call takes 10 us more than one without them (`ready.py`), and 20 to 30 us less than the long way. Its key is that
of the call without them, and

- of a `TensorBias`: which of its axes broadcast, and its type; of an `Alibi` or a `T5Bias`: its numbers, and what its
  tensor is like. Their elements are read in each call. Of a sum, that of each term: one `TensorBias` at most;
- of a sink: its type;
- of a table, that is, a `TensorMask` alone or with a constant mask (`&`): which of its axes broadcast. The library
  reads its elements in each call, so that they may change, where the constant mask has intervals (`Dilated` has none).

Of another mask with tensors or functions, tiles depend on the content, and mostly on the number of keys and on the
offset. So under each key calls are kept by these. The content is read in each call, but only where a call with that key
was kept before.
"""

from math import prod
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled, nn

from regard.backend.contract import Bound, KernelWithTensors, RunWithTensors
from regard.describe.bias import Alibi, Bias, Sum, T5Bias, TensorBias
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import And, Mask
from regard.describe.mask_by_table import TensorMask
from regard.dispatch.choose import Plan
from regard.plan.problem import Operands
from regard.torch_internals import is_lazy_zero

KEPT = 64
"""Keys of calls that are kept, and the masks that are kept for each: a step of decoding under padding has a new one.

A mask takes at most 32 KiB (`native.REPEATED_BYTES`), so that all of them take no more than 128 MiB."""

PAIRS = 1 << 20
"""The most pairs of a table that is read in each call; the tiles of larger ones are found by their content."""

TYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Types of biases and sinks."""

_Part: TypeAlias = tuple[Any, ...]

_Constants: TypeAlias = tuple[Fingerprint | None, ...]

_NONE: _Part = ()


class TensorsKey(NamedTuple):
    """What a call depends on besides the elements, strides and addresses of its tensors, and a mask that has tensors.

    Attributes:
        call: the key of the call without these; it has the address of the fingerprint of a constant mask.
        has_rows: whether stored keys have rows of different lengths, which are read in each call.
        table: what the call depends on of a table; empty without one.
        bias: what the call depends on of a bias; empty without one.
        sink: the type of the sink; empty without one.
    """

    call: _Part
    has_rows: bool
    table: _Part
    bias: _Part
    sink: _Part


class _Ready(NamedTuple):
    """A call that is ready, and the fingerprints whose addresses are in its key."""

    plan: "ref[Plan]"
    run: RunWithTensors
    constants: _Constants


_Mask: TypeAlias = tuple[Fingerprint, int | None, int | None]
"""A mask that has tensors or functions, the number of keys, and the offset as the caller gave it; None and None where
tiles are those of all sizes."""

_ready: dict[TensorsKey, dict[_Mask | None, _Ready]] = {}


class Table(NamedTuple):
    """What a mask hides besides its constant part.

    Attributes:
        bools: broadcastable to [batch, heads, queries, keys].
        axes: which of its axes broadcast.
    """

    bools: Tensor
    axes: tuple[bool, ...]


def parted(mask: Mask, q: Tensor, k: Any) -> tuple[Mask | None, Table] | None:
    """The constant part of a mask, None if there is none, and its table; None for other masks."""
    parts = _constant_and_tables(mask)
    if parts is None or not parts[1] or q.ndim != 4 or k.ndim != 4:
        return None
    (rest, (bools, *others)), (batch, heads, queries, _), keys = parts, q.shape, k.shape[2]
    sizes = batch, heads, queries, keys
    axes = _axes_of_one(bools, sizes) if _is_in_place(bools) else None
    if axes is None or not all(_is_in_place(t) and _axes_of_one(t, sizes) is not None for t in others):
        return None
    if (prod(bools.shape[:-2]) if not others else batch * heads) * queries * keys > PAIRS:
        return None
    if not others:
        return rest, Table(bools, axes)
    for other in others:
        bools = bools & other
    return rest, Table(bools, cast("tuple[bool, ...]", _axes_of_one(bools, sizes)))


def _constant_and_tables(mask: Mask) -> tuple[Mask | None, list[Tensor]] | None:
    """The constant part and the tables of a conjunction (`And`) of such; None for any other mask."""
    if type(mask) is TensorMask:
        return None if mask.offset is not None else (None, [mask.mask])
    if type(mask) is not And:
        return None if mask.constant() is None else (mask, [])
    if (first := _constant_and_tables(mask.a)) is None or (second := _constant_and_tables(mask.b)) is None:
        return None
    (a, of_a), (b, of_b) = first, second
    return b if a is None else a if b is None else a & b, of_a + of_b


def key_of(
    call: _Part, q: Tensor, keys: int, has_rows: bool, table: Table | None, bias: Bias | None, sink: Tensor | None
) -> TensorsKey | None:
    """The key of a call; None if it must go the long way.

    Args:
        call: the key of the call without table, bias and sink.
    """
    grad, (batch, heads, queries, _) = is_grad_enabled(), q.shape
    of_table = _NONE if table is None else table.axes
    of_bias = _NONE if bias is None else _of_bias(bias, (batch, heads, queries, keys), grad)
    of_sink = _NONE if sink is None else _of_sink(sink, heads, grad)
    if of_bias is None or of_sink is None or (has_rows and (of_table or of_bias)):
        return None
    return TensorsKey(call, has_rows, of_table, of_bias, of_sink)


def run(
    key: TensorsKey,
    q: Tensor,
    k: Any,
    v: Any,
    mask: Mask | None,
    offset: int | None,
    table: Table | None,
    bias: Bias | None,
    sink: Tensor | None,
) -> Tensor | None:
    """The output of a call that is ready, else None.

    Args:
        mask: one that is not constant, else None.
    """
    keys = k.shape[2]
    if table is not None and (found := _ready.get(key, {}).get(None)) is not None and found.plan() is not None:
        return found.run(q, k, v, keys, offset, table.bools, bias, sink)
    found = _known(key, keys, mask, offset)
    return None if found is None else found.run(q, k, v, keys, offset, None, bias, sink)


def bind(key: TensorsKey, keys: int, mask: Mask | None, offset: int | None) -> Bound | None:
    """What runs calls without a bias and a sink under a mask that stays as it is; the output is by token."""
    if (found := _known(key, keys, mask, offset)) is None:
        return None
    run = found.run

    def bound(q: Tensor, k: Tensor, v: Tensor, keys: int, offset: int | None) -> Tensor:
        out = cast(Tensor, run(q, k, v, keys, offset, None, None, None))  # None for other strides only
        return out.transpose(1, 2).contiguous()

    return bound


def _known(key: TensorsKey, keys: int, mask: Mask | None, offset: int | None) -> _Ready | None:
    """A call that is ready, with the content that the mask has now."""
    if (alike := _ready.get(key)) is None:
        return None
    try:
        return _of_content(alike, None if mask is None else mask.fingerprint(), keys, offset)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the long way says what is wrong
        return None


def _of_content(
    alike: dict[_Mask | None, _Ready], content: Fingerprint | None, keys: int, offset: int | None
) -> _Ready | None:
    if content is None:
        found = alike.get(None)
    elif (found := alike.get((content, None, None))) is None:
        found = alike.get((content, keys, offset))
    return None if found is None or found.plan() is None else found


def keep(
    key: TensorsKey, mask: Mask | None, offset: int | None, bias: Bias | None, plan: Plan, operands: Operands
) -> None:
    """Keep a call that was run, if its kernel can repeat it; plan and operands are those of a call that may be kept."""
    sizes, kernel = operands.key, plan.kernel
    if sizes is None or not hasattr(kernel, "repeated_with_tensors"):  # `isinstance` of a protocol takes 15 us
        return
    is_constant = mask is not None and mask.constant() is not None
    rest = mask if is_constant else _constant_part(mask) if key.table else None
    terms = [] if bias is None else bias.terms()
    constants = None if rest is None else rest.constant(), *(term.constant() for term in terms)
    if key.has_rows:
        if mask is None or is_constant:
            _keep_for_all_sizes(key, rest, constants, plan, operands)
        return
    if key.table and _keep_for_all_sizes(key, rest, constants, plan, operands):
        return
    content = sizes.mask
    if content is not None and not (content.is_registered and content.is_cacheable):
        return
    if is_constant:
        content = None  # its address is in the key
    alike = _ready.get(key, {})
    known = _of_content(alike, content, sizes.keys, offset)
    if known is not None and known.plan() is plan:  # its strides need another way
        return
    if (again := cast(KernelWithTensors, kernel).repeated_with_tensors(operands)) is None:
        return
    keys, start = (None, None) if again.is_for_all_sizes else (sizes.keys, offset)
    by_mask = None if content is None else (content, keys, start)
    _put(key, by_mask, _Ready(ref(plan), again.run, constants))


def _constant_part(mask: Mask | None) -> Mask | None:
    """What a mask has besides tables."""
    parts = None if mask is None else _constant_and_tables(mask)
    return None if parts is None else parts[0]


def _keep_for_all_sizes(
    key: TensorsKey, rest: Mask | None, constants: _Constants, plan: Plan, operands: Operands
) -> bool:
    """Keep a call with a table, or over rows of different lengths: the number of keys and the offset may differ.

    Returns:
        Whether it is kept; not where the constant part of the mask has no intervals.
    """
    known = _ready.get(key, {}).get(None)
    if known is not None and known.plan() is plan:
        return True
    if constants[0] is not None and not constants[0].is_registered:
        return False
    kernel = cast(KernelWithTensors, plan.kernel)
    run = kernel.repeated_over_rows(operands, rest) if key.has_rows else kernel.repeated_with_table(operands, rest)
    if run is not None:
        _put(key, None, _Ready(ref(plan), run, constants))
    return run is not None


def _put(key: TensorsKey, by_mask: _Mask | None, found: _Ready) -> None:
    if key not in _ready and len(_ready) >= KEPT:
        forget()
    alike = _ready.setdefault(key, {})
    if len(alike) >= KEPT:
        alike.clear()
    alike[by_mask] = found


def forget() -> None:
    """Forget every ready call."""
    _ready.clear()


def _of_bias(bias: Bias, sizes: tuple[int, ...], grad: bool) -> _Part | None:
    if type(bias) is not Sum:
        return _of_term(bias, sizes, grad)
    terms = bias.terms()
    parts = [_of_term(term, sizes, grad) for term in terms]
    if None in parts or sum(type(term) is TensorBias for term in terms) > 1:
        return None
    return tuple(parts)


def _of_term(bias: Bias, sizes: tuple[int, ...], grad: bool) -> _Part | None:
    kind = type(bias)
    if kind is TensorBias:
        t = cast(TensorBias, bias).tensor
        if cast(TensorBias, bias).offset is not None or not _is_simple(t, grad):
            return None
        axes = _axes_of_one(t, sizes)
        return None if axes is None else (t.dtype, *axes)
    if kind is Alibi:
        if (t := cast(Alibi, bias).slopes) is None:
            return None if (fingerprint := bias.constant()) is None else (id(fingerprint),)
        return (Alibi, t.dtype, t.shape) if _is_simple(t, grad) else None
    if kind is T5Bias:
        of_t5 = cast(T5Bias, bias)
        t = of_t5.table
        return (T5Bias, t.dtype, t.shape, of_t5.bidirectional, of_t5.max_distance) if _is_simple(t, grad) else None
    return None


def _axes_of_one(t: Tensor, sizes: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which axes broadcast, of [batch, heads, queries, keys]; None if it does not fit the sizes."""
    shape = (1,) * (4 - t.ndim) + tuple(t.shape)
    for size, other in zip(shape, sizes, strict=True):
        if size not in (1, other):
            return None
    return tuple([size == 1 for size in shape])


def _of_sink(sink: Tensor, heads: int, grad: bool) -> _Part | None:
    return (sink.dtype,) if _is_simple(sink, grad) and sink.shape == (heads,) else None


def _is_simple(t: Any, grad: bool) -> bool:
    """Whether it is a tensor that is read in place from the memory of the host, without a gradient."""
    return _is_in_place(t) and t.dtype in TYPES and not ((grad and t.requires_grad) or t.is_neg())


def _is_in_place(t: Any) -> bool:
    if type(t) not in (Tensor, nn.Parameter):
        return False
    return t.is_cpu and t.layout is torch.strided and not (t.is_nested or is_lazy_zero(t))
