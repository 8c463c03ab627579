"""Every engine, on every case of the table and in every type, is what the formula says, or says why it is not run."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard import (
    Causal,
    KeyLengths,
    Mask,
    RefusalError,
    T5Bias,
    TensorBias,
    Window,
    attend,
    attend_state,
    explain,
    observe_calls,
)
from regard.describe.score_function import ScoreFunction
from regard.dispatch.choose import BACKENDS
from regard.dispatch.execute import execute
from regard.dispatch.plan_cache import prepare
from regard.plan.request import Request
from tests.conformance import CASES, DIFFERENTIATED, computes_the_formula
from tests.oracle import Case, dense, worst

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LONG = pytest.mark.exhaustive
COMPILED = ("everything", "window and sinks", "packed documents", "biases added")
"""What flex is tried on: each compiles for up to half a minute."""
LIKE_OTHERS = (
    "dense",
    "multi-head",
    "causal",
    "causal, keys before the queries",
    "causal, corner at the top left",
    "window",
    "window longer than the sequence",
    "window to both sides",
    "ragged padding",
    "packed documents",
    "longformer",
    "strided",
    "alibi",
    "scale",
)
"""What takes the same way through the kernels for GPUs as other cases do: masks reach them as lists of tiles."""
INTERPRETED = [
    pytest.param(name, marks=LONG) if name in LIKE_OTHERS or name in DIFFERENTIATED else name for name in CASES
]
"""What Triton's interpreter, which is slow, is tried on; test_triton.py has the differentiated cases."""


@pytest.mark.representative
@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", [name for name in BACKENDS if name not in ("flex", "triton")])
@pytest.mark.parametrize("name", CASES)
def test_an_engine_computes_the_formula_or_says_why_not(name: str, engine: str, dtype: torch.dtype):
    _computes_the_formula_or_says_why_not(name, engine, dtype)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernels_for_gpus_compute_the_formula_or_say_why_not(name: str, dtype: torch.dtype):
    _computes_the_formula_or_says_why_not(name, "triton", dtype)


def _computes_the_formula_or_says_why_not(name: str, engine: str, dtype: torch.dtype) -> None:
    try:
        computes_the_formula(name, dtype, engine)
    except RefusalError as refusal:
        assert f"{engine}: " in str(refusal)  # noqa: PT017
        pytest.skip(_reasons(refusal))


def _reasons(refusal: RefusalError) -> str:
    """The lines of a refusal that say why, in one."""
    return "; ".join(line.strip() for line in str(refusal).split("\n")[2:-1])


WITH: dict[str, dict[str, Any]] = {
    "a softcap": {"softcap": 5.0},
    "a bias tensor and dropout": {"bias": "tensor", "dropout": 0.2},
    "a bias by distance and a sink": {"bias": "distance", "sink": True},
    "a softcap, a bias tensor, dropout and a sink": {"softcap": 5.0, "bias": "tensor", "dropout": 0.2, "sink": True},
    "a softcap and a bias by distance": {"softcap": 5.0, "bias": "distance"},
}


