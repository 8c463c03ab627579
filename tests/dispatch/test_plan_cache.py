"""Calls that are known again: nothing that matters to a plan may change without being noticed."""

import gc
import weakref
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from regard import (
    Alibi,
    Causal,
    Documents,
    Global,
    KeyLengths,
    MaskFunction,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
    explain,
    observe_calls,
)
from regard.backend.reference import Reference
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.ragged import Ragged
from regard.describe.score import Bilinear
from regard.dispatch import choose
from regard.dispatch import plan_cache as known
from regard.plan import request, tiling
from regard.plan.request import Request
from regard.scores import Cosine
from regard.storage.stored import Part, StoredTensor
from tests.oracle import Case, dense

Q, K, V = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
ENDS = torch.tensor([9, 4])


pytestmark = pytest.mark.usefixtures("no_plans")


def posed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks of the calls that are posed."""
    times: list[Any] = []
    pose = known.pose
    monkeypatch.setattr(known, "pose", lambda request: times.append(request.mask) or pose(request))
    return times


@pytest.mark.parametrize("words", [{}, {"mask": Causal() & Window(3)}, {"bias": Alibi(2)}, {"sink": torch.zeros(2)}])
def test_a_call_like_one_before_is_not_posed_again(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    first = attend(Q, K, V, **words)
    again = attend(Q.clone(), K.clone(), V.clone(), **words)
    assert len(times) == 1
    assert torch.equal(first, again)


def test_a_mask_made_anew_is_known_by_its_words(monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    for _ in range(3):
        attend(Q, K, V, mask=Causal() & Window(3))
    assert len(times) == 1


def test_rows_of_different_lengths_get_their_mask_once(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    monkeypatch.setattr(request, "Ragged", lambda *a: made.append(a) or Ragged(*a))
    k, v = (
        StoredTensor((Part(9, t, row_ends=ENDS),), (2, 2, 9, 8), t.dtype, ENDS) for t in (K.repeat(2, 1, 1, 1),) * 2
    )
    q = Q.repeat(2, 1, 1, 1)
    for calls, call in enumerate((attend, explain, attend_state, torch.compile(attend, backend="eager")), start=1):
        call(q, k, v, mask=Window(3))
        assert len(made) == calls


CHANGES: dict[str, Any] = {
    "fewer keys": lambda: (Q, K[:, :, 1:], V[:, :, 1:], {}),
    "another type": lambda: (Q.double(), K.double(), V.double(), {}),
    "a last dimension that is not contiguous": lambda: (Q, K.mT.contiguous().mT, V, {}),
    "a scale": lambda: (Q, K, V, {"scale": 0.5}),
    "a cap": lambda: (Q, K, V, {"softcap": 0.5}),
    "an offset": lambda: (Q, K, V, {"offset": 0}),
    "a sink": lambda: (Q, K, V, {"sink": torch.zeros(2)}),
    "another mask": lambda: (Q, K, V, {"mask": Window(2, 2)}),
    "a bias": lambda: (Q, K, V, {"bias": Alibi(2)}),
    "a negated view": lambda: (torch.complex(Q, -Q).conj().imag, K, V, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_differs_is_posed_anew_and_right(name: str):
    attend(Q, K, V, mask=Causal())
    q, k, v, words = CHANGES[name]()
    words = {"mask": Causal(), **words}
    expected = dense(Case(q, k, v, words))[0]
    assert torch.allclose(attend(q, k, v, **words).double(), expected, atol=1e-5)


def test_gradients_flow_though_the_same_call_was_made_without():
    with torch.no_grad():
        attend(Q, K, V)
    leaf = Q.clone().requires_grad_()
    assert attend(leaf, K, V).requires_grad
    with torch.no_grad():
        assert not attend(leaf, K, V).requires_grad
    table = torch.randn(5, 9)
    bias = TensorBias(table)
    attend(Q, K, V, bias=bias)
    table.requires_grad_()
    assert attend(Q, K, V, bias=bias).requires_grad


def test_masks_changed_in_place_are_seen():
    lengths, keep, limit = torch.tensor([9]), torch.ones(5, 9, dtype=torch.bool), torch.tensor(9)
    masks: list[Mask] = [KeyLengths(lengths), TensorMask(keep), MaskFunction(lambda b, h, q, k: k < limit)]
    before = [attend(Q, K, V, mask=mask) for mask in masks]
    lengths[0], limit[...] = 4, 4
    keep[:, 4:] = False
    for mask, old in zip(masks, before, strict=True):
        found = attend(Q, K, V, mask=mask)
        assert torch.allclose(found, attend(Q, K[:, :, :4], V[:, :, :4]), atol=1e-6)
        assert not torch.equal(found, old)


def test_numbers_in_q_k_and_v_are_never_remembered():
    q = Q.clone()
    before = attend(q, K, V)
    q.mul_(3)
    assert not torch.equal(attend(q, K, V), before)


def test_what_equals_a_number_and_is_none_is_an_error_also_afterwards():
    attend(Q, K, V, scale=1.0, offset=1)
    for words in ({"scale": True}, {"offset": True}, {"dropout": False}, {"scale": torch.tensor(1.0)}):
        with pytest.raises(ProblemError):
            attend(Q, K, V, **words)


def test_a_spec_that_only_has_the_name_of_one_is_an_error_also_afterwards():
    attend(Q, K, V, mask=Causal())

    class Impostor(Causal):
        pass

    Impostor.__name__ = "Causal"
    for mask in (Impostor(), Impostor() & Causal(), "Causal()"):
        with pytest.raises(ProblemError):
            attend(Q, K, V, mask=mask)


def test_a_plan_that_was_let_go_is_made_again(monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    attend(Q, K, V, mask=Window(4))
    plan = weakref.ref(explain(Q, K, V, mask=Window(4)))
    choose._plans.clear()
    gc.collect()
    assert plan() is None  # calls that are known keep no plan alive
    attend(Q, K, V, mask=Window(4))
    assert len(times) == 2


def test_no_tensor_is_kept_alive_and_calls_are_counted():
    lengths, q = torch.tensor([9]), Q.clone()
    attend(q, K, V, mask=KeyLengths(lengths))
    ghosts = [weakref.ref(t) for t in (lengths, q)]
    del lengths, q
    gc.collect()
    assert all(ghost() is None for ghost in ghosts)
    for i in range(known.KEPT + 3):
        attend(Q[:, :, :1, :1], K[:, :, :1, :1], V[:, :, :1, :1], scale=float(i))
    assert len(known._calls) <= known.KEPT


def test_watchers_autocast_and_transforms_are_noticed_after_the_same_call():
    expected = attend(Q, K, V)
    calls: list[Any] = []
    with observe_calls(calls.append):
        attend(Q, K, V)
    assert bool(torch.isfinite(calls[0].lse).all())
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(Q, K, V).dtype == torch.bfloat16
    mapped = torch.vmap(lambda q: attend(q, K, V))(Q[None])
    assert torch.allclose(mapped[0], expected, atol=1e-6)
    assert attend_state(Q, K, V).lse.shape == (1, 2, 5)


def test_a_tensor_is_known_by_its_content_however_it_was_written_to():
    array = np.array([9])
    mask = KeyLengths(torch.from_numpy(array))
    attend(Q, K, V, mask=mask)
    for write in (lambda: array.__setitem__(0, 4), lambda: mask.lengths.data.fill_(7), lambda: mask.lengths.sub_(5)):
        write()
        length = int(array[0])
        assert torch.allclose(attend(Q, K, V, mask=mask), attend(Q, K[:, :, :length], V[:, :, :length]), atol=1e-6)


ANEW: dict[str, Any] = {
    "lengths": lambda: KeyLengths(torch.tensor([4])),
    "a dense mask": lambda: TensorMask(torch.ones(5, 9, dtype=torch.bool).tril()),
    "a function": lambda: MaskFunction(lambda b, h, q, k: k < 4),
}


@pytest.mark.parametrize("name", ANEW)
def test_a_mask_made_anew_of_equal_content_is_known(name: str, monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    for _ in range(3):
        attend(Q, K, V, mask=ANEW[name]())
    assert len(times) == 1


def test_an_offset_of_numpy_is_the_same_as_an_int():
    q, k = torch.randn(1, 1, 230, 8), torch.randn(1, 1, 20, 8)
    mask, offset = Window(50), np.uint8(30)
    attend(q[:, :, :10], k, k, mask=mask, offset=offset)  # hides nothing; 30 + 230 does not fit 8 bits
    expected = attend(q, k, k, mask=mask, offset=30, backend="reference64")
    assert torch.allclose(attend(q, k, k, mask=mask, offset=offset), expected, atol=1e-5)


def test_a_softcap_as_an_int_has_the_plan_of_the_equal_float():
    known.forget()
    of_int, of_float = (explain(Q, K, V, softcap=softcap) for softcap in (10**20, 1e20))
    assert of_int is of_float
    assert type(of_int.problem.softcap) is float


FULL = Request(
    torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), Window(3), Alibi(2), Cosine(), 0.5, 2.0,
    torch.zeros(2), 0.1, 1, "reference", True,
    tuple(StoredTensor.of(torch.randn(1, 2, 9, 8)) for _ in range(2)),
)  # fmt: skip
ALTERED: dict[str, list[Any]] = {
    "q": [FULL.q[:, :, :2], FULL.q.double(), FULL.q[:, :1], FULL.q[..., :4], FULL.q.mT.contiguous().mT,
          FULL.q.clone().requires_grad_(), FULL.q.to("meta"), torch.nn.Parameter(FULL.q, requires_grad=False)],
    "k": [FULL.k[:, :, :8], FULL.k.bfloat16()],
    "v": [FULL.v[:, :, :8], FULL.v[..., :4]],
    "mask": [None, Window(4), Causal(), KeyLengths(torch.tensor([3]))],
    "bias": [None, TensorBias(torch.zeros(3, 9)), TensorBias(torch.zeros(3, 9).requires_grad_())],
    "score": [None, Bilinear(torch.eye(8))],
    "scale": [None, 1.0, 1, True],
    "softcap": [None, 3.0, 2],
    "sink": [None, torch.zeros(2).double(), torch.zeros(2).requires_grad_()],
    "dropout": [0.0, 0, False],
    "offset": [None, 0, True],
    "backend": [None, "native", Reference()],
    "lse": [False],
    "stored": [None, tuple(StoredTensor.of(torch.randn(1, 2, 9, 8).double()) for _ in range(2))],
}  # fmt: skip


@pytest.mark.parametrize("field", Request._fields)
def test_whatever_field_is_altered_the_key_is_another(field: str):
    keys = [FULL.key(), *(FULL._replace(**{field: value}).key() for value in ALTERED[field])]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert FULL._replace(q=FULL.q.clone(), mask=Window(3), bias=Alibi(2)).key() == keys[0]
    with torch.no_grad():
        assert FULL.key() != keys[0]


def test_a_growing_cache_has_one_plan_where_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 6)
    for mask in (None, Causal(), Causal() & Window(300), Window(300, 300)):
        times.clear()
        for keys in (1, 63, 64, 65, 299, 2, 300):
            few = k[:, :, :keys], v[:, :, :keys]
            found = attend(q, *few, mask=mask)
            assert torch.allclose(found.double(), dense(Case(q, *few, {}))[0], atol=1e-5)
            known.forget()
            assert torch.equal(found, attend(q, *few, mask=mask))  # the same bits as with a plan of its own
            assert explain(q, *few, mask=mask).schedule.keys == keys
        attend(q, k[:, :, :9], v[:, :, :9], mask=mask)
        times.clear()
        for keys in (10, 200):
            attend(q, k[:, :, :keys], v[:, :, :keys], mask=mask)
        assert not times
        if mask is not None:
            windowed = Causal() & Window(50)
            attend(q, k[:, :, :40], v[:, :, :40], mask=windowed)
            for keys in (49, 50, 51, 200):
                found = attend(q, k[:, :, :keys], v[:, :, :keys], mask=windowed)
                first = max(0, keys - 50)
                assert torch.allclose(found, attend(q, k[:, :, first:keys], v[:, :, first:keys]), atol=1e-6)


MASKS = (
    None,
    Causal(),
    Causal() & (Window(20) | Prefix(3)),
    ~Window(5),
    KeyLengths(torch.tensor([30, 7])),
    Documents(torch.arange(100) // 30),
    TensorMask(torch.rand(2, 1, 1, 1) > 0.5),
    MaskFunction(lambda b, h, q, k: (q * 7 + k * 3 + h) % 4 != 0),
)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize(
    "bias", [None, Alibi(4), TensorBias(torch.randn(4, 1, 1)), Alibi(4) + TensorBias(torch.randn(4, 1, 1))]
)
@pytest.mark.parametrize("gradients", [False, True])
def test_one_plan_serves_every_size_offset_and_mask(
    bias: Bias | None, gradients: bool, monkeypatch: pytest.MonkeyPatch
):
    draw, times = Random(0), posed(monkeypatch)
    tokens = torch.randn(2, 4, 100, 8)
    calls = [(draw.randint(1, 70), draw.randint(1, 100), draw.choice([None, 0, 3, 40]), mask) for mask in MASKS * 4]
    draw.shuffle(calls)
    calls += calls[:7] + [(5, 64, None, mask) for mask in MASKS]
    found: list[list[torch.Tensor]] = []
    for fresh in (False, True):
        for queries, keys, offset, mask in calls:
            if fresh:
                known.forget()
            q, kv = (tokens[:, :, :n].clone().requires_grad_(gradients) for n in (queries, keys))
            out = attend(q, kv, kv, mask=mask, bias=bias, offset=offset)
            found.append([out, *(torch.autograd.grad(out.sin().sum(), (q, kv)) if gradients else ())])
        if not fresh:
            assert len(times) <= 8  # by whether there is a mask, and the type of the offset; not `len(calls)`
    for one, other in zip(found[: len(calls)], found[len(calls) :], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for (queries, keys, offset, mask), (out, *_) in zip(calls, found, strict=False):
        q, kv = tokens[:, :, :queries], tokens[:, :, :keys]
        expected = attend(q, kv, kv, mask=mask, bias=bias, offset=offset, backend="reference64")
        assert torch.allclose(out, expected, atol=1e-5)


def test_rows_of_ever_different_lengths_have_one_plan(monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 40, 8)
    for lengths in ((9, 4), (10, 5), (11, 6), (40, 7)):
        ends = torch.tensor(lengths)
        stored = StoredTensor(
            (Part(max(lengths), k[:, :, : max(lengths)], row_ends=ends),), (2, 2, max(lengths), 8), k.dtype, ends
        )
        found = attend(q, stored, stored, mask=Causal() & Window(6))
        for row, n in enumerate(lengths):
            few = k[row : row + 1, :, max(0, n - 6) : n]
            assert torch.allclose(
                found[row : row + 1], attend(q[row : row + 1], few, few, backend="reference"), atol=1e-6
            )
    assert len([mask for mask in times if isinstance(mask, Ragged)]) == 1


def test_one_plan_serves_ever_longer_prompts_with_gradients_and_errors_are_as_before():
    k, v = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    for n in (7, 64, 65, 100):
        q, keys, values = (t[:, :, :n].clone().requires_grad_() for t in (k, k, v))
        found = torch.autograd.grad(attend(q, keys, values).sin().sum(), (q, keys, values))
        expected = torch.autograd.grad(attend(q, keys, values, backend="reference").sin().sum(), (q, keys, values))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ProblemError, match="a value belongs to each key"):
        attend(k, k, v[:, :, :50])
    assert not attend(k[:, :, :3], k[:, :, :0], v[:, :, :0]).any()


def test_observers_get_the_plan_of_their_own_call():
    plans: list[Any] = []
    attend_state(Q[:, :, :1], K, V)
    with observe_calls(lambda call: plans.append(call.plan)):
        for keys in (4, 7):
            attend(Q[:, :, :1], K[:, :, :keys], V[:, :, :keys], mask=Causal())
    assert [plan.schedule.keys for plan in plans] == [4, 7]


def test_a_plan_for_other_sizes_outlives_the_sizes_in_the_cache(monkeypatch: pytest.MonkeyPatch):
    times = posed(monkeypatch)
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, known.KEPT + 9, 4)
    for keys in range(1, known.KEPT + 9):
        attend(q, k[:, :, :keys], k[:, :, :keys])
    assert len(times) == 1


ROW = torch.tensor([True, False, True, True])


@pytest.mark.parametrize("kind", ["keys", "queries"])
def test_expanded_masks_of_equal_elements_are_two(kind: str):
    q = torch.randn(1, 1, 4, 8)
    down, across = ROW.expand(4, 4), ROW[:, None].expand(4, 4)
    assert TensorMask(down) != TensorMask(across)
    for tensor in (down, across) if kind == "keys" else (across, down):
        found = attend(q, q, q, mask=TensorMask(tensor))
        assert torch.equal(found, attend(q, q, q, mask=TensorMask(tensor.contiguous())))
    table = torch.randn(4)
    for each in (table.expand(4, 4), table[:, None].expand(4, 4)):
        found = attend(q.expand(1, 4, 4, 8), q, q, bias=T5Bias(each))
        assert torch.equal(found, attend(q.expand(1, 4, 4, 8), q, q, bias=T5Bias(each.contiguous())))


def test_a_write_while_a_call_runs_leaves_no_plan_of_the_old_elements(monkeypatch: pytest.MonkeyPatch):
    q = torch.randn(1, 1, 6, 8)
    first, second = (torch.rand(6, 6) > 0.5 for _ in range(2))
    expected = attend(q, q, q, mask=TensorMask(first.clone()), backend="reference")
    known.forget()
    written, schedule = first.clone(), tiling.schedule
    mask = TensorMask(written)

    def write_first(*mask: Any, **sizes: Any) -> Any:
        written.copy_(second)
        return schedule(*mask, **sizes)

    monkeypatch.setattr(tiling, "schedule", write_first)
    attend(q, q, q, mask=Causal())  # the form is known, and its plan serves every mask
    attend(q, q, q, mask=mask)  # as if another thread wrote between the look-up and the schedule
    monkeypatch.setattr(tiling, "schedule", schedule)
    assert torch.allclose(attend(q, q, q, mask=TensorMask(first.clone())), expected, atol=1e-6)
    written.copy_(first)
    known.forget()
    monkeypatch.setattr(tiling, "schedule", write_first)
    attend(q, q, q, mask=mask)  # the same where the form is new
    monkeypatch.setattr(tiling, "schedule", schedule)
    assert torch.allclose(attend(q, q, q, mask=TensorMask(first.clone())), expected, atol=1e-6)


def test_several_gradients_at_once_are_refused_with_what_to_do():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(RefusalError, match="is_grads_batched"):
        torch.autograd.grad(attend(q, q, q), q, torch.randn(3, 1, 1, 4, 8), is_grads_batched=True)
    found = torch.autograd.functional.jacobian(lambda x: attend(x, x, x, backend="reference"), q, vectorize=True)
    assert found.shape == (*q.shape, *q.shape)


@pytest.mark.parametrize(
    "spec_of",
    [
        lambda t: {"mask": KeyLengths(t[:, :2, 0].long().sum(1) % 5)},
        lambda t: {"mask": Documents((t[0, :, ::2] > 0)[:, 1].long())},
        lambda t: {"bias": TensorBias(t[:1, :, :6][:, None])},
        lambda t: {"bias": TensorBias(t[..., ::2][:, None, :, :6])},
        lambda t: {"mask": TensorMask((t > 0)[:, None, :, ::2])},
    ],
    ids=["lengths", "documents", "bias", "bias with a step", "mask with a step"],
)
def test_tensors_with_steps_are_known_by_their_elements(spec_of):
    t = torch.randn(2, 6, 12)
    q = torch.randn(2, 1, 6, 4)
    given, dense = spec_of(t), spec_of(t.clone())
    torch.testing.assert_close(attend(q, q, q, **given), attend(q, q, q, backend="reference64", **dense).to(q.dtype))


def test_global_tokens_beyond_a_call_are_refused_after_other_calls_too():
    mask = Causal() | Global((30,))
    for keys in (20, 100, 101, 102, 20):
        q = torch.randn(1, 1, keys, 4)
        if keys == 20:
            with pytest.raises(ProblemError, match="has position 30, and the call has 20 keys"):
                attend(q, q, q, mask=mask)
        else:
            attend(q, q, q, mask=mask)
