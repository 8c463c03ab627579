"""Laws: attention and its gradients are what the formula says, and what is masked does not exist."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Causal, Mask, Prefix, TensorBias, TensorMask, Window, attend, attend_state
from tests.expressions import BATCH, HEADS, biases, masks
from tests.oracle import Case, dense, kept, worst
from tests.selection import examples

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.parametrize("engine", [None, "reference"], ids=["chosen", "reference"])


@st.composite
def cases(draw: st.DrawFn, words: bool = True) -> Case:
    """A random call: shapes (grouped heads, one query, no batch, v_dim != qk_dim), strides, words and numbers."""
    queries, keys = draw(st.sampled_from([(13, 13), (1, 29), (11, 23), (23, 11), (5, 131)]))
    batch, kv_heads = draw(st.sampled_from([BATCH, BATCH, BATCH, 0])), draw(st.sampled_from([1, 2, 3, 6]))
    qk_dim, v_dim = draw(st.sampled_from([(8, 8), (5, 7), (16, 3), (1, 1)]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def tensor(heads: int, tokens: int, dim: int) -> Tensor:
        made = torch.randn(batch, tokens, heads, dim, generator=g, dtype=torch.float64).transpose(1, 2)
        return draw(st.sampled_from([made, made.contiguous(), made.mT.contiguous().mT]))

    case = Case(tensor(HEADS, queries, qk_dim), tensor(kv_heads, keys, qk_dim), tensor(kv_heads, keys, v_dim))
    if not words:
        return case
    if batch and queries <= keys:
        case.words["mask"] = draw(st.one_of(st.none(), masks(queries, keys)))
        case.words["bias"] = draw(biases(queries, keys))
    else:
        case.words["mask"] = draw(st.sampled_from([None, Causal(), ~Causal()]))
    case.words["softcap"] = draw(st.sampled_from([None, 1.5]))
    case.words["scale"] = draw(st.sampled_from([None, 0.7, 0.0]))
    case.words["sink"] = draw(st.sampled_from([None, torch.linspace(-3, 3, HEADS, dtype=torch.float64)]))
    return case


def run(case: Case, engine: str | None, **more: Any) -> Tensor:
    return attend(case.q, case.k, case.v, **{**case.words, **more}, backend=engine)


def without_sink(case: Case) -> dict[str, Any]:
    return {name: word for name, word in case.words.items() if name != "sink"}


@pytest.mark.representative
@given(case=cases(), dtype=st.sampled_from(DTYPES))
@examples(60, everything=150)
def test_attention_is_what_the_formula_says(engine: str | None, case: Case, dtype: torch.dtype):
    case = case.to(dtype)
    (truth, lse), naive = dense(case), dense(case, dtype)
    out = run(case, engine)
    assert out.dtype == dtype
    assert out.shape == truth.shape
    # float64 has no better judge than itself; a row of few keys may by luck cost naive fp32 less than a rounding or two
    units = {torch.float64: 32, torch.float32: 3}.get(dtype, 0.5) * torch.finfo(dtype).eps
    largest = float(case.v.abs().max()) if case.v.numel() else 0.0
    assert worst(out, truth) <= max((2.0 if dtype == torch.float32 else 1.0) * worst(naive[0], truth), units * largest)
    state = attend_state(case.q, case.k, case.v, **without_sink(case), backend=engine)
    assert state.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    seen = lse[torch.isfinite(lse)].abs()
    eps = 3 * torch.finfo(state.lse.dtype).eps * (max(1.0, float(seen.max())) if seen.numel() else 1.0)
    assert worst(state.lse, lse) <= max(1.5 * worst(naive[1], lse), 4 * eps)


@given(case=cases())
@examples(16, everything=40)
def test_gradients_are_what_the_formula_says(engine: str | None, case: Case):
    def gradients(function: Any) -> list[Tensor]:
        leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
        words = dict(case.words)
        if "sink" in leaves:
            words["sink"] = leaves["sink"]
        if "bias" in leaves:
            words["bias"] = TensorBias(leaves["bias"])
        out = function(Case(leaves["q"], leaves["k"], leaves["v"], words))
        weight = torch.linspace(-1, 1, max(out.numel(), 1), dtype=out.dtype)[: out.numel()].view(out.shape)
        return list(torch.autograd.grad((out * weight).sum(), list(leaves.values()), materialize_grads=True))

    tensors = {"q": case.q, "k": case.k, "v": case.v}
    if case.words.get("sink") is not None:
        tensors["sink"] = case.words["sink"]
    if isinstance(case.words.get("bias"), TensorBias):
        tensors["bias"] = case.words["bias"].tensor
    found, truth = gradients(lambda c: run(c, engine)), gradients(lambda c: dense(c)[0])
    for ours, theirs in zip(found, truth, strict=True):
        assert worst(ours, theirs) < (1e-12 if theirs.dtype == torch.float64 else 1e-5)  # a bias may be float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_masked_changes_no_bit_of_a_later_batch_row(engine: str | None, dtype: torch.dtype):
    """The second row's keys begin anywhere in memory, where the sums of BLAS have another order."""
    mask = Prefix(torch.tensor([24, 4]))
    for _ in range(23):
        q, k, v = (torch.randn(2, heads, n, dim, dtype=dtype) for heads, n, dim in ((6, 1, 5), (1, 29, 5), (1, 29, 7)))
        clean = attend(q, k, v, mask=mask, backend=engine)
        k[:, :, 14], v[:, :, 14] = torch.inf, torch.nan
        assert torch.equal(attend(q, k, v, mask=mask, backend=engine)[1], clean[1])


