"""What hides from one who reads along with a function: each is followed, or the function is `Untraceable`."""

import collections
import dataclasses
import enum
import functools
import gc
import importlib
import operator
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from regard.describe.content import Untraceable, content

Change = tuple[Callable[..., Any], Callable[[], object]]
"""A function, and what changes something that it reads."""

FACTOR = 1
SETTINGS: Any = types.ModuleType("settings_that_hide")
sys.modules["settings_that_hide"] = SETTINGS


class Made:
    def __init__(self, n: int) -> None:
        self.limit = n * FACTOR


class Pair(NamedTuple):
    limit: int
    other: int = 0


class Count(enum.IntEnum):
    FEW = 4
    MANY = 9


class Box:
    held: Any = None


def change_factor() -> None:
    globals()["FACTOR"] += 1


def change_settings() -> None:
    SETTINGS.limit = getattr(SETTINGS, "limit", 3) + 1


def boxed(before: object, after: object, read: Callable[[Any], Any]) -> Change:
    box = Box()
    box.held = before
    return lambda b, h, q, k: k < read(box.held), lambda: setattr(box, "held", after)


def a_module_in_an_object() -> Change:
    SETTINGS.first = SETTINGS.second = 4
    box = Box()
    box.held = SETTINGS

    def inner(k: Any) -> Any:
        return k < box.held.second

    return lambda b, h, q, k: inner(k) & (k < box.held.first), lambda: setattr(SETTINGS, "second", 9)


def a_module_as_an_argument() -> Change:
    change_settings()

    def inner(module: Any, k: Any) -> Any:
        return k < module.limit

    return lambda b, h, q, k: inner(SETTINGS, k), change_settings


def a_module_in_a_class() -> Change:
    change_settings()

    class SpecModule:
        settings = SETTINGS

    return lambda b, h, q, k: k < SpecModule.settings.limit, change_settings


def a_module_that_makes_its_attributes() -> Change:
    module: Any = types.ModuleType("lazy_settings")
    limits = [4]
    module.__getattr__ = lambda name: limits[0]
    return lambda b, h, q, k: k < module.limit, lambda: limits.append(9)


def a_relative_import() -> Change:
    package: Any = types.ModuleType("package_that_hides")
    inner: Any = types.ModuleType("package_that_hides.math")
    package.__path__, package.__package__, inner.limit = [], "package_that_hides", 4
    sys.modules |= {"package_that_hides": package, "package_that_hides.math": inner}
    exec("def mask(b, h, q, k):\n    from .math import limit\n    return k < limit", vars(package))
    return package.mask, lambda: setattr(inner, "limit", 9)


def a_constructor() -> Change:
    return lambda b, h, q, k: k < Made(4).limit, change_factor


def the_constructor_of_the_class_of_an_object() -> Change:
    made = Made(4)
    return lambda b, h, q, k: k < type(made)(4).limit, change_factor


def a_metaclass() -> Change:
    class Kind(type):
        @property
        def limit(cls) -> int:
            return FACTOR

    class SpecModule(metaclass=Kind):
        pass

    return lambda b, h, q, k: k < SpecModule.limit, change_factor


def a_private_slot() -> Change:
    class SpecModule:
        __slots__ = ("__limit",)

        def put(self, limit: int) -> None:
            self.__limit = limit

        def get(self) -> int:
            return self.__limit

    held = SpecModule()
    held.put(4)
    return lambda b, h, q, k: k < held.get(), lambda: held.put(9)


def a_number_with_a_class() -> Change:
    class Tokens(float):
        pass

    return boxed(Tokens(4), Tokens(9), float)


def a_default_factory() -> Change:
    limits: Any = collections.defaultdict(lambda: 4)
    return lambda b, h, q, k: k < limits[k], lambda: setattr(limits, "default_factory", lambda: 9)


def a_dict_that_hides_its_keys() -> Change:
    class Hiding(dict[str, int]):
        def keys(self) -> Any:
            return ()

        def values(self) -> Any:
            return ()

    limits = Hiding(limit=4)
    return lambda b, h, q, k: k < limits["limit"], lambda: limits.update(limit=9)


def a_list_that_hides_its_elements() -> Change:
    class Hiding(list[int]):
        def __iter__(self) -> Any:
            return iter(())

    limits = Hiding([4])
    return lambda b, h, q, k: k < limits[0], lambda: limits.append(9)


