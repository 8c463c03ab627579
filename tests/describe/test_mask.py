"""Masks: pictures that can be checked by hand, the algebra, and what is refused."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import InitVar, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from regard import (
    Alibi,
    Blocks,
    Causal,
    Dilated,
    Documents,
    Global,
    KeyLengths,
    Mask,
    MaskFunction,
    Prefix,
    ProblemError,
    TensorMask,
    Tree,
    Window,
    attend,
    check_mask,
    draw,
    explain,
)
from regard.describe.mask import And, Not, is_made_of
from regard.describe.some_heads import MaskOfHeads
from regard.extend import spec
from regard.parallel.placed import PlacedMask

PICTURES = {
    "a window counts the query itself": (Causal() & Window(2), "█··· ██·· ·██· ··██"),
    "a window to both sides": (Window(2, 2), "██·· ███· ·███ ··██"),
    "a window to the right alone": (Window(None, 1), "█··· ██·· ███· ████"),
    "sinks stay in sight": (Causal() & (Window(1) | Prefix(1)), "█··· ██·· █·█· █··█"),
    "a prefix-LM sees its prefix both ways": (Causal() | Prefix(2), "██·· ██·· ███· ████"),
    "padding is never seen": (KeyLengths(torch.tensor([3])), "███· ███· ███· ███·"),
    "documents keep to themselves": (Documents(torch.tensor([7, 7, 5, 7])), "██·█ ██·█ ··█· ██·█"),
    "global tokens see and are seen": (Global([1]) | Window(1, 1), "██·· ████ ·██· ·█·█"),
    "a dilated pattern counts from the query": (Dilated(2), "█·█· ·█·█ █·█· ·█·█"),
    "blocks are squares": (Blocks(torch.tensor([[True, False], [False, True]]), 2), "██·· ██·· ··██ ··██"),
    "drafts see their ancestors": (Tree([-1, 0, 0]), "█··· ██·· ███· ██·█"),
    "a tree may have several roots": (Tree([None, None]), "█··· ██·· ███· ██·█"),
    "dense says True to keep": (TensorMask(torch.eye(4, dtype=torch.bool)), "█··· ·█·· ··█· ···█"),
    "a predicate": (MaskFunction(lambda b, h, q, k: q + k == 3), "···█ ··█· ·█·· █···"),
    "not": (~Causal(), "·███ ··██ ···█ ····"),
    "and, or, not together": (~(Causal() & ~Prefix(1)), "████ █·██ █··█ █···"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_mask_looks_as_drawn(name: str):
    mask, picture = PICTURES[name]
    # "several roots": token 3's siblings are not its ancestors, the context of two tokens is
    assert draw(mask, 4, 4).replace(" ", "").split("\n") == picture.split(" ")


def test_queries_are_at_the_end_of_the_keys_by_default():
    assert draw(Causal(), 1, 3) == "█ █ █"
    assert draw(Causal(), 1, 3, offset=0) == "█ · ·"


@pytest.mark.parametrize("which", [{"batch": 2}, {"head": 3}, {"batch": -1}, {"batch": None}, {"head": 0.5}])
def test_a_batch_row_or_a_head_that_a_mask_lacks_is_not_drawn(which: dict[str, Any]):
    mask = TensorMask(torch.ones(2, 3, 4, 4, dtype=torch.bool))
    with pytest.raises(ProblemError, match=r"^(batch|head) is "):
        draw(mask, 4, 4, **which)
    assert draw(Causal(), 4, 4, batch=7) == draw(Causal(), 4, 4)


def test_a_batch_row_and_a_head_can_be_drawn():
    layouts = torch.tensor([[[True]], [[False]]])
    assert draw(KeyLengths(torch.tensor([1, 2])), 1, 2, batch=1) == "█ █"
    assert draw(Blocks(layouts, 2), 1, 2, head=1) == "· ·"


def test_a_picture_of_more_pairs_than_anybody_reads_is_an_error():
    with pytest.raises(
        ProblemError, match=r"^draw of 1,000,000 queries and 1,000,000 keys: expected at most 16,777,216"
    ):
        draw(Causal(), 10**6, 10**6)
    assert len(draw(Causal(), 1, 10**5)) == 2 * 10**5 - 1


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(3), ~Prefix(2)])
def test_a_mask_is_not_a_truth_value(mask: Mask):
    with pytest.raises(ProblemError, match="neither true nor false"):
        bool(mask)


def test_a_mask_is_printed_as_it_is_written():
    assert repr(Causal() & (Window(1024) | Prefix(4))) == "Causal() & (Window(left=1024) | Prefix(size=4))"
    assert repr(~(Causal() | Prefix(1))) == "~(Causal() | Prefix(size=1))"
    assert repr(KeyLengths(torch.tensor([1, 2]))) == "KeyLengths(lengths=int64[2])"


def test_masks_without_tensors_are_equal_by_value():
    assert Causal() & Window(3) == Causal() & Window(3)
    assert Causal() & Window(3) != Causal() & Window(4)
    assert Causal() & Window(3) != Window(3) & Causal()
    assert len({Causal(), Causal(), Prefix(1)}) == 2


def test_masks_with_tensors_are_equal_by_the_content_of_the_tensors():
    lengths = torch.tensor([1, 2])
    assert KeyLengths(lengths) == KeyLengths(lengths.clone())
    assert KeyLengths(lengths) != KeyLengths(lengths + 1)
    assert KeyLengths(lengths) != KeyLengths(lengths.int())


def test_a_tensor_that_changed_makes_another_mask():
    lengths = torch.tensor([1, 2])
    before = KeyLengths(lengths).fingerprint()
    lengths += 1
    assert KeyLengths(lengths).fingerprint() != before


def test_tensors_of_inference_mode_are_distinguished_by_content():
    with torch.inference_mode():
        lengths = torch.tensor([1, 2])
        before, again = KeyLengths(lengths).fingerprint(), KeyLengths(lengths.clone()).fingerprint()
        lengths[0] = 5
    assert before == again
    assert KeyLengths(lengths).fingerprint() != before


WRONG = {
    "a window without itself": (lambda: Window(0), "at least 1"),
    "a window without limits": (lambda: Window(None), "limits nothing"),
    "a negative prefix": (lambda: Prefix(-1), "at least 0"),
    "integers in place of bools": (lambda: TensorMask(torch.ones(2, 2, dtype=torch.int64)), r"t\.bool\(\)"),
    "lengths in a list": (lambda: KeyLengths([3, 4]), r"such as torch\.tensor\(\[3, 4\]\)"),  # pyright: ignore[reportArgumentType]
    "float lengths": (lambda: KeyLengths(torch.tensor([1.0])), "integer tensor"),
    "lengths with two axes": (lambda: KeyLengths(torch.tensor([[1]])), "integer tensor"),
    "float documents": (lambda: Documents(torch.tensor([1.0])), "expected integers"),
    "a list of documents": (lambda: Documents([0, 1]), "is list: expected a tensor"),
    "a list for a dense mask": (lambda: TensorMask([[True]]), "is list: expected a tensor"),
    "a dilation of 0": (lambda: Dilated(0), "at least 1"),
    "a float layout": (lambda: Blocks(torch.zeros(2, 2), 2), "expected bool"),
    "blocks of 0": (lambda: Blocks(torch.zeros(2, 2, dtype=torch.bool), 0), "at least 1"),
    "a child before its parent": (lambda: Tree([1, -1]), "comes before its child"),
    "a float dense mask": (lambda: TensorMask(torch.zeros(2, 2)), "TensorBias"),
    "a window beyond 64 bits": (lambda: Window(2**70), "at most 9,223,372,036,854,775,807"),
    "a prefix beyond 64 bits": (lambda: Prefix(2**70), "at most 9,223,372,036,854,775,807"),
    "a prefix that is true": (lambda: Prefix(True), "True: expected a whole number of keys"),
    "a window of a bool of torch": (lambda: Window(torch.tensor(True)), "expected a whole number of tokens"),
    "a prefix of text": (lambda: Prefix("4"), "expected a whole number of keys, or an integer tensor"),
    "a dilation beyond 64 bits": (lambda: Dilated(2**63), "at most 9,223,372,036,854,775,807"),
    "a global position beyond 64 bits": (lambda: Global([2**70]), "at most 9,223,372,036,854,775,807"),
    "one global position": (lambda: Global(3), "expected an iterable of positions"),
    "a global position that is text": (lambda: Global(["a"]), "'a': expected a whole number"),
    "text for global positions": (lambda: Global("12"), "expected an iterable of positions"),
    "a global position between tokens": (lambda: Global([1.7]), "1.7: expected a whole number"),
    "a float tensor of global positions": (lambda: Global(torch.tensor([1.5])), "1.5: expected a whole number"),
    "a global position beyond the keys": (lambda: draw(Global([99]), 4, 9), "position 99, and the call has 9 keys"),
    "a global position before the keys": (lambda: draw(Global([-1]), 4, 9), "position -1, and the call has 9 keys"),
    "blocks of a part of a token": (lambda: Blocks(torch.zeros(2, 2, dtype=torch.bool), 2.5), "2.5: expected a whole"),
    "a tree of nothing": (lambda: Tree([]), "at least one"),
    "a tree of one number": (lambda: Tree(3), "expected the parent of each draft token"),
    "a parent between tokens": (lambda: Tree([-1, 0.5]), "0.5: expected a whole number"),
    "a tree that starts at text": (lambda: Tree([-1], start="1"), "Tree.start. is '1'"),
    "a dense mask that starts at text": (
        lambda: TensorMask(torch.zeros(2, 2, dtype=torch.bool), offset="5"),
        "TensorMask.offset. is '5': expected a whole number",
    ),
    "a predicate of one shape": (
        lambda: draw(MaskFunction(lambda b, h, q, k: torch.ones(5, 9, dtype=torch.bool)), 2, 2),
        "returned bool .5, 9. for positions that broadcast to .2, 2.",
    ),
    "a predicate of one axis too many": (
        lambda: draw(MaskFunction(lambda b, h, q, k: (q >= k)[None]), 2, 2),
        "returned bool .1, 2, 2. for positions that broadcast to .2, 2.",
    ),
    "a predicate that is none": (lambda: MaskFunction(3), "expected a function"),  # pyright: ignore[reportArgumentType]
    "a predicate of two": (
        lambda: MaskFunction(lambda i, j: i >= j),
        r"<lambda>\(i, j\), called with four arguments: too many",
    ),
    "a predicate of five": (lambda: MaskFunction(lambda b, h, q, k, w: q - k < w), "a required argument: 'w'"),
    "a predicate of names": (lambda: MaskFunction(lambda b, h, q, k, *, w: q - k < w), "a required argument: 'w'"),
    "a predicate of floats": (lambda: draw(MaskFunction(lambda b, h, q, k: q * 1.0), 2, 2), "expected a bool tensor"),
    "a tensor combined": (lambda: Causal() & torch.ones(2, 2), "TensorMask"),  # pyright: ignore[reportOperatorIssue]
    "too few lengths": (
        lambda: draw(KeyLengths(torch.tensor([1])) & KeyLengths(torch.tensor([1, 2])), 2, 2),
        "batch rows",
    ),
    "too few documents": (lambda: draw(Documents(torch.tensor([0])), 2, 2), "an id for every position"),
    "a layout too small": (lambda: draw(Blocks(torch.zeros(1, 1, dtype=torch.bool), 2), 3, 3), "covers positions"),
    "a tree that is not the end": (lambda: draw(Tree([-1], start=0), 2, 2), "last keys"),
    "dense rows": (lambda: draw(TensorMask(torch.zeros(3, 4, dtype=torch.bool)), 2, 4), "3 rows"),
    "dense rows from another position": (
        lambda: draw(TensorMask(torch.zeros(3, 4, dtype=torch.bool), offset=0), 2, 4, offset=2),
        "rows for queries at 0 to 2, and the call has queries at 2 to 3",
    ),
    "a picture of less than nothing": (lambda: draw(Causal(), -1, 3), "queries is -1: expected at least 0"),
    "a picture of words": (lambda: draw(Causal(), 3, "3"), "keys is '3': expected a whole number"),
    "a picture from beyond 64 bits": (lambda: draw(Causal(), 3, 3, offset=2**70), "at most 9,223,372,036,854,775,807"),
    "dense columns": (lambda: draw(TensorMask(torch.zeros(2, 3, dtype=torch.bool)), 2, 4), "3 columns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused(name: str):
    make, says = WRONG[name]
    with pytest.raises(ProblemError, match=says):
        make()


@pytest.mark.parametrize("number", [np.int64(3), np.int32(3), np.uint8(3)], ids=lambda n: type(n).__name__)
def test_whole_numbers_of_any_kind_are_taken_as_pythons(number: Any):
    layout = torch.ones(3, 3, dtype=torch.bool)
    taken = [Window(number, number), Prefix(number), Dilated(number), Blocks(layout, number), Global([number])]
    taken += [TensorMask(layout, offset=number), Tree([-1], start=number)]
    plain = [Window(3, 3), Prefix(3), Dilated(3), Blocks(layout, 3), Global([3]), TensorMask(layout, offset=3)]
    assert taken == [*plain, Tree([-1], start=3)]
    assert Alibi(number) == Alibi(3)


def test_a_tree_takes_an_array_as_it_takes_a_tensor():
    assert Tree(np.array([-1, 0, 0])) == Tree(torch.tensor([-1, 0, 0])) == Tree([-1, 0, 0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_sizes_may_be_of_any_integer_type(dtype: torch.dtype):
    sizes, q = torch.tensor([2, 5]), torch.randn(2, 1, 7, 8)
    for word in (KeyLengths, Prefix):
        assert torch.equal(attend(q, q, q, mask=word(sizes.to(dtype))), attend(q, q, q, mask=word(sizes)))


def test_windows_may_be_as_wide_as_positions_go():
    wide = sys.maxsize
    for mask in (Window(wide), Window(wide, wide), Prefix(wide)):
        assert draw(mask, 3, 3) == draw(Prefix(3), 3, 3)
    assert draw(Dilated(wide), 3, 3) == draw(Dilated(3), 3, 3)


def test_a_mask_without_data_is_refused_before_it_is_looked_at():
    q = torch.randn(2, 1, 3, 8)
    without = KeyLengths(torch.empty(2, dtype=torch.int64, device="meta"))
    for call, keys in ((attend, q), (explain, q), (explain, q.to("meta"))):
        with pytest.raises(ProblemError, match="without data, and masks are read"):
            call(keys, keys, keys, mask=without)
    assert attend(*(q.to("meta"),) * 3, mask=without).is_meta  # nothing is looked at


def test_a_predicate_is_asked_once_for_what_it_does_not_look_at():
    from regard.describe.mask import CallSizes

    sizes = CallSizes(batch=3, heads=5, queries=2, keys=2, offset=0)
    assert MaskFunction(lambda b, h, q, k: q >= k).bind(sizes).broadcast_shape() == (1, 1)
    assert MaskFunction(lambda b, h, q, k: q >= k + b).bind(sizes).broadcast_shape() == (3, 1)
    assert MaskFunction(lambda b, h, q, k: torch.tensor([True, False]).repeat(3)[h] & (q >= k)).bind(
        sizes
    ).broadcast_shape() == (1, 5)


class Ahead:
    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return k >= q

    def of_two(self, q: Any, k: Any) -> torch.Tensor:
        return k >= q


def from_two(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(fn)
    def of_four(*given: Any) -> torch.Tensor:
        return fn(*given[2:])

    return of_four


PREDICATES = {
    "a default to spare": lambda b, h, q, k, w=0: k >= q + w,
    "any number": lambda *given: given[3] >= given[2],
    "an object": Ahead(),
    "a partial": functools.partial(lambda w, b, h, q, k: k >= q + w, 0),
    "a function in the clothes of another": from_two(lambda q, k: k >= q),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_whatever_takes_four_is_a_predicate(name: str):
    assert draw(MaskFunction(PREDICATES[name]), 3, 3) == draw(~Causal() | MaskFunction(lambda b, h, q, k: q == k), 3, 3)


def test_a_predicate_that_cannot_be_inspected_is_taken_at_its_word():
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(torch.ge)
    assert callable(MaskFunction(torch.ge).fn)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_a_predicate_of_tables_is_not_called_for_positions_that_are_not_there(
    batch: int, queries: int, keys: int, backend: str | None
):
    rows, columns = torch.ones(batch, queries, dtype=torch.bool), torch.ones(keys, dtype=torch.bool)
    mask = MaskFunction(lambda b, h, q, k: rows[b, q] & columns[k])
    q, k = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8)
    assert torch.equal(attend(q, k, k, mask=mask, offset=0, backend=backend), torch.zeros_like(q))


def test_a_method_of_two_is_no_predicate():
    with pytest.raises(ProblemError, match=r"of_two\(q: Any, k: Any\)"):
        MaskFunction(Ahead().of_two)


def test_a_predicate_that_is_made_while_torch_traces_is_tabulated():
    def causal(q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, mask=MaskFunction(lambda *given: given[2] >= given[3]))

    q = torch.randn(1, 2, 5, 8)
    traced = torch.compile(causal, fullgraph=True, backend="eager")(q)
    assert torch.equal(traced, causal(q))


def test_sizes_that_are_no_sizes_are_refused():
    for word, size in ((Window, 3.5), (Window, "3"), (Dilated, 2.5), (KeyLengths, 7)):
        with pytest.raises(ProblemError, match="expected a"):
            word(size)


def test_a_class_in_place_of_a_spec_is_refused():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ProblemError, match=r"mask is the class Causal: .*; did you mean Causal\(...\)\?$"):
        attend(q, q, q, mask=Causal)


def branching(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return q >= k
    return q == k


@pytest.mark.parametrize("fn", [branching, lambda b, h, q, k: k > 1 and q >= k], ids=["if", "and"])
def test_a_condition_on_a_tensor_of_positions_is_answered_with_operators(fn: Any):
    q = torch.randn(1, 2, 5, 8)
    for call in (lambda: attend(q, q, q, mask=Causal() & MaskFunction(fn)), lambda: draw(MaskFunction(fn), 3, 3)):
        with pytest.raises(ProblemError, match=r"a condition of `if`.* & \| ~, and .* torch.where\.$") as caught:
            call()
        assert "ambiguous" in str(caught.value.__cause__)


def test_another_error_of_a_function_stays_what_it_is():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        attend(q, q, q, mask=MaskFunction(lambda b, h, q, k: torch.ones(2, 3) + torch.ones(5) > q))
    assert not isinstance(caught.value, ProblemError)


@pytest.mark.parametrize("kind", [KeyLengths, Prefix])
@pytest.mark.parametrize("queries", [1, 5])
def test_negative_lengths_are_refused_when_a_call_reads_them(kind: Any, queries: int):
    q, k = torch.randn(2, 2, queries, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(ProblemError, match=r"batch row 1 of a mask has length -1: expected 0 or more keys"):
        attend(q, k, k, mask=kind(torch.tensor([3, -1])))


@pytest.mark.parametrize("kind", [KeyLengths, Prefix, Documents])
def test_a_tensor_that_is_negated_when_it_is_read_has_its_negated_elements(kind: Any):
    x = torch.randn(3, 1, 3, 8)
    lazy, plain = cast(Any, torch)._neg_view(torch.tensor([-1, -1, -2])), torch.tensor([1, 1, 2])
    assert torch.equal(attend(x, x, x, mask=kind(lazy)), attend(x, x, x, mask=kind(plain)))


def test_lengths_above_the_keys_keep_all_keys():
    q = torch.randn(2, 2, 5, 8)
    assert torch.equal(
        attend(q, q, q, mask=KeyLengths(torch.tensor([3, 9]))), attend(q, q, q, mask=KeyLengths(torch.tensor([3, 5])))
    )


def test_a_padding_mask_of_two_axes_is_answered_with_the_missing_axes():
    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(ProblemError, match=r"2 rows and the call has 5 queries\. .*TensorMask\(t\[:, None, None\]\)"):
        attend(q, q, q, mask=TensorMask(torch.ones(2, 5, dtype=torch.bool)))
    with pytest.raises(ProblemError, match=r"has 3 rows and the call has 5 queries\.$"):
        attend(q, q, q, mask=TensorMask(torch.ones(3, 5, dtype=torch.bool)))


@pytest.mark.parametrize(("queries", "keys"), [(130, 65), (129, 64), (200, 199)])
@pytest.mark.parametrize("position", [5, 50, 62])
def test_global_tokens_are_seen_by_queries_before_the_first_key(queries: int, keys: int, position: int):
    q, k = torch.randn(1, 1, queries, 8), torch.randn(1, 1, keys, 8)
    expected = attend(q, k, k, mask=Global((position,)), backend="reference64")
    torch.testing.assert_close(attend(q, k, k, mask=Global((position,))), expected)


def _of(**methods: Any) -> Mask:
    """A mask of a class of a user with these methods."""
    return spec(type("Own", (Mask,), {"__module__": __name__, "keep": lambda self, b, h, q, k: k <= q} | methods))()


KEPT = {
    "floats": (lambda self, b, h, q, k: (k - q).float(), "keep returned torch.float32; expected a bool tensor"),
    "integers": (lambda self, b, h, q, k: k - q, "keep returned torch.int64; expected a bool tensor"),
    "nothing": (lambda self, b, h, q, k: None, "keep returned NoneType; expected a bool tensor"),
    "another shape": (
        lambda self, b, h, q, k: torch.ones(3, 5, dtype=torch.bool),
        r"keep returned bool \[3, 5\] for positions that broadcast to .*: expected that shape, or one that broadcasts",
    ),
}
CALLS = {"draw": lambda m: draw(m, 4, 4), "attend": lambda m: attend(*[torch.ones(1, 1, 4, 8)] * 3, mask=m)}
COMBINED = {"alone": lambda m: m, "and": lambda m: m & Window(9), "or": lambda m: Window(2) | m, "not": lambda m: ~m}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", KEPT)
def test_the_keep_of_a_mask_gives_a_bool_tensor_of_the_shape_of_its_positions(name: str, combined: Any, call: Any):
    keep, says = KEPT[name]
    with pytest.raises(ProblemError, match=rf"^Own\(\): {says}"):
        call(combined(_of(keep=keep)))


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("always", [True, False])
def test_a_keep_may_be_one_truth_value_for_all_positions(combined: Any, always: bool):
    x = torch.randn(1, 1, 4, 8)
    plain = combined(TensorMask(torch.full((4, 4), always)))
    found = combined(_of(keep=lambda self, b, h, q, k: always))
    assert torch.equal(attend(x, x, x, mask=found), attend(x, x, x, mask=plain))
    assert draw(found, 4, 4) == draw(plain, 4, 4)


def test_a_combined_mask_of_whole_positions_is_a_truth_value():
    assert (Causal() & ~Prefix(1)).keep(0, 0, 3, 2) is True


BOUNDS = {
    "a number": 3,
    "nothing": None,
    "truth values": (True, True),
    "floats": (np.ones(1), np.ones(1)),
    "another length": (np.ones(999, dtype=bool), np.ones(999, dtype=bool)),
    "tensors": (torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)),
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_the_bounds_of_a_mask_are_two_arrays_with_an_element_for_each_rectangle(bounds: Any, combined: Any):
    mask, x = combined(_of(bounds=lambda self, r: bounds)), torch.ones(1, 1, 4, 8)
    says = r"^Own\(\): bounds returned .*; expected a tuple \(some, all\) of two bool arrays of shape \[1\]"
    with pytest.raises(ProblemError, match=says):
        attend(x, x, x, mask=mask)


SIGNATURES = {
    "nothing": (lambda self, r: None, "None"),
    "one axis": (lambda self, r: r.q0 - r.k0, r"int64 \[1\]"),
    "three axes": (lambda self, r: np.zeros((len(r.b), 1, 1), np.int64), r"int64 \[1, 1, 1\]"),
    "another length": (lambda self, r: np.zeros((999, 1), np.int64), r"int64 \[999, 1\]"),
    "floats": (lambda self, r: np.zeros((len(r.b), 1)), r"float64 \[1, 1\]"),
    "a tensor": (lambda self, r: torch.zeros(len(r.b), 1, dtype=torch.int64), r"tensor\(.*\)"),
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_of_a_mask_is_an_array_of_integers_with_a_row_for_each_rectangle(name: str, combined: Any):
    signature, got = SIGNATURES[name]
    mask, x = combined(_of(signature=signature)), torch.ones(1, 1, 4, 8)
    says = rf"^Own\(\): signature returned {got}; expected an array of integers \[rectangles, n\] = \[1, n\]"
    for of_heads in (mask, MaskOfHeads(mask, (0,)), PlacedMask(mask, ((0, 4, 1, 1),), ((0, 4, 1, 1),))):
        with pytest.raises(ProblemError, match=says):
            attend(x, x, x, mask=of_heads)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint64])
def test_a_signature_may_be_of_any_type_of_integer(dtype: Any):
    """A tile of which the mask keeps nothing, and one whose signature is 0, are told apart."""
    sides = {
        "bounds": lambda self, r: (r.k0 < r.q1, r.k1 - 1 <= r.q0),
        "signature": lambda self, r: (r.q0 - r.k0)[:, None].astype(dtype),
    }
    mask = _of(**sides) | _of(keep=lambda self, b, h, q, k: k % 64 == 5, signature=lambda self, r: (r.k0 % 64)[:, None])
    check_mask(mask, queries=256, keys=256, batch=1, heads=1)
    q = torch.randn(1, 1, 256, 8)
    expected = attend(q, q, q, mask=Causal() | MaskFunction(lambda b, h, q, k: k % 64 == 5))
    torch.testing.assert_close(attend(q, q, q, mask=mask), expected)


SHAPES = {
    "nothing": (lambda self: None, "returned None"),
    "an attribute": ((1, 1), r"is \(1, 1\)"),
    "one size": (lambda self: (1,), r"returned \(1,\)"),
    "three sizes": (lambda self: (1, 1, 1), r"returned \(1, 1, 1\)"),
    "a text": (lambda self: "11", "returned '11'"),
}


@pytest.mark.parametrize("call", [*CALLS.values(), check_mask], ids=[*CALLS, "check_mask"])
@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
@pytest.mark.parametrize("name", SHAPES)
def test_the_broadcast_shape_of_a_mask_is_a_method_that_returns_two_ints(name: str, combined: Any, call: Any):
    shape, says = SHAPES[name]
    with pytest.raises(
        ProblemError, match=rf"^Own\(\): broadcast_shape {says}; expected a method that returns two ints"
    ):
        call(combined(_of(broadcast_shape=shape)))


def test_a_broadcast_shape_may_be_a_list_or_have_numbers_of_numpy():
    x = torch.randn(1, 1, 4, 8)
    for shape in ([1, 1], (np.int64(1), np.int64(1))):
        found = attend(x, x, x, mask=_of(broadcast_shape=lambda self, shape=shape: shape))
        assert torch.equal(found, attend(x, x, x, mask=Causal()))


@spec
class PerHead(Mask):
    """A window per head, one wider in each further batch row; without `broadcast_shape`."""

    widths: torch.Tensor

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return q - k < self.widths[h] + b


@spec
class Scaled(Mask):
    """It takes methods of tensors as given, also where all positions are the same."""

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (q - k).float() < (b + h).float() + 1


@spec
class NoKeep(Mask):
    size: int


@spec
class OfTwo(Mask):
    def keep(self, q: Any, k: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return q >= k


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_mask_of_a_user_may_differ_between_heads_and_rows_without_saying_so(backend: str | None):
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    own = PerHead(torch.tensor([1, 2, 3, 4]))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    i, j = torch.arange(9)[:, None], torch.arange(9)
    same = TensorMask(own.keep(b, h, i, j))
    for mask, expected in ((own, same), (~own & Causal(), ~same & Causal()), (own | Prefix(2), same | Prefix(2))):
        out = attend(q, k, v, mask=mask, backend=backend)
        torch.testing.assert_close(out, attend(q, k, v, mask=expected, backend=backend))
    assert draw(own, 3, 3, batch=1, head=1) == draw(TensorMask(same.mask[1, 1, :3, :3]), 3, 3)
    assert "mask PerHead(widths=int64[4])," in str(explain(q, k, v, mask=own))


def test_a_picture_gives_tensors_to_a_mask_of_a_user():
    assert draw(Scaled(), 2, 2, head=1) == "█ █\n█ █"


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (NoKeep(3), r"NoKeep is a mask without keep: define keep\(self, b, h, q, k\)"),
        (OfTwo() & Causal(), r"OfTwo\.keep takes \(q, k\): expected keep\(self, b, h, q, k\)"),
    ],
)
def test_a_mask_of_a_user_that_is_no_mask_says_what_it_lacks(mask: Mask, says: str):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ProblemError, match=says):
        attend(q, q, q, mask=mask)


@pytest.mark.parametrize("name", ["data", "real"])
def test_an_attribute_of_a_head_that_is_a_tensor_counts_as_its_use(name: str):
    widths, q = torch.tensor([1, 3, 5, 9]), torch.randn(2, 4, 9, 8)
    own = MaskFunction(lambda b, h, q, k: q - k < widths[getattr(h, name).reshape(h.shape)])
    i, j = torch.arange(9)[:, None], torch.arange(9)
    expected = attend(q, q, q, mask=TensorMask(i - j < widths[:, None, None]))
    torch.testing.assert_close(attend(q, q, q, mask=own), expected)


@spec
class Written(Mask):
    """A condition on b, h, q and k that is evaluated; `keep` names none of them."""

    text: str

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return eval(self.text)


@spec
class Looked(Mask):
    """Its `keep` reads the head without its name."""

    names: str = "b h"

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return q - k < vars()[self.names.split()[1]] + 1


@pytest.mark.parametrize("own", [Written("q - k < h + 1"), Looked()])
def test_a_head_is_used_also_where_keep_does_not_name_it(own: Mask):
    q = torch.randn(1, 4, 9, 8)
    i, j = torch.arange(9)[:, None], torch.arange(9)
    expected = attend(q, q, q, mask=TensorMask(i - j < torch.arange(4)[:, None, None] + 1))
    torch.testing.assert_close(attend(q, q, q, mask=own), expected)


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


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("offset", [-3, 0, 7, 60])
def test_a_mask_of_one_row_is_that_of_every_query_whatever_its_offset(offset: int, backend: str | None):
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 10, 8)
    kept = torch.rand(1, 10) > 0.5
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=kept)
    torch.testing.assert_close(attend(q, k, k, mask=TensorMask(kept, offset=offset), backend=backend), expected)
