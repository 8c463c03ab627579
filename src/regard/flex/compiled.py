"""`flex_attention` inside `torch.compile`: one graph, also with `fullgraph=True`.

torch.compile takes no function as an argument of an operator. So `score_mod` and `mask_mod` are called once, with
positions of one element, inside of a higher-order operator: torch makes a graph of them, and each tensor that they
capture becomes an operand. When the whole graph is lowered, the higher-order operator traces that graph (`trace.py`)
and leaves what a call without torch.compile computes, as operators of torch and `regard::attend`. Gradients of q, k, v
and of captured tensors follow from these.
"""

from collections.abc import Callable, Sequence
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask

from regard.describe.mask import CallSizes, Mask
from regard.errors import RefusalError
from regard.flex.call import Result, compute, laid_out_as
from regard.flex.outside_derivatives import outside_derivatives
from regard.flex.read_block_mask import follows_function, lists_of, mask_of_block_mask, mask_of_lists
from regard.flex.trace import IndexByTensor, Mod, known_number
from regard.torch_internals import HigherOrder, is_higher_order, skip_frames, version
from regard.wide import wide_of

_library = torch.library.Library("regard", "FRAGMENT")
_library.define(
    "flex_form(Tensor q, Tensor k, Tensor v, Tensor modified, Tensor kept, Tensor[] at, Tensor[] lists) "
    "-> (Tensor out, Tensor lse, Tensor max_scores)"
)


def _form(
    q: Tensor, k: Tensor, v: Tensor, modified: Tensor, kept: Tensor, at: Sequence[Tensor], lists: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The form of the results; the end of the graph of the functions, from which their results are known.

    The results have a derivative by each tensor, or dynamo would take their tangents inside of `torch.func.jvp` for 0.
    """
    wide = wide_of(q.dtype)
    out = laid_out_as(q, q.new_empty((*q.shape[:3], v.shape[3])))
    read = q.sum() * k.sum() * v.sum() * modified.sum()
    return out + read.to(out.dtype), q.new_empty(q.shape[:3], dtype=wide) + read, q.new_empty(q.shape[:3], dtype=wide)


_library.impl("flex_form", _form, "CompositeImplicitAutograd")


def compute_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    wants_max: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`call.compute`, while dynamo traces it."""
    wide = wide_of(query.dtype)
    at = [
        torch.zeros((), dtype=wide, device="cpu"),
        *(torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(4)),
    ]
    lists = [] if block_mask is None else [t for t in lists_of(block_mask) if t is not None]

    def functions(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        modified, kept = at[0], at[1]
        with IndexByTensor():
            if score_mod is not None:
                modified = score_mod(at[0].clone(), *at[1:])  # it may write to the score
            if block_mask is not None:
                kept = block_mask.mask_mod(*at[1:])
        return torch.ops.regard.flex_form(q, k, v, modified, kept, at, lists)

    with IndexByTensor():  # from here on, dynamo knows that modes change, which it allows in no higher-order operator
        pass
    block = (0, 0) if block_mask is None else tuple(block_mask.BLOCK_SIZE)
    out, lse, most = _compute_graph(
        functions, query, key, value, scale=scale, modified=score_mod is not None, masked=block_mask is not None,
        follows=block_mask is not None and follows_function(block_mask), rows=block[0], columns=block[1],
        wants_max=wants_max,
    )  # fmt: skip
    return out, lse, most.detach() if wants_max else None


class _ComputeGraph(HigherOrder):
    """The higher-order operator: dynamo gives it the graph of `functions`, and the tensors that this graph reads."""

    def __init__(self) -> None:
        super().__init__("regard_flex_attention")

    def __call__(self, subgraph: Any, *operands: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(subgraph, GraphModule):  # torch.compile broke the graph, and calls with the function itself
            q, k, v = operands
            return _compute_uncompiled(subgraph, q, k, v, options["scale"], options["wants_max"])
        scale = known_number(options["scale"])  # a symbol from its second value on
        graph = subgraph.graph
        tensor_of = dict(zip(graph.find_nodes(op="placeholder"), operands, strict=True))
        end = next(node for node in graph.nodes if node.target is torch.ops.regard.flex_form)
        arguments: Any = end.args
        query, key, value, modified, kept, at, lists = arguments
        q, k, v = tensor_of[query], tensor_of[key], tensor_of[value]
        score_mod = _function(subgraph, modified, at, tensor_of) if options["modified"] else None
        mask: Mask | bool = True
        if options["masked"]:
            sizes = _sizes(q, k)
            block, read = (options["rows"], options["columns"]), [tensor_of[node] for node in lists]
            if options["follows"] and not any(t.is_inference() or version(t) for t in read):
                read = []  # the graph does not write to them, and need not make them
            with outside_derivatives():
                mask = mask_of_lists(read, block, _function(subgraph, kept, at[1:], tensor_of), sizes, q.device)
        found = compute(q, k, v, score_mod, mask, scale, options["wants_max"])
        return found.out, found.lse, _max_scores(found)


_compute_graph = _ComputeGraph()
skip_frames(_ComputeGraph.__call__)


def _compute_uncompiled(
    functions: Callable[..., object], q: Tensor, k: Tensor, v: Tensor, scale: float | None, wants_max: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The results from what `functions` has captured."""
    captured = getclosurevars(functions).nonlocals
    block_mask, mask = captured["block_mask"], True
    if block_mask is not None:
        with outside_derivatives():
            mask = mask_of_block_mask(block_mask, _sizes(q, k), q.device)
    found = compute(q, k, v, captured["score_mod"], mask, scale, wants_max)
    return found.out, found.lse, _max_scores(found)


def _sizes(q: Tensor, k: Tensor) -> CallSizes:
    return CallSizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2], 0)


def _max_scores(found: Result) -> Tensor:
    return torch.empty_like(found.lse) if found.max_scores is None else found.max_scores


def _function(module: GraphModule, result: Node, at: Sequence[Node], operands: dict[Node, Tensor]) -> Mod:
    """What the graph computes of positions, as a function of them; other operands are captured."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.graph_copy(module.graph, copies)
    graph.output(copies[result])
    graph.eliminate_dead_code()
    if any(is_higher_order(node.target) for node in graph.nodes):
        raise RefusalError(
            "torch.compile cannot compile a score_mod or mask_mod with a torch.autograd.Function or control flow of "
            "tensors: write it with torch's operators, or wrap the call of flex_attention in torch.compiler.disable."
        )
    for node in graph.find_nodes(op="call_function", target=torch.tensor):  # so that its element is known
        if not node.kwargs and isinstance(node.args[0], bool | int | float):
            node.target, node.args = torch.full, ((), node.args[0])
    copy = GraphModule(module, graph)

    def function(*positions: Tensor) -> Tensor:
        values = {**operands, **dict(zip(at, positions, strict=True))}
        return copy(*values.values())

    return function
