"""Checks of the arguments of a call. Each raises `ProblemError` with the received and the expected value.

`plan/pose.py` runs them all; modules and the traced operator run some of them earlier.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor

from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.not_a_spec import instead, received, unregistered
from regard.describe.score import Score
from regard.describe.spec import Spec
from regard.describe.tensors import is_without_data
from regard.describe.traced import refuse_proxy, refuse_symbol
from regard.errors import ProblemError
from regard.torch_internals import (
    DisabledTorchFunction,
    FakeTensor,
    FunctionalTensor,
    in_transform,
    is_mapped,
    resolve_lazy,
)
from regard.wide import wide_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FARTHEST = 1 << 62
"""The largest position: from here, the distance between a query and a key still fits into 64 bits."""


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
    if _is_true(q.shape[1] > 0 if _is_true(k.shape[1] == 0) else q.shape[1] % k.shape[1] != 0):
        raise ProblemError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: query heads must be a whole multiple of key heads "
            f"(grouped-query attention shares each key head among a group of {q.shape[1]} / {k.shape[1]} query heads)."
        )


def _is_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; False for one that data decide while torch traces: the call is checked later.

    An operator checks its tensors again when it runs.
    """
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415 - loads sympy

    return guard_or_false(condition)


def check_readable(name: str, t: object, expected: str = "a torch.Tensor") -> None:
    """Raise `ProblemError` unless it is a strided tensor whose elements have their usual meaning.

    A class with its own `__torch_function__` may give elements any meaning: the memory of torch's `CausalBias` is never
    initialised. A class with its own `__torch_dispatch__` defines each operator, and is computed by these operators.
    """
    if not isinstance(t, Tensor):
        raise not_a_tensor(name, t, expected)
    if t.is_nested:
        raise ProblemError(
            f"{name} is a nested tensor: expected {expected}. Pad its rows with torch.nested.to_padded_tensor and hide "
            "the padding with mask=KeyLengths(lengths), or concatenate the rows to one row and separate "
            "them with mask=Documents(ids)."
        )
    kind = type(t)
    if not _has_ordinary_functions(kind):
        raise ProblemError(
            f"{name} is of the class {kind.__name__}, which has a __torch_function__ of its own, so its elements may "
            f"have another meaning: expected {expected}. If they have not, pass it .as_subclass(torch.Tensor)."
        )
    if t.layout is not torch.strided:
        raise ProblemError(f"{name} has the layout {t.layout}: expected {expected} that is strided; call .to_dense().")


def not_a_tensor(name: str, given: object, expected: str) -> ProblemError:
    """The error of an argument in the place of a tensor.

    Raises:
        RefusalError: the argument is a Proxy of `torch.fx`.
    """
    refuse_proxy(name, given)
    dense = f"; {name}.dense() is one" if hasattr(given, "dense") else ""
    return ProblemError(f"{name} is {type(given).__name__}: expected {expected}{dense}.")


def _has_ordinary_functions(kind: Any) -> bool:
    """Whether functions of torch treat tensors of the class like any tensor."""
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    own = next(base for base in kind.__mro__ if "__torch_function__" in base.__dict__)
    return own is Tensor or own.__torch_function__ is DisabledTorchFunction


def check_specs(mask: object, bias: object, score: object) -> None:
    """Raise `ProblemError` unless each is a spec of its kind, or None."""
    for name, given, kind in (("mask", mask, Mask), ("bias", bias, Bias), ("score", score, Score)):
        if given is None or isinstance(given, kind):
            _check_spec(name, given)
            continue
        refuse_proxy(name, given)
        hint = instead(given, name).replace("say ", f"say {name}=", 1)
        expected = f"expected a regard {kind.__name__}; {hint}"
        raise ProblemError(f"{name} is {received(given)}: {expected}{'' if hint.endswith('?') else '.'}")


def _check_spec(name: str, given: Spec | None) -> None:
    if given is None:
        return
    if not given.is_registered():
        raise unregistered(name, given)
    for t in given.tensors():
        check_readable(f"a tensor in {name}", t)
        if isinstance(given, Mask):
            _check_mask_tensor(given, t)


def _check_mask_tensor(mask: Mask, t: Tensor) -> None:
    """Raise `ProblemError` unless the elements can be read before the call runs: schedules need them."""
    check_is_not_mapped(mask, t)
    if has_own_operators(t) and not isinstance(t, FunctionalTensor):
        raise ProblemError(
            f"a tensor in mask is of the class {type(t).__name__}, whose elements are stored elsewhere, and masks are "
            "read before attention is computed: expected a torch.Tensor."
        )


