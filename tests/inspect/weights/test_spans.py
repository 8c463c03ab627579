"""Which keys rows may see: exact counts, from the mask's bounds wherever those decide."""

import pytest
import torch

from regard import Causal, Documents, KeyLengths, MaskFunction, Prefix, TensorMask, Window
from regard.describe.mask import CallSizes
from regard.inspect.weights.lazy import Weights
from regard.inspect.weights.spans import count_visible, visible_runs
from tests.inspect.dense import CASES, definition


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("name", CASES)
def test_every_row_s_keys_are_counted(name, chunk):
    call = CASES[name]()
    weights = Weights.of(call)
    counts = count_visible(weights, chunk)
    assert counts.dtype == torch.int64
    assert torch.equal(counts.expand(weights.shape[:3]), definition(call).keep.sum(-1))


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("name", CASES)
def test_runs_leave_no_visible_key_out_and_do_not_overlap(name, chunk):
    call = CASES[name]()
    weights, keep = Weights.of(call), definition(call).keep
    row = slice(weights.shape[2] // 2, weights.shape[2])
    reached = torch.zeros(weights.shape[3], dtype=torch.int64)
    for run in visible_runs(weights, row, chunk):
        reached[run] += 1
    assert reached.max() <= 1
    assert not (keep[:, :, row].any(dim=2) & (reached == 0)).any()


def long(mask, tokens=1024, batch=2):
    q = torch.zeros(batch, 2, tokens, 2)
    return Weights(q, q, q[..., 0], mask.bind(CallSizes(batch, 2, tokens, tokens, 0)))


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Causal() & (Window(200) | Prefix(5)),
        Causal() & KeyLengths(torch.tensor([300, 1024])),
        Causal() & Documents(torch.arange(1024) // 311),
    ],
    ids=["causal", "window with sinks", "padding", "documents"],
)
def test_long_rows_are_counted_chunk_by_chunk(mask):
    weights = long(mask)
    exact = weights.keep(torch.arange(1024)[:, None], torch.arange(1024)[None]).sum(-1)
    shape = weights.shape[:3]
    assert torch.equal(count_visible(weights, 128).expand(shape), exact.expand(shape))


def test_pairs_are_looked_at_only_along_the_border():
    looked_at = []
    border = MaskFunction(lambda b, h, q, k: (looked_at.append(q.numel() * k.numel()), q >= k)[1])
    assert int(count_visible(long(border), 128).sum()) == int(count_visible(long(Causal()), 128).sum())
    everything = sum(looked_at)
    looked_at.clear()
    assert int(count_visible(long(Causal() & (border | Causal())), 128).sum()) == 1024 * 1025 // 2
    assert 0 < sum(looked_at) < everything / 7


@pytest.mark.parametrize("keep", [torch.ones(2, 1, 1, 129), torch.ones(1, 1, 129, 129), torch.ones(1, 3, 1, 1)])
def test_rows_that_bounds_decide_are_counted_beside_others(keep):
    mask = Causal() & TensorMask(keep.bool())
    q = torch.zeros(2, 3, 129, 1)  # the last row sees all keys: nothing of it is evaluated, and of the others is
    counts = count_visible(Weights(q, q, q[..., 0], mask.bind(CallSizes(2, 3, 129, 129, 0))), chunk=32)
    assert (counts == torch.arange(1, 130)).all()
