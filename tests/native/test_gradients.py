"""Gradients of every word and tensor, against finite differences and the formula in float64."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual

from regard import (
    Alibi,
    Causal,
    KeyLengths,
    Prefix,
    ProblemError,
    RefusalError,
    T5Bias,
    TensorBias,
    TensorMask,
    Window,
    attend,
    attend_state,
)
from regard.backend import native
from tests.conformance import CASES, dot_products
from tests.native.engines import BEST, LEAST_AND_BEST, PLAIN
from tests.oracle import Case, dense, worst


def small(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
@pytest.mark.parametrize(
    "mask", [None, Causal(), Causal() & Window(2) | Prefix(1), TensorMask(torch.zeros(4, 5) > 1)], ids=str
)
def test_derivatives_of_all_that_flows(engine: str, mask: Any):
    q, k, v, sink = small(1, 4, 4, 3), small(1, 2, 5, 3), small(1, 2, 5, 2), small(4)
    table, tensor, other = small(8, 4), small(1, 1, 4, 5), small(4, 1, 5)

    def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, table: Tensor, tensor: Tensor, other: Tensor) -> Tensor:
        bias = T5Bias(table, max_distance=16) + TensorBias(tensor) + Alibi(4) + TensorBias(other)
        return attend(q, k, v, sink=sink, bias=bias, mask=mask, softcap=3.0, backend=engine)

    assert torch.autograd.gradcheck(call, (q, k, v, sink, table, tensor, other))


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_derivatives_of_the_log_sum_exp_and_of_both(engine: str):
    q, k, v, table = small(1, 4, 4, 3), small(1, 2, 5, 3), small(1, 2, 5, 2), small(8, 4)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        state = attend_state(q, k, v, mask=Causal(), bias=T5Bias(table, max_distance=16), backend=engine)
        return state.out, state.lse

    assert torch.autograd.gradcheck(call, (q, k, v, table))
    assert torch.autograd.gradcheck(lambda *t: call(*t)[1], (q, k, v, table))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (1, 1), (3, 1, 5, 7), (2, 1, 7), (3, 2, 1, 1)], ids=str)
def test_derivatives_of_a_bias_that_broadcasts(shape: tuple[int, ...]):
    q, k, bias = small(3, 2, 5, 2), small(3, 1, 7, 2), small(*shape)
    for engine in (BEST, PLAIN):
        assert torch.autograd.gradcheck(lambda b, e=engine: attend(q, k, k, bias=TensorBias(b), backend=e), (bias,))


STRANGE: dict[str, Any] = {
    "expanded": lambda t: t[:, :, :5].expand(3, 2, 5, 7),
    "by columns": lambda t: t[:, :, :5].mT.contiguous().mT,
    "every other row": lambda t: t[:, :, ::2],
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("engine", [BEST, PLAIN])
def test_derivatives_of_a_bias_that_lies_strangely(name: str, engine: str):
    q, k, bias = small(3, 2, 5, 2), small(3, 1, 7, 2), small(3, 1, 10, 7)

    def call(t: Tensor) -> Tensor:
        return attend(q, k, k, bias=TensorBias(STRANGE[name](t)), backend=engine)

    assert torch.autograd.gradcheck(call, (bias,))


@pytest.mark.parametrize("queries", [1, 5, 23])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_few_rows_write_the_gradients_of_all_keys_also_of_blocks_that_none_sees(
    engine: str, dtype: torch.dtype, queries: int
):
    keep = torch.rand(queries, 700) < 0.5
    for hidden in (slice(0, 200), slice(300, 520), slice(650, 700)):
        keep[:, hidden] = False
    q, k, v, table, weight = (
        torch.randn(*sizes, dtype=dtype).double()
        for sizes in ((2, 6, queries, 72), (2, 2, 700, 72), (2, 2, 700, 130), (32, 6), (2, 6, queries, 130))
    )
    k[:, :, 350:400], v[:, :, 660] = torch.nan, torch.inf

    def gradients(backend: str, to: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(to).requires_grad_() for t in (q, k, v)]
        learned = table.to(torch.promote_types(to, torch.float32)).requires_grad_()
        words: dict[str, Any] = {"mask": TensorMask(keep), "bias": T5Bias(learned, max_distance=1024)}
        out = attend(*leaves, **words, backend=backend)
        return torch.autograd.grad((out * weight.to(to)).sum(), [*leaves, learned])

    limit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for found, truth in zip(gradients(engine, dtype), gradients("reference", torch.float64), strict=True):
        assert worst(found, truth) <= limit * truth.abs().max()
    assert not gradients(engine, dtype)[1][:, :, 300:520].any()


def test_an_expanded_bias_gets_a_gradient_for_each_element():
    q, k = small(1, 2, 3, 2), small(1, 2, 4, 2)
    bias = torch.randn(4, dtype=torch.float64).expand(2, 3, 4).requires_grad_()

    def gradient(engine: str) -> Tensor:
        return torch.autograd.grad(attend(q, k, k, bias=TensorBias(bias), backend=engine).sin().sum(), bias)[0]

    assert torch.allclose(gradient(BEST), gradient("reference"))


def test_a_bias_whose_rows_are_placed_gets_zeros_for_the_others():
    q, k, bias = small(1, 1, 3, 2), small(1, 1, 6, 2), small(6, 6)

    def call(b: Tensor) -> Tensor:
        return attend(q, k, k, bias=TensorBias(b, offset=0), offset=2, backend=BEST)

    assert torch.autograd.gradcheck(call, (bias,))


@pytest.mark.representative
@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("name", dot_products())
@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_the_table_of_calls_are_those_of_the_formula(name: str, engine: str, dtype: torch.dtype):
    case = CASES[name]().to(dtype)
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(*case.q.shape[:3], case.v.shape[3], generator=g, dtype=torch.float64).to(dtype)

    def gradients(function: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(kind).requires_grad_() for t in (case.q, case.k, case.v)]
        out = function(Case(*leaves, case.words))
        return list(torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves))

    ours = gradients(lambda c: attend(c.q, c.k, c.v, **c.words, backend=engine), dtype)
    truth = gradients(lambda c: dense(c)[0], torch.float64)
    naive = gradients(lambda c: dense(c, dtype)[0], dtype)
    for found, true, plain in zip(ours, truth, naive, strict=True):
        # weights are recomputed from a log-sum-exp that was rounded: of 15, say, to 16 units of 1
        units = {torch.float64: 64, torch.float32: 16}.get(dtype, 1) * torch.finfo(dtype).eps
        assert worst(found, true) <= max(2 * worst(plain, true), units * max(1.0, float(true.abs().max())))


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_hidden_does_not_reach_a_gradient(engine: str, dtype: torch.dtype):
    q, k, v = (torch.randn(2, 2, 70, 8).to(dtype) for _ in range(3))
    k[1, :, 40:], v[1, :, 40:] = torch.nan, torch.inf
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, mask=KeyLengths(torch.tensor([70, 40])), backend=engine)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert bool(torch.isfinite(out).all())
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert not grads[1][1, :, 40:].any()
    assert not grads[2][1, :, 40:].any()


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it(engine: str, dtype: torch.dtype):
    q, k, v = (torch.randn(1, 2, 150, 24).to(dtype) for _ in range(3))

    def gradient() -> Tensor:
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(attend(leaf, k, v, mask=Causal(), backend=engine).sum(), leaf)[0]

    finite = gradient()
    k[:, :, 45, 20] = torch.nan
    found = gradient()
    assert torch.equal(found[:, :, :45], finite[:, :, :45])
    assert bool(found[:, :, 45:].isnan().all())


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])
def test_a_row_that_sees_nothing_has_gradients_of_zero_whatever_flows_into_it(engine: str):
    leaves = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)]
    sink = torch.zeros(2, requires_grad=True)
    out = attend(*leaves, mask=Causal(), offset=-65, sink=sink, backend=engine)
    flowing = torch.full_like(out, torch.nan)
    flowing[:, :, 65:] = 1.0
    grads = torch.autograd.grad(out, (*leaves, sink), flowing)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert not grads[0][:, :, :65].any()


@pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN, "reference"])
@pytest.mark.parametrize("size", [torch.inf, -torch.inf, 88.0, -88.0])
def test_a_sink_of_any_size_has_the_gradient_of_its_share(engine: str, size: float):
    """An infinite sink takes all of the softmax, or nothing of it: then nothing flows into it."""
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    sink = torch.tensor([size, 0.5], requires_grad=True)
    (found,) = torch.autograd.grad(attend(q, k, v, sink=sink, backend=engine).sum(), sink)
    expected = sink.detach().clamp(-100, 100).double().requires_grad_()
    (truth,) = torch.autograd.grad(
        attend(*(t.double() for t in (q, k, v)), sink=expected, backend="reference").sum(), expected
    )
    torch.testing.assert_close(found.double(), truth, atol=1e-6, rtol=1e-5)


def test_gradients_are_asked_for_by_halves():
    q, k, v, table = (*(torch.randn(1, 2, 9, 8) for _ in range(3)), torch.randn(8, 2))
    table.requires_grad_()
    (found,) = torch.autograd.grad(attend(q, k, v, bias=T5Bias(table), backend=BEST).sin().sum(), table)
    (truth,) = torch.autograd.grad(attend(q, k, v, bias=T5Bias(table), backend="reference").sin().sum(), table)
    assert torch.allclose(found, truth, atol=1e-6)


def test_a_second_derivative_is_an_error_and_not_wrong():
    q = small(1, 1, 3, 2)
    (grad,) = torch.autograd.grad(attend(q, q, q, backend=BEST).sin().sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match="differentiated once"):
        torch.autograd.grad(grad.sum(), q)
    with pytest.raises(RefusalError, match="no vmap or forward-mode derivative"):
        torch.func.jvp(lambda t: attend(t, t, t, backend=BEST), (q.detach(),), (q.detach(),))


def test_a_tangent_of_a_gradient_is_an_error_and_not_lost():
    q, weight = small(1, 1, 3, 2), torch.randn(1, 1, 3, 2)
    with dual_level():
        out = attend(q, q, q, backend=BEST)
        with pytest.raises(RefusalError, match="differentiated once"):
            torch.autograd.grad((out * make_dual(weight, weight)).sum(), q)


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("engine", LEAST_AND_BEST)
def test_a_pass_that_pauses_after_every_tile_gives_the_same_bits(
    engine: str, threads: int, monkeypatch: pytest.MonkeyPatch
):
    """Two heads on one key head, 33 tiles each: a unit of several segments, or segments that are units."""
    q, k, v = (torch.randn(1, h, 2100, 8, requires_grad=True) for h in (2, 1, 1))
    table, by_key, sink = torch.randn(8, 2), torch.randn(1, 1, 1, 2100), torch.zeros(2)
    leaves = [q, k, v, *(t.requires_grad_() for t in (table, by_key, sink))]

    def gradients(seconds: float) -> tuple[Tensor, ...]:
        monkeypatch.setattr(native, "SECONDS", seconds)
        ready = {"bias": T5Bias(table, max_distance=16) + TensorBias(by_key), "sink": sink, "mask": Causal()}
        out = attend(q, k, v, **ready, scale=0.3 + seconds, backend=engine)  # another scale, another plan
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        paused, whole = gradients(1e-9), gradients(0.0)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(paused, whole, strict=True))


def by_columns(t: Tensor) -> Tensor:
    return t.movedim(-1, 0).contiguous().movedim(0, -1)


def with_gaps(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (0, 1))[..., :-1]


def expanded(t: Tensor) -> Tensor:
    """The bias has equal rows."""
    return t[:, :, :1].expand(t.shape) if t.shape == (1, 4, 70, 90) else t


def negated(t: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(t), t).conj().imag if t.is_floating_point() else -t


def same(t: Tensor) -> Tensor:
    return t


UNPACKED: dict[str, tuple[Any, Any]] = {
    "by columns": (same, by_columns),
    "with gaps": (same, with_gaps),
    "expanded": (same, expanded),
    "lazily negated": (torch.neg, negated),
}


@pytest.mark.parametrize("name", UNPACKED)
@pytest.mark.parametrize("engine", [BEST, PLAIN])
def test_saved_tensors_may_come_back_in_another_layout(engine: str, name: str):
    q, k, v = (torch.randn(2, h, n, 16) for h, n in ((4, 70), (2, 90), (2, 90)))
    slopes, bias, sink = torch.ones(4), torch.randn(1, 4, 1, 90).repeat(1, 1, 70, 1), torch.randn(4)
    leaves = [t.requires_grad_() for t in (q, k, v, slopes, bias, sink)]
    both = Alibi(slopes=slopes) + TensorBias(bias)
    words: dict[str, Any] = {"bias": both, "sink": sink, "mask": Causal(), "backend": engine}

    def gradients(pack: Any, unpack: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = attend(q, k, v, **words)
        return torch.autograd.grad(out.sin().sum(), leaves)

    for found, right in zip(gradients(*UNPACKED[name]), gradients(same, same), strict=True):
        assert torch.equal(found, right)


def test_saved_tensors_may_come_back_as_zeros_without_memory():
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (70, 90, 90))

    def gradients(zeros: Any) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(same, lambda t: zeros(t.shape) if t.shape[2:] == (90, 16) else t):
            out = attend(q, k, v, backend=BEST)
        return torch.autograd.grad(out.sin().sum(), (q, k, v))

    for found, right in zip(gradients(cast(Any, torch)._efficientzerotensor), gradients(torch.zeros), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.bfloat16(), r"q was saved .* as torch.float32 \[1, 2, 70, 16\] on cpu, and came .*bfloat16"),
        (lambda t: t.double(), r"q was saved .* came back as Tensor, torch.float64"),
        (lambda t: t[:, :, :9] if t.shape[2:] == (90, 8) else t, r"v was saved .* came back as .* \[1, 2, 9, 8\]"),
        (lambda t: t[:1] if t.ndim == 1 else t, r"sink was saved .* came back as .* \[1\]"),
        (lambda t: t[:, :9] if t.shape == (2, 159) else t, r"a bias by distance was saved .* came back as .* \[2, 9\]"),
        (lambda t: t[..., :9] if t.shape[3:] == (90,) else t, r"a bias was saved .* came back as .* \[1, 2, 70, 9\]"),
        (lambda t: t.half() if t.shape[2:] == (70, 8) else t, r"out was saved .* came back as .*float16"),
        (lambda t: t[..., :9] if t.ndim == 3 else t, r"lse was saved .* came back as .* \[1, 2, 9\]"),
        (lambda t: t.to("meta"), r"q was saved .* came back as .* on meta"),
        (
            lambda t: t.to_sparse(),
            r"q was saved .* came back as .* on cpu, torch.sparse_coo: expected .* a dense tensor",
        ),
    ],
    ids=["bfloat16", "float64", "keys", "sink", "distance", "bias", "out", "lse", "meta", "sparse"],
)
def test_saved_tensors_that_come_back_as_others_are_an_error(change: Any, says: str):
    q, k, v = (torch.randn(1, 2, n, dim, requires_grad=True) for n, dim in ((70, 16), (90, 16), (90, 8)))
    slopes, bias, sink = torch.ones(2), torch.randn(1, 2, 70, 90), torch.randn(2)
    bias.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(change, same):
        out = attend(q, k, v, bias=Alibi(slopes=slopes) + TensorBias(bias), sink=sink, backend=BEST)
    with pytest.raises(ProblemError, match=says):
        out.sum().backward()
