"""Calls whose batch rows start at different positions: `offset` with a position for each row."""

import sys
from collections.abc import Callable

import pytest
import torch

from regard import (
    Alibi,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    T5Bias,
    TensorBias,
    TensorMask,
    Tree,
    Window,
    attend,
    attend_state,
    explain,
)
from regard.describe.bias import Sum
from regard.describe.mask import And
from regard.extend import spec

FIRST = torch.tensor([0, 4, -1, 7])
TABLE = torch.randn(32, 4)
MASKS = {
    "causal": Causal(),
    "window": Causal() & Window(3),
    "sinks": Causal() & (Window(2) | Prefix(1)),
    "not": ~Window(3, 2),
    "lengths": Causal() & KeyLengths(torch.tensor([5, 9, 2, 11])),
    "dilated": Causal() & Dilated(2),
    "function": MaskFunction(lambda b, h, q, k: (q + k) % 3 == b % 3),
    "a tensor": Causal() & TensorMask(torch.rand(4, 1, 5, 11) > 0.3),
    "as wide as positions go": Window(sys.maxsize, sys.maxsize),
    "none": None,
}


def row(mask, b: int):
    """The mask of one row."""
    if isinstance(mask, KeyLengths):
        return KeyLengths(mask.lengths[b : b + 1])
    if isinstance(mask, TensorMask):
        return TensorMask(mask.mask[b : b + 1])
    if isinstance(mask, MaskFunction):
        return MaskFunction(lambda _, h, q, k: (q + k) % 3 == b % 3)
    return type(mask)(row(mask.a, b), row(mask.b, b)) if hasattr(mask, "b") else mask


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(4, 4, 5, 8), torch.randn(4, 2, 11, 8), torch.randn(4, 2, 11, 8)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_each_row_is_a_call_at_its_own_offset(name: str, backend: str | None, qkv):
    q, k, v = qkv
    mask = MASKS[name]
    together = attend_state(q, k, v, mask=mask, offset=FIRST, backend=backend)
    for b, first in enumerate(FIRST.tolist()):
        one = (t[b : b + 1] for t in qkv)
        alone = attend_state(*one, mask=row(mask, b), offset=first, backend=backend)
        torch.testing.assert_close(together.out[b : b + 1], alone.out)
        torch.testing.assert_close(together.lse[b : b + 1], alone.lse)


@pytest.mark.parametrize("bias", [Alibi(4), T5Bias(TABLE), TensorBias(torch.randn(5, 11)), Alibi(4) + T5Bias(TABLE)])
def test_a_bias_is_of_the_positions_of_each_row(bias, qkv):
    q, k, v = qkv
    together = attend(q, k, v, mask=Causal(), bias=bias, offset=FIRST)
    for b, first in enumerate(FIRST.tolist()):
        alone = attend(*(t[b : b + 1] for t in qkv), mask=Causal(), bias=bias, offset=first)
        torch.testing.assert_close(together[b : b + 1], alone)


def test_a_table_with_an_offset_of_its_own_is_read_at_the_positions_of_each_row(qkv):
    tables = torch.randn(17, 11, requires_grad=True), torch.rand(4, 1, 17, 11) > 0.3
    bias, mask = TensorBias(tables[0], offset=-2), Causal() & TensorMask(tables[1], offset=-2)
    together = attend(*qkv, mask=mask, bias=bias, offset=FIRST)
    alone = [
        attend(
            *(t[b : b + 1] for t in qkv),
            mask=Causal() & TensorMask(tables[1][b : b + 1], offset=-2),
            bias=bias,
            offset=first,
        )
        for b, first in enumerate(FIRST.tolist())
    ]
    torch.testing.assert_close(together, torch.cat(alone))
    grads = (torch.autograd.grad(out.square().sum(), tables[0])[0] for out in (together, torch.cat(alone)))
    torch.testing.assert_close(*grads)


def test_a_table_with_an_offset_of_its_own_has_a_row_for_each_position(qkv):
    few = torch.ones(5, 11, dtype=torch.bool)
    with pytest.raises(ProblemError, match="has rows for queries at -1 to 3, and the call has queries at -1 to 11"):
        attend(*qkv, mask=TensorMask(few, offset=-1), offset=FIRST)
    with pytest.raises(ProblemError, match="rows with an offset must cover the queries"):
        attend(*qkv, bias=TensorBias(few.float(), offset=-1), offset=FIRST)


