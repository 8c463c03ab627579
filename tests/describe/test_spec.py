"""Words as values: outlines and spellings."""

import copy
import pickle
import weakref
from dataclasses import field
from typing import Any, cast

import pytest
import torch
from hypothesis import given

from regard import (
    Alibi,
    Bias,
    Causal,
    Documents,
    MaskFunction,
    Prefix,
    ProblemError,
    Rope,
    T5Bias,
    TensorBias,
    Tree,
    Window,
    attend,
    check_mask,
)  # fmt: skip
from regard.describe import mask as mask_of
from regard.describe import tensors
from regard.describe.fingerprint import INTERNED
from regard.describe.mask import Mask, Positions
from regard.describe.mask_by_rule import Dilated
from regard.describe.serialized import deserialize
from regard.describe.spec import Spec, spec
from regard.describe.tensors import content_key, derived, derived_view, unchanged
from tests.expressions import biases, masks


def contains_a_function(part: Spec) -> bool:
    return isinstance(part, MaskFunction) or any(contains_a_function(p) for p in part.parts() if isinstance(p, Spec))


@given(mask=masks(13, 13), bias=biases(13, 13))
def test_a_spec_that_is_serialised_and_read_is_the_same_spec(mask: Spec, bias: Bias | None):
    for written in (mask, bias):
        if written is None or contains_a_function(written):
            continue
        carried: list[torch.Tensor] = []
        numbers: list[int] = []
        text = written.serialize(carried, numbers)
        assert deserialize(text, carried, numbers) == written
        assert [id(t) for t in carried] == [id(t) for t in written.tensors()]


def test_a_serialised_form_by_hand():
    ids = torch.arange(3)
    carried: list[torch.Tensor] = []
    numbers: list[int] = []
    assert (Causal() & Documents(ids)).serialize(
        carried, numbers
    ) == '["And", ["Causal"], ["Documents", {"tensor": 0}]]'
    assert carried[0] is ids
    assert Tree([-1, 0]).serialize(carried, numbers) == '["Tree", {"tuple": [{"number": 0}, {"number": 1}]}, null]'
    assert numbers == [-1, 0]


def test_a_class_that_this_process_does_not_know_is_named():
    with pytest.raises(
        ProblemError, match=r"of the class Chunked, which this process does not know: import the module"
    ):
        deserialize('["And", ["Causal"], ["Chunked", {"number": 0}]]', [], [3])


@spec
class Labelled(Mask):
    """A text, a tuple, and a field by name only."""

    label: str
    tables: tuple[Any, ...] = ()
    size: int = field(default=3, kw_only=True)

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> torch.Tensor:
        return cast(torch.Tensor, q // self.size == k // self.size)


@pytest.mark.parametrize("text", ["", 'say "hi"', "back\\slash\\", "a\nline\tand\0", 'é"\u2028'])
def test_any_text_is_serialised_and_read(text: str):
    made, carried, numbers = Labelled(text, size=2), list[torch.Tensor](), list[int]()
    assert deserialize(made.serialize(carried, numbers), carried, numbers) == made
    check_mask(made, queries=9, keys=11)

    def run(x: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, mask=Labelled(text, size=2))

    x = torch.randn(1, 1, 9, 4)
    traced: Any = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(x), run(x))


def test_the_parts_of_a_tuple_are_those_of_the_spec():
    ids, table = torch.arange(3), torch.ones(2)
    made, carried, numbers = Labelled("", (table, (Documents(ids), 1))), list[torch.Tensor](), list[int]()
    made.serialize(carried, numbers)
    assert [id(t) for t in made.tensors()] == [id(t) for t in carried] == [id(table), id(ids)]
    same = Labelled("", (torch.zeros(2), (Documents(ids), 1)))
    assert same.form() == made.form() != Labelled("", (torch.zeros(3), (Documents(ids), 1))).form()
    assert same.form().is_cacheable
    assert same != made
    assert Labelled("", (Shifted(4), Causal())).unregistered() is Shifted
    assert not Labelled("", (iter([1]),)).form().is_cacheable


def test_a_fingerprint_keeps_no_tensor():
    fingerprint = (Causal() & Documents(torch.arange(3))).fingerprint()
    assert fingerprint.text == "Causal() & Documents(ids=int64[3])"

    def holds(parts: tuple[object, ...]) -> bool:
        return any(isinstance(p, torch.Tensor) or holds(getattr(p, "parts", ())) for p in parts)

    assert not holds(fingerprint.parts)


def test_functions_are_known_by_what_they_do():
    def even(b, h, q, k):
        return (q + k) % 2 == 0

    assert MaskFunction(even) == MaskFunction(even)
    assert MaskFunction(even) != MaskFunction(lambda b, h, q, k: (q + k) % 3 == 0)
    assert repr(MaskFunction(even)) == "MaskFunction(even)"


