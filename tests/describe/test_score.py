"""Scores: each is its formula, on every engine that takes it, with gradients, masks and the log-sum-exp."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import Alibi, Causal, KeyLengths, ProblemError, TensorMask, Window, attend, attend_state, explain
from regard.backend import reference
from regard.extend import spec
from regard.scores import Additive, Bilinear, Cosine, Dot, Epanechnikov, Gaussian, Laplacian, Score, SoftDict
from tests.expressions import masks
from tests.oracle import Case, dense, kept, worst
from tests.selection import examples


def normal(*sizes: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(*sizes, generator=g, dtype=torch.float64)


def scores(heads: int = 6, kv_heads: int = 2, q_dim: int = 5, k_dim: int = 5) -> dict[str, Score]:
    """Every score, for queries and keys of those dimensions."""
    alike: dict[str, Score] = {
        "dot": Dot(),
        "cosine": Cosine(),
        "gaussian": Gaussian(1.3),
        "laplacian": Laplacian(1.7),
        "epanechnikov": Epanechnikov(3.1),
    }
    unlike: dict[str, Score] = {
        "bilinear": Bilinear(normal(q_dim, k_dim)),
        "bilinear per head": Bilinear(normal(heads, q_dim, k_dim)),
        "additive": Additive(normal(7, q_dim), normal(7, k_dim), normal(7)),
        "additive per head": Additive(normal(heads, 7, q_dim), normal(kv_heads, 7, k_dim), normal(heads, 7)),
    }
    return (alike if q_dim == k_dim else {}) | unlike


def some_for_all(*names: str) -> list[Any]:
    """Every score as a parameter; those of these names run with `--all` only."""
    return [pytest.param(name, marks=pytest.mark.exhaustive) if name in names else name for name in scores()]


def small(queries: int = 11, keys: int = 13, q_dim: int = 5, k_dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal(2, 6, queries, q_dim), normal(2, 2, keys, k_dim), normal(2, 2, keys, 3)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


# ---- worked by hand -------------------------------------------------------------------------------------------------


def test_bahdanaus_score_by_hand():
    """One hidden number: tanh(2 * 1 + 3 * 0.5) * 4 = 3.9927, against tanh(2 - 1.5) * 4 = 1.8485."""
    score = Additive(torch.tensor([[2.0]]), torch.tensor([[3.0]]), torch.tensor([4.0]))
    q, k, v = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.5], [-0.5]]]]), torch.tensor([[[[1.0], [0.0]]]])
    weight = 1 / (1 + math.exp(4 * math.tanh(0.5) - 4 * math.tanh(3.5)))
    assert attend(q, k, v, score=score).item() == pytest.approx(weight, rel=1e-6)


def test_luongs_general_score_by_hand():
    """q^T w k = 1 * 2 * 3 + 1 * 5 * 4 = 26 against 0; at scale 1/26 that is one nat."""
    score = Bilinear(torch.tensor([[2.0, 5.0]]))
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
    out = attend(q, k, torch.tensor([[[[1.0], [0.0]]]]), score=score, scale=1 / 26)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


def test_the_scaled_dot_product_of_a_course_by_hand():
    """Q = [1 0], K = [1 0; 0 1; 1 1], V = [1 2; 3 4; 5 6], d_k = 2: weights .4011 .1978 .4011, output 3 4."""
    q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]])
    v = torch.tensor([[[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]])
    assert torch.allclose(attend(q, k, v, score=Dot()), torch.tensor([3.0, 4.0]))
    weights = attend(q, k, torch.eye(3)[None, None])
    assert torch.allclose(weights, torch.tensor([0.4011, 0.1978, 0.4011]), atol=5e-5)


def test_what_scale_none_means_is_the_scores_own():
    q, k, v = small()
    for name, score in scores().items():
        own = 5**-0.5 if name == "dot" else 1.0
        assert torch.equal(attend(q, k, v, score=score), attend(q, k, v, score=score, scale=own)), name


# ---- the formula, whatever else is given ----------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(list(scores())))
    q_dim, k_dim = draw(st.sampled_from([(5, 5), (3, 7)] if "line" in name or "add" in name else [(5, 5)]))
    queries, keys = draw(st.sampled_from([(13, 13), (1, 29), (11, 23)]))
    q, k, v = small(queries, keys, q_dim, k_dim)
    words: dict[str, Any] = {
        "score": scores(q_dim=q_dim, k_dim=k_dim)[name],
        "mask": draw(st.one_of(st.none(), masks(queries, keys))),
        "bias": draw(st.sampled_from([None, Alibi(6)])),
        "scale": draw(st.sampled_from([None, 0.6])),
        "softcap": draw(st.sampled_from([None, 1.5])),
    }
    if "epanechnikov" in name:
        words["softcap"] = None  # -inf has no cap
    return Case(q, k, v, words)


@pytest.mark.parametrize("engine", [None, "reference"], ids=["chosen", "reference"])
@given(case=calls())
@examples(40, everything=120)
def test_attention_with_a_score_is_what_its_formula_says(engine: str | None, case: Case):
    truth, lse = dense(case)
    state = attend_state(case.q, case.k, case.v, **case.words, backend=engine)
    assert worst(state.out.detach(), truth.detach()) < 1e-13
    assert worst(state.lse.detach(), lse.detach()) < 1e-12


@given(case=calls())
@examples(25, everything=60)
def test_gradients_with_a_score_are_those_of_its_formula(case: Case):
    leaves = [case.q, case.k, case.v, *(t.requires_grad_() for t in case.words["score"].tensors())]
    weight = normal(2, 6, case.q.shape[2], 3)

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)

    found, truth = gradients(attend(case.q, case.k, case.v, **case.words)), gradients(dense(case)[0])
    assert all(worst(ours, theirs) < 1e-11 for ours, theirs in zip(found, truth, strict=True))


@pytest.mark.parametrize("name", some_for_all("bilinear per head", "additive per head", "laplacian"))
def test_gradients_are_right_to_the_second_order(name: str):
    # numeric derivatives cost the square of the sizes: four heads in two groups, three tokens
    q, k, v = (normal(1, heads, 3, dim).requires_grad_() for heads, dim in ((4, 3), (2, 3), (2, 2)))
    score = scores(heads=4, q_dim=3, k_dim=3)[name]
    weights = [t.requires_grad_() for t in score.tensors()]

    def call(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        made = type(score)(*weights) if weights else score
        return attend(q, k, v, score=made, mask=Causal(), backend="reference")

    assert torch.autograd.gradcheck(call, (q, k, v, *weights))
    assert torch.autograd.gradgradcheck(call, (q, k, v, *weights))


@pytest.mark.parametrize("name", scores())
def test_a_score_works_under_torch_func(name: str):
    q, k, v = (t.detach() for t in small())
    score = scores()[name]
    mapped = torch.func.vmap(lambda a, b, c: attend(a[None], b[None], c[None], score=score)[0])(q, k, v)
    assert torch.allclose(mapped, attend(q, k, v, score=score), atol=1e-12)
    tangent = torch.func.jvp(lambda t: attend(t, k, v, score=score), (q,), (torch.ones_like(q),))[1]
    step = 1e-6
    numeric = (attend(q + step, k, v, score=score) - attend(q - step, k, v, score=score)) / (2 * step)
    assert torch.allclose(tangent, numeric, atol=1e-7)


@pytest.mark.parametrize(
    "name", some_for_all("dot", "bilinear per head", "additive per head", "gaussian", "laplacian", "epanechnikov")
)
def test_a_score_compiles_to_one_graph_with_gradients_of_its_weights(name: str):
    q, k, v = (t.detach().float().requires_grad_() for t in small())
    torch._dynamo.reset()  # each score is a graph of its own
    given = scores()[name]
    weights = [t.float().requires_grad_() for t in given.tensors()]

    def call(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        return attend(q, k, v, score=type(given)(*weights) if weights else given, mask=Causal())

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = (q, k, v, *weights)
    out, plain = compiled(*leaves), call(*leaves)
    assert torch.equal(out, plain)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "kernel", [Gaussian, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (Laplacian, Epanechnikov))]
)
def test_one_compiled_function_takes_any_bandwidth(kernel: type[Gaussian | Laplacian | Epanechnikov]):
    q, k, v = (t.detach().float() for t in small())
    torch._dynamo.reset()
    compiled = torch.compile(lambda h: attend(q, k, v, score=kernel(h)), fullgraph=True, backend="eager")
    for h in (0.5, 0.75, 2.0):  # from the second value on, torch traces it as a symbol
        assert torch.equal(compiled(h), attend(q, k, v, score=kernel(h)))


# ---- what is masked, and what sees nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", scores())
def test_what_is_masked_reaches_neither_a_result_nor_a_gradient(name: str):
    q, k, v = (t.detach().clone() for t in small())
    score = scores()[name]
    clean = attend(q, k, v, score=score, mask=KeyLengths(torch.tensor([9, 9])))
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.inf
    leaves = [t.requires_grad_() for t in (q, k, v, *score.tensors())]
    out = attend(q, k, v, score=score, mask=KeyLengths(torch.tensor([9, 9])))
    assert torch.equal(out, clean)
    grads = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert not grads[1][:, :, 9:].any()


@pytest.mark.parametrize("name", scores())
def test_a_visible_nan_is_seen(name: str):
    q, k, v = (t.detach().clone() for t in small())
    k[0, 0, 4] = torch.nan
    out = attend(q, k, v, score=scores()[name], mask=Causal())
    case = Case(q, k, v, {"mask": Causal()})
    sees = kept(case)[0, :3, :, 4]  # the first group of heads
    assert bool(out[0, :3][sees].isnan().all())
    assert bool(torch.isfinite(out[0, :3][~sees]).all())
    assert bool(torch.isfinite(out[1]).all())


@pytest.mark.parametrize("name", scores())
def test_a_later_token_changes_no_bit_of_an_earlier_output(name: str):
    q, k, v = (t.detach().float() for t in small(13, 13))
    score = scores()[name]
    before = attend(q, k, v, score=score, mask=Causal())
    for t in (q, k, v):
        t[:, :, 9:] = 1e4
    assert torch.equal(attend(q, k, v, score=score, mask=Causal())[:, :, :9], before[:, :, :9])


def test_a_vector_of_zeros_has_cosine_0_with_everything_and_a_gradient_of_0():
    q, k = torch.zeros(1, 1, 1, 3, requires_grad=True), torch.randn(1, 1, 4, 3)
    out = attend(q, k, torch.eye(4)[None, None], score=Cosine())
    assert torch.allclose(out, torch.full((1, 1, 1, 4), 0.25))
    (grad,) = torch.autograd.grad(out[..., 0].sum(), q)
    assert not grad.any()


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_a_cosine_does_not_see_lengths(size: float):
    q, k, v = torch.randn(1, 2, 5, 7), torch.randn(1, 2, 5, 7), torch.randn(1, 2, 5, 7)
    assert torch.allclose(attend(q * size, k, v, score=Cosine()), attend(q, k, v, score=Cosine()), atol=1e-6)


def test_a_query_outside_of_every_kernels_support_gives_0_and_no_gradient():
    q, k, v = torch.tensor([[[[9.0]]]], requires_grad=True), torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 3, 1)
    state = attend_state(q, k, v, score=Epanechnikov(2.0))
    assert state.out.item() == 0
    assert state.lse.item() == -math.inf
    (grad,) = torch.autograd.grad(state.out.sum(), q)
    assert grad.item() == 0


# ---- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scores())
def test_states_over_different_keys_merge(name: str):
    q, k, v = (t.detach() for t in small())
    score = scores()[name]
    parts = attend_state(q, k[:, :, :5], v[:, :, :5], score=score) | attend_state(
        q, k[:, :, 5:], v[:, :, 5:], score=score
    )
    whole = attend_state(q, k, v, score=score)
    assert torch.allclose(parts.out, whole.out, atol=1e-13)
    assert torch.allclose(parts.lse, whole.lse, atol=1e-13)


@pytest.mark.parametrize("name", scores())
def test_at_temperature_0_attention_is_a_hard_look_up(name: str):
    q, k, v = (t.detach() for t in small())
    score = scores()[name]
    weights = attend(q, k, torch.eye(13, dtype=torch.float64).expand(2, 2, 13, 13), score=score)
    best, some = weights.argmax(dim=3), weights.sum(dim=3) > 0  # a kernel with a support may see nothing
    hard = v.repeat_interleave(3, dim=1).gather(2, best[..., None].expand(2, 6, 11, 3))[some]
    errors = [float((attend(q, k, v, score=score, scale=1 / t)[some] - hard).abs().max()) for t in (1.0, 1e-2, 1e-6)]
    assert errors[0] > 0.1
    assert errors[1] < errors[0]
    assert errors[2] < 1e-6


def test_the_softmax_kernel_is_a_gaussian_times_norms():
    """exp(q.k / sqrt d) = exp((|q|^2 + |k|^2) / (2 sqrt d)) exp(-|q - k|^2 / (2 sqrt d)): h^2 = sqrt d."""
    q, k, v = (t.detach() for t in small())
    root = math.sqrt(5)
    norms = torch.exp(
        (q.square().sum(-1)[..., :, None] + k.square().sum(-1).repeat_interleave(3, 1)[..., None, :]) / (2 * root)
    )
    distance = (q[..., :, None, :] - k.repeat_interleave(3, 1)[..., None, :, :]).square().sum(-1)
    kernel = norms * torch.exp(-distance / (2 * root))
    wide = v.repeat_interleave(3, 1)
    assert torch.allclose(attend(q, k, v), kernel @ wide / kernel.sum(-1, keepdim=True), atol=1e-13)


def test_for_keys_of_equal_norms_the_dot_product_and_the_gaussian_are_the_same():
    q, k, v = (t.detach() for t in small())
    k = torch.nn.functional.normalize(k, dim=3) * 2
    gaussian = attend(q, k, v, score=Gaussian(5**0.25))
    assert torch.allclose(attend(q, k, v), gaussian, atol=1e-13)
    of_unit_queries = attend(torch.nn.functional.normalize(q, dim=3), k, v, scale=1.5)
    assert torch.allclose(attend(q, k, v, score=Cosine(), scale=3.0), of_unit_queries, atol=1e-13)


def test_the_gaussian_of_close_points_far_from_0_is_exact():
    """Squares of 1e6 cancel to 1: in float32 nothing would be left."""
    x = torch.tensor([1000.0, 1001.0, 1002.0]).reshape(1, 1, 3, 1)
    near = attend(x - 1000, x - 1000, x - 1000, score=Gaussian(1.0)) + 1000
    assert torch.allclose(attend(x, x, x, score=Gaussian(1.0)), near, rtol=1e-7)


# ---- memory, cost, explanation, errors ------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_additive_attention_needs_no_memory_for_all_pairs():
    """2,048 tokens and 16 hidden units: all pairs would take 256 MiB a head, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else (result,):
                if isinstance(t, Tensor):
                    self.size = max(self.size, t.untyped_storage().nbytes())
            return result

    q, k, v = (torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3))
    score = Additive(torch.randn(16, 8), torch.randn(16, 8), torch.randn(16))
    plan = explain(q, k, v, score=score, mask=Causal())
    with Largest() as largest:
        attend(q, k, v, score=score, mask=Causal())  # as one operator, which a mode does not look into
    assert plan.backend == "reference"
    from regard.dispatch.execute import execute
    from regard.dispatch.plan_cache import prepare
    from regard.plan.request import Request

    prepared = prepare(Request(q, k, v, Causal(), score=score))
    assert prepared is not None
    with Largest() as largest:
        execute(*prepared, None)[1].out.sum().backward()
    assert largest.size <= 16 << 20


