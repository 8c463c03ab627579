"""Subclasses of regard's masks: each is what its own `keep` says, whatever its parent is known for."""

from dataclasses import InitVar, field
from typing import Any, cast

import pytest
import torch

from regard import Causal, Mask, MaskFunction, Prefix, TensorMask, Tree, Window, attend
from regard.describe.mask import And, Not, is_made_of
from regard.extend import spec


class Undecided:
    """What every mask may have: nothing is known of a rectangle."""

    def bounds(self, r: Any) -> Any:
        return Mask.bounds(cast(Mask, self), r)

    def signature(self, r: Any) -> Any:
        return Mask.signature(cast(Mask, self), r)

    def intervals(self, sizes: Any) -> None:
        return None


@spec
class CausalTable(Undecided, TensorMask):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return TensorMask.keep(self, b, h, q, k) & (q >= k)


@spec
class CausalTree(Undecided, Tree):
    by: int = 1

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return Tree.keep(self, b, h, q, k) & (q - k != self.by)


@spec
class WindowPerHead(MaskFunction):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return MaskFunction.keep(self, b, h, q, k) & (q - k < h + 1)


@spec
class CausalNot(Undecided, Not):
    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return Not.keep(self, b, h, q, k) & (q >= k)


@spec
class OddAnd(Undecided, And):
    by: int = 0

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return And.keep(self, b, h, q, k) & (k % 2 != self.by)


@spec
class Hidden(TensorMask):
    """A table of what is hidden."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask", ~self.mask)


@spec
class Triangle(TensorMask):
    def __init__(self, queries: int, keys: int) -> None:
        super().__init__(torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries))


@spec
class JoinedAnd(Undecided, And):
    """It derives another mask of its two."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "both", self.a & self.b)

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        both: Mask = self.__dict__["both"]
        return both.keep(b, h, q, k)


@spec
class JoinedField(Undecided, And):
    """The same in a field that no caller gives."""

    both: Mask = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "both", self.a & self.b)

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.both.keep(b, h, q, k)


@spec
class HiddenAndCounted(Hidden):
    """Derives an attribute of a field that it changes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kept", self.mask.clone())

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        kept: torch.Tensor = self.__dict__["kept"]
        return TensorMask.keep(self, b, h, q, k) & TensorMask(kept, self.offset).keep(b, h, q, k)


@spec
class Moved(Undecided, TensorMask):
    """The argument of a `__post_init__` is known to the constructor alone."""

    start: InitVar[int] = 0

    def __post_init__(self, start: int = 0) -> None:
        super().__post_init__()
        object.__setattr__(self, "first", start)

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return TensorMask.keep(self, b, h, q, k) & (k >= self.__dict__["first"])


TABLE = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.4
DERIVED: dict[str, tuple[Mask, Any]] = {
    "a table": (CausalTable(TABLE), lambda b, h, i, j: TABLE & (i >= j)),
    "a tree": (CausalTree([-1, 0, 0, 1]), lambda b, h, i, j: Tree([-1, 0, 0, 1], 5).keep(b, h, i, j) & (i - j != 1)),
    "a function": (WindowPerHead(lambda b, h, q, k: q >= k), lambda b, h, i, j: (i >= j) & (i - j < h + 1)),
    "not": (CausalNot(Window(2, 2)), lambda b, h, i, j: i - j >= 2),
    "and": (OddAnd(Causal(), Window(5)), lambda b, h, i, j: (i >= j) & (i - j < 5) & (j % 2 == 1)),
    "and, of a table": (
        OddAnd(TensorMask(TABLE), Window(5), by=1),
        lambda b, h, i, j: TABLE & (i - j < 5) & (j % 2 == 0),
    ),
    "a table that is made": (Hidden(~TABLE), lambda b, h, i, j: TABLE),
    "a table of sizes": (Triangle(7, 9), lambda b, h, i, j: i >= j),
    "and, with a mask derived": (
        JoinedAnd(Tree([-1, 0, 0, 1]), Causal()),
        lambda b, h, i, j: Tree([-1, 0, 0, 1], 5).keep(b, h, i, j),
    ),
    "and, with a field derived": (
        JoinedField(Tree([-1, 0, 0, 1]), Causal()),
        lambda b, h, i, j: Tree([-1, 0, 0, 1], 5).keep(b, h, i, j),
    ),
    "a table that is made, and what is derived": (HiddenAndCounted(~TABLE), lambda b, h, i, j: TABLE),
    "a table with an argument that is no field": (Moved(TABLE, start=2), lambda b, h, i, j: TABLE & (j >= 2)),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", DERIVED)
def test_a_subclass_of_a_mask_is_what_its_own_keep_says(name: str, backend: str | None):
    own, keep = DERIVED[name]
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    i, j = torch.arange(2, 9)[:, None], torch.arange(9)
    exact = keep(b, h, i, j)
    for mask, kept in ((own, exact), (own & Window(3), exact & (i - j < 3))):
        expected = attend(q, k, v, mask=TensorMask(kept), backend="reference")
        torch.testing.assert_close(attend(q, k, v, mask=mask, backend=backend), expected)


def test_masks_are_identified_by_their_own_class():
    assert is_made_of((Causal() & ~Window(3)) | Prefix(1), (Causal, Window, Prefix))
    assert not is_made_of(Causal() & CausalTable(TABLE), (Causal, TensorMask))
    assert not is_made_of(OddAnd(Causal(), Causal()), (Causal,))
    assert not is_made_of(CausalNot(Causal()), (Causal,))
