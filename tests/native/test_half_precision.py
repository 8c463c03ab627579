"""Gradients in bfloat16 and float16 are as near to float64 as those of float32, rounded once, also of peaked rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard import Alibi, Bias, Causal, Documents, Prefix, T5Bias, TensorBias, Window, attend, attend_state
from tests.native.engines import BEST, LEAST_AND_BEST, PLAIN
from tests.oracle import Case, dense

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
EVERY = pytest.mark.parametrize("engine", [*LEAST_AND_BEST, PLAIN])

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def gradients(call: Call, leaves: tuple[Tensor, ...], dout: Tensor) -> list[Tensor]:
    leaves = tuple(t.detach().requires_grad_() for t in leaves)
    return list(torch.autograd.grad(call(*leaves), leaves, dout))


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Of each gradient, relative to the largest of its elements."""
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, truth, strict=True)]


def samples(dtype: torch.dtype) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """torch's own sample inputs of scaled_dot_product_attention without dropout, and how it is to be called."""
    from torch.testing._internal.common_methods_invocations import op_db  # 2 s, which each worker would spend

    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        if sample.kwargs.pop("dropout_p"):
            continue
        k, v = (t if t.ndim == 4 else t[:, None] for t in sample.args)
        q = sample.input if k.shape[:2] == sample.input.shape[:-2] else sample.input[:, None]
        yield (q.expand(*k.shape[:2], *q.shape[2:]), k, v), sample.kwargs


def normal(dtype: torch.dtype) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]]:
    """Random normal tensors, and the same with scores 30 times as large."""
    g = torch.Generator().manual_seed(0)
    for tokens, dim in ((37, 16), (131, 64), (277, 64)):
        q, k, v = (torch.randn(1, 3, tokens, dim, generator=g).to(dtype) for _ in range(3))
        yield (q, k, v), {}
        yield (q, k, v), {"scale": 30 * dim**-0.5}


def naive(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, scale: Any = None) -> Tensor:
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if attn_mask is None else scores + attn_mask
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf) if is_causal else scores, dim=3) @ v


def ours(q: Tensor, k: Tensor, v: Tensor, engine: str, attn_mask: Any, is_causal: bool, scale: Any) -> Tensor:
    bias = None if attn_mask is None else TensorBias(attn_mask)
    mask = Causal() if is_causal else None
    return attend(q, k, v, mask=mask, bias=bias, scale=scale, offset=0, backend=engine)


@pytest.mark.exhaustive(per="test")
@EVERY
@HALVES
@pytest.mark.parametrize("inputs", [samples, normal])
def test_gradients_are_as_near_as_those_of_torchs_math_path(engine: str, dtype: torch.dtype, inputs: Any):
    torch.manual_seed(0)
    for leaves, given in inputs(dtype):
        words = {"attn_mask": None, "is_causal": False, "scale": None} | given
        dout = torch.randn(*leaves[0].shape[:3], leaves[2].shape[3]).to(dtype)
        wide = words | {"attn_mask": None if words["attn_mask"] is None else words["attn_mask"].double()}
        truth = gradients(lambda *t, w=wide: naive(*t, **w), tuple(t.double() for t in leaves), dout.double())
        with sdpa_kernel(SDPBackend.MATH):
            math = gradients(lambda *t, w=words: F.scaled_dot_product_attention(*t, **w), leaves, dout)
        half = errors(gradients(lambda *t, w=words: naive(*t, **w), leaves, dout), truth)
        found = errors(gradients(lambda *t, w=words: ours(*t, engine, **w), leaves, dout), truth)
        for error, best, plain in zip(found, errors(math, truth), half, strict=True):
            assert error <= 1.5 * best
            assert error <= 1.001 * max(best, plain)


