"""Masks: pictures that can be checked by hand, the algebra, and what is refused."""

import sys
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
    draw,
    explain,
)

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


def test_sizes_that_are_no_sizes_are_refused():
    for word, size in ((Window, 3.5), (Window, "3"), (Dilated, 2.5), (KeyLengths, 7)):
        with pytest.raises(ProblemError, match="expected a"):
            word(size)


def test_a_class_in_place_of_a_spec_is_refused():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ProblemError, match=r"mask is the class Causal: .*; did you mean Causal\(...\)\?$"):
        attend(q, q, q, mask=Causal)


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


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("offset", [-3, 0, 7, 60])
def test_a_mask_of_one_row_is_that_of_every_query_whatever_its_offset(offset: int, backend: str | None):
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 10, 8)
    kept = torch.rand(1, 10) > 0.5
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=kept)
    torch.testing.assert_close(attend(q, k, k, mask=TensorMask(kept, offset=offset), backend=backend), expected)