def test_heads_taken_one_by_one_are_heads_taken_at_once(monkeypatch: pytest.MonkeyPatch):
    q, k, v = small()
    for name, score in scores().items():
        leaves = (q, k, v, *(t.requires_grad_() for t in score.tensors()))
        whole = attend(q, k, v, score=score, mask=Causal(), backend="reference")
        expected = torch.autograd.grad(whole.sum(), leaves)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "SLAB", 100)
            parts = attend(q, k, v, score=score, mask=Causal(), backend="reference")
            found = torch.autograd.grad(parts.sum(), leaves)
        assert torch.allclose(parts, whole, atol=1e-14), name
        assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(found, expected, strict=True)), name


def test_weights_of_heads_taken_one_by_one_must_not_be_written_to_before_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reference, "SLAB", 100)
    q, k, v = small()
    weights = normal(6, 3)
    out = attend(q, k, v, score=Additive(normal(6, 3, 5), normal(2, 3, 5), weights), backend="reference")
    weights.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_explain_says_what_is_done_to_a_score_and_what_it_costs():
    q, k, v = (t.detach() for t in small(q_dim=3, k_dim=7))
    plan = explain(q, k, v, score=scores(q_dim=3, k_dim=7)["bilinear"])
    assert "prepare_score: Bilinear(w) is the dot product of w^T q and k" in str(plan)
    assert plan.flops == 2 * plan.schedule.pairs * (7 + 3)
    assert str(plan).startswith(
        "q [2, 6, 11, 3] · kv [2, 2, 13, 7|3] float64 on cpu, mask None, bias None, score Bilinear"
    )
    plan = explain(q, k, v, score=scores(q_dim=3, k_dim=7)["additive"])
    assert plan.backend == "reference"
    assert "not chosen: native (the score v . tanh(q + k), v float64[7] is not known to it" in str(plan)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Bilinear(torch.zeros(5, 4)), r"w \[5, 4\], and q has 5 dimensions and k 5: expected \[5, 5\]"),
        (Bilinear(torch.zeros(4, 5, 5)), r"for 4 heads, and the call has 6 query heads"),
        (Additive(torch.zeros(7, 4), torch.zeros(7, 5), torch.zeros(7)), r"w_q\) is \[7, 4\] and q has 5 dimensions"),
        (
            Additive(torch.zeros(7, 5), torch.zeros(3, 7, 5), torch.zeros(7)),
            "for 3 heads, and the call has 2 key heads",
        ),
        (
            Additive(torch.zeros(7, 5), torch.zeros(7, 5), torch.zeros(4, 7)),
            "for 4 heads, and the call has 6 query heads",
        ),
    ],
)
def test_a_score_that_does_not_fit_says_so(score: Score, message: str):
    q, k, v = (t.detach().float() for t in small())
    with pytest.raises(ProblemError, match=message):
        attend(q, k, v, score=score)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: s[..., :1, :], r"returned \[2, 2, 3, 1, 7\] of torch.float32; expected .*, here \[2, 2, 3, 5, 7\]"),
        (lambda s: s[0, 0, 0, 0], r"returned \[7\] of torch.float32"),
        (lambda s: s > 0, r"of torch.bool; .*, of torch.float32\.$"),
        (lambda s: None, r"compare\(q, k\) returned NoneType; expected a tensor\.$"),
    ],
)
def test_a_score_of_ones_own_gives_a_number_for_each_pair(wrong: Any, message: str):
    @spec
    class Own(Score):
        changed: Any

        def compare(self, q: Tensor, k: Tensor) -> Tensor:
            return self.changed((q @ k.mT).double())

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 3)
    torch.testing.assert_close(attend(q, k, v, score=Own(lambda s: s)), attend(q, k, v, scale=1.0))
    with pytest.raises(ProblemError, match=message):
        attend(q, k, v, score=Own(lambda s: wrong(s.float())))