def words_of(heads: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    table, tensor = torch.randn(8, heads, generator=g), torch.randn(heads, queries, keys, generator=g)
    by_key, sink = torch.randn(keys, generator=g), 3 * torch.randn(heads, generator=g)
    return {
        "a causal mask": {"mask": Causal()},
        "a window with sinks": {"mask": Causal() & Window(29) | Prefix(3), "sink": sink},
        "a sink": {"sink": sink},
        "a softcap": {"softcap": 20.0},
        "a vector over the distance": {"bias": T5Bias(table, max_distance=16)},
        "a tensor": {"bias": TensorBias(tensor)},
        "a tensor that rows share, softcap and sink": {"bias": TensorBias(by_key), "softcap": 30.0, "sink": sink},
    }


@pytest.mark.exhaustive(per="engine")
@EVERY
@HALVES
@pytest.mark.parametrize("name", words_of(1, 1, 1))
@pytest.mark.parametrize("tokens", [23, 137])
def test_gradients_of_peaked_rows_with_every_word_are_those_of_float32(
    engine: str, dtype: torch.dtype, name: str, tokens: int
):
    """Six query heads on two key heads; of 23 tokens a head is computed twice, of 137 its largest weights are."""
    g = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(2, h, tokens, 16, generator=g).to(dtype) for h in (6, 2, 2, 6))
    words: dict[str, Any] = words_of(6, tokens, tokens)[name] | {"scale": 2.0}

    def grads(kind: torch.dtype, call: Any) -> list[Tensor]:
        leaves = [t.to(kind).requires_grad_() for t in (q, k, v)]
        given, more = dict(words), list[Tensor]()
        if "sink" in words:
            more.append(words["sink"].to(kind).requires_grad_())
            given["sink"] = more[-1]
        if "bias" in words:
            more.append(words["bias"].tensors()[0].detach().requires_grad_())
            given["bias"] = T5Bias(more[-1], True, 16) if isinstance(words["bias"], T5Bias) else TensorBias(more[-1])
        out = call(Case(*leaves, given))
        return list(torch.autograd.grad(out, [*leaves, *more], dout.to(kind)))

    truth = grads(torch.float64, lambda c: dense(c)[0])
    single = [
        t.to(dtype) if i < 3 else t for i, t in enumerate(grads(torch.float32, lambda c: dense(c, torch.float32)[0]))
    ]
    found = grads(dtype, lambda c: attend(c.q, c.k, c.v, **c.words, backend=engine))
    eps = torch.finfo(dtype).eps
    for i, (error, best) in enumerate(zip(errors(found, truth), errors(single, truth), strict=True)):
        assert error <= (1.5 * best if i < 3 else eps / 2), i


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@HALVES
@pytest.mark.parametrize("tokens", [23, 137])
def test_gradients_of_peaked_rows_with_dropout_are_those_of_float32(engine: str, dtype: torch.dtype, tokens: int):
    g = torch.Generator().manual_seed(3)
    leaves = tuple(torch.randn(1, 3, tokens, 16, generator=g).to(dtype) for _ in range(3))
    dout = torch.randn(1, 3, tokens, 16, generator=g).to(dtype)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(4)
        return attend(q, k, v, dropout=0.3, scale=3.0, backend=engine)

    truth = [t.double() for t in gradients(call, tuple(t.float() for t in leaves), dout.float())]
    rounded = errors([t.to(dtype) for t in truth], truth)
    for error, best in zip(errors(gradients(call, leaves, dout), truth), rounded, strict=True):
        assert error <= 1.5 * best