def test_biases_are_printed_as_they_are_written():
    assert repr(Alibi(4) + T5Bias(torch.zeros(32, 4), bidirectional=False)) == (
        "Alibi(heads=4) + T5Bias(table=float32[32, 4], bidirectional=False)"
    )
    assert repr(TensorBias(torch.zeros(2, 3))) == "TensorBias(tensor=float32[2, 3])"


@pytest.mark.parametrize("copied", [Rope(8), Rope(8, base=float("10000")), pickle.loads(pickle.dumps(Rope(8)))])
def test_a_default_is_not_written_whichever_object_has_its_value(copied: Rope):
    assert repr(copied) == "Rope(dim=8)"


def test_what_is_derived_of_a_tensor_is_made_once_and_again_when_it_changed():
    made: list[int] = []
    tensor = torch.zeros(3)

    def total(t: torch.Tensor) -> float:
        made.append(1)
        return float(t.sum())

    assert derived(tensor, "total", total) == derived(tensor, "total", total) == 0
    tensor += 1
    assert derived(tensor, "total", total) == 3
    assert len(made) == 2


def test_specs_of_different_kinds_are_not_equal():
    assert Window(4) != Alibi(4)


def test_tensors_on_a_device_are_known_by_identity_and_version(monkeypatch: pytest.MonkeyPatch):
    for question in ("_is_plain", "_is_on_host"):
        monkeypatch.setattr(tensors, question, lambda t: False)
    lengths = torch.arange(3)
    before = content_key(lengths)
    assert content_key(lengths) == before != content_key(lengths.clone())
    lengths += 1
    assert content_key(lengths) != before
    before = content_key(lengths)
    lengths.data = torch.arange(3)  # which increments no version
    assert content_key(lengths) != before


def test_freed_memory_that_a_tensor_on_a_device_gets_again_is_other_content(monkeypatch: pytest.MonkeyPatch):
    for question in ("_is_plain", "_is_on_host"):
        monkeypatch.setattr(tensors, question, lambda t: False)
    table, addresses, keys = torch.zeros(1024), set[int](), set[Any]()
    for number in range(50):
        table.data = torch.full((1024,), float(number))
        addresses.add(table.data_ptr())
        keys.add(content_key(table))
        assert content_key(table) in keys
    assert len(keys) == 50 > len(addresses)


def test_the_view_of_a_tensor_on_a_device_is_one_tensor_until_its_memory_is_another(monkeypatch: pytest.MonkeyPatch):
    for question in ("_is_plain", "_is_on_host"):
        monkeypatch.setattr(tensors, question, lambda t: False)

    def first(t: torch.Tensor) -> torch.Tensor:
        return t[:1]

    table = torch.zeros(3, 2)
    kept = derived_view(table, "first", first)
    assert derived_view(table, "first", first) is kept
    table += 1
    assert torch.equal(derived_view(table, "first", first), torch.ones(1, 2))
    table.data = torch.full((3, 2), 5.0)
    assert torch.equal(derived_view(table, "first", first), torch.full((1, 2), 5.0))
    table.data = table.data.view(2, 3)  # in the same memory
    assert derived_view(table, "first", first).shape == (1, 3)


def test_a_tensor_is_read_once_within_unchanged(monkeypatch: pytest.MonkeyPatch):
    read: list[torch.Tensor] = []
    digest = tensors.digest
    monkeypatch.setattr(tensors, "digest", lambda t: read.append(t) or digest(t))
    ids = torch.arange(3)
    with unchanged(), unchanged():
        assert content_key(ids) == content_key(ids)
    assert len(read) == 1
    assert content_key(ids) == content_key(ids)
    assert len(read) == 3


