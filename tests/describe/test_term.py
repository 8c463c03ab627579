"""The bounds of masks that are terms are sound, whatever the term: random terms against every pair."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from regard.describe.mask import CallSizes, Rectangles
from regard.describe.mask_by_term import MaskTerm
from regard.describe.serialized import deserialize
from regard.describe.term import Captured, Constant, Op, Term, Variable, evaluate

SIZES = CallSizes(2, 2, 150, 140, 0)
TABLES = {
    "row": torch.randint(-9, 9, (150,), generator=torch.Generator().manual_seed(0)),
    "sorted": torch.arange(150) // 31,
    "floats": torch.randn(150, generator=torch.Generator().manual_seed(1)),
    "bools": torch.rand(150, 150, generator=torch.Generator().manual_seed(2)) < 0.02,
}
UNARY = ("neg", "abs")
BINARY = ("add", "sub", "mul", "minimum", "maximum", "rsub")
COMPARED = ("ge", "gt", "le", "lt", "eq", "ne")
JOINED = ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or")


@st.composite
def integers(draw: DrawFn, depth: int = 3) -> Term:
    kind = draw(st.sampled_from(("variable", "constant", "table", "unary", "binary", "divided", "clamped", "chosen")))
    if depth == 0 or kind == "variable":
        return Variable(draw(st.sampled_from("bhqkqk")))
    inner = integers(depth - 1)
    if kind == "constant":
        return Constant(draw(st.integers(-40, 160)), "int64")
    if kind == "table":
        index = Op(
            "clamp_max", "int64", Op("clamp_min", "int64", draw(inner), Constant(0, "int64")), Constant(149, "int64")
        )
        return Op("index", "int64", Captured(TABLES[draw(st.sampled_from(("row", "sorted")))]), index)
    if kind == "unary":
        return Op(draw(st.sampled_from(UNARY)), "int64", draw(inner))
    if kind == "divided":
        name = draw(st.sampled_from(("floor_divide", "remainder", "div_trunc")))
        return Op(name, "int64", draw(inner), Constant(draw(st.sampled_from((-7, 1, 3, 16, 64))), "int64"))
    if kind == "clamped":
        return Op(draw(st.sampled_from(("clamp_min", "clamp_max"))), "int64", draw(inner), Constant(20, "int64"))
    if kind == "chosen":
        return Op("where", "int64", draw(truths(depth - 1)), draw(inner), draw(inner))
    return Op(draw(st.sampled_from(BINARY)), "int64", draw(inner), draw(inner))


@st.composite
def truths(draw: DrawFn, depth: int = 3) -> Term:
    kind = draw(st.sampled_from(("compared", "floats", "bools", "joined", "not")))
    if kind == "bools":
        index = (
            Op(
                "clamp_max",
                "int64",
                Op("clamp_min", "int64", draw(integers(1)), Constant(0, "int64")),
                Constant(149, "int64"),
            )
            for _ in range(2)
        )
        return Op("index", "bool", Captured(TABLES["bools"]), *index)
    if kind == "floats":
        index = Op(
            "clamp_max",
            "int64",
            Op("clamp_min", "int64", draw(integers(1)), Constant(0, "int64")),
            Constant(149, "int64"),
        )
        value = Op("mul", "float32", Op("index", "float32", Captured(TABLES["floats"]), index), draw(integers(1)))
        return Op(draw(st.sampled_from(COMPARED)), "bool", value, Constant(0.5, "float32"))
    if depth == 0 or kind == "compared":
        a, b = (draw(integers(2)) for _ in range(2))
        return Op(draw(st.sampled_from(COMPARED)), "bool", a, b)
    if kind == "not":
        return Op(draw(st.sampled_from(("bitwise_not", "logical_not"))), "bool", draw(truths(depth - 1)))
    return Op(draw(st.sampled_from(JOINED)), "bool", draw(truths(depth - 1)), draw(truths(depth - 1)))


def pairs(mask: MaskTerm) -> np.ndarray:
    """Every pair, bool [batch, heads, queries, keys]."""
    b, h, q, k = (torch.arange(size) for size in SIZES[:4])
    kept = mask.keep(b[:, None, None, None], h[:, None, None], q[:, None], k)
    return kept.expand(SIZES[:4]).numpy()


@settings(max_examples=150, deadline=None)
@given(truths())
def test_bounds_are_sound(term: Term):
    mask = MaskTerm(term).bind(SIZES)
    assert isinstance(mask, MaskTerm)
    kept = pairs(mask)
    b, h, row, column = (x.reshape(-1) for x in np.indices((2, 2, 5, 4)))
    q0, k0 = row * 32, column * 40
    r = Rectangles(b, h, q0, np.minimum(q0 + 32, 150), k0, np.minimum(k0 + 40, 140))
    some, every = mask.bounds(r)
    signatures = mask.signature(r)
    seen: dict[tuple[int, ...], np.ndarray] = {}
    for i in range(len(b)):
        tile = kept[b[i], h[i], r.q0[i] : r.q1[i], r.k0[i] : r.k1[i]]
        assert some[i] or not tile.any()
        assert tile.all() or not every[i]
        same = seen.setdefault((*signatures[i].tolist(), *tile.shape), tile)
        assert np.array_equal(same, tile)


@settings(max_examples=30, deadline=None)
@given(truths())
def test_a_term_is_the_same_after_it_was_serialised(term: Term):
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    again = deserialize(MaskTerm(term).serialize(tensors, numbers), tensors, numbers)
    assert again == MaskTerm(term)


@pytest.mark.parametrize(
    ("term", "open_"),
    [
        (Op("ge", "bool", Variable("q"), Variable("k")), 5),
        (Op("eq", "bool", Op("index", "int64", Captured(torch.arange(320) // 64), Variable("q")),
            Op("index", "int64", Captured(torch.arange(320) // 64), Variable("k"))), 0),
    ],
)  # fmt: skip
def test_bounds_decide_what_they_can(term: Term, open_: int):
    mask = MaskTerm(term).bind(CallSizes(1, 1, 320, 320, 0))
    row, column = (x.reshape(-1) * 64 for x in np.indices((5, 5)))
    zero = np.zeros_like(row)
    some, every = mask.bounds(Rectangles(zero, zero, row, row + 64, column, column + 64))
    assert (some & ~every).sum() == open_


def test_a_number_of_one_element_takes_part_in_the_promotion_of_types():
    term = Op("mul", "float64", Variable("score"), Captured(torch.tensor(2.0, dtype=torch.float64)))
    assert evaluate(term, {"score": torch.ones(3)}).dtype == torch.float64