def check_is_not_mapped(mask: Mask, t: Tensor) -> None:
    """Raise `ProblemError` if vmap maps over a tensor of the mask, or over what its `keep` returned."""
    if is_mapped(t):
        raise mapped(mask)


def mapped(mask: Mask) -> ProblemError:
    """The error for a mask that reads a tensor which vmap maps over."""
    return ProblemError(f"{mask!r} is mapped over by vmap: a mask is the same for all; give it a batch axis instead.")


def check_has_data(mask: Mask) -> None:
    """Raise `ProblemError` unless the elements of the mask's tensors can be read."""
    if any(map(is_without_data, mask.tensors())):
        raise ProblemError(
            f"{mask!r} has a tensor without data, and masks are read before attention is computed or explained: "
            "expected a tensor on the CPU or a GPU. (q, k and v may be meta tensors in explain.)"
        )


def check_numbers(scale: object, softcap: object, dropout: object) -> None:
    """Raise `ProblemError` unless each is a number in its range."""
    for name, given in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(given, Tensor):
            hint = (
                " To learn a scale, multiply q by it and pass scale=1; instead of score=Cosine(), which divides q by "
                "its norm, divide q and k by their norms first."
            )
            expected = "expected a number, as a Python int or float."
            raise ProblemError(f"{name} is a tensor: {expected}{hint if name == 'scale' else ''}")
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
            refuse_proxy(name, given)
            refuse_symbol(name, given, "multiply q by it and pass scale=1" if name == "scale" else "pass a number")
            raise ProblemError(f"{name} is {given!r}: expected a number, as a Python int or float.")
        if isinstance(given, int) and abs(given) > sys.float_info.max:
            raise ProblemError(f"{name} is {given}: expected a number up to {sys.float_info.max}, as floats are.")
    if isinstance(scale, int | float) and not -math.inf < scale < math.inf:  # isfinite cannot be traced
        raise ProblemError(
            f"scale is {scale}: expected a finite number, or None for that of the score (qk_dim ** -0.5 for the dot "
            "product)."
        )
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
        refuse_proxy("sink", sink)
        what = f"{sink.dtype} {list(sink.shape)}" if isinstance(sink, Tensor) else repr(sink)
        raise ProblemError(f"sink is {what}: expected a float tensor with a logit per query head, [{heads}].")
    if sink.device != q.device:
        raise ProblemError(f"sink is on {sink.device} and q on {q.device}: they must be on one device.")


def check_offset(offset: object) -> int:
    """The offset as an int; reads an offset in a tensor, which waits for a GPU.

    Raises:
        ProblemError: it is not an integer, or positions would exceed 64 bits.
    """
    is_bool = isinstance(offset, bool) or (isinstance(offset, Tensor) and offset.dtype == torch.bool)
    try:
        index = None if is_bool else cast(SupportsIndex, offset).__index__()
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


def check_offset_tensor(offset: Tensor, batch: int) -> None:
    """Raise `ProblemError` unless it has one integer, or one for each batch row; does not read them."""
    if offset.is_floating_point() or offset.is_complex() or offset.dtype == torch.bool:
        raise _no_offset(f"{offset.dtype} {list(offset.shape)}")
    if offset.numel() != 1 and tuple(offset.shape) != (batch,):
        raise _no_offset(f"{offset.dtype} {list(offset.shape)} for {batch} batch rows")


def row_offsets(offset: object, q: object) -> tuple[int, ...] | None:
    """The position of the first query of each batch row, if a tensor has one for each; None for one of the call.

    Raises:
        ProblemError: it has neither one integer nor one for each batch row, or vmap maps over it.
        RefusalError: it is a Proxy of `torch.fx`.
    """
    refuse_proxy("offset", offset)
    if isinstance(offset, Tensor) and is_mapped(offset):
        raise ProblemError(
            "offset is mapped over by vmap: an offset is the same for all; give q a batch axis and an offset for each "
            "batch row instead."
        )
    if not isinstance(offset, Tensor) or offset.numel() == 1 or not isinstance(q, Tensor) or q.ndim != 4:
        return None
    check_offset_tensor(offset, q.shape[0])
    return tuple(check_offset(first) for first in offset.tolist())