def test_unlike_queries_and_keys_need_a_score_that_compares_them():
    q, k, v = small(q_dim=3, k_dim=7)
    for score in (None, Dot(), Cosine(), Gaussian(1.0)):
        with pytest.raises(ProblemError, match="q has 3 dimensions and k 7"):
            attend(q, k, v, score=score)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(0.0), r"Gaussian\(bandwidth=0.0\): expected a finite number above 0"),
        (lambda: Laplacian(-1), "above 0"),
        (lambda: Epanechnikov(math.inf), "finite"),
        (lambda: Gaussian(True), "True"),
        (lambda: Bilinear(torch.zeros(3)), r"Bilinear\(w\) is torch.float32 \[3\]"),
        (lambda: Bilinear(torch.zeros(3, 3, dtype=torch.int64)), "expected floats"),
        (lambda: Additive(torch.zeros(7, 5), torch.zeros(8, 5), torch.zeros(7)), "7 hidden units in w_q"),
        (lambda: Additive(torch.zeros(7, 5), torch.zeros(7, 5), torch.zeros(7, 1, 1)), r"Additive\(v\)"),
    ],
)
def test_a_score_that_makes_no_sense_says_so(make: Any, message: str):
    with pytest.raises(ProblemError, match=message):
        make()


def test_a_score_whose_weights_change_in_place_is_a_new_score():
    q, k, v = (t.detach().float() for t in small())
    w = torch.eye(5)
    score = Bilinear(w)
    before = attend(q, k, v, score=score)
    assert torch.allclose(before, attend(q, k, v, scale=1.0), atol=1e-6)
    w.mul_(2)
    assert torch.allclose(attend(q, k, v, score=score), attend(q, k, v, scale=2.0), atol=1e-6)