def test_gradients_are_those_of_each_row(qkv):
    leaves = [t.requires_grad_() for t in qkv]
    attend(*leaves, mask=Causal() & Window(4), offset=FIRST).square().sum().backward()
    together = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    for b, first in enumerate(FIRST.tolist()):
        attend(*(t[b : b + 1] for t in leaves), mask=Causal() & Window(4), offset=first).square().sum().backward()
    for ours, t in zip(together, leaves, strict=True):
        torch.testing.assert_close(ours, t.grad)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_gradients_of_a_table_in_half_precision_are_rounded_once(backend: str | None):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 17, 8), torch.randn(2, 2, 601, 8), torch.randn(2, 2, 601, 8)
    grads = []
    for table in (TABLE.bfloat16(), TABLE.bfloat16().double()):
        leaf = table.requires_grad_()
        attend(q, k, v, bias=T5Bias(leaf), offset=torch.tensor([500, 3]), backend=backend).square().sum().backward()
        grads.append(leaf.grad.double())
    torch.testing.assert_close(*grads, rtol=0.01, atol=0.01 * float(grads[1].abs().max()))


def test_documents_and_global_tokens_are_found_at_the_positions_of_each_row(qkv):
    q, k, v = qkv
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    first = torch.tensor([0, 4, 1, 6])
    for mask in (Causal() & Documents(ids), Window(2) | Global([0, 3])):
        together = attend(q, k, v, mask=mask, offset=first)
        for b, start in enumerate(first.tolist()):
            alone = attend(*(t[b : b + 1] for t in qkv), mask=mask, offset=start)
            torch.testing.assert_close(together[b : b + 1], alone)


def test_a_compiled_graph_serves_other_rows(qkv):
    q, k, v = qkv
    compiled = torch.compile(
        lambda q, k, v, first: attend(q, k, v, mask=Causal(), offset=first), fullgraph=True, backend="eager"
    )
    for first in (FIRST, FIRST + 2):
        torch.testing.assert_close(compiled(q, k, v, first), attend(q, k, v, mask=Causal(), offset=first))


def test_native_runs_it(qkv):
    plan = explain(*qkv, mask=Causal() & Window(3), offset=FIRST)
    assert plan.backend == "native"


