"""What a function is by content: whatever its code reads makes it another when it changes."""

import functools
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import (
    Documents,
    KeyLengths,
    MaskFunction,
    T5Bias,
    TensorBias,
    TensorMask,
    attend,
    scaled_dot_product_attention,
)
from regard.bench.rounds import on_threads
from regard.describe.content import Untraceable, content
from regard.describe.tensors import distinct_elements

Change = tuple[Callable[..., Any], Callable[[], object]]
"""A function, and what changes something that it reads."""

LIMIT = [3]
TABLE: dict[str, Any] = {"a": 1, "b": {"c": 2.0}}
CELLS = torch.arange(5)


class Near:
    """A callable object, whose attributes and whose class are read."""

    step = 1
    __slots__ = ("by", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.by = {"head": [1, 2]}

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k < self.left) & (h < self.by["head"][0]) & (q % self.step == 0)

    def method(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < self.left


def of_globals(b: Any, h: Any, q: Any, k: Any) -> Any:
    return CELLS[q] == CELLS[k] + LIMIT[0] + TABLE["b"]["c"]


def by_another(b: Any, h: Any, q: Any, k: Any) -> Any:
    return [of_globals(b, h, q, i) for i in k]


def closed_over_an_int() -> Change:
    limit = 3

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < limit

    def change() -> None:
        nonlocal limit
        limit += 1

    return mask, change


def closed_over_a_list() -> Change:
    limits: list[Any] = [1, [2, CELLS.clone()]]
    return lambda b, h, q, k: k < limits[0], lambda: limits[1].append(3)


def closed_over_an_array() -> Change:
    limits = np.arange(3)
    return lambda b, h, q, k: k < limits[0], lambda: limits.__setitem__(0, 7)


def closed_over_a_tensor_written_through_data() -> Change:
    limits = torch.arange(3)
    return lambda b, h, q, k: k < limits[0], lambda: limits.data.__setitem__(0, 7)


def of_a_global_list() -> Change:
    return of_globals, lambda: LIMIT.append(len(LIMIT))


def of_a_global_dict() -> Change:
    return of_globals, lambda: TABLE.__setitem__("d", len(TABLE))


def of_a_global_tensor_inside_a_function_that_it_calls() -> Change:
    return by_another, lambda: CELLS.add_(1)


def of_an_attribute() -> Change:
    near = Near(3)
    return near, lambda: setattr(near, "left", 4)


def of_what_an_attribute_holds() -> Change:
    near = Near(3)
    return near, lambda: near.by["head"].append(3)


def of_the_object_of_a_method() -> Change:
    near = Near(3)
    return near.method, lambda: setattr(near, "left", 4)


def of_an_attribute_of_the_class() -> Change:
    return Near(3), lambda: setattr(Near, "step", Near.step + 1)


def of_a_default() -> Change:
    def mask(b: Any, h: Any, q: Any, k: Any, limit: int = 3) -> Any:
        return k < limit

    return mask, lambda: setattr(mask, "__defaults__", (4,))


def of_a_keyword_default() -> Change:
    def mask(b: Any, h: Any, q: Any, k: Any, *, limit: int = 3) -> Any:
        return k < limit

    return mask, lambda: setattr(mask, "__kwdefaults__", {"limit": 4})


def of_a_partial() -> Change:
    given = {"limit": [3]}
    mask = functools.partial(lambda b, h, q, k, limit: k < limit[0], **given)
    return mask, lambda: given["limit"].append(4)


def of_a_module() -> Change:
    module = types.ModuleType("settings_of_a_test")
    module.limit, module.unread = 3, 0  # pyright: ignore[reportAttributeAccessIssue]
    return lambda b, h, q, k: k < module.limit, lambda: setattr(module, "limit", module.limit + 1)


def of_a_module_imported_inside() -> Change:
    module = types.ModuleType("inner_settings_of_a_test")
    module.limit = 3  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["inner_settings_of_a_test"] = module

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        import inner_settings_of_a_test  # pyright: ignore[reportMissingImports]

        return k < inner_settings_of_a_test.limit

    return mask, lambda: setattr(module, "limit", module.limit + 1)


def of_a_weight() -> Change:
    layer = torch.nn.Linear(2, 3)
    return lambda b, h, q, k: layer(q) > 0, lambda: layer.weight.data.add_(1)


CHANGES = [
    closed_over_an_int,
    closed_over_a_list,
    closed_over_an_array,
    closed_over_a_tensor_written_through_data,
    of_a_global_list,
    of_a_global_dict,
    of_a_global_tensor_inside_a_function_that_it_calls,
    of_an_attribute,
    of_what_an_attribute_holds,
    of_the_object_of_a_method,
    of_an_attribute_of_the_class,
    of_a_default,
    of_a_keyword_default,
    of_a_partial,
    of_a_module,
    of_a_module_imported_inside,
    of_a_weight,
]


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_a_function_is_another_once_something_that_it_reads_has_changed(make: Callable[[], Change]):
    function, change = make()
    before = content(function)
    assert content(function) == before
    assert hash(content(function)) == hash(before)
    assert not isinstance(before, Untraceable)
    change()
    assert content(function) != before


def test_the_attributes_of_a_module_that_no_code_names_do_not_matter():
    function, _ = of_a_module()
    before = content(function)
    function.__closure__[0].cell_contents.unread = 1
    assert content(function) == before


def test_functions_written_alike_are_one_and_their_constants_tell_them_apart():
    def made(source: str) -> object:
        return content(eval(source))

    assert made("lambda k: k < 1") == made("lambda k: k < 1")
    assert len({made(f"lambda k: k < {value}") for value in ("1", "1.0", "True", "-0.0", "0.0", "'1'", "b'1'")}) == 7


def test_values_that_are_equal_in_python_and_differ_are_distinguished():
    values: list[object] = [1, 1.0, True, [1], (1,), {1}, {1: 1}, 0.0, -0.0, "1", b"1", None]
    values += [np.float32(1), np.float64(1), np.ones(1), np.ones((1, 1)), torch.ones(1), torch.ones(1, 1)]
    assert len({content(value) for value in values}) == len(values)


def test_what_reads_itself_is_followed_once():
    circle: list[Any] = []
    circle.append(circle)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return circle and mask(b, h, q, k)

    before = content(mask)
    circle.append(1)
    assert content(mask) != before


def reading(thing: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: k < thing


UNKNOWN: dict[str, Callable[..., Any]] = {
    "a generator": reading(i for i in range(3)),
    "a clock": lambda k: k < random.random(),
    "a file": lambda k: k < len(Path("limit").read_text()),
    "the arguments of the program": lambda k: k < len(sys.argv),
    "a setting of torch": lambda k: k if torch.is_grad_enabled() else -k,
    "a name that is computed": lambda k: getattr(k, "a" + "b"),
    "evaluated text": lambda k: eval("k"),
    "all globals": lambda k: globals()["LIMIT"],
    "a name that is not there yet": lambda k: k < nowhere,  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    "an object of a C extension": reading(threading.Lock()),
    "a tensor without data": reading(torch.empty(1, device="meta")),
    "more than can be looked at": reading([[i] for i in range(20_000)]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_followed_equals_nothing(name: str):
    assert isinstance(content(UNKNOWN[name]), Untraceable)
    assert content(UNKNOWN[name]) != content(UNKNOWN[name])


T = torch.Tensor
READS: dict[str, tuple[Callable[[], T], Callable[[T, T], T]]] = {
    "a table": (lambda: torch.ones(5, 5).bool(), lambda q, t: attend(q, q, q, mask=TensorMask(t))),
    "lengths": (lambda: torch.tensor([3, 5]), lambda q, t: attend(q, q, q, mask=KeyLengths(t))),
    "documents": (lambda: torch.tensor([0, 0, 1, 1, 1]), lambda q, t: attend(q, q, q, mask=Documents(t))),
    "a function": (
        lambda: torch.arange(5), lambda q, t: attend(q, q, q, mask=MaskFunction(lambda b, h, i, j: t[i] >= t[j])),
    ),
    "a bias": (lambda: torch.zeros(5, 5).requires_grad_(), lambda q, t: attend(q, q, q, bias=TensorBias(t))),
    "buckets": (lambda: torch.zeros(8, 2).requires_grad_(), lambda q, t: attend(q, q, q, bias=T5Bias(t))),
    "torch's mask": (
        lambda: torch.ones(5, 5).bool(), lambda q, t: scaled_dot_product_attention(q, q, q, attn_mask=t),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_tensor_that_was_read_can_still_be_resized(name: str):
    """FSDP frees parameters so. `tensor.numpy()` would end that for good."""
    make, call = READS[name]
    tensor, q = make(), torch.randn(2, 2, 5, 8)
    for _ in range(2):
        call(q, tensor)
    assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize("heads", [1, 16])
def test_a_mask_of_bools_is_read_in_place(heads: int):
    """It may be most of the memory that a call needs: 256 MiB at 16,384 tokens, and as much for each head."""
    q = torch.randn(1, heads, 1024, 4)
    keep = torch.ones(1024, 1024, dtype=torch.bool).tril().expand(1, heads, 1024, 1024)
    with on_threads(1), torch.profiler.profile(profile_memory=True) as profile:
        attend(q, q, q, mask=TensorMask(keep))
    held = [event.self_cpu_memory_usage for event in profile.events() or [] if event.name.startswith("aten::")]
    assert 0 < max(held) < keep.numel() // 4


def test_distinct_elements_are_those_of_the_tensor():
    own = torch.arange(24).view(2, 1, 3, 4)
    for tensor in (own, own.mT, own[:, :, ::2], own.bool(), own[:0], own[0, 0, 0, 0]):
        np.testing.assert_array_equal(distinct_elements(tensor), tensor.numpy())
    np.testing.assert_array_equal(distinct_elements(own.expand(2, 5, 3, 4)), own.numpy())
    np.testing.assert_array_equal(distinct_elements(own[..., :1].expand(2, 1, 3, 4)), own[..., :1].numpy())
    np.testing.assert_array_equal(distinct_elements(torch.ones(3).expand(2, 3).requires_grad_()), np.ones((1, 3)))
