"""The request: the arguments of a call, and the key under which its plan is cached.

A plan depends on sizes, types, flags and specs, never on elements of q, k and v. The annotation of each field tells
which of its properties enter the key; a field without annotation is an error at import.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from regard.describe.bias import Alibi, Bias, T5Bias, TensorBias
from regard.describe.by_row import BiasByRow, bias_by_row, mask_by_row
from regard.describe.fingerprint import Fingerprint
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.ragged import Ragged
from regard.describe.score import Score
from regard.describe.spec import Spec
from regard.errors import ProblemError
from regard.plan.checks import check_offset, check_readable, check_specs, row_offsets
from regard.plan.problem import Sizes
from regard.storage.stored import StoredTensor


class NoKeyError(Exception):
    """The request has no key: changes of a value cannot be detected, or its type is wrong. No plan is cached."""


class By(NamedTuple):
    """How a field enters the key: Python expressions of its name, and statements before them.

    They are source text, compiled to one function: a function call per field would take half the time of a call with a
    cached plan.
    """

    entries: str
    before: str = ""


FORM = By(
    "{0}_batch, {0}_heads, {0}_dim, {0}.stride()[3] == 1 or {0}_dim < 2, {0}.dtype, {0}.is_cpu or {0}.device, "
    "{0}.__class__, {0}.is_neg(), {0}.layout, grad and {0}.requires_grad",
    "{0}_batch, {0}_heads, {0}_tokens, {0}_dim = {0}.shape",
)
"""The key of q, k and v: all but elements, token counts (see `Sizes`) and the strides that no plan depends on."""

VALUE = By("{0}, {0}.__class__")
"""The value and its type: True equals 1, but may be an error where 1 is valid."""

CONTENT = By("{0} is None", "{0}_content = None if {0} is None else _content({0})")
"""The key of a mask: only whether there is one. Its fingerprint is in the `Sizes`, as a backend may take any mask."""

TENSORS = By("None if {0} is None else _tensors({0}, grad)")
"""The key of a score: types and sizes of its tensors, so a learned score keeps its plan."""

BIAS = By("None if {0} is None else _bias({0}, grad)")
"""The key of a bias: the same; of a `TensorBias` without its queries and keys, which are among the `Sizes`."""

TENSOR = By("None if {0} is None else _tensor({0})")
"""The key of other tensors: all but the elements and the strides."""

ENCODINGS = By("None if {0} is None else ({0}[0].encodings, {0}[1].encodings)")
"""The key of stored keys and values: the encodings of their parts. The lengths of rows are in the mask (`Ragged`)."""

OFFSET = By("{0}.__class__")
"""The key of the offset: its type. The offset is one of the `Sizes`."""


class Request(NamedTuple):
    """The arguments of `attend`, `attend_state` or `explain`, and two that follow from them.

    Attributes:
        lse: whether the call returns the log-sum-exp.
        stored: keys and values if either is stored; `k` and `v` are then tensors of their shape without data.
    """

    q: Annotated[Tensor, FORM]
    k: Annotated[Any, FORM]  # a Tensor; a StoredTensor until the request is resolved
    v: Annotated[Any, FORM]
    mask: Annotated[Mask | None, CONTENT] = None
    bias: Annotated[Bias | None, BIAS] = None
    score: Annotated[Score | None, TENSORS] = None
    scale: Annotated[float | None, VALUE] = None
    softcap: Annotated[float | None, VALUE] = None
    sink: Annotated[Tensor | None, TENSOR] = None
    dropout: Annotated[float, VALUE] = 0.0
    offset: Annotated[Any, OFFSET] = None  # an int or None; a Tensor until the request is resolved
    backend: Annotated[Any, VALUE] = None  # a name or a `Backend`, which `plan` does not import
    lse: Annotated[bool, VALUE] = False
    stored: Annotated[tuple[StoredTensor, StoredTensor] | None, ENCODINGS] = None

    def resolved(self) -> "Request":
        """The request with the offset as an int, and stored keys and values in `stored`.

        An offset for each batch row becomes part of the mask and the bias, and the offset of the call is then 0.

        Raises:
            ProblemError: an offset that is not an integer; keys and values that do not belong together.
        """
        request = self
        if self.offset is not None and type(self.offset) is not int:  # integers of numpy overflow, tensors are read
            rows = row_offsets(self.offset, self.q)
            request = request._replace(offset=check_offset(self.offset)) if rows is None else self._by_row(rows)
        if isinstance(self.k, StoredTensor) or isinstance(self.v, StoredTensor):
            _check_ring(self)
            mask, bias, (k, v) = stored_pair(self.k, self.v, request.mask, request.bias, request.offset)
            request = request._replace(k=k.placeholder, v=v.placeholder, mask=mask, bias=bias, stored=(k, v))
        return request

    def _by_row(self, first: tuple[int, ...]) -> "Request":
        if isinstance(self.k, StoredTensor) and self.k.row_lengths is not None:
            return self  # `stored_pair` raises: the rows have their positions already
        check_specs(self.mask, self.bias, self.score)
        return self._replace(mask=mask_by_row(self.mask, first), bias=bias_by_row(self.bias, first), offset=0)

    def key(self) -> tuple[object, Sizes] | None:
        """(form of the call, its sizes), by which plans are cached; None if none may be, or an argument is wrong."""
        try:
            return _key(*self)
        except (AttributeError, IndexError, NoKeyError, RuntimeError, TypeError, ValueError):
            return None


def _compile_key() -> Callable[..., tuple[object, Sizes]]:
    """The function from the fields of a request to its key, from their annotations."""
    fields = {name: hint.__metadata__[0] for name, hint in get_type_hints(Request, include_extras=True).items()}
    before = "".join(f"    {by.before.format(name)}\n" for name, by in fields.items() if by.before)
    entries = ", ".join(by.entries.format(name) for name, by in fields.items())
    nbytes = "0 if stored is None else stored[0].nbytes + stored[1].nbytes"
    sizes = f"new(Sizes, (q_tokens, k_tokens, v_tokens, {nbytes}, offset, mask_content))"  # faster than `Sizes`
    source = (
        f"def key({', '.join(fields)}):\n    grad = is_grad_enabled()\n{before}    return (grad, {entries}), {sizes}"
    )
    scope: dict[str, Any] = {
        "is_grad_enabled": torch.is_grad_enabled, "_content": _content, "_tensors": _tensors, "_tensor": _tensor,
        "_bias": _bias, "Sizes": Sizes, "new": tuple.__new__,
    }  # fmt: skip
    exec(source, scope)  # noqa: S102  # as namedtuple and dataclass make their methods
    return scope["key"]


def _content(mask: Mask) -> Fingerprint:
    fingerprint = mask.fingerprint()
    if not fingerprint.is_registered or not fingerprint.is_cacheable:
        raise NoKeyError
    return fingerprint


def _tensors(spec: Spec, grad: bool) -> object:
    if not spec.is_registered() or not (form := spec.form()).is_cacheable:
        raise NoKeyError
    learns = grad and not spec.has_own_classes() and spec.may_learn()
    return form, learns, *[_tensor(t) for t in spec.tensors()]


def _bias(bias: Bias, grad: bool) -> object:
    if not bias.is_registered() or not bias.form().is_cacheable:
        raise NoKeyError
    return tuple([
        _table(term) if type(term) is TensorBias else _tensors(term, grad) for term in bias.terms()
    ])  # fmt: skip


def _table(term: TensorBias) -> object:
    batch, heads, rows, columns = (1,) * (4 - term.tensor.ndim) + tuple(term.tensor.shape)
    _, *others = _tensor(term.tensor)
    return TensorBias, term.offset, batch, heads, rows > 1, columns > 1, *others


def _tensor(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.dtype, t.device, t.__class__, t.is_neg(), t.layout, t.requires_grad


_key = _compile_key()


def stored_pair(
    k: Tensor | StoredTensor, v: Tensor | StoredTensor, mask: Mask | None, bias: Bias | None, offset: object
) -> tuple[Mask | None, Bias | None, tuple[StoredTensor, StoredTensor]]:
    """The mask and the bias of a call, and its keys and values as stored tensors, if either is stored.

    For rows of different lengths the mask is `Ragged`, and Alibi and T5Bias are `BiasByRow`: the last query of each
    row is at its last key.

    Raises:
        ProblemError: keys and values that are not of one cache; a mask, bias or offset that does not fit rows of
            different lengths.
    """
    keys, values = _as_stored(k, "k"), _as_stored(v, "v")
    lengths = keys.row_lengths
    if lengths != values.row_lengths or keys.rotated != values.rotated:
        raise ProblemError(f"k is {keys} and v {values}: a value belongs to each key, so they come from one cache.")
    if lengths is not None:
        bias = _bias_of_ragged(bias, lengths, keys.shape[2])
        mask = _ragged(mask, lengths, bias, offset)
    return mask, bias, (keys, values)


def _as_stored(given: object, name: str) -> StoredTensor:
    if isinstance(given, StoredTensor):
        return given
    expected = "a tensor [batch, kv_heads, keys, dim], or what the `append` of a cache returns"
    check_readable(name, given, expected)
    tensor = cast(Tensor, given)
    if tensor.ndim != 4:
        raise ProblemError(f"{name} has shape {list(tensor.shape)}: expected {expected}.")
    return StoredTensor.of(tensor)


def _check_ring(request: Request) -> None:
    """Raise `ProblemError` where keys are in a ring, and positions matter: only the cache knows those."""
    q, mask, is_ring = request.q, request.mask, any(getattr(t, "is_ring", False) for t in (request.k, request.v))
    if is_ring and not (
        q.ndim == 4 and q.shape[2] == 1 and request.bias is None and type(mask) in (type(None), Causal)
    ):
        raise ProblemError(
            f"q is {list(q.shape)}, mask {mask!r} and bias {request.bias!r}: the keys "
            "of steps over Rolling are not in the order of their positions. Use one query, under Causal() or no mask."
        )


def _bias_of_ragged(bias: Bias | None, lengths: tuple[int, ...], keys: int) -> Bias | None:
    """`bias`, its Alibi and T5Bias at the positions of each row, where rows have the first `lengths` of `keys` keys."""
    if not isinstance(bias, Bias) or any(
        type(t) not in (Alibi, T5Bias) and not _is_table_of_call(t) for t in bias.terms()
    ):
        return bias  # `_ragged` raises
    return bias_by_row(bias, tuple(length - keys for length in lengths))


def _is_table_of_call(term: Bias) -> bool:
    return type(term) is TensorBias and term.offset is None


def _ragged(mask: Mask | None, lengths: tuple[int, ...], bias: Bias | None, offset: object) -> Mask | None:
    """The mask for rows of different lengths: the last query of each row is at its last key."""
    if offset is not None:
        raise ProblemError(
            f"offset is {offset}, and the rows of the stored keys have different lengths: omit it, then the last query "
            "of each row is at its own last key."
        )
    if isinstance(bias, Bias) and any(type(t) is not BiasByRow and not _is_table_of_call(t) for t in bias.terms()):
        raise ProblemError(
            f"{bias!r} with rows of different lengths: expected Alibi, T5Bias, or a TensorBias without an "
            "offset, whose rows are the queries of the call. Call attend row by row for others."
        )
    if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        return mask  # `pose` raises
    return Ragged(mask, lengths)
