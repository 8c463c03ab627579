"""Every kernel of every instruction set equals the plain loops, forward and backward, whatever the call."""

from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

from regard import Alibi, Bias, Causal, Mask, T5Bias, TensorBias, TensorMask, attend, attend_state
from tests.native.engines import ALL, PLAIN
from tests.oracle import Case
from tests.selection import examples

ROUNDING = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of a result of about 1: the type's own rounding, and that of weights where those are rounded too."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A call with several tiles and ragged edges, any strides, any schedule, and any words."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    batch, (heads, kv_heads) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]))
    queries, keys = draw(st.sampled_from([1, 2, 7, 16, 61, 64, 131])), draw(st.sampled_from([1, 5, 64, 131, 193, 1100]))
    qk_dim, v_dim = draw(st.sampled_from([(16, 16), (32, 32), (64, 64), (5, 7), (80, 24), (1, 1), (17, 33)]))

    def tensor(tokens: int, h: int, dim: int) -> Tensor:
        made = torch.randn(batch, h, tokens, dim, generator=g, dtype=torch.float64).to(dtype)
        return draw(st.sampled_from([made, token_by_token(made), spread(made), repeated(made)]))

    case = Case(tensor(queries, heads, qk_dim), tensor(keys, kv_heads, qk_dim), tensor(keys, kv_heads, v_dim))
    sizes = (batch, heads, queries, keys)
    case.words["mask"] = draw(masks(g, *sizes))
    case.words["bias"] = draw(biases(g, *sizes))
    case.words["softcap"] = draw(st.sampled_from([None, None, 2.0]))
    case.words["scale"] = draw(st.sampled_from([None, None, 0.3, -0.2, 0.0]))
    case.words["dropout"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    case.words["sink"] = draw(st.sampled_from([None, torch.linspace(-2, 2, heads)]))
    return case


def token_by_token(t: Tensor) -> Tensor:
    """The same, as [batch, tokens, heads, dim] in memory."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def spread(t: Tensor) -> Tensor:
    """The same, with NaN between its numbers wherever there is room: heads, tokens and batch rows lie apart."""
    room = torch.full((t.shape[0] + 1, t.shape[1] + 1, t.shape[2] + 3, t.shape[3] + 5), torch.nan, dtype=t.dtype)
    room[1:, 1:, 3:, 5:] = t
    return room[1:, 1:, 3:, 5:]


def repeated(t: Tensor) -> Tensor:
    """Every batch row and head the first one, without a copy."""
    return t[:1, :1].expand(t.shape)


@st.composite
def masks(draw: st.DrawFn, g: torch.Generator, batch: int, heads: int, queries: int, keys: int) -> Mask | None:
    """Patterns of all kinds, per batch row, per head or for all; whole tiles full or empty, rows that see nothing."""
    spread = draw(st.sampled_from([(1, 1), (batch, 1), (1, heads), (batch, heads)]))
    tiles = torch.rand(*spread, -(-queries // 64), -(-keys // 64), generator=g)
    coarse = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :queries, :keys]
    fine = torch.rand(*spread, queries, keys, generator=g)
    mixed = (coarse > 0.7) | ((coarse > 0.3) & (fine > 0.5))
    return draw(
        st.sampled_from(
            [None, Causal(), TensorMask(fine > 0.1), TensorMask(fine > 0.98), TensorMask(mixed), TensorMask(mixed)]
        )
    )


@st.composite
def biases(draw: st.DrawFn, g: torch.Generator, batch: int, heads: int, queries: int, keys: int) -> Bias | None:
    """None, by distance, a tensor of any type and broadcast, or both."""
    axes = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    tensor = torch.randn(axes, generator=g).to(dtype)
    tensor = draw(st.sampled_from([tensor, tensor.mT.contiguous().mT, tensor.expand(batch, heads, queries, keys)]))
    far, table = Alibi(heads), T5Bias(torch.randn(16, heads, generator=g))
    chosen = [None, None, TensorBias(tensor), far, table, far + table, TensorBias(tensor) + table]
    return draw(st.sampled_from(chosen))


def same(found: Tensor, expected: Tensor, rounding: float, least: float = 1.0, own: float = 0.0) -> None:
    """Equal but for rounding, of numbers that stand for numbers about as large as the largest, or as `least`.

    own: what the type of the result rounds besides, of each number.
    """
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(found), finite)
    size = max(least, float(expected[finite].abs().max())) if bool(finite.any()) else least
    torch.testing.assert_close(found.double(), expected.double(), rtol=own, atol=rounding * size, equal_nan=True)


def run(case: Case, engine: str) -> Tensor:
    torch.manual_seed(1)
    return attend(case.q, case.k, case.v, **case.words, backend=engine)


@pytest.mark.representative
@given(case=cases())
@examples(25, everything=60)
def test_a_kernel_equals_the_plain_loops(case: Case):
    """The plain loops take most of the time: one run of theirs serves every instruction set."""
    words = {name: word for name, word in case.words.items() if name not in ("sink", "dropout")}

    def lse(engine: str) -> Tensor:
        return attend_state(case.q, case.k, case.v, **words, backend=engine).lse

    out, plain = run(case, PLAIN), lse(PLAIN)
    for engine in ALL:
        note(engine)
        same(run(case, engine), out, ROUNDING[case.q.dtype])
        same(lse(engine), plain, ROUNDING[case.q.dtype] / (10 if case.q.dtype == torch.bfloat16 else 1))


def gradients(case: Case, engine: str, through_lse: bool) -> list[Tensor]:
    """Of q, k, v, the sink and what the bias carries."""
    leaves: list[Tensor] = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    words: dict[str, Any] = dict(case.words)
    for name in ("sink", "bias"):
        word = words[name]
        carried = [] if word is None else [word] if isinstance(word, Tensor) else word.tensors()
        leaves += [t.requires_grad_() for t in carried]
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(3)
    if through_lse:
        words = {name: word for name, word in words.items() if name not in ("sink", "dropout")}
        state = attend_state(leaves[0], leaves[1], leaves[2], **words, backend=engine)
        weight = torch.randn(state.lse.shape, generator=g, dtype=torch.float64).to(state.lse.dtype)
        seen = torch.isfinite(state.lse)
        out, total = state.out, (torch.where(seen, state.lse, 0.0) * weight).sum()
    else:
        out, total = attend(leaves[0], leaves[1], leaves[2], **words, backend=engine), torch.zeros(())
    direction = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad((out * direction).sum() + total, leaves, allow_unused=True, materialize_grads=True)
    for leaf in leaves[3:]:
        leaf.requires_grad_(False)
    return list(found)


def weights_summed(case: Case) -> list[float]:
    """The largest sum of weights that meets in an element of the gradient of k, and of each tensor of the bias."""
    bias = case.words["bias"]
    carried: list[Tensor] = [] if bias is None else bias.tensors()
    leaves = [torch.ones_like(case.v[..., :1]).requires_grad_(), *(t.requires_grad_() for t in carried)]
    words = {name: word for name, word in case.words.items() if name not in ("sink", "dropout")}
    state = attend_state(case.q, case.k, leaves[0], **words, backend=PLAIN)
    # the output is 1 whatever the weights are, so what flows to a bias comes from the log-sum-exp alone
    total = state.out.sum() + state.lse[torch.isfinite(state.lse)].sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    for leaf in carried:
        leaf.requires_grad_(False)
    return [float(t.abs().max()) for t in found]


def sizes(case: Case) -> list[float]:
    """Of what meets in an element of each gradient, though it may cancel: of terms about as large as their weights.

    Each term has a rounding of its own, so terms that weigh n together have one of n ** 0.5 times a term's.
    """
    of_keys, *of_biases = (max(1.0, weights) ** 0.5 for weights in weights_summed(case))
    return [1.0, of_keys, 1.0, *([] if case.words["sink"] is None else [1.0]), *of_biases]


@pytest.mark.parametrize("engine", ALL)
@given(case=cases(), through_lse=st.booleans())
@examples(16, everything=40)
def test_a_kernels_gradients_equal_those_of_the_plain_loops(engine: str, case: Case, through_lse: bool):
    ours, plain = (gradients(case, name, through_lse) for name in (engine, PLAIN))
    for found, expected, size in zip(ours, plain, sizes(case), strict=True):
        # a bias may have a coarser type than the rest; two sums that differ by little round to neighbours there
        own = 0.0 if found.dtype == case.q.dtype else torch.finfo(found.dtype).eps
        same(found, expected, 4 * ROUNDING[case.q.dtype], size, own)
