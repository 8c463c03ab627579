"""`flex_attention` inside `torch.compile(fullgraph=True)` gives what it gives outside, and its gradients."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import higher_order_ops
from torch._functorch._aot_autograd.utils import make_boxed_func

from regard.flex import AuxRequest, BlockMask, create_block_mask, flex_attention
from regard.torch_internals import VERSION
from tests.flex.definition import Mod

pytestmark = pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)

BATCH, HEADS, TOKENS, DIM, BLOCK = 2, 4, 101, 16, 32
IDS = torch.arange(TOKENS) * 5 // TOKENS
STARTS = torch.searchsorted(IDS, torch.arange(5))


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tensors(tokens: int = TOKENS) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]


class Learned:
    """The tensors that functions of a score capture."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.per_head = torch.randn(HEADS, requires_grad=True)
        self.per_query = torch.rand(TOKENS, requires_grad=True)
        self.scalar = torch.tensor(1.7, requires_grad=True)
        self.square = torch.randn(TOKENS, TOKENS, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        return list(vars(self).values())


def in_place(t: Learned) -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s += q - k
        return s

    return mod


SCORE_MODS: dict[str, Any] = {
    "none": lambda t: None,
    "causal": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(-math.inf)),
    "alibi": lambda t: lambda s, b, h, q, k: s - (q - k).abs() * t.per_head[h],
    "softcap": lambda t: lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "a factor per query": lambda t: lambda s, b, h, q, k: s * t.per_query[q] + t.per_head[h],
    "a learned scale": lambda t: lambda s, b, h, q, k: s / t.scalar,
    "a table": lambda t: lambda s, b, h, q, k: s + t.square[q][k],
    "a distance within documents": lambda t: (
        lambda s, b, h, q, k: s - ((q - STARTS[IDS[q]]) - (k - STARTS[IDS[k]])).abs() * t.per_head[h]
    ),
    "an outer product": lambda t: lambda s, b, h, q, k: s + t.per_query[q] * t.per_query[k],
    "squared": lambda t: lambda s, b, h, q, k: s * s,
    "in place": in_place,
    "no term": lambda t: lambda s, b, h, q, k: torch.stack([s, s * t.per_head[h]]).sum(),
}

LIKE_OTHERS = (
    "none", "causal", "alibi", "softcap", "a learned scale", "a table", "an outer product", "squared",
    "a factor per query", "no term",
)  # fmt: skip
"""What is compiled as the others are; each takes a second."""

MASK_MODS: dict[str, Mod] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "rows that see nothing": lambda b, h, q, k: (q >= k) & (q != 7),
    "no term": lambda b, h, q, k: torch.stack([q >= k, IDS[q] == IDS[k]]).all(),
}


LONG = pytest.mark.exhaustive
MASKS_LIKE_OTHERS = ("causal", "rows that see nothing")


def blocks(mask_mod: Mod, tokens: int = TOKENS) -> BlockMask:
    return create_block_mask(mask_mod, None, None, tokens, tokens, "cpu", BLOCK_SIZE=BLOCK)


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def assert_same(run: Any, compiled_run: Any, given: list[Tensor], leaves: list[Tensor]) -> None:
    """Results, and gradients of what is given and learned."""
    want, got = run(*given), compiled_run(*given)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        assert a.requires_grad == b.requires_grad
        assert a.stride() == b.stride()
    grads = [
        torch.autograd.grad(
            sum(torch.where(x > -math.inf, x, 0).square().sum() for x in found if x.requires_grad),
            [*given, *leaves],
            allow_unused=True,
        )
        for found in (got, want)
    ]
    for a, b in zip(*grads, strict=True):
        if a is None or b is None:  # autograd may give zeros in place of no gradient
            assert not any(x.any() for x in (a, b) if x is not None)
        else:
            torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.representative
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in LIKE_OTHERS else name for name in SCORE_MODS]
)
def test_a_score_mod_is_compiled(name: str):
    learned = Learned()
    mod, mask = SCORE_MODS[name](learned), blocks(MASK_MODS["documents"])

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [flex_attention(q, k, v, mod), flex_attention(q, k, v, mod, mask)]

    assert_same(run, compiled(run), tensors(), learned.leaves())


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("name", ["documents", *(pytest.param(n, marks=LONG) for n in ("no term", *MASKS_LIKE_OTHERS))])
@pytest.mark.parametrize("inside", [pytest.param(False, marks=LONG), True])
def test_a_block_mask_of_inside_or_outside_is_compiled(name: str, inside: bool):
    outer, learned = blocks(MASK_MODS[name]), Learned()

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        mask = blocks(MASK_MODS[name]) if inside else outer
        out, aux = flex_attention(
            q, k[:, :2], v[:, :2], lambda s, b, h, q, k: s - learned.per_head[h] * (q - k), mask,
            enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        return [out, aux.lse, aux.max_scores]

    assert_same(run, compiled(run), tensors(), [learned.per_head])


def test_lists_that_differ_from_the_function_decide():
    mask = blocks(MASK_MODS["causal"])
    mask.kv_num_blocks[..., 2] = 0  # these queries see full blocks alone

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [flex_attention(q, k, v, block_mask=mask)]

    assert_same(run, compiled(run), tensors(), [])


def replaced(mask: BlockMask) -> None:
    mask.full_kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)


