"""Classes and functions outside regard: a change of what they carry is noticed, and no cache keeps them alive."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from regard import Causal, Documents, MaskFunction, attend
from regard.describe.mask import Mask
from regard.describe.spec import spec
from regard.dispatch import choose
from regard.dispatch import plan_cache as known
from regard.plan import tiling

Q, K, V = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)


pytestmark = pytest.mark.usefixtures("no_plans")


def near(limit: int) -> type[Mask]:
    """A class of masks, as a notebook's cell makes it each time that it is run."""

    @spec
    class Near(Mask):
        def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
            return k < limit

        def bounds(self, r: Any) -> Any:
            return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)

    return Near


def test_a_class_that_is_corrected_is_another_mask():
    torch.compiler.reset()
    wrong, corrected = near(9), near(4)
    assert wrong() == wrong()
    assert wrong().fingerprint().is_cacheable
    for call in (attend, torch.compile(attend, backend="eager", fullgraph=True)):
        for kind, length in ((wrong, 9), (corrected, 4), (wrong, 9)):
            expected = attend(Q, K[:, :, :length], V[:, :, :length])
            assert torch.allclose(call(Q, K, V, mask=kind()), expected, atol=1e-6)
    wrong.keep = lambda self, b, h, q, k: k < 7  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.allclose(attend(Q, K, V, mask=wrong()), attend(Q, K[:, :, :7], V[:, :, :7]), atol=1e-6)


def test_a_class_that_has_the_name_of_ours_is_no_other_than_itself():
    torch.compiler.reset()
    kind = near(4)
    expected = attend(Q, K, V, mask=Causal())

    namesake = spec(type("Causal", (Mask,), {"keep": kind.keep, "bounds": kind.bounds}))
    for call in (attend, torch.compile(attend, backend="eager", fullgraph=True)):
        assert torch.allclose(call(Q, K, V, mask=namesake()), call(Q, K[:, :, :4], V[:, :, :4]), atol=1e-6)
        assert torch.allclose(call(Q, K, V, mask=Causal()), expected, atol=1e-6)
    assert namesake() != Causal()


def test_nothing_is_kept_for_a_function_that_cannot_be_followed():
    limits = iter([4, 4, 7, 7, 9, 9, 5, 5, 3, 3])
    now = [0]

    def mask(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return k < now[0] + 0 * len(repr(limits))

    mask(0, 0, Q[0, 0, 0, 0], Q[0, 0, 0, 0])
    choose._plans.clear()
    tiling._schedules.clear()
    for now[0] in limits:
        found = attend(Q, K, V, mask=MaskFunction(mask))
        assert len(choose._plans) == len(tiling._schedules) == len(known._calls) == 0
        assert torch.allclose(found, attend(Q, K[:, :, : now[0]], V[:, :, : now[0]]), atol=1e-6)
        choose._plans.clear()
        tiling._schedules.clear()
        known._calls.clear()


def test_a_function_of_a_notebook_is_seen_to_change():
    scope: dict[str, Any] = {"x": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1])}
    exec("def mask(b, h, i, j): return x[i] == x[j]", scope)
    before = attend(Q, K, V, mask=MaskFunction(scope["mask"]))
    assert torch.allclose(before, attend(Q, K, V, mask=Documents(scope["x"])), atol=1e-6)
    scope["x"] = scope["x"].flip(0)
    after = attend(Q, K, V, mask=MaskFunction(scope["mask"]))
    assert torch.allclose(after, attend(Q, K, V, mask=Documents(scope["x"])), atol=1e-6)
    assert not torch.equal(before, after)


def test_fingerprints_and_plans_keep_no_class_alive():
    kind = near(4)
    attend(Q, K, V, mask=kind())
    fingerprint, ghost = kind().fingerprint(), weakref.ref(kind)
    del kind
    gc.collect()
    assert ghost() is None
    assert repr(fingerprint) == "Near(...)"


FACTOR = 4


class Undecided(Mask):
    """The bounds of what keeps the first keys, nothing known of how many."""

    def bounds(self, r: Any) -> Any:
        return np.ones(len(r.b), dtype=bool), np.zeros(len(r.b), dtype=bool)


@spec
class Scaled(Undecided):
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", self.size * FACTOR)

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return k < self.limit  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


class Settings:
    """Callable, and with state."""

    limit = 4

    def __call__(self) -> int:
        return self.limit


@spec
class Carrying(Undecided):
    held: Any

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return k < (self.held() if isinstance(self.held, Settings) else int(self.held[0]))


def made_with_a_list() -> Any:
    held = [4]
    return Carrying(held), lambda: held.insert(0, 7)


def made_with_a_dict() -> Any:
    held = {0: 4}
    return Carrying(held), lambda: held.update({0: 7})


def made_with_an_array() -> Any:
    held = np.array([4])
    return Carrying(held), lambda: held.fill(7)


def made_with_tensors_in_a_tuple() -> Any:
    held = (torch.tensor(4),)
    return Carrying(held), lambda: held[0].fill_(7)


def made_with_an_object() -> Any:
    held = Settings()
    return Carrying(held), lambda: setattr(held, "limit", 7)


def made_with_more_than_its_fields() -> Any:
    mask = Scaled(1)
    return mask, lambda: object.__setattr__(mask, "limit", 7)


MAKERS = [
    made_with_a_list,
    made_with_a_dict,
    made_with_an_array,
    made_with_tensors_in_a_tuple,
    made_with_an_object,
    made_with_more_than_its_fields,
]


@pytest.mark.parametrize("make", MAKERS)
def test_words_of_others_may_carry_anything(make: Any):
    mask, change = make()
    for length in (4, 7):
        assert torch.allclose(attend(Q, K, V, mask=mask), attend(Q, K[:, :, :length], V[:, :, :length]), atol=1e-6)
        change()


@pytest.mark.parametrize("make", [MAKERS[0], *(pytest.param(m, marks=pytest.mark.exhaustive) for m in MAKERS[1:])])
def test_words_of_others_may_carry_anything_into_a_graph(make: Any):
    torch.compiler.reset()
    mask, change = make()
    calls = (attend, torch.compile(attend, backend="eager", fullgraph=True))
    for length in (4, 7):
        for call in calls:
            expected = attend(Q, K[:, :, :length], V[:, :, :length])
            assert torch.allclose(call(Q, K, V, mask=mask), expected, atol=1e-6)
        change()


def test_words_of_others_that_differ_beside_their_fields_are_two(monkeypatch: pytest.MonkeyPatch):
    few = Scaled(1)
    monkeypatch.setitem(globals(), "FACTOR", 7)
    many = Scaled(1)
    assert few != many
    assert few.limit != many.limit  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    for mask, length in ((few, 4), (many, 7)):
        expected = attend(Q, K[:, :, :length], V[:, :, :length])
        assert torch.allclose(attend(Q, K, V, mask=mask), expected, atol=1e-6)


def test_tensors_in_a_tuple_are_not_kept_alive():
    held = torch.tensor(4)
    mask = Carrying((held,))
    attend(Q, K, V, mask=mask)
    ghost = weakref.ref(held)
    del held, mask
    gc.collect()
    assert ghost() is None
