"""`flex_attention` with a `score_mod` inside `torch.func`, and in forward mode: what its definition gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention as of_torch
from torch.nn.attention.flex_attention import BlockMask

from regard import ProblemError, RefusalError
from regard.flex import AuxRequest, create_block_mask, flex_attention
from tests.flex.definition import attended

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

HEADS, TOKENS, DIM = 2, 11, 5


def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q != 7)


MASK = create_block_mask(sees, None, None, TOKENS, TOKENS, "cpu")

MODS: dict[str, Callable[..., Tensor]] = {
    "a factor of a head": lambda t, s, b, h, q, k: s * t[h],
    "a bias of a head, doubled": lambda t, s, b, h, q, k: s + (2 * t)[h],
    "one number": lambda t, s, b, h, q, k: s * t.sum() - (q - k),
    "a sine": lambda t, s, b, h, q, k: torch.sin(s) * t[h],
    "an opaque function": lambda t, s, b, h, q, k: torch.stack([s, s]).sum(0) * t[h],
    "what reads no tensor": lambda t, s, b, h, q, k: 3 * torch.tanh(s / 3) + (k - q) * 0.1,
}


def run(mod: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A call as a function of its tensors, the one that its `score_mod` reads among them."""
    return lambda q, k, v, t: flex_attention(q, k, v, lambda *args: mod(t, *args), MASK)


def defined(mod: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v, t: attended(q, k, v, lambda *args: mod(t, *args), sees)[0]


def drawn() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, dtype=torch.float64) for _ in range(3))
    return q, k, v, torch.randn(HEADS, dtype=torch.float64)


def gradients(call: Any, *given: Tensor) -> Any:
    return torch.func.grad(lambda *at: call(*at).square().sum(), argnums=(0, 1, 2, 3))(*given)


def mapped(call: Any, *given: Tensor) -> Any:
    return torch.vmap(call)(*(torch.stack([t, t + 0.5]) for t in given))


def gradients_each(call: Any, *given: Tensor) -> Any:
    return torch.vmap(lambda *at: gradients(call, *at))(*(torch.stack([t, t + 0.5]) for t in given))


def forward(call: Any, *given: Tensor) -> Any:
    return torch.func.jvp(call, given, tuple(t.cos() for t in given))


def dual(call: Any, *given: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(*(forward_ad.make_dual(t, t.cos()) for t in given)))


def dual_where_the_function_reads(call: Any, *given: Tensor) -> Any:
    with forward_ad.dual_level():
        t = forward_ad.make_dual(given[3], given[3].cos())
        return tuple(x for x in forward_ad.unpack_dual(call(*given[:3], t)) if x is not None)


@pytest.mark.parametrize("transform", [gradients, mapped, gradients_each, forward, dual, dual_where_the_function_reads])
@pytest.mark.parametrize("mod", MODS)
def test_transforms_reach_what_the_function_reads(mod: str, transform: Callable[..., Any]):
    found, wanted = (transform(make(MODS[mod]), *drawn()) for make in (run, defined))
    torch.testing.assert_close(tuple(found), tuple(wanted), atol=1e-10, rtol=1e-10)