def test_a_tensor_that_was_expanded_is_read_where_it_has_elements():
    row = torch.tensor([[True, False, True]])
    assert content_key(row.expand(5, 3)) != content_key(row)
    assert content_key(row.expand(5, 3)) == content_key(row.clone().expand(5, 3))
    assert content_key(row.expand(5, 3)) != content_key((~row).expand(5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_spec_is_identified_by_the_element_of_a_tensor_that_was_expanded(dtype: torch.dtype):
    one, same, other = (TensorBias(torch.full((1,), x).to(dtype).expand(3)) for x in (1.0, 1.0, 2.0))
    assert one == same
    assert one != other


def test_a_mask_never_gets_the_fingerprint_of_another_whose_parts_are_gone():
    """Addresses of fingerprints are used again when their owners are gone; more masks than are kept make them go."""
    early = [Window(n) for n in range(5, 25)]
    assert all(mask.constant() for mask in early)
    for n in [*range(100, 1400), *range(5, 25)]:
        (Window(n) | Prefix(1)).constant()
    assert all((mask | Prefix(1)).constant() for mask in early)
    del early
    for n in range(25, 45):
        found = (Window(n) | Prefix(1)).constant()
        assert str(found) == f"Window(left={n}) | Prefix(size=1)"


def test_a_mask_that_is_combined_again_is_the_mask_of_before_and_equals_one_made_apart():
    first, again = (Causal() & Window(32) for _ in range(2))
    assert first is again
    apart = mask_of.And(Causal(), Window(32))
    assert apart is not first
    assert apart == first
    assert hash(apart) == hash(first)
    for other in (pickle.loads(pickle.dumps(first)), copy.copy(first), copy.deepcopy(first)):
        assert other == first
        assert (other | Prefix(2)) == (first | Prefix(2))


@pytest.mark.parametrize(
    "other",
    [
        Causal() | Window(32), Window(32) & Causal(), Causal() & Window(33), Causal() & Window(32, 1),
        Causal() & Window(None, 32), Causal() & Prefix(32), Causal() & Dilated(32), ~(Causal() & Window(32)),
    ],
    ids=str,
)  # fmt: skip
def test_masks_that_differ_in_kind_order_or_field_are_combined_apart(other: Mask):
    for _ in range(2):
        assert (Causal() & Window(32)) != other
        assert str(Causal() & Window(32)) == "Causal() & Window(left=32)"


def test_numbers_that_equal_ints_stay_what_they_are():
    assert (Causal() & Window(1)) == (Causal() & Window(torch.tensor(1)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="Window"):
        Window(cast(Any, 1.5))
    for _ in range(2):
        with pytest.raises(ProblemError, match="Window"):
            Window(0)


class Shifted(Window):
    """A class that was not made with `@spec`, whose masks differ in what is no field."""

    by = 0

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> torch.Tensor:
        return super().keep(b, h, q, k + self.by)


@spec
class Named(Mask):
    """A mask of a class that is none of regard's."""

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> torch.Tensor:
        return cast(torch.Tensor, k == q)


def test_masks_of_the_callers_classes_are_never_shared():
    near, far = Shifted(4), Shifted(4)
    object.__setattr__(far, "by", 3)
    assert cast(Any, near & Causal()).a is near
    assert cast(Any, far & Causal()).a is far
    one = Named()
    assert cast(Any, one & Causal()).a is one
    assert cast(Any, Named() & Causal()).a is not one


class Undecorated(Mask):
    """A class made of an abstract one, without `@spec`."""

    def keep(self, b: Positions, h: Positions, q: Positions, k: Positions) -> torch.Tensor:
        return cast(torch.Tensor, k <= q)


@pytest.mark.parametrize("made", [Undecorated(), Shifted(4)])
def test_a_class_that_is_not_registered_is_refused_by_its_own_name(made: Mask):
    q = torch.zeros(1, 1, 3, 2)
    name = type(made).__name__
    for mask in (made, ~made, made | Causal(), Causal() & (Window(2) | made)):
        with pytest.raises(ProblemError, match=rf"^mask is or contains {name}, a class that is not registered"):
            attend(q, q, q, mask=mask)
        assert name in repr(mask)


def test_masks_with_tensors_are_never_shared_nor_kept():
    ids = torch.tensor([0, 0, 1])
    made = Documents(ids)
    both = Causal() & made
    assert cast(Any, both).b is made
    assert (Causal() & Documents(ids)) is not both
    gone = weakref.ref(both)
    del both, made
    assert gone() is None


def test_a_bounded_number_of_combined_masks_is_kept():
    for n in range(1, 3 * INTERNED):
        assert str(Causal() & Window(n)) == f"Causal() & Window(left={n})"
    assert len(mask_of._pairs) <= INTERNED
    assert all(
        (made.a.constant(), made.b.constant()) == (a, b) for made, a, b in cast(Any, list(mask_of._pairs.values()))
    )


def test_combined_masks_can_be_traced_after_they_were_made():
    def run(x: torch.Tensor) -> torch.Tensor:
        return attend(x, x, x, mask=Causal() & (Window(8) | Prefix(2)))

    x = torch.randn(1, 2, 33, 16)
    compiled: Any = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), run(x))


def test_a_field_with_a_default_is_inherited():
    @spec
    class Narrowed(Window):
        by: int = 2

    assert Narrowed(8) == Narrowed(left=8, right=Window(8).right, by=2)


@pytest.mark.parametrize("base", [Mask, Bias])
@pytest.mark.parametrize("name", ["parts", "tensors", "form", "constant", "bind", "fingerprint", "_fingerprint"])
def test_a_field_that_would_hide_a_method_is_refused(base: type[Spec], name: str):
    kind = type("Own", (base,), {"__annotations__": {name: int}, "__module__": __name__})
    with pytest.raises(ProblemError, match=rf"the field '{name}' of Own would hide \w+\.{name}, which regard uses"):
        spec(kind)


class NoSpec:
    size: int


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, r"^spec\(3\): expected a class"),
        (Causal(), r"^spec\(Causal\(\)\): expected a class"),
        (lambda: 0, r"^spec\(<lambda>\): expected a class"),
        (NoSpec, "^@spec above NoSpec: expected a class derived from Mask, Bias or Score"),
        (Causal, "^@spec above Causal, which is a spec already"),
    ],
)
def test_what_is_no_class_of_a_mask_is_no_spec(given: Any, says: str):
    with pytest.raises(ProblemError, match=says):
        spec(given)
