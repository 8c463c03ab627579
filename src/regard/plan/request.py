"""The request: the arguments of a call as its caller gave them, and the key by which a call is known again.

A plan depends on sizes, types, flags and specs, never on elements of q, k and v. So a field enters the key by what a
plan may depend on: the annotation of each field says how, and a field without an annotation is an error at import.
"""

from typing import Annotated, Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.ragged import Ragged
from regard.describe.score import Score
from regard.describe.spec import Spec
from regard.errors import ProblemError
from regard.plan.checks import check_offset, check_readable
from regard.storage.stored import StoredTensor


class NoKeyError(Exception):
    """Nothing tells when the value changes, or it is of the wrong type: the call is posed, and nothing is kept."""


def by_form(t: Any) -> Any:
    """Of q, k and v: all but the elements, the numbers of tokens (see `Sizes`) and strides that no plan depends on."""
    batch, heads, _, dim = t.shape
    return (
        batch, heads, dim, t.stride(3) == 1 or dim < 2, t.dtype, t.is_cpu or t.device, t.__class__, t.is_neg(),
        t.layout, t.requires_grad,
    )  # fmt: skip


def by_tensor(t: Tensor | None) -> Any:
    """Of other tensors: all but the elements and the strides."""
    return t if t is None else (t.shape, t.dtype, t.device, t.__class__, t.is_neg(), t.layout, t.requires_grad)


def by_content(mask: Mask | None) -> Any:
    """Of a mask: the fingerprint, as schedules are made of the elements of its tensors."""
    if mask is None:
        return None
    if not mask.is_known() or not (fingerprint := mask.fingerprint()).can_be_kept:
        raise NoKeyError
    return fingerprint


def by_tensors(spec: Spec | None) -> Any:
    """Of a bias or score: types and sizes of its tensors. So a bias that is learned keeps its plan."""
    if spec is None:
        return None
    if not spec.is_known() or not (form := spec.form()).can_be_kept:
        raise NoKeyError
    return form, *[by_tensor(t) for t in spec.tensors()]


def by_value(value: object) -> Any:
    """The value and its type: True equals 1, and is an error where 1 is none."""
    return value if value is None else (value, value.__class__)


def by_forms(stored: tuple[StoredTensor, StoredTensor] | None) -> Any:
    """Of stored keys and values: how their parts are written."""
    return stored if stored is None else (stored[0].encodings, stored[0].row_lengths, stored[1].encodings)


class Sizes(NamedTuple):
    """What differs between calls of equal form: numbers of tokens, and the bytes of stored keys and values."""

    queries: int
    keys: int
    values: int
    nbytes: int = 0


class Request(NamedTuple):
    """The arguments of `attend`, `attend_state` or `explain`, and two that follow from them.

    Attributes:
        lse: whether the log-sum-exp is wanted.
        stored: keys and values where either is stored; then `k` and `v` are tensors of their shape without content.
    """

    q: Annotated[Tensor, by_form]
    k: Annotated[Any, by_form]  # a Tensor; a StoredTensor until the request is resolved
    v: Annotated[Any, by_form]
    mask: Annotated[Mask | None, by_content] = None
    bias: Annotated[Bias | None, by_tensors] = None
    score: Annotated[Score | None, by_tensors] = None
    scale: Annotated[float | None, by_value] = None
    softcap: Annotated[float | None, by_value] = None
    sink: Annotated[Tensor | None, by_tensor] = None
    dropout: Annotated[float, by_value] = 0.0
    offset: Annotated[Any, by_value] = None  # an int or None; a Tensor until the request is resolved
    backend: Annotated[Any, by_value] = None  # a name or an engine, which `plan` does not know
    lse: Annotated[bool, by_value] = False
    stored: Annotated[tuple[StoredTensor, StoredTensor] | None, by_forms] = None

    def resolved(self) -> "Request":
        """The same request with an offset in a tensor read, and stored keys and values unpacked.

        Raises:
            ProblemError: an offset that is no int; keys and values that do not belong together.
        """
        request = self
        if isinstance(self.offset, Tensor):
            request = request._replace(offset=check_offset(self.offset))
        if isinstance(self.k, StoredTensor) or isinstance(self.v, StoredTensor):
            mask, (k, v) = stored_pair(self.k, self.v, self.mask, self.bias, request.offset)
            request = request._replace(k=k.placeholder, v=v.placeholder, mask=mask, stored=(k, v))
        return request

    def key(self) -> tuple[object, Sizes] | None:
        """(what equal plans share, the sizes); None where nothing may be kept, or something is wrong."""
        try:
            form = tuple([enters(value) for enters, value in zip(_ENTERS, self, strict=True)])
            hash(form)  # an unhashable value is wrong
        except (AttributeError, IndexError, NoKeyError, RuntimeError, TypeError, ValueError):
            return None
        nbytes = 0 if self.stored is None else self.stored[0].nbytes + self.stored[1].nbytes
        return (torch.is_grad_enabled(), form), Sizes(self.q.shape[2], self.k.shape[2], self.v.shape[2], nbytes)


_ENTERS = tuple(hint.__metadata__[0] for hint in get_type_hints(Request, include_extras=True).values())


def stored_pair(
    k: Tensor | StoredTensor, v: Tensor | StoredTensor, mask: Mask | None, bias: Bias | None, offset: object
) -> tuple[Mask | None, tuple[StoredTensor, StoredTensor]]:
    """The mask of a call, and its keys and values as stored tensors; one of them is stored already.

    Where rows have different numbers of keys, the mask says so, and the last query of each row is at its last key.

    Raises:
        ProblemError: keys and values that are not of one cache; a mask, bias or offset that makes no sense for rows of
            different lengths.
    """
    keys, values = _as_stored(k, "k"), _as_stored(v, "v")
    lengths = keys.row_lengths
    if lengths != values.row_lengths or keys.rotated != values.rotated:
        raise ProblemError(f"k is {keys} and v {values}: a value belongs to each key, so they come from one cache.")
    if lengths is not None:
        mask = _ragged(mask, lengths, bias, offset)
    return mask, (keys, values)


def _as_stored(given: object, name: str) -> StoredTensor:
    if isinstance(given, StoredTensor):
        return given
    expected = "a tensor [batch, kv_heads, keys, dim], or what the `append` of a cache returns"
    check_readable(name, given, expected)
    tensor = cast(Tensor, given)
    if tensor.ndim != 4:
        raise ProblemError(f"{name} has shape {list(tensor.shape)}: expected {expected}.")
    return StoredTensor.of(tensor)


def _ragged(mask: Mask | None, lengths: tuple[int, ...], bias: Bias | None, offset: object) -> Mask | None:
    """The mask of a call whose rows have different lengths: the last query of each row is at its last key."""
    if offset is not None:
        raise ProblemError(
            f"offset is {offset}, and the rows of the stored keys have different lengths: leave it out, then the last "
            "query of each row is at its own last key."
        )
    if isinstance(bias, Bias) and any(term.per_distance() for term in bias.terms()):
        raise ProblemError(
            f"{bias!r} with rows of different lengths: a bias by distance is not known there. Call attend row by row."
        )
    if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        return mask  # `pose` raises
    return Ragged(mask, lengths)