def test_scores_in_half_precision_are_as_exact_as_their_inputs():
    q, k, v = (t.detach().bfloat16() for t in small())
    for name, score in scores().items():
        case = Case(q, k, v, {"score": score, "mask": Window(7)})
        error = worst(attend(q, k, v, score=score, mask=Window(7)), dense(case)[0])
        naive = worst(dense(case, torch.bfloat16)[0], dense(case)[0])
        assert error <= 1.5 * naive, name  # both round projections and norms once, which of them luckier is chance


def test_a_mask_per_head_meets_a_score_per_head():
    q, k, v = small()
    case = Case(q, k, v, {"score": scores()["additive per head"], "mask": TensorMask(normal(6, 11, 13) > 0)})
    assert torch.allclose(attend(q, k, v, **case.words), dense(case)[0], rtol=0, atol=1e-13)


# ---- what is easily got wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scores())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_it_does_not_matter_how_tensors_lie_in_memory(name: str, dtype: torch.dtype):
    q, k, v = (t.detach().to(dtype) for t in small())
    apart = [t.mT.contiguous().mT for t in (q, k, v)]
    assert torch.allclose(attend(*apart, score=scores()[name]), attend(q, k, v, score=scores()[name]), atol=1e-6)


@pytest.mark.parametrize("name", scores())
def test_autocast_leaves_a_score_in_the_type_of_its_operands(name: str):
    q, k, v = (t.detach().bfloat16() for t in small())
    plain = attend(q, k, v, score=scores()[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v, score=scores()[name]), plain)


