"""Block masks: torch's are read as they are, ours are torch's, and making one looks at few pairs."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask

from regard import Causal, ProblemError, observe_calls
from regard.flex import create_block_mask, flex_attention
from regard.flex.trace import element_by_element
from regard.torch_internals import VERSION
from tests.flex.definition import Mod, attended

TOKENS = 300


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def tensors(batch: int = 2, heads: int = 2, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, tokens, 16) for _ in range(3))
    return q, k, v


def by_lists(given: BlockMask) -> Tensor:
    """Which pairs a block mask keeps, from its lists and its function, block by block."""
    batch, heads = given.kv_num_blocks.shape[:2]
    rows, columns = given.BLOCK_SIZE
    kept = torch.zeros(batch, heads, *given.seq_lengths, dtype=torch.bool)
    lists = [(given.kv_num_blocks, given.kv_indices, True)]
    if given.full_kv_num_blocks is not None and given.full_kv_indices is not None:
        lists.append((given.full_kv_num_blocks, given.full_kv_indices, False))
    for counts, order, partial in lists:
        for b, h, row in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            for column in order[b, h, row, : counts[b, h, row]].tolist():
                q = torch.arange(row * rows, min((row + 1) * rows, given.seq_lengths[0]))[:, None]
                k = torch.arange(column * columns, min((column + 1) * columns, given.seq_lengths[1]))
                found = given.mask_mod(torch.tensor(b), torch.tensor(h), q, k) if partial else torch.tensor(data=True)
                kept[b, h, q, k] = found
    return kept


def compared(given: BlockMask, used: list[str] | None = None) -> None:
    """Compare a call under a block mask with the definition."""
    q, k, v = tensors(tokens=given.seq_lengths[0])
    kept = by_lists(given).expand(2, 2, -1, -1)
    with observe_calls(lambda call: (used if used is not None else []).append(str(call.mask))):
        out = flex_attention(q, k, v, block_mask=given)
    expected, _ = attended(q, k, v, None, lambda b, h, q, k: kept[b, h, q, k])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [64, (32, 128), 100])
def test_a_block_mask_of_torch_is_read(block: Any):
    used: list[str] = []
    compared(of_torch.create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=block), used)
    assert used == ["Causal()"]  # the lists are those of the function, so it alone says what is kept


def test_lists_that_differ_from_the_function_decide():
    counts = torch.tensor([[[1, 2, 1, 2, 0]]], dtype=torch.int32)
    order = torch.tensor([[[[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [3, 0, 0, 0, 0], [0, 3, 1, 2, 4], [0] * 5]]]).int()
    full = torch.tensor([[[0, 0, 1, 0, 1]]], dtype=torch.int32)
    full_order = torch.tensor([[[[4, 0, 1, 2, 3]] * 4 + [[2, 0, 1, 3, 4]]]]).int()
    compared(BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=60, seq_lengths=(300, 300)))
    compared(BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=60, seq_lengths=(300, 300), mask_mod=causal))
    compared(BlockMask.from_kv_blocks(counts, order, full, full_order, 60, causal, seq_lengths=(300, 300)))
    compared(BlockMask.from_kv_blocks(counts, order, full, full_order, (64, 61), causal, seq_lengths=(299, 290 + 9)))


def test_lists_of_each_row_and_head_decide():
    torch.manual_seed(3)
    kept = torch.rand(2, 2, 5, 5) < 0.5
    counts, order = kept.sum(dim=3, dtype=torch.int32), (~kept).int().argsort(dim=3, stable=True).int()
    compared(BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=60, seq_lengths=(300, 300), mask_mod=causal))


@pytest.mark.parametrize("make", [create_block_mask, of_torch.create_block_mask], ids=["regard", "torch"])
def test_lists_for_all_rows_decide_whoever_made_them_and_whatever_was_called_before(make: Any):
    shift = torch.tensor([-40, 5])  # the lists are those of row 0
    mask = make(lambda b, h, q, k: q + shift[b] >= k, None, None, 70, 70, "cpu", BLOCK_SIZE=16)
    q, k, v = torch.randn(3, 2, 1, 70, 8).unbind()
    flex_attention(q[:1], k[:1], v[:1], block_mask=mask)
    q_idx, k_idx = torch.arange(70)[:, None], torch.arange(70)
    kept = (q_idx + shift[:, None, None] >= k_idx) & ((q_idx | 15).clamp(max=69) - 40 >= (k_idx & ~15))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, kept[:, None])
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), exact)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [create_block_mask, of_torch.create_block_mask], ids=["regard", "torch"])
def test_a_mask_of_more_rows_and_heads_than_the_call_is_that_of_its_first_ones(make: Any, compiled: bool):
    torch.compiler.reset()
    widths = torch.tensor([[3, 20, 70], [40, 9, 30], [70, 70, 70], [1, 2, 3]])
    mask = make(lambda b, h, q, k: (q - k).abs() < widths[b, h], 4, 3, 70, 70, "cpu", BLOCK_SIZE=16)
    attend = torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    q, k, v = torch.randn(3, 4, 3, 70, 8).unbind()
    at = torch.arange(70)
    kept = (at[:, None] - at).abs() < widths[..., None, None]
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, kept)
    for rows, heads in ((2, 2), (4, 3), (1, 3), (4, 1)):
        out = attend(*(t[:rows, :heads] for t in (q, k, v)), block_mask=mask)
        torch.testing.assert_close(out, exact[:rows, :heads])


def test_lists_of_fewer_rows_than_the_call_are_used_only_if_they_are_those_of_the_function():
    lengths = torch.tensor([16, 48, 64, 64])
    q, k, v = torch.randn(3, 4, 1, 64, 8).unbind()
    mask = create_block_mask(causal, 2, None, 64, 64, "cpu", BLOCK_SIZE=16)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), exact)
    mask = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 64, 64, "cpu", BLOCK_SIZE=16)
    with pytest.raises(ProblemError, match="block_mask has lists for 2 batch rows and 1 heads, and the call has 4 and"):
        flex_attention(q, k, v, block_mask=mask)


def writing_in_place(made: BlockMask) -> None:
    made.kv_num_blocks[0, 0, 2] = 0


def writing_through_data(made: BlockMask) -> None:
    made.kv_num_blocks.data[0, 0, 2] = 0


def replacing(made: BlockMask) -> None:
    assert made.full_kv_num_blocks is not None
    made.full_kv_num_blocks = made.full_kv_num_blocks.clone()
    made.full_kv_num_blocks = made.full_kv_num_blocks * 0  # often with the id of the list that was read


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", [writing_in_place, writing_through_data, replacing])
def test_lists_that_are_changed_are_read_again(change: Callable[[BlockMask], None], inference: bool):
    with torch.inference_mode(inference):
        for _ in range(5):
            made = create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=60)
            compared(made)
            change(made)
            compared(made)


def test_a_function_may_be_replaced():
    made = create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=60)
    sliced = made[:, :, 3:5]
    sliced.mask_mod = lambda b, h, q, k: q + 180 >= k
    sliced.seq_lengths = (120, TOKENS)
    q, k, v = tensors()
    out = flex_attention(q[:, :, 180:], k, v, block_mask=sliced)
    torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=made)[:, :, 180:])


def test_a_sliced_mask_without_a_function_says_so():
    made = create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=60)[:, :, 3:5]
    made.seq_lengths = (120, TOKENS)
    q, k, v = tensors()
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex_attention(q[:, :, 180:], k, v, block_mask=made)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sliced_mask_with_the_lengths_of_the_whole_one_says_so(compiled: bool):
    torch.compiler.reset()
    sliced = create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=60)[:, :, 3:4]
    sliced.mask_mod = lambda b, h, q, k: q + 180 >= k
    sliced.seq_lengths = (TOKENS, TOKENS)  # which torch 2.15 sets to those of the slice
    attend = torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    with pytest.raises(ProblemError, match=r"lists for 1 blocks of 60 queries, and the call has 300 queries: a slice"):
        attend(*tensors(), block_mask=sliced)


def test_what_a_function_has_captured_may_change():
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    ids[100:] = 1
    made = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=60)
    compared(made)
    ids[100:] = torch.arange(200) // 70  # torch reads it again as well, and keeps the lists
    compared(made)


def test_a_mask_works_in_torchs_function():
    q, k, v = tensors(tokens=TOKENS)
    made = create_block_mask(causal, None, None, TOKENS, TOKENS, "cpu")
    theirs: Any = of_torch.flex_attention
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        expected = theirs(q, k, v, block_mask=made)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), expected, atol=1e-5, rtol=1e-5)


def test_one_set_of_keys_serves_a_batch():
    q, k, v = tensors(batch=3)
    made = create_block_mask(causal, 3, None, TOKENS, TOKENS, "cpu")
    shared = flex_attention(q, k[:1], v[:1], block_mask=made)
    each = flex_attention(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1), block_mask=made)
    torch.testing.assert_close(shared, each)


def documents(tokens: int) -> Mod:
    ids = torch.arange(tokens) * 60 // tokens
    starts = torch.searchsorted(ids, torch.arange(60))
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q - starts[ids[q]] >= k - starts[ids[k]])


LONG: dict[str, Mod] = {
    "causal": causal,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 1000),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 1000),
    "documents": documents(32_768),
    "per head": lambda b, h, q, k: (q - k < (h + 1) * 1000) & (q >= k),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_mask_costs_a_small_part_of_its_pairs(name: str, monkeypatch: pytest.MonkeyPatch):
    evaluated: list[int] = []
    from regard.flex import layout

    before = layout.kept_pairs

    def counted(mask: Any, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        kept = before(mask, b, h, q, k)
        evaluated.append(kept.numel())
        return kept

    monkeypatch.setattr(layout, "kept_pairs", counted)
    start = time.perf_counter()
    made = create_block_mask(LONG[name], None, 4, 32_768, 32_768, "cpu")
    assert time.perf_counter() - start < 5  # torch: 17 s and more, on a machine at rest
    assert made.shape == (1, 4, 32_768, 32_768)
    assert sum(evaluated) < 0.02 * 32_768**2


def test_a_mask_mod_that_gives_no_bools_is_refused():
    with pytest.raises(ProblemError, match=r"mask_mod returned torch.int64: expected a bool tensor"):
        create_block_mask(lambda b, h, q, k: q - k, None, None, 64, 64, "cpu")


@pytest.mark.parametrize(
    ("sizes", "block", "says"),
    [
        ((None, None, -8, 8), 128, "Q_LEN is -8: expected at least 0 tokens"),
        ((None, None, 8, 8.0), 128, "KV_LEN is 8.0: expected a whole number of tokens"),
        ((-1, None, 8, 8), 128, "B is -1: expected at least 0 batch rows"),
        ((None, "2", 8, 8), 128, "H is '2': expected a whole number of heads"),
        ((None, None, 8, 8), 0, "BLOCK_SIZE is 0: expected at least 1 tokens per side"),
        ((None, None, 8, 8), (4, 2.5), "BLOCK_SIZE is 2.5: expected a whole number of tokens per side"),
        ((None, None, 8, 8), (1, 2, 3), r"BLOCK_SIZE is \(1, 2, 3\): expected tokens per side, or \(queries, keys\)"),
    ],
)
def test_sizes_are_whole_numbers(sizes: Any, block: Any, says: str):
    with pytest.raises(ProblemError, match=f"^{says}"):
        create_block_mask(lambda b, h, q, k: q >= k, *sizes, device="cpu", BLOCK_SIZE=block)


def test_a_batch_may_be_empty_as_in_torch():
    for sizes in ((0, None, 8, 8), (None, 0, 8, 8), (None, None, 0, 8)):
        ours, theirs = (
            f(lambda b, h, q, k: q >= k, *sizes, "cpu") for f in (create_block_mask, of_torch.create_block_mask)
        )
        assert ours.shape == theirs.shape


@pytest.mark.parametrize("wrong", [3, Causal()])
def test_a_block_mask_is_torchs_own_class(wrong: Any):
    with pytest.raises(ProblemError, match=r"^block_mask is .*: expected what create_block_mask makes, or None"):
        flex_attention(*[torch.ones(1, 1, 8, 8)] * 3, block_mask=wrong)


def test_a_mask_mod_that_reads_positions_raises_as_in_torch():
    with pytest.raises(RuntimeError, match=r"vmap|data-dependent"):
        create_block_mask(lambda b, h, q, k: q >= k if bool(q > 3) else q < k, None, None, 64, 64, "cpu")


def test_lists_may_have_blocks_that_are_not_there():
    counts = torch.tensor([[[2, 2]]], dtype=torch.int32)
    order = torch.tensor([[[[0, -1], [1, 7]]]], dtype=torch.int32)  # as paged attention has for pages without memory
    q, k, v = tensors(tokens=120)
    given = BlockMask(
        (120, 120), counts, order, None, None, None, None, None, None, BLOCK_SIZE=(60, 60), mask_mod=causal
    )
    out = flex_attention(q, k, v, block_mask=given)
    expected, _ = attended(q, k, v, None, lambda b, h, q, k: (q // 60 == k // 60) & (q >= k))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(VERSION < (2, 13), reason="torch has compute_dq_write_order from 2.13 on")
def test_options_for_gpus_are_torchs():
    own, theirs = (
        make(causal, None, None, TOKENS, TOKENS, "cpu", compute_dq_write_order=True)
        for make in (create_block_mask, of_torch.create_block_mask)
    )
    torch.testing.assert_close(own.dq_write_order, theirs.dq_write_order)


def test_a_mask_prints_as_torchs():
    sizes: tuple[Any, ...] = (causal, 1, 1, 512, 512, "cpu")
    own, theirs = create_block_mask(*sizes), of_torch.create_block_mask(*sizes)
    assert repr(own) == repr(theirs)
    assert str(own[0]) == str(theirs[0])
    torch.testing.assert_close(own.to_dense(), theirs.to_dense())
    assert math.isclose(own.sparsity(), theirs.sparsity())


WRAPPING: dict[str, Mod] = {
    "int8": lambda b, h, q, k: (q - k).to(torch.int8) >= 0,
    "int16": lambda b, h, q, k: ((q - k) * 300).to(torch.int16) >= 0,
    "int32": lambda b, h, q, k: ((q - k).to(torch.int32) * 100003 * 100003) >= 0,
    "int64": lambda b, h, q, k: (q - k) * (1 << 60) >= 0,
    "half": lambda b, h, q, k: ((q - k).half() * 1000) > 100000.0,
    "rounded": lambda b, h, q, k: torch.full((2 * TOKENS,), 0.1)[q - k + TOKENS] > 0.1,
    "rounded to half": lambda b, h, q, k: torch.full((2 * TOKENS,), 0.1).half()[q - k + TOKENS] >= 0.1,
    "infinite": lambda b, h, q, k: torch.exp((q - k).float()) == torch.inf,
}
"""Functions of positions whose numbers leave their type."""


def assert_bounds_are_sound(mod: Mod, block: int) -> None:
    """Compare lists, and results under our lists and torch's, with every pair."""
    at = torch.meshgrid(*map(torch.arange, (1, 1, TOKENS, TOKENS)), indexing="ij")
    given = create_block_mask(mod, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=block)
    assert torch.equal(by_lists(given), element_by_element(mod, *at))
    q, k, v = tensors()
    expected, _ = attended(q, k, v, None, mod)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=given).double(), expected, atol=1e-5, rtol=1e-4)
    theirs = of_torch.create_block_mask(mod, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=block)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=theirs).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WRAPPING)