def _hiding(case: str, engine: str, mask: Mask, q: Tensor, k: Tensor, v: Tensor, up: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k, v, the bias and the sink, of a call that has more than its mask."""
    torch.manual_seed(1)
    words: dict[str, Any] = {"mask": mask, **WITH[case]}
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    if kind := words.get("bias"):
        leaves.append(torch.randn(*((131, 131) if kind == "tensor" else (32, 2)), requires_grad=True))
        words["bias"] = TensorBias(leaves[-1]) if kind == "tensor" else T5Bias(leaves[-1])
    if "sink" in words:
        leaves.append(torch.randn(2, requires_grad=True))
        words["sink"] = leaves[-1]
    out = attend(*leaves[:3], **words, backend=engine)
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("engine", ["native", "reference", "triton"])
@pytest.mark.parametrize("case", WITH)
def test_hidden_keys_that_are_not_finite_reach_no_gradient_whatever_the_call_has(case: str, engine: str, poison: float):
    _skip_where_refused(engine)
    q, k, v, up = torch.randn(4, 1, 2, 131, 16)
    results = list[list[Tensor]]()
    for hidden in (poison, 0.0):
        k[:, :, 101:] = v[:, :, 101:] = hidden
        results.append(_hiding(case, engine, KeyLengths(torch.tensor([101])), q, k, v, up))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("engine", ["native", "reference", "triton"])
@pytest.mark.parametrize("case", WITH)
def test_a_query_that_is_not_finite_reaches_gradients_of_the_keys_that_it_sees_alone(case: str, engine: str):
    _skip_where_refused(engine)
    q, k, v, up = torch.randn(4, 1, 2, 131, 16)
    up[:, :, 0] = 0
    results = list[list[Tensor]]()
    for first in (math.nan, 0.0):
        q[:, :, 0] = first
        results.append(_hiding(case, engine, Causal(), q, k, v, up)[:4])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found[:, :, 1:], expected[:, :, 1:])


def _skip_where_refused(engine: str) -> None:
    q = torch.empty(1, 1, 1, 16)
    try:
        explain(q, q, q, backend=engine)
    except RefusalError as refusal:
        pytest.skip(_reasons(refusal))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_hidden_keys_that_are_not_finite_do_not_reach_what_a_function_of_the_score_captures(softcap: float | None):
    q, k, v = torch.randn(3, 1, 2, 131, 16)
    factor = torch.randn(2, requires_grad=True)
    bias = ScoreFunction(lambda score, b, h, i, j: torch.tanh(score * factor[h]), (factor,))

    def gradient() -> Tensor:
        out = attend(q, k, v, mask=KeyLengths(torch.tensor([101])), bias=bias, softcap=softcap)
        return torch.autograd.grad(out.sin().sum(), factor)[0]

    expected = gradient()
    k[:, :, 101:] = v[:, :, 101:] = math.nan
    torch.testing.assert_close(gradient(), expected)


@pytest.mark.parametrize("engine", ["native", "reference", "triton"])
def test_gradients_that_flow_in_may_be_negated_lazily(engine: str):
    _skip_where_refused(engine)
    q, k, v, up = torch.randn(4, 1, 2, 37, 16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    state = attend_state(*leaves, mask=Causal(), backend=engine)
    flowing = [up, up[..., 0].contiguous()]
    negated = [cast(Any, torch)._neg_view(-t) for t in flowing]
    expected = torch.autograd.grad([state.out, state.lse], leaves, flowing, retain_graph=True)
    found = torch.autograd.grad([state.out, state.lse], leaves, negated)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_reference_refuses_nothing():
    for make in CASES.values():
        case = make()
        assert explain(case.q, case.k, case.v, **case.words, backend="reference").backend == "reference"


SCORES = {"additive", "additive per head", "gaussian", "laplacian", "epanechnikov, some with no neighbour"}
"""Cases whose score is no dot product, even after its preparation."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        ("native", SCORES),
        ("triton", SCORES),
        ("flex", SCORES | {"sinks learned per head", "everything"}),  # a sink needs the log-sum-exp
    ],
)
def test_an_engine_refuses_these_cases_alone(engine: str, refused: set[str], dtype: torch.dtype):
    """Without it the tests above would skip what an engine no longer takes."""
    _skip_where_refused(engine)
    if engine != "native" and dtype == torch.float64:
        refused = set(CASES)

    def is_refused(case: Case) -> bool:
        try:
            explain(*(t.to(dtype) for t in (case.q, case.k, case.v)), **case.words, backend=engine)
        except RefusalError:
            return True
        return False

    assert {name for name, make in CASES.items() if is_refused(make())} == refused


@pytest.mark.usefixtures("no_library")
def test_sdpa_takes_what_torch_computes_without_a_mask():
    cases = {name: make() for name, make in CASES.items()}
    taken = {name for name, case in cases.items() if explain(case.q, case.k, case.v, **case.words).backend == "sdpa"}
    assert taken == {
        "dense",
        "multi-head",
        "multi-query",
        "causal",
        "causal, three tiles",
        "causal, corner at the top left",
        "decoding",
        "window longer than the sequence",
        "scale",
        "cosine",
    }


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sdpa_reads_tokens_that_overlap_in_memory(dtype: torch.dtype, which: int, step: int):
    tensors = [torch.randn(1, 2, tokens, 64).to(dtype) for tokens in (37, 293, 293)]
    tensors[which] = torch.randn(2000).to(dtype).as_strided(tensors[which].shape, (0, 1000, step, 1))
    up = torch.randn(1, 2, 37, 64).to(dtype)

    def differentiated(backend: str) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = attend(*leaves, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, up)]

    for found, truth in zip(differentiated("sdpa"), differentiated("reference64"), strict=True):
        assert worst(found, truth) <= 16 * torch.finfo(dtype).eps * max(1.0, float(truth.abs().max()))


def test_sdpa_says_that_observers_need_its_log_sum_exp():
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    attend(q, q, q, backend="sdpa")
    with observe_calls(lambda _: None), pytest.raises(RefusalError, match="observers need, has no gradient"):
        attend(q, q, q, backend="sdpa")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMPILED)
