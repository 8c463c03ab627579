"""The problem: what a call asks for, without its tensors; and `pose`, where every error of input is raised.

A `Problem` is frozen and hashable, so plans are cached by it; it holds sizes, types and the outlines of the words.
What must travel to the engine, the tensors and the words that carry them, are the `Operands`.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.describe.bias import Bias
from regard.describe.elsewhere import mask_for
from regard.describe.mask import CallSizes, Mask
from regard.describe.ragged import Ragged
from regard.describe.score import Dot, Score
from regard.describe.spec import Fingerprint, Spec
from regard.describe.tensors import is_without_data
from regard.errors import ProblemError
from regard.storage.stored import StoredTensor
from regard.torch_internals import (
    DisabledTorchFunction,
    FakeTensor,
    FunctionalTensor,
    current_func_transform,
    in_forward_mode,
    is_batched,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FARTHEST = 1 << 62
"""Positions are computed in 64 bits: from here, the distance between a query and a key still fits."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call asks for, as sizes, types and outlines.

    `grad` says that gradients will flow back from it, `lse` that the log-sum-exp is wanted as well as the output,
    `transformed` that it runs under `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation. `gapped` names
    the tensors in which the numbers of a token do not lie side by side; `foreign` says that some tensor's numbers do
    not lie where its address says (it is lazily negated, or of a class that keeps them elsewhere).
    `k_dim` is `qk_dim` unless the score compares unlike ones, and `score_dim` the numbers that a pair's score is summed
    from, `qk_dim` for a dot product. `storage` says how keys and values are stored, where they are no tensors.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    qk_dim: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: str
    mask: Fingerprint | None
    bias: Fingerprint | None
    score: Fingerprint | None
    score_dim: int
    scale: float
    softcap: float | None
    sink: bool
    dropout: float
    offset: int
    grad: bool
    lse: bool
    transformed: bool
    gapped: tuple[str, ...]
    foreign: bool
    storage: "Storage | None" = None

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        q = f"q [{self.batch}, {self.heads}, {self.queries}, {self.qk_dim}]"
        kv = f"kv [{self.batch}, {self.kv_heads}, {self.keys}, {self.k_dim}|{self.v_dim}] {kind} on {self.device}"
        extra = {
            "score": self.score,
            "scale": None if self._has_default_scale() else self.scale,
            "softcap": self.softcap,
            "sink": self.sink or None,
            "dropout": self.dropout or None,
            "offset": self.offset if self.offset != self.keys - self.queries else None,
            "gradients": self.grad or None,
            "under torch.func": self.transformed or None,
            "stored as": self.storage,
        }
        said = ", ".join(
            name if value is True else f"{name} {value}" for name, value in extra.items() if value is not None
        )
        return f"{q} · {kv}, mask {self.mask}, bias {self.bias}" + (", " + said if said else "")

    def _has_default_scale(self) -> bool:
        return math.isclose(self.scale, 1.0 if self.score else Dot().default_scale(self.qk_dim))


class Storage(NamedTuple):
    """How the keys and values of a call are stored.

    Attributes:
        k: how the parts of the keys are written, by `StoredTensor.encodings`.
        v: the same of the values.
        nbytes: that must be read of both, at least.
    """

    k: tuple[str, ...]
    v: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, k: StoredTensor, v: StoredTensor) -> "Storage":
        """How these are stored."""
        return cls(k.encodings, v.encodings, k.nbytes + v.nbytes)

    def __str__(self) -> str:
        k, v = (" + ".join(forms) for forms in (self.k, self.v))
        return k if k == v else f"{k} | {v}"


class Operands(NamedTuple):
    """What a problem is posed over: the tensors, and the words that carry tensors, placed in the call.

    Where keys and values are stored, `stored` has them, and `k` and `v` are tensors of their shape that hold nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | None
    sink: Tensor | None
    score: Score | None = None  # None: the dot product
    stored: tuple[StoredTensor, StoredTensor] | None = None


def opened(
    k: Tensor | StoredTensor, v: Tensor | StoredTensor, mask: Mask | None, bias: Bias | None, offset: int | None
) -> tuple[Tensor, Tensor, Mask | None, tuple[StoredTensor, StoredTensor] | None]:
    """A call's keys, values and mask as `pose` takes them, and the handles of keys and values if either is stored.

    Stored ones are tensors of their shape, type and device then, which hold nothing.

    Raises:
        ProblemError: as `handles` does.
    """
    if not isinstance(k, StoredTensor) and not isinstance(v, StoredTensor):
        return k, v, mask, None
    mask, stored = handles(k, v, mask, bias, offset)
    return stored[0].placeholder, stored[1].placeholder, mask, stored


def handles(
    k: Tensor | StoredTensor,
    v: Tensor | StoredTensor,
    mask: Mask | None,
    bias: Bias | None,
    offset: int | Tensor | None,
) -> tuple[Mask | None, tuple[StoredTensor, StoredTensor]]:
    """The handles of keys and values, one of which is stored, and the mask of a call on them.

    A tensor beside a stored one is a single plain part. Where rows have lengths, the mask says so, and each row's
    queries stand at its own last keys.

    Raises:
        ProblemError: keys and values that are not of one cache, or words that make no sense for rows of lengths.
    """
    keys, values = _as_stored(k, "k"), _as_stored(v, "v")
    lengths = keys.row_lengths
    if lengths != values.row_lengths or keys.rotated != values.rotated:
        raise ProblemError(f"k is {keys} and v {values}: a value belongs to each key, so they come from one cache.")
    if lengths is not None:
        mask = _ragged(mask, lengths, bias, offset)
    return mask, (keys, values)


def pose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None,
    bias: Bias | None,
    score: Score | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
    offset: int | None,
    lse: bool,
    stored: tuple[StoredTensor, StoredTensor] | None = None,
) -> tuple[Problem, Operands]:
    """Check a call and take it apart into its problem and its operands; k, v, mask and stored as `opened` gives them.

    Shapes: q [batch, heads, queries, qk_dim], k [batch, kv_heads, keys, qk_dim], v [batch, kv_heads, keys, v_dim],
        sink [heads].

    Raises:
        ProblemError: anything about the call that makes no sense.
    """
    check_tensors(q, k, v)
    (batch, heads, queries, qk_dim), (kv_heads, keys), v_dim = q.shape, k.shape[1:3], v.shape[3]
    check_words(mask, bias, score)
    if mask is not None:
        _check_has_data(mask)
    compared = score or Dot()
    score_dim = compared.dim(qk_dim, k.shape[3])
    score = None if isinstance(compared, Dot) else compared.bind(heads, kv_heads)
    check_numbers(scale, softcap, dropout)
    check_sink(sink, heads, q)
    offset = keys - queries if offset is None else check_offset(offset)
    sizes = CallSizes(batch, heads, queries, keys, offset)
    mask, bias = None if mask is None else mask.bind(sizes), None if bias is None else bias.bind(sizes)
    words = [word for word in (bias, score) if word is not None]
    for word in words:
        check_device(word, q)
    given = (q, k, v, *([] if sink is None else [sink]), *(t for word in words for t in word.tensors()))
    transformed = _transformed(given)
    foreign = not transformed and any(map(_is_foreign, given))
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        qk_dim=qk_dim,
        k_dim=k.shape[3],
        v_dim=v_dim,
        dtype=q.dtype,
        device=q.device.type,
        mask=None if mask is None else mask.fingerprint(),
        bias=None if bias is None else bias.form(),
        score=None if score is None else score.form(),
        score_dim=score_dim,
        scale=compared.default_scale(qk_dim) if scale is None else float(scale),
        softcap=softcap,
        sink=sink is not None,
        dropout=float(dropout),
        offset=offset,
        grad=torch.is_grad_enabled() and any(t.requires_grad for t in given),
        lse=lse,
        transformed=transformed,
        gapped=() if transformed or foreign else gapped(q) if stored else gapped(q, k, v),
        foreign=foreign,
        storage=None if stored is None else Storage.of(*stored),
    )
    return problem, Operands(q, k, v, mask, bias, sink, score, stored)


def gapped(*tensors: Tensor) -> tuple[str, ...]:
    """Which of q, k and v, in this order, have a last axis (of 2 or more) whose stride is not 1."""
    return tuple(name for name, t in zip("qkv", tensors, strict=False) if t.stride(3) != 1 and t.shape[3] > 1)


def is_finite(t: Tensor) -> bool:
    """Whether all of a tensor is finite: its extremes tell, in one pass and without a tensor of bools."""
    return not t.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(t.detach()))


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise `ProblemError` unless the three have shapes, a type and a device that make one call."""
    for name, t, axes in (
        ("q", q, "heads, queries, qk_dim"),
        ("k", k, "kv_heads, keys, qk_dim"),
        ("v", v, "kv_heads, keys, v_dim"),
    ):
        check_readable(name, t, f"a tensor [batch, {axes}]")
        if t.ndim != 4:
            raise ProblemError(f"{name} has shape {list(t.shape)}: expected [batch, {axes}].")
        if t.dtype not in DTYPES:
            raise ProblemError(f"{name} is {t.dtype}: expected float64, float32, bfloat16 or float16.")
    if not q.dtype == k.dtype == v.dtype:
        raise ProblemError(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: they must be of one type; convert with .to(q.dtype)."
        )
    if not q.device == k.device == v.device:
        raise ProblemError(f"q is on {q.device}, k on {k.device} and v on {v.device}: they must be on one device.")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ProblemError(
            f"q has {q.shape[0]} batch rows, k {k.shape[0]} and v {v.shape[0]}: they must agree; "
            "k.expand repeats without a copy."
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ProblemError(
            f"k has {k.shape[1]} heads and {k.shape[2]} keys, v has {v.shape[1]} and {v.shape[2]}: a value "
            "belongs to each key."
        )
    if (k.shape[1] == 0 and q.shape[1] > 0) or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise ProblemError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: query heads must be a whole multiple of key heads "
            f"(grouped-query attention shares each key head among a group of {q.shape[1]} / {k.shape[1]} query heads)."
        )


def check_readable(name: str, t: object, expected: str = "a torch.Tensor") -> None:
    """Raise `ProblemError` unless it is a tensor of one shape whose elements are what torch's operators read.

    A class with a `__torch_function__` of its own may mean anything: torch's `CausalBias` is a tensor that nothing was
    ever written to. A class with a `__torch_dispatch__` of its own says what each operator does, and is computed so.
    """
    if not isinstance(t, Tensor):
        raise ProblemError(f"{name} is {type(t).__name__}: expected {expected}.")
    if t.is_nested:
        raise ProblemError(
            f"{name} is a nested tensor: expected {expected}. Pad its rows with torch.nested.to_padded_tensor and hide "
            "the padding with mask=KeyLengths(lengths), or put the rows one behind another, as one row, and keep them "
            "apart with mask=Documents(ids)."
        )
    kind = type(t)
    if not _has_ordinary_functions(kind):
        raise ProblemError(
            f"{name} is of the class {kind.__name__}, which has a __torch_function__ of its own, so its elements may "
            f"mean anything: expected {expected}. If they are what they seem, pass it .as_subclass(torch.Tensor)."
        )
    if t.layout is not torch.strided:
        raise ProblemError(f"{name} has the layout {t.layout}: expected {expected} that is strided; call .to_dense().")


def _has_ordinary_functions(kind: Any) -> bool:
    """Whether functions of torch do with tensors of the class what they do with any."""
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    own = next(base for base in kind.__mro__ if "__torch_function__" in base.__dict__)
    return own is Tensor or own.__torch_function__ is DisabledTorchFunction


def check_words(mask: object, bias: object, score: object) -> None:
    """Raise `ProblemError` unless each is a word of its kind, or None."""
    for name, given, kind in (("mask", mask, Mask), ("bias", bias, Bias), ("score", score, Score)):
        if given is None or isinstance(given, kind):
            _check_word(name, given)
            continue
        called = given if isinstance(given, str) else type(given).__name__
        if name == "mask" and (here := mask_for(called)):
            what = f"the text {given!r}" if isinstance(given, str) else f"a {called}"
            raise ProblemError(f"mask is {what}: expected a regard Mask; say mask={here}.")
        what = f"a tensor {given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else f"{given!r}"
        hint = {
            "mask": "wrap a bool tensor as TensorMask(mask) (True keeps), a float one as bias=TensorBias(mask)",
            "bias": "wrap a tensor as TensorBias(bias)",
            "score": "leave it out for the dot product, or see regard.describe.score",
        }[name]
        if isinstance(given, type) and issubclass(given, Spec):
            raise ProblemError(f"{name} is the class {given.__name__}: did you mean {given.__name__}(...)?")
        wrong = f", which is a {type(given).__mro__[1].__name__.lower()}" if isinstance(given, Spec) else ""
        raise ProblemError(f"{name} is {what}{wrong}: expected a regard {kind.__name__}; {hint}.")


def _check_word(name: str, given: Spec | None) -> None:
    if given is None:
        return
    if not given.is_known():
        raise ProblemError(
            f"{name} is a {type(given).__name__}, a class that regard does not know; see MaskFunction and TensorBias."
        )
    for t in given.tensors():
        check_readable(f"a tensor in {name}", t)
        if isinstance(given, Mask):
            _check_mask_tensor(given, t)


def _check_mask_tensor(mask: Mask, t: Tensor) -> None:
    """Raise `ProblemError` unless the tensor can be looked at before anything runs, as schedules are made of masks."""
    if is_batched(t):
        raise ProblemError(
            f"{mask!r} is mapped over by vmap: a mask is the same for all; give it a batch axis instead."
        )
    if _has_own_operators(t) and not isinstance(t, FunctionalTensor):
        raise ProblemError(
            f"a tensor in mask is of the class {type(t).__name__}, which keeps its elements elsewhere, and masks are "
            "looked at before attention is computed: expected a torch.Tensor."
        )


def _check_has_data(mask: Mask) -> None:
    if any(map(is_without_data, mask.tensors())):
        raise ProblemError(
            f"{mask!r} has a tensor that has no data, and masks are looked at before attention is computed or "
            "explained: expected a tensor on the CPU or a GPU. (q, k and v may be meta tensors in explain.)"
        )


def check_numbers(scale: object, softcap: object, dropout: object) -> None:
    """Raise `ProblemError` unless the numbers are numbers and make sense."""
    for name, given in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(given, Tensor):
            raise ProblemError(f"{name} is a tensor: expected a number. To learn a scale, multiply q by it.")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
            raise ProblemError(f"{name} is {given!r}: expected a number.")
        if isinstance(given, int) and abs(given) > sys.float_info.max:
            raise ProblemError(f"{name} is {given}: expected a number up to {sys.float_info.max}, as floats are.")
    if isinstance(scale, int | float) and not -math.inf < scale < math.inf:  # isfinite cannot be traced
        raise ProblemError(f"scale is {scale}: expected a finite number, or None for qk_dim ** -0.5.")
    if isinstance(softcap, int | float) and not 0 < softcap < math.inf:
        raise ProblemError(f"softcap is {softcap}: expected a finite number above 0, or None for no cap.")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ProblemError(f"dropout is {dropout}: expected a probability, 0 <= dropout < 1.")


def check_sink(sink: object, heads: int, q: Tensor) -> None:
    """Raise `ProblemError` unless it is a logit per head beside q, or None."""
    if sink is None:
        return
    if isinstance(sink, Tensor):
        check_readable("sink", sink)
    if not isinstance(sink, Tensor) or sink.shape != (heads,) or not sink.is_floating_point():
        what = f"{sink.dtype} {list(sink.shape)}" if isinstance(sink, Tensor) else repr(sink)
        raise ProblemError(f"sink is {what}: expected a float tensor with a logit per query head, [{heads}].")
    if sink.device != q.device:
        raise ProblemError(f"sink is on {sink.device} and q on {q.device}: they must be on one device.")


def check_offset(offset: object) -> int:
    """The offset as an int; one in a tensor is read, and one on a GPU waited for.

    Raises:
        ProblemError: it is none, or positions would not fit in 64 bits.
    """
    try:
        index = None if isinstance(offset, bool) else cast(SupportsIndex, offset).__index__()
    except (AttributeError, TypeError):  # a tensor has an index only if it is one int
        index = None
    if index is None:
        raise _no_offset(repr(offset))
    if abs(index) > FARTHEST:
        raise ProblemError(
            f"offset is {index}: expected an int from -2**62 to 2**62, as positions and the distances between them are "
            "computed in 64 bits."
        )
    return index


def check_offset_tensor(offset: Tensor) -> None:
    """Raise `ProblemError` unless it is an integer tensor of one element, which is not read."""
    if offset.numel() != 1 or offset.is_floating_point() or offset.is_complex():
        raise _no_offset(f"{offset.dtype} {list(offset.shape)}")


def _no_offset(given: str) -> ProblemError:
    return ProblemError(
        f"offset is {given}: expected an int, an integer tensor of one element, or None to put the last query at the "
        "last key."
    )


def check_device(word: Spec, q: Tensor) -> None:
    """Raise `ProblemError` unless the tensors of the word are where q is."""
    for t in word.tensors():
        if t.device != q.device and q.device.type != "meta":
            raise ProblemError(
                f"{word!r} has a tensor on {t.device}, and q is on {q.device}: they must be on one device."
            )


def _ragged(mask: Mask | None, lengths: tuple[int, ...], bias: Bias | None, offset: int | Tensor | None) -> Mask | None:
    """The mask of a call whose rows have lengths: each row's queries stand at its own last keys."""
    if offset is not None:
        raise ProblemError(
            f"offset is {offset}, and the rows of the stored keys have lengths of their own: leave it out, then each "
            "row's last query stands at its own last key."
        )
    if isinstance(bias, Bias) and any(term.per_distance() for term in bias.terms()):
        raise ProblemError(
            f"{bias!r} with rows of different lengths: a bias by distance is not known there. Call attend row by row."
        )
    if mask is not None and not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        return mask  # `pose` says what is wrong with it
    return Ragged(mask, lengths)


def _as_stored(side: object, name: str) -> StoredTensor:
    if isinstance(side, StoredTensor):
        return side
    expected = "a tensor [batch, kv_heads, keys, dim], or what a cache handed out"
    check_readable(name, side, expected)
    tensor = cast(Tensor, side)
    if tensor.ndim != 4:
        raise ProblemError(f"{name} has shape {list(tensor.shape)}: expected {expected}.")
    return StoredTensor.of(tensor)


def in_transform() -> bool:
    """Whether `torch.func` (vmap, grad, jvp ...) or forward-mode differentiation is at work."""
    return current_func_transform() is not None or in_forward_mode()


def can_be_read(*tensors: Tensor) -> bool:
    """Whether code may look at the numbers of these now: torch does not trace, transform or stand in for them."""
    return not (torch.compiler.is_compiling() or in_transform() or any(map(is_without_data, tensors)))


def _transformed(tensors: tuple[Tensor, ...]) -> bool:
    if current_func_transform() is not None:
        return True
    if not in_transform():
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _is_foreign(t: Tensor) -> bool:
    return _has_own_operators(t) or t.is_neg()


def _has_own_operators(t: Tensor) -> bool:
    """Whether its class says what operators do with it, so that its elements need not lie at its address."""
    kind: Any = type(t)
    return kind.__torch_dispatch__ is not cast(Any, Tensor).__torch_dispatch__ and not isinstance(t, FakeTensor)