def written_to(mask: BlockMask) -> None:
    mask.kv_num_blocks[..., 2] = 0


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", [replaced, written_to])
def test_lists_that_are_changed_decide(change: Any, inside: bool):
    options = {"compute_dq_write_order": True} if VERSION >= (2, 13) and not inside else {}  # of torch's own function
    outer = create_block_mask(MASK_MODS["causal"], None, None, TOKENS, TOKENS, "cpu", BLOCK_SIZE=BLOCK, **options)
    change(outer)

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        mask = outer
        if inside:
            mask = blocks(MASK_MODS["causal"])
            change(mask)
        return [flex_attention(q, k, v, block_mask=mask)]

    assert not torch.allclose(run(*tensors())[0], flex_attention(*tensors(), block_mask=blocks(MASK_MODS["causal"])))
    assert_same(run, compiled(run), tensors(), [])


def test_lists_that_follow_from_their_function_are_not_made():
    sizes: list[int] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.extend(node.meta["val"].numel() for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor))
        return make_boxed_func(graph)

    def run(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, block_mask=blocks(MASK_MODS["causal"]))

    q = tensors()[0].detach()
    torch.testing.assert_close(compiled(run, backend=aot_autograd(fw_compiler=seen))(q), run(q))
    assert max(sizes) == q.numel()  # no element for each pair