def a_partial_with_a_class() -> Change:
    class Called(functools.partial[Any]):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[3] < FACTOR

    return Called(max), change_factor


def a_property_with_a_class() -> Change:
    class Limit(property):
        def __get__(self, *args: Any) -> Any:
            return FACTOR

    class SpecModule:
        limit = Limit(lambda self: 4)

    held = SpecModule()
    return lambda b, h, q, k: k < held.limit, change_factor


def a_function_named_like_one_of_a_library() -> Change:
    @functools.wraps(torch.functional.split)
    def limit() -> int:
        return FACTOR

    return lambda b, h, q, k: k < limit(), change_factor


def a_class_named_like_one_of_a_library() -> Change:
    held: Any = dataclasses.make_dataclass("SpecModule", [], namespace={"limit": property(lambda self: FACTOR)})()
    return lambda b, h, q, k: k < held.limit, change_factor


def a_method_of_a_class_bound_by_c() -> Change:
    class Marked(dict[str, int]):
        limit = 4

        def __setitem__(self, key: str, value: int) -> None:
            super().__setitem__(key, self.limit)

    make = Marked.fromkeys
    return lambda b, h, q, k: k < make("a")["a"], lambda: setattr(Marked, "limit", 9)


def an_object_that_fails_at_names() -> Change:
    class SpecModule:
        __slots__ = ("limit", "other")

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    held = SpecModule()
    held.limit = 4
    return lambda b, h, q, k: k < held.limit, lambda: setattr(held, "limit", 9)


def an_object_that_says_that_it_is_a_tensor() -> Change:
    class SpecModule:
        limit = 4
        __class__ = property(lambda self: torch.Tensor)  # pyright: ignore[reportIncompatibleMethodOverride]

    held: Any = SpecModule()
    return lambda b, h, q, k: k < held.limit, lambda: setattr(SpecModule, "limit", 9)


def a_class_that_equals_every_other() -> Change:
    class Kind(type):
        def __eq__(cls, other: object) -> bool:
            return True

        __hash__ = None  # pyright: ignore[reportAssignmentType]

    class SpecModule(metaclass=Kind):
        limit = 4

    return lambda b, h, q, k: k < SpecModule.limit, lambda: setattr(SpecModule, "limit", 9)


def an_attribute_of_a_tensor() -> Change:
    table: Any = torch.ones(3)
    table.limit = 4
    return lambda b, h, q, k: k < table.limit, lambda: setattr(table, "limit", 9)


def a_tensor_with_a_class() -> Change:
    class Table(torch.Tensor):
        pass

    table = torch.tensor([4]).as_subclass(Table)
    return lambda b, h, q, k: k < table, lambda: table.data.fill_(9)


def a_negated_view() -> Change:
    whole = torch.tensor([1 - 4j])
    part = whole.conj().imag
    return lambda b, h, q, k: k < part, lambda: whole.data.fill_(1 - 9j)


def a_conjugated_view() -> Change:
    whole = torch.tensor([1 - 4j])
    view = whole.conj()
    return lambda b, h, q, k: k < view.real, lambda: whole.fill_(9)


def a_type_that_numpy_lacks() -> Change:
    table = torch.zeros(3, dtype=torch.float8_e4m3fnuz)
    return lambda b, h, q, k: table[k] > 0, lambda: table.view(torch.uint8).fill_(9)


def an_array_of_dates() -> Change:
    dates = np.array(["2020-01-01"], dtype="M8[D]")
    return lambda b, h, q, k: k < dates.astype(int)[0], lambda: dates.__setitem__(0, np.datetime64("2021-01-01"))


FOLLOWED: list[Callable[[], Change]] = [
    a_module_in_an_object,
    a_module_as_an_argument,
    a_module_in_a_class,
    a_module_that_makes_its_attributes,
    a_relative_import,
    a_constructor,
    the_constructor_of_the_class_of_an_object,
    a_metaclass,
    a_private_slot,
    a_number_with_a_class,
    a_default_factory,
    a_dict_that_hides_its_keys,
    a_list_that_hides_its_elements,
    a_partial_with_a_class,
    a_property_with_a_class,
    a_function_named_like_one_of_a_library,
    a_class_named_like_one_of_a_library,
    a_method_of_a_class_bound_by_c,
    an_object_that_fails_at_names,
    an_object_that_says_that_it_is_a_tensor,
    a_class_that_equals_every_other,
    an_attribute_of_a_tensor,
    a_tensor_with_a_class,
    a_negated_view,
    a_conjugated_view,
    a_type_that_numpy_lacks,
    an_array_of_dates,
]