@EVERY
@HALVES
@pytest.mark.parametrize("tokens", [23, 137])
def test_gradients_of_peaked_rows_through_the_log_sum_exp_are_those_of_float32(
    engine: str, dtype: torch.dtype, tokens: int
):
    g = torch.Generator().manual_seed(6)
    leaves = tuple(torch.randn(1, 3, tokens, 16, generator=g).to(dtype) for _ in range(3))
    dout, dlse = torch.randn(1, 3, tokens, 16, generator=g).to(dtype), torch.randn(1, 3, tokens, generator=g)

    def call(state: Any) -> Call:
        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = state(Case(q, k, v, {"mask": Causal(), "scale": 3.0}))
            return (out * dout.to(out.dtype)).sum().double() + (lse * dlse.to(lse.dtype)).sum().double()

        return loss

    def attended(case: Case) -> tuple[Tensor, Tensor]:
        state = attend_state(case.q, case.k, case.v, **case.words, backend=engine)
        return state.out, state.lse

    one = torch.ones((), dtype=torch.float64)
    truth = gradients(call(dense), tuple(t.double() for t in leaves), one)
    single = gradients(call(lambda c: dense(c, torch.float32)), tuple(t.float() for t in leaves), one)
    best = errors([t.to(dtype) for t in single], truth)
    for error, least in zip(errors(gradients(call(attended), leaves, one), truth), best, strict=True):
        assert error <= 1.5 * least


