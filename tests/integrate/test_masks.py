"""Masks read back into words keep the pairs that transformers' own dense masks keep."""

import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import masking_utils as theirs

from regard import Causal
from regard.integrate import mask_function
from regard.integrate import transformers as ours
from regard.integrate.attention_function import attention
from regard.integrate.layer_mask import LayerMask

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3], [0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 4]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4, 0, 1, 0, 1, 0]])
SPANS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1], [-1, -1, -1, -1, 2, 2, 2, -1, -1, -1, -1]])
LEFT = torch.tensor([2, 0])


def halves(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A function of a user's own."""
    return (q + k) % 2 == 0


def first_tokens(b: Any, h: Any, q: Any, k: Any) -> Any:
    """One that holds for scalars only: it branches by shape."""
    return k < torch.stack([q.new_tensor(3), q.new_tensor(4)])[b] if q.ndim == 0 else q.new_zeros(3)


# name: (function, its words, whether transformers would vmap it)
FUNCTIONS: dict[str, tuple[Any, str, bool]] = {
    "causal": (theirs.causal_mask_function, "Causal()", False),
    "everything": (theirs.bidirectional_mask_function, "None", False),
    "window": (theirs.sliding_window_causal_mask_function(4), "Causal() & Window(left=4)", False),
    "window of one": (theirs.sliding_window_causal_mask_function(1), "Causal() & Window(left=1)", False),
    "window wider than the text": (theirs.sliding_window_causal_mask_function(11), "Causal()", False),
    "window to both sides": (
        theirs.sliding_window_bidirectional_mask_function(3),
        "Window(left=4, right=4)",
        False,
    ),
    "chunks": (
        theirs.chunked_causal_mask_function(4, LEFT),
        "Causal() & Documents(ids=int64[2, 11])",
        False,
    ),
    "packed": (
        theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(IDS)),
        "Causal() & Documents(ids=int64[2, 11])",
        False,
    ),
    "spans": (
        theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(SPANS)),
        "Causal() | Documents(ids=int64[2, 11]) & TensorMask(mask=bool[2, 1, 1, 11])",
        False,
    ),
    "or with everything": (
        theirs.or_masks(theirs.causal_mask_function, theirs.bidirectional_mask_function),
        "None",
        False,
    ),
    "a function that broadcasts": (
        theirs.and_masks(theirs.causal_mask_function, halves),
        "Causal() & MaskFunction(<lambda>)",
        False,
    ),
    "a function for scalars": (
        theirs.or_masks(theirs.causal_mask_function, first_tokens),
        "Causal() | TensorMask(mask=bool[2, 1, 11, 11])",
        True,
    ),
}

# A packed mask counts positions from the start of each document, from 5.23 on; the order of the two changed with 5.24.
counted_anew: Any = getattr(theirs, "remap_positions_for_packed_sequence", None)
if counted_anew is not None:
    documents = "Documents(ids=int64[2, 11])"
    in_documents, images = theirs.packed_sequence_mask_function(IDS), theirs.blockwise_overlay(IDS % 2 - 1)
    inner = {
        "windows": (
            counted_anew(theirs.sliding_window_causal_mask_function(2), POSITIONS),
            f"Causal() & Window(left=2) & {documents}",
        ),
        "chunks": (
            counted_anew(theirs.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)), POSITIONS),
            f"Causal() & {documents} & {documents}",
        ),
        "images": (
            theirs.or_masks(counted_anew(theirs.causal_mask_function, POSITIONS), images),
            f"(Causal() | {documents} & TensorMask(mask=bool[2, 1, 1, 11])) & {documents}",
        ),
        "positions that do not run on": (
            counted_anew(theirs.causal_mask_function, POSITIONS.flip(1)),
            f"MaskFunction(<lambda>) & {documents}",
        ),
    }
    for which, (function, words) in inner.items():
        FUNCTIONS[f"packed, {which}"] = theirs.and_masks(function, in_documents), words, False
        FUNCTIONS[f"packed before 5.24, {which}"] = theirs.and_masks(in_documents, function), words, False


def masked(function: Any, queries: int, keys: int, **options: Any) -> LayerMask:
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": queries, "kv_length": keys, "mask_function": function}
    made = ours.mask(**arguments, **options)
    assert isinstance(made, LayerMask)
    assert made.shape == (2, 1, queries, keys)
    return made


def dense(function: Any, queries: int, keys: int, **options: Any) -> Tensor:
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": queries, "kv_length": keys, "mask_function": function}
    table = theirs.sdpa_mask(**arguments, **options, allow_is_causal_skip=False)
    assert table is not None
    return table


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_is_read_into_words(name: str):
    function, words, by_vmap = FUNCTIONS[name]
    made = masked(function, 11, 11, use_vmap=by_vmap)
    assert repr(made.mask) == words
    assert torch.equal(made.dense(), dense(function, 11, 11, use_vmap=by_vmap))


@pytest.mark.parametrize(
    "place",
    [
        {"queries": 1, "keys": 11, "q_offset": 10, "kv_offset": 0},
        {"queries": 3, "keys": 11, "q_offset": 8, "kv_offset": 0},
        {"queries": 3, "keys": 11, "q_offset": 4, "kv_offset": 0},  # a static cache, not yet full
        {"queries": 3, "keys": 6, "q_offset": 8, "kv_offset": 5},  # a sliding cache, which has forgotten 5
        {"queries": 1, "keys": 4, "q_offset": 10, "kv_offset": 7},
    ],
)
@pytest.mark.exhaustive(per="name")
@pytest.mark.parametrize("padded", ["none", "left", "right", "both", "hole", "nothing"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("packed")])
def test_a_cache_moves_the_positions(name: str, padded: str, place: dict[str, int]):
    function, _, by_vmap = FUNCTIONS[name]
    place = dict(place)
    queries, keys = place.pop("queries"), place.pop("keys")
    options = {"use_vmap": by_vmap, "attention_mask": padding(padded)[:, : place["q_offset"] + queries], **place}
    made = masked(function, queries, keys, **options)
    assert torch.equal(made.dense(), dense(function, queries, keys, **options))