def test_a_tree_and_other_counts_are_refused(qkv):
    with pytest.raises(ProblemError, match="a tree is at the last keys of the call"):
        attend(*qkv, mask=Tree([-1, 0, 0, 0, 0]), offset=FIRST)
    with pytest.raises(ProblemError, match=r"offset is torch.int64 \[3\] for 4 batch rows"):
        attend(*qkv, mask=Causal(), offset=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("first", [[-1, 0, 0, 0], [0, 1, 2, 9]])
def test_a_table_with_an_offset_of_its_own_must_cover_the_positions_of_all_rows(first: list[int], qkv):
    q, k, v = qkv
    rows = TensorBias(torch.randn(q.shape[2] + 8, k.shape[2]), offset=0)
    with pytest.raises(ProblemError, match="rows with an offset must cover the queries"):
        attend(q, k, v, bias=rows, offset=torch.tensor(first))
    later = TensorBias(torch.randn(q.shape[2] + 10, k.shape[2]), offset=-1)  # covers none of a call at 0 but these
    assert attend(q, k, v, bias=later, offset=torch.tensor(first)).shape[:3] == q.shape[:3]


@spec
class PrefixLM(Prefix):
    """All see the prefix, and after it the mask is causal."""

    def keep(self, b, h, q, k):
        return super().keep(b, h, q, k) | (q >= k)

    def bounds(self, r):
        return Mask.bounds(self, r)

    def signature(self, r):
        return Mask.signature(self, r)

    def intervals(self, sizes):
        return None


@spec
class Placed(TensorBias):
    """A value per key, less at each distance."""

    def value(self, b, h, q, k):
        return super().value(b, h, q, k) - abs(q - k)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_subclass_is_of_the_positions_of_each_row(backend: str | None, qkv):
    words = {"mask": PrefixLM(2), "bias": Placed(torch.randn(1, 11)), "backend": backend}
    together = attend(*qkv, **words, offset=FIRST)
    for b, first in enumerate(FIRST.tolist()):
        alone = attend(*(t[b : b + 1] for t in qkv), **words, offset=first)
        torch.testing.assert_close(together[b : b + 1], alone)


@spec
class Padding(TensorMask):
    """A table with a name of its own."""


@spec
class Named(TensorBias):
    """A table with a name of its own."""


@spec
class Near(TensorMask):
    """A table of the queries of the call, and no keys far before or after the query."""

    def keep(self, b, h, q, k):
        return super().keep(b, h, q, k) & (abs(q - k) < 5)

    def bounds(self, r):
        return Mask.bounds(self, r)

    def signature(self, r):
        return Mask.signature(self, r)


@spec
class Shown(Near):
    """One table of all positions, for every row."""

    def bind(self, sizes):
        shown = self.mask[..., sizes.offset + 1 : sizes.positions + 1, :]
        return Near(shown).bind(sizes)


@spec
class Both(And):
    """Two masks."""


@spec
class Fading(TensorBias):
    """A table of the queries of the call, less at each distance."""

    def value(self, b, h, q, k):
        return super().value(b, h, q, k) - abs(q - k)


@spec
class Added(Sum):
    """Two biases."""


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("table", [(5, 11), (4, 1, 5, 11), (1, 11)])
def test_a_subclass_of_a_table_that_defines_nothing_is_that_table(table: tuple[int, ...], backend: str | None, qkv):
    kept, added = torch.rand(table) > 0.3, torch.randn(table)
    named = attend(*qkv, mask=Causal() & Padding(kept), bias=Named(added), offset=FIRST, backend=backend)
    plain = attend(*qkv, mask=Causal() & TensorMask(kept), bias=TensorBias(added), offset=FIRST, backend=backend)
    torch.testing.assert_close(named, plain)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("shape", [(5, 11), (4, 1, 5, 11), (4, 4, 1, 11)])
@pytest.mark.parametrize("kind", [Near, lambda table: Both(Causal(), Padding(table))])
def test_a_table_with_methods_of_its_own_is_that_of_each_row(
    kind: Callable[..., Mask], shape: tuple[int, ...], backend: str | None, qkv
):
    kept, added = torch.rand(shape) > 0.3, torch.randn(shape, requires_grad=True)

    def of(*rows: int):
        mask, bias = (t[list(rows)] if t.ndim == 4 else t for t in (kept, added))
        return {"mask": kind(mask), "bias": Added(Alibi(4), Fading(bias)), "backend": backend}

    together = attend(*qkv, **of(0, 1, 2, 3), offset=FIRST)
    alone = [attend(*(t[b : b + 1] for t in qkv), **of(b), offset=first) for b, first in enumerate(FIRST.tolist())]
    torch.testing.assert_close(together, torch.cat(alone))
    grads = (torch.autograd.grad(out.square().sum(), added)[0] for out in (together, torch.cat(alone)))
    torch.testing.assert_close(*grads)


def test_a_table_that_is_cut_for_a_call_is_cut_for_each_row(qkv):
    mask = Shown(torch.rand(13, 11) > 0.3)
    together = attend(*qkv, mask=mask, offset=FIRST)
    for b, first in enumerate(FIRST.tolist()):
        alone = attend(*(t[b : b + 1] for t in qkv), mask=mask, offset=first)
        torch.testing.assert_close(together[b : b + 1], alone)


@pytest.mark.parametrize("kind", [Padding, Near])
def test_the_table_of_a_subclass_fits_the_call_of_the_user(kind: type[TensorMask], qkv):
    with pytest.raises(ProblemError, match=r"bool\[13, 11\]\) has 13 rows and the call has 5 queries"):
        attend(*qkv, mask=kind(torch.ones(13, 11, dtype=torch.bool)), offset=FIRST)


def test_a_compiled_call_has_the_table_of_each_row(qkv):
    words = {"mask": Near(torch.rand(5, 11) > 0.3), "bias": Fading(torch.randn(5, 11))}
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, **words, offset=FIRST), backend="eager")
    torch.testing.assert_close(compiled(*qkv), attend(*qkv, **words, offset=FIRST))


def test_a_table_of_a_subclass_may_have_no_rows():
    q = torch.randn(0, 4, 5, 8)
    table = torch.ones(5, 5, dtype=torch.bool)
    words = {"mask": Near(table), "bias": Fading(table.float())}
    assert attend(q, q, q, **words, offset=torch.zeros(0, dtype=torch.int64)).shape == q.shape