@pytest.mark.parametrize("name", scores())
def test_reference64_computes_all_of_a_score_in_float64(name: str):
    q, k, v = (t.detach().bfloat16() for t in small())
    truth = dense(Case(q, k, v, {"score": scores()[name]}))[0]
    found = attend(q, k, v, score=scores()[name], backend="reference64")
    assert found.dtype == torch.bfloat16
    assert worst(found, truth) <= torch.finfo(torch.bfloat16).eps / 2 * float(truth.abs().max())


@pytest.mark.parametrize("kernel", [Gaussian, Epanechnikov, Laplacian])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernels_see_differences_however_far_from_0_points_are(kernel: type[Gaussian], dtype: torch.dtype):
    """Seconds since 1970; in float32, what it can still tell apart."""
    start = 1.7e9 if dtype == torch.float64 else 2.0**20
    x = torch.arange(50, dtype=dtype).reshape(1, 1, 50, 1)
    near = attend(x, x, x.sin(), score=kernel(2.0))
    assert torch.allclose(attend(x + start, x + start, x.sin(), score=kernel(2.0)), near, atol=1e-6)


@pytest.mark.parametrize("kernel", [Gaussian, Epanechnikov, Laplacian])
@pytest.mark.parametrize("bandwidth", [1e-100, 1e-46, 1e-23, 1e200])
def test_a_bandwidth_may_be_far_from_the_points_scale(kernel: type[Gaussian], bandwidth: float):
    x = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1)
    out = attend(x, x, x, score=kernel(bandwidth)).flatten().tolist()
    assert out == ([1.0, 1.0, 1.0] if bandwidth > 1 else [0.0, 1.0, 2.0])


