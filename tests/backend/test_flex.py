"""FlexAttention as on CUDA, one function for every length, run on a CPU by a compiler that counts graphs.

Only what inductor makes of the graph is missing here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import get_compilation_metrics
from torch.nn.attention import flex_attention

from regard import Alibi, Causal, Documents, KeyLengths, Mask, Prefix, TensorMask, Window
from regard.backend.flex import Flex, _compiled
from regard.backend.flex_blocks import blocks
from regard.dispatch.choose import choose
from regard.plan.distance import kept_by_distance
from regard.plan.pose import pose
from regard.plan.request import Request
from regard.state import State
from tests.conformance import CASES
from tests.oracle import Case, dense, worst

LONG = pytest.mark.exhaustive
PARTS_OF_OTHERS = ("window and sinks", "sinks learned per head", "t5")
"""What "everything" has as well."""


class Counting:
    """A compiler that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """The compiler, with gradients and log-sum-exp of tensors on the CPU, which torch refuses to compile."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    yield Counting()
    _compiled.cache_clear()


ONE = Counting()
"""Shared by the tests that count nothing."""


def why_compiled() -> list[str | None]:
    """What torch says of each compilation of this process; None: a function that it had not seen."""
    return [metrics.recompile_reason for metrics in get_compilation_metrics()]


def run(case: Case, compiler: Counting, *, tile: int = 16, lse: bool = True) -> State:
    """The state of a call, planned as for tensors on CUDA."""
    problem, operands = pose(Request(case.q, case.k, case.v, **case.words, lse=lse).resolved())
    plan = choose(replace(problem, device="cuda"), operands, Flex(tile=tile, compiler=compiler))
    return plan.run(operands)


def call(n: int, m: int | None = None, *, batch: int = 2, **words: Any) -> Case:
    m = n if m is None else m
    return Case(torch.randn(batch, 4, n, 16), torch.randn(batch, 2, m, 16), torch.randn(batch, 2, m, 16), words)


def is_right(case: Case, state: State) -> bool:
    out, lse = dense(case)
    return worst(state.out, out) < 5e-6 and worst(state.lse, lse) < 5e-6


@pytest.mark.exhaustive
def test_64_lengths_have_one_graph(counting: Counting):
    for n in range(17, 81):
        case = call(n, n + n % 7, batch=1, mask=Causal() & Window(9), bias=Alibi(4), softcap=3.0)
        assert is_right(case, run(case, counting))
    assert len(counting.graphs) == 1, why_compiled()


@pytest.mark.exhaustive
def test_where_a_part_of_a_cached_vector_begins_makes_no_graph(counting: Counting):
    kept_by_distance(Alibi(4), 4, torch.float32, first=-32, count=256)
    for n in (20, 32, 33):  # the parts begin at elements 13, 1 and 0
        case = call(n, n, batch=1, bias=Alibi(4))
        assert is_right(case, run(case, counting))
    assert len(counting.graphs) == 1, why_compiled()


def masks(n: int) -> list[Mask]:
    """32 masks, with 1 to 5 patterns each or one for every tile."""
    documents = [Causal() & Documents(torch.arange(n) // size) for size in range(5, 13)]
    lengths = [KeyLengths(torch.tensor([n - i])) & Window(11 + i) for i in range(8)]
    random = [TensorMask(torch.rand(n, n) > share / 10) for share in range(1, 9)]
    return [*documents, *lengths, *random, *(Causal() & (Window(5 + i) | Prefix(i)) for i in range(1, 9))]


def test_32_masks_have_one_graph(counting: Counting):
    for mask in masks(47):
        case = call(47, batch=1, mask=mask)
        assert is_right(case, run(case, counting))
    assert len(counting.graphs) == 1, why_compiled()


@pytest.mark.exhaustive
def test_sizes_of_one_are_what_torch_compiles_again(counting: Counting):
    for n, m in [(60, 60), (60, 7), (7, 60), (7, 7), (1, 60), (1, 7), (50, 99), (1, 70), (5, 40)]:
        case = call(n, m, mask=Causal() & Window(5))
        assert is_right(case, run(case, counting))
    assert len(counting.graphs) <= 6


@pytest.mark.exhaustive
def test_scales_and_softcaps_are_constants_of_a_graph(counting: Counting):
    for scale, softcap in [(0.5, 3.0), (0.25, 3.0), (0.5, 2.0), (0.5, 3.0)]:
        case = call(31, mask=Causal(), scale=scale, softcap=softcap)
        assert is_right(case, run(case, counting))
    assert len(counting.graphs) == 3


def test_torchs_kernel_for_decoding_serves_single_queries(counting: Counting):
    kernels = list[str]()
    for n in (1, 100):  # of 100 with two query heads each, its block would be larger than a tile
        case = call(n, 130, batch=1, mask=Causal())
        assert is_right(case, run(case, counting, tile=128))
        kernels += [
            node.args[6]["BACKEND"] for node in counting.graphs[-1].graph.nodes if "flex_attention" in str(node.target)
        ]
    assert kernels == ["AUTO", "TRITON"]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo reads it, and hides this warning
@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(
    "name", ["everything", *(pytest.param(n, marks=LONG) for n in ("biases added", *PARTS_OF_OTHERS))]
)
def test_gradients_are_those_of_the_definition(name: str):
    case = CASES[name]()
    up = torch.linspace(-9, 9, case.q[..., 0].numel() * case.v.shape[3], dtype=torch.float64).cos()
    up = up.view(*case.q.shape[:3], case.v.shape[3])
    wanted = leaves(case)
    found, truth = (
        torch.autograd.grad((out.double() * up).sum(), wanted) for out in (run(case, ONE).out, dense(case)[0])
    )
    for ours, exact in zip(found, truth, strict=True):
        assert worst(ours, exact) < 4e-6 * max(1.0, float(exact.abs().max()))


def leaves(case: Case) -> list[Tensor]:
    """What gradients flow to: q, k, v, and the tensors of the bias and of the sink."""
    bias, sink = case.words.get("bias"), case.words.get("sink")
    tensors = [case.q, case.k, case.v, *([] if bias is None else bias.tensors()), *([] if sink is None else [sink])]
    return [t.requires_grad_() for t in tensors if t.is_floating_point()]


COMPUTED = [
    pytest.param("values of another size", marks=LONG),
    pytest.param("causal, three tiles", marks=LONG),
    "a row of nothing but padding",
    "a mask per head",
    pytest.param("alibi, heads no power of two", marks=LONG),
    pytest.param("a bias tensor", marks=LONG),
    pytest.param("biases added", marks=LONG),
    pytest.param("cosine", marks=LONG),
    "everything",
]


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_case_of_the_table_is_what_the_formula_says(name: str):
    case = CASES[name]()
    assert worst(run(case, ONE, tile=128).out, dense(case)[0]) < 5e-6


@pytest.mark.usefixtures("counting")
def test_log_sum_exp_that_nobody_reads_is_not_computed():
    assert bool(run(call(31, mask=Causal()), ONE, lse=False).lse.isnan().all())


@pytest.mark.parametrize("name", ["window and sinks", "a mask per head", "ragged padding", "a tree of drafts"])
def test_blocks_list_the_tiles_of_the_mask(name: str):
    case = CASES[name]()
    problem, operands = pose(Request(case.q, case.k, case.v, **case.words).resolved())
    tiles = choose(problem, operands, Flex(tile=16)).schedule
    found = blocks(tiles, case.q.device)
    assert blocks(tiles, case.q.device) is found  # once for a schedule
    assert all(t.stride() == torch.empty(t.shape).stride() for t in (*found.kv, *found.q))
    grid = [-(-size // 16) * 16 for size in (tiles.queries, tiles.keys)]
    keep = torch.zeros(*tiles.maps, *grid, dtype=torch.bool)
    keep[..., : tiles.queries, : tiles.keys] = tiles.keep()
    cut = keep.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).transpose(3, 4)  # [maps, maps, rows, columns, 16, 16]
    assert torch.equal(found.patterns[found.number.long()] & cut, cut)
    inside = torch.zeros(grid[0], grid[1], dtype=torch.bool)
    inside[: tiles.queries, : tiles.keys] = True
    outside = ~inside.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2)
    full, some = (cut | outside).all(dim=(4, 5)), cut.any(dim=(4, 5))
    for lists, axes in ((found.kv, (2, 3)), (found.q, (3, 2))):
        for (count, order), listed in zip((lists[:2], lists[2:]), (some & ~full, full), strict=True):
            rows = listed.movedim(axes, (2, 3))
            assert torch.equal(count, rows.sum(3, dtype=torch.int32))
            first = torch.arange(rows.shape[3]) < count[..., None]
            assert torch.equal(torch.zeros_like(rows).scatter(3, order.long(), first), rows)