IN_A_BOX: dict[str, tuple[object, object, Callable[[Any], Any]]] = {
    "a named tuple": (Pair(4), Pair(9), lambda pair: pair.limit),
    "a member of an enumeration": (Count.FEW, Count.MANY, lambda count: count),
    "the length that a queue may have": (collections.deque([1], 4), collections.deque([1], 9), lambda row: row.maxlen),
    "a range of equal elements": (range(0, 4, 2), range(0, 3, 2), lambda steps: steps.stop),
    "the names of an array's fields": (
        np.array([(4, 9)], dtype=[("a", "i4"), ("b", "i4")]),
        np.array([(4, 9)], dtype=[("b", "i4"), ("a", "i4")]),
        lambda rows: int(rows["a"][0]),
    ),
    "how many of a set are equal": ({torch.tensor(1), torch.tensor(1)}, {torch.tensor(1)}, len),
}


@pytest.mark.parametrize("name", IN_A_BOX)
def test_what_differs_in_a_box_is_seen_to_change(name: str):
    assert_is_seen_to_change(*boxed(*IN_A_BOX[name]))


@pytest.mark.parametrize("make", FOLLOWED, ids=lambda make: make.__name__)
def test_what_hides_is_seen_to_change(make: Callable[[], Change]):
    assert_is_seen_to_change(*make())


def assert_is_seen_to_change(function: Callable[..., Any], change: Callable[[], object]) -> None:
    before = content(function)
    assert not isinstance(before, Untraceable)
    assert content(function) == before
    assert hash(content(function)) == hash(before)
    change()
    assert content(function) != before


MASKED = np.ma.array([4, 9], mask=[False, True])
SPARSE = torch.tensor([4]).to_sparse()
with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
OF_A_FUNCTION = np.frompyfunc(lambda x: x < 4, 1, 1)


@functools.cache
def kept_limits() -> list[int]:
    return [4]


OUT_OF_SIGHT: dict[str, Callable[..., Any]] = {
    "a name of a module that is computed": lambda b, h, q, k: k < operator.attrgetter("limit")(SETTINGS),
    "the dict of a module": lambda b, h, q, k: k < SETTINGS.__dict__["limit"],
    "the modules of the interpreter": lambda b, h, q, k: k < sys.modules["settings_that_hide"].limit,
    "a module imported by a text": lambda b, h, q, k: k < importlib.import_module("settings_that_hide").limit,
    "the globals of a function": lambda b, h, q, k: k < boxed.__globals__["FACTOR"],
    "random numbers of torch": lambda b, h, q, k: torch.rand(q.shape) < 0.5,
    "random numbers of numpy": lambda b, h, q, k: k < np.random.default_rng().integers(9),
    "random numbers in place": lambda b, h, q, k: torch.empty(q.shape).uniform_() < 0.5,
    "an array that holds more than its elements": lambda b, h, q, k: k < MASKED.max(),
    "a sparse tensor": lambda b, h, q, k: k < SPARSE.to_dense(),
    "a nested tensor": lambda b, h, q, k: k < NESTED.unbind()[0][0],
    "an array function made of another": lambda b, h, q, k: OF_A_FUNCTION(k),
    "what a function with a cache has kept": lambda b, h, q, k: k < kept_limits()[0],
}


@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_what_is_out_of_sight_is_unknown(name: str):
    assert isinstance(content(OUT_OF_SIGHT[name]), Untraceable)


def test_content_keeps_no_class_of_a_tensor_alive():
    class Table(torch.Tensor):
        pass

    tables = [torch.tensor([4]).as_subclass(Table)]
    found = content(lambda k: k < tables[0])
    ghosts = weakref.ref(Table), weakref.ref(tables[0])
    del Table
    tables.clear()
    gc.collect()
    assert not isinstance(found, Untraceable)
    assert [ghost() for ghost in ghosts] == [None, None]