def _no_offset(given: str) -> ProblemError:
    return ProblemError(
        f"offset is {given}: expected an int, an integer tensor of one element or one for each batch row, or None to "
        "put the last query at the last key."
    )


def check_device(spec: Spec, q: Tensor) -> None:
    """Raise `ProblemError` unless the tensors of the spec are on the device of q."""
    for t in spec.tensors():
        if t.device != q.device and q.device.type != "meta":
            raise ProblemError(
                f"{spec!r} has a tensor on {t.device}, and q is on {q.device}: they must be on one device."
            )


def can_be_read(*tensors: Tensor) -> bool:
    """Whether elements can be read now: the tensors have data, and torch neither traces nor transforms them."""
    return not (torch.compiler.is_compiling() or in_transform() or any(map(is_without_data, tensors)))


def is_finite(t: Tensor) -> bool:
    """Whether all elements are finite, by minimum and maximum: one pass, without a tensor of bools.

    On a GPU the host waits once for the answer.
    """
    if not t.numel():
        return True
    extremes = torch.aminmax(t.detach())
    if t.is_cpu:
        return all(math.isfinite(extreme) for extreme in extremes)
    return bool(torch.isfinite(torch.stack(tuple(extremes))).all())


def has_own_operators(t: Tensor) -> bool:
    """Whether its class defines its operators, so its elements may not be at its address."""
    kind: Any = type(t)
    return kind.__torch_dispatch__ is not cast(Any, Tensor).__torch_dispatch__ and not isinstance(t, FakeTensor)


SAVED = "q", "k", "v", "sink", "a bias by distance", "a bias", "out", "lse"
"""The tensors that are saved for a backward pass, in order."""


class Saved(NamedTuple):
    """What a backward pass knows of the tensors that were saved for it."""

    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    device: torch.device
    distance: torch.Size | None
    bias: tuple[torch.Size, torch.dtype] | None
    has_own_operators: bool

    @classmethod
    def of(cls, parts: Sequence[Any]) -> "Saved":
        """The forms of q, k, v, sink, distance and bias, as the forward pass reads them."""
        q, k, v, _, distance, bias = parts
        form = None if bias is None else (bias.shape, bias.dtype)
        of_distance = None if distance is None else distance.shape
        return cls(q.shape, k.shape, v.shape, q.dtype, q.device, of_distance, form, has_own_operators(q))

    def _refuse(self, name: str, form: tuple[torch.Size, torch.dtype], t: Tensor) -> NoReturn:
        shape, dtype = form
        layout = "" if t.layout is torch.strided else f", {t.layout}"
        raise ProblemError(
            f"{name} was saved for the backward pass as {dtype} {list(shape)} on {self.device}, and came back "
            f"as {type(t).__name__}, {t.dtype} {list(t.shape)} on {t.device}{layout}: expected from the unpack of "
            "saved_tensors_hooks a dense tensor of the type, shape and device that its pack got."
        )

    def given_back(self, saved: Sequence[Any], *, distance_learns: bool) -> list[Any]:
        """These six, out and lse, laid out as kernels read them.

        `torch.autograd.graph.saved_tensors_hooks` give back what a user's function returns.

        Raises:
            ProblemError: a tensor is not dense, or has not the type, the shape or the device that it was saved with.
        """
        rows, wide = self.q[:3], wide_of(self.dtype)
        forms = (
            (self.q, self.dtype), (self.k, self.dtype), (self.v, self.dtype), (self.q[1:2], wide),
            (self.distance, wide), self.bias, (rows + self.v[3:], self.dtype), (rows, wide),
        )  # fmt: skip
        found: list[Any] = []
        for number, (form, t) in enumerate(zip(forms, saved, strict=True)):
            if t is None:
                found.append(None)
                continue
            is_other_class = type(t) is not Tensor and has_own_operators(t) and not self.has_own_operators
            is_like = (t.shape, t.dtype) == form and t.device == self.device and t.layout is torch.strided
            if not is_like or is_other_class:
                self._refuse(SAVED[number], cast("tuple[torch.Size, torch.dtype]", form), t)
            found.append(resolve_lazy(t))
        q, k, v, sink, distance, bias, out, lse = found
        q, k, v, out = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v, out))
        if distance is not None and (distance_learns or distance.stride(1) != 1):
            distance = distance.contiguous()  # its gradient is laid out like it
        return [q, k, v, None if sink is None else sink.contiguous(), distance, bias, out, lse.contiguous()]