@given(case=cases(), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
@examples(25, everything=60)
def test_what_is_masked_is_never_read_into_a_result(engine: str | None, case: Case, bad: float):
    """A key that some queries see and others do not, made NaN, changes no bit of the others' rows."""
    keep = kept(case)
    if not keep.numel():
        return
    key = keep.shape[3] // 2
    clean = run(case, engine)
    k, v = case.k.clone(), case.v.clone()
    k[:, :, key], v[:, :, key] = bad, bad
    dirty = run(Case(case.q, k, v, case.words), engine)
    hidden = ~keep[..., key]
    assert torch.equal(dirty[hidden], clean[hidden])
    if math.isnan(bad):  # those who see it are NaN
        assert bool(dirty[~hidden].isnan().all())


@given(case=cases())
@examples(16, everything=40)
def test_what_is_masked_is_never_read_into_a_gradient(engine: str | None, case: Case):
    keep = kept(case)
    if not keep.numel():
        return
    key = keep.shape[3] // 2
    case.words["mask"] = hides = TensorMask(keep & (torch.arange(keep.shape[3]) != key))  # hidden from everybody
    leaves = [t.detach().clone() for t in (case.q, case.k, case.v)]
    leaves[1][:, :, key] = leaves[2][:, :, key] = float("nan")
    case.q, case.k, case.v = (t.requires_grad_() for t in leaves)
    grads = torch.autograd.grad(run(case, engine, mask=hides).sum(), (case.q, case.k, case.v), materialize_grads=True)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert float(grads[1][:, :, key].abs().sum() + grads[2][:, :, key].abs().sum()) == 0


@given(case=cases(), cut=st.floats(0, 1))
@examples(16, everything=40)
def test_states_over_parts_of_the_keys_merge_to_the_whole(engine: str | None, case: Case, cut: float):
    case.words = {"softcap": case.words["softcap"]}
    keys = case.k.shape[2]
    at = int(cut * keys)
    parts = [
        attend_state(case.q, case.k[:, :, s], case.v[:, :, s], **case.words, backend=engine)
        for s in (slice(at), slice(at, None))
    ]
    whole = attend_state(case.q, case.k, case.v, **case.words, backend=engine)
    merged = parts[0] | parts[1]
    assert worst(merged.out, whole.out) < 1e-12
    assert worst(merged.lse, whole.lse) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_nothing_is_zero(engine: str | None, dtype: torch.dtype):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    state = attend_state(q, k, v, mask=Causal(), offset=-3, backend=engine)  # queries 0 to 2 stand before the first key
    assert torch.equal(state.out[:, :, :3], torch.zeros(1, 2, 3, 4, dtype=dtype))
    assert bool((state.lse[:, :, :3] == -torch.inf).all())
    (state.out.sum() + state.lse[:, :, 3:].sum()).backward()
    assert q.grad is not None
    assert torch.equal(q.grad[:, :, :3], torch.zeros(1, 2, 3, 4, dtype=dtype))
    assert bool(torch.isfinite(q.grad).all())


@pytest.mark.parametrize("sink", [None, torch.zeros(2)])
def test_a_call_that_keeps_nothing_is_zero_and_so_are_its_gradients(engine: str | None, sink: Tensor | None):
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask=TensorMask(torch.zeros(5, 5, dtype=torch.bool)), sink=sink, backend=engine)
    out.sum().backward()
    assert not out.any()
    for t in (q, k, v):
        assert t.grad is not None
        assert not t.grad.any()


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(3)])
def test_a_query_that_is_not_finite_spoils_only_the_gradients_of_what_it_sees(engine: str | None, mask: Mask):
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    q[:, :, 1] = float("nan")
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, mask=mask, backend=engine)
    grads = torch.autograd.grad(out[:, :, 2:].sum(), leaves)  # row 1 is not looked at
    assert all(bool(torch.isfinite(grad[:, :, 2:]).all()) for grad in grads)