def off(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """The error of each gradient by its size, as norms."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]


@EVERY
@HALVES
@pytest.mark.parametrize(
    ("of_keys", "of_values", "words"),
    [
        *((*means, words) for means in [(1, 1), (4, 4), (20, 1)] for words in [{}, {"softcap": 20.0}]),
        (0, 4, {}),
        (0, 4, {"mask": Causal() & Window(64)}),  # the rows of a tile share one key, which is no mean
    ],
    ids=str,
)
def test_gradients_are_as_near_where_keys_and_values_have_a_mean(
    engine: str, dtype: torch.dtype, of_keys: float, of_values: float, words: dict[str, Any]
):
    """The terms of dq cancel each other there: an error of delta counts by the mean of the keys."""
    g = torch.Generator().manual_seed(7)
    tokens, dim = 601, 32
    words = {"mask": Causal()} | words
    q, k, v, dout = (torch.randn(1, 2, tokens, dim, generator=g) for _ in range(4))
    signs = torch.randn(2, dim, generator=g).sign()
    leaves = tuple(t.to(dtype) for t in (q, k + of_keys * signs[0], v + of_values * signs[1]))
    dout = dout.to(dtype)

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * dim**-0.5
        scores = 20.0 * torch.tanh(scores / 20.0) if "softcap" in words else scores
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        if words["mask"] != Causal():
            hidden |= torch.ones_like(hidden).tril(-64)
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=3) @ v

    truth = gradients(capped, tuple(t.double() for t in leaves), dout.double())
    plain = off(gradients(capped, leaves, dout), truth)
    found = gradients(lambda *t: attend(*t, **words, backend=engine), leaves, dout)
    for error, best in zip(off(found, truth), plain, strict=True):
        assert error <= best


@pytest.mark.parametrize("engine", LEAST_AND_BEST)
@HALVES
def test_huge_keys_change_no_gradient_of_rows_that_do_not_see_them(engine: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(8)
    tokens, start = 701, 333
    leaves = [(torch.randn(1, 2, tokens, 32, generator=g) + 2).to(dtype) for _ in range(3)]
    dout = torch.randn(1, 2, tokens, 32, generator=g).to(dtype)
    ids = (torch.arange(tokens) >= start).int()
    bias = torch.zeros(tokens, tokens).masked_fill(ids[:, None] != ids, -torch.inf)
    huge = leaves[1].clone()
    huge[:, :, start:] *= 1e4 if dtype == torch.float16 else 1e30
    for words in ({"mask": Documents(ids)}, {"bias": TensorBias(bias)}):
        found = [
            gradients(lambda *t, w=words: attend(*t, **w, backend=engine), (leaves[0], keys, leaves[2]), dout)
            for keys in (leaves[1], huge)
        ]
        for one, other in zip(*found, strict=True):
            assert torch.equal(one[:, :, :start], other[:, :, :start])


@EVERY
@HALVES
@pytest.mark.parametrize("words", [{}, {"softcap": 30.0}, {"bias": T5Bias(torch.ones(8, 1))}], ids=str)
def test_hidden_keys_that_are_nan_change_no_gradient(engine: str, dtype: torch.dtype, words: dict[str, Any]):
    g = torch.Generator().manual_seed(9)
    leaves = [torch.randn(1, 1, 601, 32, generator=g).to(dtype) for _ in range(3)]
    dout = torch.randn(1, 1, 601, 32, generator=g).to(dtype)
    hidden = leaves[1].clone()
    hidden[:, :, 7:] = torch.nan
    found = [
        gradients(lambda *t: attend(*t, mask=Prefix(7), **words, backend=engine), (leaves[0], k, leaves[2]), dout)
        for k in (leaves[1], hidden)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.exhaustive(per="engine")
@pytest.mark.parametrize("engine", [BEST, PLAIN, "reference", "reference64"])
@HALVES
@pytest.mark.parametrize("kind", ["table", "tensor", "row"])
def test_gradients_of_a_bias_in_half_precision_are_rounded_once(engine: str, dtype: torch.dtype, kind: str):
    g = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(2, 3, 307, 8, generator=g).to(dtype) for _ in range(4))
    sizes = {"table": (32, 3), "tensor": (1, 3, 307, 307), "row": (3, 1, 307)}[kind]
    leaf = torch.randn(*sizes, generator=g).to(dtype)

    def gradient(wide: torch.dtype, call: Any) -> Tensor:
        tensor = leaf.to(wide).requires_grad_()
        bias = T5Bias(tensor) if kind == "table" else TensorBias(tensor)
        out = call(Case(q.to(wide), k.to(wide), v.to(wide), {"bias": bias}))
        return torch.autograd.grad(out, tensor, dout.to(wide))[0]

    truth = gradient(torch.float64, lambda c: dense(c)[0])
    found = gradient(dtype, lambda c: attend(c.q, c.k, c.v, **c.words, backend=engine))
    assert errors([found], [truth])[0] <= torch.finfo(dtype).eps / 2


@EVERY
@HALVES
@pytest.mark.parametrize("scale", [1, 6])
def test_gradients_are_no_less_exact_where_slopes_learn(engine: str, dtype: torch.dtype, scale: int):
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 600, 64, generator=g) for _ in range(4))
    leaves, dout = ((q * scale).to(dtype), k.to(dtype), v.to(dtype)), dout.to(dtype)

    def found(wide: torch.dtype, engine: str, learns: bool) -> list[Tensor]:
        slopes = torch.full((2,), 0.01, requires_grad=learns)
        call = partial(attend, mask=Causal(), bias=Alibi(slopes=slopes), backend=engine)
        return gradients(call, tuple(t.to(wide) for t in leaves), dout.to(wide))

    truth = found(torch.float64, "reference", learns=False)
    fixed, learned = (
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(found(dtype, engine, learns), truth, strict=True)]
        for learns in (False, True)
    )
    assert all(a < 1.1 * b for a, b in zip(learned, fixed, strict=True)), (learned, fixed)


def falling(slopes: Tensor) -> TensorBias:
    position = torch.arange(600)
    return TensorBias(-slopes[:, None, None] * (position[:, None] - position).abs())


@EVERY
@HALVES
@pytest.mark.parametrize("made", [lambda slopes: Alibi(slopes=slopes), falling], ids=["slopes", "tensor"])
def test_slopes_are_learned_as_exactly_where_values_have_a_mean(
    engine: str, dtype: torch.dtype, made: Callable[[Tensor], Bias]
):
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 2, 600, 64, generator=g).to(dtype) for _ in range(4))
    v = (v + 2 * torch.randn(64, generator=g)).to(dtype)

    def gradient(wide: torch.dtype, engine: str) -> Tensor:
        slopes = torch.tensor([0.001, 0.002], requires_grad=True)
        out = attend(q.to(wide), k.to(wide), v.to(wide), mask=Causal(), bias=made(slopes), backend=engine)
        return torch.autograd.grad(out, slopes, dout.to(wide))[0]

    truth = gradient(torch.float64, "reference")
    assert errors([gradient(dtype, engine)], [truth])[0] < 1e-3