def test_flex_computes_the_formula_where_it_compiles(name: str):
    case = CASES[name]()
    case = Case(case.q, case.k, case.v, {n: word for n, word in case.words.items() if n != "sink"})
    plan_words = {**case.words, "backend": "flex"}
    try:
        explain(case.q, case.k, case.v, **plan_words)
    except RefusalError as refusal:
        pytest.skip(_reasons(refusal))
    assert worst(attend(case.q, case.k, case.v, **plan_words), dense(case)[0]) < 5e-6


def test_flex_says_what_it_lacks_on_cpu():
    q = torch.randn(1, 2, 3, 16, requires_grad=True)
    with pytest.raises(RefusalError, match="no gradients on cpu"):
        attend(q, q, q, backend="flex")
    with pytest.raises(RefusalError, match="no log-sum-exp on cpu"):
        attend_state(q.detach(), q.detach(), q.detach(), backend="flex")


@pytest.mark.parametrize("engine", ["reference64", "reference"])
def test_float64_on_request_is_better_than_float32(engine: str):
    case = CASES["everything"]()
    out = attend(case.q, case.k, case.v, **case.words, backend=engine)
    error = worst(out, dense(case)[0])
    rounding = torch.finfo(torch.float32).eps / 2 * float(out.abs().max())
    assert (error <= rounding) == (engine == "reference64")


@pytest.mark.exhaustive
def test_the_reference_needs_no_memory_for_all_scores():
    """32,768 tokens: scores would take 4 GiB a head. The largest tensor is watched."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else (result,):
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.untyped_storage().nbytes())
            return result

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
        prepared = prepare(Request(q, k, v, mask, backend="reference"))
        assert prepared is not None
        plan, operands = prepared
        return execute(plan, operands, "reference")[1].out  # not through `attend`: a mode is shown that as one operator

    q, k, v = (torch.randn(1, 1, 32_768, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        run(q, k, v, Causal() & Window(2048)).sum().backward()
        run(q.detach()[:, :, -512:], k.detach(), v.detach(), Causal())
    assert 1 << 20 < largest.size <= 16 << 20


def test_gradients_of_a_large_problem_are_those_of_a_small_one(monkeypatch: pytest.MonkeyPatch):
    """Tiles recomputed in the backward pass give the same as tiles remembered."""
    from regard.backend import reference

    case = CASES["everything"]()
    table = torch.randn(2, 1, 53, 211, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
        words = {**case.words, "bias": TensorBias(table), "backend": "reference"}
        return torch.autograd.grad(attend(*leaves, **words).sin().sum(), (*leaves, table))

    remembered = gradients()
    monkeypatch.setattr(reference, "REMEMBERED", 0)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(), remembered, strict=True))


@pytest.mark.parametrize("which", ["q", "k", "v", "table"])
def test_what_a_large_problem_reads_again_must_not_be_written_to_before_the_backward_pass(
    which: str, monkeypatch: pytest.MonkeyPatch
):
    from regard.backend import reference

    monkeypatch.setattr(reference, "REMEMBERED", 0)
    leaf = torch.randn(1, 1, 16, 8, requires_grad=True)
    read = {"q": leaf * 1, "k": leaf * 1, "v": leaf * 1, "table": torch.randn(16, 16)}
    out = attend(*(read[name] for name in "qkv"), bias=TensorBias(read["table"]), backend="reference")
    read[which].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_a_large_problem_reads_again_may_be_made_in_inference_mode(monkeypatch: pytest.MonkeyPatch):
    from regard.backend import reference

    with torch.inference_mode():
        q, table = torch.randn(1, 1, 16, 8), torch.randn(16, 16)
    k = torch.randn(1, 1, 16, 8, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(attend(q, k, k, bias=TensorBias(table), backend="reference").sin().sum(), k)[0]

    remembered = gradient()
    monkeypatch.setattr(reference, "REMEMBERED", 0)
    torch.testing.assert_close(gradient(), remembered)


def test_dropout_is_seeded_by_torchs_generator_and_keeps_the_mean():
    q, k, v = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 512, 8), torch.ones(1, 1, 512, 4)

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return attend(q, k, v, dropout=0.25, mask=Causal())

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    mean = torch.stack([drawn(seed) for seed in range(40)]).mean()
    assert abs(float(mean) - 1) < 0.01


def test_dropout_of_a_large_problem_drops_the_same_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    from regard.backend import reference

    monkeypatch.setattr(reference, "REMEMBERED", 0)
    q, k = torch.randn(1, 1, 16, 8, dtype=torch.float64), torch.randn(1, 1, 16, 8, dtype=torch.float64)
    v = torch.randn(1, 1, 16, 4, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, dropout=0.5, backend="reference")
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose((grad * v).sum(), out.sum())  # linear in v: only the same dropped weights give this