def padding(where: str) -> Tensor:
    """bool [2, 11]."""
    mask = torch.ones(2, 11, dtype=torch.bool)
    if where in ("left", "both"):
        mask[0, :4] = False
    if where in ("right", "both"):
        mask[1, 9:] = False
    if where == "hole":
        mask[1, 6] = False
    if where == "nothing":
        mask[1] = False
    return mask


def test_a_counter_that_moves_on_does_not_move_the_mask():
    """A static cache's counter is a tensor, which the first layer's update raises in place."""
    counter = torch.tensor(4)
    made = masked(theirs.causal_mask_function, 3, 11, q_offset=counter)
    counter += 3
    assert made.offset == 4
    assert type(made.offset) is int  # and not a view of the counter


def test_the_default_function_is_causal():
    assert repr(ours.mask(batch_size=1, q_length=3, kv_length=3).mask) == "Causal()"


def test_a_mask_passes_for_one_that_is_ready():
    """What generate() and the models ask of a mask before they hand it on."""
    made = LayerMask(Causal(), (1, 1, 3, 3), 0, "cpu")
    assert isinstance(made, cast(Any, theirs).BlockMask)
    assert len(made.shape) == 4
    assert made.contiguous() is made
    assert made.to("cpu") is made


def test_a_model_that_computes_with_its_mask_is_given_a_tensor():
    """Gemma 4 slices masks, T5Gemma 2 joins two, DeepSeek's indexer looks at one row of them."""
    made = LayerMask(Causal(), (1, 1, 3, 3), 0, "cpu")
    table = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    assert torch.equal(made[:, :, -1:, :], table[:, :, -1:, :])
    assert torch.equal(torch.cat([made, ~made], dim=-1), torch.cat([table, ~table], dim=-1))
    assert torch.equal(made & table.flip(-1), table & table.flip(-1))
    assert torch.equal(table.flip(-1) | made, table | table.flip(-1))
    assert made.dtype == torch.bool
    assert torch.equal(made.expand(2, -1, -1, -1), table.expand(2, -1, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_adds_its_mask_to_scores_adds_what_eager_adds(dtype: torch.dtype):
    """GIT's decoder and BigBird-Pegasus's encoder compute attention themselves."""
    made, scores = LayerMask(Causal(), (1, 1, 3, 3), 0, "cpu"), torch.randn(2, 4, 3, 3, dtype=dtype)
    floats = theirs.eager_mask(batch_size=1, q_length=3, kv_length=3, dtype=dtype)
    inplace = scores.clone()
    inplace += cast(Any, made)
    for found in (scores + cast(Any, made), cast(Any, made) + scores, torch.add(scores, cast(Any, made)), inplace):
        assert found.dtype == dtype
        assert torch.equal(found, scores + floats)
    assert torch.equal(made + torch.ones(3, dtype=torch.int64), made.dense() + 1)


def test_a_mask_has_no_attributes_of_its_own_making():
    with pytest.raises(AttributeError, match="LayerMask has no attribute 'colour'"):
        _ = LayerMask(Causal(), (1, 1, 3, 3), 0, "cpu").colour


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda row: theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(row[None])),
        lambda row: theirs.and_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(row[None])),
        lambda row: theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: row[q] == row[k]),
    ],
    ids=["images", "documents", "a function of a user's own"],
)
def test_what_vmap_maps_over_makes_a_mask_for_each_row(function: Any):
    q, k, v = torch.randn(3, 1, 2, 11, 16)
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 11, "kv_length": 11}

    def attended(row: Tensor) -> Tensor:
        return attention(nn.Module(), q, k, v, ours.mask(**arguments, mask_function=function(row)), scaling=0.25)[0]

    found = torch.vmap(attended)(SPANS)
    for row, out in zip(SPANS, found, strict=True):
        keep = theirs.sdpa_mask(**arguments, mask_function=function(row), allow_is_causal_skip=False)
        expected = nn.functional.scaled_dot_product_attention(q, k, v, keep, scale=0.25)
        assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)


def test_a_mask_that_vmap_does_not_map_over_stays_in_words():
    made: list[LayerMask] = []
    torch.vmap(lambda row: made.append(masked(theirs.sliding_window_causal_mask_function(4), 11, 11)) or row)(SPANS)
    assert repr(made[0].mask) == "Causal() & Window(left=4)"


def test_masks_are_dense_while_anything_is_traced():
    """transformers gives the same answer for an int as for no tensor, so one question is enough."""
    found: list[bool] = []

    def see(x: torch.Tensor) -> torch.Tensor:
        found.append(mask_function._is_traced(3, None, CPU))
        return x + 1

    assert not mask_function._is_traced(3, None, CPU)
    assert not mask_function._is_traced(torch.tensor(3), torch.ones(1, 4, dtype=torch.bool), CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which torch deprecates
        torch.jit.trace(see, torch.zeros(2), check_trace=False)  # which calls it without tracing
    assert found
    assert all(found)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.tensor(3))
    assert mask_function._is_traced(fake, None, CPU)
    assert mask_function._is_traced(3, fake, CPU)
