"""Calls on stored keys and values: every engine takes them, and gives what it gives for the tensors they stand for."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from regard import (
    Alibi,
    Causal,
    Mask,
    ProblemError,
    T5Bias,
    TensorBias,
    Window,
    attend,
    attend_state,
    explain,
    observe_calls,
)
from regard.cache import Fp8, Int4, Int8, KVCache, Latent, Paged, Rolling, StoredTensor
from regard.extend import Bias, spec
from regard.scores import Cosine
from regard.storage.codec import Codec
from regard.storage.hadamard import hadamard
from regard.storage.stored import Contiguous, Layout
from tests.stored import coded, dense, normal, paged, plain


def mixed(t: Tensor, codec: Int4 | Int8, *, keys: bool) -> StoredTensor:
    """Plain tokens, a middle of codes, plain tokens."""
    parts = (plain(t[:, :, :5]), coded(t[:, :, 5:69], codec, keys=keys), plain(t[:, :, 69:]))
    return StoredTensor(parts, tuple(t.shape), t.dtype)  # pyright: ignore[reportArgumentType]


K, V, Q = normal(2, 3, 83, 8), normal(2, 3, 83, 11), normal(2, 6, 7, 8, seed=1)
STORED = {
    "pages": (paged(K, 16), paged(V, 16)),
    "int8": (mixed(K, Int8(), keys=True), mixed(V, Int8(), keys=False)),
    "int4": (mixed(K, Int4(), keys=True), mixed(V, Int4(), keys=False)),
    "one tensor": (paged(K, 3), V),
}


@pytest.mark.parametrize("engine", ["native", "reference", "reference64"])
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(20)], ids=str)
def test_it_is_the_call_on_tensors_to_the_bit(name: str, engine: str, mask: Mask | None) -> None:
    k, v = STORED[name]
    found = attend(Q, k, v, mask=mask, backend=engine)
    assert torch.equal(found, attend(Q, dense(k), dense(v), mask=mask, backend=engine))


@pytest.mark.parametrize("name", STORED)
def test_torchs_kernel_is_given_tensors(name: str) -> None:
    k, _ = STORED[name]
    assert torch.equal(attend(Q, k, k, backend="sdpa"), attend(Q, dense(k), dense(k), backend="sdpa"))
    nan = dense(k).clone()
    nan[:, :, 80] = torch.nan  # what it would carry past the mask comes from another engine
    stored = paged(nan, 16)
    found = attend(Q, stored, stored, mask=Causal(), offset=0)
    assert found.isfinite().all()


def test_what_else_a_call_says_holds_for_stored_ones() -> None:
    k, v = STORED["int4"]
    arguments: dict[str, Any] = {"mask": Causal(), "bias": Alibi(6), "softcap": 5.0, "scale": 0.3, "sink": normal(6)}
    assert torch.equal(attend(Q, k, v, **arguments), attend(Q, dense(k), dense(v), **arguments))
    assert torch.allclose(attend(Q, k, v, score=Cosine()), attend(Q, dense(k), dense(v), score=Cosine()))
    state, plain_state = attend_state(Q, k, v), attend_state(Q, dense(k), dense(v))
    assert torch.equal(state.lse, plain_state.lse)


def test_queries_may_want_gradients() -> None:
    k, v = STORED["int8"]
    grads: list[Tensor] = []
    for keys, values in ((k, v), (dense(k), dense(v))):
        q = Q.clone().requires_grad_()
        attend(q, keys, values, mask=Causal()).square().sum().backward()
        assert q.grad is not None
        grads.append(q.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_rotated_ones_are_met_by_rotated_queries(backend: str | None) -> None:
    k, v = (StoredTensor((plain(hadamard(t)),), tuple(t.shape), t.dtype, rotated=True) for t in (K, V))  # pyright: ignore[reportArgumentType]
    expected = attend_state(Q, K, V, mask=Causal())
    found = attend_state(Q, k, v, mask=Causal(), backend=backend)
    assert torch.allclose(found.out, expected.out, atol=1e-5)
    assert torch.allclose(found.lse, expected.lse, atol=1e-5)


def ragged(lengths: list[int]) -> tuple[StoredTensor, StoredTensor]:
    ends = torch.tensor(lengths)
    k, v = (paged(t, 16) for t in (K, V))
    both = (StoredTensor((s.parts[0]._replace(row_ends=ends),), tuple(s.shape), s.dtype, ends) for s in (k, v))  # pyright: ignore[reportArgumentType]
    return next(both), next(both)


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9)], ids=str)
def test_rows_of_different_lengths_are_as_each_alone(mask: Mask | None, engine: str | None) -> None:
    k, v = ragged([83, 40])
    found = attend(Q, k, v, mask=mask, backend=engine)
    for row, length in enumerate((83, 40)):
        of_row = [t[row : row + 1] for t in (Q, K[:, :, :length], V[:, :, :length])]
        alone = attend(of_row[0], of_row[1], of_row[2], mask=mask, backend=engine)
        assert torch.equal(found[row : row + 1], alone) if engine is None else torch.allclose(found[row], alone[0])


@pytest.mark.parametrize("engine", [None, "reference"])
def test_a_part_behind_rows_of_different_lengths_begins_where_each_row_ends(engine: str | None) -> None:
    lengths = torch.tensor([83, 40])
    k, v = (
        StoredTensor((*s.parts, plain(t[:, :, :7])), (*t.shape[:2], 90, t.shape[3]), t.dtype, lengths + 7)
        for s, t in zip(ragged([83, 40]), (K, V), strict=True)
    )
    found = attend(Q, k, v, backend=engine)
    for row, length in enumerate((83, 40)):
        of_row = [torch.cat([t[row : row + 1, :, :length], t[row : row + 1, :, :7]], 2) for t in (K, V)]
        alone = attend(Q[row : row + 1], of_row[0], of_row[1], backend=engine)
        assert torch.allclose(found[row], alone[0], atol=1e-6)


def test_a_traced_call_is_the_same() -> None:
    for k, v in (STORED["int8"], ragged([83, 40])):

        @torch.compile(backend="aot_eager", fullgraph=False)
        def step(q: Tensor, k: StoredTensor = k, v: StoredTensor | Tensor = v) -> Tensor:
            return attend(2 * q, k, v, mask=Causal())

        assert torch.allclose(step(Q), attend(2 * Q, k, v, mask=Causal()), atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["int8", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("pages", "one tensor", "rotated", "ragged"))],
)
def test_a_traced_call_on_handles_is_one_graph(name: str) -> None:
    k, v = ragged([83, 40]) if name == "ragged" else STORED.get(name, (K, V))
    if name == "rotated":
        k, v = (StoredTensor((plain(hadamard(t)),), tuple(t.shape), t.dtype, rotated=True) for t in (K, V))  # pyright: ignore[reportArgumentType]
    step = torch.compile(lambda q: attend(q, k, v, mask=Causal()), backend="aot_eager", fullgraph=True)
    assert torch.allclose(step(Q), attend(Q, k, v, mask=Causal()), atol=1e-5)


def test_plans_tell_how_keys_are_stored_and_what_is_read() -> None:
    k, v = STORED["int8"]
    plan = explain(Q, k, v, mask=Causal(), backend="reference")
    assert "stored as float32 + int8 + float32" in str(plan)
    assert "gather: keys and values" in str(plan)
    assert plan.bytes < explain(Q, dense(k), dense(v), mask=Causal()).bytes
    turned = StoredTensor((plain(hadamard(K)),), tuple(K.shape), K.dtype, rotated=True)  # pyright: ignore[reportArgumentType]
    other = StoredTensor((plain(hadamard(V)),), tuple(V.shape), V.dtype, rotated=True)  # pyright: ignore[reportArgumentType]
    assert "Hadamard" in str(explain(Q, turned, other)) or "gather" in str(explain(Q, turned, other))


def test_who_watches_is_given_tensors() -> None:
    k, v = STORED["int8"]
    seen: list[Tensor] = []
    with observe_calls(lambda call: seen.extend((call.k, call.v))):
        attend(Q, k, v)
    assert torch.equal(seen[0], dense(k))
    assert torch.equal(seen[1], dense(v))


def test_masked_nan_in_stored_values_never_shows() -> None:
    k, v = K.clone(), V.clone()
    k[:, :, 3], v[:, :, 3] = torch.nan, torch.inf
    found = attend(Q, paged(k, 16), paged(v, 16), mask=Causal() & Window(20))
    assert torch.equal(found, attend(Q, k, v, mask=Causal() & Window(20)))
    assert found.isfinite().all()


@pytest.mark.parametrize("codec", [None, Int8(16, 16)], ids=["plain", "int8"])
@pytest.mark.parametrize("layout", [Contiguous(), Paged(16)], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (Causal(), None),
        (Window(17), None),
        (None, Alibi(6)),
        (None, T5Bias(normal(32, 6))),
        (None, TensorBias(normal(6, 83, 83), offset=0)),
        (Causal(), Alibi(6)),
    ],
    ids=repr,
)
def test_each_row_has_its_own_offset(mask: Mask | None, bias: Bias | None, layout: Layout, codec: Int8 | None) -> None:
    cache = KVCache(layout, codec)
    k, v = cache.append(K, V)
    tensors = [t if isinstance(t, Tensor) else t.dense() for t in (k, v)]
    for offsets in ([30, 79], [79, 12]):  # the second call does not take the positions of the first
        found = attend(Q[:, :, :3], k, v, mask=mask, bias=bias, offset=torch.tensor(offsets))
        for row, offset in enumerate(offsets):
            one = slice(row, row + 1)
            alone = attend(Q[one, :, :3], *(t[one] for t in tensors), mask=mask, bias=bias, offset=offset)
            torch.testing.assert_close(found[one], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize(
    "bias", [Alibi(6), T5Bias(normal(32, 6)), Alibi(6) + T5Bias(normal(32, 6))], ids=["alibi", "t5", "sum"]
)
def test_biases_of_distances_are_at_the_positions_of_each_row(
    bias: Bias, queries: int, dtype: torch.dtype, engine: str
) -> None:
    q, k, v = Q[:, :, :queries].to(dtype), K.to(dtype), V.to(dtype)
    for lengths in ([83, 40], [21, 83]):  # the second call does not take the positions of the first
        ends = torch.tensor(lengths)
        stored = [paged(t, 16) for t in (k, v)]
        rows = [StoredTensor((s.parts[0]._replace(row_ends=ends),), tuple(s.shape), s.dtype, ends) for s in stored]  # pyright: ignore[reportArgumentType]
        found = attend(q, rows[0], rows[1], mask=Causal(), bias=bias, backend=engine)
        for row, n in enumerate(lengths):
            one = slice(row, row + 1)
            alone = attend(q[one], k[one, :, :n], v[one, :, :n], mask=Causal(), bias=bias, backend=engine)
            near = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found[one], alone, rtol=near, atol=near)


@spec
class OfPositions(Bias):
    """A bias of the positions of query and key."""

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return 0.1 * (q * k % 3)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: attend(Q, *ragged([83, 40]), offset=3), "omit it, then the last query of each row"),
        (lambda: attend(Q, *ragged([83, 40]), bias=OfPositions()), "row by row"),
        (lambda: attend(Q, *ragged([83, 40]), bias=TensorBias(normal(83, 83), offset=0)), "without an offset"),
        (lambda: attend(Q, paged(K, 3), "v"), "v is str"),  # pyright: ignore[reportArgumentType]
        (lambda: attend(Q, paged(K, 3), paged(V[:, :, :7], 3)), "a value belongs to each key"),
        (lambda: attend(Q.double(), paged(K, 3), paged(V, 3)), "one type"),
        (lambda: attend(Q[:1], paged(K, 3), paged(V, 3)), "batch rows"),
        (lambda: attend(Q, ragged([83, 40])[0], V), "one cache"),
        (lambda: attend(Q, StoredTensor((plain(K),), (2, 3, 83, 8), K.dtype, rotated=True), V), "one cache"),
        (lambda: attend(Q, *ragged([83, 40]), mask="causal"), r"the text 'causal'.* say mask=Causal\(\)"),  # pyright: ignore[reportArgumentType]
    ],
    ids=["offset", "own bias", "placed bias", "type", "tokens", "dtype", "batch", "lengths", "rotated", "mask"],
)
def test_calls_that_make_no_sense_are_refused(call: Any, what: str) -> None:
    with pytest.raises(ProblemError, match=what):
        call()


def test_a_bias_tensor_goes_with_rows_of_different_lengths() -> None:
    k, v = ragged([83, 40])
    table = normal(1, 6, 7, 83)
    found = attend(Q, k, v, bias=TensorBias(table))
    alone = attend(Q[1:], K[1:, :, :40], V[1:, :, :40], bias=TensorBias(table[..., :40]))
    assert torch.allclose(found[1:], alone, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_has_the_biases_of_rows_of_different_lengths(backend: str) -> None:
    k, v = ragged([83, 40])
    table = normal(32, 6).requires_grad_()
    for bias in (Alibi(6), T5Bias(table), Alibi(6) + TensorBias(normal(1, 6, 7, 83))):

        def run(q: Tensor, bias: Bias = bias) -> Tensor:
            return attend(q, k, v, mask=Causal(), bias=bias)

        found, right = torch.compile(run, backend=backend, fullgraph=True)(Q), run(Q)
        assert torch.allclose(found, right, atol=1e-6)
        if bias.tensors() and found.requires_grad:
            grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (found, right)]
            assert torch.allclose(*grads, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"layout": Paged(page=16)}, {"codec": torch.float64}, {"codec": Int8()}], ids=str
)
def test_keys_and_values_in_a_cache_keep_their_tangents(options: dict[str, Any]):
    q, k, v, tangent = torch.randn(4, 1, 2, 40, 8)
    with dual_level():
        cache = KVCache(**options)
        k, v = make_dual(k, tangent), make_dual(v, tangent)
        cache.append(k[:, :, :30], v[:, :, :30])
        out = attend(q[:, :, 30:], *cache.append(k[:, :, 30:], v[:, :, 30:]), mask=Causal())
        expected = unpack_dual(attend(q, k, v, mask=Causal())).tangent
        torch.testing.assert_close(unpack_dual(out).tangent, expected[:, :, 30:])


@pytest.mark.parametrize("dual", ["none", "keys", "values"])
@pytest.mark.parametrize("layout", [None, Rolling(97, 0), Paged(page=16)], ids=str)
@pytest.mark.parametrize("codec", [Int8(32, 0, 0), Int4(32, 0, 0), Fp8(32, 0, 0)], ids=lambda codec: codec.kind)
def test_codes_of_keys_and_values_with_tangents_are_refused(codec: Codec, layout: Layout | None, dual: str):
    q, k, v = torch.randn(3, 1, 2, 96, 8)  # whole groups, so that all tokens are codes
    with dual_level():
        cache = KVCache(layout, codec)
        tokens = (make_dual(k, v) if dual == "keys" else k, make_dual(v, k) if dual == "values" else v)
        with nullcontext() if dual == "none" else pytest.raises(ProblemError, match="codes, which have no tangents"):
            out = attend(make_dual(q, q), *cache.append(*tokens), mask=Causal())
            assert unpack_dual(out).tangent is not None
        assert cache.tokens == (96 if dual == "none" else 0)


def test_codes_of_latents_with_tangents_are_refused():
    entries = torch.randn(1, 1, 32, 24)
    with dual_level(), pytest.raises(ProblemError, match="codes, which have no tangents"):
        KVCache(Latent(16), Int8(32, 0, 0)).append(make_dual(entries, entries))


def test_plain_tokens_after_codes_have_their_tangents():
    q, k, v, tangent = torch.randn(4, 1, 2, 40, 8)
    cache = KVCache(codec=Int8(32, 0, 0))
    keys, values = (dense(t).clone() for t in cache.append(k[:, :, :32], v[:, :, :32]))
    k, v = torch.cat((keys, k[:, :, 32:]), 2), torch.cat((values, v[:, :, 32:]), 2)
    tangent[:, :, :32] = 0
    with dual_level():
        k, v = make_dual(k, tangent), make_dual(v, tangent)
        out = attend(q, *cache.append(k[:, :, 32:], v[:, :, 32:]), mask=Causal())
        torch.testing.assert_close(unpack_dual(out).tangent, unpack_dual(attend(q, k, v, mask=Causal())).tangent)