def test_log_sums_and_greatest_scores_are_mapped_too():
    q, k, v, t = (torch.stack([t, t + 0.5]) for t in drawn())

    def aux(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
        return flex_attention(
            q, k, v, lambda s, b, h, q, k: s * t[h], MASK, return_aux=AuxRequest(lse=True, max_scores=True)
        )[1]

    found = torch.vmap(aux)(q, k, v, t)
    for i in range(2):
        alone = aux(q[i], k[i], v[i], t[i])
        torch.testing.assert_close((found.lse[i], found.max_scores[i]), (alone.lse, alone.max_scores))


LENGTHS = torch.tensor([4, 9])


def by_length(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < LENGTHS[h]


def opaque(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.stack([k < LENGTHS[h], q >= 0]).all(0)


@pytest.mark.parametrize("transform", [forward, gradients, gradients_each])
@pytest.mark.parametrize("make", [create_block_mask, of_torch.create_block_mask], ids=["regard", "torch"])
@pytest.mark.parametrize("mod", [sees, by_length, opaque])
def test_masks_hold_inside_derivatives_wherever_they_are_made(
    mod: Callable[..., Tensor], make: Callable[..., BlockMask], transform: Callable[..., Any]
):
    made = make(mod, 1, HEADS, TOKENS, TOKENS, "cpu")

    def outside(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flex_attention(q * t[:, None, None], k, v, None, made)

    def inside(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flex_attention(q * t[:, None, None], k, v, None, make(mod, 1, HEADS, TOKENS, TOKENS, "cpu"))

    def wanted(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return attended(q * t[:, None, None], k, v, None, mod)[0]

    expected = tuple(transform(wanted, *drawn()))
    for call in (outside, inside):
        torch.testing.assert_close(tuple(transform(call, *drawn())), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("transform", [forward, gradients])
@pytest.mark.parametrize("mod", [sees, by_length])
@pytest.mark.parametrize("make", [create_block_mask, of_torch.create_block_mask], ids=["regard", "torch"])
def test_compiled_derivatives_are_those_of_the_masked_call(
    make: Callable[..., BlockMask], mod: Callable[..., Tensor], transform: Callable[..., Any]
):
    """By dynamo alone: it traces the derivative, and its graph runs inside of it."""
    made = make(mod, 1, HEADS, TOKENS, TOKENS, "cpu")

    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flex_attention(q * t[:, None, None], k, v, lambda s, b, h, q, k: s * t[h], made)

    def masked(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flex_attention(q * t[:, None, None], k, v, None, made)

    for each, score_mod in ((call, lambda t: lambda s, b, h, q, k: s * t[h]), (masked, lambda _: None)):
        torch.compiler.reset()

        def wanted(q: Tensor, k: Tensor, v: Tensor, t: Tensor, score_mod: Any = score_mod) -> Tensor:
            return attended(q * t[:, None, None], k, v, score_mod(t), mod)[0]

        compiled = torch.compile(lambda *given, each=each: transform(each, *given), backend="eager", fullgraph=True)
        found, expected = compiled(*drawn()), transform(wanted, *drawn())
        torch.testing.assert_close(tuple(found), tuple(expected), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("of", [lambda t, h: 4 + t[h] * 0, lambda t, h: t.max()], ids=["an element", "a reduction"])
def test_a_mask_that_vmap_maps_over_inside_a_derivative_is_refused_in_words(of: Callable[[Tensor, Tensor], Tensor]):
    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q, k: k < of(t, h), None, HEADS, TOKENS, TOKENS, "cpu")
        return flex_attention(q, k, v, None, mask)

    with pytest.raises(RefusalError, match=r"reads a tensor that torch\.vmap maps over, inside of a derivative"):
        gradients_each(call, *drawn())


@pytest.mark.parametrize("make", [create_block_mask, of_torch.create_block_mask], ids=["regard", "torch"])
def test_a_mask_that_vmap_maps_over_is_refused_in_words(make: Callable[..., BlockMask]):
    q, k, v, _ = drawn()

    def call(lengths: Tensor) -> Tensor:
        return flex_attention(q, k, v, None, make(lambda b, h, q, k: k < lengths[h], 1, HEADS, TOKENS, TOKENS, "cpu"))

    compiled = [torch.compile(torch.vmap(call), backend="eager")] if make is create_block_mask else []
    for run in (torch.vmap(call), *compiled):
        with pytest.raises(RefusalError, match=r"a mask_mod reads a tensor that torch\.vmap maps over: a mask is read"):
            run(torch.tensor([[3, 5], [7, 2]]))
    torch.compiler.reset()


@pytest.mark.parametrize("mod", ["none", "a factor of a head"])
def test_vmap_of_a_compiled_call_breaks_the_graph_and_is_right(mod: str):
    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return flex_attention(q, k, v, None if mod == "none" else lambda *args: MODS[mod](t, *args), MASK)

    def compiled(**options: Any) -> Any:
        torch.compiler.reset()
        return torch.compile(lambda *given: mapped(call, *given), backend="eager", **options)(*drawn())

    torch.testing.assert_close(compiled(), mapped(call, *drawn()))
    with pytest.raises(Exception, match=r"inside of torch\.vmap is no part of a graph: call torch\.compile without"):
        compiled(fullgraph=True)
    torch.compiler.reset()


@pytest.mark.parametrize("shape", [(), (HEADS,)])
def test_a_function_that_reads_the_meta_device_is_refused_in_words(shape: tuple[int, ...]):
    empty, (q, k, v, _) = torch.empty(shape, device="meta"), drawn()
    says = rf"reads a tensor \[{', '.join(map(str, shape))}\] on the meta device, which has no elements: make it on cpu"
    with pytest.raises(ProblemError, match=f"the score_mod {says}"):
        flex_attention(q, k, v, lambda s, b, h, q, k: s + (empty[h] if shape else empty))
    with pytest.raises(ProblemError, match=f"the mask_mod {says}"):
        create_block_mask(lambda b, h, q, k: q >= (empty[h] if shape else empty), None, None, TOKENS, TOKENS, "cpu")