def test_numbers_that_wrap_or_overflow_are_those_of_torch(name: str):
    assert_bounds_are_sound(WRAPPING[name], 128)


FIRST = 1_790_000_000_000_000_000
IDS = FIRST + torch.arange(TOKENS) // 100
OTHER_IDS = IDS.clone()
TIMES = FIRST + torch.arange(TOKENS)
LARGE: dict[str, Mod] = {
    "equal ids": lambda b, h, q, k: IDS[q] == OTHER_IDS[k],
    "later": lambda b, h, q, k: TIMES[q] >= TIMES[k],
    "one table at a distance": lambda b, h, q, k: TIMES[(q - k).abs()] > FIRST + 100,
    "a difference": lambda b, h, q, k: TIMES[q] - OTHER_IDS[k] < 100,
    "a quotient": lambda b, h, q, k: TIMES[(q - k).abs()] // 7 >= (FIRST + 50) // 7,
    "a remainder": lambda b, h, q, k: TIMES[(q - k).abs()] % 10**9 < 70,
}
"""Functions of integers that float64 rounds."""


@pytest.mark.parametrize("name", LARGE)
def test_integers_beyond_those_of_float64_are_compared_exactly(name: str):
    assert_bounds_are_sound(LARGE[name], 20)


BYTES = torch.tensor([0, 255, 1, 255]).to(torch.uint8).repeat(TOKENS)
HALVES = (2001 + torch.arange(TOKENS)).half()
ROUNDED: dict[str, Mod] = {
    "a quotient rounded down": lambda b, h, q, k: (q - k) // 0.1 <= 169,
    "a remainder of floats": lambda b, h, q, k: (q - k) % 0.1 < 0.05,
    "below the least float32": lambda b, h, q, k: torch.exp((k - q).float()) > 0,
    "below the least float16": lambda b, h, q, k: torch.exp(-(q - k).abs()).half() > 0,
    "an infinite bound": lambda b, h, q, k: torch.exp((q - k).float() * 10) == torch.inf,
    "a number beyond its type": lambda b, h, q, k: BYTES[(q - k).abs()] != -1,
    "integers as float16": lambda b, h, q, k: q + 1905 > HALVES[k],
    "integers as float32": lambda b, h, q, k: (q - k + (1 << 25)) * 1.0 > float(1 << 25),
    "integers and a float": lambda b, h, q, k: q - k + (1 << 25) > (1 << 25) + 0.5,
}
"""Functions whose operators round, or convert their operands."""


@pytest.mark.parametrize("name", ROUNDED)
def test_what_torch_rounds_is_as_torch_rounds_it(name: str):
    for block in (16, 17) if name.startswith("a quotient") else (16,):
        assert_bounds_are_sound(ROUNDED[name], block)
