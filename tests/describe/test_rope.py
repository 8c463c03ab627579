"""Rotation: its laws, strides, precision, tables and gradients, and transformers as the second opinion."""

import gc
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_to_first_dims
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from regard import ProblemError, RefusalError
from regard.describe import position_table, rotation
from regard.describe.position import Rope, Sinusoidal
from regard.describe.rope_scaling import NTK, DynamicNTK, Linear, Llama3, LongRope, Proportional, Scaling, Yarn
from regard.extend import spec
from regard.lru_cache import LRUCache
from regard.nn.rope_pairs import RopePairs
from tests.own_rope import Halving

FAR = 1_000_000


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Tensor]:
    """No table from another test."""
    fresh: LRUCache[Any, Tensor] = LRUCache(entries=1024, nbytes=position_table.KEPT, size=lambda table: table.nbytes)
    monkeypatch.setattr(position_table, "_tables", fresh)
    return fresh._kept


def turned_by_hand(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Every pair as a 2 x 2 matrix times a vector, in Python's numbers."""
    out, pairs = x.clone(), angles.shape[-1]
    for token in range(x.shape[-2]):
        for i in range(pairs):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
            cos, sin = math.cos(angles[token, i]), math.sin(angles[token, i])
            out[..., token, a] = cos * x[..., token, a] - sin * x[..., token, b]
            out[..., token, b] = sin * x[..., token, a] + cos * x[..., token, b]
    return out


# ---- laws -----------------------------------------------------------------------------------------------------------


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    dim, fraction = draw(st.sampled_from([(4, 1.0), (8, 0.5), (10, 1.0), (14, 1.0), (26, 1.0), (64, 0.25), (80, 0.4)]))
    pairs = int(dim * fraction) // 2
    factor = draw(st.sampled_from([1.0, 1.7, 8.0, 40.0]))
    original = draw(st.sampled_from([23, 4096, 32768]))
    divisors = st.tuples(*[st.floats(1.0, 64.0)] * pairs)
    scaling = draw(
        st.one_of(
            st.none(),
            st.just(Linear(factor)),
            st.just(NTK(factor)),
            st.just(DynamicNTK(factor, original)),
            st.builds(Yarn, st.just(factor), st.just(original), truncate=st.booleans()),
            st.just(Llama3(factor, original=original)),
            st.builds(LongRope, divisors, divisors, st.just(original), st.just(factor)),
            st.builds(Proportional, st.floats(0.1, 1.0)),
        )
    )
    return Rope(dim, draw(st.floats(2.0, 1e7)), scaling, fraction, draw(st.booleans()))


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


@settings(max_examples=60)
@given(ropes(), st.integers(-FAR, FAR), st.integers(1, 50_000))
def test_scores_depend_on_the_distance_alone(rope: Rope, shift: int, tokens: int):
    q, k, i, j = unit(1, 2, 5, rope.dim), unit(1, 2, 7, rope.dim), torch.arange(5) * 3, torch.arange(7) * 11
    near = rope.rotate(q, i, tokens) @ rope.rotate(k, j, tokens).mT
    far = rope.rotate(q, i + shift, tokens) @ rope.rotate(k, j + shift, tokens).mT
    torch.testing.assert_close(near, far, atol=1e-9 * rope.attention_factor() ** 2, rtol=0)


@settings(max_examples=30)
@given(ropes(), st.integers(-FAR, FAR))
def test_turning_keeps_norms_and_turning_back_gives_x(rope: Rope, position: int):
    x, p, square = unit(1, 1, 3, rope.dim), torch.tensor([position, 0, 1]), rope.attention_factor() ** 2
    turned, rotated = rope.rotate(x, p, 7), rope.rotated
    torch.testing.assert_close(turned[..., :rotated].norm(dim=-1) ** 2, x[..., :rotated].norm(dim=-1) ** 2 * square)
    back = rope.rotate(turned, -p, 7)
    torch.testing.assert_close(back[..., :rotated], x[..., :rotated] * square, atol=1e-12, rtol=0)
    assert torch.equal(back[..., rotated:], x[..., rotated:])  # what does not turn is not touched


@settings(max_examples=40)
@given(ropes(), st.integers(-3, FAR), st.sampled_from([1, 5]))
def test_every_pair_is_turned_by_its_angle(rope: Rope, first: int, tokens: int):
    x = torch.randn(2, 3, tokens, rope.dim, dtype=torch.float64)
    p = torch.arange(first, first + tokens)
    angles = p[:, None].double() * rope.frequencies(13)
    expected = turned_by_hand(x, angles, interleaved=rope.interleaved)
    expected[..., : rope.rotated] *= rope.attention_factor()
    torch.testing.assert_close(rope.rotate(x, p, 13), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rope.rotate(x, first, 13), expected, atol=1e-12, rtol=1e-12)


def cos_sin(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers hands them to `apply_rotary_pos_emb`: [batch, tokens, rotated]."""
    angles = positions[..., None].double() * rope.frequencies()
    whole = torch.cat((angles, angles), -1)
    return (whole.cos() * rope.attention_factor()).float(), (whole.sin() * rope.attention_factor()).float()


def test_halves_turn_as_in_llama():
    rope, p = Rope(26, 500.0, Yarn(4.0, 64)), torch.randint(0, 97, (2, 5))
    q, k = torch.randn(2, 6, 5, 26), torch.randn(2, 3, 5, 26)
    expected = apply_rotary_pos_emb(q, k, *cos_sin(rope, p))
    torch.testing.assert_close((rope.rotate(q, p), rope.rotate(k, p)), expected)


def test_the_first_dimensions_turn_as_in_gpt_neox():
    rope, p = Rope(24, fraction=0.25), torch.arange(7)[None] + 3
    q, k = torch.randn(2, 6, 7, 24), torch.randn(2, 6, 7, 24)
    expected = apply_to_first_dims(q, k, *cos_sin(rope, p))
    torch.testing.assert_close((rope.rotate(q, 3), rope.rotate(k, 3)), expected)


def test_neighbours_turn_as_in_deepseek():
    rope, p = Rope(10, interleaved=True), torch.arange(7)[None]
    q, k = torch.randn(2, 6, 7, 10), torch.randn(2, 1, 7, 10)
    theirs_q, theirs_k = apply_rotary_pos_emb_interleave(q, k, *cos_sin(rope, p))
    ours_q, ours_k = rope.rotate(q), rope.rotate(k)
    torch.testing.assert_close(ours_q @ ours_k.mT, theirs_q @ theirs_k.mT)
    apart = torch.cat((ours_q[..., 0::2], ours_q[..., 1::2]), -1)  # they lay the halves one after the other
    torch.testing.assert_close(apart, theirs_q)


# ---- numbers and memory ---------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "heads beside tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimensions apart": lambda x: x.mT.contiguous().mT,
    "every second number": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a slice of wider rows": lambda x: torch.cat((x, x, x), -1)[..., x.shape[-1] - 1 : 2 * x.shape[-1] - 1].roll(1, -1),
    "at an odd address": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "in odd rows": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
    "the same for all heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.exhaustive(per="layout")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("few", [0, rotation.FEW])
def test_any_strides_serve(few: int, layout: str, fraction: float, interleaved: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rotation, "FEW", few)  # numbers up to which nothing is written in place
    rope = Rope(20, 50.0, fraction=fraction, interleaved=interleaved)
    x = LAYOUTS[layout](torch.randn(2, 3, 7, 20, dtype=torch.float64))
    before = x.clone()
    expected = turned_by_hand(x, torch.arange(7)[:, None] * rope.frequencies(), interleaved=interleaved)
    torch.testing.assert_close(rope.rotate(x), expected, atol=1e-14, rtol=1e-14)
    assert torch.equal(x, before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_large_inputs_are_turned_in_pieces(dtype: torch.dtype, interleaved: bool):
    rope = Rope(64, fraction=0.75, interleaved=interleaved)
    x, p = torch.randn(1, 1, 31, 64).to(dtype).expand(2, 199, 31, 64), torch.randint(0, 97, (2, 31))
    whole = rope.rotate(x, p)  # 789,632 numbers, in 4 pieces
    assert whole.numel() > 3 * rotation.PIECE
    for row in range(2):
        assert torch.equal(whole[row, 101], rope.rotate(x[row : row + 1, :1], p[row])[0, 0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("few", [0, rotation.FEW])
def test_half_precision_is_rounded_once(
    few: int, dtype: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rotation, "FEW", few)
    rope, x = Rope(26, scaling=Yarn(4.0, 32), interleaved=interleaved), torch.randn(2, 3, 53, 26).to(dtype)
    exact, got = rope.rotate(x.double(), 100_003), rope.rotate(x, 100_003)
    assert got.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert ((got.double() - exact).abs() <= 0.5001 * unit * exact.abs().clamp(min=1e-2)).all()
    y = x.clone().requires_grad_()
    assert torch.equal(rope.rotate(y, 100_003), got)


def test_angles_are_exact_far_out():
    rope, x = Rope(4, 3.0), torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]])
    got = rope.rotate(x, FAR)[0, 0, 0].tolist()
    assert got == pytest.approx([f(FAR * w) for f in (math.cos, math.sin) for w in (1.0, 3.0**-0.5)], abs=1e-7)


def test_positions_in_every_form_agree():
    rope, x = Rope(6), torch.randn(2, 3, 5, 6)
    expected = rope.rotate(x, 4)
    at = torch.arange(4, 9)
    forms = (at, at[None], at.expand(2, 5), at.int(), at.to(torch.uint8), at.float(), at.double()[None])
    for positions in forms:
        torch.testing.assert_close(rope.rotate(x, positions), expected, msg=str(positions.dtype))
    assert torch.equal(rope.rotate(x), rope.rotate(x, 0))
    torch.testing.assert_close(rope.rotate(x, -2)[..., 2:, :], rope.rotate(x[..., 2:, :]))
    both = torch.stack((at, at + 90))
    torch.testing.assert_close(rope.rotate(x, both)[1:], rope.rotate(x[1:], 94))


@pytest.mark.parametrize("shape", [(0, 3, 5, 6), (2, 0, 5, 6), (2, 3, 0, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_nothing_gives_nothing(interleaved: bool, shape: tuple[int, ...]):
    x, rope = torch.randn(shape), Rope(6, scaling=DynamicNTK(2.0, 3), interleaved=interleaved)
    for positions in (None, 3, torch.zeros(shape[2], dtype=torch.int64), torch.zeros(shape[0], shape[2])):
        assert rope.rotate(x, positions).shape == shape
        assert torch.vmap(lambda x: rope.rotate(x, tokens=7))(x[None]).shape == (1, *shape)


def test_the_length_is_taken_from_the_positions():
    rope, x = Rope(6, scaling=DynamicNTK(2.0, original=8)), torch.randn(2, 3, 5, 6)
    assert torch.equal(rope.rotate(x), rope.rotate(x, tokens=3))  # within the training length
    expected = rope.rotate(x, 7, tokens=12)
    assert not torch.allclose(expected, rope.rotate(x, 7, tokens=8))
    assert torch.equal(rope.rotate(x, 7), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7, 12)), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7, 12).expand(2, 5)), expected)
    assert torch.equal(rope.rotate(x, torch.arange(7.0, 12.0)), expected)


def test_tables_are_made_once_and_grow(tables: dict[Any, Tensor]):
    rope, x = Rope(6), torch.randn(1, 2, 50, 6)
    rope.rotate(x)
    ((key, table),) = tables.items()
    assert len(table) == 64
    Rope(6).rotate(x, 14)
    Rope(6).rotate(x[:, :, :3], torch.tensor([0, 63, 7]))
    assert tables[key] is table  # an equal word takes the same one
    rope.rotate(x[:, :, :1], 64)
    assert list(map(len, tables.values())) == [128]
    rope.rotate(x, torch.arange(100_000, 100_050))
    assert list(map(len, tables.values())) == [128]  # few tokens far out are computed ...
    for position in range(100_000, 100_096):
        rope.rotate(x[:, :, :1], position)
    assert list(map(len, tables.values())) == [128, 256]  # ... and have a table of their own where they are decoded
    rope.rotate(x.double())
    Sinusoidal(6).add(x[0])
    assert len(tables) == 4


def test_tables_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch, tables: dict[Any, Tensor]):
    monkeypatch.setattr(position_table, "KEPT", 4 * 64 * 16 * 4)  # four tables of 64 rows of 16 float32
    monkeypatch.setattr(position_table._tables, "_most", position_table.KEPT)
    x = torch.randn(1, 1, 64, 8)
    expected = [Rope(8, base).rotate(x) for base in range(2, 9)]
    assert len(tables) == 4
    assert all(torch.equal(Rope(8, base).rotate(x), y) for base, y in zip(range(2, 9), expected, strict=True))
    Rope(8, 9.0).rotate(torch.randn(1, 1, 1031, 8))
    assert max(map(len, tables.values())) == 64  # too large to be kept


def test_threads_share_tables():
    rope, x = Rope(6), torch.randn(1, 2, 300, 6)
    expected = [rope.rotate(x[:, :, :n]) for n in range(1, 300)]
    wrong: list[int] = []

    def turn() -> None:
        wrong.extend(n for n in range(1, 300) if not torch.equal(Rope(6).rotate(x[:, :, :n]), expected[n - 1]))

    threads = [threading.Thread(target=turn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tables_made_in_any_mode_serve_in_every_other(tables: dict[Any, Tensor]):
    rope, x = Rope(6), torch.randn(1, 2, 5, 6)
    with torch.inference_mode():
        expected = rope.rotate(x)
    assert len(tables) == 1
    y = x.clone().requires_grad_()
    rope.rotate(y).sum().backward()  # a tensor of inference mode could not be saved for it
    tables.clear()
    mapped = torch.vmap(rope.rotate)(x[None])[0]
    with FakeTensorMode() as mode:
        assert rope.rotate(mode.from_tensor(x)).shape == x.shape
    assert rope.rotate(x.to("meta")).device.type == "meta"
    assert not [t for t in tables.values() if t.device.type == "cpu"]
    with torch.device("meta"):
        torch.testing.assert_close((rope.rotate(x), mapped), (expected, expected))


# ---- gradients and torch's transforms -------------------------------------------------------------------------------

SOME = [
    Rope(6),
    Rope(8, interleaved=True, scaling=Yarn(4.0, 16)),
    Rope(8, fraction=0.5, scaling=DynamicNTK(4.0, 4)),
    Rope(4, scaling=LongRope((1.0, 2.0), (2.0, 3.0), 4, factor=2.0)),
    Rope(8, fraction=0.5, interleaved=True, scaling=Llama3(8.0, original=32)),
]


@pytest.mark.parametrize("rope", SOME, ids=str)
def test_gradients_of_any_order_flow(rope: Rope):
    x = torch.randn(2, 1, 3, rope.dim, dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[0, 4, 7], [9, 2, 3]])

    def turned(x: Tensor) -> Tensor:
        return rope.rotate(x, p)

    assert torch.autograd.gradcheck(turned, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: rope.rotate(x, p).sin(), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_turned_back(dtype: torch.dtype, interleaved: bool):
    rope, x = Rope(26, fraction=0.5384616, interleaved=interleaved), torch.randn(2, 3, 1009, 26).to(dtype)
    p, grad = torch.randint(-50, 50, (2, 1009)), torch.randn_like(x)
    (got,) = torch.autograd.grad(rope.rotate(x.requires_grad_(), p), x, grad)
    torch.testing.assert_close(got, rope.rotate(grad, -p))
    for frozen in (torch.no_grad, torch.inference_mode):
        with frozen():
            assert not rope.rotate(x, p).requires_grad


def test_gradients_flow_to_positions_that_are_not_whole():
    rope, x = Rope(6), torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    p = torch.tensor([0.5, 2.25, 7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope.rotate, (x, p))


@pytest.mark.parametrize("rope", SOME, ids=str)
def test_it_maps_and_differentiates_as_a_function(rope: Rope):
    x = torch.randn(3, 2, 1, 5, rope.dim, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(rope.rotate)(x), torch.stack([rope.rotate(one) for one in x]))
    pushed: Any = torch.func.jvp(rope.rotate, (x[0],), (x[1],))
    torch.testing.assert_close(pushed, (rope.rotate(x[0]), rope.rotate(x[1])))
    hessian = torch.func.hessian(lambda x: rope.rotate(x).square().sum())(x[0])
    eye = torch.eye(x[0].numel(), dtype=torch.float64) * 2
    scale = torch.ones(rope.dim, dtype=torch.float64)
    scale[: rope.rotated] = rope.attention_factor(5) ** 2
    torch.testing.assert_close(hessian.reshape(eye.shape), eye * scale.repeat(x[0].numel() // rope.dim))


@pytest.mark.parametrize(
    "rope", [SOME[1], *(pytest.param(r, marks=pytest.mark.exhaustive) for r in SOME[2:4])], ids=str
)
def test_it_is_traced_whole(rope: Rope):
    torch._dynamo.reset()  # it counts the ropes that one function was traced for
    traced = torch.compile(rope.rotate, backend="eager", fullgraph=True, dynamic=True)
    for tokens, first in ((5, 3), (7, 30)):
        x = torch.randn(2, 3, tokens, rope.dim, dtype=torch.float64)
        torch.testing.assert_close(traced(x, first), rope.rotate(x, first))


@pytest.mark.parametrize("scaling", [LongRope((1.0, 2.0), (2.0, 3.0), 4), DynamicNTK(2.0, 4)], ids=str)
def test_an_exported_program_serves_lengths_on_both_sides_of_the_trained_one(scaling: Scaling):
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rope(4, scaling=scaling).rotate(x)

    tokens = {2: torch.export.Dim("tokens", min=1, max=64)}
    exported = torch.export.export(Layer(), (torch.randn(1, 2, 3, 4),), dynamic_shapes=(tokens,)).module()
    for length in (3, 4, 5, 11):
        x = torch.randn(1, 2, length, 4)
        torch.testing.assert_close(exported(x), Layer()(x))


@pytest.mark.exhaustive
def test_gradients_are_traced():
    torch._dynamo.reset()
    rope, x = Rope(6, scaling=Yarn(4.0, 16)), torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    here, there = torch.compile(rope.rotate, backend="aot_eager", fullgraph=True)(x), rope.rotate(x)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (here, there)))


def test_a_tensor_of_positions_is_traced_when_the_length_is_given():
    rope, x, p = Rope(6, scaling=DynamicNTK(2.0, 4)), torch.randn(2, 3, 5, 6), torch.randint(0, 30, (2, 5))
    torch._dynamo.reset()
    traced = torch.compile(rope.rotate, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x, p, tokens=30), rope.rotate(x, p, tokens=30))
    with pytest.raises(RefusalError, match="give tokens="):
        torch.vmap(rope.rotate)(x[None], p[None])


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_trace_of_torch_jit_serves_every_length(interleaved: bool):
    rope = Rope(64, interleaved=interleaved)
    rope.rotate(torch.randn(1, 8, 2048, 64))
    traced: Any = torch.jit.trace(rope.rotate, torch.randn(1, 8, 1100, 64), check_trace=False)
    for tokens in (7, 1100, 2003):
        x = torch.randn(1, 8, tokens, 64)
        assert torch.allclose(traced(x), rope.rotate(x), atol=1e-5)
    added: Any = torch.jit.trace(Sinusoidal(8).add, torch.randn(1, 10, 8), check_trace=False)
    x = torch.randn(1, 101, 8)
    assert torch.allclose(added(x), Sinusoidal(8).add(x))
    with pytest.raises(
        RefusalError, match=r"DynamicNTK depends on the length.*torch\.jit\.trace records as a constant"
    ):
        torch.jit.trace(Rope(8, scaling=DynamicNTK(4.0, 7)).rotate, torch.randn(1, 1, 5, 8), check_trace=False)


def test_positions_of_narrow_types_and_bad_ones():
    x, rope = torch.randn(1, 2, 3, 8), Rope(8, scaling=DynamicNTK(4.0, 7))
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        positions = torch.tensor([1, 2, 30], dtype=dtype)
        assert torch.equal(rope.rotate(x, positions), rope.rotate(x, positions.long()))
    with pytest.raises(ProblemError, match="the greatest of the positions is nan"):
        rope.rotate(x, torch.tensor([1.0, torch.nan, 3.0]))


def test_an_array_is_refused_without_its_elements():
    with pytest.raises(ProblemError, match=r"^x is an array float64 \[1, 2, 5, 8\]: expected a tensor \[batch, heads,"):
        Rope(8).rotate(np.zeros((1, 2, 5, 8)))  # pyright: ignore[reportArgumentType]


def test_a_subclass_with_frequencies_of_its_own_rotates_by_them():
    x, rope = torch.randn(1, 2, 5, 8, dtype=torch.float64), Halving(8)
    angles = torch.arange(3.0, 8.0, dtype=torch.float64)[:, None] * rope.frequencies()
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    assert torch.allclose(rope.rotate(x, 3), expected)
    assert torch.allclose(rope.rotate(x, torch.arange(3, 8), tokens=8), expected)
    chosen = RopePairs(rope, ((1, 2),)).rotate(x[..., [1, 5, 2, 6]], 3)
    assert torch.allclose(chosen, expected[..., [1, 5, 2, 6]])


@pytest.mark.parametrize("length", [None, -3, 0, 1, 40])
def test_frequencies_are_known_for_lengths_below_one(length: int | None):
    for rope in (Rope(8), Rope(8, scaling=DynamicNTK(2.0, 16)), Slowing(8)):
        expected = rope.frequencies(None if length is None else max(length, 1))
        assert torch.equal(rope.frequencies_at(length, torch.device("cpu")), expected)


@spec
class LearnedSpeeds(Rope):
    """Frequencies that are learned, as in RoPE-Mixed."""

    speeds: Tensor = field(kw_only=True)

    def frequencies(self, tokens: int | None = None) -> Tensor:
        return self.speeds


@spec
class LearnedDivisors(Scaling):
    divisors: Tensor

    def scaled(self, plain: Tensor, base: float, tokens: int | None) -> Tensor:
        return plain / self.divisors


@spec
class Slowing(Rope):
    """Slower in texts beyond 8 tokens."""

    def frequencies(self, tokens: int | None = None) -> Tensor:
        return super().frequencies() * min(1.0, 8 / (tokens or 8))


LEARNED: dict[str, Callable[[Tensor], Rope]] = {
    "frequencies": lambda t: LearnedSpeeds(8, speeds=t),
    "scaling": lambda t: Rope(8, scaling=LearnedDivisors(t)),
}


@pytest.mark.parametrize("positions", [3, torch.arange(3, 8)], ids=["int", "tensor"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_flow_to_learned_frequencies(name: str, positions: Any):
    learned = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: LEARNED[name](t).rotate(x, positions), learned)
    pairs = x[..., [1, 5, 2, 6]]
    assert torch.autograd.gradcheck(lambda t: RopePairs(LEARNED[name](t), ((1, 2),)).rotate(pairs, positions), learned)


@pytest.mark.parametrize("name", LEARNED)
def test_learned_frequencies_are_not_kept(name: str):
    learned = torch.rand(4, dtype=torch.float64) + 0.5
    alive = weakref.ref(learned)
    LEARNED[name](learned).rotate(torch.randn(1, 2, 5, 8))
    RopePairs(LEARNED[name](learned), ((1, 2),)).rotate(torch.randn(1, 2, 5, 4))
    del learned
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("positions", [3, torch.arange(3, 8)], ids=["int", "tensor"])
def test_frequencies_of_its_own_are_those_of_each_length(positions: Any):
    x, rope = torch.randn(1, 2, 5, 8, dtype=torch.float64), Slowing(8)
    pairs = RopePairs(rope, ((1, 2),))
    rope.rotate(x, positions, tokens=8)
    pairs.rotate(x[..., :4], positions, tokens=8)
    expected = Rope(8, scaling=Linear(4.0)).rotate(x, positions)
    torch.testing.assert_close(rope.rotate(x, positions, tokens=32), expected)
    chosen = pairs.rotate(x[..., [1, 5, 2, 6]], positions, tokens=32)
    torch.testing.assert_close(chosen, expected[..., [1, 5, 2, 6]])


@pytest.mark.parametrize("count", [3, 5])
def test_a_rope_of_a_user_has_a_frequency_for_each_pair(count: int):
    @spec
    class Odd(Rope):
        def frequencies(self, tokens: int | None = None) -> torch.Tensor:
            return torch.ones(count, dtype=torch.float64)

    @spec
    class OddScaling(Scaling):
        def scaled(self, plain: torch.Tensor, base: float, tokens: int | None) -> torch.Tensor:
            return torch.ones(count, dtype=torch.float64)

    for rope in (Odd(8), Rope(8, scaling=OddScaling())):
        with pytest.raises(ProblemError, match=rf"frequencies of shape \[{count}\]: expected \[4\]"):
            rope.rotate(torch.randn(1, 1, 5, 8))