def test_a_second_block_mask_of_the_same_kind_is_not_compiled_again():
    def of(ids: Tensor) -> Mod:
        return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)

    counter = CompileCounterWithBackend("aot_eager")
    run: Any = compiled(lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend=counter)
    q = tensors()[0].detach()
    for documents in (2, 3, 7):
        mask = blocks(of(torch.arange(TOKENS) * documents // TOKENS))
        torch.testing.assert_close(run(q, mask), flex_attention(q, q, q, block_mask=mask), atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


def test_one_graph_serves_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    slope = torch.rand(HEADS)
    mod = lambda s, b, h, q, k: s - slope[h] * (q - k).abs()  # noqa: E731
    run: Any = compiled(lambda q: flex_attention(q, q, q, mod), backend=counter, dynamic=True)
    for tokens in (64, 101, 150):
        q = tensors(tokens)[0].detach()
        torch.testing.assert_close(run(q), flex_attention(q, q, q, mod), atol=2e-5, rtol=2e-5)
    assert counter.frame_count == 1


@pytest.mark.exhaustive  # inductor compiles for 12 s
def test_the_function_itself_is_compiled():
    torch._dynamo.utils.counters.clear()
    function: Any = torch.compile(flex_attention)
    learned, mask = Learned(), blocks(MASK_MODS["causal"])
    mod = SCORE_MODS["alibi"](learned)
    run = lambda call: lambda q, k, v: call(q, k, v, mod, mask, return_lse=True)  # noqa: E731
    assert_same(run(flex_attention), run(function), tensors(), [learned.per_head])
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_function_that_cannot_be_compiled_breaks_the_graph():
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return s * 2

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [flex_attention(q.sin(), k, v, mod, mask).relu()]

    mask = blocks(MASK_MODS["causal"])
    assert_same(run, torch.compile(run, backend="aot_eager"), tensors(), [])


def test_other_types_and_layouts_are_compiled():
    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        half = flex_attention(*(t.to(torch.bfloat16) for t in (q, k, v)), lambda s, b, h, q, k: s - (q - k).abs())
        wide = flex_attention(q.double(), k.double(), v.double(), lambda s, b, h, q, k: s * s)
        turned = flex_attention(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
        return [half.float(), wide.float(), turned]

    q, k, v = tensors()
    for a, b in zip(compiled(run)(q, k, v), run(q, k, v), strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
        assert a.stride() == b.stride()


def test_lengths_that_a_block_mask_looks_up_are_read_when_the_graph_runs():
    lengths = torch.tensor([3, 77])
    block_mask = create_block_mask(lambda b, h, q, k: k < lengths[b], BATCH, None, TOKENS, TOKENS, device="cpu")
    q, k, v = (t.detach() for t in tensors())
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    truth = flex_attention(q, k, v, None, block_mask)
    assert torch.allclose(compiled(q, k, v, None, block_mask), truth, atol=1e-6)


FLOATS: dict[str, Any] = {
    "where": lambda c: lambda s, b, h, q, k: torch.where(q < k, s, c),
    "masked_fill": lambda c: lambda s, b, h, q, k: s.masked_fill(q < k, c),
    "clamp": lambda c: lambda s, b, h, q, k: s.clamp(max=c),
    "times a sine": lambda c: lambda s, b, h, q, k: torch.sin(s) * c,
    "alpha": lambda c: lambda s, b, h, q, k: torch.add(s, q - k, alpha=c),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("where", "alpha") else pytest.mark.exhaustive) for name in FLOATS]
)
def test_a_float_is_not_rounded_where_it_changes_from_call_to_call(name: str):
    def run(q: Tensor, k: Tensor, v: Tensor, c: float) -> Tensor:
        return flex_attention(q, k, v, FLOATS[name](c))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    q, k, v = (t.detach() for t in tensors())
    for c in (-3.5, -2.5, 0.75):
        assert torch.allclose(compiled(q, k, v, c), run(q, k, v, c), atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_scale_may_change_from_call_to_call(dynamic: bool | None):
    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return flex_attention(q, k, v, scale=scale)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    q, k, v = (t.detach() for t in tensors())
    for scale in (0.125, 0.3, 0.5):
        assert torch.allclose(compiled(q, k, v, scale), run(q, k, v, scale), atol=1e-5)


def test_one_graph_serves_all_values_of_a_captured_tensor():
    def run(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(q < k, s, c) * c)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    q, k, v = (t.detach() for t in tensors())
    for c in torch.linspace(-2.5, 2.5, 10):
        assert torch.allclose(compiled(q, k, v, c), run(q, k, v, c), atol=1e-5)
    assert counter.frame_count == 1


def test_a_captured_scalar_that_is_not_learned_is_compiled():
    number = torch.tensor(0.5)

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [flex_attention(q, k, v, lambda s, b, h, q, k: s * number / (number + 1))]

    assert_same(run, compiled(run), tensors(), [])


@pytest.mark.skipif(
    not hasattr(getattr(higher_order_ops, "BaseHOPVariable", None), "supports_aliasing"),
    reason="dynamo of this torch does not ask an operator whether its operands may share memory",
)
def test_views_of_one_projection_are_compiled_into_one_graph():
    def run(x: Tensor) -> list[Tensor]:
        q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
        return [flex_attention(q, k, v, lambda s, b, h, q, k: s + (k - q) * 0.1)]

    x = torch.randn(BATCH, TOKENS, 3, HEADS, DIM, requires_grad=True)
    assert_same(run, compiled(run), [x], [])
    views = [t.transpose(1, 2) for t in x.detach().unbind(2)]
    found = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")(*views)
    assert torch.allclose(found, flex_attention(*views), atol=1e-6)