@pytest.mark.parametrize("size", [3e38, 1e-44])
def test_a_cosine_is_right_to_the_ends_of_float32(size: float):
    q, k = torch.tensor([[[[size, size]]]]), torch.tensor([[[[1.0, 1.0], [1.0, -1.0]]]])
    found = attend(q, k, torch.eye(2)[None, None], score=Cosine())
    assert found[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


@pytest.mark.parametrize("words", [{"softcap": 5.0}, {"scale": 0.0}, {"scale": -1.0}])
def test_a_support_stays_whatever_scale_and_softcap_make_of_scores(words: dict[str, float]):
    q, k = torch.tensor([[[[0.0], [9.0]]]]), torch.tensor([[[[0.0], [1.0], [5.0]]]])
    out = attend(q, k, torch.eye(3)[None, None], score=Epanechnikov(2.0), **words)
    assert not out[0, 0, 1].any()
    assert out[0, 0, 0, 2] == 0
    assert out[0, 0, 0].sum().item() == pytest.approx(1)


def test_a_key_on_the_border_of_a_support_has_no_weight_and_no_gradient():
    q, k = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.tensor([[[[0.5], [2.0]]]], requires_grad=True)
    out = attend(q, k, torch.eye(2)[None, None], score=Epanechnikov(2.0))
    assert out.flatten().tolist() == [1.0, 0.0]
    assert all(bool(torch.isfinite(grad).all()) for grad in torch.autograd.grad(out[..., 1].sum(), (q, k)))


def test_large_projections_of_half_precision_saturate_and_do_not_overflow():
    q = torch.full((1, 1, 3, 4), 300.0, dtype=torch.float16)
    score = Additive(torch.full((2, 4), 100.0), torch.full((2, 4), -100.0), torch.ones(2))  # 120,000 - 120,000
    assert torch.allclose(attend(q, q, q, score=score), q)


@spec
class Centred(Dot):
    """The dot product of deviations from 1, at the scale of a width of 4."""

    def default_scale(self, qk_dim: int) -> float:
        return 0.5

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        return super().compare(q - 1, k - 1)


def test_a_subclass_of_the_dot_product_compares_by_itself():
    q, k, v = small()
    torch.testing.assert_close(attend(q, k, v, score=Centred()), attend(q - 1, k - 1, v, scale=0.5))
    book = SoftDict(k[0, 0].detach(), v[0, 0].detach(), score=Centred())
    torch.testing.assert_close(book.weights(q[0, 0]), torch.softmax((q[0, 0] - 1) @ (k[0, 0] - 1).mT / 2, 1))


@spec
class Doubled(Dot):
    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Score | None]:
        return 2 * q, k, None


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_prepare_that_would_not_be_called_is_an_error(backend: str | None):
    with pytest.raises(ProblemError, match="Doubled defines prepare and no classmethod prepared"):
        attend(*small(), score=Doubled(), backend=backend)
